"""A word n-gram that the beam search listens to (shallow fusion), read from an ARPA file.

Words are what units spell: a piece that begins with ``▁``, a lone ``▁`` and ``<space>`` end the word before them, and a Chinese character
is a word of its own. A hypothesis is scored when a word ends,

    weight x ln P(word | words before) + word_bonus,  and + oov_penalty if the model does not know the word;

until then its word counts as the likeliest that begins like it (without context), or as unknown as soon as none does. At the segment's end
the last word is ended, and the sentence.

Words are found by a 64-bit hash of their spelling, however it is cut into units. That no two of the model's words share one is checked;
that an unknown word shares one with a known word has a chance of (words and their beginnings) / 2**64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.inference.decoding import kernels
from agents.inference.decoding.units import SPACE, UnitTable, is_cjk

__all__ = ["ArpaError", "NgramLm"]

_LN10: Final = math.log(10.0)
_START, _END, _UNKNOWN = "<s>", "</s>", "<unk>"
_SPACES: Final = (SPACE, "<space>")
_SPECIAL: Final = re.compile(r"<.+>")
#: Odd, so that no power of it vanishes; otherwise arbitrary.
_BASE: Final = 0x9E3779B97F4A7C15
_BITS: Final = 0xFFFFFFFFFFFFFFFF


class ArpaError(ValueError):
    """The file is no usable ARPA model; the message names the line."""


class _Ngram(NamedTuple):
    words: tuple[str, ...]
    log_prob: float
    backoff: float


@dataclass(frozen=True, slots=True)
class NgramLm:
    """A language model for one vocabulary of units.

    Attributes:
        units: size of that vocabulary.
        order: longest n-gram.
        tables: the model, flat.
    """

    units: int
    order: int
    tables: kernels.LmTables

    @classmethod
    def read(
        cls,
        path: Path,
        units: UnitTable,
        *,
        weight: float = 0.5,
        word_bonus: float = 0.0,
        oov_penalty: float = -10.0,
        sentence_end: bool = True,
        ignore_case: bool = False,
    ) -> NgramLm:
        """Read an ARPA file.

        Args:
            path: the file.
            units: the model's units.
            weight: of the language model's log-probability (natural), at least 0.
            word_bonus: for each word, so that the model does not prefer few words.
            oov_penalty: for each word that the model does not know, at most 0; added to the weighted log-probability of ``<unk>``, if any.
            sentence_end: whether a segment's end counts as ``</s>``.
            ignore_case: compare words and units in lower case.

        Raises:
            ArpaError: the file is not as the format demands.
            ValueError: a parameter is out of range.
        """
        if not weight >= 0 or not oov_penalty <= 0 or not math.isfinite(weight + word_bonus + oov_penalty):
            raise ValueError(f"weight must be at least 0 and oov_penalty at most 0, not {weight} and {oov_penalty}")
        ngrams = list(_read_arpa(path))
        if ignore_case:
            ngrams = [ngram._replace(words=tuple(map(_lower, ngram.words))) for ngram in ngrams]
        words = [ngram.words[0] for ngram in ngrams if len(ngram.words) == 1]
        ids = {word: index for index, word in enumerate(words)}
        if len(ids) != len(words):
            repeated = next(word for index, word in enumerate(words) if ids[word] != index)
            raise ArpaError(f"{path}: the word {repeated!r} stands twice" + (" when case is ignored" if ignore_case else ""))
        nodes, edges = _graph(path, ngrams, ids)
        texts = list(map(_lower, units.units)) if ignore_case else list(units.units)
        unigrams = {ngram.words[0]: ngram.log_prob for ngram in ngrams if len(ngram.words) == 1}
        tables = kernels.LmTables(
            True,
            float(weight),
            float(word_bonus),
            float(oov_penalty),
            ids.get(_UNKNOWN, -1),
            unigrams.get(_UNKNOWN, 0.0),
            nodes.ids.get((_START,), 0),
            ids.get(_END, -1) if sentence_end else -1,
            *_unit_tables(texts),
            *_word_table(unigrams, ids),
            *edges,
            np.array(nodes.backoffs),
            np.array([nodes.longest(context[1:]) if context else 0 for context in nodes.ids], np.int32),
            len(words),
        )
        return cls(len(units), max(len(ngram.words) for ngram in ngrams), tables)

    @classmethod
    def none(cls) -> NgramLm:
        """Return what stands for no language model."""
        flags, keys, ids, values = np.zeros(1, np.uint8), np.zeros(1, np.uint64), np.zeros(1, np.int32), np.zeros(1)
        arrays = (flags, keys, keys, keys, ids, values, keys, values, ids, values, ids)
        return cls(0, 0, kernels.LmTables(False, 0.0, 0.0, 0.0, -1, 0.0, 0, -1, *arrays, 1))

    def score(self, tokens: list[int] | NDArray[np.integer]) -> float:
        """Return what a whole segment's tokens bring."""
        ids = np.asarray(tokens, np.int32)
        return float(kernels.follow_lm(self.tables, ids, np.empty(len(ids)), np.empty(len(ids))))


