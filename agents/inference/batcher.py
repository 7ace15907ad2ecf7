"""Between the event loop and the engine: gathers what is ready over all sessions, calls the engine on threads, brings results back.

At most one block of each segment goes into a step, in order; live segments go before those that catch up, and neither starves the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from agents.inference.engine import Block, Engine, FinalText, Finish, Hypothesis, Opening, SegmentKey

__all__ = ["Batcher", "FixedPacing", "Listener", "Pace", "Pacing"]

#: A segment with more blocks waiting than this (1 s of audio) is catching up.
_LIVE_BLOCKS: Final = 5
#: The share of a step that is kept for segments that catch up, if live ones could fill it.
_CATCH_UP_SHARE: Final = 1 / 8
#: How often an idle engine is asked for hypotheses of open segments.
_ASK_S: Final = 0.05
#: Blocks that may wait, for a step or a final: 14 KB each with features and audio, so 230 MB; a backlog beyond that stays in Kafka.
_HELD_LIMIT: Final = 16_384
_ROOM_WAIT_S: Final = 0.01


class Pace(NamedTuple):
    """How large a step may be, and how long to wait for it to fill."""

    max_batch: int
    max_wait_ms: float


class Pacing(Protocol):
    """Decides the pace of steps."""

    def pace(self, active: int) -> Pace:
        """Return the pace for that many open segments."""

    def observe(self, blocks: int, took_s: float) -> None:
        """Hear how long a step took."""


@dataclass(frozen=True, slots=True)
class FixedPacing:
    """Always the same pace."""

    max_batch: int = 64
    max_wait_ms: float = 5.0

    def pace(self, active: int) -> Pace:
        """Return the pace."""
        return Pace(self.max_batch, self.max_wait_ms)

    def observe(self, blocks: int, took_s: float) -> None:
        """Ignore it."""


class Listener(Protocol):
    """Who gets the results, on the event loop, in the order of the steps."""

    def stepped(self, blocks: Sequence[Block], hypotheses: Sequence[Hypothesis]) -> None:
        """The engine has taken blocks; hypotheses of any open segments changed."""

    def finished(self, finals: Sequence[FinalText]) -> None:
        """Finals are there; their segments are closed."""

    def broke(self, failure: BaseException) -> None:
        """The engine is gone for good; nothing more will come."""


@dataclass(slots=True, eq=False)
class _Segment:
    opening: Opening
    opened: bool = False
    waiting: deque[Block] = field(default_factory=deque)
    ready_s: float = 0.0
    #: Blocks it was given so far: what a segment holds until its final is there.
    blocks: int = 0
    finish: Finish | None = None
    settling: bool = False
    dropped: bool = False


class Batcher:
    """See the module. All methods but :meth:`stop` belong on the event loop; none of them waits.

    Args:
        engine: called on the batcher's threads only.
        listener: gets the results.
        pacing: decides the pace of steps.
    """

    def __init__(self, engine: Engine, listener: Listener, pacing: Pacing | None = None) -> None:
        self._engine = engine
        self._listener = listener
        self._pacing = pacing or FixedPacing()
        self._lock = threading.RLock()
        self._step_due = threading.Condition(self._lock)
        self._finals_due = threading.Condition(self._lock)
        self._segments: dict[SegmentKey, _Segment] = {}
        #: Segments with blocks, by when their first one came: the longest waiting first.
        self._ready: dict[SegmentKey, _Segment] = {}
        self._unopened: list[_Segment] = []
        self._unclosed: list[SegmentKey] = []
        self._finals: deque[_Segment] = deque()
        self._held = 0
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to call the engine; results come back on the running event loop."""
        self._loop = asyncio.get_running_loop()
        finals = [
            threading.Thread(target=self._guarded, args=(self._settle,), name=f"finals-{n}") for n in range(self._engine.finals_lanes)
        ]
        self._threads = [threading.Thread(target=self._guarded, args=(self._step,), name="batcher"), *finals]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def stop(self) -> None:
        """Call the engine no more, and stop it. Blocks until a call that is on its way comes back."""
        with self._lock:
            self._stopping = True
            self._step_due.notify_all()
            self._finals_due.notify_all()
        self._engine.stop()
        for thread in self._threads:
            thread.join()

    async def room(self) -> None:
        """Wait while too many blocks are held."""
        while self._held > _HELD_LIMIT and not self._stopping:  # noqa: ASYNC110 seldom, and never for long
            await asyncio.sleep(_ROOM_WAIT_S)

    def open(self, opening: Opening) -> None:
        """Begin a segment."""
        with self._lock:
            segment = self._segments[opening.key] = _Segment(opening)
            self._unopened.append(segment)
            self._step_due.notify()

    def put(self, block: Block) -> None:
        """Add a block to its segment."""
        with self._lock:
            segment = self._segments[block.key]
            if not segment.waiting:
                self._becomes_ready(segment)
            segment.waiting.append(block)
            segment.blocks += 1
            self._held += 1
            self._step_due.notify()

    def finish(self, request: Finish) -> None:
        """Ask for a segment's final, once all its blocks are stepped; the segment is closed after it."""
        with self._lock:
            segment = self._segments[request.key]
            segment.finish = request
            self._held += segment.blocks - len(segment.waiting)
            if segment.opened and not segment.waiting:
                self._settles(segment)
            self._step_due.notify()

    def close(self, key: SegmentKey) -> None:
        """Forget a segment: no result of it follows."""
        with self._lock:
            segment = self._segments.get(key)
            if segment is None:
                return
            segment.dropped = True
            if not segment.settling:  # else it is closed when the engine is through with it
                self._forget(segment)
            self._step_due.notify()

    # ------------------------------------------------------------------ under the lock

    def _becomes_ready(self, segment: _Segment) -> None:
        segment.ready_s = time.monotonic()
        self._ready[segment.opening.key] = segment

    def _settles(self, segment: _Segment) -> None:
        segment.settling = True
        self._finals.append(segment)
        self._finals_due.notify()

    def _forget(self, segment: _Segment) -> None:
        key = segment.opening.key
        del self._segments[key]
        self._ready.pop(key, None)
        self._held -= segment.blocks if segment.finish else len(segment.waiting)
        if segment.opened:
            self._unclosed.append(key)
        elif segment in self._unopened:
            self._unopened.remove(segment)

    def _wait_for_step(self) -> bool:
        """Wait until there is something to do, and a little longer for the step to fill; return False when stopped."""
        while not (self._stopping or self._ready or self._unopened or self._unclosed or (self._finals and not self._engine.finals_lanes)):
            if not self._step_due.wait(_ASK_S if self._segments else None):
                return True  # time to ask what changed
        pace = self._pacing.pace(len(self._segments))
        deadline_s = time.monotonic() + pace.max_wait_ms / 1_000
        while not self._stopping and (self._ready or self._unopened) and len(self._ready) < min(pace.max_batch, len(self._segments)):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._step_due.wait(left_s):
                break
        return not self._stopping

    def _choose(self, max_batch: int) -> list[_Segment]:
        """Return the segments of the next step: live ones first, the longest waiting first, with some room for those that catch up."""
        if len(self._ready) <= max_batch:
            return list(self._ready.values())
        live = [segment for segment in self._ready.values() if len(segment.waiting) <= _LIVE_BLOCKS]
        late = [segment for segment in self._ready.values() if len(segment.waiting) > _LIVE_BLOCKS]
        for_late = min(len(late), max(max_batch - len(live), round(max_batch * _CATCH_UP_SHARE)))
        return live[: max_batch - for_late] + late[:for_late]

    def _take(self, chosen: Sequence[_Segment]) -> list[Block]:
        """Take one block of each; those with more go to the end of the queue."""
        blocks = []
        for segment in chosen:
            blocks.append(segment.waiting.popleft())
            del self._ready[segment.opening.key]
            if segment.waiting:
                self._becomes_ready(segment)
            if segment.finish is None:
                self._held -= 1
        return blocks

    # ------------------------------------------------------------------ the threads

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as failure:  # noqa: BLE001 whatever it is, the worker must hear of it
            if not self._stopping:
                self._tell(self._listener.broke, failure)

    def _step(self) -> None:
        engine = self._engine
        while True:
            with self._lock:
                if not self._wait_for_step():
                    return
                closing, self._unclosed = self._unclosed, []
                opening, self._unopened = self._unopened, []
                chosen = self._choose(self._pacing.pace(len(self._segments)).max_batch)
                blocks = self._take(chosen)
                for segment in opening:
                    segment.opened = True
            if closing:
                engine.close(closing)
            if opening:
                engine.open([segment.opening for segment in opening])
            started_s = time.monotonic()
            hypotheses = engine.step(blocks)
            if blocks:
                self._pacing.observe(len(blocks), time.monotonic() - started_s)
            if blocks or hypotheses:
                self._tell(self._listener.stepped, blocks, hypotheses)
            with self._lock:
                for segment in {*chosen, *opening}:
                    if segment.finish and not (segment.waiting or segment.settling or segment.dropped):
                        self._settles(segment)
            if not engine.finals_lanes:
                while self._settle_some(wait=False):
                    pass

    def _settle(self) -> None:
        while self._settle_some(wait=True):
            pass

    def _settle_some(self, *, wait: bool) -> bool:
        """Get the finals of some segments; return False if there are none, or the batcher stops."""
        with self._lock:
            while wait and not (self._finals or self._stopping):
                self._finals_due.wait()
            if self._stopping or not self._finals:
                return False
            segments = [self._finals.popleft() for _ in range(min(len(self._finals), self._engine.finals_batch))]
            requests = [segment.finish for segment in segments if segment.finish and not segment.dropped]
        finals = self._engine.finish(requests) if requests else []
        with self._lock:
            for segment in segments:
                self._forget(segment)
            self._step_due.notify()
        self._tell(self._listener.finished, finals)
        return True

    def _tell(self, what: Callable[..., None], *results: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(what, *results)
