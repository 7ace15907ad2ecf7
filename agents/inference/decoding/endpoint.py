"""Where segments end when no voice activity detector says so: rules over the blanks of CTC.

A frame is silent if its blank is more probable than 0.8. A segment ends where its trailing silence and its length satisfy a rule; by
default

1. 5 s of silence, whether or not anything was said;
2. 1 s of silence after something was said;
3. 20 s, whatever is said.

The rules are looked at after each block of frames (5, or 200 ms), counted from the segment's start, so that a segment ends in the same
place however its frames arrive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["RULES", "Endpoint", "EndpointRule", "Endpoints"]


@dataclass(frozen=True, slots=True)
class EndpointRule:
    """A segment ends once all of these hold.

    Attributes:
        needs_text: the best hypothesis has tokens.
        silence_ms: the shortest trailing silence.
        length_ms: the shortest segment.
    """

    needs_text: bool
    silence_ms: int
    length_ms: int


#: WeNet's rules.
RULES: Final = (EndpointRule(False, 5_000, 0), EndpointRule(True, 1_000, 0), EndpointRule(False, 0, 20_000))

#: A frame whose blank is more probable than this is silent; WeNet's.
_BLANK_THRESHOLD: Final = 0.8


class Endpoints(NamedTuple):
    """What was found in one step.

    Attributes:
        frames: (n,) int64; after how many frames of the step each segment ends; 0: it does not.
        rules: (n,) int64; the number of the rule, from 1; 0: none.
    """

    frames: NDArray[np.int64]
    rules: NDArray[np.int64]


class Endpoint:
    """The rules over many open segments at once, each in a slot.

    >>> endpoint = Endpoint(slots=2)
    >>> endpoint.step([0, 1], np.log([[0.9] * 25, [0.7] * 25]), has_text=np.ones((2, 25), bool))
    Endpoints(frames=array([25,  0]), rules=array([2, 0]))
    """

    def __init__(
        self,
        slots: int,
        frame_ms: int = 40,
        block_frames: int = 5,
        rules: tuple[EndpointRule, ...] = RULES,
        blank_threshold: float = _BLANK_THRESHOLD,
    ) -> None:
        """Allocate; every slot is at its segment's start."""
        self._block_frames = block_frames
        self._threshold = math.log(blank_threshold)
        self._needs_text = np.array([rule.needs_text for rule in rules])
        self._silence_frames = np.array([math.ceil(rule.silence_ms / frame_ms) for rule in rules])
        self._length_frames = np.array([math.ceil(rule.length_ms / frame_ms) for rule in rules])
        self._frames = np.zeros(slots, np.int64)
        self._silent = np.zeros(slots, np.int64)

    def open(self, slots: ArrayLike) -> None:
        """Begin new segments in slots."""
        rows = np.asarray(slots, np.int64)
        self._frames[rows] = 0
        self._silent[rows] = 0

    def step(
        self, slots: ArrayLike, blank_log_probs: NDArray[np.floating], has_text: NDArray[np.bool_], lengths: ArrayLike | None = None
    ) -> Endpoints:
        """Take frames; say where segments end.

        A segment that has ended is to be opened anew; frames after its end were taken as part of it.

        Args:
            slots: n different slots.
            blank_log_probs: (n, T) log-probability of the blank (natural).
            has_text: (n, T) whether the best hypothesis has tokens after each frame.
            lengths: (n,) frames that count in each row; all if not given.
        """
        rows = np.atleast_1d(np.asarray(slots, np.int64))
        blank = np.atleast_2d(blank_log_probs)
        count = blank.shape[1]
        taken = np.full(len(rows), count) if lengths is None else np.asarray(lengths, np.int64)
        index = np.arange(1, count + 1)

        at = self._frames[rows, None] + index
        # The last frame that is not silent, counted like ``at``; what was silent before the step goes on.
        speech = np.where(blank > self._threshold, (self._frames - self._silent)[rows, None], at)
        silent = at - np.maximum.accumulate(speech, axis=1)

        holds = (
            (has_text[..., None] | ~self._needs_text) & (silent[..., None] >= self._silence_frames) & (at[..., None] >= self._length_frames)
        )
        holds &= ((at % self._block_frames == 0) & (index <= taken[:, None]))[..., None]
        ends = holds.any(axis=2)
        first = ends.argmax(axis=1) if count else np.zeros(len(rows), np.int64)
        ended = ends.any(axis=1)
        row = np.arange(len(rows))
        rules = holds[row, first].argmax(axis=1) + 1 if count else np.zeros(len(rows), np.int64)

        some = taken > 0
        self._silent[rows[some]] = silent[row[some], taken[some] - 1]
        self._frames[rows] += taken
        return Endpoints(np.where(ended, first + 1, 0), np.where(ended, rules, 0))
