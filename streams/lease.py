"""Whether this process may still speak for its partitions: not after it stood still for so long that another may own them.

A worker that was frozen (SIGSTOP, a suspended machine) wakes up in the middle of what it was doing, and does not know yet that it was
replaced. Its commits are refused, and readers drop its records by their epoch; but on a compacted topic its record would still take the
place of its successor's. So whoever finds that time has passed without it waits, before it sends anything, until its group has answered.

To be cut off from the group's coordinator is no such case: where the process ran all the while, the group will tell it before it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["TICK_S", "Lease"]

#: How often the process is to show that it runs: several times within the shortest session timeout.
TICK_S: Final = 0.05


class Lease:
    """See the module. Its calls may come from several threads.

    Args:
        timeout_s: the group declares a member dead of which it has heard nothing for this long.
        clock: seconds that go on while a process is frozen.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._ticked_s: float | None = None
        #: When it was found that time had passed; None while there is no doubt.
        self._woken_s: float | None = None
        #: The first generation of the group that it has confirmed since then.
        self._generation: int | None = None

    def tick(self) -> None:
        """Show that the process runs."""
        self._look()
        self._ticked_s = self._clock()

    def confirm(self, generation: int, asked_s: float) -> None:
        """Hear that the group knows this member.

        Args:
            generation: as a member of this generation.
            asked_s: when it was asked: an answer to an earlier question, lying around since then, says nothing.
        """
        self._look()
        if self._woken_s is not None and asked_s >= self._woken_s and self._generation is None:
            self._generation = generation

    def holds(self, generation: int) -> bool:
        """Return whether to speak as an owner of partitions that were assigned in a generation."""
        self._look()
        return self._woken_s is None or (self._generation is not None and generation >= self._generation)

    def _look(self) -> None:
        now_s = self._clock()
        if self._ticked_s is not None and now_s - self._ticked_s > self._timeout_s:
            self._woken_s, self._ticked_s, self._generation = now_s, now_s, None
