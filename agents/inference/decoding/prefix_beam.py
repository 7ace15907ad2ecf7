"""CTC prefix beam search over many open segments at once, frame by frame as they come, and greedy search.

The search is WeNet's: per frame the best ``beam`` tokens, then the best ``beam`` prefixes by the sum of all their alignments, with the
times of the best alignment. A segment's result depends on its own frames, hotwords and language model, on nothing else: not on what
shares the batch, nor on how its frames are cut into steps.

A segment lives in a *slot*: a row of arrays that are allocated once, 230 KB for 500 frames (20 s) and a beam of 10. An instance serves one
thread; several may work side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agents.inference.decoding import kernels
from agents.inference.decoding.hotwords import Hotwords
from agents.inference.decoding.lm import NgramLm

__all__ = ["BeamOptions", "GreedySearch", "Hypothesis", "NBest", "PartialPrefix", "PrefixBeamSearch", "token_times_ms"]

#: How long a token lasts where none is nearer; WeNet's.
_TOKEN_MS: Final = 100


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How to search.

    Attributes:
        beam: hypotheses that go on after each frame, and tokens looked at in each.
        max_frames: longest segment; 500 encoder frames of 40 ms are 20 s.
        blank: id of the blank.
        blank_skip: frames whose blank is at least this probable are taken as blank, without a look at other tokens; above 1: none.
            What it leaves out are alignments that have a token in such a frame. All of a segment's together are at most as probable as the
            sum of 1 - P(blank) over its skipped frames, so at most frames x (1 - ``blank_skip``): 0.0005 for 500 frames at 0.999999. The
            sum comes with each result as ``NBest.skipped_mass``. The pruning of hypotheses may move by as little.
    """

    beam: int = 10
    max_frames: int = 500
    blank: int = 0
    blank_skip: float = math.inf

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.beam < 2 or self.max_frames < 1 or self.blank < 0 or not self.blank_skip > 0:
            raise ValueError(f"beam must be at least 2, max_frames at least 1, blank not negative and blank_skip positive: {self}")


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One reading of a segment.

    Attributes:
        tokens: int32, L unit ids.
        frames: int32, L; the frame, counted from the segment's start, in which the best alignment has each token last.
        token_confidences: float32, L; each token's highest probability in its frames of that alignment.
        ctc_score: log-probability of all its alignments (natural).
        hotword_score: what its completed hotwords bring.
        lm_score: what the language model says, weight, bonus and penalties included.
    """

    tokens: NDArray[np.int32]
    frames: NDArray[np.int32]
    token_confidences: NDArray[np.float32]
    ctc_score: float
    hotword_score: float
    lm_score: float

    @property
    def score(self) -> float:
        """What hypotheses are ranked by."""
        return self.ctc_score + self.hotword_score + self.lm_score

    @property
    def confidence(self) -> float:
        """How sure the model is, 0 to 1: the CTC score per token, the end counted as one."""
        return math.exp(self.ctc_score / (len(self.tokens) + 1))


@dataclass(frozen=True, slots=True)
class NBest:
    """What a segment may say, best first.

    Attributes:
        hypotheses: at least one.
        frames: frames taken.
        skipped_frames: how many of them were taken as blank.
        skipped_mass: bound on the probability of all alignments that were left out by that.
    """

    hypotheses: tuple[Hypothesis, ...]
    frames: int
    skipped_frames: int
    skipped_mass: float

    @property
    def best(self) -> Hypothesis:
        """The first hypothesis."""
        return self.hypotheses[0]


@dataclass(frozen=True, slots=True)
class PartialPrefix:
    """The best prefix of an open segment.

    Attributes:
        tokens: int32 unit ids.
        stable: how many of them all hypotheses share: those stay, whatever follows, unless the slot's hotwords are exchanged.
    """

    tokens: NDArray[np.int32]
    stable: int


class PrefixBeamSearch:
    """Beam search in slots.

    >>> search = PrefixBeamSearch(slots=64, units=5_000)
    >>> search.open([7])
    >>> search.step([7], np.log(np.full((1, 5, 5_000), 1 / 5_000)))[0, -1]
    np.False_
    """

    def __init__(self, slots: int, units: int, options: BeamOptions | None = None, lm: NgramLm | None = None) -> None:
        """Allocate.

        Args:
            slots: segments that can be open at the same time.
            units: size of the model's vocabulary, blank included.
            options: how to search.
            lm: a language model for all slots.

        Raises:
            ValueError: the blank is no unit, or the language model was made for another vocabulary.
        """
        self.options = options or BeamOptions()
        self.units = units
        if self.options.blank >= units:
            raise ValueError(f"the blank is unit {self.options.blank}, but there are {units} units")
        if lm is not None and lm.units != units:
            raise ValueError(f"the language model was made for {lm.units} units, not {units}: make it from this model's units.txt")
        self._lm = NgramLm.none().tables if lm is None else lm.tables
        self._hotwords: list[Hotwords | None] = [None] * slots
        self._no_hotwords = Hotwords.none(units)
        self._beams = _allocate(slots, self.options)
        self._beams.frames[:] = -1
        skip = self.options.blank_skip
        self._skip_log_prob = math.log(skip) if skip <= 1 else math.inf

    def open(self, slots: ArrayLike, hotwords: Hotwords | None = None) -> None:
        """Begin segments in slots, whatever was there; they keep these hotwords to their end, unless ``swap`` says otherwise."""
        rows = self._rows(slots, opened=False)
        self._check_hotwords(hotwords)
        self._beams.loaded[rows] = 0
        kernels.clear(self._beams, rows, self._lm.start)
        for row in rows:
            self._hotwords[row] = hotwords

    def step(self, slots: ArrayLike, log_probs: NDArray[np.floating], lengths: ArrayLike | None = None) -> NDArray[np.bool_]:
        """Take frames.

        Args:
            slots: n different open slots.
            log_probs: (n, T, V) log-probabilities, natural; float32 is taken as it is, others are converted.
            lengths: (n,) frames that count in each row; all T if not given.

        Returns:
            (n, T), whether the best hypothesis had tokens after each frame; False after a row's length.

        Raises:
            ValueError: a slot is closed or would become too long, shapes differ (nothing was taken), or a frame holds no log-probabilities
                (the slots of the call are to be opened anew).
        """
        rows = self._rows(slots)
        values = np.ascontiguousarray(log_probs, np.float32)
        if values.ndim != 3 or values.shape[0] != len(rows) or values.shape[2] != self.units:
            raise ValueError(f"log_probs must have the shape ({len(rows)}, frames, {self.units}), not {values.shape}")
        counts = self._counts(rows, lengths, values.shape[1])
        wrong = kernels.load_log_probs(self._beams, rows, values, counts, self.options.blank, self._skip_log_prob)
        return self._take(rows, counts, values.shape[1], wrong)

    def step_top(
        self, slots: ArrayLike, log_probs: NDArray[np.floating], tokens: NDArray[np.integer], lengths: ArrayLike | None = None
    ) -> NDArray[np.bool_]:
        """Take frames whose best tokens are selected already, as on the device that the model runs on; the rest is as in ``step``.

        Args:
            slots: n different open slots.
            log_probs: (n, T, beam), best first.
            tokens: (n, T, beam) their ids.
            lengths: (n,) frames that count in each row.
        """
        rows = self._rows(slots)
        values = np.ascontiguousarray(log_probs, np.float32)
        ids = np.ascontiguousarray(tokens, np.int32)
        if values.ndim != 3 or values.shape[0] != len(rows) or values.shape[2] != self.options.beam or ids.shape != values.shape:
            expected = f"({len(rows)}, frames, {self.options.beam})"
            raise ValueError(f"log_probs and tokens must have the shape {expected}, not {values.shape} and {ids.shape}")
        if ids.size and (ids.min() < -1 or ids.max() >= self.units):
            raise ValueError(f"token ids must be below {self.units}")
        counts = self._counts(rows, lengths, values.shape[1])
        wrong = kernels.load_top(self._beams, rows, values, ids, counts, self.options.blank, self._skip_log_prob)
        return self._take(rows, counts, values.shape[1], wrong)

    def swap(self, slots: ArrayLike, hotwords: Hotwords | None) -> None:
        """Give open segments other hotwords, as if they had had them from their start.

        The frames so far are searched again (the best tokens of each are kept): 1 ms for 20 s. Slots that have them already are left alone.
        """
        rows = self._rows(slots)
        self._check_hotwords(hotwords)
        rows = np.array([row for row in rows if not _same(self._hotwords[row], hotwords)], np.int64)
        for row in rows:
            self._hotwords[row] = hotwords
        kernels.clear(self._beams, rows, self._lm.start)
        self._advance(rows)

    def hotwords(self, slot: int) -> Hotwords | None:
        """Return the hotwords of a slot."""
        return self._hotwords[slot]

    def partials(self, slots: ArrayLike) -> list[PartialPrefix]:
        """Return the best prefix of each slot."""
        rows = self._rows(slots)
        tokens = np.empty((len(rows), self._longest(rows)), np.int32)
        lengths = np.empty(len(rows), np.int32)
        common = np.empty(len(rows), np.int32)
        kernels.unwind(self._beams, rows, tokens, lengths, common)
        return [PartialPrefix(tokens[row, : lengths[row]].copy(), int(common[row])) for row in range(len(rows))]

    def finish(self, slots: ArrayLike) -> list[NBest]:
        """Return what each slot says if its segment ends here; the slots stay open and unchanged."""
        rows = self._rows(slots)
        shape = (len(rows), self.options.beam, self._longest(rows))
        scores = np.empty((*shape[:2], 3))
        lengths = np.empty(shape[:2], np.int32)
        tokens, frames = np.empty(shape, np.int32), np.empty(shape, np.int32)
        peaks = np.empty(shape, np.float32)
        for group, hotwords in self._groups(rows):
            outputs: tuple[NDArray[Any], ...] = (scores, lengths, tokens, frames, peaks)
            parts = [np.empty((len(group), *array.shape[1:]), array.dtype) for array in outputs]
            kernels.finish(self._beams, rows[group], hotwords.tables, self._lm, *parts)
            for array, part in zip(outputs, parts, strict=True):
                array[group] = part
        confidences = np.exp(peaks, where=np.arange(shape[2]) < lengths[..., None], out=np.zeros_like(peaks))
        results = []
        for row, slot in enumerate(rows):
            hypotheses = tuple(
                Hypothesis(
                    tokens[row, place, :length].copy(),
                    frames[row, place, :length].copy(),
                    confidences[row, place, :length].copy(),
                    *(float(score) for score in scores[row, place]),
                )
                for place, length in enumerate(lengths[row])
                if length >= 0
            )
            beams = self._beams
            results.append(NBest(hypotheses, int(beams.frames[slot]), int(beams.skipped[slot]), float(beams.skipped_mass[slot])))
        return results

    def close(self, slots: ArrayLike) -> None:
        """Forget segments; closed slots are no error."""
        rows = self._rows(slots, opened=False)
        self._beams.frames[rows] = -1
        for row in rows:
            self._hotwords[row] = None

    def compile(self) -> Self:
        """Run every compiled function once, so that the first audio does not wait for it; every slot must be closed."""
        frames = np.log(np.full((1, 1, self.units), 1 / self.units, np.float32))
        self.open([0])
        self.step([0], frames)
        top = np.full((1, 1, self.options.beam), -1.0, np.float32)
        self.step_top([0], top, np.full(top.shape, self.options.blank, np.int32))
        self.partials([0])
        self.finish([0])
        self.close([0])
        return self

    def _rows(self, slots: ArrayLike, *, opened: bool = True) -> NDArray[np.int64]:
        rows = np.atleast_1d(np.asarray(slots, np.int64))
        if rows.ndim != 1 or len(np.unique(rows)) != len(rows):
            raise ValueError("slots must be different")
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self._hotwords)):
            raise ValueError(f"slots count from 0 to {len(self._hotwords) - 1}")
        if opened and (closed := rows[self._beams.frames[rows] < 0]).size:
            raise ValueError(f"slot {closed[0]} is not open: open it first")
        return rows

    def _counts(self, rows: NDArray[np.int64], lengths: ArrayLike | None, frames: int) -> NDArray[np.int64]:
        counts = np.full(len(rows), frames, np.int64) if lengths is None else np.asarray(lengths, np.int64)
        if counts.shape != rows.shape or (counts < 0).any() or (counts > frames).any():
            raise ValueError(f"lengths must be {len(rows)} numbers from 0 to {frames}")
        after = self._beams.frames[rows] + counts
        if (after > self.options.max_frames).any():
            at = int(np.argmax(after))
            raise ValueError(f"slot {rows[at]} would hold {after[at]} frames of at most {self.options.max_frames}: end its segment before")
        return counts

    def _take(self, rows: NDArray[np.int64], counts: NDArray[np.int64], frames: int, wrong: int) -> NDArray[np.bool_]:
        if wrong >= 0:
            raise ValueError(f"slot {rows[wrong]} was given a frame that holds no log-probabilities")
        before = self._beams.frames[rows].astype(np.int64)
        self._advance(rows)
        index = np.arange(frames)
        at = np.minimum(before[:, None] + index, self.options.max_frames - 1)
        return np.asarray(self._beams.has_text[rows[:, None], at] & (index < counts[:, None]))

    def _advance(self, rows: NDArray[np.int64]) -> None:
        for group, hotwords in self._groups(rows):
            kernels.advance(self._beams, rows[group], hotwords.tables, self._lm, self.options.blank)

    def _groups(self, rows: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], Hotwords]]:
        """Return the places in ``rows`` of slots that have the same hotwords: one group, or two while a list is being exchanged."""
        groups: dict[int, tuple[list[int], Hotwords]] = {}
        for place, row in enumerate(rows):
            hotwords = self._hotwords[row] or self._no_hotwords
            groups.setdefault(id(hotwords), ([], hotwords))[0].append(place)
        return [(np.array(places, np.int64), hotwords) for places, hotwords in groups.values()]

    def _longest(self, rows: NDArray[np.int64]) -> int:
        nodes = self._beams.links[rows, :, kernels.NODE]
        real = np.arange(self.options.beam) < self._beams.counts[rows, None]
        depths = self._beams.depths[rows[:, None], np.where(real, nodes, 0)]
        return int(depths.max(initial=0))

    def _check_hotwords(self, hotwords: Hotwords | None) -> None:
        if hotwords is not None and hotwords.units != self.units:
            raise ValueError(f"the hotwords were compiled for {hotwords.units} units, not {self.units}: compile them for this model")


class GreedySearch:
    """The best token of each frame, repetitions and blanks dropped; in slots, as ``PrefixBeamSearch``."""

    def __init__(self, slots: int, max_frames: int = 500, blank: int = 0) -> None:
        """Allocate for segments of up to ``max_frames``."""
        self.max_frames = max_frames
        self.blank = blank
        self._taken = np.zeros(slots, np.int32)
        self._last = np.full(slots, blank, np.int32)
        self._lengths = np.zeros(slots, np.int32)
        self._tokens = np.empty((slots, max_frames), np.int32)
        self._frames = np.empty((slots, max_frames), np.int32)
        self._peaks = np.empty((slots, max_frames), np.float32)

    def open(self, slots: ArrayLike) -> None:
        """Begin segments in slots."""
        rows = np.atleast_1d(np.asarray(slots, np.int64))
        self._taken[rows] = 0
        self._last[rows] = self.blank
        self._lengths[rows] = 0

    def step(self, slots: ArrayLike, log_probs: NDArray[np.floating], lengths: ArrayLike | None = None) -> None:
        """Take frames (n, T, V) of n slots, or the first ``lengths`` of each.

        Raises:
            ValueError: a segment would become too long; nothing was taken.
        """
        rows = np.atleast_1d(np.asarray(slots, np.int64))
        values = np.ascontiguousarray(log_probs, np.float32)
        counts = np.full(len(rows), values.shape[1], np.int64) if lengths is None else np.asarray(lengths, np.int64)
        if (self._taken[rows] + counts > self.max_frames).any():
            raise ValueError(f"a segment holds at most {self.max_frames} frames: end it before")
        state = (self._taken, self._last, self._lengths, self._tokens, self._frames, self._peaks)
        kernels.greedy(rows, values, counts, self.blank, *state)

    def finish(self, slots: ArrayLike) -> list[Hypothesis]:
        """Return what each slot says so far; ``frames`` are each token's first, ``ctc_score`` is the sum of the tokens' peaks."""
        results = []
        for row in np.atleast_1d(np.asarray(slots, np.int64)):
            length = int(self._lengths[row])
            peaks = self._peaks[row, :length]
            tokens, frames = self._tokens[row, :length].copy(), self._frames[row, :length].copy()
            results.append(Hypothesis(tokens, frames, np.exp(peaks), float(peaks.sum(dtype=np.float64)), 0.0, 0.0))
        return results


def token_times_ms(
    frames: Sequence[int] | NDArray[np.integer], frame_ms: int = 40, offset_ms: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return when tokens start and end, from the frame of each.

    A token ends with its frame's start and lasts 100 ms; neighbours nearer than that meet half-way (on a frame, rounded down).

    Args:
        frames: of each token, ascending.
        frame_ms: what a frame stands for.
        offset_ms: where the segment starts.

    >>> token_times_ms([3, 4, 10])
    (array([ 20, 120, 300]), array([120, 160, 400]))
    """
    at = np.asarray(frames, np.int64)
    starts = np.maximum(at * frame_ms - _TOKEN_MS, 0)
    ends = at * frame_ms
    near = np.diff(at) * frame_ms < _TOKEN_MS
    middle = (at[1:] + at[:-1]) // 2 * frame_ms
    starts[1:] = np.where(near, middle, starts[1:])
    ends[:-1] = np.where(near, middle, ends[:-1])
    return starts + offset_ms, ends + offset_ms


