"""Synthetic voices: what can be known without an engine, and those engines that are there."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ops.train import voices
from ops.train.voices import BASIC_ENGINES, NUMBER_ENGINES, MissingEngineError, check_engines, installed, speak

THERE = [name for name in (*BASIC_ENGINES, *NUMBER_ENGINES) if installed(name)]


def test_an_engine_that_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingEngineError, match=r"flite is not installed\. Install the Debian package flite"):
        check_engines(["flite"])


@pytest.mark.parametrize("spelling", voices._PICO_ACCENTS.values())
def test_each_accent_has_a_spelling_for_each_digit(spelling: tuple[str, ...]) -> None:
    assert len(spelling) == len(voices._SPOKEN_DIGITS) == len(voices._KOKORO_DIGITS)


def test_numbers_are_read_in_groups_and_sentences_are_not() -> None:
    number, sentence = ["one", "two", "three", "four", "five", "six", "seven", "eight"], ["my", "card", "number", "is", "one", "two"]
    read = {voices._in_groups(number, random.Random(seed)) for seed in range(40)}
    assert read == {"one two three, four five six, seven eight", "one two three four, five six seven eight", " ".join(number)}
    assert {voices._in_groups(sentence, random.Random(seed)) for seed in range(20)} == {" ".join(sentence)}


@pytest.mark.parametrize("name", THERE)
def test_an_engine_that_is_there_speaks(name: str) -> None:
    pcm, voice = speak("four two zero", random.Random(2), {name: 1.0})
    assert pcm.dtype == np.int16
    assert 8_000 < len(pcm) < 80_000
    assert np.abs(pcm.astype(np.int32)).max() > 1_000
    assert voice
