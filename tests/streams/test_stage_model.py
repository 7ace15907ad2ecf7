"""The runtime against a model of Kafka, one event at a time: crashes, zombies, replays and retries wherever one can come.

The model keeps Kafka's promises and no others: a partition is a log; an offset commit is taken from the partition's owner in the group's
present generation only; whoever once read or wrote may go on to read and write. Two stages run in it, as the real ones are built: an
:class:`Ear`, which forgets by itself what warm inputs must bring back, and a :class:`Mind`, whose finals come long after their inputs.
Everything that they write digests all that they heard, so one input more, less, or out of order changes what follows.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pytest
from aiokafka.structs import TopicPartition
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prometheus_client import REGISTRY

from schemas import (
    AudioFrame,
    Coverage,
    FlowRecord,
    Record,
    Rejected,
    SegmentEnd,
    Session,
    SessionEnd,
    SessionStart,
    SpeechChunk,
    Transcript,
    default_codec,
)
from streams import topics
from streams.checkpoint import CommitRefusedError, Committed, Snapshot
from streams.core import Core, Emitter, Input, SessionKey, SessionState
from streams.groups import moved
from streams.settings import Settings
from streams.stage import Route, Stage
from streams.topics import Topic

FRAME_SAMPLES = 3_200
FRAMES_A_SEGMENT = 3
#: Frames that the ear must hear again before it hears as it did.
WARM_FRAMES = 2
NOT_OURS = b"something else"
POISON = b"poison"
SEEDS = 100
EVENTS = 400
T = TypeVar("T")


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"|".join(parts), digest_size=8).digest()


# ---------------------------------------------------------------------- what must come out


class Heard(NamedTuple):
    """What one session must have led to: pure functions of its frames."""

    chunks: list[bytes]
    finals: list[str]


def heard(payloads: Sequence[bytes]) -> Heard:
    """Return what an undisturbed run makes of a session that is over."""
    chunks, state = [], b""
    for number, payload in enumerate(payloads):
        state = digest(state, payload, *payloads[max(0, number - WARM_FRAMES) : number])
        chunks.append(state)
    segments = (chunks[start : start + FRAMES_A_SEGMENT] for start in range(0, len(chunks), FRAMES_A_SEGMENT))
    return Heard(chunks, [digest(*segment).hex() for segment in segments])


# ---------------------------------------------------------------------- two cores


class Gated:
    """A core whose steps last until they are let go on."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()


@dataclass
class EarSession:
    count: int = 0
    state: bytes = b""
    ring: deque[bytes] = field(default_factory=lambda: deque(maxlen=WARM_FRAMES))
    offsets: deque[int] = field(default_factory=lambda: deque(maxlen=WARM_FRAMES))
    next_offset: int = 0


class Ear(Gated):
    """Like a VAD: small state as exact bits, the rest forgets by itself and is warmed up; answers within its step."""

    def __init__(self, settings: Settings, emitter: Emitter) -> None:
        super().__init__()
        self._emitter = emitter
        self._sessions: dict[SessionKey, EarSession] = {}

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def load(self, key: SessionKey, state: SessionState) -> None:
        count, bits = int.from_bytes(state.state[:4], "big"), state.state[4:]
        self._sessions[key] = EarSession(count, bits, next_offset=state.from_offset)

    def drop(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)

    async def step(self, inputs: Sequence[Input]) -> None:
        await self.gate.wait()
        for each in inputs:
            session = self._sessions.get(each.key)
            if session is None:
                assert isinstance(each.record, SessionStart), f"{each.key} begins with {each.record}"
                session = self._sessions[each.key] = EarSession()
            self._hear(each, session)

    def _hear(self, each: Input, session: EarSession) -> None:
        record, said = each.record, list[FlowRecord]()
        if isinstance(record, AudioFrame):
            if record.payload.startswith(POISON):
                raise ValueError("this cannot be heard")
            if not each.warm:
                session.state = digest(session.state, record.payload, *session.ring)
                said.append(chunk_of(record, session))
                session.count += 1
                if session.count % FRAMES_A_SEGMENT == 0:
                    said.append(segment_end_of(record, session))
            session.ring.append(record.payload)
            session.offsets.append(each.offset)
        elif not each.warm and isinstance(record, SessionStart):
            said.append(record)
        elif not each.warm and isinstance(record, SessionEnd):
            if session.count % FRAMES_A_SEGMENT:
                said.append(segment_end_of(record, session))
            said.append(record)
            self._sessions.pop(each.key, None)
        if not each.warm:
            session.next_offset = each.offset + 1
            self._emitter.emit(each, said)
            self._emitter.done(each)

    def snapshot(self, key: SessionKey) -> SessionState | None:
        session = self._sessions.get(key)
        if session is None:
            return None
        read_from = min([session.next_offset, *session.offsets])
        return SessionState(read_from, session.next_offset, session.count.to_bytes(4, "big") + session.state)


def identity(record: FlowRecord) -> dict[str, Any]:
    return {"channel_id": record.channel_id, "session_id": record.session_id, "conversation_id": record.conversation_id}


def chunk_of(record: FlowRecord, session: EarSession) -> SpeechChunk:
    segment, chunk = divmod(session.count, FRAMES_A_SEGMENT)
    position = session.count * FRAME_SAMPLES
    return SpeechChunk(**identity(record), position_samples=position, segment=segment, chunk=chunk, hops=20, pcm=session.state)


def segment_end_of(record: FlowRecord, session: EarSession) -> SegmentEnd:
    segment = (session.count - 1) // FRAMES_A_SEGMENT
    start = segment * FRAMES_A_SEGMENT * FRAME_SAMPLES
    end = session.count * FRAME_SAMPLES
    return SegmentEnd(**identity(record), position_samples=end, segment=segment, start_sample=start, reason="pause")