class _Nodes:
    """Contexts that words have been seen in; 0 is the empty one."""

    def __init__(self) -> None:
        self.ids: dict[tuple[str, ...], int] = {(): 0}
        self.backoffs = [0.0]

    def add(self, context: tuple[str, ...], backoff: float) -> None:
        self.ids[context] = len(self.ids)
        self.backoffs.append(backoff)

    def longest(self, words: tuple[str, ...]) -> int:
        """Return the longest context that some words end with."""
        while words not in self.ids:
            words = words[1:]
        return self.ids[words]


def _read_arpa(path: Path) -> Iterator[_Ngram]:
    """Yield the n-grams of a file, by order, in natural logarithms."""
    expected: dict[int, int] = {}
    found: dict[int, int] = {}
    section = -1
    number = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text or (section < 0 and text != "\\data\\"):
            continue
        if text == "\\data\\":
            section = 0
        elif text == "\\end\\":
            break
        elif match := re.fullmatch(r"\\(\d+)-grams:", text):
            section = int(match[1])
            if section != len(found) + 1 or section not in expected:
                raise ArpaError(f"{path}, line {number}: {section}-grams are not expected here")
            found[section] = 0
        elif section == 0:
            match = re.fullmatch(r"ngram\s+(\d+)\s*=\s*(\d+)", text)
            if match is None:
                raise ArpaError(f"{path}, line {number}: 'ngram N=COUNT' is expected, not {text!r}")
            expected[int(match[1])] = int(match[2])
        else:
            fields = text.split()
            try:
                backoff = float(fields[section + 1]) if len(fields) == section + 2 else 0.0
                log_prob = float(fields[0])
            except (ValueError, IndexError):
                fields = []
            if len(fields) not in (section + 1, section + 2) or math.isnan(log_prob + backoff):
                wanted = f"a log-probability, {section} words and perhaps a back-off are expected"
                raise ArpaError(f"{path}, line {number}: {wanted}, not {text!r}")
            found[section] += 1
            yield _Ngram(tuple(fields[1 : section + 1]), log_prob * _LN10, backoff * _LN10)
    else:
        raise ArpaError(f"{path} ends in line {number} without \\end\\: it is not an ARPA file, or not all of it")
    if found != expected or not found.get(1):
        raise ArpaError(f"{path}: \\data\\ announces {expected} n-grams, the file holds {found}")


def _graph(
    path: Path, ngrams: list[_Ngram], ids: dict[str, int]
) -> tuple[_Nodes, tuple[NDArray[np.uint64], NDArray[np.float64], NDArray[np.int32]]]:
    """Return the contexts, and the edges (context, word) → log-probability and next context, as a hash table."""
    order = max(len(ngram.words) for ngram in ngrams)
    nodes = _Nodes()
    for ngram in ngrams:
        if len(ngram.words) < order:
            nodes.add(ngram.words, ngram.backoff)
        elif order == 1:
            break
    keys = np.empty(len(ngrams), np.uint64)
    log_probs = np.empty(len(ngrams))
    targets = np.empty(len(ngrams), np.int32)
    for index, (words, log_prob, _) in enumerate(ngrams):
        context, word = words[:-1], words[-1]
        if context not in nodes.ids or word not in ids:
            missing = " ".join(context) if word in ids else word
            raise ArpaError(f"{path}: the n-gram {' '.join(words)!r} stands without {missing!r}")
        keys[index] = nodes.ids[context] * len(ids) + ids[word] + 1
        log_probs[index] = log_prob
        targets[index] = nodes.longest(words if len(words) < order else words[1:])
    if len(np.unique(keys)) != len(keys):
        raise ArpaError(f"{path}: an n-gram stands twice")
    table, (table_log_probs, table_targets) = _hash_table(keys, log_probs, targets)
    return nodes, (table, table_log_probs.astype(np.float64), table_targets.astype(np.int32))


