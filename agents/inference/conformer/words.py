"""From a model's units to words with times and confidences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from agents.inference.conformer.finals import Reading
from agents.inference.decoding.prefix_beam import token_times_ms
from agents.inference.decoding.units import SPACE, is_cjk
from schemas.records import Word

__all__ = ["languages_of", "words_of"]

_SPACES: Final = (SPACE, "<space>")
_SPECIAL: Final = re.compile(r"<[^<>]+>")
_LATIN: Final = re.compile("[a-z]", re.IGNORECASE)


def words_of(reading: Reading, units: Sequence[str], start_ms: int, end_ms: int) -> tuple[Word, ...]:
    """Return the words of a final.

    A unit that begins with ``▁`` begins a word, and so does one after a lone ``▁`` or beside a Chinese character, each of which is a word
    of its own. A word is as sure as the least sure of its units.

    Args:
        reading: what the segment says.
        units: the model's units, by id.
        start_ms: the segment's start; times are counted from where that is.
        end_ms: its end, which no word outlasts.
    """
    starts, ends = token_times_ms(reading.frames, offset_ms=start_ms)
    starts, ends = (np.clip(times, start_ms, end_ms) for times in (starts, ends))
    words: list[Word] = []
    begins = True
    for place, token in enumerate(reading.tokens):
        unit = units[token]
        if unit in _SPACES:
            begins = True
            continue
        if _SPECIAL.fullmatch(unit):
            continue
        text, chinese = unit.removeprefix(SPACE).lower(), is_cjk(unit)
        confidence = round(float(reading.token_confidences[place]), 2)
        if begins or chinese or unit.startswith(SPACE) or not words:
            words.append(Word(text=text, start_ms=int(starts[place]), end_ms=int(ends[place]), confidence=confidence))
        else:
            last = words[-1]
            words[-1] = Word(
                text=last.text + text, start_ms=last.start_ms, end_ms=int(ends[place]), confidence=min(last.confidence, confidence)
            )
        begins = chinese
    return tuple(words)


def languages_of(units: Sequence[str]) -> list[str]:
    """Return the languages that a model's units can spell, of those that there are rules for.

    >>> languages_of(["<blank>", "<unk>", "▁the", "好"])
    ['en', 'zh']
    """
    plain = [unit for unit in units if not _SPECIAL.fullmatch(unit)]
    english, chinese = any(_LATIN.search(unit) for unit in plain), any(is_cjk(unit) for unit in plain)
    return ["en"] * english + ["zh"] * chinese