@dataclass
class MindSession:
    finals: int = 0
    chunks: list[bytes] = field(default_factory=list)
    from_offset: int = 0
    next_offset: int = 0
    #: (cause, text of a final or None for the session's end, where its segment begins)
    outcomes: deque[tuple[Input, str | None, int]] = field(default_factory=deque)


class Mind(Gated):
    """Like inference: finals come when they come; a restart begins at the oldest segment whose final is not out."""

    def __init__(self, settings: Settings, emitter: Emitter) -> None:
        super().__init__()
        self._emitter = emitter
        self._sessions: dict[SessionKey, MindSession] = {}

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def load(self, key: SessionKey, state: SessionState) -> None:
        finals = int.from_bytes(state.state, "big")
        self._sessions[key] = MindSession(finals, from_offset=state.from_offset, next_offset=state.from_offset)

    def drop(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)

    async def step(self, inputs: Sequence[Input]) -> None:
        await self.gate.wait()
        for each in inputs:
            if each.warm:
                continue
            record = each.record
            session = self._sessions.setdefault(each.key, MindSession(from_offset=each.offset))
            session.next_offset = each.offset + 1
            if isinstance(record, SegmentEnd):
                text = digest(*session.chunks).hex()
                session.outcomes.append((each, text, session.from_offset))
                session.chunks, session.from_offset = [], each.offset + 1
            elif isinstance(record, SessionEnd):
                session.outcomes.append((each, None, session.from_offset))
            else:
                if isinstance(record, SpeechChunk):
                    session.chunks.append(record.pcm)
                    end = record.position_samples + FRAME_SAMPLES
                    covered = Coverage(
                        **identity(record),
                        position_samples=record.position_samples,
                        end_sample=end,
                        decoded_to_sample=end,
                        stage="inference",
                    )
                    self._emitter.emit(each, [covered])
                else:
                    session.from_offset = session.next_offset
                self._emitter.done(each)

    def snapshot(self, key: SessionKey) -> SessionState | None:
        session = self._sessions.get(key)
        if session is None:
            return None
        offset = session.outcomes[0][2] if session.outcomes else session.from_offset
        return SessionState(offset, offset, session.finals.to_bytes(4, "big"))

    def finish(self, at_most: int) -> None:
        """Let the engine answer, oldest first."""
        for key, session in list(self._sessions.items()):
            while session.outcomes and at_most:
                at_most -= 1
                cause, text, _ = session.outcomes.popleft()
                if text is None:
                    self._emitter.emit(cause, [closed(cause.record, session.finals)])
                    self._sessions.pop(key, None)
                else:
                    session.finals += 1
                    self._emitter.emit(cause, [final_of(cause.record, text)])
                self._emitter.done(cause)


def final_of(record: FlowRecord, text: str) -> Transcript:
    assert isinstance(record, SegmentEnd)
    return Transcript(
        **identity(record),
        position_samples=record.start_sample,
        segment=record.segment,
        kind="final",
        end_sample=record.position_samples,
        text=text,
        raw_text=text,
        confidence=1.0,
        covered_to_sample=record.position_samples,
    )


def closed(record: FlowRecord, finals: int) -> Session:
    return Session(
        **identity(record),
        position_samples=record.position_samples,
        state="closed",
        started_us=0,
        covered_to_sample=0,
        decoded_to_sample=0,
        segments=finals,
        finals=finals,
        cancelled=0,
        words=0,
        gaps=0,
        gap_samples=0,
    )


# ---------------------------------------------------------------------- Kafka


class Entry(NamedTuple):
    key: bytes | None
    value: bytes | None
    #: False for an offset that holds no data, such as a transaction's marker.
    data: bool = True


class Group:
    """A consumer group as its coordinator keeps it."""

    def __init__(self) -> None:
        self.generation = 0
        self.owners: dict[int, Worker] = {}
        self.committed: dict[int, Committed] = {}


class Kafka:
    """Logs and groups."""

    def __init__(self, partitions: int, snapshot_max_bytes: int) -> None:
        self.settings = Settings(partitions=partitions, snapshot_max_bytes=snapshot_max_bytes, namespace="asr")
        #: Commits that will fail, whoever makes them.
        self.failing_commits = 0
        self.logs: dict[str, list[list[Entry]]] = defaultdict(lambda: [[] for _ in range(partitions)])
        self.starts: dict[tuple[str, int], int] = defaultdict(int)
        self.groups: dict[str, Group] = defaultdict(Group)

    def append(self, topic: str, partition: int, key: bytes | None, value: bytes | None, *, data: bool = True) -> None:
        self.logs[topic][partition].append(Entry(key, value, data))

    def records(self, topic: Topic) -> list[Record]:
        """Return everything that was ever written to a topic, partition by partition."""
        entries = (entry for log in self.logs[topic.full_name(self.settings)] for entry in log)
        return [default_codec().decode(entry.value) for entry in entries if entry.data and entry.value != NOT_OURS]


@dataclass
class Letter:
    topic: str
    partition: int
    key: bytes | None
    value: bytes
    on_ack: Callable[[], None]