def _hash_table(keys: NDArray[np.uint64], *values: NDArray[np.generic]) -> tuple[NDArray[np.uint64], list[NDArray[np.generic]]]:
    """Return a hash table of keys, at most half full, and the values in the places of their keys."""
    table = np.zeros(1 << (2 * max(len(keys), 1) - 1).bit_length(), np.uint64)
    places = np.empty(len(keys), np.int64)
    kernels.insert_keys(table, keys, places)
    placed = []
    for value in values:
        array = np.zeros(len(table), value.dtype)
        array[places] = value
        placed.append(array)
    return table, placed


def _lower(word: str) -> str:
    return word if _SPECIAL.fullmatch(word) else word.lower()


def _code(character: str) -> int:
    """Return a number of 64 bits for a character, spread by splitmix64."""
    key = (ord(character) + 1) * _BASE & _BITS
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB & _BITS
    return key ^ (key >> 31)


def _unit_tables(units: list[str]) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint64]]:
    """Return what each unit does to words, the hash of its text, and the factor that its length puts on what stands before."""
    flags = np.zeros(len(units), np.uint8)
    hashes = np.zeros(len(units), np.uint64)
    powers = np.ones(len(units), np.uint64)
    for index, unit in enumerate(units):
        text = unit
        if unit in _SPACES:
            flags[index], text = kernels.ENDS_WORD, ""
        elif unit == _UNKNOWN:
            flags[index] = kernels.SPELLS  # no word contains it, so that its word is unknown
        elif _SPECIAL.fullmatch(unit):
            text = ""
        elif is_cjk(unit):
            flags[index] = kernels.ENDS_WORD | kernels.SPELLS | kernels.CLOSES_WORD
        elif unit.startswith(SPACE):
            flags[index], text = kernels.ENDS_WORD | kernels.SPELLS, unit.removeprefix(SPACE)
        else:
            flags[index] = kernels.SPELLS
        *_, (value, power) = _prefix_hashes(text)
        hashes[index], powers[index] = value, power
    return flags, hashes, powers


def _prefix_hashes(text: str) -> Iterator[tuple[int, int]]:
    """Yield the hash of each beginning of a text, the empty one first, and the base to the power of its length."""
    value, power = 0, 1
    yield value, power
    for character in text:
        value = (value * _BASE + _code(character)) & _BITS
        power = power * _BASE & _BITS
        yield value, power


def _word_table(unigrams: dict[str, float], ids: dict[str, int]) -> tuple[NDArray[np.uint64], NDArray[np.int32], NDArray[np.float64]]:
    """Return a hash table of all words and their beginnings: the word that ends there, and the best unigram that begins so."""
    spelt: dict[int, str] = {}
    words: dict[int, int] = {}
    best: dict[int, float] = {}
    for word, log_prob in unigrams.items():
        if _SPECIAL.fullmatch(word):
            continue
        beginnings = list(_prefix_hashes(word))[1:]
        for length, (value, _) in enumerate(beginnings, 1):
            if spelt.setdefault(value or 1, word[:length]) != word[:length]:
                raise ArpaError(f"{word[:length]!r} and {spelt[value or 1]!r} have the same hash: leave one of the words out")
            best[value or 1] = max(best.get(value or 1, -math.inf), log_prob)
        words[beginnings[-1][0] or 1] = ids[word]
    keys = np.fromiter(spelt, np.uint64, len(spelt))
    table, (entry_words, entry_best) = _hash_table(
        keys, np.array([words.get(key, -1) for key in spelt], np.int32), np.array([best[key] for key in spelt], np.float64)
    )
    return table, entry_words.astype(np.int32), entry_best.astype(np.float64)