def _same(one: Hotwords | None, other: Hotwords | None) -> bool:
    return one is other or (one is not None and other is not None and one.digest == other.digest)


def _allocate(slots: int, options: BeamOptions) -> kernels.Beams:
    """Return room for slots."""
    beam, frames = options.beam, options.max_frames
    nodes = 1 + beam * frames
    # At most half full, so that a search in it is short.
    children = 1 << (2 * nodes - 1).bit_length()
    return kernels.Beams(
        loaded=np.zeros(slots, np.int32),
        frames=np.zeros(slots, np.int32),
        counts=np.zeros(slots, np.int32),
        scores=np.zeros((slots, beam, 6)),
        links=np.zeros((slots, beam, 6), np.int32),
        words=np.zeros((slots, beam), np.uint64),
        nodes=np.zeros(slots, np.int32),
        parents=np.zeros((slots, nodes), np.int32),
        units=np.zeros((slots, nodes), np.int32),
        depths=np.zeros((slots, nodes), np.int32),
        children=np.zeros((slots, children), np.int32),
        marks=np.zeros(slots, np.int32),
        mark_before=np.zeros((slots, beam * frames), np.int32),
        mark_frame=np.zeros((slots, beam * frames), np.int32),
        mark_peak=np.zeros((slots, beam * frames), np.float32),
        top_log_probs=np.zeros((slots, frames, beam), np.float32),
        top_units=np.zeros((slots, frames, beam), np.int32),
        has_text=np.zeros((slots, frames), np.bool_),
        skipped=np.zeros(slots, np.int32),
        skipped_mass=np.zeros(slots),
    )
