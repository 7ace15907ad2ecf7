"""Who sends what when: any number of sessions, in real time or as fast as the broker takes it, from one thread.

One thread sleeps until the next record of any session is due: it costs what its records cost, and no channel waits for another's clock.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from connectors.recorder.delivery import Delivery
from connectors.recorder.framing import DEFAULT_FRAME_MS, Frame, frames_of, record_ms
from connectors.recorder.session import Direction, EndReason, SessionInfo, SessionRecords, new_id, partition_of
from schemas.codec import Codec
from schemas.records import SAMPLE_RATE_HZ, Encoding, FlowRecord, FrameSpan
from streams.errors import UserError
from streams.registry import codec_for
from streams.settings import Settings

if TYPE_CHECKING:
    from connectors.recorder.media import Source

__all__ = ["Playback", "Recorder", "SessionReport"]

log = logging.getLogger(__name__)

_NS_PER_US: Final = 1_000
_NS_PER_S: Final = 1_000_000_000
_NS_PER_MS: Final = 1_000_000
_US_PER_S: Final = 1_000_000
_HEARTBEAT_NS: Final = 5 * _NS_PER_S
#: How long acknowledgements may lie unread while nothing is due.
_POLL_S: Final = 0.02
_FLUSH_TIMEOUT_S: Final = 10.0
#: Lateness is told of so many frames back: 80 s at 50 channels of 200 ms.
_LATENESS_FRAMES: Final = 20_000


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a session so far.

    Attributes:
        channel_id: the telephone channel.
        session_id: the session.
        conversation_id: the call it belongs to.
        partition: where all its records are.
        source: where the audio came from, for people.
        party: who speaks.
        encoding: of the frames.
        sample_rate_hz: of the frames.
        started_us: when its first sample was captured, Unix time in µs.
        samples: length of the audio sent, in 16 kHz samples.
        frames_sent: frames captured and sent on their way.
        frames_delivered: frames that all replicas have.
        frames_lost: frames that will never arrive.
        frames_kept: frames on disk, that the next recorder will send.
        reason: why it ended; empty while it is open.
        notes: what was wrong with its audio.
        failures: why records were lost or the source broke off: cause and remedy.
        spans: the frames sent, in order; empty unless they are kept.
    """

    channel_id: str
    session_id: str
    conversation_id: str
    partition: int
    source: str
    party: str
    encoding: Encoding
    sample_rate_hz: int
    started_us: int
    samples: int
    frames_sent: int
    frames_delivered: int
    frames_lost: int
    frames_kept: int = 0
    reason: EndReason | str
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    spans: tuple[FrameSpan, ...] = ()

    @property
    def audio_ms(self) -> int:
        """Length of the audio sent."""
        return self.samples * 1_000 // SAMPLE_RATE_HZ


