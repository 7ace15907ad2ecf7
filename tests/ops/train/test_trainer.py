"""A whole run in miniature: a few updates on noise that stands for speech."""

from __future__ import annotations

import csv
import json
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile
import torch

from agents.inference.conformer.loader import load_model
from agents.inference.conformer.model import DecoderConfig, EncoderConfig
from ops.train.clips import Clip, Phone, Word, write_shard
from ops.train.trainer import ByteDropout, Recipe, Trainer

RECIPE = Recipe(
    encoder=EncoderConfig(
        output_size=16, attention_heads=2, linear_units=16, num_blocks=2, cnn_module_kernel=5, cnn_module_norm="layer_norm"
    ),
    decoder=DecoderConfig(num_blocks=1, attention_heads=2, linear_units=16),
    phone_layer=1,
    warmup_updates=2,
    updates=4,
    updates_per_epoch=2,
    cmvn_examples=5,
)


def clip(text: str, source: str, seed: int) -> Clip:
    words, phones, length = [], [], 4_000
    for number, word in enumerate(text.split()):
        words.append(Word(word, number * length, (number + 1) * length))
        phones.append(Phone(number % 30 + 1, number * length, (number + 1) * length))
    pcm = np.random.default_rng(seed).normal(0, 2000, len(words) * length).astype(np.int16)
    return Clip(name=f"{source}{seed}", source=source, speaker="s", text=text, words=tuple(words), phones=tuple(phones), pcm=pcm)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    orders = [clip("can i get a small latte with soy milk", "order", seed) for seed in range(8)]
    digits = [clip(word, "digit", 50) for word in ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")]
    write_shard(folder / "recorded.npz", [*orders, *digits, clip("please hold", "prompt", 99)])
    write_shard(tmp_path / "dev.npz", orders[:2])
    return folder


@pytest.fixture
def audio_dir(tmp_path: Path) -> Path:
    noise = np.random.default_rng(1).normal(0, 0.1, 8_000)
    with resources.files("ops.train.vad").joinpath("sources.tsv").open(encoding="utf-8") as table:
        heard = [
            row["path"] for row in csv.DictReader(table, delimiter="\t") if row["split"] == "train" and row["kind"] in {"noise", "music"}
        ]
    for name in (*heard, *(f"fsdd/recordings/{digit}_yweweler_0.wav" for digit in range(10))):
        path = tmp_path / "audio" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, noise, 8_000)
    return tmp_path / "audio"


def test_a_run_learns_stops_and_goes_on(tmp_path: Path, data_dir: Path, audio_dir: Path) -> None:
    def trainer() -> Trainer:
        return Trainer(RECIPE, tmp_path / "run", data_dir, audio_dir, "yweweler", workers=0)

    first = trainer()
    before = {name: parameter.clone() for name, parameter in first.model.named_parameters()}
    row = first.run_epoch()
    assert row["update"] == 2
    assert {"loss_ctc", "loss_attention", "loss_phones", "wer_orders", "wer_orders_mulaw", "wer_digits"} <= row.keys()
    assert any(not torch.equal(before[name], parameter) for name, parameter in first.model.named_parameters())

    second = trainer()
    assert (second.update, second.epoch) == (2, 1)
    for (name, ours), theirs in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    second.run_epoch()
    assert second.finished
    assert [json.loads(line)["epoch"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()] == [1, 2]
    assert (tmp_path / "run" / "curves.png").stat().st_size > 0

    loaded = load_model(tmp_path / "run" / "best")
    assert loaded.model.config == second.config
    assert loaded.config["tokenizer_conf"]["special_tokens"]["<sos>"] == loaded.model.config.sos


def test_a_run_begins_from_a_model_and_ends_inside_an_epoch(tmp_path: Path, data_dir: Path, audio_dir: Path) -> None:
    Trainer(RECIPE, tmp_path / "run", data_dir, audio_dir, "yweweler", 0).run_epoch()
    best = tmp_path / "run" / "best"
    recipe = msgspec.structs.replace(RECIPE, updates=3)
    second = Trainer(recipe, tmp_path / "second", data_dir, audio_dir, "yweweler", 0, begin=best)
    loaded = load_model(best).model
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, second.model.get_parameter(name)), name
    assert (tmp_path / "second" / "bpe.model").read_bytes() == (best / "bpe.model").read_bytes()
    assert second.update == 0
    assert [second.run_epoch()["update"] for _ in range(2)] == [2, 3]
    assert second.finished


def test_the_learning_rate_rises_stays_and_falls(tmp_path: Path, data_dir: Path, audio_dir: Path) -> None:
    trainer = Trainer(msgspec.structs.replace(RECIPE, updates=100, warmup_updates=10), tmp_path / "run", data_dir, audio_dir, "yweweler", 0)
    rates = []
    for trainer.update in (5, 10, 70, 85, 100):
        rates.append(trainer._learning_rate() / RECIPE.learning_rate)
    assert rates == pytest.approx([0.5, 1, 1, 0.5, 0])


def test_byte_dropout_keeps_the_mean() -> None:
    torch.manual_seed(1)
    dropout, inputs = ByteDropout(0.25), torch.ones(1000, 123)
    output = dropout(inputs)
    assert float(output.mean()) == pytest.approx(1, abs=0.01)
    assert float((output == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert dropout.eval()(inputs) is inputs
