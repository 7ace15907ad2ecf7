"""Between the event loop and the engine: gathers what is ready over all sessions, calls the engine on threads, brings results back.

One block of each segment goes into a step, in order; live segments go before those that catch up, and neither starves the other. An engine
that can take several blocks in one pass gets them from segments that catch up, each the same number.

When the engine falls behind, partials are given up, never words: a few segments a second go on without text before their final, until it
keeps up again. The same goes for what is left of a segment whose end is known already. How many channels the machine carries is read off
the steps; it is said when more speak.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from agents.inference import metrics
from agents.inference.engine import Block, Engine, FinalText, Finish, Hypothesis, Opening, SegmentKey
from agents.inference.pacing import AdaptivePacing, Pacing

__all__ = ["Batcher", "Listener"]

log = logging.getLogger(__name__)

#: A segment with more blocks waiting than this (1 s of audio) is catching up.
_LIVE_BLOCKS: Final = 5
#: The share of a step that is kept for segments that catch up, if live ones could fill it.
_CATCH_UP_SHARE: Final = 1 / 8
#: How often an idle engine is asked for hypotheses of open segments.
_ASK_S: Final = 0.05
#: Blocks that may wait, for a step or a final: 14 KB each with features and audio, so 230 MB; a backlog beyond that stays in Kafka.
_HELD_LIMIT: Final = 16_384
_ROOM_WAIT_S: Final = 0.01
#: The engine has fallen behind when a block waits for its step, or a segment for its final, as long as this.
_LATE_STEP_S: Final = 0.5
_LATE_FINAL_S: Final = 2.0
#: Then so many of the open segments go on without partials, and their effect is waited for.
_SHED_SHARE: Final = 1 / 8
_SHED_EVERY_S: Final = 1.0
_TELL_EVERY_S: Final = 30.0
#: Blocks in a step that no text is wanted of, and that cost next to nothing: 3 MB of features.
_QUIET_LIMIT: Final = 512


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
    #: A step that opens it, or takes blocks of it, is on its way: it cannot settle before that is back.
    stepping: bool = False
    waiting: deque[Block] = field(default_factory=deque)
    ready_s: float = 0.0
    #: Blocks it was given so far: what a segment holds until its final is there.
    blocks: int = 0
    finish: Finish | None = None
    #: No text is wanted before its final.
    quiet: bool = False
    settling: bool = False
    settles_s: float = 0.0
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
        self._pacing = pacing or AdaptivePacing()
        self._lock = threading.RLock()
        self._step_due = threading.Condition(self._lock)
        self._finals_due = threading.Condition(self._lock)
        self._segments: dict[SegmentKey, _Segment] = {}
        #: Segments with blocks, by when their first one came: the longest waiting first.
        self._ready: dict[SegmentKey, _Segment] = {}
        self._unopened: list[_Segment] = []
        self._unclosed: list[SegmentKey] = []
        self._lessons: list[tuple[str, str, bool, Callable[[], None]]] = []
        self._finals: deque[_Segment] = deque()
        self._held = 0
        self._shed_s = self._told_s = self._warned_s = -math.inf
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

    @property
    def channels(self) -> int:
        """Channels of speech without a pause that the engine can follow on this machine; 0: not known."""
        return self._pacing.channels

    @property
    def behind_s(self) -> float:
        """How long what waits longest, for a step or a final, has waited."""
        with self._lock:
            return max(self._lags())

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
            if segment.opened and not (segment.waiting or segment.stepping):
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

    def learn(self, version: str, folder: str, in_force: bool, then: Callable[[], None]) -> None:
        """Let the engine learn hotwords between two steps, see ``Engine.hotwords``; call ``then`` on the event loop when it has."""
        with self._lock:
            self._lessons.append((version, folder, in_force, then))
            self._step_due.notify()

    # ------------------------------------------------------------------ under the lock

    def _becomes_ready(self, segment: _Segment) -> None:
        segment.ready_s = time.monotonic()
        self._ready[segment.opening.key] = segment

    def _settles(self, segment: _Segment) -> None:
        segment.settling = True
        segment.settles_s = time.monotonic()
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
        while not (self._stopping or self._anything_to_do()):
            if not self._step_due.wait(_ASK_S if self._segments else None):
                return True  # time to ask what changed
        pace = self._pacing.pace(len(self._segments))
        deadline_s = time.monotonic() + pace.max_wait_ms / 1_000
        while not self._stopping and (self._ready or self._unopened) and len(self._ready) < min(pace.max_batch, len(self._segments)):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._step_due.wait(left_s):
                break
        return not self._stopping

    def _anything_to_do(self) -> bool:
        return bool(self._ready or self._unopened or self._unclosed or self._lessons or (self._finals and not self._engine.finals_lanes))

    def _choose(self, max_batch: int) -> dict[SegmentKey, int]:
        """Return how many blocks of which segments the next step takes.

        Live ones first, the longest waiting first, with some room for those that catch up; beyond the step's size those without partials.
        """
        at_once = self._engine.blocks_at_once
        quiet, late, live = {}, [], []
        room = _QUIET_LIMIT
        for key, segment in self._ready.items():
            if at_once > 1 and (segment.quiet or segment.finish):
                if room > 0:
                    quiet[key] = min(len(segment.waiting), room)
                    room -= quiet[key]
            elif len(segment.waiting) > _LIVE_BLOCKS:
                late.append(key)
            else:
                live.append(key)
        for_late = max(max_batch - len(live), round(max_batch * _CATCH_UP_SHARE))
        each = max(1, min(at_once, for_late // max(1, len(late))))
        late = late[: for_late // each]
        counts = dict.fromkeys(live[: max_batch - each * len(late)], 1)
        counts |= {key: min(each, len(self._ready[key].waiting)) for key in late}
        return counts | quiet

    def _take(self, chosen: dict[SegmentKey, int]) -> list[Block]:
        """Take blocks; segments with more go to the end of the queue."""
        blocks = []
        for key, count in chosen.items():
            segment = self._ready.pop(key)
            taken = [segment.waiting.popleft() for _ in range(count)]
            if self._engine.blocks_at_once > 1 and (segment.quiet or segment.finish):
                taken = [msgspec.structs.replace(block, quiet=True) for block in taken]
            blocks += taken
            if segment.waiting:
                self._becomes_ready(segment)
            if segment.finish is None:
                self._held -= count
        return blocks

    def _lags(self) -> tuple[float, float]:
        """Return how long the block that waits longest has waited for its step, and the segment for its final."""
        now_s = time.monotonic()
        speaking = next((segment for segment in self._ready.values() if not (segment.quiet or segment.finish)), None)
        return (now_s - speaking.ready_s if speaking else 0.0), (now_s - self._finals[0].settles_s if self._finals else 0.0)

    def _shed(self) -> None:
        """Give up the partials of some segments if the engine falls behind; measure how far it is behind."""
        now_s = time.monotonic()
        step_lag_s, final_lag_s = self._lags()
        metrics.STEP_LAG.set(step_lag_s)
        metrics.FINAL_LAG.set(final_lag_s)
        behind = step_lag_s > _LATE_STEP_S or final_lag_s > _LATE_FINAL_S
        if not behind or self._engine.blocks_at_once == 1 or now_s < self._shed_s + _SHED_EVERY_S:
            return
        self._shed_s = now_s
        following = [segment for segment in self._segments.values() if not (segment.quiet or segment.finish)]
        shed = sorted(following, key=lambda segment: -len(segment.waiting))[: round(len(following) * _SHED_SHARE + 0.5)]
        for segment in shed:
            segment.quiet = True
        metrics.SHED_SEGMENTS.inc(len(shed))
        if now_s >= self._told_s + _TELL_EVERY_S:
            self._told_s = now_s
            log.warning(
                "the engine is behind (%.1f s for a step, %.1f s for a final): segments go on without partials; %d now, of %d",
                step_lag_s,
                final_lag_s,
                len(shed),
                len(following),
            )

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
                lessons, self._lessons = self._lessons, []
                self._shed()
                chosen = self._choose(self._pacing.pace(len(self._segments)).max_batch)
                under_way = {*opening, *(self._segments[key] for key in chosen)}
                blocks = self._take(chosen)
                for segment in opening:
                    segment.opened = True
                for segment in under_way:
                    segment.stepping = True
            for version, folder, in_force, then in lessons:
                engine.hotwords(version, folder, in_force=in_force)
                self._tell(then)
            if closing:
                engine.close(closing)
            if opening:
                engine.open([segment.opening for segment in opening])
            started_s = time.monotonic()
            hypotheses = engine.step(blocks)
            self._learn_pace(blocks, time.monotonic() - started_s)
            if blocks or hypotheses:
                self._tell(self._listener.stepped, blocks, hypotheses)
            with self._lock:
                for segment in under_way:
                    segment.stepping = False
                    if segment.finish and not (segment.waiting or segment.settling or segment.dropped):
                        self._settles(segment)
            if not engine.finals_lanes:
                while self._settle_some(wait=False):
                    pass

    def _learn_pace(self, blocks: Sequence[Block], took_s: float) -> None:
        """Let the pacing hear of a step, if it was one that took work."""
        working = sum(not block.quiet for block in blocks)
        if working:
            self._pacing.observe(working, took_s)
            metrics.STEP_SECONDS.observe(took_s)
            self._see_whether_it_carries(self._pacing.channels)

    def _see_whether_it_carries(self, channels: int) -> None:
        """Say when more channels speak than the machine carries: before all of them are late, if it can be."""
        with self._lock:
            speaking = sum(segment.finish is None for segment in self._segments.values())
        metrics.CHANNELS.set(channels)
        metrics.SPEAKING.set(speaking)
        overloaded = 0 < channels < speaking
        metrics.OVERLOADED.set(overloaded)
        now_s = time.monotonic()
        if overloaded and now_s >= self._warned_s + _TELL_EVERY_S:
            self._warned_s = now_s
            log.error(
                "%d channels speak, and this machine carries %d: text comes late, then partials are given up, never words; "
                "start another worker for inference, or choose a smaller model",
                speaking,
                channels,
            )

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
