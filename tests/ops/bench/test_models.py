from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from agents.features.fbank import Fbank
from agents.inference.conformer.loader import load_model
from agents.inference.conformer.streaming import StreamingEncoder
from ops.bench.models import Size, model_directory, write_random_model
from ops.demo.calls import clips, read_clip

SMALL = Size("2x64", layers=2, width=64, heads=2, units=128, kernel=15, vocabulary=160, decoder_layers=1)


def test_a_random_model_is_one_that_wenet_could_have_left(tmp_path: Path) -> None:
    write_random_model(tmp_path, SMALL, seed=3)
    loaded = load_model(tmp_path)
    assert loaded.model.config.encoder.output_size == 64
    assert len(loaded.vocabulary.tokens) == len(set(loaded.vocabulary.tokens)) == 160

    write_random_model(tmp_path / "again", SMALL, seed=3)
    again = load_model(tmp_path / "again")
    assert all(torch.equal(one, other) for one, other in zip(loaded.model.parameters(), again.model.parameters(), strict=True))


def test_it_is_sure_of_itself_and_often_blank(tmp_path: Path) -> None:
    write_random_model(tmp_path, SMALL)
    loaded = load_model(tmp_path)
    encoder = StreamingEncoder(loaded.model, slots=1)
    encoder.open([0])
    features = Fbank()([read_clip(clips()[0].file).tobytes()])[0]
    log_probs = np.concatenate([encoder.step([0], features[None, start : start + 23])[0] for start in range(0, len(features) - 22, 20)])
    blank = (log_probs.argmax(1) == loaded.model.config.blank).mean()
    assert 0.1 < blank < 0.99
    assert np.exp(log_probs.max(1)).mean() > 0.5


def test_a_model_that_was_given_is_taken_as_it_is(tmp_path: Path) -> None:
    write_random_model(tmp_path / "given", SMALL)
    assert model_directory(tmp_path / "given", tmp_path / "unused") == tmp_path / "given"
    assert not (tmp_path / "unused").exists()
