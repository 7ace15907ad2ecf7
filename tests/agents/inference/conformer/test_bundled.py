"""The model that comes along: it is small, knows its domain by voices that it never heard, and listens to hotwords."""

from __future__ import annotations

import random
from collections.abc import Callable

import jiwer
import pytest

from agents.inference.conformer.engine import ConformerEngine, ConformerOptions
from agents.inference.decoding.hotwords import Hotwords
from agents.inference.decoding.units import UnitTable
from agents.inference.engine import FinalText
from agents.inference.models import wenet_directory
from ops.demo.calls import callers, read_clip
from ops.evaluate.wer.direct import recognise
from ops.train.phrases import phrase
from schemas.records import Hotword
from streams.settings import Settings

#: An account number that the model takes for "six five five eight".
_NUMBER, _SAID = "number_yweweler_8.flac", "six five five six"


@pytest.fixture(scope="module")
def engine() -> ConformerEngine:
    defaults = Settings.model_fields
    options = ConformerOptions(
        left_blocks=defaults["left_chunks"].default,
        lm_weight=defaults["lm_weight"].default,
        lm_word_bonus=defaults["lm_word_bonus"].default,
        ctc_weight=defaults["ctc_weight"].default,
        numbers=False,
        punctuation=False,
        capitals=False,
    )
    return ConformerEngine(wenet_directory(None), options)


@pytest.fixture(scope="module")
def final(engine: ConformerEngine) -> Callable[..., FinalText]:
    return lambda file, hotword_version="": recognise(engine, read_clip(file), hotword_version)[1]


def test_it_is_small() -> None:
    assert (wenet_directory(None) / "final.pt").stat().st_size <= 15_000_000


def test_it_writes_what_unheard_voices_order(final: Callable[..., FinalText]) -> None:
    orders = [clip for clip in callers() if clip.file.startswith("order_")]
    assert len(orders) >= 30
    assert jiwer.wer([clip.transcript for clip in orders], [final(clip.file).text for clip in orders]) <= 0.07


def test_a_number_that_is_taken_for_another_comes_right_with_its_hotword_among_50_000(
    engine: ConformerEngine, final: Callable[..., FinalText]
) -> None:
    folder = wenet_directory(None)
    units = UnitTable.read(folder / "units.txt", folder / "bpe.model")
    choose = random.Random(1)
    others = {phrase(choose) for _ in range(120_000)} - {_SAID}
    many = [Hotword(phrase=each, boost=0.01) for each in sorted(others)[:50_000]]
    assert len(many) == 50_000
    engine.use_hotwords("without", Hotwords.compile(many, units))
    engine.use_hotwords("with", Hotwords.compile([*many, Hotword(phrase=_SAID, boost=3.0)], units))

    assert final(_NUMBER).text != _SAID
    assert final(_NUMBER, "without").text != _SAID
    assert final(_NUMBER, "with").text == _SAID
