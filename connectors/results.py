"""How results are read: the rules that every reader shares, and a reader that follows the result topics.

The topics hold more than a person should see: records come again after a restart, and a process that was stopped and wakes up writes behind
its successor. :class:`Results` turns any such stream into one view of each session:

* *Finals are canonical*: whoever wrote it, a segment's final is the same, so the first one stands, the same again is a repeat, and a
  different one is a conflict, counted and reported, never shown. The epoch does not fence finals: compaction may keep the copy that a
  fenced writer wrote last, and dropping that copy would lose its words.
* *All else is fenced*: of partials, second passes, session states and coverage, the highest epoch of a session and writing stage counts.
* *Order is (is_final, end_sample)*, never a counter: a partial never follows its segment's end and never runs backwards within an epoch.
* *Cancelled segments vanish*; a second pass (``refined``) stands beside its final.

Nothing here depends on how the topics' records interleave.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from schemas.codec import Codec, DecodeError
from schemas.records import SAMPLE_RATE_HZ, Coverage, Partial, Session, SessionRecord, Transcript
from streams.registry import codec_for
from streams.settings import Settings
from streams.topics import COVERAGE, PARTIALS, SESSIONS, TRANSCRIPTS, Topic

__all__ = [
    "FROM_THE_BEGINNING",
    "Change",
    "ChangeKind",
    "ConversationView",
    "Filter",
    "LatencyWindow",
    "Received",
    "Results",
    "ResultsConsumer",
    "SegmentView",
    "SessionView",
    "Spans",
    "Turn",
    "latency_ms",
    "quantile",
    "to_ms",
]

_log = logging.getLogger(__name__)

#: Frame latencies are reported over this long: 150 frames of 200 ms, enough for a P95 that is no single frame.
LATENCY_WINDOW_US: Final = 30_000_000
#: A bound on the window where a spool is answered at once; 30 s of 20 ms frames are 1,500.
_LATENCY_WINDOW_FRAMES: Final = 3_000

ChangeKind = Literal["session", "partial", "final", "cancelled", "refined", "conflict", "frame"]


def to_ms(samples: int) -> int:
    """Return a position in samples as ms from the session's start."""
    return samples * 1_000 // SAMPLE_RATE_HZ


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile: the smallest value that at least ``share`` of them do not exceed.

    Args:
        ordered: values, ascending, at least one.
        share: between 0 (the least value) and 1 (the greatest).
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def latency_ms(captured_us: int, arrived_us: int) -> float | None:
    """Return the time from capture to arrival in ms, or None where no capture is stamped; clocks that disagree give 0, never less."""
    return max(0, arrived_us - captured_us) / 1_000 if captured_us else None


class Spans:
    """Which samples have been seen, as disjoint spans in order: one span as long as nothing is missing."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._ends, strict=True))

    def add(self, start: int, end: int) -> bool:
        """Add samples [start, end); return whether any of them is new."""
        first = bisect_left(self._ends, start)  # the first span that touches or follows the new one
        last = first
        while last < len(self._starts) and self._starts[last] <= end:
            last += 1
        if first == last:
            if start >= end:
                return False
            self._starts.insert(first, start)
            self._ends.insert(first, end)
            return True
        if any(self._starts[at] <= start and end <= self._ends[at] for at in range(first, last)):
            return False
        self._starts[first:last] = [min(start, self._starts[first])]
        self._ends[first:last] = [max(end, self._ends[last - 1])]
        return True


class LatencyWindow:
    """Latencies of the last while.

    Args:
        span_us: how long a value counts, by the time it arrived.
    """

    def __init__(self, span_us: int = LATENCY_WINDOW_US) -> None:
        self._span_us = span_us
        self._values: deque[tuple[int, float]] = deque(maxlen=_LATENCY_WINDOW_FRAMES)

    def add(self, arrived_us: int, latency: float) -> None:
        """Add a latency in ms."""
        self._values.append((arrived_us, latency))
        self._forget(arrived_us)

    def values_ms(self, now_us: int) -> list[float]:
        """Return the latencies that count now, in ms, ascending."""
        self._forget(now_us)
        return sorted(latency for _, latency in self._values)

    def _forget(self, now_us: int) -> None:
        while self._values and self._values[0][0] < now_us - self._span_us:
            self._values.popleft()


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A finished segment.

    Attributes:
        segment: its number within the session.
        final: what was said.
        refined: the newest second pass, which stands beside the final and never alters it.
    """

    segment: int
    final: Transcript | None = None
    refined: Transcript | None = None

    @property
    def transcript(self) -> Transcript:
        """The final; the second pass where only that is known."""
        known = self.final or self.refined
        assert known is not None  # noqa: S101 - a view is made of a transcript
        return known


