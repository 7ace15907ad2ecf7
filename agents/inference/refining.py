"""The second pass: segments whose final is out, once more through another engine; its text stands beside the final as ``refined``.

It has time, and no say: a final is out before its second pass begins, and is never changed by it. If the second engine cannot keep up, or
is gone, segments go without a second pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from agents.inference import metrics
from agents.inference.batcher import Batcher
from agents.inference.engine import Block, Engine, FinalText, Finish, Hypothesis, Opening, SegmentKey

__all__ = ["SecondPass"]

log = logging.getLogger(__name__)

#: Segments that may wait for it: their inputs are not settled meanwhile, and a stage reads on only up to a number of those.
_MOST_WAITING: Final = 64


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
        self._waiting: set[SegmentKey] = set()
        self._broken = False

    def start(self) -> None:
        """Begin."""
        self._batcher.start()

    def stop(self) -> None:
        """End; blocks."""
        self._batcher.stop()

    def take(self, opening: Opening, blocks: Sequence[Block], finish: Finish) -> bool:
        """Take a segment, whole; return False if it goes without."""
        if self._broken or len(self._waiting) >= _MOST_WAITING:
            metrics.NOT_REFINED.inc()
            return False
        self._waiting.add(opening.key)
        self._batcher.open(opening)
        for block in blocks:
            self._batcher.put(block)
        self._batcher.finish(finish)
        return True

    def drop(self, keys: Sequence[SegmentKey]) -> None:
        """Forget segments whose session moved away."""
        for key in keys:
            if key in self._waiting:
                self._waiting.remove(key)
                self._batcher.close(key)

    # ------------------------------------------------------------------ the batcher's listener

    def stepped(self, blocks: Sequence[Block], hypotheses: Sequence[Hypothesis]) -> None:
        """Nobody waits for partials here."""

    def finished(self, finals: Sequence[FinalText]) -> None:
        """Hand on what was found."""
        for final in finals:
            if final.key in self._waiting:
                self._waiting.remove(final.key)
                if final.error:
                    log.warning("segment %d of session %s has no second pass: %s", final.key.segment, final.key.session_id, final.error)
                self._refined(final.key, None if final.error else final)

    def broke(self, failure: BaseException) -> None:
        """Go on without a second pass: it is not worth a worker."""
        log.error("there is no second pass any more: %s", failure)
        self._broken = True
        waiting, self._waiting = self._waiting, set()
        for key in waiting:
            self._refined(key, None)
