"""The second pass: segments whose final is out, once more through another engine; its text stands beside the final as ``refined``.

It has time, and no say: a final is out before its second pass begins, and is never changed by it. If the second engine cannot keep up, or
is gone, segments go without a second pass: an input is not settled as long as its segment waits for one, so none may wait for long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from agents.inference import metrics
from agents.inference.batcher import Batcher
from agents.inference.engine import Block, Engine, FinalText, Finish, Hypothesis, Opening, SegmentKey

__all__ = ["SecondPass"]

log = logging.getLogger(__name__)

#: Segments that may wait for it: their inputs are not settled meanwhile, and a stage reads on only up to a number of those.
_MOST_WAITING: Final = 64
#: One that waits longer goes without: an offset that is not committed for 30 s is alarmed, and all after it is read again in a restart.
_LONGEST_WAIT_S: Final = 20.0


class SecondPass:
    """See the module. All calls belong on the event loop.

    Args:
        engine: one that was started.
        refined: told of each segment that was taken, exactly once: its text, or None if there is none.
    """

    def __init__(self, engine: Engine, refined: Callable[[SegmentKey, FinalText | None], None]) -> None:
        self.engine = engine
        self._refined = refined
        self._batcher = Batcher(engine, self)
        #: Segments by since when they wait, the longest waiting first.
        self._waiting: dict[SegmentKey, float] = {}
        self._broken = False

    def start(self) -> None:
        """Begin."""
        self._batcher.start()

    def stop(self) -> None:
        """End; blocks."""
        self._batcher.stop()

    def take(self, opening: Opening, blocks: Sequence[Block], finish: Finish) -> bool:
        """Take a segment, whole; return False if it goes without."""
        self._give_up_overdue()
        if self._broken or len(self._waiting) >= _MOST_WAITING:
            metrics.NOT_REFINED.inc()
            return False
        self._waiting[opening.key] = time.monotonic()
        self._batcher.open(opening)
        for block in blocks:
            self._batcher.put(block)
        self._batcher.finish(finish)
        return True

    def drop(self, keys: Sequence[SegmentKey]) -> None:
        """Forget segments whose session moved away."""
        for key in keys:
            if self._waiting.pop(key, None) is not None:
                self._batcher.close(key)

    def _give_up_overdue(self) -> None:
        """Let segments that have waited for too long go without."""
        latest_s = time.monotonic() - _LONGEST_WAIT_S
        overdue = [key for key, since_s in self._waiting.items() if since_s <= latest_s]
        self.drop(overdue)
        for key in overdue:
            metrics.NOT_REFINED.inc()
            self._refined(key, None)

    # ------------------------------------------------------------------ the batcher's listener

    def stepped(self, blocks: Sequence[Block], hypotheses: Sequence[Hypothesis]) -> None:
        """Nobody waits for partials here."""

    def finished(self, finals: Sequence[FinalText]) -> None:
        """Hand on what was found."""
        for final in finals:
            if self._waiting.pop(final.key, None) is not None:
                if final.error:
                    log.warning("segment %d of session %s has no second pass: %s", final.key.segment, final.key.session_id, final.error)
                self._refined(final.key, None if final.error else final)
        self._give_up_overdue()

    def broke(self, failure: BaseException) -> None:
        """Go on without a second pass: it is not worth a worker."""
        log.error("there is no second pass any more: %s", failure)
        self._broken = True
        waiting, self._waiting = self._waiting, {}
        for key in waiting:
            self._refined(key, None)
