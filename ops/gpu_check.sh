#!/bin/sh
# Check and measure the engine on a GPU: the tests that need one, then its steps by batch and precision, with CUDA graphs and without.
# Usage: ops/gpu_check.sh [OUTPUT_DIR]   (about 5 minutes; ASR_MODEL_DIR names a model, else a random one is taken)
set -eu

out="${1:-var/bench}"
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"

"$python" - <<'PYTHON'
import sys, torch
if not torch.cuda.is_available():
    sys.exit("gpu_check: no GPU can be used here; see whether nvidia-smi shows one, and whether torch was built for it")
print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda, "bf16" if torch.cuda.is_bf16_supported() else "")
PYTHON

mkdir -p "$out"
# Those that compare with the processor are skipped where there is no GPU, so here they must have run.
"$python" -m pytest -q -p no:cacheprovider tests/agents/inference/conformer -k on_a_gpu -rs
"$python" -m ops.bench engine --device cuda --json "$out/engine-cuda.json" --plot "$out/engine-cuda.png" --no-pacing
"$python" -m ops.bench render "$out/engine-cuda.json"
