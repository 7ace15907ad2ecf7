"""What the segments are worth, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from agents.vad.segmenter import Closed, Rules, Segmenter
from agents.vad.spectrum import HOP_SAMPLES
from ops.evaluate.vad.testset import TestScene, regions

__all__ = ["ErrorMs", "Figures", "Segment", "Tally", "segments_of"]

_HOP_MS: Final = 10
#: A region comes back if one segment, and no other, covers so much of it.
_COVERED: Final = 0.9
#: So much around speech is no noise: pre-roll, tail and closing reach there without any mistake.
_MARGIN_HOPS: Final = 30


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment that was returned, in hops; with the first decision for speech in it, and one past the last."""

    start: float
    end: float
    onset: int
    last: int


class ErrorMs(msgspec.Struct, frozen=True, kw_only=True):
    """Decision against reference; positive is late."""

    p50: float | None = None
    p95: float | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. These names are the keys of the JSON that the command writes, and stay as they are.

    Attributes:
        false_trigger_rate: segments that touch no reference speech, of all segments returned.
        noise_time_triggered: the share of the time without speech (300 ms off any) that lies in segments.
        segment_merge_accuracy: reference regions that come back as exactly one segment that covers 90 % of them.
        speech_kept: the share of the hops of speech that lie in segments.
        missed_speech: the rest.
        onset_error_ms: the first decision against the region's start, for the regions that came back: its median, and the P95 of its size.
        end_error_ms: the same for its end.
        cpu_ms_per_channel_second: CPU time of the detector alone.
        segments: how many were returned.
        cancelled: how many were begun and taken back.
        regions: how many there are.
        seconds: how much was heard.
        word_errors: the share of words that are wrong on its segments, by set and recogniser; None where not measured.
    """

    false_trigger_rate: float | None
    noise_time_triggered: float | None
    segment_merge_accuracy: float | None
    speech_kept: float | None
    missed_speech: float | None
    onset_error_ms: ErrorMs
    end_error_ms: ErrorMs
    cpu_ms_per_channel_second: float | None = None
    segments: int
    cancelled: int
    regions: int
    seconds: float
    word_errors: dict[str, float] | None = None


def segments_of(speech: NDArray[np.bool_], rules: Rules, samples: int) -> tuple[list[Segment], int]:
    """Return the segments that decisions give, and how many were cancelled."""
    segmenter = Segmenter(rules)
    events = segmenter.advance(0, speech) + segmenter.finish(samples, "session_end")
    closed = [event for event in events if isinstance(event, Closed)]
    found = []
    for event in closed:
        first, last = event.start // HOP_SAMPLES, -(-event.end // HOP_SAMPLES)
        inside = first + np.flatnonzero(speech[first:last])
        found.append(Segment(event.start / HOP_SAMPLES, event.end / HOP_SAMPLES, int(inside[0]), int(inside[-1]) + 1))
    begun = sum(type(event).__name__ == "Opened" for event in events)
    return found, begun - len(closed)


@dataclass(slots=True)
class Tally:
    """Adds up scenes."""

    segments: int = 0
    cancelled: int = 0
    false: int = 0
    regions: int = 0
    whole: int = 0
    speech_hops: int = 0
    kept_hops: int = 0
    noise_hops: int = 0
    triggered_hops: int = 0
    seconds: float = 0.0
    onsets: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def add(self, scene: TestScene, found: Sequence[Segment], cancelled: int) -> None:
        """Add what came back of a scene."""
        hops = len(scene.speech)
        covered = np.zeros(hops, np.bool_)
        for segment in found:
            first, last = int(segment.start), min(hops, int(np.ceil(segment.end)))
            covered[first:last] = True
            self.false += not scene.speech[first:last].any()
        wide = np.zeros(hops, np.bool_)
        for begin, end in regions(scene.speech):
            self._region(begin, end, found)
            wide[max(0, begin - _MARGIN_HOPS) : end + _MARGIN_HOPS] = True
        self.segments += len(found)
        self.cancelled += cancelled
        self.speech_hops += int(scene.speech.sum())
        self.kept_hops += int((scene.speech & covered).sum())
        self.noise_hops += int((~wide).sum())
        self.triggered_hops += int((covered & ~wide).sum())
        self.seconds += scene.seconds

    def _region(self, begin: int, end: int, found: Sequence[Segment]) -> None:
        self.regions += 1
        touching = [segment for segment in found if segment.start < end and segment.end > begin]
        if len(touching) != 1:
            return
        (segment,) = touching
        if min(segment.end, end) - max(segment.start, begin) >= _COVERED * (end - begin):
            self.whole += 1
            self.onsets.append((segment.onset - begin) * _HOP_MS)
            self.ends.append((segment.last - end) * _HOP_MS)

    def figures(self, cpu_ms: float | None = None, word_errors: dict[str, float] | None = None) -> Figures:
        """Return what it comes to."""
        kept = _share(self.kept_hops, self.speech_hops)
        return Figures(
            false_trigger_rate=_share(self.false, self.segments),
            noise_time_triggered=_share(self.triggered_hops, self.noise_hops),
            segment_merge_accuracy=_share(self.whole, self.regions),
            speech_kept=kept,
            missed_speech=None if kept is None else 1 - kept,
            onset_error_ms=_errors(self.onsets),
            end_error_ms=_errors(self.ends),
            cpu_ms_per_channel_second=cpu_ms,
            segments=self.segments,
            cancelled=self.cancelled,
            regions=self.regions,
            seconds=round(self.seconds, 2),
            word_errors=word_errors,
        )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _errors(errors_ms: Sequence[float]) -> ErrorMs:
    if not errors_ms:
        return ErrorMs()
    return ErrorMs(p50=float(np.median(errors_ms)), p95=float(np.percentile(np.abs(errors_ms), 95)))