class Producer:
    """Takes the place of the outbox: what is on its way, what the broker has, and what it told."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka
        self.waiting: deque[Letter] = deque()
        self.unacknowledged: deque[Letter] = deque()

    def send(self, topic: str, partition: int | None, key: bytes | None, value: bytes, on_ack: Callable[[], None]) -> None:
        self.waiting.append(Letter(topic, partition or 0, key, value, on_ack))

    def deliver(self, at_most: int) -> None:
        for _ in range(min(at_most, len(self.waiting))):
            letter = self.waiting.popleft()
            self._kafka.append(letter.topic, letter.partition, letter.key, letter.value)
            self.unacknowledged.append(letter)

    def repeat(self) -> None:
        """The broker has it, but its answer was lost: the client sends what is not acknowledged once more, in the same order."""
        for letter in self.unacknowledged:
            self._kafka.append(letter.topic, letter.partition, letter.key, letter.value)

    def acknowledge(self, at_most: int) -> None:
        for _ in range(min(at_most, len(self.unacknowledged))):
            self.unacknowledged.popleft().on_ack()


class Worker:
    """One process with one stage: its consumer, its producer, and what it believes of the group."""

    def __init__(self, kafka: Kafka, route: Route, make_core: Callable[[Settings, Emitter], Core]) -> None:
        self.kafka = kafka
        self.group = kafka.groups[route.stage]
        self.consumer = self
        self.producer = Producer(kafka)
        self.generation = -1
        self.positions: dict[int, int] = {}
        self.resume_at: dict[Any, int] = {}
        self.stepping: asyncio.Task[None] | None = None
        self.stage = Stage(self, kafka.settings, route, make_core, default_codec(), self.producer, offsets=self)  # type: ignore[arg-type]

    # what the stage asks of its consumer and of the group

    async def seek(self, tp: Any, offset: int) -> None:
        self.positions[tp.partition] = offset

    async def fetch(self, partitions: Iterable[Any]) -> Mapping[Any, Committed]:
        return {tp: self.group.committed[tp.partition] for tp in partitions if tp.partition in self.group.committed}

    async def log_ranges(self, partitions: Iterable[Any]) -> Mapping[Any, tuple[int, int]]:
        return {tp: (self.kafka.starts[tp.topic, tp.partition], len(self.kafka.logs[tp.topic][tp.partition])) for tp in partitions}

    def log_end(self, partition: Any) -> int:
        return len(self.kafka.logs[partition.topic][partition.partition])

    def known_generation(self) -> int:
        return self.generation

    async def commit(self, offsets: Mapping[Any, Committed], generation: int) -> None:
        if self.kafka.failing_commits:
            self.kafka.failing_commits -= 1
            raise CommitRefusedError("no coordinator")
        for tp in offsets:
            if generation != self.generation:
                raise CommitRefusedError("the client has joined another generation")
            if generation != self.group.generation or self.group.owners.get(tp.partition) is not self:
                raise CommitRefusedError("not the owner")
        for tp, each in offsets.items():
            self.group.committed[tp.partition] = each

    def assignment(self) -> set[TopicPartition]:
        owned = self.group.owners.items() if self.generation == self.group.generation else ()
        return {TopicPartition(self.stage.source_name, number) for number, owner in owned if owner is self}

    # what happens to it

    def hear(self) -> None:
        """Join the present generation; the stage is told later."""
        self.generation = self.group.generation

    async def join(self) -> None:
        """Join the present generation, and take over what it says is ours."""
        self.hear()
        mine = [number for number, owner in self.group.owners.items() if owner is self]
        await self.stage.take_over(mine)
        self.positions = {number: self.group.committed[number].offset for number in mine if number in self.group.committed}
        self.positions |= {tp.partition: offset for tp, offset in self.resume_at.items() if tp.partition in mine}
        self.resume_at = {}

    async def read(self, partition: int, at_most: int, *, slip: int = 0) -> None:
        """Get up to so many records of a partition, after passing over some that the client loses (it happens in rebalances)."""
        log = self.kafka.logs[self.stage.source_name][partition]
        self.positions[partition] = self.positions[partition] + slip
        for _ in range(at_most):
            position = max(self.positions[partition], self.kafka.starts[self.stage.source_name, partition])
            while position < len(log) and not log[position].data:
                position += 1
            self.positions[partition] = position
            if position >= len(log):
                return
            self.positions[partition] = position + 1
            await self.stage.read(partition, position, 0, log[position].key, log[position].value)

    async def begin_step(self) -> None:
        if self.stepping is None:
            self.core.gate.clear()
            self.stepping = asyncio.create_task(self.stage._step())
            await asyncio.sleep(0)

    async def end_step(self) -> None:
        if self.stepping is not None:
            self.core.gate.set()
            await self.stepping
            self.stepping = None

    async def commit_state(self) -> None:
        """Capture what is due, as the stage does after each step, and commit what is settled."""
        if self.stepping is None:
            self.stage._capture(0.0)
        await self.stage.commit_settled()

    @property
    def core(self) -> Any:
        return self.stage.core

    async def settle(self) -> bool:
        """Do all that is to be done; return whether there was anything."""
        await self.end_step()
        ends = {number: len(self.kafka.logs[self.stage.source_name][number]) for number in self.positions}
        before = dict(self.positions), len(self.producer.waiting), dict(self.group.committed)
        for number in self.positions:
            await self.read(number, 4 * ends[number] + 10)
        await self.stage._step()
        if isinstance(self.core, Mind):
            self.core.finish(1_000)
        self.producer.deliver(10_000)
        self.producer.acknowledge(10_000)
        await self.commit_state()
        await self.stage._reclaim()
        return (dict(self.positions), len(self.producer.waiting), dict(self.group.committed)) != before


EAR = Route("vad", topics.AUDIO, topics.SPEECH)
MIND = Route("inference", topics.SPEECH, None)
CORES: dict[str, Callable[[Settings, Emitter], Core]] = {"vad": Ear, "inference": Mind}  # type: ignore[dict-item]
ROUTES = {"vad": EAR, "inference": MIND}


class Call:
    """A session as its recorder sends it."""

    def __init__(self, kafka: Kafka, name: str, partition: int) -> None:
        self._kafka = kafka
        self.name, self.partition = name, partition
        self.payloads: list[bytes] = []
        self._left_out = 0
        self.over = False
        self._identity = {"channel_id": name, "session_id": name, "conversation_id": "k"}
        self._send(SessionStart(**self._identity, position_samples=0, encoding="pcm_s16le", sample_rate_hz=16_000))

    def speak(self, frames: int = 1) -> None:
        for _ in range(frames):
            payload = f"{self.name}/{len(self.payloads)}".encode()
            self._send_frame(payload)
            self.payloads.append(payload)

    @property
    def _next_ordinal(self) -> int:
        return 1 + len(self.payloads) + self._left_out

    def _send_frame(self, payload: bytes) -> None:
        self._send(
            AudioFrame(
                **self._identity,
                ordinal=self._next_ordinal - (payload.startswith(POISON)),
                position_samples=len(self.payloads) * FRAME_SAMPLES,
                encoding="pcm_s16le",
                sample_rate_hz=16_000,
                payload=payload,
            )
        )

    def say(self, payload: bytes) -> None:
        """Send a frame that nothing is expected to follow from."""
        self._left_out += 1
        self._send_frame(payload)

    def hang_up(self) -> None:
        self.over = True
        position = len(self.payloads) * FRAME_SAMPLES
        self._send(SessionEnd(**self._identity, ordinal=self._next_ordinal, position_samples=position, reason="hangup"))

    def repeat_last(self) -> None:
        """The recorder's client sends its last record once more, for the broker's answer was lost."""
        log = self._kafka.logs[topics.AUDIO.full_name(self._kafka.settings)][self.partition]
        mine = [entry for entry in log if entry.key == self.name.encode()]
        self._kafka.append(topics.AUDIO.full_name(self._kafka.settings), self.partition, mine[-1].key, mine[-1].value)

    def _send(self, record: Record) -> None:
        name = topics.AUDIO.full_name(self._kafka.settings)
        self._kafka.append(name, self.partition, self.name.encode(), default_codec().encode(record))


class System:
    """The whole: calls, workers of both stages, and the checks at the end."""

    def __init__(self, partitions: int = 2, snapshot_max_bytes: int = 32_767) -> None:
        self.kafka = Kafka(partitions, snapshot_max_bytes)
        self.partitions = partitions
        self.calls: list[Call] = []
        self.workers: dict[str, list[Worker]] = {"vad": [], "inference": []}
        self.garbage = 0

    def call(self, name: str, partition: int) -> Call:
        call = Call(self.kafka, name, partition)
        self.calls.append(call)
        return call

    def start(self, stage: str) -> Worker:
        worker = Worker(self.kafka, ROUTES[stage], CORES[stage])
        self.workers[stage].append(worker)
        return worker

    def assign(self, stage: str, owners: Mapping[int, Worker]) -> None:
        """Begin a generation; its members hear of it when they join."""
        group = self.kafka.groups[stage]
        group.generation += 1
        group.owners = dict(owners)

    async def give_all_to(self, worker: Worker) -> None:
        self.assign(worker.stage.route.stage, dict.fromkeys(range(self.partitions), worker))
        await worker.join()

    async def begin(self) -> tuple[Worker, Worker]:
        """Start a worker of each stage that owns all there is."""
        both = self.start("vad"), self.start("inference")
        for worker in both:
            await self.give_all_to(worker)
        return both

    def kill(self, worker: Worker) -> None:
        """What it had not sent is gone with it, and nobody hears of it again."""
        self.workers[worker.stage.route.stage].remove(worker)
        if worker.stepping is not None:
            worker.stepping.cancel()

    async def settle(self, *workers: Worker) -> None:
        while any([await worker.settle() for worker in workers]):
            pass

    async def finish(self) -> None:
        """Hang up, let one worker of each stage do what is left, with all others writing what they have, and check what came out."""
        for call in self.calls:
            if not call.over:
                call.hang_up()
        for stage in ("vad", "inference"):
            for zombie in list(self.workers[stage]):
                await zombie.end_step()
                zombie.producer.deliver(1_000)
        last = [self.start(stage) for stage in ("vad", "inference")]
        for worker in last:
            await self.give_all_to(worker)
        await self.settle(*last)
        self.check()
        # The state that is committed now must be whole too: the next owner finds nothing to do, and nothing changes.
        following = [self.start(stage) for stage in ("vad", "inference")]
        for worker in following:
            await self.give_all_to(worker)
        written = {topic: sum(map(len, logs)) for topic, logs in self.kafka.logs.items()}
        await self.settle(*following)
        assert {topic: sum(map(len, logs)) for topic, logs in self.kafka.logs.items()} == written, "the next owner found something to do"

    def check(self) -> None:
        expected = {call.name: heard(call.payloads) for call in self.calls}
        versions: dict[tuple[str, int], set[str]] = defaultdict(set)
        for each in self.kafka.records(topics.TRANSCRIPTS):
            assert isinstance(each, Transcript)
            versions[each.session_id, each.segment].add(each.text)
        assert all(len(texts) == 1 for texts in versions.values()), "a final was written in two versions"
        finals = {
            name: [next(iter(versions[name, segment])) for segment in range(sum(session == name for session, _ in versions))]
            for name in expected
        }
        assert finals == {name: each.finals for name, each in expected.items()}
        covered: dict[str, set[int]] = defaultdict(set)
        for each in self.kafka.records(topics.COVERAGE):
            assert isinstance(each, Coverage)
            covered[each.session_id].add(each.position_samples // FRAME_SAMPLES)
        assert {name: covered[name] for name in expected} == {name: set(range(len(each.chunks))) for name, each in expected.items()}
        ends = {(each.session_id, each.finals) for each in self.kafka.records(topics.SESSIONS) if isinstance(each, Session)}
        assert ends == {(name, len(each.finals)) for name, each in expected.items()}, "a session's count depends on who counted"
        rejected = {(each.topic, each.partition, each.offset) for each in self.kafka.records(topics.REJECTED) if isinstance(each, Rejected)}
        assert len(rejected) == self.garbage
        self.check_speech(expected)

    def check_speech(self, expected: Mapping[str, Heard]) -> None:
        """Between the stages too, a reader who keeps the highest epoch and drops repeats gets each record once, in order."""
        epochs: dict[str, int] = defaultdict(int)
        last: dict[str, int] = defaultdict(lambda: -1)
        seen: dict[str, list[bytes]] = defaultdict(list)
        for record in self.kafka.records(topics.SPEECH):
            assert isinstance(record, FlowRecord)
            session = record.session_id
            if record.epoch < epochs[session] or record.ordinal <= last[session]:
                epochs[session] = max(epochs[session], record.epoch)
                continue
            assert record.ordinal == last[session] + 1, f"records of {session} are missing before {record}"
            epochs[session], last[session] = record.epoch, record.ordinal
            if isinstance(record, SpeechChunk):
                seen[session].append(record.pcm)
        assert {name: seen[name] for name in expected} == {name: each.chunks for name, each in expected.items()}


# ---------------------------------------------------------------------- anything at any time


class AnythingAtAnyTime(RuleBasedStateMachine):
    """Four calls on two partitions; whatever can happen to the workers of both stages does, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.system = System(partitions=2)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    @initialize()
    def begin(self) -> None:
        for number in range(4):
            self.system.call(f"call-{number}", number % 2)
        for stage in ("vad", "inference"):
            for _ in range(2):
                self.system.start(stage)
            self.rebalance(stage, [0, 1], [0, 1])

    stages = st.sampled_from(["vad", "inference"])
    which = st.integers(0, 3)
    numbers = st.integers(0, 1)
    few = st.integers(1, 5)
    many = st.sampled_from([1, 2, 5, 100])

    def worker(self, stage: str, which: int) -> Worker:
        workers = self.system.workers[stage]
        return workers[which % len(workers)]

    @rule(which=which, frames=few)
    def speak(self, which: int, frames: int) -> None:
        self.system.calls[which].over or self.system.calls[which].speak(frames)

    @rule(which=which)
    def hang_up_and_call_again(self, which: int) -> None:
        call = self.system.calls[which]
        if not call.over:
            call.hang_up()
        self.system.calls.append(call)
        self.system.calls[which] = Call(self.system.kafka, f"{call.name}'", call.partition)

    @rule(which=which)
    def recorder_repeats(self, which: int) -> None:
        self.system.calls[which].repeat_last()

    @rule(number=numbers)
    def something_else_is_written(self, number: int) -> None:
        self.system.kafka.append("asr.audio", number, b"x", NOT_OURS)
        self.system.garbage += 1

    @rule(number=numbers)
    def an_offset_without_data(self, number: int) -> None:
        self.system.kafka.append("asr.audio", number, None, None, data=False)

    @rule(stage=stages, which=which, number=numbers, count=many, slip=st.sampled_from([0, 0, 0, 1, 2]))
    def read(self, stage: str, which: int, number: int, count: int, slip: int) -> None:
        worker = self.worker(stage, which)
        if number in worker.positions:
            self.run(worker.read(number, count, slip=slip))

    @rule(stage=stages, which=which)
    def begin_step(self, stage: str, which: int) -> None:
        self.run(self.worker(stage, which).begin_step())

    @rule(stage=stages, which=which)
    def end_step(self, stage: str, which: int) -> None:
        worker = self.worker(stage, which)
        self.run(worker.begin_step())
        self.run(worker.end_step())
        worker.stage._capture(0.0)  # as the runtime does, at once

    @rule(which=which, count=few)
    def engine_answers(self, which: int, count: int) -> None:
        self.worker("inference", which).core.finish(count)

    @rule(stage=stages, which=which, count=many)
    def deliver(self, stage: str, which: int, count: int) -> None:
        self.worker(stage, which).producer.deliver(count)

    @rule(stage=stages, which=which)
    def client_repeats(self, stage: str, which: int) -> None:
        self.worker(stage, which).producer.repeat()

    @rule(stage=stages, which=which, count=many)
    def acknowledge(self, stage: str, which: int, count: int) -> None:
        self.worker(stage, which).producer.acknowledge(count)

    @rule(stage=stages, which=which)
    def commit(self, stage: str, which: int) -> None:
        self.run(self.worker(stage, which).stage.commit_settled())

    @rule(stage=stages, which=which)
    def all_goes_well_for_a_while(self, stage: str, which: int) -> None:
        worker = self.worker(stage, which)
        if worker.generation >= 0:
            self.run(worker.settle())

    @rule(stage=stages, which=which)
    def kill(self, stage: str, which: int) -> None:
        """A worker dies; another one is started, and the group will hear of both."""
        self.system.kill(self.worker(stage, which))
        self.system.start(stage)

    @rule(stage=stages, which=which, owners=st.lists(numbers, min_size=2, max_size=2))
    def takeover(self, stage: str, which: int, owners: list[int]) -> None:
        """A worker dies, the others hear of it at once, and have read something before they do anything else."""
        self.kill(stage, which)
        workers = self.system.workers[stage]
        self.system.assign(stage, {number: workers[-1 - each] for number, each in enumerate(owners)})
        for worker in workers:
            self.run(worker.join())
            for number in worker.positions:
                self.run(worker.read(number, 3))

    @rule(stage=stages, owners=st.lists(which, min_size=2, max_size=2), joining=st.lists(which, max_size=4))
    def rebalance(self, stage: str, owners: list[int], joining: list[int]) -> None:
        """A generation begins, and some members hear of it; those that do not are zombies for as long."""
        workers = [self.worker(stage, which) for which in owners]
        self.system.assign(stage, dict(enumerate(workers)))
        for which in joining:
            self.run(self.worker(stage, which).join())

    @rule(stage=stages, which=which)
    def join(self, stage: str, which: int) -> None:
        self.run(self.worker(stage, which).join())

    @rule(stage=stages, which=which)
    def hear(self, stage: str, which: int) -> None:
        """A client joins a generation, and its stage goes on as if nothing had been, for a moment."""
        self.worker(stage, which).hear()

    @rule(stage=stages)
    def a_third_worker(self, stage: str) -> None:
        if len(self.system.workers[stage]) < 3:
            self.system.start(stage)

    @invariant()
    def commits_never_go_back(self) -> None:
        for stage, group in self.system.kafka.groups.items():
            for number, each in group.committed.items():
                snapshot = Snapshot.unpack(each.metadata)
                before = self.reached.get((stage, number), (0, 0))
                now = snapshot.epoch, snapshot.emit_from_offset
                assert now >= before, f"the committed state of {stage} {number} went back from {before} to {now}"
                self.reached[stage, number] = now

    @property
    def reached(self) -> dict[tuple[str, int], tuple[int, int]]:
        return self.__dict__.setdefault("_reached", {})

    def teardown(self) -> None:
        try:
            self.run(self.system.finish())
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()


