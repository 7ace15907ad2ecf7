"""The runtime on a real broker: workers are stopped, killed and frozen, and nothing is lost, doubled or changed.

The worker is ``counting_worker.py``: each of its outputs digests every frame before it, so one wrong input shows in all that follows.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import OffsetAndMetadata
from aiokafka.structs import TopicPartition as AIOTopicPartition
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from ops.broker import EmbeddedBroker
from schemas import AudioFrame, Rejected, SessionEnd, SessionStart, SpeechChunk, default_codec
from streams import topics
from streams.checkpoint import SNAPSHOT_VERSION, Snapshot
from streams.settings import Settings
from streams.topic_admin import delete_topics, ensure_topics
from streams.topics import Topic

pytestmark = pytest.mark.broker

WORKER = Path(__file__).with_name("counting_worker.py")
FRAME_SAMPLES = 3_200
PATIENCE_S = 120.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {PATIENCE_S:.0f} s"
        time.sleep(0.05)


class Workers:
    """Counting workers, as processes."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, step_s: float = 0.0, **more: str) -> subprocess.Popen[bytes]:
        number = len(self._running)
        environment = {
            **os.environ,
            "ASR_BOOTSTRAP_SERVERS": self._settings.bootstrap_servers,
            "ASR_NAMESPACE": self._settings.namespace,
            "ASR_PARTITIONS": str(self._settings.partitions),
            "ASR_STAGE": "vad",
            "ASR_DATA_DIR": str(self._folder),
            "ASR_WORKER_ID": f"counting-{number}",
            "ASR_SNAPSHOT_INTERVAL_MS": "200",
            "COUNTING_STEP_S": str(step_s),
            **more,
        }
        with (self._folder / f"worker-{number}.log").open("wb") as log:
            worker = subprocess.Popen(
                [sys.executable, str(WORKER), "worker", "-l", "info"], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self._running.append(worker)
        return worker

    def log(self, number: int) -> str:
        return (self._folder / f"worker-{number}.log").read_text()

    def stop(self) -> None:
        for worker in self._running:
            if worker.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.kill()
            worker.wait()


@pytest.fixture(autouse=True)
def _topics(settings: Settings) -> None:
    ensure_topics(settings)


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[Workers]:
    started = Workers(settings, tmp_path)
    yield started
    started.stop()


class Calls:
    """Sessions whose frames are all different, one session a partition."""

    def __init__(self, settings: Settings, sessions: int, prefix: str = "session") -> None:
        self._settings = settings
        self._producer = Producer({"bootstrap.servers": settings.bootstrap_servers, "enable.idempotence": True})
        self._codec = default_codec()
        self.payloads: dict[str, list[bytes]] = {f"{prefix}-{number}": [] for number in range(sessions)}
        for number, session_id in enumerate(self.payloads):
            self._produce(
                number,
                SessionStart(
                    channel_id=str(number),
                    session_id=session_id,
                    conversation_id="c",
                    position_samples=0,
                    encoding="pcm_s16le",
                    sample_rate_hz=16_000,
                ),
            )

    def _partition(self, number: int) -> int:
        return number % self._settings.partitions

    def _produce(self, number: int, record: AudioFrame | SessionStart | SessionEnd) -> None:
        self.produce_raw(number, self._codec.encode(record))

    def produce_raw(self, number: int, value: bytes) -> None:
        name = topics.AUDIO.full_name(self._settings)
        self._producer.produce(name, value, str(number).encode(), partition=self._partition(number))

    def send_without_waiting(self, frames: int) -> None:
        self.speak(frames, flush=False)

    def speak(self, frames: int, pace_s: float = 0.0, *, flush: bool = True) -> None:
        for _ in range(frames):
            for number, (session_id, payloads) in enumerate(self.payloads.items()):
                payload = f"{session_id}/{len(payloads)}".encode()
                self._produce(
                    number,
                    AudioFrame(
                        channel_id=str(number),
                        session_id=session_id,
                        conversation_id="c",
                        ordinal=len(payloads) + 1,
                        position_samples=len(payloads) * FRAME_SAMPLES,
                        encoding="pcm_s16le",
                        sample_rate_hz=16_000,
                        payload=payload,
                    ),
                )
                payloads.append(payload)
            if flush:
                self._producer.flush()
            time.sleep(pace_s)

    def hang_up(self) -> None:
        for number, (session_id, payloads) in enumerate(self.payloads.items()):
            self._produce(
                number,
                SessionEnd(
                    channel_id=str(number),
                    session_id=session_id,
                    conversation_id="c",
                    ordinal=len(payloads) + 1,
                    position_samples=len(payloads) * FRAME_SAMPLES,
                    reason="hangup",
                ),
            )
        self._producer.flush()


class Listener:
    """Reads a topic raw from offset 0; knows nothing of the runtime."""

    def __init__(self, settings: Settings, topic: Topic) -> None:
        name = topic.full_name(settings)
        self._consumer = Consumer(
            {"bootstrap.servers": settings.bootstrap_servers, "group.id": "listener", "enable.auto.commit": False, "fetch.wait.max.ms": 20}
        )
        self._consumer.assign([TopicPartition(name, number, 0) for number in range(topic.partition_count(settings))])
        self.records: list[object] = []

    def read(self) -> list[object]:
        while (message := self._consumer.poll(0.05)) is not None:
            assert message.error() is None, message.error()
            self.records.append(default_codec().decode(message.value()))
        return self.records

    def close(self) -> None:
        self._consumer.close()


@pytest.fixture
def speech(settings: Settings) -> Iterator[Listener]:
    listener = Listener(settings, topics.SPEECH)
    yield listener
    listener.close()


def counting_digests(payloads: list[bytes]) -> list[bytes]:
    digests, digest = [], b""
    for payload in payloads:
        digest = hashlib.blake2b(digest + payload, digest_size=8).digest()
        digests.append(digest)
    return digests


def ended(speech: Listener) -> set[str]:
    return {record.session_id for record in speech.read() if isinstance(record, SessionEnd)}


def as_a_reader_sees_it(records: list[object]) -> dict[str, list[bytes]]:
    """Apply the reader's rule: keep the highest epoch, drop repeats by ordinal; and check that nothing is missing."""
    epochs: dict[str, int] = defaultdict(int)
    last: dict[str, int] = defaultdict(lambda: -1)
    seen: dict[str, list[bytes]] = defaultdict(list)
    for record in records:
        assert isinstance(record, SpeechChunk | SessionEnd)
        session_id = record.session_id
        if record.epoch < epochs[session_id] or record.ordinal <= last[session_id]:
            epochs[session_id] = max(epochs[session_id], record.epoch)
            continue
        assert record.ordinal == last[session_id] + 1, f"records of {session_id} are missing before {record}"
        epochs[session_id], last[session_id] = record.epoch, record.ordinal
        if isinstance(record, SpeechChunk):
            seen[session_id].append(record.pcm)
    return seen


def check_nothing_lost(calls: Calls, speech: Listener) -> None:
    """Every frame was taken exactly once, in order, whoever took it; no record was ever written in two versions."""
    seen = as_a_reader_sees_it(speech.read())
    assert seen == {session_id: counting_digests(payloads) for session_id, payloads in calls.payloads.items()}
    versions: dict[tuple[str, int], set[bytes]] = defaultdict(set)
    for record in speech.records:
        if isinstance(record, SpeechChunk):
            versions[record.session_id, record.ordinal].add(record.pcm)
    assert all(len(contents) == 1 for contents in versions.values())


def committed(settings: Settings) -> dict[int, tuple[int, Snapshot]]:
    """Return what the group has committed, as the broker has it."""

    async def ask() -> dict[int, tuple[int, Snapshot]]:
        # confluent-kafka's admin client returns metadata with stray bytes after its end.
        admin = AIOKafkaAdminClient(bootstrap_servers=settings.bootstrap_servers)
        await admin.start()
        try:
            found = await admin.list_consumer_group_offsets(f"{settings.namespace}.vad")
        finally:
            await admin.close()
        return {tp.partition: (each.offset, Snapshot.unpack(each.metadata)) for tp, each in found.items() if each.metadata}

    return asyncio.run(ask())


def owned_by(workers: Workers, number: int) -> bool:
    return "Worker ready" in workers.log(number)


def test_stop_and_start_lose_nothing(settings: Settings, workers: Workers, speech: Listener) -> None:
    """SIGTERM commits all that was taken: the next worker starts exactly there, and repeats nothing."""
    calls = Calls(settings, sessions=3)
    first = workers.start()
    calls.speak(10, pace_s=0.02)
    wait_until(lambda: len(speech.read()) >= 30, "the first worker's work")
    first.terminate()
    assert first.wait(PATIENCE_S) == 0
    calls.speak(10)
    workers.start()
    calls.hang_up()
    wait_until(lambda: len(ended(speech)) == 3, "the end of all sessions")
    check_nothing_lost(calls, speech)
    assert len(speech.records) == 3 * (20 + 1), "something was done twice, though the first worker stopped in order"
    epochs = {record.epoch for record in speech.records}  # type: ignore[attr-defined]
    assert epochs == {1, 2}, "each takeover counts one epoch on"


def test_what_a_stage_still_holds_is_never_committed_past(settings: Settings, workers: Workers, speech: Listener) -> None:
    """Four cases, a partition each, in which acknowledging out of order made the consumer library commit past held events.

    On a partition without a commit any number of them was jumped, and after one at 10 exactly one was.
    """
    held = {0: [0, 1, 2], 1: [2], 2: [10], 3: [10, 11]}
    calls = Calls(settings, sessions=4)
    first = workers.start(COUNTING_HOLD=" ".join(f"{partition}:{offset}" for partition, offsets in held.items() for offset in offsets))
    calls.speak(9)  # with the session's start, offsets 0 to 9
    wait_until(
        lambda: {2, 3} <= {partition for partition, (_, snapshot) in committed(settings).items() if snapshot.emit_from_offset == 10},
        "commits of 10",
    )
    calls.speak(10)
    wait_until(lambda: len(speech.read()) == 4 * 19, "all outputs, also those of inputs that are held")
    calls.speak(1)
    wait_until(lambda: len(speech.read()) == 4 * 20, "one more round, in which commits could be made")
    time.sleep(1.0)  # five times the interval between snapshots
    first.kill()
    offsets = {partition: snapshot.emit_from_offset for partition, (_, snapshot) in committed(settings).items()}
    assert all(offsets[partition] <= min(still_held) for partition, still_held in held.items()), offsets
    workers.start()
    calls.hang_up()
    wait_until(lambda: len(ended(speech)) == 4, "the end of all sessions")
    check_nothing_lost(calls, speech)


def test_kill_9_in_the_middle_of_calls_loses_nothing(settings: Settings, workers: Workers, speech: Listener) -> None:
    """Two workers share more sessions than partitions; each is killed once, with work in its hands."""
    calls = Calls(settings, sessions=settings.partitions + 2)
    first, _ = workers.start(step_s=0.05), workers.start(step_s=0.05)
    wait_until(lambda: owned_by(workers, 0) and owned_by(workers, 1), "the start of two workers")
    calls.speak(40, pace_s=0.05)
    first.kill()
    calls.speak(40, pace_s=0.05)
    third = workers.start(step_s=0.05)
    calls.speak(40, pace_s=0.05)
    third.kill()
    calls.speak(10, pace_s=0.05)
    calls.hang_up()
    wait_until(lambda: len(ended(speech)) == len(calls.payloads), "the end of all sessions")
    check_nothing_lost(calls, speech)


def test_a_frozen_owner_that_wakes_up_changes_nothing(settings: Settings, workers: Workers, speech: Listener) -> None:
    """SIGSTOP with work in hand, takeover, SIGCONT: what the old owner still writes is fenced, and its commits are refused."""
    calls = Calls(settings, sessions=settings.partitions)
    frozen = workers.start(step_s=0.2)
    wait_until(lambda: owned_by(workers, 0), "the start of a worker")
    calls.speak(10, pace_s=0.02)
    wait_until(lambda: len(speech.read()) > 0, "some work")
    frozen.send_signal(signal.SIGSTOP)
    workers.start()
    calls.speak(10)
    wait_until(lambda: bool(speech.read()) and max(each.epoch for each in speech.records) == 2, "a takeover")  # type: ignore[attr-defined]
    wait_until(lambda: min((snapshot.epoch for _, snapshot in committed(settings).values()), default=0) >= 2, "its commits")
    frozen.send_signal(signal.SIGCONT)
    calls.speak(20, pace_s=0.05)
    calls.hang_up()
    wait_until(lambda: len(ended(speech)) == len(calls.payloads), "the end of all sessions")
    check_nothing_lost(calls, speech)
    assert all(snapshot.epoch >= 2 for _, snapshot in committed(settings).values()), "an old owner's commit was taken"


def test_what_cannot_be_read_is_rejected_with_its_reason_and_the_channel_goes_on(
    settings: Settings, workers: Workers, speech: Listener
) -> None:
    calls = Calls(settings, sessions=2)
    calls.speak(3)
    calls.produce_raw(0, b"\x00\x01\x02 something else")
    calls.produce_raw(0, b"")
    calls.produce_raw(1, b"\xc3\x01" + bytes(8) + b"written by a newer release")
    calls.produce_raw(1, default_codec().encode(Rejected(topic="t", partition=0, offset=0, stage="vad", reason="r", at_us=0)))
    calls.speak(3)
    calls.hang_up()
    workers.start()
    wait_until(lambda: len(ended(speech)) == 2, "the end of all sessions")
    check_nothing_lost(calls, speech)
    rejected = Listener(settings, topics.REJECTED)
    wait_until(lambda: len(rejected.read()) == 4, "four rejections")
    rejected.close()
    reasons = {(each.partition, each.value): each.reason for each in rejected.records if isinstance(each, Rejected)}
    assert "registry" in reasons[0, b"\x00\x01\x02 something else"]
    assert "empty" in reasons[0, b""]
    assert any("no schema has the fingerprint 0000000000000000: was it written by a newer version?" in each for each in reasons.values())
    assert any("Rejected does not belong" in reason for reason in reasons.values())


def test_a_frame_of_a_session_that_never_started_is_rejected(settings: Settings, workers: Workers, speech: Listener) -> None:
    calls = Calls(settings, sessions=1)
    stray = AudioFrame(
        channel_id="0",
        session_id="stray",
        conversation_id="c",
        ordinal=7,
        position_samples=0,
        encoding="pcm_s16le",
        sample_rate_hz=16_000,
        payload=b"xx",
    )
    calls.produce_raw(0, default_codec().encode(stray))
    calls.speak(2)
    calls.hang_up()
    workers.start()
    wait_until(lambda: ended(speech) == {"session-0"}, "the end of the session")
    check_nothing_lost(calls, speech)
    rejected = Listener(settings, topics.REJECTED)
    wait_until(lambda: len(rejected.read()) == 1, "a rejection")
    rejected.close()
    assert isinstance(rejected.records[0], Rejected)
    assert "stray was never started" in rejected.records[0].reason


def test_a_snapshot_of_another_version_stops_the_worker_with_what_to_do(settings: Settings, workers: Workers) -> None:
    """A newer release wrote it: this one refuses to start, rather than lose or misread what it holds."""
    newer = base64.b64encode(bytes([SNAPSHOT_VERSION + 1]) + b"unknown").decode()

    async def commit() -> None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=settings.bootstrap_servers, group_id=f"{settings.namespace}.vad", enable_auto_commit=False
        )
        await consumer.start()
        try:
            partition = AIOTopicPartition(topics.AUDIO.full_name(settings), 0)
            consumer.assign([partition])
            await consumer.commit({partition: OffsetAndMetadata(0, newer)})
        finally:
            await consumer.stop()

    asyncio.run(commit())
    worker = workers.start()
    assert worker.wait(PATIENCE_S) != 0
    assert f"snapshot has version {SNAPSHOT_VERSION + 1} and this release reads version {SNAPSHOT_VERSION}" in workers.log(0)


