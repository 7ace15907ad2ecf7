# asr-streams: every job is one command, and each sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Quiet pip and uv, in colour only on a terminal.
export UV_NO_PROGRESS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench chaos soak eval train clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(READY) ## Make the virtual environment, with the exact versions of constraints.txt

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else "asr-streams needs Python 3.11 or 3.12, and $(PYTHON) is %s: set PYTHON=" % sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --python $(BIN)/python --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## See it: live captions of eight calls, through real Kafka (ASR_DEMO_SECONDS bounds it)
	$(BIN)/asr demo

test: lint ## Check format, types and everything else, on a real Kafka
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(READY) ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) ## Measure latency, capacity, where the time goes, and the engine (20 minutes; JSON and plots in var/bench)
	$(BIN)/asr bench all --output-dir var/bench

chaos: $(READY) ## Kill 50 processes under 20 live calls and prove that nothing is lost (15 minutes; report in var/chaos)
	$(BIN)/asr chaos --channels 20 --kills 50 --strike-for-s 690 --output-dir var/chaos

soak: $(READY) ## Let 10,000 short calls through one set of workers and see that nothing grows (10 minutes; report in var/soak)
	$(BIN)/asr soak --calls 10000 --speed 4 --output-dir var/soak

eval: $(READY) ## Compare detectors of speech in noise (recordings in ASR_EVAL_AUDIO_DIR, else var/audio)
	$(BIN)/asr eval vad

train: $(READY) ## Make the bundled recogniser from nothing (hours, resumable; recordings in ASR_EVAL_AUDIO_DIR, else var/audio)
	$(BIN)/python -m ops.train all --audio-dir $${ASR_EVAL_AUDIO_DIR:-var/audio}

clean: ## Remove what can be made again
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
