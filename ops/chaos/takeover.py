"""How long it took until all was well again: for each strike, channel by channel, from when frames were captured and answered.

Like the checker, this shares no code with the pipeline. *Takeover* counts on frames captured after the strike only, and ends with the
answer to the first of them from which on a whole second of frames was answered in time, and to all before it. *Stall* is the worst answer
to any frame of the channels that the struck process did not own, until the next strike: so it holds the return of the stopped and the
joining of successors. Frames that are on their way when something is struck count with that, not with what was struck before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Answers", "Mark", "Times", "distribution", "measure"]

#: The promise: a frame is answered within this time.
IN_TIME_MS: Final = 300.0
#: So long all frames must be in time for all to be well again: five frames of 200 ms.
_WELL_US: Final = 1_000_000
#: A channel none of whose frames is late within this time was not touched: in silence a dead recogniser is not missed.
_TOUCHED_US: Final = 3_000_000
#: Frames captured so long before a strike may still be on their way.
_ON_THE_WAY_US: Final = 300_000
_US_PER_MS: Final = 1_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that was done to the system.

    Attributes:
        at_us: when, Unix time in µs.
        what: ``kill``, ``stop``, ``continue``, ``leave`` (asked to end), ``join`` (started in addition).
        kind: of the strike that it belongs to.
        target: which process.
        partitions: those that it owned; its channels are on them.
        everybody: whether it serves all channels, as a broker does.
        sole: whether there was no other that could take over.
        note: more about it, for people.
    """

    at_us: int
    what: str
    kind: str
    target: str
    partitions: tuple[int, ...] = ()
    everybody: bool = False
    sole: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """The frames of one channel, in the order of capture.

    Attributes:
        partition: where they are.
        captured_us: when each one's last sample was captured, shape ``(n,)``.
        answered_us: when its first accepted answer could be read; where there is none, the largest number.
    """

    partition: int
    captured_us: NDArray[np.int64]
    answered_us: NDArray[np.int64]

    @property
    def latency_ms(self) -> NDArray[np.float64]:
        """How late each answer was."""
        return (self.answered_us - self.captured_us) / _US_PER_MS


@dataclass(slots=True)
class Times:
    """What a mark cost.

    Attributes:
        mark: what was done.
        takeover_ms: by channel, of those that were touched among the target's own.
        untouched: the target's channels of which no frame was late.
        unfinished: channels that were not well again when the next strike came; their takeover is counted up to it.
        stall_ms: the worst answer on other channels; None where there are none.
        stalled_channel: which one that was.
    """

    mark: Mark
    takeover_ms: dict[str, float] = field(default_factory=dict)
    untouched: int = 0
    unfinished: int = 0
    stall_ms: float | None = None
    stalled_channel: str = ""


def measure(marks: Sequence[Mark], channels: Mapping[str, Answers], end_us: int) -> list[Times]:
    """Return what each mark cost.

    Args:
        marks: in the order of time; those at the same moment are one blow, told of together.
        channels: by channel.
        end_us: when the run was over.
    """
    times = []
    for index, mark in enumerate(marks):
        together = [other for other in marks if abs(other.at_us - mark.at_us) < _ON_THE_WAY_US]
        until_us = min((other.at_us for other in marks[index + 1 :] if other not in together), default=end_us)
        struck = {number for other in together for number in other.partitions}
        everybody = any(other.everybody for other in together)
        times.append(_times(mark, channels, struck, everybody=everybody, until_us=until_us))
    return times


def _times(mark: Mark, channels: Mapping[str, Answers], struck: Collection[int], *, everybody: bool, until_us: int) -> Times:
    times = Times(mark)
    for name, answers in channels.items():
        if mark.everybody or answers.partition in mark.partitions:
            took_ms, finished = _takeover_ms(mark.at_us, until_us, answers)
            if took_ms is None:
                times.untouched += 1
            else:
                times.takeover_ms[name] = took_ms
                times.unfinished += not finished
        elif not everybody and answers.partition not in struck:
            first_us, last_us = mark.at_us - _ON_THE_WAY_US, until_us - _ON_THE_WAY_US
            during = (answers.captured_us >= first_us) & (answers.captured_us < last_us)
            worst_ms = float(answers.latency_ms[during].max(initial=0.0))
            if times.stall_ms is None or worst_ms > times.stall_ms:
                times.stall_ms, times.stalled_channel = worst_ms, name
    return times


def _takeover_ms(at_us: int, until_us: int, answers: Answers) -> tuple[float | None, bool]:
    """Return how long until all was well again, None where it always was; and whether it was before the next strike."""
    after = (answers.captured_us >= at_us) & (answers.captured_us < until_us)
    captured_us, answered_us = answers.captured_us[after], answers.answered_us[after]
    late = answers.latency_ms[after] > IN_TIME_MS
    if not late[captured_us < at_us + _TOUCHED_US].any():
        return None, True
    # For each frame, the first late one from it on.
    next_late = np.minimum.accumulate(np.where(late, captured_us, np.iinfo(np.int64).max)[::-1])[::-1]
    well = next_late - captured_us >= _WELL_US
    # The last second before the next strike cannot be looked at as a whole.
    well &= captured_us + _WELL_US <= until_us
    first_late = int(np.argmax(late))
    candidates = np.flatnonzero(well[first_late:])
    if not len(candidates):
        return (until_us - at_us) / _US_PER_MS, False
    # Silence may be answered, by another stage, before the speech ahead of it.
    return float(answered_us[: first_late + candidates[0] + 1].max() - at_us) / _US_PER_MS, True


def distribution(values_ms: Sequence[float]) -> dict[str, Any]:
    """Return count, p50, p95 and max, to a ms; None where there is nothing."""
    if not values_ms:
        return {"count": 0, "p50": None, "p95": None, "max": None}
    p50, p95, most = (round(float(value)) for value in np.percentile(values_ms, (50, 95, 100)))
    return {"count": len(values_ms), "p50": p50, "p95": p95, "max": most}
