"""From decisions about hops to segments of speech: a pure function of the decisions, however they arrive.

The definition, with times as configured (defaults in brackets):

* A segment opens at the first hop of speech, and starts the *pre-roll* (300 ms) before it, but not before the end of the segment
  before, nor before the audio.
* It closes once a pause has lasted the *closing* time (300 ms), and ends the *tail* (200 ms) after its last hop of speech. The tail
  being at most the closing, audio up to there is certain to belong as soon as that hop is decided; nothing certain is taken back.
* If its speech, from first to last hop, is shorter than the *minimum* (300 ms), it is cancelled instead.
* No segment exceeds the *cap* (20 s). Over the cap's last quarter the pause that closes shrinks in a straight line from the closing
  to nothing, so that a long pause is taken early and, if none comes, a short one late. In speech without any pause the cut falls on
  the cap; what goes on right there opens the next segment, without pre-roll, and is not subject to the minimum: it is the rest of
  something longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from agents.vad.spectrum import HOP_SAMPLES
from streams.settings import Settings

__all__ = ["Cancelled", "Closed", "CutReason", "Event", "Opened", "Rules", "Segmenter", "Standing"]

CutReason = Literal["pause", "cap", "session_end", "timeout", "gap"]


@dataclass(frozen=True, slots=True)
class Opened:
    """A segment starts at a sample."""

    segment: int
    start: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The open segment ends before a sample."""

    segment: int
    start: int
    end: int
    reason: CutReason


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The open segment held too little speech, which ended at ``speech_end``; its audio was certain up to ``end``."""

    segment: int
    start: int
    speech_end: int
    end: int


Event = Opened | Closed | Cancelled


@dataclass(frozen=True, slots=True)
class Rules:
    """The configured times, in samples."""

    closing: int
    minimum: int
    preroll: int
    tail: int
    cap: int

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        """Return the rules as configured; where no detector decides, no segment is too short."""
        return cls(
            closing=settings.samples(settings.vad_closing_ms),
            minimum=settings.samples(settings.vad_min_speech_ms) if settings.vad != "off" else 0,
            preroll=settings.samples(settings.vad_preroll_ms),
            tail=settings.samples(settings.vad_tail_ms),
            cap=settings.samples(settings.vad_max_segment_ms),
        )


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """Where a segmenter stands: all that it must know to go on.

    Attributes:
        segment: number of the open segment, or of the next.
        open: whether one is open.
        start: its first sample.
        first_speech: where its speech began.
        last_speech: one past its last sample of speech so far.
        rest: it is what a cut at the cap left over.
        floor: no segment may start before this.
        cut: where the cap cut the segment before in speech; -1 if it did not.
    """

    segment: int = 0
    open: bool = False
    start: int = 0
    first_speech: int = 0
    last_speech: int = 0
    rest: bool = False
    floor: int = 0
    cut: int = -1


# The pause that closes begins to shrink at three quarters of the cap.
_SHRINKS_FROM: Final = (3, 4)


def _hop_ceiling(sample: int) -> int:
    """Return the first end of a hop at or after a sample."""
    return -(-sample // HOP_SAMPLES) * HOP_SAMPLES


class Segmenter:
    """One channel's segments."""

    def __init__(self, rules: Rules, standing: Standing | None = None) -> None:
        #: The rules in force; assign to follow others.
        self.rules = rules
        #: Where it stands; assign to go on from there.
        self.standing = standing or Standing()

    def restart(self, floor: int) -> None:
        """Go on from audio that begins anew at a sample; no segment may be open."""
        self.standing = msgspec.structs.replace(self.standing, floor=max(floor, self.standing.floor), cut=-1)

    @property
    def certain_end(self) -> int:
        """Up to where audio certainly belongs to the open segment: it ends here if no more speech comes. It only grows."""
        now = self.standing
        return min(now.last_speech + self.rules.tail, self._closes_at(), now.start + self.rules.cap)

    def earliest_start(self, next_hop: int) -> int:
        """Return the first sample that a segment still to open could start at, if decisions so far reach to a hop.

        While one is open, the next can reach back into it if it is cancelled.
        """
        onset = self._closes_at() if self.standing.open else next_hop * HOP_SAMPLES
        return max(self.standing.floor, onset - max(self.rules.preroll, HOP_SAMPLES))

    def advance(self, first_hop: int, speech: NDArray[np.bool_]) -> list[Event]:
        """Take the decisions of the hops that follow.

        Args:
            first_hop: the first one's number; hops are neither skipped nor repeated.
            speech: whether each is speech.

        Returns:
            What follows from them, in order.
        """
        events: list[Event] = []
        if not len(speech):
            return events
        edges = np.flatnonzero(np.diff(speech)) + 1
        bounds = [0, *edges.tolist(), len(speech)]
        for begin, end in pairwise(bounds):
            span = (first_hop + begin) * HOP_SAMPLES, (first_hop + end) * HOP_SAMPLES
            if speech[begin]:
                self._speak(*span, events)
            elif self.standing.open and span[1] >= self._closes_at():
                self._close(self._pause_reason(), events)
        return events

    def finish(self, end: int, reason: CutReason) -> list[Event]:
        """End the audio at a sample, up to which all hops have been given: an open segment ends with it at the latest."""
        events: list[Event] = []
        if self.standing.open:
            self._close(reason, events, end)
        return events

    def _speak(self, begin: int, end: int, events: list[Event]) -> None:
        """Take a stretch of speech, cutting it at the cap as often as needed."""
        while begin < end:
            if not self.standing.open:
                self._open(begin, events)
            cap = self.standing.start + self.rules.cap
            if end < cap:
                self.standing = msgspec.structs.replace(self.standing, last_speech=end)
                return
            self.standing = msgspec.structs.replace(self.standing, last_speech=cap)
            self._close("cap", events)
            self.standing = msgspec.structs.replace(self.standing, cut=cap)
            begin = _hop_ceiling(cap)

    def _open(self, onset: int, events: list[Event]) -> None:
        now = self.standing
        rest = now.cut >= 0 and onset - now.cut < HOP_SAMPLES
        start = now.cut if rest else max(onset - self.rules.preroll, now.floor)
        self.standing = msgspec.structs.replace(now, open=True, start=start, first_speech=onset, last_speech=onset, rest=rest, cut=-1)
        events.append(Opened(now.segment, start))

    def _closes_at(self) -> int:
        """Return the end of the silent hop with which the open segment closes, if no more speech comes."""
        now, closing, cap = self.standing, self.rules.closing, self.rules.cap
        shrinking = cap - cap * _SHRINKS_FROM[0] // _SHRINKS_FROM[1]
        # The pause q - last that closes at q is closing * (start + cap - q) / shrinking, in the cap's last quarter.
        late = -(-(closing * (now.start + cap) + now.last_speech * shrinking) // (closing + shrinking))
        return _hop_ceiling(max(min(now.last_speech + closing, late), now.last_speech + 1))

    def _pause_reason(self) -> CutReason:
        return "pause" if self._closes_at() - self.standing.last_speech >= self.rules.closing else "cap"

    def _close(self, reason: CutReason, events: list[Event], audio_end: int | None = None) -> None:
        now = self.standing
        end = self.certain_end if audio_end is None else min(self.certain_end, audio_end)
        speech_end = min(now.last_speech, end)
        if speech_end - now.first_speech < self.rules.minimum and not now.rest:
            events.append(Cancelled(now.segment, now.start, speech_end, end))
            floor = now.floor
        else:
            events.append(Closed(now.segment, now.start, end, reason))
            floor = end
        self.standing = Standing(segment=now.segment + 1, floor=floor)