TestAnythingAtAnyTime = AnythingAtAnyTime.TestCase
TestAnythingAtAnyTime.settings = hypothesis_settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("first_seed", range(0, SEEDS, 10))
def test_a_long_time_of_anything(first_seed: int) -> None:
    """The same for far longer, each event about as often as it takes to be in the way of others."""
    for seed in range(first_seed, first_seed + 10):
        a_long_time_of_anything(random.Random(seed))


def a_long_time_of_anything(draw: random.Random) -> None:
    machine = AnythingAtAnyTime()
    machine.begin()

    def stage() -> str:
        return draw.choice(("vad", "inference"))

    def which() -> int:
        return draw.randrange(4)

    def many() -> int:
        return draw.choice((1, 2, 5, 100))

    events: dict[Callable[[], object], int] = {
        lambda: machine.speak(which(), draw.randrange(1, 4)): 10,
        lambda: machine.hang_up_and_call_again(which()): 2,
        lambda: machine.recorder_repeats(which()): 1,
        lambda: machine.something_else_is_written(draw.randrange(2)): 1,
        lambda: machine.an_offset_without_data(draw.randrange(2)): 1,
        lambda: machine.read(stage(), which(), draw.randrange(2), many(), draw.choice((0, 0, 0, 0, 1, 2))): 20,
        lambda: machine.begin_step(stage(), which()): 10,
        lambda: machine.end_step(stage(), which()): 20,
        lambda: machine.engine_answers(which(), many()): 5,
        lambda: machine.deliver(stage(), which(), many()): 20,
        lambda: machine.client_repeats(stage(), which()): 1,
        lambda: machine.acknowledge(stage(), which(), many()): 20,
        lambda: machine.commit(stage(), which()): 10,
        lambda: machine.all_goes_well_for_a_while(stage(), which()): 3,
        lambda: machine.kill(stage(), which()): 1,
        lambda: machine.takeover(stage(), which(), [draw.randrange(2), draw.randrange(2)]): 3,
        lambda: machine.rebalance(stage(), [which(), which()], [which() for _ in range(draw.randrange(5))]): 3,
        lambda: machine.join(stage(), which()): 5,
        lambda: machine.hear(stage(), which()): 5,
        lambda: machine.a_third_worker(stage()): 1,
    }
    for event in draw.choices(list(events), list(events.values()), k=EVENTS):
        event()
        machine.commits_never_go_back()
    machine.teardown()


