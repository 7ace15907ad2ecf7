"""The replay: stages of its own, in a namespace of its own, fed with what is stored, no faster than it is allowed to work."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Producer

from connectors.recorder.producer import AudioProducer
from connectors.results import Received, Results, ResultsConsumer, SessionView
from ops.replay.catalog import Call
from ops.replay.compare import Comparison, compare
from ops.replay.stored import audio_of, finals_of
from schemas.codec import Codec
from schemas.records import SAMPLE_RATE_HZ, AudioFrame, FlowRecord, SessionStart, Transcript
from streams.errors import UserError
from streams.kafka import idempotent_producer_config, read_to_end
from streams.registry import codec_for
from streams.settings import Settings
from streams.topic_admin import delete_topics
from streams.topics import COVERAGE, HOTWORDS, SESSIONS, TRANSCRIPTS

if TYPE_CHECKING:
    from ops.processes import System

__all__ = ["MAX_CALLS_AT_ONCE", "Replay", "replayed_settings"]

#: Calls that are under way at once, each on a partition of its own.
MAX_CALLS_AT_ONCE: Final = 8
_TICK_S: Final = 0.02
_PAUSE_S: Final = 0.1
#: What may be sent ahead of the pace.
_BURST_S: Final = 1.0
#: An engine that hangs is killed and restarted within its timeout, and then has to load its model.
_STALL_BEYOND_ENGINE_TIMEOUT_S: Final = 60.0
_FLUSH_S: Final = 10.0
#: Between a list's name and its version, in the key of a copy that outlives the next push.
_ARCHIVED: Final = b":"


def replayed_settings(live: Settings, wishes: Mapping[str, Any], into: str = "") -> dict[str, Any]:
    """Return the settings of the replay's own stages that differ from the live ones.

    Args:
        live: the system that recorded the calls.
        wishes: what is to be different.
        into: the namespace of the replay; empty: a new one.
    """
    return {
        **wishes,
        "bootstrap_servers": live.bootstrap_servers,
        "namespace": into or f"{live.namespace}.replay-{secrets.token_hex(3)}",
        "partitions": MAX_CALLS_AT_ONCE,
        # One process answers for all of it; what is on its topics is gone with the namespace, or kept on purpose.
        "metrics_port": 0,
    }


@dataclass(slots=True, eq=False)
class _Feed:
    """A call that is being sent."""

    call: Call
    partition: int
    records: Iterator[tuple[FlowRecord, bytes]]
    next: tuple[FlowRecord, bytes] | None = None
    starts_at_sample: int = 0
    sent: int = 0
    lost: list[str] = field(default_factory=list)

    def advance(self) -> None:
        self.next = next(self.records, None)


class Replay:
    """Sends calls through a system of their own and compares what comes of it. A context manager.

    Args:
        live: the system that recorded the calls.
        system: the replay's own, entered.
        load: as much work as so many live channels, at most.
        keep: leave the replay's topics where they are.
    """

    def __init__(self, live: Settings, system: System, *, load: float, keep: bool = False) -> None:
        self._live = live
        self._system = system
        self._load = load
        self._keep = keep
        self._codec: Codec = codec_for(live.schema_registry_url)
        self._lock = threading.Lock()
        self._results = Results()
        self._heard_s = time.monotonic()
        self._failures: list[Exception] = []
        self._stack = ExitStack()

    def __enter__(self) -> Replay:
        with ExitStack() as stack:
            consumer = ResultsConsumer(
                self._system.settings,
                self._take,
                failed=self._failures.append,
                since_ms=dict.fromkeys((COVERAGE, TRANSCRIPTS, SESSIONS)),
            )
            consumer.start()
            stack.callback(consumer.stop)
            self._copy_hotwords()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()
        if not self._keep:
            self._delete()

    def compare(self, calls: Sequence[Call], show: Callable[[int, float], None] = lambda _done, _sent_s: None) -> Iterator[Comparison]:
        """Replay calls and yield how each differs from what is stored, as they are finished.

        Args:
            calls: calls that are over.
            show: told again and again how many calls are done, and how many seconds of audio were sent.

        Raises:
            UserError: nothing comes any more, or records were not taken.
        """
        stored = finals_of(self._live, self._codec, list(calls))
        producer = AudioProducer(self._system.settings)
        waiting = deque(calls)
        free = list(range(MAX_CALLS_AT_ONCE))
        sending: list[_Feed] = []
        settling: list[_Feed] = []
        done, sent_s, began_s = 0, 0.0, time.monotonic()
        self._heard_s = began_s
        while waiting or sending or settling:
            while free and waiting:
                call = waiting.popleft()
                feed = _Feed(call, free.pop(), audio_of(self._live, self._codec, call))
                feed.advance()
                sending.append(feed)
            for feed in list(sending):
                sent_s += self._send(feed, producer, sent_s < (time.monotonic() - began_s) * self._load + _BURST_S)
                if feed.next is None:
                    sending.remove(feed)
                    settling.append(feed)
            producer.poll(_TICK_S)
            for feed in [feed for feed in settling if feed.sent == 0 or self._is_finished(feed)]:
                settling.remove(feed)
                free.append(feed.partition)
                done += 1
                yield self._compared(feed, stored[feed.call.session_id])
            show(done, sent_s)
            self._check(settling)
        producer.finish(time.monotonic() + _FLUSH_S)

    def _send(self, feed: _Feed, producer: AudioProducer, may: bool) -> float:
        """Send what comes next of a call up to its next frame, if it may; return how many seconds of audio that were."""
        while may and feed.next is not None:
            record, value = feed.next
            if not producer.offer(
                feed.partition, record.channel_id.encode(), value, lambda error: feed.lost.append(str(error)) if error else None
            ):
                return 0.0
            if isinstance(record, SessionStart):
                feed.starts_at_sample = record.position_samples
            feed.sent += 1
            feed.advance()
            if isinstance(record, AudioFrame):
                rate_bytes = record.sample_rate_hz * (2 if record.encoding == "pcm_s16le" else 1)
                return len(record.payload) / rate_bytes if rate_bytes else 0.0
        return 0.0

    def _compared(self, feed: _Feed, stored: Sequence[Transcript]) -> Comparison:
        with self._lock:
            view = self._results.sessions.get(feed.call.session_id)
            replayed = [segment.final for segment in view.finals() if segment.final is not None] if view is not None else []
            self._results.forget(feed.call.session_id)
        note = ""
        if not feed.sent:
            note = "its audio is gone from the log"
        elif feed.starts_at_sample:
            note = f"its first {feed.starts_at_sample / SAMPLE_RATE_HZ:.1f} s are gone from the log"
            stored = [final for final in stored if final.position_samples >= feed.starts_at_sample]
        session = feed.call.session
        return compare(session.session_id, session.channel_id, session.conversation_id, stored, replayed, note)

    # ------------------------------------------------------------------ what comes of it

    def _take(self, received: Sequence[Received]) -> None:
        with self._lock:
            self._heard_s = time.monotonic()
            for record, arrived_us in received:
                self._results.apply(record, arrived_us)

    def _is_finished(self, feed: _Feed) -> bool:
        with self._lock:
            view: SessionView | None = self._results.sessions.get(feed.call.session_id)
            return view is not None and view.state == "closed" and view.record is not None and len(view.finals()) >= view.record.finals

    def _check(self, settling: Sequence[_Feed]) -> None:
        self._system.check()
        if self._failures:
            raise self._failures[0]
        for feed in settling:
            if feed.lost:
                raise UserError(f"{len(feed.lost)} records of session {feed.call.session_id} were not taken", feed.lost[0])
        stall_s = self._system.settings.engine_timeout_ms / 1_000 + _STALL_BEYOND_ENGINE_TIMEOUT_S
        if settling and time.monotonic() - self._heard_s > stall_s:
            workers = self._system.workers
            if workers is not None:
                workers.listen(1.5)
            raise UserError(
                f"Nothing came for {stall_s:.0f} s, and {len(settling)} calls are not finished", workers.describe() if workers else ""
            )

    # ------------------------------------------------------------------ its namespace

    def _copy_hotwords(self) -> None:
        """Give the replay every version of the hotwords that a call may name, and put none of its own into force."""
        producer = Producer(idempotent_producer_config(self._system.settings))
        target = HOTWORDS.full_name(self._system.settings)
        for message in read_to_end(self._live, [HOTWORDS]):
            key = message.key()
            if key is not None and _ARCHIVED in bytes(key):
                producer.produce(target, message.value(), key)
        if producer.flush(_FLUSH_S):
            raise UserError(f"The hotwords could not be copied to {target}")

    def _delete(self) -> None:
        delete_topics(self._system.settings)
