"""How large the engine's steps are, and how long one waits to fill.

A step costs a part that is always the same and a part for each block. The first part is what batching saves: with 50 channels whose blocks
come at 50 different moments, an engine that never waited would do 50 small steps in the time of four large ones. The longer it waits, the
later the text. So the wait goes by how busy the engine is: none while it has time, and the longest that the text can bear when it has not.
It follows within seconds, for many calls may begin at once; the size follows slowly, for each one is another shape to compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

__all__ = ["AdaptivePacing", "FixedPacing", "Pace", "Pacing"]

#: Size of a step for up to so many active channels: room for all of them, in sizes that a GPU records its work for.
_SIZES: Final = ((20, 32), (40, 48), (None, 64))
#: How often the size is looked at, and the wait.
_SIZE_LOOK_S: Final = 10.0
_WAIT_LOOK_S: Final = 1.0
#: The size moves by this much, so that one busy moment does not change everything.
_SIZE_STEP: Final = 8
#: The wait moves by this share of the way.
_WAIT_SHARE: Final = 0.5
#: The engine has time while its steps take less than the first share of it, and none from the second on.
_IDLE_SHARE: Final = 0.1
_BUSY_SHARE: Final = 0.5
_SHORTEST_WAIT_MS: Final = 2.0
#: A quarter of what a frame may take on its whole way.
_LONGEST_WAIT_MS: Final = 50.0
_FIRST_WAIT_MS: Final = 10.0
#: What is remembered of a step after the next one: of the last 200 most counts.
_MEMORY: Final = 0.99
#: Fewer say nothing of what a step costs.
_FEWEST_STEPS: Final = 20
_MS_PER_S: Final = 1_000
#: A channel that speaks without a pause has a block every 200 ms.
_BLOCK_S: Final = 0.2
#: The engine's share of the time up to which a machine carries channels without falling behind now and then.
_FULL_SHARE: Final = 0.8


class Pace(NamedTuple):
    """How large a step may be, and how long to wait for it to fill."""

    max_batch: int
    max_wait_ms: float


class Pacing(Protocol):
    """Decides the pace of steps."""

    @property
    def channels(self) -> int:
        """How many channels of continuous speech the engine can follow; 0 while that is not known."""

    def pace(self, active: int) -> Pace:
        """Return the pace for that many open segments."""

    def observe(self, blocks: int, took_s: float) -> None:
        """Hear how long a step took."""


class FixedPacing:
    """Always the same pace."""

    def __init__(self, max_batch: int = 64, max_wait_ms: float = 5.0) -> None:
        self._pace = Pace(max_batch, max_wait_ms)
        #: It does not look.
        self.channels = 0

    def pace(self, active: int) -> Pace:
        """Return the pace."""
        return self._pace

    def observe(self, blocks: int, took_s: float) -> None:
        """Ignore it."""


class AdaptivePacing:
    """See the module. One thread uses it.

    Args:
        clock: seconds that only go on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._size_looked_s = self._wait_looked_s = clock()
        self._busiest = 0
        self._working_s = 0.0
        self._pace: Pace | None = None
        # Decaying sums of 1, n, n n, t, n t over the steps: n blocks took t.
        self._sums = [0.0] * 5

    def pace(self, active: int) -> Pace:
        """Return the pace for that many open segments."""
        self._busiest = max(self._busiest, active)
        now_s = self._clock()
        pace = self._pace or Pace(_size_for(active), _FIRST_WAIT_MS)
        if now_s >= self._size_looked_s + _SIZE_LOOK_S:
            pace = pace._replace(max_batch=_nearer(pace.max_batch, _size_for(self._busiest)))
            self._size_looked_s, self._busiest = now_s, active
        if now_s >= self._wait_looked_s + _WAIT_LOOK_S:
            pace = pace._replace(max_wait_ms=_wait_after(pace.max_wait_ms, self._working_s / (now_s - self._wait_looked_s)))
            self._wait_looked_s, self._working_s = now_s, 0.0
        self._pace = pace
        return pace

    def observe(self, blocks: int, took_s: float) -> None:
        """Hear how long a step took."""
        new = (1.0, blocks, blocks * blocks, took_s, blocks * took_s)
        self._sums = [_MEMORY * old + each for old, each in zip(self._sums, new, strict=True)]
        self._working_s += took_s

    @property
    def costs_s(self) -> tuple[float, float]:
        """What every step costs, and what each block adds, in seconds: the straight line that fits the last steps best."""
        count, blocks, squares, took, products = self._sums
        if not count:
            return 0.0, 0.0
        spread = squares - blocks * blocks / count
        each = max(0.0, (products - blocks * took / count) / spread) if spread > 1e-6 * squares else 0.0
        fixed = max(0.0, (took - each * blocks) / count)
        return fixed, each

    @property
    def channels(self) -> int:
        """How many channels of continuous speech the engine can follow at its longest wait; 0 while that is not known."""
        fixed, each = self.costs_s
        if not each or self._sums[0] < _FEWEST_STEPS:
            return 0
        steps = _BLOCK_S / (_LONGEST_WAIT_MS / _MS_PER_S + fixed)
        return max(0, int((_FULL_SHARE * _BLOCK_S - steps * fixed) / each))


def _size_for(active: int) -> int:
    return next(size for most, size in _SIZES if most is None or active <= most)


def _nearer(size: int, wanted: int) -> int:
    """Return the size that is one step nearer to another one."""
    return size + max(-_SIZE_STEP, min(_SIZE_STEP, wanted - size))


def _wait_after(wait_ms: float, busy: float) -> float:
    """Return the wait to go on with, after steps took that share of the time."""
    load = min(1.0, max(0.0, (busy - _IDLE_SHARE) / (_BUSY_SHARE - _IDLE_SHARE)))
    wanted_ms = _SHORTEST_WAIT_MS + load * (_LONGEST_WAIT_MS - _SHORTEST_WAIT_MS)
    return wait_ms + _WAIT_SHARE * (wanted_ms - wait_ms)