# ---------------------------------------------------------------------- one sequence each


@pytest.mark.parametrize("stage", ["vad", "inference"])
async def test_a_state_captured_before_a_taken_over_session_goes_on_still_holds_it(stage: str) -> None:
    """A step of another partition is under way, and the first record after the takeover waits for the next one."""
    system = System()
    calls = [system.call("a", 0), system.call("b", 1)]
    ear, mind = await system.begin()
    for call in calls:
        call.speak(FRAMES_A_SEGMENT)
    await system.settle(ear, mind)
    system.kill(ear if stage == "vad" else mind)
    for call in calls:
        call.speak(FRAMES_A_SEGMENT)
    if stage == "inference":
        await system.settle(ear)
    successor = system.start(stage)
    await system.give_all_to(successor)
    await successor.read(1, 10)
    await successor.begin_step()
    await successor.read(0, 10)
    await successor.end_step()
    await successor.commit_state()
    system.kill(successor)
    await system.finish()


@pytest.mark.parametrize("stage", ["vad", "inference"])
async def test_a_state_captured_while_a_takeover_is_under_way_still_holds_its_sessions(stage: str) -> None:
    """The partition comes in the middle of a step of another one: its sessions are loaded only after that step."""
    system = System()
    calls = [system.call("a", 0), system.call("b", 1)]
    owners = {name: [system.start(name), system.start(name)] for name in ("vad", "inference")}
    everybody = [worker for workers in owners.values() for worker in workers]
    for name, workers in owners.items():
        system.assign(name, dict(enumerate(workers)))
        for worker in workers:
            await worker.join()
    for call in calls:
        call.speak(FRAMES_A_SEGMENT)
    await system.settle(*everybody)
    first, second = owners[stage]
    system.kill(first)
    calls[1].speak(2)
    if stage == "inference":
        await system.settle(*owners["vad"])
    await second.read(1, 10)
    await second.begin_step()
    system.assign(stage, {0: second, 1: second})
    await second.join()
    system.kafka.append(second.stage.source_name, 0, b"x", NOT_OURS)
    system.garbage += 1
    await second.read(0, 10)
    await second.end_step()
    await second.commit_state()
    calls[0].speak(FRAMES_A_SEGMENT)
    await system.finish()


