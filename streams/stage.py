"""The runtime around a stage's core: what its author cannot get wrong any more.

One :class:`Stage` reads one topic through a Faust agent. For each partition that is its own at the moment it holds a
:class:`streams.tenure.Tenure`. It

* checks that Kafka offsets are contiguous: a hole is read again, and gone over only if the offsets are gone for good;
* drops repeats (by ordinal) and zombies (by epoch), and refuses what cannot be read, onto the rejected topic with its reason;
* hands everything that is ready, over all sessions, to the core in one step;
* numbers what the core emits, marks it with the partition's epoch and sends it;
* commits the core's state with the offsets once everything before it is acknowledged;
* begins each takeover by committing the next epoch: only the owner can, and only then does it emit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, cast

import msgspec
from aiokafka.errors import IllegalStateError
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
    StageName,
    Transcript,
)
from streams import metrics, proposals, topics
from streams.checkpoint import CommitRefusedError, Committed, OffsetStore, Snapshot, SnapshotError
from streams.control import Control
from streams.core import Core, Emitter, Input, SessionKey, SessionState
from streams.errors import UserError
from streams.lease import Lease
from streams.outbox import Outbox
from streams.proposals import Proposals
from streams.settings import Settings
from streams.tenure import Order, Placement, Tenure
from streams.topics import Topic

__all__ = ["Route", "Stage", "record_key"]

log = logging.getLogger(__name__)

#: Inputs that may wait for the next step before reading pauses: 4 s of 50 channels at 5 frames a second.
_READY_LIMIT: Final = 1_000
#: Inputs that may be open (taken, not settled) before reading pauses: 20 s segments of 50 channels at 5 blocks a second.
_OPEN_LIMIT: Final = 5_000
_BACKPRESSURE_WAIT_S: Final = 0.01
#: A machine under too much load may lose the same offset again and again; whoever writes here writes no offsets without data.
_INSIST: Final = 10
_HELD_BACK_LOOK_S: Final = 0.02
#: Records of different channels gather this long for one step: one call of the core, one request to the broker for all of it.
_GATHER_S: Final = 0.005
_COMMIT_INTERVAL_S: Final = 0.05
_REFUSED_WAIT_S: Final = 0.3
_DRAIN_TIMEOUT_S: Final = 2.0
#: A step, or a request to the broker, takes less; what does not settle within this time will not.
_DRAIN_QUIET_S: Final = 0.3
_LOOK_S: Final = 1.0
#: Commits that are refused for this long, though no rebalance brings a new assignment: the stage asks for its assignment itself.
_RECLAIM_AFTER_S: Final = 5.0
#: A partition that has something to commit and commits nothing: an open segment takes 20 s, and settles nothing less often than that.
_LAG_ALARM_S: Final = 30.0
_ALARM_EVERY_S: Final = 30.0
#: A broker that was killed comes back with the end that it wrote down last, up to 5 s before, and only then finds the records after it.
_CUT_FOR_S: Final = 6.0
_CUT_ASK_S: Final = 0.3
#: A record that the broker has and that does not come within this time was lost on the way.
_AWAITED_FOR_S: Final = 5.0
#: An epoch that grows by a byte must not make the next owner's first commit too large.
_SNAPSHOT_SLACK_BYTES: Final = 16
#: A rejected record is wrapped, and must fit into Kafka's default of 1 MB all the same.
_REJECTED_BYTES: Final = 900_000
#: Inputs in a row that a core fails at before it is the core that is broken, and not they.
_FAILURES_IN_A_ROW: Final = 10


@dataclass(frozen=True, slots=True)
class Route:
    """Where a stage stands between the topics.

    Attributes:
        stage: its name.
        source: the topic that it reads.
        onward: the topic for the records that go on to the next stage, if there is one.
    """

    stage: StageName
    source: Topic
    onward: Topic | None


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
}


class Stage(Service, Emitter):
    """One stage of one worker.

    Args:
        app: the Faust app.
        settings: the worker's settings.
        route: where the stage stands.
        make_core: makes its core; given the settings and the emitter, which is this stage.
        codec: encodes and decodes records.
        outbox: sends them; shared by the stages of a worker.
        offsets: keeps the group's offsets; unset: Kafka does, for the app's group.
        control: what is pushed while calls are live; unset: nothing is.
        lease: says whether to send at all; unset: always.
    """

    def __init__(
        self,
        app: Any,
        settings: Settings,
        route: Route,
        make_core: Callable[[Settings, Emitter], Core],
        codec: Codec,
        outbox: Outbox,
        offsets: OffsetStore | None = None,
        control: Control | None = None,
        lease: Lease | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.route = route
        # Finding a label's counter takes longer than counting.
        self._inputs = metrics.INPUTS.labels(route.stage)
        self._outputs = cache(partial(metrics.OUTPUTS.labels, route.stage))
        self.source_name = route.source.full_name(settings)
        self.core = make_core(settings, self)
        self.tenures: dict[int, Tenure] = {}
        self._app = app
        self._settings = settings
        self._codec = codec
        self._outbox = outbox
        self._offsets = offsets or OffsetStore(app)
        self._control = control
        self._lease = lease or Lease(math.inf)
        #: How often an offset was asked for once more, though reading again had led past it.
        self._insisted: Counter[tuple[TopicPartition, int]] = Counter()
        #: The group's generation in which the tenures were found to be ours.
        self._owned_in = -1
        #: What waits until the group has answered: whose it is, and what sends it.
        self._held_back: list[tuple[Tenure, Callable[[], None]]] = []
        self._ready: list[Input] = []
        self._between_steps: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._committing = asyncio.Lock()
        self._draining = False
        #: The partitions that the group gave us last, and in which generation.
        self._assigned: frozenset[int] = frozenset()
        self._generation = -1
        self._refused_since_s: float | None = None
        #: Inputs that the core cannot take, by partition and offset: why.
        self._poison: dict[tuple[int, int], str] = {}
        #: Partitions that go one input at a time up to an offset, in which there is one that the core cannot take.
        self._careful: dict[int, int] = {}
        self._failures = 0
        self._alarmed_s: dict[str, float] = {}
        #: Open inputs as of the last look: too dear to count for each record.
        self._open_lately = 0
        self._busy_s = 0.0
        self._numbered_by_recorder = route.source is topics.AUDIO
        #: What the clock decides, where recorders are read.
        self.proposals = self._make_proposals() if self._numbered_by_recorder else None

    def _make_proposals(self) -> Proposals:
        return Proposals(self._settings, self._send_to_ourselves, lambda: self._outbox.acknowledged_s, self._control)

    # ------------------------------------------------------------------ reading

    async def accept(self, event: Any) -> None:
        """Take one event of the agent's stream."""
        while len(self._ready) >= _READY_LIMIT or self._open_lately >= _OPEN_LIMIT:  # noqa: ASYNC110 two limits, seldom reached
            await asyncio.sleep(_BACKPRESSURE_WAIT_S)
        message = event.message
        await self.read(message.partition, message.offset, round(message.timestamp * 1_000), message.key, message.value)

    async def read(self, partition: int, offset: int, appended_ms: int, key: bytes | None, value: bytes | None) -> None:
        """Take one record as it lies on the source topic."""
        tenure = self.tenures.get(partition)
        if tenure is None or self._draining or not await self._continues(tenure, offset):
            return
        self._inputs.inc()
        if self._poison and (reason := self._poison.get((partition, offset))) is not None:
            self._reject(tenure, offset, key, value, reason)
            return
        try:
            record = self._codec.decode(value)
        except DecodeError as unreadable:
            self._reject(tenure, offset, key, value, str(unreadable))
            return
        if not isinstance(record, FlowRecord):
            self._reject(tenure, offset, key, value, f"a {type(record).__name__} does not belong on this topic")
            return
        missing = tenure.missing_before(record)
        match placement := tenure.place(offset, record):
            case Placement.STRANGER:
                self._reject(tenure, offset, key, value, f"its session {record.session_id} was never started here")
            case Placement.LATE:
                cut_off = "was its recorder cut off for longer than ASR_SESSION_LOST_MS?"
                self._reject(tenure, offset, key, value, f"its session {record.session_id} had been closed: {cut_off}")
            case Placement.TAKE | Placement.WARM:
                if missing and placement is Placement.TAKE:
                    log.error("%s: %d records of session %s never came", self.shortlabel, missing, record.session_id)
                    metrics.HOLES.labels(self.route.stage, "upstream").inc()
                self._take(tenure, offset, appended_ms, record, warm=placement is Placement.WARM)
            case _:
                metrics.DROPPED.labels(self.route.stage, placement.value).inc()
                tenure.frontier.skip(offset)
                tenure.dirty = True

    def _take(self, tenure: Tenure, offset: int, appended_ms: int, record: FlowRecord, *, warm: bool) -> None:
        if warm:
            tenure.frontier.skip(offset)
        else:
            tenure.frontier.begin(offset, record.session_id)
            tenure.dirty = True
        key = SessionKey(tenure.number, record.session_id)
        self._ready.append(Input(key, offset, appended_ms, record, warm, tenure))
        self._wake.set()

    async def _continues(self, tenure: Tenure, offset: int) -> bool:
        """Return whether to go on with the record at an offset; a hole before it is read again."""
        due = tenure.frontier.next_offset
        match tenure.order(offset):
            case Order.NEXT:
                return True
            case Order.HOLE:
                log.warning("%s: offset %d of %s-%d came, %d was due: reading again", self.shortlabel, offset, *self._at(tenure), due)
                metrics.HOLES.labels(self.route.stage, "reread").inc()
                await self._seek(tenure, due)
                return False
            case Order.GONE if await self._is_there(tenure, due):
                await self._seek(tenure, due)
                return False
            case Order.GONE:
                log.error("%s: offsets %d to %d of %s-%d are gone for good", self.shortlabel, due, offset - 1, *self._at(tenure))
                metrics.HOLES.labels(self.route.stage, "gone").inc()
                return True
            case _:
                return False

    async def _is_there(self, tenure: Tenure, offset: int) -> bool:
        """Return whether the broker still has what did not come.

        In the end: no, for offsets without data are there for ever.
        """
        at = self._at(tenure)
        self._insisted[at, offset] += 1
        if self._insisted[at, offset] > _INSIST:
            return False
        first, _ = (await self._offsets.log_ranges([at]))[at]
        return offset >= first

    async def _seek(self, tenure: Tenure, offset: int) -> None:
        """Read on from an offset; not where a rebalance has taken the partition away meanwhile: its next owner begins where it should."""
        with contextlib.suppress(IllegalStateError):
            await self._app.consumer.seek(self._at(tenure), offset)

    def _at(self, tenure: Tenure) -> TopicPartition:
        return TopicPartition(self.source_name, tenure.number)

    def _reject(self, tenure: Tenure, offset: int, key: bytes | None, value: bytes | None, reason: str) -> None:
        """Put a record that cannot be used onto the rejected topic, and go on after it."""
        if offset < tenure.emit_from_offset:
            tenure.frontier.skip(offset)  # it is there since before the takeover
            return
        if value is not None and len(value) > _REJECTED_BYTES:
            reason += f" (only the first {_REJECTED_BYTES} of its {len(value)} bytes are kept here)"
            value = value[:_REJECTED_BYTES]
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
        standing = tenure.sessions.get(cause.key.session_id)
        for record in records:
            fields: dict[str, int] = {"epoch": tenure.epoch}
            if isinstance(record, FlowRecord):
                if standing is None:
                    continue  # the session is over: an answer still goes out, but nothing goes on
                fields["ordinal"] = standing.number(cause.offset)
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
            # A final that came late may have ended a session that the last captured state still holds.
            tenure.dirty = True
            self._release(tenure, cause.offset)

    def _send(self, tenure: Tenure, offset: int, topic: Topic, record: SessionRecord) -> None:
        tenure.frontier.hold(offset)
        self._outputs(type(record).__name__).inc()
        self._hand_over(tenure, topic, record, lambda: self._release(tenure, offset))

    def _hand_over(self, tenure: Tenure, topic: Topic, record: SessionRecord, on_ack: Callable[[], None]) -> None:
        """Send a record for a partition, once it is sure that it is still ours."""
        send = partial(
            self._outbox.send,
            topic.full_name(self._settings),
            tenure.number,
            record_key(record).encode(),
            self._codec.encode(record),
            on_ack,
        )
        if not self._held_back and self._lease.holds(self._owned_in):
            send()
            return
        if not self._held_back:
            log.warning("%s: stood still; sending nothing until the group has answered", self.shortlabel)
            self.add_future(self._send_held_back())
        self._held_back.append((tenure, send))

    async def _send_held_back(self) -> None:
        while not self._lease.holds(self._owned_in):  # noqa: ASYNC110 once, after the process stood still
            await asyncio.sleep(_HELD_BACK_LOOK_S)
        held_back, self._held_back = self._held_back, []
        for tenure, send in held_back:
            if tenure.alive:
                send()

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
                await asyncio.sleep(_GATHER_S)
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
        if self._careful:
            inputs, wary = _parted(inputs, lambda each: each.key.partition not in self._careful)
            for each in wary:
                await self._step_core([each])
        if inputs:
            await self._step_core(inputs)

    async def _step_core(self, inputs: Sequence[Input]) -> None:
        started_s = time.perf_counter()
        try:
            await self.core.step(inputs)
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as failure:
            # A library's own RuntimeError may be about the data; one that somebody gave a name, or a person can put right, is not.
            if isinstance(failure, UserError) or (isinstance(failure, RuntimeError) and type(failure) is not RuntimeError):
                raise
            self._contain(inputs, failure)
        else:
            self._failures = 0
        took_s = time.perf_counter() - started_s
        self._busy_s += took_s
        metrics.STEP_SECONDS.labels(self.route.stage).observe(took_s)

    def _contain(self, inputs: Sequence[Input], failure: Exception) -> None:
        """Find the input that a step failed at, and do without it: else it would end every worker that takes the partition over.

        What the failed step made of its sessions cannot be told, so their partitions begin again from what is committed, one input at a
        time; an input that fails alone is rejected.
        """
        self._failures += 1
        if self._failures > _FAILURES_IN_A_ROW:
            raise failure
        metrics.STEP_FAILURES.labels(self.route.stage).inc()
        log.error("%s: a step over %d inputs failed and is done again", self.shortlabel, len(inputs), exc_info=failure)
        if len(inputs) == 1:
            at = inputs[0].key.partition, inputs[0].offset
            self._poison[at] = f"the {self.route.stage} stage fails at it: {type(failure).__name__}: {failure}"
        for each in inputs:
            number = each.key.partition
            self._careful[number] = max(each.offset, self._careful.get(number, -1))
            if number in self.tenures and self.tenures[number] is each.tenure:
                self._lose(self.tenures.pop(number))

    def _capture(self, interval_s: float) -> None:
        """Capture the state of each partition that changed, to be committed once everything before it is acknowledged."""
        now_s = time.monotonic()
        for tenure in self.tenures.values():
            if tenure.candidate is not None or not tenure.dirty or not tenure.loaded or now_s - tenure.captured_s < interval_s:
                continue
            # Inputs that wait for the next step are not part of the core's state.
            offset = min((each.offset for each in self._ready if each.tenure is tenure), default=tenure.frontier.next_offset)
            if offset < tenure.emit_from_offset:
                continue  # a replay is going on: what is committed is still the best
            tenure.dirty, tenure.captured_s = offset < tenure.frontier.next_offset, now_s
            snapshot = tenure.snapshot(offset, partial(self._state_of, tenure.number))
            try:
                tenure.candidate = snapshot, snapshot.pack(self._settings.snapshot_max_bytes - _SNAPSHOT_SLACK_BYTES)
            except SnapshotError as large:
                self._cannot_commit(tenure, large)

    def _cannot_commit(self, tenure: Tenure, why: SnapshotError) -> None:
        """Go on without a commit: nothing is lost as long as the topic is kept, and to stop would stop every channel of this worker."""
        tenure.candidate, tenure.dirty = None, True
        self._alarm(f"size {tenure.number}", "%s: the state of %s-%d cannot be committed: %s", self.shortlabel, *self._at(tenure), why)

    def _alarm(self, what: str, message: str, *details: object) -> None:
        """Log an error, the same one at most every 30 s."""
        now_s = time.monotonic()
        if now_s - self._alarmed_s.get(what, -_ALARM_EVERY_S) >= _ALARM_EVERY_S:
            self._alarmed_s[what] = now_s
            log.error(message, *details)

    def _state_of(self, partition: int, session_id: str) -> SessionState | None:
        return self.core.snapshot(SessionKey(partition, session_id))

    # ------------------------------------------------------------------ committing

    @Service.task
    async def _commit(self) -> None:
        """Commit captured states whose inputs are settled."""
        while not self.should_stop:
            await self.sleep(_COMMIT_INTERVAL_S)
            self._open_lately = self.open_inputs
            if not await self.commit_settled():
                await self.sleep(_REFUSED_WAIT_S)
            await self._reclaim()

    async def commit_settled(self) -> bool:
        """Commit every captured state whose inputs are settled, in one request; return False if it was refused."""
        async with self._committing:
            found = {tenure: self._committable(tenure) for tenure in self.tenures.values()}
            due = {tenure: state for tenure, state in found.items() if state is not None}
            if not due:
                return True
            try:
                await self._commit_states(due)
            except CommitRefusedError as refused:
                metrics.REFUSED_COMMITS.labels(self.route.stage).inc()
                log.debug("%s: a commit was refused: %s", self.shortlabel, refused)
                self._refused_since_s = self._refused_since_s or time.monotonic()
                return False
            self._refused_since_s = None
            return True

    def _committable(self, tenure: Tenure) -> tuple[Snapshot, str] | None:
        """Return a captured state, and its packed form, if it may be committed now."""
        if tenure.candidate is None:
            return None
        captured, packed = tenure.candidate
        snapshot = tenure.frontier.committable(captured)
        if snapshot is None or snapshot is captured:
            return None if snapshot is None else (captured, packed)
        # What is read again of a takeover is on the broker up to where that began to send.
        snapshot = msgspec.structs.replace(snapshot, emit_from_offset=max(snapshot.emit_from_offset, tenure.emit_from_offset))
        return snapshot, snapshot.pack(self._settings.snapshot_max_bytes)

    async def _commit_states(self, due: Mapping[Tenure, tuple[Snapshot, str]]) -> None:
        """Commit captured states; one that the brokers find too large takes none of the others with it."""
        try:
            await self._offsets.commit(
                {self._at(tenure): Committed(snapshot.commit_offset, packed) for tenure, (snapshot, packed) in due.items()},
                self._generation,
            )
        except SnapshotError as large:
            if len(due) > 1:
                for tenure, state in due.items():
                    await self._commit_states({tenure: state})
            else:
                self._cannot_commit(next(iter(due)), large)
            return
        for tenure, (snapshot, _) in due.items():
            tenure.candidate, tenure.committed_to, tenure.uncommitted_since_s = None, snapshot.emit_from_offset, None
            if self._careful.get(tenure.number, snapshot.emit_from_offset) < snapshot.emit_from_offset:
                del self._careful[tenure.number]
                self._poison = {at: why for at, why in self._poison.items() if at[0] != tenure.number or at[1] >= snapshot.commit_offset}

    @Service.task
    async def _watch(self) -> None:
        """Tell how far commits are behind, and notice a log that was cut off."""
        while not self.should_stop:
            await self.sleep(_LOOK_S)
            await self._watch_lag(time.monotonic())

    async def _watch_lag(self, now_s: float) -> None:
        records, seconds = 0, 0.0
        for tenure in list(self.tenures.values()):
            end = self._offsets.log_end(self._at(tenure))
            due = tenure.frontier.next_offset
            if end is None or end >= due:
                tenure.cut_since_s = None
            elif tenure.cut_since_s is None:
                tenure.cut_since_s = now_s
            elif now_s - tenure.cut_since_s >= _CUT_FOR_S:
                self._alarm("cut", "%s: %s-%d ends at %d, and %d was due: it was cut off", self.shortlabel, *self._at(tenure), end, due)
                self._lose(self.tenures.pop(tenure.number))
                continue
            if end is not None and end > due:
                await self._read_on(tenure, due, now_s)
            records = max(records, (due if end is None else end) - tenure.committed_to)
            if tenure.committed_to < due:
                tenure.uncommitted_since_s = tenure.uncommitted_since_s or now_s
                seconds = max(seconds, now_s - tenure.uncommitted_since_s)
        metrics.COMMITTED_LAG_RECORDS.labels(self.route.stage).set(records)
        metrics.COMMITTED_LAG_SECONDS.labels(self.route.stage).set(seconds)
        if seconds >= _LAG_ALARM_S:
            self._alarm(
                "lag", "%s: nothing was committed for %.0f s; a successor would read %d records again", self.shortlabel, seconds, records
            )

    async def _read_on(self, tenure: Tenure, due: int, now_s: float) -> None:
        """Read again from the offset that is due, if it does not come: a client that loses the last event of a log shows no hole."""
        at, since_s = tenure.awaited
        if at != due or self._ready or self._open_lately >= _OPEN_LIMIT:
            tenure.awaited = due, now_s
        elif now_s - since_s >= _AWAITED_FOR_S:
            log.warning("%s: offset %d of %s-%d does not come: reading again", self.shortlabel, due, *self._at(tenure))
            metrics.HOLES.labels(self.route.stage, "reread").inc()
            tenure.awaited = due, now_s
            await self._seek(tenure, due)

    # ------------------------------------------------------------------ owning

    async def take_over(self, partitions: Iterable[int]) -> None:
        """Own exactly these partitions: keep what was owned all along, load what is new, forget what is gone.

        Called while the flow stands still, before it is sought to the committed offsets.

        Raises:
            SnapshotError: a committed snapshot cannot be read by this release.
        """
        async with self._committing:
            self._assigned, self._generation = frozenset(partitions), self._offsets.known_generation()
            self._refused_since_s = None
            wanted = {TopicPartition(self.source_name, number) for number in self._assigned}
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
            for tenure in kept.values():
                tenure.resume()
                self._app.consumer.resume_at[self._at(tenure)] = tenure.frontier.next_offset
            if new:
                await self._begin(new)
            self._owned_in = self._generation

    async def _reclaim(self) -> None:
        """Take up partitions that are assigned but not owned: the first commit was refused, or the tenure had to be given up."""
        refused_long = self._refused_since_s is not None and time.monotonic() - self._refused_since_s > _RECLAIM_AFTER_S
        if self._draining or not (refused_long or self._assigned - self.tenures.keys()):
            return
        assigned = {tp.partition for tp in self._app.consumer.assignment() if tp.topic == self.source_name}
        if assigned != self._assigned:
            return  # a rebalance is under way, and will tell
        before = dict(self.tenures)
        await self.take_over(assigned)
        for number, tenure in self.tenures.items():
            if before.get(number) is not tenure:
                # The flow runs already, and has gone past it.
                await self._seek(tenure, tenure.frontier.next_offset)

    async def _begin(self, new: Mapping[TopicPartition, tuple[int | None, Snapshot]]) -> None:
        ranges = await self._log_ranges(new)
        begun: dict[TopicPartition, tuple[int, Snapshot]] = {}
        for tp, (offset, snapshot) in new.items():
            first, end = ranges[tp]
            start = first if offset is None else offset
            if start < first:
                log.error("%s %s: offsets %d to %d were deleted before they were read", self.shortlabel, tp, start, first - 1)
                metrics.HOLES.labels(self.route.stage, "deleted").inc()
                start = first
            elif max(start, snapshot.read_to_offset) > end:
                log.error(
                    "%s %s ends at %d, but was read to %d: it was made anew, or lost its end; beginning at %d with the sessions known",
                    *(self.shortlabel, tp, end, snapshot.read_to_offset, first),
                )
                metrics.HOLES.labels(self.route.stage, "truncated").inc()
                start, snapshot = first, snapshot.rebased(first)
            begun[tp] = (
                start,
                msgspec.structs.replace(snapshot, epoch=snapshot.epoch + 1, emit_from_offset=max(snapshot.emit_from_offset, start)),
            )
        try:
            await self._offsets.commit(
                {tp: Committed(start, snapshot.pack(self._settings.snapshot_max_bytes)) for tp, (start, snapshot) in begun.items()},
                self._generation,
            )
        except CommitRefusedError as refused:
            # If another rebalance is under way, it will call again; else the stage asks again by itself.
            log.info("%s: %d partitions not taken over: %s", self.shortlabel, len(begun), refused)
            return
        for tp, (start, snapshot) in begun.items():
            tenure = Tenure(tp.partition, snapshot, start, numbered_by_recorder=self._numbered_by_recorder)
            self.tenures[tp.partition] = tenure
            metrics.TAKEOVERS.labels(self.route.stage).inc()
            self._between_steps.append(partial(self._load, tenure, snapshot))

    async def _log_ranges(self, new: Mapping[TopicPartition, tuple[int | None, Snapshot]]) -> Mapping[TopicPartition, tuple[int, int]]:
        """Return where the logs begin and end, after giving brokers that have just started the time to know it."""
        deadline_s = time.monotonic() + _CUT_FOR_S
        while True:
            ranges = await self._offsets.log_ranges(new)
            read_to = {tp: max(offset or 0, snapshot.read_to_offset) for tp, (offset, snapshot) in new.items()}
            if all(ranges[tp][1] >= end for tp, end in read_to.items()) or time.monotonic() >= deadline_s:
                return ranges
            await asyncio.sleep(_CUT_ASK_S)

    def _load(self, tenure: Tenure, snapshot: Snapshot) -> None:
        if tenure.alive:
            for each in snapshot.sessions:
                key = SessionKey(tenure.number, each.session_id)
                self.core.load(key, SessionState(each.read_from_offset, each.from_offset, each.state))
            tenure.loaded = True

    def _lose(self, tenure: Tenure) -> None:
        tenure.alive = False
        for session_id in tenure.sessions:
            self._between_steps.append(partial(self.core.drop, SessionKey(tenure.number, session_id)))

    # ------------------------------------------------------------------ what the clock decides

    @Service.task
    async def _propose(self) -> None:
        """Write what is decided by the clock to where it is read again."""
        while self.proposals is not None and not self.should_stop:
            await self.sleep(proposals.LOOK_S)
            self.proposals.look(self.tenures.values(), time.monotonic())

    def _send_to_ourselves(self, tenure: Tenure, record: FlowRecord) -> None:
        self._hand_over(tenure, self.route.source, record, lambda: None)

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
        """Take no more, finish what was taken, and commit: the next owner begins where this one stops.

        What waits for inputs that are not taken any more, such as an open segment, is the next owner's: nobody else answers meanwhile.
        """
        self._draining = True
        now_s = settled_s = time.monotonic()
        deadline_s = now_s + _DRAIN_TIMEOUT_S
        left = self.open_inputs
        while left and now_s < min(deadline_s, settled_s + _DRAIN_QUIET_S):
            self._wake.set()
            await asyncio.sleep(_BACKPRESSURE_WAIT_S)
            now_s = time.monotonic()
            if (open_inputs := self.open_inputs) != left:
                left, settled_s = open_inputs, now_s
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


def _parted(inputs: Iterable[Input], condition: Callable[[Input], bool]) -> tuple[list[Input], list[Input]]:
    """Return the inputs for which a condition holds, and the others."""
    yes: list[Input] = []
    no: list[Input] = []
    for each in inputs:
        (yes if condition(each) else no).append(each)
    return yes, no
