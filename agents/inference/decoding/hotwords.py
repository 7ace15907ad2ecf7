"""Hotwords: phrases that recognition is to favour, compiled into one automaton over the model's units.

The rule: while a hypothesis ends with the beginning of a phrase, each token of that counts the phrase's boost; a completed phrase counts
its length times its boost, for good; at the segment's end what an unfinished phrase has earned is taken back. So at any time

    bonus = tokens of the longest phrase beginning that the hypothesis ends with x boost + sum over completed phrases of length x boost

and a phrase just completed counts twice until the hypothesis moves on. Phrases may overlap and contain one another; each counts. Where one
beginning belongs to several phrases the highest boost counts. The order of a list means nothing.

Compiled hotwords are never changed: a new list is a new object, and segments that are open keep theirs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agents.inference.decoding import kernels
from agents.inference.decoding.units import UnitTable
from schemas.digest import hotword_digest
from schemas.records import Hotword

__all__ = ["FORMAT", "MAX_PHRASE_UNITS", "STATE", "Hotwords", "RejectedPhrase"]

#: Longer phrases are refused: nobody says the same 100 units twice, and one of them widens the table that all are sorted in.
MAX_PHRASE_UNITS: Final = 100

#: A state of the automaton: what it counts, and where it leads.
STATE: Final = np.dtype(
    [
        ("mask", np.uint64),  # bit (unit & 63) of units that lead on from here or from a beginning that this one ends with, where few do
        ("partial", np.float64),  # what this beginning counts while it lasts
        ("output", np.float64),  # what all phrases that end here bring
        ("best", np.float64),  # the most that partial + output can be after one more unit
        ("first", np.int32),  # states that follow: first to stop, sorted by unit
        ("stop", np.int32),
        ("jump", np.int32),  # the longest other beginning that this one ends with and that leads on; the root if there is none
        ("row", np.int32),  # of HotwordTables.bits, the units that lead on from a beginning where many do; -1: none
    ]
)
_FILES: Final = kernels.HotwordTables._fields
#: Of the files that ``save`` writes.
FORMAT: Final = 2


@dataclass(frozen=True, slots=True)
class RejectedPhrase:
    """A phrase that cannot be favoured, and why."""

    phrase: str
    reason: str


@dataclass(frozen=True, slots=True)
class Hotwords:
    """A compiled list.

    Attributes:
        digest: SHA-256 of the list's content, hexadecimal; the same for any order.
        units: size of the vocabulary that it was compiled for.
        phrases: different phrases in it.
        rejected: what was left out.
        tables: the automaton.
    """

    digest: str
    units: int
    phrases: int
    rejected: tuple[RejectedPhrase, ...]
    tables: kernels.HotwordTables

    @classmethod
    def compile(cls, phrases: Iterable[Hotword], units: UnitTable) -> Hotwords:
        """Compile a list for a model's units.

        Of phrases that are spelt alike the highest boost counts. A phrase that cannot be used is left out and reported.
        """
        listed = list(phrases)
        spellings = units.spell([hotword.phrase for hotword in listed])
        rejected: list[RejectedPhrase] = []
        tokens: list[list[int]] = []
        boosts: list[float] = []
        for hotword, spelling in zip(listed, spellings, strict=True):
            reason = ""
            if isinstance(spelling, str):
                reason = spelling
            elif not math.isfinite(hotword.boost):
                reason = f"its boost is {hotword.boost}, which is no number"
            elif len(spelling) > MAX_PHRASE_UNITS:
                reason = f"it has {len(spelling)} units; {MAX_PHRASE_UNITS} are the most"
            else:
                tokens.append(spelling)
                boosts.append(hotword.boost)
            if reason:
                rejected.append(RejectedPhrase(hotword.phrase, reason))
        tables, count = _build(tokens, np.array(boosts), len(units))
        return cls(hotword_digest(listed), len(units), count, tuple(sorted(rejected, key=lambda one: (one.phrase, one.reason))), tables)

    @classmethod
    def none(cls, units: int) -> Hotwords:
        """Return the empty list."""
        tables, count = _build([], np.empty(0), units)
        return cls(hotword_digest(()), units, count, (), tables)

    def bonuses(self, tokens: Sequence[int] | NDArray[np.integer]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return, after each token, what completed phrases have brought, and what an unfinished one adds for the time being."""
        ids = np.asarray(tokens, np.int32)
        earned, pending = np.empty(len(ids)), np.empty(len(ids))
        kernels.follow_hotwords(self.tables, ids, earned, pending)
        return earned, pending

    def save(self, directory: Path) -> None:
        """Write the list into a new directory, as files that ``load`` can map into memory."""
        directory.mkdir(parents=True)
        for name in _FILES:
            np.save(directory / f"{name}.npy", getattr(self.tables, name))
        about = {
            "format": FORMAT,
            "digest": self.digest,
            "units": self.units,
            "phrases": self.phrases,
            "rejected": [[one.phrase, one.reason] for one in self.rejected],
        }
        (directory / "hotwords.json").write_text(json.dumps(about, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Hotwords:
        """Map a list that was written by ``save``: processes that load the same files share their memory.

        Raises:
            ValueError: it was written by another version.
        """
        about = json.loads((directory / "hotwords.json").read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise ValueError(f"{directory} holds hotwords of format {about['format']}, not {FORMAT}: compile the list again")
        # Copy-on-write: for Numba a read-only array is another type, which would compile everything twice.
        arrays = (np.asarray(np.load(directory / f"{name}.npy", mmap_mode="c")) for name in _FILES)
        rejected = tuple(RejectedPhrase(*one) for one in about["rejected"])
        return cls(about["digest"], about["units"], about["phrases"], rejected, kernels.HotwordTables(*arrays))


def _build(phrases: list[list[int]], boosts: NDArray[np.float64], units: int) -> tuple[kernels.HotwordTables, int]:
    """Return the automaton, and how many different phrases it holds.

    The trie is built depth by depth, sorted by (parent, unit), so that the children of each state get consecutive numbers.
    """
    lengths = np.array([len(phrase) for phrase in phrases], np.int64)
    longest = int(lengths.max(initial=0))
    table = np.full((len(phrases), longest), -1, np.int64)
    table[np.arange(longest) < lengths[:, None]] = np.fromiter(chain.from_iterable(phrases), np.int64, int(lengths.sum()))

    at = np.zeros(len(phrases), np.int64)
    ends = np.zeros(len(phrases), np.int64)
    state_parents, state_units, depth_sizes = [np.zeros(1, np.int64)], [np.full(1, -1, np.int64)], [1]
    total = 1
    for depth in range(longest):
        rows = np.flatnonzero(lengths > depth)
        edges, places = np.unique(at[rows] * units + table[rows, depth], return_inverse=True)
        at[rows] = total + places
        ends[rows] = at[rows]
        state_parents.append(edges // units)
        state_units.append(edges % units)
        depth_sizes.append(len(edges))
        total += len(edges)

    parents = np.concatenate(state_parents)
    units_of = np.concatenate(state_units)
    depths = np.repeat(np.arange(len(depth_sizes)), depth_sizes)
    states = np.zeros(total, STATE)
    children = np.bincount(parents[1:], minlength=total)
    states["stop"] = 1 + np.cumsum(children)
    states["first"] = states["stop"] - children

    # The highest boost among the phrases that end in each state; then, from the deepest up, among those that pass through it.
    boost = np.full(total, -np.inf)
    np.maximum.at(boost, ends, boosts)
    boost[0] = 0.0
    final = np.zeros(total, bool)
    final[ends] = True
    final[0] = False
    states["output"][final] = (depths * boost)[final]
    stop = total
    for size in reversed(depth_sizes[1:]):
        level = slice(stop - size, stop)
        np.maximum.at(boost, parents[level], boost[level])
        stop -= size
    boost[0] = 0.0
    states["partial"] = depths * boost

    roots = np.zeros(units, np.int32)
    first_level = slice(1, 1 + depth_sizes[1]) if longest else slice(1, 1)
    roots[units_of[first_level]] = np.arange(first_level.start, first_level.stop)
    many = np.flatnonzero(children > kernels.MANY_CHILDREN)
    many = many[many > 0]
    states["row"] = -1
    states["row"][many] = np.arange(len(many))
    own_bits, own_ranks = _rows(states["row"][parents], units_of, (max(len(many), 1), -(-units // 64)))
    gains, bits = np.zeros(total), np.zeros_like(own_bits)
    tables = kernels.HotwordTables(states, units_of.astype(np.int32), roots, np.zeros(units), gains, bits, own_bits, own_ranks)
    kernels.link_hotwords(tables, parents.astype(np.int32), np.zeros(total, np.int32))
    return tables, int(final.sum())


def _rows(rows: NDArray[np.int32], units_of: NDArray[np.int64], shape: tuple[int, int]) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Return the bits of the units that lead on from states with a row, and how many of them stand before each 64 units.

    Args:
        rows: (N,) the row of each state's parent; -1: none.
        units_of: (N,) the unit that leads to each state; the root, the first one, has none.
        shape: of the result.
    """
    bits, counts = np.zeros(shape, np.uint64), np.zeros(shape, np.int32)
    children = 1 + np.flatnonzero(rows[1:] >= 0)
    places = rows[children], units_of[children] >> 6
    np.bitwise_or.at(bits, places, np.uint64(1) << (units_of[children] & 63).astype(np.uint64))
    np.add.at(counts, places, 1)
    return bits, np.cumsum(counts, axis=1, dtype=np.int32) - counts