@dataclass(slots=True)
class SessionView:
    """One channel of one call, as a person should see it.

    Attributes:
        session_id: the session.
        channel_id: its telephone channel.
        conversation_id: joins the parties of a call.
        record: the newest Session record, None until one came.
        segments: the finished segments by number; cancelled ones are not among them.
        partials: the newest text of each open segment by number: more than one where a final takes longer than the next onset.
        cancelled: numbers of the segments that turned out too short.
        frames: which samples recorder frames have been answered for.
        frames_answered: frames answered, each counted once.
        frames_repeated: answers of frames that had been answered.
        latency: from a frame's capture until its answer could be read.
        text_latency_ms: the same for the newest text and the audio that it reaches to; None until text came.
        text_us: when the newest text arrived, Unix time; 0 until text came.
        touched_us: when the newest record arrived, Unix time.
        epochs: the highest epoch seen by kind of record and writing stage.
    """

    session_id: str
    channel_id: str
    conversation_id: str
    record: Session | None = None
    segments: dict[int, SegmentView] = field(default_factory=dict)
    partials: dict[int, Partial] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    frames: Spans = field(default_factory=Spans)
    frames_answered: int = 0
    frames_repeated: int = 0
    latency: LatencyWindow = field(default_factory=LatencyWindow)
    text_latency_ms: float | None = None
    text_us: int = 0
    touched_us: int = 0
    epochs: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def state(self) -> Literal["open", "idle", "closed"]:
        """Its state; open as long as nothing else is known."""
        return self.record.state if self.record else "open"

    @property
    def party(self) -> str:
        """Who speaks; empty where that is not known."""
        return self.record.party if self.record else ""

    @property
    def started_us(self) -> int:
        """When its first sample was captured, Unix time; 0 where that is not known."""
        return self.record.started_us if self.record else 0

    def finals(self) -> list[SegmentView]:
        """Return the finished segments in the order of their audio."""
        return sorted(self.segments.values(), key=lambda view: (view.transcript.position_samples, view.segment))

    def open_partials(self) -> list[Partial]:
        """Return the open texts in the order of their audio."""
        return sorted(self.partials.values(), key=lambda partial: (partial.position_samples, partial.segment))

    def is_settled(self, segment: int) -> bool:
        """Return whether the segment has its final or was cancelled."""
        if segment in self.cancelled:
            return True
        view = self.segments.get(segment)
        return view is not None and view.final is not None


