"""The runtime around a stage's core: what its author cannot get wrong any more.

One :class:`Stage` reads one topic through a Faust agent and owns, for each partition that is its own at the moment, a :class:`Tenure`:
which offset comes next, which inputs are settled, where each session stands. It

* checks that Kafka offsets are contiguous: a hole is read again, and gone over only if the offsets are gone for good;
* drops repeats (by ordinal) and zombies (by epoch), and refuses what cannot be read, onto the rejected topic with its reason;
* hands everything that is ready, over all sessions, to the core in one step;
* numbers what the core emits, marks it with the partition's epoch and sends it;
* commits the core's state with the offsets once everything before it is acknowledged;
* begins each takeover by committing the next epoch: only the owner can, and only then does it emit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast
from zlib import crc32

import msgspec
from aiokafka.structs import TopicPartition
from mode import Service

from schemas.codec import Codec, DecodeError
from schemas.records import (
    Coverage,
    FlowRecord,
    LogEvent,
    Partial,
    Record,
    Rejected,
    Session,
    SessionRecord,
    SessionStart,
    StageName,
    Timeout,
    Transcript,
)
from streams import metrics, topics
from streams.checkpoint import CommitRefusedError, Committed, Frontier, OffsetStore, SessionSnapshot, Snapshot, SnapshotError, Track
from streams.core import Core, Emitter, Input, SessionKey, SessionState
from streams.outbox import Outbox
from streams.settings import Settings
from streams.topics import Topic

__all__ = ["Route", "Stage", "Tenure", "record_key"]

log = logging.getLogger(__name__)

#: Inputs that may wait for the next step before reading pauses: 4 s of 50 channels at 5 frames a second.
_READY_LIMIT: Final = 1_000
#: Inputs that may be open (taken, not settled) before reading pauses: 20 s segments of 50 channels at 5 blocks a second.
_OPEN_LIMIT: Final = 5_000
_BACKPRESSURE_WAIT_S: Final = 0.01
_COMMIT_INTERVAL_S: Final = 0.05
_REFUSED_WAIT_S: Final = 0.3
_DRAIN_TIMEOUT_S: Final = 2.0
_TIMEOUT_CHECK_S: Final = 1.0
#: Ended sessions that a partition remembers: far more than can end within a zombie's life.
_ENDED_REMEMBERED: Final = 16


@dataclass(frozen=True, slots=True)
class Route:
    """Where a stage stands between the topics.

    Attributes:
        stage: its name.
        source: the topic that it reads.
        onward: the topic for the records that go on to the next stage, if there is one.
        ordinals_jump: whether the source may leave out ordinals: only the recorder's, where it means lost audio.
    """

    stage: StageName
    source: Topic
    onward: Topic | None
    ordinals_jump: bool = False


def record_key(record: Record) -> str:
    """Return what a record is keyed by on its topic."""
    match record:
        case Transcript(kind="refined"):
            return f"{record.session_id}:{record.segment}:refined"
        case Transcript():
            return f"{record.session_id}:{record.segment}"
        case Session():
            return record.session_id
        case LogEvent():
            return f"{record.session_id}:{record.position_samples}:{record.event}"
        case SessionRecord():
            return record.channel_id
        case _:
            raise TypeError(f"{type(record).__name__} belongs to no session")


_RESULT_TOPICS: Final[Mapping[type[Record], Topic]] = {
    Coverage: topics.COVERAGE,
    Partial: topics.PARTIALS,
    Transcript: topics.TRANSCRIPTS,
    Session: topics.SESSIONS,
    LogEvent: topics.LOG,
    # A timeout is an input: it goes where the audio comes from, and acts when it is read there.
    Timeout: topics.AUDIO,
}


def _hash(session_id: str) -> int:
    return crc32(session_id.encode())


@dataclass(slots=True)
class _Standing:
    """One session of a tenure: the last track before each input that a restart might have to begin at."""

    channel_id: str
    conversation_id: str
    read_from_offset: int
    from_offset: int
    epoch: int
    ordinal: int
    next_ordinal: int
    seen_s: float
    position_samples: int = 0
    tracks: deque[tuple[int, int, int]] = field(default_factory=deque)

    def track_before(self, offset: int) -> Track:
        """Return where the session stood before an input; earlier ones are forgotten."""
        while len(self.tracks) > 1 and self.tracks[1][0] < offset:
            self.tracks.popleft()
        _, epoch, ordinal = self.tracks[0]
        return Track(epoch, ordinal, self.next_ordinal)


class Tenure:
    """A worker's time as the owner of one partition of a stage's topic."""

    def __init__(self, number: int, snapshot: Snapshot, start: int) -> None:
        self.number = number
        self.alive = True
        self.epoch = snapshot.epoch
        self.emit_from_offset = snapshot.emit_from_offset
        self.frontier = Frontier(start)
        self.ended: deque[int] = deque(snapshot.ended, maxlen=_ENDED_REMEMBERED)
        #: A captured state and its packed form, until it is committed.
        self.candidate: tuple[Snapshot, str] | None = None
        self.captured_s = 0.0
        self.dirty = False
        self.rereading_from: int | None = None
        self.passed_over = -1
        now_s = time.monotonic()
        self.sessions: dict[str, _Standing] = {}
        for each in snapshot.sessions:
            standing = _Standing(
                channel_id="",
                conversation_id="",
                read_from_offset=each.read_from_offset,
                from_offset=each.from_offset,
                epoch=each.track.upstream_epoch,
                ordinal=each.track.upstream_ordinal,
                next_ordinal=each.track.next_ordinal,
                seen_s=now_s,
            )
            standing.tracks.append((-1, standing.epoch, standing.ordinal))
            self.sessions[each.session_id] = standing


class Stage(Service, Emitter):
    """One stage of one worker.

    Args:
        app: the Faust app.
        settings: the worker's settings.
        route: where the stage stands.
        make_core: makes its core; given the settings and the emitter, which is this stage.
        codec: encodes and decodes records.
        outbox: sends them; shared by the stages of a worker.
    """

    def __init__(
        self,
        app: Any,
        settings: Settings,
        route: Route,
        make_core: Callable[[Settings, Emitter], Core],
        codec: Codec,
        outbox: Outbox,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.route = route
        self.source_name = route.source.full_name(settings)
        self.core = make_core(settings, self)
        self.tenures: dict[int, Tenure] = {}
        self._app = app
        self._settings = settings
        self._codec = codec
        self._outbox = outbox
        self._offsets = OffsetStore(app)
        self._ready: list[Input] = []
        self._between_steps: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._committing = asyncio.Lock()
        self._failure: BaseException | None = None
        self._draining = False
        self._busy_s = 0.0

    # ------------------------------------------------------------------ reading

    async def accept(self, event: Any) -> None:
        """Take one event of the agent's stream."""
        while len(self._ready) >= _READY_LIMIT or self.open_inputs >= _OPEN_LIMIT:  # noqa: ASYNC110 two limits, seldom reached
            await asyncio.sleep(_BACKPRESSURE_WAIT_S)
        message = event.message
        await self.read(message.partition, message.offset, round(message.timestamp * 1_000), message.key, message.value)

    async def read(self, partition: int, offset: int, appended_ms: int, key: bytes | None, value: bytes | None) -> None:
        """Take one record as it lies on the source topic."""
        tenure = self.tenures.get(partition)
        if tenure is None or self._draining:
            return
        if offset != tenure.frontier.next_offset and not await self._continues(tenure, offset):
            return
        tenure.rereading_from = None
        metrics.INPUTS.labels(self.route.stage).inc()
        try:
            record = self._codec.decode(value)
        except DecodeError as unreadable:
            self._reject(tenure, offset, key, value, str(unreadable))
            return
        if not isinstance(record, FlowRecord):
            self._reject(tenure, offset, key, value, f"a {type(record).__name__} does not belong on this topic")
            return
        taken = self._place(tenure, offset, record)
        if taken is None:
            self._reject(tenure, offset, key, value, f"its session {record.session_id} was never started here")
        elif taken:
            warm = offset < tenure.sessions[record.session_id].from_offset
            if warm:
                tenure.frontier.skip(offset)
            else:
                tenure.frontier.begin(offset)
                tenure.dirty = True
            self._ready.append(Input(SessionKey(partition, record.session_id), offset, appended_ms, record, warm, tenure))
            self._wake.set()
        else:
            tenure.frontier.skip(offset)

    async def _continues(self, tenure: Tenure, offset: int) -> bool:
        """Decide on an offset that is not the next one; return whether to go on with it all the same."""
        expected = tenure.frontier.next_offset
        if offset < expected:
            return False  # read before: the flow was sought back to the committed offset
        tp = TopicPartition(self.source_name, tenure.number)
        if tenure.rereading_from is None or (offset > tenure.passed_over and tenure.passed_over >= 0):
            if tenure.rereading_from is None:
                log.warning("%s %s: offset %d came and %d was due; reading again", self.route.stage, tp, offset, expected)
                metrics.HOLES.labels(self.route.stage, "reread").inc()
                tenure.rereading_from = expected
                await self._app.consumer.seek(tp, expected)
            tenure.passed_over = offset
            return False
        # The flow went back and came to this offset again: what lies between is no data, or was deleted.
        log.error("%s %s: offsets %d to %d are gone for good", self.route.stage, tp, expected, offset - 1)
        metrics.HOLES.labels(self.route.stage, "gone").inc()
        tenure.passed_over = -1
        return True

    def _place(self, tenure: Tenure, offset: int, record: FlowRecord) -> bool | None:
        """Return whether to take a record, False to pass it over, or None if its session is unknown."""
        standing = tenure.sessions.get(record.session_id)
        if standing is None:
            if offset < tenure.emit_from_offset or _hash(record.session_id) in tenure.ended:
                return self._pass_over("repeat")
            if not isinstance(record, SessionStart):
                return self._pass_over("repeat") if isinstance(record, Timeout) else None
            standing = _Standing("", "", offset, offset, record.epoch, -1, 0, 0.0)
            standing.tracks.append((-1, record.epoch, -1))
            tenure.sessions[record.session_id] = standing
        standing.seen_s = time.monotonic()
        standing.channel_id, standing.conversation_id = record.channel_id, record.conversation_id
        standing.position_samples = max(standing.position_samples, record.position_samples)
        if offset < standing.from_offset:
            return offset >= standing.read_from_offset
        if isinstance(record, Timeout) and self.route.source is topics.AUDIO:
            return True  # written by a VAD among the recorder's records: outside their numbering
        if record.epoch < standing.epoch:
            return self._pass_over("zombie")
        if record.ordinal <= standing.ordinal:
            return self._pass_over("repeat")
        if record.ordinal > standing.ordinal + 1 and not self.route.ordinals_jump:
            log.error(
                "%s: records %d to %d of session %s never came",
                self.shortlabel,
                standing.ordinal + 1,
                record.ordinal - 1,
                record.session_id,
            )
            metrics.HOLES.labels(self.route.stage, "upstream").inc()
        standing.epoch, standing.ordinal = record.epoch, record.ordinal
        standing.tracks.append((offset, standing.epoch, standing.ordinal))
        return True

    def _pass_over(self, why: str) -> bool:
        metrics.DROPPED.labels(self.route.stage, why).inc()
        return False

    def _reject(self, tenure: Tenure, offset: int, key: bytes | None, value: bytes | None, reason: str) -> None:
        """Put a record that cannot be used onto the rejected topic, and go on after it."""
        log.warning("%s: record %d of %s-%d rejected: %s", self.shortlabel, offset, self.source_name, tenure.number, reason)
        metrics.REJECTED.labels(self.route.stage).inc()
        rejected = Rejected(
            topic=self.source_name,
            partition=tenure.number,
            offset=offset,
            stage=self.route.stage,
            reason=reason,
            at_us=time.time_ns() // 1_000,
            key=key,
            value=value,
        )
        tenure.frontier.begin(offset)
        tenure.dirty = True
        self._outbox.send(
            topics.REJECTED.full_name(self._settings), None, key, self._codec.encode(rejected), lambda: self._release(tenure, offset)
        )

    # ------------------------------------------------------------------ what follows

    def emit(self, cause: Input, records: Sequence[SessionRecord]) -> None:
        """Send what follows from an input."""
        tenure = cast("Tenure", cause.tenure)
        if not tenure.alive or cause.warm:
            return
        standing = tenure.sessions[cause.key.session_id]
        for record in records:
            fields: dict[str, int] = {"epoch": tenure.epoch}
            if isinstance(record, FlowRecord):
                fields["ordinal"] = standing.next_ordinal
                standing.next_ordinal += 1
            if cause.offset < tenure.emit_from_offset:
                continue  # it is on the broker since before the takeover
            topic = _RESULT_TOPICS.get(type(record), self.route.onward)
            if topic is None:
                raise TypeError(f"{self.shortlabel} emitted a {type(record).__name__}, for which it has no topic")
            self._send(tenure, cause.offset, topic, msgspec.structs.replace(record, **fields))

    def done(self, cause: Input) -> None:
        """Settle an input once what was emitted for it is acknowledged."""
        tenure = cast("Tenure", cause.tenure)
        if tenure.alive and not cause.warm:
            self._release(tenure, cause.offset)

    def _send(self, tenure: Tenure, offset: int, topic: Topic, record: SessionRecord) -> None:
        tenure.frontier.hold(offset)
        metrics.OUTPUTS.labels(self.route.stage, type(record).__name__).inc()
        self._outbox.send(
            topic.full_name(self._settings),
            tenure.number,
            record_key(record).encode(),
            self._codec.encode(record),
            lambda: self._release(tenure, offset),
        )

    def _release(self, tenure: Tenure, offset: int) -> None:
        if tenure.alive:
            tenure.frontier.release(offset)

    # ------------------------------------------------------------------ working

    @Service.task
    async def _work(self) -> None:
        """Step the core with whatever is ready, and capture its state when that is due."""
        interval_s = self._settings.snapshot_interval_ms / 1_000
        while not self.should_stop:
            try:
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            await self._step()
            self._capture(interval_s)

    async def _step(self) -> None:
        self._wake.clear()
        changes, self._between_steps = self._between_steps, []
        inputs, self._ready = self._ready, []
        for change in changes:
            change()
        inputs = [each for each in inputs if each.tenure.alive]  # type: ignore[attr-defined]
        if inputs:
            started_s = time.perf_counter()
            await self.core.step(inputs)
            took_s = time.perf_counter() - started_s
            self._busy_s += took_s
            metrics.STEP_SECONDS.labels(self.route.stage).observe(took_s)

    def _capture(self, interval_s: float) -> None:
        """Capture the state of each partition that changed, to be committed once everything before it is acknowledged."""
        now_s = time.monotonic()
        for tenure in self.tenures.values():
            if tenure.candidate is not None or not tenure.dirty or now_s - tenure.captured_s < interval_s:
                continue
            # Inputs that wait for the next step are not part of the core's state.
            offset = min((each.offset for each in self._ready if each.tenure is tenure), default=tenure.frontier.next_offset)
            if offset < tenure.emit_from_offset:
                continue  # a replay is going on: what is committed is still the best
            tenure.dirty, tenure.captured_s = offset < tenure.frontier.next_offset, now_s
            snapshot = self._snapshot(tenure, offset)
            tenure.candidate = snapshot, snapshot.pack(self._settings.snapshot_max_bytes)

    def _snapshot(self, tenure: Tenure, offset: int) -> Snapshot:
        open_sessions = []
        for session_id, standing in list(tenure.sessions.items()):
            if standing.from_offset >= offset:
                continue  # its start waits for the next step
            state = self.core.snapshot(SessionKey(tenure.number, session_id))
            if state is None:
                del tenure.sessions[session_id]
                tenure.ended.append(_hash(session_id))
                continue
            track = standing.track_before(state.from_offset)
            open_sessions.append(SessionSnapshot(session_id, state.read_from_offset, state.from_offset, track, state.state))
        return Snapshot(tenure.epoch, offset, tuple(open_sessions), tuple(tenure.ended))

    # ------------------------------------------------------------------ committing

    @Service.task
    async def _commit(self) -> None:
        """Commit captured states whose inputs are settled."""
        while not self.should_stop:
            await self.sleep(_COMMIT_INTERVAL_S)
            if not await self.commit_settled():
                await self.sleep(_REFUSED_WAIT_S)

    async def commit_settled(self) -> bool:
        """Commit every captured state whose inputs are settled, in one request; return False if it was refused."""
        async with self._committing:
            due = {
                tenure: tenure.candidate
                for tenure in self.tenures.values()
                if tenure.candidate is not None and tenure.frontier.settled_to >= tenure.candidate[0].emit_from_offset
            }
            if not due:
                return True
            try:
                await self._offsets.commit(
                    {
                        TopicPartition(self.source_name, tenure.number): Committed(snapshot.commit_offset, packed)
                        for tenure, (snapshot, packed) in due.items()
                    }
                )
            except CommitRefusedError as refused:
                metrics.REFUSED_COMMITS.labels(self.route.stage).inc()
                log.debug("%s: a commit was refused: %s", self.shortlabel, refused)
                return False
            for tenure in due:
                tenure.candidate = None
            return True

    # ------------------------------------------------------------------ owning

    async def take_over(self, partitions: Iterable[int]) -> None:
        """Own exactly these partitions: keep what was owned all along, load what is new, forget what is gone.

        Called while the flow stands still, before it is sought to the committed offsets.

        Raises:
            SnapshotError: a committed snapshot cannot be read by this release.
        """
        wanted = {TopicPartition(self.source_name, number) for number in partitions}
        async with self._committing:
            committed = await self._offsets.fetch(wanted) if wanted else {}
            kept, new = {}, {}
            for tp in wanted:
                found = committed.get(tp)
                snapshot = Snapshot.unpack(found.metadata) if found is not None and found.metadata else None
                tenure = self.tenures.get(tp.partition)
                # Had anybody owned it in between, the epoch would be another: that is a new owner's first act.
                if tenure is not None and snapshot is not None and snapshot.epoch == tenure.epoch:
                    kept[tp.partition] = tenure
                else:
                    new[tp] = (found.offset if found is not None else None, snapshot or Snapshot())
            for number, tenure in self.tenures.items():
                if kept.get(number) is not tenure:
                    self._lose(tenure)
            self.tenures = kept
            for number, tenure in kept.items():
                tenure.rereading_from, tenure.passed_over = None, -1
                self._app.consumer.resume_at[TopicPartition(self.source_name, number)] = tenure.frontier.next_offset
            if new:
                await self._begin(new)

    async def _begin(self, new: Mapping[TopicPartition, tuple[int | None, Snapshot]]) -> None:
        starts = await self._offsets.log_starts(new)
        begun: dict[TopicPartition, tuple[int, Snapshot]] = {}
        for tp, (offset, snapshot) in new.items():
            start = starts[tp] if offset is None else offset
            if start < starts[tp]:
                log.error("%s %s: offsets %d to %d were deleted before they were read", self.shortlabel, tp, start, starts[tp] - 1)
                metrics.HOLES.labels(self.route.stage, "deleted").inc()
                start = starts[tp]
            begun[tp] = (
                start,
                msgspec.structs.replace(snapshot, epoch=snapshot.epoch + 1, emit_from_offset=max(snapshot.emit_from_offset, start)),
            )
        try:
            await self._offsets.commit(
                {tp: Committed(start, snapshot.pack(self._settings.snapshot_max_bytes)) for tp, (start, snapshot) in begun.items()}
            )
        except CommitRefusedError as refused:
            # Another rebalance is under way, and will call again.
            log.info("%s: %d partitions not taken over: %s", self.shortlabel, len(begun), refused)
            return
        for tp, (start, snapshot) in begun.items():
            tenure = Tenure(tp.partition, snapshot, start)
            self.tenures[tp.partition] = tenure
            metrics.TAKEOVERS.labels(self.route.stage).inc()
            for each in snapshot.sessions:
                self._between_steps.append(self._loading(tenure, each))

    def _loading(self, tenure: Tenure, each: SessionSnapshot) -> Callable[[], None]:
        def load() -> None:
            if tenure.alive:
                key = SessionKey(tenure.number, each.session_id)
                self.core.load(key, SessionState(each.read_from_offset, each.from_offset, each.state))

        return load

    def _lose(self, tenure: Tenure) -> None:
        tenure.alive = False
        for session_id in tenure.sessions:
            self._between_steps.append(partial(self.core.drop, SessionKey(tenure.number, session_id)))

    # ------------------------------------------------------------------ quiet sessions

    @Service.task
    async def _propose_timeouts(self) -> None:
        """Write a Timeout for each session that nothing was heard of; it acts, for every reader alike, when it is read."""
        if self.route.source is not topics.AUDIO:
            return
        limit_s = self._settings.session_lost_ms / 1_000
        while not self.should_stop:
            await self.sleep(_TIMEOUT_CHECK_S)
            now_s = time.monotonic()
            for tenure in self.tenures.values():
                for session_id, standing in tenure.sessions.items():
                    if standing.channel_id and now_s - standing.seen_s > limit_s:
                        self._propose_timeout(tenure, session_id, standing, now_s)

    def _propose_timeout(self, tenure: Tenure, session_id: str, standing: _Standing, now_s: float) -> None:
        timeout = Timeout(
            channel_id=standing.channel_id,
            session_id=session_id,
            conversation_id=standing.conversation_id,
            epoch=tenure.epoch,
            position_samples=standing.position_samples,
            silent_ms=round((now_s - standing.seen_s) * 1_000),
        )
        standing.seen_s = now_s
        topic = topics.AUDIO.full_name(self._settings)
        self._outbox.send(topic, tenure.number, standing.channel_id.encode(), self._codec.encode(timeout), lambda: None)

    # ------------------------------------------------------------------ state of the worker

    @property
    def open_inputs(self) -> int:
        """Inputs taken whose outputs are not all acknowledged."""
        return sum(tenure.frontier.open_inputs for tenure in self.tenures.values())

    @property
    def session_count(self) -> int:
        """Sessions open on the partitions owned."""
        return sum(len(tenure.sessions) for tenure in self.tenures.values())

    def take_busy_s(self) -> float:
        """Return the time spent in steps since the last call."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    async def drain(self) -> None:
        """Take no more, finish what was taken, and commit: the next owner begins where this one stops."""
        self._draining = True
        deadline_s = time.monotonic() + _DRAIN_TIMEOUT_S
        while time.monotonic() < deadline_s and self.open_inputs:
            self._wake.set()
            await asyncio.sleep(_BACKPRESSURE_WAIT_S)
        try:
            await self.commit_settled()
            self._capture(0.0)
            await self.commit_settled()
        except SnapshotError:
            log.exception("%s: the last state could not be committed; the next owner replays", self.shortlabel)

    async def on_start(self) -> None:
        """Make the core ready."""
        await self.core.start()

    async def on_stop(self) -> None:
        """Forget everything; outputs that still arrive are nobody's."""
        for tenure in self.tenures.values():
            tenure.alive = False
        await self.core.stop()