async def test_a_worker_that_was_frozen_and_is_given_its_partition_back_does_not_commit_its_old_state() -> None:
    """Its client has joined the new generation, its stage has not heard of it, and there is a state to be committed."""
    system = System()
    call = system.call("a", 0)
    frozen, mind = await system.begin()
    call.speak(2)
    await frozen.read(0, 10)
    await frozen.begin_step()
    await frozen.end_step()
    frozen.producer.deliver(100)
    frozen.producer.acknowledge(100)
    frozen.stage._capture(0.0)
    successor = system.start("vad")
    await system.give_all_to(successor)
    call.speak(4)
    await system.settle(successor, mind)
    owned = Snapshot.unpack(frozen.group.committed[0].metadata)
    system.assign("vad", {0: frozen, 1: frozen})
    frozen.hear()
    assert not await frozen.stage.commit_settled()
    assert Snapshot.unpack(frozen.group.committed[0].metadata) == owned
    await frozen.join()
    assert Snapshot.unpack(frozen.group.committed[0].metadata).epoch == owned.epoch + 1
    await system.settle(frozen, mind)
    await system.finish()


@pytest.mark.parametrize("stage", ["vad", "inference"])
async def test_what_a_retrying_client_wrote_twice_is_taken_once(stage: str) -> None:
    """Everything that a step led to lies on the log two times over, each time in order; so does what the recorder sent."""
    system = System()
    calls = [system.call("a", 0), system.call("b", 0)]
    workers = {name: system.start(name) for name in ("vad", "inference")}
    for worker in workers.values():
        await system.give_all_to(worker)
    for call in calls:
        call.speak(FRAMES_A_SEGMENT)
        call.repeat_last()
    for name in ("vad", stage):
        await workers[name].read(0, 100)
        await workers[name].begin_step()
        await workers[name].end_step()
        if name == "inference":
            workers[name].core.finish(10)
        workers[name].producer.deliver(100)
    workers[stage].producer.repeat()
    await system.settle(*workers.values())
    await system.finish()