class Turn(NamedTuple):
    """A finished segment and whose it is."""

    session: SessionView
    segment: SegmentView

    @property
    def said_us(self) -> int:
        """When it began, Unix time; from the session's start where that is not known."""
        return self.session.started_us + to_ms(self.segment.transcript.position_samples) * 1_000


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A call: its parties side by side.

    Attributes:
        conversation_id: the call.
        sessions: its channels, in the order of their names.
    """

    conversation_id: str
    sessions: tuple[SessionView, ...]

    def turns(self) -> list[Turn]:
        """Return everybody's finished segments in the order in which they were said."""
        turns = [Turn(session, segment) for session in self.sessions for segment in session.finals()]
        return sorted(turns, key=lambda turn: turn.said_us)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which sessions a reader wants; an empty set means all."""

    sessions: frozenset[str] = frozenset()
    channels: frozenset[str] = frozenset()
    conversations: frozenset[str] = frozenset()

    def wants(self, session_id: str, channel_id: str, conversation_id: str) -> bool:
        """Return whether a session is among them."""
        return (
            (not self.sessions or session_id in self.sessions)
            and (not self.channels or channel_id in self.channels)
            and (not self.conversations or conversation_id in self.conversations)
        )

    @property
    def is_open(self) -> bool:
        """Whether it lets everything through."""
        return not (self.sessions or self.channels or self.conversations)


@dataclass(frozen=True, slots=True)
class Change:
    """What a record changed.

    Attributes:
        kind: what changed; ``conflict``: nothing, for a final (or cancellation) differs from the one that stands.
        session: the session, changed.
        segment: number of the segment; -1 where it is not about one.
        record: the record that said so.
    """

    kind: ChangeKind
    session: SessionView
    segment: int
    record: SessionRecord


class Results:
    """The view of every session, kept by :meth:`apply`. Knows nothing of Kafka.

    Attributes:
        sessions: the views by session id.
        repeats: records dropped because their content was there.
        fenced: records dropped because a newer owner had written.
        conflicts: finals that differed from the one that stands.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, SessionView] = {}
        self.repeats = 0
        self.fenced = 0
        self.conflicts = 0

    def apply(self, record: SessionRecord, arrived_us: int) -> Change | None:
        """Take a record from a result topic.

        Args:
            record: a Session, Partial, Transcript or Coverage; others are passed over.
            arrived_us: when it could be read, Unix time.

        Returns:
            What it changed, or None where it changed nothing that a person could see.
        """
        if not isinstance(record, (Session, Partial, Transcript, Coverage)):
            return None
        view = self.sessions.get(record.session_id)
        if view is None:
            view = SessionView(record.session_id, record.channel_id, record.conversation_id)
            self.sessions[record.session_id] = view
        view.touched_us = max(view.touched_us, arrived_us)
        match record:
            case Session():
                return self._session(view, record)
            case Partial():
                return self._partial(view, record, arrived_us)
            case Coverage():
                return self._coverage(view, record, arrived_us)
            case Transcript(kind="refined"):
                return self._refined(view, record)
            case Transcript():
                return self._settled(view, record, arrived_us)

    def conversation(self, conversation_id: str) -> ConversationView | None:
        """Return a call, or None if nothing is known of it."""
        sessions = [view for view in self.sessions.values() if view.conversation_id == conversation_id]
        sessions.sort(key=lambda view: (view.channel_id, view.started_us, view.session_id))
        return ConversationView(conversation_id, tuple(sessions)) if sessions else None

    def forget(self, session_id: str) -> None:
        """Drop a session's view."""
        self.sessions.pop(session_id, None)

    def forget_before(self, closed_us: int, open_us: int) -> None:
        """Drop the views of sessions that nothing was read of since a Unix time: the one for closed sessions, the other for all else."""
        for view in list(self.sessions.values()):
            if view.touched_us < (closed_us if view.state == "closed" else open_us):
                self.forget(view.session_id)

    def _is_fenced(self, view: SessionView, record: SessionRecord, stage: str = "inference") -> bool:
        # Each topic has its own order, so each kind of record its own fence: a state read after a newer partial is not a zombie's.
        lane = (type(record).__name__, stage)
        if record.epoch < view.epochs.get(lane, 0):
            self.fenced += 1
            return True
        view.epochs[lane] = record.epoch
        return False

    def _repeat(self) -> Change | None:
        self.repeats += 1
        return None

    def _session(self, view: SessionView, record: Session) -> Change | None:
        def rank(session: Session) -> tuple[bool, int, int, int]:
            return session.state == "closed", session.position_samples, session.covered_to_sample, session.decoded_to_sample

        if self._is_fenced(view, record):
            return None
        if view.record is not None and (rank(record) < rank(view.record) or _same_state(record, view.record)):
            return self._repeat()
        view.record = record
        return Change("session", view, -1, record)

    def _partial(self, view: SessionView, record: Partial, arrived_us: int) -> Change | None:
        if self._is_fenced(view, record):
            return None
        current = view.partials.get(record.segment)
        behind = current is not None and (record.epoch, record.end_sample) < (current.epoch, current.end_sample)
        if behind or view.is_settled(record.segment):
            return self._repeat()
        view.partials[record.segment] = record
        if current is not None and (record.text, record.stable_text) == (current.text, current.stable_text):
            return self._repeat()
        self._heard(view, record, arrived_us)
        return Change("partial", view, record.segment, record)

    def _coverage(self, view: SessionView, record: Coverage, arrived_us: int) -> Change | None:
        if self._is_fenced(view, record, record.stage):
            return None
        if not view.frames.add(record.position_samples, record.end_sample):
            view.frames_repeated += 1
            return self._repeat()
        view.frames_answered += 1
        latency = latency_ms(record.stamps.captured_us, arrived_us)
        if latency is not None:
            view.latency.add(arrived_us, latency)
        return Change("frame", view, -1, record)

    def _refined(self, view: SessionView, record: Transcript) -> Change | None:
        if self._is_fenced(view, record):
            return None
        known = view.segments.get(record.segment, SegmentView(record.segment))
        if record.segment in view.cancelled or (known.refined is not None and _canonical(known.refined) == _canonical(record)):
            return self._repeat()
        view.segments[record.segment] = SegmentView(record.segment, known.final, record)
        return Change("refined", view, record.segment, record)

    def _settled(self, view: SessionView, record: Transcript, arrived_us: int) -> Change | None:
        number = record.segment
        known = view.segments.get(number, SegmentView(number))
        standing = _CANCELLED if number in view.cancelled else known.final and _canonical(known.final)
        if standing is not None:
            if _canonical(record) == standing:
                return self._repeat()
            self.conflicts += 1
            _log.warning("segment %d of session %s came as a different %s; the first version stands", number, view.session_id, record.kind)
            return Change("conflict", view, number, record)
        view.partials.pop(number, None)
        if record.kind == "cancelled":
            view.cancelled.add(number)
            view.segments.pop(number, None)
            return Change("cancelled", view, number, record)
        view.segments[number] = SegmentView(number, record, known.refined)
        self._heard(view, record, arrived_us)
        return Change("final", view, number, record)

    @staticmethod
    def _heard(view: SessionView, record: Partial | Transcript, arrived_us: int) -> None:
        if record.text:
            view.text_us = max(view.text_us, arrived_us)
            view.text_latency_ms = latency_ms(record.stamps.captured_us, arrived_us)


