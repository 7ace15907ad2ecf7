"""A model's units: how phrases are spelt in them, and what they read like."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["SPACE", "Spelling", "UnitTable", "is_cjk"]

#: What stands for a space in units: alone, or before the first piece of a word.
SPACE: Final = "▁"
_SPACES: Final = (SPACE, "<space>")
#: Chinese characters, each a unit and a word of its own; the range that WeNet's tokenisers know.
_CJK: Final = re.compile(r"([\u4e00-\u9fff])")
_LATIN: Final = re.compile(r"[^\W\d_\u3000-\u9fff]")
_SPECIAL: Final = re.compile(r"<.+>")
#: Distinct words whose spelling is remembered while a list is compiled.
_WORDS: Final = 65_536

#: Units of a phrase, or the reason why it cannot be spelt.
Spelling = list[int] | str


def is_cjk(text: str) -> bool:
    """Return whether a unit is one Chinese character."""
    return _CJK.fullmatch(text) is not None


class UnitTable:
    """The units of a model, ``units[id]``, and its way of splitting text into them.

    Attributes:
        units: all units, by id.
        ids: the id of each.
        pieces: whether there are word pieces; else units are characters.
    """

    def __init__(self, units: Sequence[str], bpe_model: Path | None = None) -> None:
        """Take units, and the SentencePiece model where there is one.

        Args:
            units: by id, special ones (``<blank>``, ``<unk>``) included.
            bpe_model: says how words are split; without it the longest unit that fits is taken, from left to right.

        Raises:
            ValueError: two units are the same, or the file is no SentencePiece model.
        """
        self.units = tuple(units)
        self.ids = {unit: index for index, unit in enumerate(self.units)}
        if len(self.ids) != len(self.units):
            raise ValueError("a unit stands twice in the model's units")
        # What text may be spelt with: a phrase that looks like a special unit is not one.
        self._spelling = {unit: index for unit, index in self.ids.items() if not _SPECIAL.fullmatch(unit)}
        self.pieces = any(len(unit) > 1 and unit.startswith(SPACE) for unit in self.units)
        self._space = next((self.ids[space] for space in _SPACES if space in self.ids), -1)
        self._longest = max(map(len, self._spelling), default=0)
        letters = list(filter(_LATIN.search, self._spelling))
        self._upper = bool(letters) and not any(unit != unit.upper() for unit in letters)
        self._lower = bool(letters) and not any(unit != unit.lower() for unit in letters)
        self._bpe = _load_bpe(bpe_model) if bpe_model is not None else None
        self._split = lru_cache(_WORDS)(self._longest_match)

    @classmethod
    def read(cls, path: Path, bpe_model: Path | None = None) -> UnitTable:
        """Read WeNet's ``units.txt``: a unit and its id in each line.

        Raises:
            ValueError: a line is not like that, or ids are missing; the message names it.
        """
        units: dict[int, str] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            unit, _, index = line.rpartition(" ")
            if not unit or not index.isdecimal():
                raise ValueError(f"{path}, line {number}: a unit and its id are expected, not {line!r}")
            units[int(index)] = unit
        if sorted(units) != list(range(len(units))):
            raise ValueError(f"{path}: the ids must be 0 to {len(units) - 1}, each once")
        return cls([units[index] for index in range(len(units))], bpe_model)

    def __len__(self) -> int:
        return len(self.units)

    def spell(self, phrases: Sequence[str]) -> list[Spelling]:
        """Return the units of each phrase, or why there are none.

        Full-width forms are made plain and spaces single; letters take the case of the units if those have but one. Each Chinese
        character is a unit. In a model of pieces other words begin with ``▁``; in one of characters ``▁`` stands between words.
        """
        texts = [" ".join(unicodedata.normalize("NFKC", phrase).split()) for phrase in phrases]
        if self._upper:
            texts = [text.upper() for text in texts]
        elif self._lower:
            texts = [text.lower() for text in texts]
        return [self._spell(text) for text in texts]

    def text(self, tokens: Sequence[int] | NDArray[np.integer]) -> str:
        """Return what tokens read like, as they are: pieces joined, spaces for ``▁``."""
        joined = "".join(" " if self.units[token] in _SPACES else self.units[token] for token in tokens)
        return joined.replace(SPACE, " ").strip()

    def _spell(self, text: str) -> Spelling:
        if not text:
            return "it is empty"
        units: list[int] = []
        for part in _CJK.split(text) if self.pieces else [text]:
            if not part.strip():
                continue
            if not self.pieces:
                units += [self._space if character == " " else self._spelling.get(character, -1) for character in part]
            elif is_cjk(part):
                units.append(self._spelling.get(part, -1))
            elif self._bpe is not None:
                units += [self._spelling.get(piece, -1) for piece in self._bpe.encode(part, out_type=str)]
            else:
                for word in part.split():
                    units += self._split(SPACE + word)
        return units if min(units) >= 0 else self._unknown(text)

    def _longest_match(self, word: str) -> tuple[int, ...]:
        """Split a word into the longest units that fit from left to right, among the splits that spell all of it; (-1,) if none does."""
        ends = len(word)
        spells = [False] * ends + [True]
        for start in range(ends - 1, -1, -1):
            nearest = range(start + 1, min(start + self._longest, ends) + 1)
            spells[start] = any(spells[end] and word[start:end] in self._spelling for end in nearest)
        if not spells[0]:
            return (-1,)
        units: list[int] = []
        start = 0
        while start < ends:
            fits = (end for end in range(min(start + self._longest, ends), start, -1) if spells[end] and word[start:end] in self._spelling)
            end = next(fits)
            units.append(self._spelling[word[start:end]])
            start = end
        return tuple(units)

    def _unknown(self, text: str) -> str:
        known = set().union(*self._spelling)
        missing = sorted({character for character in text if character != " " and character not in known})
        if missing:
            return f"the model has no unit for {', '.join(missing)}"
        return "the model has no units that spell it"


def _load_bpe(path: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} is no SentencePiece model: {error}") from error