async def test_an_owner_that_dies_before_its_first_state_leaves_a_beginning() -> None:
    """It had a partition without a commit, and nothing was there yet: what came then is not skipped."""
    system = System()
    first = system.start("vad")
    await system.give_all_to(first)
    assert {number: each.offset for number, each in first.group.committed.items()} == {0: 0, 1: 0}
    system.call("a", 0).speak(2)
    system.kill(first)
    await system.finish()


async def test_records_that_were_deleted_before_they_were_read_are_told_of_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A group was down for longer than its topic is kept: it goes on with what there is, and the next stage sees what is missing."""
    system = System()
    call = system.call("a", 0)
    ear, mind = await system.begin()
    call.speak(FRAMES_A_SEGMENT)
    await system.settle(ear, mind)
    system.kill(ear)
    call.speak(1)
    del call.payloads[-1]
    system.kafka.starts["asr.audio", 0] = len(system.kafka.logs["asr.audio"][0])
    call._left_out += 1
    call.speak(2)
    before = count_of("asr_offset_holes_total", stage="vad", end="deleted")
    later = system.start("vad")
    await system.give_all_to(later)
    await later.read(0, 10)
    await later.begin_step()
    await later.end_step()
    assert count_of("asr_offset_holes_total", stage="vad", end="deleted") == before + 1
    assert "offsets 2 to 4 were deleted before they were read" in caplog.text
    later.producer.deliver(100)
    assert sum(isinstance(each, SpeechChunk) for each in system.kafka.records(topics.SPEECH)) == FRAMES_A_SEGMENT + 2


async def test_a_broker_that_does_not_know_its_end_yet_has_lost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """One that was killed comes back with the end that it wrote down last, and finds the records after it a moment later."""
    system = System()
    call = system.call("a", 0)
    ear, mind = await system.begin()
    call.speak(2 * FRAMES_A_SEGMENT)
    await system.settle(ear, mind)
    log = system.kafka.logs["asr.audio"][0]
    found, log[3:] = log[3:], []
    await ear.stage._watch_lag(100.0)
    await ear.stage._watch_lag(105.0)
    log.extend(found)
    await ear.stage._watch_lag(106.0)
    await ear.stage._watch_lag(112.0)
    assert "was cut off" not in caplog.text
    assert 0 in ear.stage.tenures


async def test_a_topic_that_was_deleted_and_made_anew_is_read_from_its_beginning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offsets begin again: without a look at its end, everything on it would pass for read."""
    monkeypatch.setattr("streams.stage._CUT_FOR_S", 0.1)
    system = System()
    call = system.call("a", 0)
    ear, mind = await system.begin()
    call.speak(2 * FRAMES_A_SEGMENT)
    await system.settle(ear, mind)
    system.kafka.logs["asr.audio"][0].clear()
    call.speak(1)
    await ear.stage._watch_lag(0.0)
    await ear.stage._watch_lag(0.2)
    await system.settle(ear, mind)
    assert "it was made anew, or lost its end" in caplog.text
    call.speak(2)
    call.hang_up()
    successor = system.start("vad")
    await system.give_all_to(successor)
    await system.settle(successor, mind)
    finals = [each for each in system.kafka.records(topics.TRANSCRIPTS) if isinstance(each, Transcript)]
    # The audio before the cut is gone, so what warms the ear up is: the text may differ, but every frame is heard, and once.
    assert [(each.segment, each.end_sample) for each in finals] == [
        (segment, (segment + 1) * FRAMES_A_SEGMENT * FRAME_SAMPLES) for segment in range(3)
    ]
    assert [each.finals for each in system.kafka.records(topics.SESSIONS) if isinstance(each, Session)] == [3]