_CANCELLED: Final[tuple[object, ...]] = ("cancelled",)


def _canonical(record: Transcript) -> tuple[object, ...]:
    """Return what must be the same in every version of a segment's end; confidence, stamps and epoch stand outside."""
    if record.kind == "cancelled":
        return _CANCELLED
    words = tuple((word.text, word.start_ms, word.end_ms) for word in record.words)
    return record.position_samples, record.end_sample, record.text, record.raw_text, words, record.model_digest, record.hotword_version


def _same_state(one: Session, other: Session) -> bool:
    return _visible(one) == _visible(other)


def _visible(session: Session) -> tuple[object, ...]:
    return tuple(getattr(session, name) for name in session.__struct_fields__ if name not in {"epoch", "stamps"})


#: How far back each topic is read, in ms; None: from its beginning. Partials and answers matter while fresh: a segment lasts 20 s at most.
FROM_THE_BEGINNING: Final[Mapping[Topic, int | None]] = {SESSIONS: None, TRANSCRIPTS: None, PARTIALS: 30_000, COVERAGE: 30_000}

#: Records handed over at once at most: a snapshot is taken in steps that leave room for whoever shares the event loop.
_BATCH_RECORDS: Final = 500
#: How long a poll waits; also how soon a stop is noticed.
_POLL_S: Final = 0.1
#: How often partitions are looked up: new ones are read too, and a cluster that does not answer is noticed.
_REFRESH_S: Final = 10.0
_METADATA_TIMEOUT_S: Final = 5.0


class Received(NamedTuple):
    """A record and when it could be read: Unix time; for what was there before, when the producer sent it."""

    record: SessionRecord
    arrived_us: int