def test_sessions_that_outgrow_the_allowed_metadata_are_told_of_and_lose_nothing(
    settings: Settings, workers: Workers, speech: Listener
) -> None:
    """The worker goes on without commits, for to stop would stop every channel; a successor replays, and commits again when they end."""
    calls = Calls(settings, sessions=settings.partitions * 20)
    calls.speak(2)
    worker = workers.start(ASR_SNAPSHOT_MAX_BYTES="512")
    wait_until(lambda: len(speech.read()) == 2 * len(calls.payloads), "all outputs")
    wait_until(lambda: "raise offset.metadata.max.bytes" in workers.log(0), "the alarm")
    worker.kill()
    calls.speak(2)
    calls.hang_up()
    workers.start(ASR_SNAPSHOT_MAX_BYTES="512")
    wait_until(lambda: len(ended(speech)) == len(calls.payloads), "the end of all sessions")
    check_nothing_lost(calls, speech)
    wait_until(lambda: all(not snapshot.sessions for _, snapshot in committed(settings).values()), "a commit without sessions")


def test_records_that_were_deleted_while_the_group_was_down_are_told_of_and_the_channels_go_on(
    settings: Settings, workers: Workers, speech: Listener
) -> None:
    """Retention ran past the committed offset: one channel lost three frames, the others none."""
    calls = Calls(settings, sessions=3)
    calls.speak(5)
    first = workers.start()
    wait_until(lambda: len(speech.read()) == 3 * 5, "the first worker's work")
    first.terminate()
    assert first.wait(PATIENCE_S) == 0
    calls.speak(5)
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    # The session's start and five frames were read; so were the offsets before 6.
    for answer in admin.delete_records([TopicPartition(topics.AUDIO.full_name(settings), 0, 9)]).values():
        answer.result()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers.start(ASR_METRICS_PORT=str(port))
    calls.hang_up()
    wait_until(lambda: len(ended(speech)) == 3, "the end of all sessions")
    assert "offsets 5 to 8 were deleted before they were read" in workers.log(1) or "offsets 6 to 8" in workers.log(1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert 'asr_offset_holes_total{end="deleted",stage="vad"} 1.0' in answer.read().decode()
    seen = as_a_reader_sees_it(speech.read())
    del calls.payloads["session-0"][5:8]
    assert seen == {session_id: counting_digests(payloads) for session_id, payloads in calls.payloads.items()}


def test_outputs_wait_for_a_topic_that_was_deleted_and_nothing_is_lost(settings: Settings, workers: Workers, speech: Listener) -> None:
    """The worker says what is missing, takes nothing back and lets nothing go, and goes on when the topic is there again."""
    calls = Calls(settings, sessions=2)
    worker = workers.start()
    calls.speak(3)
    wait_until(lambda: len(speech.read()) == 2 * 3, "work")
    wait_until(lambda: {offset for offset, _ in committed(settings).values()} >= {3}, "its commit")
    speech.close()
    delete_topics(settings, [topics.SPEECH])
    calls.speak(3)
    wait_until(lambda: "have acknowledged nothing" in workers.log(0) or "no broker knows the topic" in workers.log(0), "the alarm")
    ensure_topics(settings)
    again = Listener(settings, topics.SPEECH)
    calls.hang_up()
    wait_until(lambda: len(ended(again)) == 2, "the end of all sessions")
    assert worker.poll() is None, "the worker ended"
    chunks = [each.pcm for each in again.records if isinstance(each, SpeechChunk)]
    again.close()
    expected = [digest for payloads in calls.payloads.values() for digest in counting_digests(payloads)[3:]]
    assert set(expected) <= set(chunks)


def test_an_input_topic_that_was_deleted_and_made_anew_is_read_again(settings: Settings, workers: Workers, speech: Listener) -> None:
    """Without the records there is nothing to be done; with new calls on a new topic, whose offsets begin again, all goes on."""
    worker = workers.start()
    calls = Calls(settings, sessions=2)
    calls.speak(5)
    calls.hang_up()
    wait_until(lambda: len(ended(speech)) == 2, "the end of the first sessions")
    delete_topics(settings, [topics.AUDIO])
    ensure_topics(settings)
    later = Calls(settings, sessions=2, prefix="later")
    later.speak(2)
    later.hang_up()
    wait_until(lambda: len(ended(speech)) == 4, "the end of the later sessions")
    assert worker.poll() is None, "the worker ended"
    calls.payloads |= later.payloads
    check_nothing_lost(calls, speech)


def test_a_worker_that_is_started_before_topics_and_brokers_are_there_says_so_and_waits(tmp_path: Path, settings: Settings) -> None:
    absent = settings.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    early = Workers(absent, tmp_path)
    try:
        worker = early.start()
        wait_until(lambda: "No Kafka at 127.0.0.1:1 answers" in early.log(0), "the complaint")
        assert worker.poll() is None
    finally:
        early.stop()
    delete_topics(settings)
    folder = tmp_path / "later"
    folder.mkdir()
    later = Workers(settings, folder)
    try:
        worker = later.start()
        wait_until(lambda: "Create the topics with `asr topics create`" in later.log(0), "the complaint")
        ensure_topics(settings)
        calls, speech = Calls(settings, sessions=2), Listener(settings, topics.SPEECH)
        calls.speak(2)
        calls.hang_up()
        wait_until(lambda: len(ended(speech)) == 2, "the end of all sessions")
        check_nothing_lost(calls, speech)
        speech.close()
        assert worker.poll() is None
    finally:
        later.stop()


def test_a_broker_whose_disk_is_full_stops_the_calls_and_loses_nothing(settings: Settings, tmp_path: Path) -> None:
    """Kafka ends itself when it cannot write. Workers say so and wait; when there is room again, they go on where they were."""
    with EmbeddedBroker(tmp_path / "kafka") as broker:
        own = settings.model_copy(update={"bootstrap_servers": broker.bootstrap_servers})
        ensure_topics(own)
        workers, speech = Workers(own, tmp_path), Listener(own, topics.SPEECH)
        try:
            worker = workers.start()
            calls = Calls(own, sessions=2)
            calls.speak(5)
            wait_until(lambda: len(speech.read()) == 2 * 5, "work")
            (node,) = broker.nodes
            assert node.process is not None
            # No file may grow beyond this: to Kafka it is as if the disk were full.
            resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, (4_096, 4_096))
            calls.send_without_waiting(frames=60)
            wait_until(lambda: not node.is_running, "the end of the broker")
            wait_until(lambda: "have acknowledged nothing" in workers.log(0), "the worker's alarm")
            node.start()
            broker.wait_ready(timeout_s=PATIENCE_S)
            calls.hang_up()
            wait_until(lambda: len(ended(speech)) == 2, "the end of all sessions")
            assert worker.poll() is None, "the worker ended"
            check_nothing_lost(calls, speech)
        finally:
            workers.stop()
            speech.close()


def test_a_worker_serves_its_metrics_where_it_is_told_to(settings: Settings, workers: Workers, speech: Listener) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    calls = Calls(settings, sessions=2)
    workers.start(ASR_METRICS_PORT=str(port))
    calls.speak(5)
    calls.hang_up()
    wait_until(lambda: len(ended(speech)) == 2, "the end of all sessions")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    assert 'asr_inputs_total{stage="vad"} 14.0' in text
    assert 'asr_outputs_total{record="SpeechChunk",stage="vad"} 10.0' in text
    taken = workers.start(ASR_METRICS_PORT=str(port))
    assert taken.wait(PATIENCE_S) != 0
    assert "Choose another ASR_METRICS_PORT" in workers.log(1)