async def test_calls_move_to_another_group_and_back_while_both_groups_work() -> None:
    """The commits are copied, the new workers begin, and the old ones go on for a while: readers heed the new ones only."""
    system = System()
    calls = [system.call(f"call-{number}", number % 2) for number in range(4)]
    workers = {stage: system.start(stage) for stage in ("vad", "inference")}
    for worker in workers.values():
        await system.give_all_to(worker)
    for _ in range(2):
        for call in calls:
            call.speak(2)
        await system.settle(*workers.values())
        old = dict(workers)
        for stage in workers:
            names = {number: TopicPartition("t", number) for number in range(system.partitions)}
            left = system.kafka.groups[stage]
            group = system.kafka.groups[stage] = Group()
            there = moved({names[number]: each for number, each in left.committed.items()}, {})
            group.committed = {tp.partition: each for tp, each in there.items()}
            workers[stage] = system.start(stage)
            await system.give_all_to(workers[stage])
        for call in calls:
            call.speak(2)
        await workers["vad"].read(0, 3)
        await system.settle(*old.values())
        await system.settle(*workers.values())
        for worker in old.values():
            system.kill(worker)
    await system.finish()


async def test_partitions_whose_first_commit_failed_are_taken_up_without_another_rebalance() -> None:
    system = System()
    call = system.call("a", 0)
    call.speak(2)
    worker = system.start("vad")
    system.kafka.failing_commits = 1
    await system.give_all_to(worker)
    assert not worker.stage.tenures
    worker.positions = {0: 0, 1: 0}
    await worker.read(0, 10)
    await worker.stage._reclaim()
    assert sorted(worker.stage.tenures) == [0, 1]
    assert worker.positions[0] == 0, "what went by meanwhile is read again"
    await system.finish()


async def test_a_state_that_does_not_fit_stops_nobody_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Too many calls on one partition: they go on without a commit, which is told, and a successor replays them."""
    system = System(snapshot_max_bytes=256)
    calls = [system.call(f"call-{number}", number % 2) for number in range(24)]
    ear, mind = await system.begin()
    for call in calls:
        call.speak(4)
    await system.settle(ear, mind)
    assert "raise offset.metadata.max.bytes" in caplog.text
    assert ear.group.committed[0].offset == 0
    await ear.stage._watch_lag(100.0)
    await ear.stage._watch_lag(140.0)
    assert "nothing was committed for 40 s" in caplog.text
    assert value_of("asr_committed_lag_seconds", stage="vad") == 40.0
    system.kill(ear)
    await system.finish()
    ended = system.workers["vad"][-1]
    assert Snapshot.unpack(ended.group.committed[0].metadata).sessions == ()


async def test_a_call_that_hangs_holds_up_no_other_on_its_partition() -> None:
    """Its final does not come, or its recorder was killed in the middle of a segment: what others have done is committed all the same."""
    system = System()
    hung = system.call("hung", 0)
    ear, mind = await system.begin()
    hung.speak(FRAMES_A_SEGMENT)
    await system.settle(ear)
    other = system.call("other", 0)
    other.speak(2)
    await system.settle(ear)
    await mind.read(0, 100)
    await mind.stage._step()
    mind.producer.deliver(100)
    mind.producer.acknowledge(100)
    await mind.commit_state()
    committed = Snapshot.unpack(mind.group.committed[0].metadata)
    (end,) = (offset for offset, each in enumerate(system.kafka.records(topics.SPEECH)) if isinstance(each, SegmentEnd))
    assert committed.emit_from_offset == end, "what follows from the segment's end is still to be sent"
    assert {each.session_id: each.from_offset for each in committed.sessions} == {"hung": 1, "other": end + 2}
    other.speak(FRAMES_A_SEGMENT)
    await system.settle(ear)
    system.kill(mind)
    await system.finish()


async def test_a_last_record_that_the_client_loses_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing comes after it, so no hole shows: its call would stay open, and its partition uncommitted, for ever."""
    system = System()
    call = system.call("a", 0)
    ear = system.start("vad")
    await system.give_all_to(ear)
    call.speak(2)
    await system.settle(ear)
    call.hang_up()
    await ear.read(0, 0, slip=1)
    due = ear.positions[0] - 1
    for now_s in (0.0, 3.0):
        await ear.stage._watch_lag(now_s)
    assert ear.positions[0] > due
    await ear.stage._watch_lag(5.0)
    assert ear.positions[0] == due
    assert f"offset {due} of asr.audio-0 does not come" in caplog.text
    await system.finish()


async def test_an_input_at_which_the_core_fails_is_rejected_and_every_channel_goes_on() -> None:
    """It would end each worker that takes the partition over; channels of the same step and of the same partition lose nothing."""
    system = System()
    calls = [system.call(f"call-{number}", number % 2) for number in range(4)]
    ear, mind = await system.begin()
    for call in calls:
        call.speak(2)
    calls[0].say(POISON + b" 1")
    calls[1].say(POISON + b" 2")
    calls[0].say(POISON + b" 3")
    for call in calls:
        call.speak(3)
    system.garbage = 3
    await system.settle(ear, mind)
    reasons = {each.reason for each in system.kafka.records(topics.REJECTED) if isinstance(each, Rejected)}
    assert reasons == {"the vad stage fails at it: ValueError: this cannot be heard"}
    assert not ear.stage._careful, "afterwards all goes in one step again"
    await system.finish()


async def test_a_core_that_fails_at_everything_is_not_contained() -> None:
    system = System()
    call = system.call("a", 0)
    ear = system.start("vad")
    await system.give_all_to(ear)
    for _ in range(20):
        call.say(POISON)
    with pytest.raises(ValueError, match="cannot be heard"):
        await system.settle(ear)


async def test_a_huge_record_that_cannot_be_used_fits_onto_the_rejected_topic() -> None:
    system = System()
    ear = system.start("vad")
    await system.give_all_to(ear)
    system.kafka.append("asr.audio", 0, b"x", bytes(1_048_000))
    await ear.read(0, 1)
    (letter,) = ear.producer.waiting
    assert len(letter.value) < 1_000_000
    rejected = default_codec().decode(letter.value)
    assert isinstance(rejected, Rejected)
    assert "only the first 900000 of its 1048000 bytes" in rejected.reason


def value_of(name: str, **labels: str) -> float:
    value = REGISTRY.get_sample_value(name, labels)
    assert value is not None
    return value


def count_of(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0