class ResultsConsumer:
    """Follows the result topics in a thread: first what is there, then what comes. It joins no group and commits nothing.

    Args:
        settings: the cluster and the namespace.
        deliver: takes the records of each step, in the reader's thread; reading goes on when it returns.
        caught_up: called once, when all that was there has been delivered.
        failed: called where reading cannot go on.
        since_ms: the topics to read and how far back.
        codec: reads the values.

    Attributes:
        reachable: whether the cluster answered lately.
        damaged: values that could not be decoded; they are passed over and logged.
    """

    def __init__(
        self,
        settings: Settings,
        deliver: Callable[[Sequence[Received]], None],
        *,
        caught_up: Callable[[], object] = lambda: None,
        failed: Callable[[Exception], object] = lambda _: None,
        since_ms: Mapping[Topic, int | None] = FROM_THE_BEGINNING,
        codec: Codec | None = None,
    ) -> None:
        self.reachable = False
        self.damaged = 0
        self._settings = settings
        self._deliver = deliver
        self._caught_up = caught_up
        self._failed = failed
        self._since_ms = dict(since_ms)
        self._codec = codec or codec_for(settings.schema_registry_url)
        self._consumer: Any = None
        self._behind: set[tuple[str, int]] = set()
        self._assigned: set[tuple[str, int]] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)

    def start(self) -> None:
        """Find the topics and begin to read.

        Raises:
            ClusterError: the cluster does not answer, or a topic is missing.
        """
        from streams.kafka import partitions_of, plain_consumer, start_offsets

        now_ms = time.time_ns() // 1_000_000
        partitions: list[Any] = []
        for topic, since_ms in self._since_ms.items():
            found = partitions_of(self._settings, [topic])
            begin = start_offsets(self._settings, found, "beginning" if since_ms is None else now_ms - since_ms if since_ms else "end")
            for partition in found:
                partition.offset = begin[partition.topic, partition.partition]
            partitions += found
        self._behind = {(partition.topic, partition.partition) for partition in partitions}
        self._assigned = set(self._behind)
        self._consumer = plain_consumer(self._settings, partitions, config={"enable.partition.eof": True})
        self.reachable = True
        self._thread.start()

    def stop(self) -> None:
        """Stop reading and wait until the last step has been delivered; harmless if it never began."""
        self._stopping.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as failure:  # noqa: BLE001 - whoever started this thread decides
            _log.debug("reading results failed", exc_info=True)
            self._failed(failure)
        finally:
            self._consumer.close()

    def _follow(self) -> None:
        refresh_at = time.monotonic() + _REFRESH_S
        behind = True
        while not self._stopping.is_set():
            received = self._next_records()
            if received:
                self._deliver(received)
            if behind and not self._behind:
                behind = False
                self._caught_up()
            if time.monotonic() >= refresh_at:
                self._refresh()
                refresh_at = time.monotonic() + _REFRESH_S

    def _next_records(self) -> list[Received]:
        """Return what is there now, waiting a moment for the first record."""
        received: list[Received] = []
        message = self._consumer.poll(_POLL_S)
        while message is not None:
            if message.error() is not None:
                self._take_error(message)
            else:
                self._take(message, received)
            if len(received) >= _BATCH_RECORDS:
                break
            message = self._consumer.poll(0)
        return received

    def _take(self, message: Any, received: list[Received]) -> None:
        if message.value() is None:  # compaction's tombstone
            return
        try:
            record = self._codec.decode(message.value())
        except DecodeError as damage:
            self.damaged += 1
            _log.warning("passing over %s partition %d offset %d: %s", message.topic(), message.partition(), message.offset(), damage)
            return
        if isinstance(record, SessionRecord):
            was_there = (message.topic(), message.partition()) in self._behind
            received.append(Received(record, message.timestamp()[1] * 1_000 if was_there else time.time_ns() // 1_000))

    def _take_error(self, message: Any) -> None:
        from confluent_kafka import KafkaError, KafkaException

        error = message.error()
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka's own name
            self._behind.discard((message.topic(), message.partition()))
        elif error.fatal():
            raise KafkaException(error)
        else:
            _log.warning("reading %s: %s", message.topic(), error.str())

    def _refresh(self) -> None:
        """Look up the partitions: new ones are read from their beginning, for all in them came since."""
        from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition

        try:
            topics = self._consumer.list_topics(timeout=_METADATA_TIMEOUT_S).topics
        except KafkaException as silence:
            if self.reachable:
                _log.warning("Kafka at %s does not answer: %s", self._settings.bootstrap_servers, silence.args[0].str())
            self.reachable = False
            return
        self.reachable = True
        names = [topic.full_name(self._settings) for topic in self._since_ms]
        new = {(name, number) for name in names if name in topics for number in topics[name].partitions} - self._assigned
        if new:
            _log.info("reading %d new partitions", len(new))
            self._assigned |= new
            self._consumer.incremental_assign([TopicPartition(name, number, OFFSET_BEGINNING) for name, number in sorted(new)])