class _Session:
    """One session on its way; all but the constructor and :attr:`stop_reason` belongs to the recorder's thread."""

    def __init__(
        self,
        info: SessionInfo,
        source: Source,
        *,
        realtime: bool,
        speed: float,
        frame_ms: int,
        loop: bool,
        start_us: int | None,
        keep_spans: bool,
        on_frame: Callable[[FrameSpan], None] | None,
    ) -> None:
        self.info = info
        self.source = source
        self.future: Future[SessionReport] = Future()
        self.future.set_running_or_notify_cancel()  # whoever stops waiting for a session does not stop it
        self.stop_reason: EndReason | None = None
        self.over = False
        self.frames_sent = 0
        self._realtime = realtime
        #: Samples of audio that go by in a second of the clock.
        self._pace_hz = round(SAMPLE_RATE_HZ * speed)
        self._on_frame = on_frame
        self._records = SessionRecords(info)
        self._frames = frames_of(_audio(source, loop=loop), info.wire, frame_ms)
        self._spans = array("q") if keep_spans else None
        self._frames_delivered = 0
        self._frames_lost = 0
        self._frames_kept = 0
        self._outstanding = 0
        self._failures: Counter[str] = Counter()
        self._reason: EndReason = "hangup"
        self._next = next(self._frames, None)
        now_us, now_ns = _now_us(), time.monotonic_ns()
        self._read_us = now_us
        self.started_us = now_us if start_us is None else start_us
        self._started_ns = now_ns + (self.started_us - now_us) * _NS_PER_US
        self._heartbeat_ns = self._started_ns + _HEARTBEAT_NS
        self._started = False

    @property
    def samples(self) -> int:
        """The audio sent so far."""
        return self._records.position_samples

    @property
    def due_ns(self) -> int:
        """When the next record is to be sent, on the monotonic clock."""
        if self.stop_reason is not None:
            return 0
        if not self._started:
            return self._started_ns
        return min(self._frame_due_ns, self._heartbeat_ns)

    @property
    def _frame_due_ns(self) -> int:
        if self._next is None or not self._realtime:
            return self._started_ns
        return self._started_ns + self._next.end_sample * _NS_PER_S // self._pace_hz

    def step(self, delivery: Delivery) -> float | None:
        """Send the record that is due; return how late it was in ms, if it was a frame in real time."""
        now_ns = time.monotonic_ns()
        now_us = self.started_us + (now_ns - self._started_ns) // _NS_PER_US
        if self.stop_reason is not None:
            self._end(self.stop_reason, now_us, delivery)
        elif not self._started:
            self._send(self._records.start(captured_us=self.started_us, enqueued_us=now_us), delivery)
            self._started = True
        elif self._heartbeat_ns <= now_ns:
            self._heartbeat_ns += _HEARTBEAT_NS * (1 + (now_ns - self._heartbeat_ns) // _HEARTBEAT_NS)
            self._send(self._records.heartbeat(now_us=now_us), delivery)
        elif self._next is None:
            self._end(self._reason, now_us, delivery)
        else:
            late_ms = (now_ns - self._frame_due_ns) / _NS_PER_MS if self._realtime else None
            self._send_frame(self._next, now_us, delivery)
            self._read_ahead()
            return late_ms
        return None

    def fail(self, failure: Exception, delivery: Delivery) -> None:
        """End it because of a fault that is not its audio's."""
        self._failures[repr(failure)] += 1
        if not self.future.done():
            self.future.set_exception(failure)
        self._end("failed", _now_us(), delivery)

    def report(self) -> SessionReport:
        """Return what became of it so far."""
        info = self.info
        return SessionReport(
            channel_id=info.channel_id,
            session_id=info.session_id,
            conversation_id=info.conversation_id,
            partition=info.partition,
            source=info.source,
            party=info.party,
            encoding=info.wire.encoding,
            sample_rate_hz=info.wire.sample_rate_hz,
            started_us=self.started_us,
            samples=self.samples,
            frames_sent=self.frames_sent,
            frames_delivered=self._frames_delivered,
            frames_lost=self._frames_lost,
            frames_kept=self._frames_kept,
            reason=self._reason if self.over else "",
            notes=tuple(self.source.notes),
            failures=tuple(f"{cause} ({times} times)" if times > 1 else cause for cause, times in list(self._failures.items())),
            spans=self._kept_spans(),
        )

    def _kept_spans(self) -> tuple[FrameSpan, ...]:
        flat = self._spans or ()
        return tuple(
            FrameSpan(start_sample=start, end_sample=end, captured_us=captured, enqueued_us=enqueued)
            for start, end, captured, enqueued in zip(*(iter(flat),) * 4, strict=True)
        )

    def _send_frame(self, frame: Frame, now_us: int, delivery: Delivery) -> None:
        if self._realtime:
            captured_us = self.started_us + frame.end_sample * _US_PER_S // self._pace_hz
        else:
            captured_us = max(self._read_us, self.started_us)
        self._send(self._records.frame(frame, captured_us=captured_us, enqueued_us=now_us), delivery)
        self.frames_sent += 1
        if self._spans is not None:
            self._spans.extend((frame.start_sample, frame.end_sample, captured_us, now_us))
        if self._on_frame is not None:
            self._on_frame(
                FrameSpan(start_sample=frame.start_sample, end_sample=frame.end_sample, captured_us=captured_us, enqueued_us=now_us)
            )

    def _read_ahead(self) -> None:
        try:
            self._next = next(self._frames, None)
        except UserError as broken:
            self._next = None
            self._reason = "failed"
            self._failures[str(broken)] += 1
        self._read_us = _now_us()

    def _end(self, reason: EndReason, now_us: int, delivery: Delivery) -> None:
        self._reason = reason
        self.over = True
        self._frames.close()
        if self._started:
            self._send(self._records.end(reason, now_us=now_us), delivery)
        self._settle()

    def _send(self, record: FlowRecord, delivery: Delivery) -> None:
        self._outstanding += 1
        delivery.send(record, self.info.partition, self)

    # What the delivery says became of its records.

    def delivered(self, frames: int) -> None:
        """A record arrived."""
        self._frames_delivered += frames
        self._answered()

    def lost(self, frames: int, why: str) -> None:
        """A record never will."""
        self._frames_lost += frames
        self._failures[why] += 1
        self._answered()

    def kept(self, frames: int) -> None:
        """A record waits for the next recorder."""
        self._frames_kept += frames
        self._answered()

    def _answered(self) -> None:
        self._outstanding -= 1
        self._settle()

    def _settle(self) -> None:
        if self.over and not self._outstanding and not self.future.done():
            self.future.set_result(self.report())


class Playback:
    """A session that is being played. It can be awaited, and waited for."""

    def __init__(self, session: _Session, wake: Callable[[_Session], None]) -> None:
        self._session = session
        self._wake = wake

    @property
    def info(self) -> SessionInfo:
        """Who the session is: channel, session, conversation, partition."""
        return self._session.info

    @property
    def source(self) -> Source:
        """The audio."""
        return self._session.source

    @property
    def started_us(self) -> int:
        """When its first sample is captured, Unix time in µs."""
        return self._session.started_us

    @property
    def position_ms(self) -> int:
        """How much audio was sent so far."""
        return self._session.samples * 1_000 // SAMPLE_RATE_HZ

    def stop(self, reason: EndReason = "hangup") -> None:
        """End the session now, also in the middle of its audio; what was sent is delivered."""
        self._session.stop_reason = reason
        self._wake(self._session)

    def done(self) -> bool:
        """Tell whether it has ended and everything is delivered or lost."""
        return self._session.future.done()

    def report(self) -> SessionReport:
        """Return what became of it so far, without waiting."""
        return self._session.report()

    def result(self, timeout_s: float | None = None) -> SessionReport:
        """Wait for the end, and until everything is delivered or lost.

        Raises:
            TimeoutError: not within the time.
        """
        return self._session.future.result(timeout_s)

    def __await__(self) -> Generator[Any, None, SessionReport]:
        return asyncio.wrap_future(self._session.future).__await__()


class Recorder:
    """Plays sources as live sessions.

    Use it as a context manager: what still plays at the end is hung up, and everything sent is delivered before it returns.

    Example:
        with Recorder(settings) as recorder:
            report = recorder.play(MemorySource(samples), "7").result()

    Args:
        settings: where to send it.
        realtime: send each frame when its last sample would have been captured; else as fast as the broker takes it.
        speed: how fast time goes by in what is played in real time: 2 is twice as fast.
        frame_ms: audio per frame, 20 to 500 ms.
        gather: gather frames shorter than 100 ms to at least that.
        keep_spans: keep the spans of all frames for the reports, 32 bytes each.
        spool: keep on disk what no broker takes, and send what earlier recorders left there; else the sources are held back.
        codec: how records become bytes.

    Raises:
        UserError: such frames are not accepted.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        realtime: bool = True,
        speed: float = 1.0,
        frame_ms: int = DEFAULT_FRAME_MS,
        gather: bool = True,
        keep_spans: bool = True,
        spool: bool = False,
        codec: Codec | None = None,
    ) -> None:
        self._settings = settings
        self._realtime = realtime
        self._speed = speed
        self._frame_ms = record_ms(frame_ms, gather=gather)
        self._keep_spans = keep_spans
        self._delivery = Delivery(settings, codec or codec_for(settings.schema_registry_url), spool=spool)
        self._changed = threading.Condition()
        self._numbers = count()
        # When each session is due; an entry counts only if it is its session's newest.
        self._due: list[tuple[int, int, _Session]] = []
        self._newest: dict[_Session, int] = {}
        self._playing: set[_Session] = set()
        self._lateness_ms: deque[float] = deque(maxlen=_LATENESS_FRAMES)
        self._closing = False
        self._deadline_s = 0.0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Begin, after making sure that the topic can be written to.

        Raises:
            UserError: it cannot; the message says what to do.
        """
        self._delivery.check()
        self._thread.start()

    def play(
        self,
        source: Source,
        channel_id: str,
        *,
        conversation_id: str = "",
        party: str = "",
        language: str = "",
        direction: Direction = "unknown",
        partition: int | None = None,
        loop: bool = False,
        start_us: int | None = None,
        on_frame: Callable[[FrameSpan], None] | None = None,
    ) -> Playback:
        """Begin a session with a source's audio; return at once. Any thread may call it.

        Args:
            source: the audio, one channel.
            channel_id: the telephone channel.
            conversation_id: joins the parties of a call; a new one when empty.
            party: who speaks, such as agent or customer.
            language: BCP 47 tag, empty when unknown.
            direction: who called.
            partition: where the records go; by default the channel's own.
            loop: begin again whenever the source ends, in the same session, until it is stopped.
            start_us: when the first sample is captured, Unix time in µs: now, or later. Give the channels of one call the same.
            on_frame: called with each frame sent, on the recorder's thread: be quick.

        Raises:
            UserError: there is no such partition, or the source cannot be read.
        """
        if partition is None:
            partition = partition_of(channel_id, self._settings.partitions)
        elif not 0 <= partition < self._settings.partitions:
            raise UserError(f"There is no partition {partition}", f"Choose 0 to {self._settings.partitions - 1} (ASR_PARTITIONS).")
        info = SessionInfo(
            channel_id=channel_id,
            session_id=new_id(),
            conversation_id=conversation_id or new_id(),
            partition=partition,
            wire=source.wire,
            source=source.name,
            party=party,
            language=language,
            direction=direction,
        )
        session = _Session(
            info,
            source,
            realtime=self._realtime,
            speed=self._speed,
            frame_ms=self._frame_ms,
            loop=loop,
            start_us=start_us,
            keep_spans=self._keep_spans,
            on_frame=on_frame,
        )
        with self._changed:
            self._playing.add(session)
        self._schedule(session)
        return Playback(session, self._schedule)

    @property
    def is_behind(self) -> bool:
        """Whether records wait on disk, its own or those of an earlier recorder."""
        return self._delivery.is_behind

    def lateness_ms(self) -> list[float]:
        """Return how long after its due time each of the last 20,000 frames was sent, in real time."""
        return list(self._lateness_ms)

    def close(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> None:
        """Hang up what still plays, and wait until everything is delivered.

        Args:
            timeout_s: what is not delivered by then is given up, and counted as lost.
        """
        with self._changed:
            self._closing = True
            self._deadline_s = time.monotonic() + timeout_s
            playing = list(self._playing)
        for session in playing:
            session.stop_reason = session.stop_reason or "hangup"
            self._schedule(session)
        self._thread.join(timeout_s)
        self._delivery.give_up()
        self._thread.join()

    def _schedule(self, session: _Session) -> None:
        with self._changed:
            if session.over:
                return
            number = next(self._numbers)
            self._newest[session] = number
            heapq.heappush(self._due, (session.due_ns, number, session))
            self._changed.notify()

    def _run(self) -> None:
        while not (self._closing and not self._playing):
            session = self._next()
            if session is not None:
                self._step(session)
            self._delivery.poll()
        self._delivery.finish(self._deadline_s)

    def _next(self) -> _Session | None:
        """Return the session that is due; wait for it, but no longer than acknowledgements may lie unread."""
        with self._changed:
            while self._due and self._newest.get(self._due[0][2]) != self._due[0][1]:
                heapq.heappop(self._due)
            wait_s = (self._due[0][0] - time.monotonic_ns()) / _NS_PER_S if self._due else _POLL_S
            if wait_s > 0:
                self._changed.wait(min(wait_s, _POLL_S))
                return None
            session = heapq.heappop(self._due)[2]
            del self._newest[session]
            return session

    def _step(self, session: _Session) -> None:
        if session.over:
            return
        try:
            late_ms = session.step(self._delivery)
        except Exception as failure:  # noqa: BLE001 - one session's fault, handed to whoever waits for it, must not end the others
            log.warning("session %s on channel %s ends: %r", session.info.session_id, session.info.channel_id, failure)
            session.fail(failure, self._delivery)
        else:
            if late_ms is not None:
                self._lateness_ms.append(late_ms)
        if session.over:
            self._playing.discard(session)
        else:
            self._schedule(session)


def _audio(source: Source, *, loop: bool) -> Iterator[bytes]:
    """Yield a source's audio once or, if there is any, again and again."""
    while True:
        silent = True
        for chunk in source.chunks():
            silent = silent and not chunk
            yield chunk
        if silent or not loop:
            return


def _now_us() -> int:
    return time.time_ns() // _NS_PER_US
