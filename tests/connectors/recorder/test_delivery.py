"""Brokers that go away under a recorder, for real: nothing is lost, nothing comes in another order, and what cannot be kept is said."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY

from connectors.recorder.media import MemorySource
from connectors.recorder.recorder import Playback, Recorder
from ops.broker import EmbeddedBroker
from schemas.codec import default_codec
from schemas.records import AudioFrame, FlowRecord, SessionEnd, SessionStart
from streams.kafka import ClusterError, end_offsets, partitions_of, plain_consumer
from streams.settings import Settings, load_settings
from streams.topic_admin import create_topics, delete_topics
from streams.topics import AUDIO

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

PATIENCE_S = 180.0
SECONDS = 8.0
SPOOL_AFTER_MS = 300


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A Kafka of these tests' own, to be killed."""
    with EmbeddedBroker(tmp_path_factory.mktemp("kafka")) as own:
        yield own


@pytest.fixture
def kafka(broker: EmbeddedBroker, tmp_path: Path) -> Settings:
    revive(broker)
    settings = load_settings(
        bootstrap_servers=broker.bootstrap_servers,
        namespace=f"test-{uuid.uuid4().hex[:12]}",
        partitions=4,
        data_dir=tmp_path / "data",
        spool_after_ms=SPOOL_AFTER_MS,
    )
    create_topics(settings, [AUDIO])
    return settings


def read_back(settings: Settings) -> dict[str, list[FlowRecord]]:
    """Return all records on the topic by session, in order, repeats included."""
    left = sum(end_offsets(settings, partitions_of(settings, [AUDIO])).values())
    found: dict[str, list[FlowRecord]] = defaultdict(list)
    consumer = plain_consumer(settings, [AUDIO])
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while left and time.monotonic() < deadline_s:
            message = consumer.poll(0.1)
            if message is not None:
                assert message.error() is None
                record = default_codec().decode(message.value())
                assert isinstance(record, FlowRecord)
                found[record.session_id].append(record)
                left -= 1
    finally:
        consumer.close()
    assert left == 0
    return found


def as_readers_see_it(records: list[FlowRecord]) -> list[FlowRecord]:
    """Return a session without repeats: what a stage takes of it."""
    taken: list[FlowRecord] = []
    for record in records:
        if not taken or record.ordinal > taken[-1].ordinal:
            taken.append(record)
    return taken


def is_whole(records: list[FlowRecord]) -> bool:
    """Return whether nothing is missing between a session's start and its end."""
    return (
        isinstance(records[0], SessionStart)
        and isinstance(records[-1], SessionEnd)
        and [record.ordinal for record in records] == list(range(len(records)))
    )


def audio_of(records: list[FlowRecord]) -> bytes:
    return b"".join(record.payload for record in records if isinstance(record, AudioFrame))


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9_000, 9_000, round(16_000 * seconds)).astype(np.int16)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def spool_bytes(settings: Settings) -> int:
    return sum(path.stat().st_size for path in (settings.data_dir / "spool").rglob("*.log"))


def kill(broker: EmbeddedBroker) -> None:
    broker.nodes[0].kill()


def revive(broker: EmbeddedBroker) -> None:
    broker.nodes[0].start()
    broker.wait_ready(PATIENCE_S)


def freeze(broker: EmbeddedBroker) -> None:
    assert broker.nodes[0].process is not None
    broker.nodes[0].process.send_signal(signal.SIGSTOP)


def thaw(broker: EmbeddedBroker) -> None:
    assert broker.nodes[0].process is not None
    broker.nodes[0].process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(("go", "come_back"), [(kill, revive), (freeze, thaw)], ids=["killed", "stopped"])
def test_an_outage_loses_nothing(
    broker: EmbeddedBroker,
    kafka: Settings,
    go: Callable[[EmbeddedBroker], None],
    come_back: Callable[[EmbeddedBroker], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Calls go on at their pace while the broker is away, two of them on one partition; one ends and one begins meanwhile."""
    audio = {str(channel): noise(SECONDS, channel) for channel in (1, 2, 5)}
    audio["2"] = audio["2"][: 16_000 * 3]
    with Recorder(kafka, spool=True) as recorder:
        playing = {channel: recorder.play(MemorySource(samples), channel) for channel, samples in audio.items()}
        wait_until(lambda: playing["1"].report().frames_delivered >= 5, "the calls did not begin")
        go(broker)
        wait_until(lambda: spool_bytes(kafka) > 50_000, "nothing went to disk")
        audio["3"] = noise(2.0, 3)
        playing["3"] = recorder.play(MemorySource(audio["3"]), "3")
        wait_until(lambda: playing["1"].position_ms >= 6_000, "the calls did not go on")
        come_back(broker)
        reports = {channel: playback.result(PATIENCE_S) for channel, playback in playing.items()}

    assert max(recorder.lateness_ms()) < 5_000, "the calls were held up"
    found = read_back(kafka)
    for channel, report in reports.items():
        assert (report.frames_delivered, report.frames_lost, report.frames_kept) == (report.frames_sent, 0, 0)
        records = as_readers_see_it(found[report.session_id])
        assert is_whole(records)
        assert audio_of(records) == audio[channel].tobytes()
    assert not list((kafka.data_dir / "spool").iterdir()), "the spool was not cleared"
    assert "go to disk" in caplog.text
    assert "have been sent" in caplog.text


def test_a_recorder_that_is_killed_in_an_outage_is_followed_by_one_that_sends_the_rest(
    broker: EmbeddedBroker, kafka: Settings, tmp_path: Path, audio
) -> None:
    """The second one starts while the broker is still away."""
    samples = noise(30)
    file = audio.wav("call.wav", samples.tobytes())
    environment = {
        **os.environ,
        "ASR_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "ASR_NAMESPACE": kafka.namespace,
        "ASR_PARTITIONS": str(kafka.partitions),
        "ASR_DATA_DIR": str(kafka.data_dir),
        "ASR_SPOOL_AFTER_MS": str(SPOOL_AFTER_MS),
    }

    def record(channel: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from ops.cli import main; main()", "record", str(file), "--channel", str(channel)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def taken() -> int:
        with contextlib.suppress(ClusterError):  # a new topic's leader may not be known to all yet
            return sum(end_offsets(kafka, partitions_of(kafka, [AUDIO])).values())
        return 0

    first = record(1)
    wait_until(lambda: taken() >= 5, "the first call did not begin")
    kill(broker)
    wait_until(lambda: spool_bytes(kafka) > 60_000, "nothing went to disk")
    # A record that is half written, as a kill in the middle of a write would leave it.
    first.send_signal(signal.SIGKILL)
    first.wait()
    (log,) = (kafka.data_dir / "spool").rglob("*.log")
    whole = log.read_bytes()
    log.write_bytes(whole + whole[10:400])

    second = record(2)
    wait_until(lambda: len(list((kafka.data_dir / "spool").rglob("2-*.log"))) == 1, "the second call did not go to disk")
    revive(broker)
    wait_until(lambda: spool_bytes(kafka) == 0, "the rest was not sent")
    second.send_signal(signal.SIGINT)
    said, _ = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, said
    assert "a recorder before has left" in said
    assert "No Kafka" in said

    calls = {records[0].channel_id: as_readers_see_it(records) for records in read_back(kafka).values()}
    assert set(calls) == {"1", "2"}
    for records in calls.values():
        assert is_whole(records)
        assert audio_of(records) == samples.tobytes()[: len(audio_of(records))]
    end = calls["1"][-1]
    assert isinstance(end, SessionEnd)
    assert (end.reason, end.position_samples) == ("failed", len(audio_of(calls["1"])) // 2)
    assert len(audio_of(calls["1"])) > 60_000


def test_a_full_spool_drops_the_newest_frames_and_says_so(
    broker: EmbeddedBroker, kafka: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """What is dropped is one gap in each call; starts and ends find room; what a later call says is complete again."""
    small = kafka.model_copy(update={"spool_max_bytes": 120_000})
    with Recorder(small, spool=True) as recorder:
        playback = recorder.play(MemorySource(noise(180)), "1")
        wait_until(lambda: playback.report().frames_delivered >= 3, "the call did not begin")
        kill(broker)
        wait_until(lambda: playback.report().frames_lost >= 5, "nothing was dropped")
        assert REGISTRY.get_sample_value("asr_recorder_spool_full") == 1
        assert spool_bytes(kafka) <= 120_000
        late = recorder.play(MemorySource(noise(2)), "2")
        wait_until(lambda: late.report().reason == "hangup", "the later call did not end")
        revive(broker)
        wait_until(lambda: not recorder.is_behind, "what was on disk was not sent")
        lost, delivered = playback.report().frames_lost, playback.report().frames_delivered
        wait_until(lambda: playback.report().frames_delivered >= delivered + 3, "the call did not go on")
        playback.stop()
        report, later = playback.result(PATIENCE_S), late.result(PATIENCE_S)

    assert report.frames_lost + report.frames_delivered == report.frames_sent
    assert report.frames_lost == lost
    # What was in memory when it was seen that the broker does not take this partition's records either.
    assert later.frames_lost + later.frames_delivered == later.frames_sent == 10
    assert later.frames_lost >= 5
    assert "no room on disk" in report.failures[0]
    alarms = [entry for entry in caplog.records if entry.levelno == logging.ERROR and "AUDIO IS BEING LOST" in entry.getMessage()]
    assert alarms
    assert REGISTRY.get_sample_value("asr_recorder_spool_full") == 0
    found = read_back(kafka)
    records = as_readers_see_it(found[report.session_id])
    frames = [record for record in records if isinstance(record, AudioFrame)]
    jumps = [after.position_samples - before.position_samples for before, after in pairwise(frames)]
    assert sum(jump != 3_200 for jump in jumps) == 1, "there is one gap"
    assert records[-1].position_samples == report.samples
    # The later call is known as a whole: its start and its end found room.
    first, *_, last = as_readers_see_it(found[later.session_id])
    assert isinstance(first, SessionStart)
    assert isinstance(last, SessionEnd)
    assert last.position_samples == 32_000


def test_what_is_not_delivered_when_a_recorder_stops_is_left_to_the_next(broker: EmbeddedBroker, kafka: Settings) -> None:
    samples = noise(60)
    recorder = Recorder(kafka, spool=True)
    recorder.start()
    playback = recorder.play(MemorySource(samples), "1")
    wait_until(lambda: playback.report().frames_delivered >= 3, "the call did not begin")
    kill(broker)
    wait_until(lambda: spool_bytes(kafka) > 50_000, "nothing went to disk")
    recorder.close(timeout_s=0.2)
    report = playback.result(0)
    assert (report.frames_delivered + report.frames_kept, report.frames_lost) == (report.frames_sent, 0)
    assert report.frames_kept > 0

    revive(broker)
    with Recorder(kafka, spool=True) as following:
        wait_until(lambda: not following.is_behind, "the rest was not sent")
    records = as_readers_see_it(read_back(kafka)[report.session_id])
    assert is_whole(records)
    assert audio_of(records) == samples.tobytes()[: 2 * report.samples]


def test_a_topic_that_is_made_anew_is_written_to_again(kafka: Settings) -> None:
    """The client gives up on a topic that is gone; the recorder does not."""
    samples = noise(40)
    with Recorder(kafka, spool=True) as recorder:
        playback = recorder.play(MemorySource(samples), "1")
        wait_until(lambda: playback.report().frames_delivered >= 5, "the call did not begin")
        delete_topics(kafka, [AUDIO])
        wait_until(lambda: spool_bytes(kafka) > 50_000, "nothing went to disk")
        create_topics(kafka, [AUDIO])
        wait_until(lambda: not recorder.is_behind, "the records did not follow")
        playback.stop()
        report = playback.result(PATIENCE_S)
    assert report.frames_lost == 0
    records = as_readers_see_it(read_back(kafka)[report.session_id])
    ordinals = [record.ordinal for record in records]
    assert ordinals == list(range(ordinals[0], ordinals[-1] + 1))
    assert isinstance(records[-1], SessionEnd)


def test_without_a_spool_a_source_is_held_back(broker: EmbeddedBroker, kafka: Settings) -> None:
    samples = noise(120)
    with Recorder(kafka, realtime=False) as recorder:
        playback: Playback = recorder.play(MemorySource(samples), "1")
        wait_until(lambda: playback.report().frames_delivered >= 1, "the call did not begin")
        kill(broker)
        time.sleep(0.5)
        assert not (kafka.data_dir / "spool").exists()
        revive(broker)
        report = playback.result(PATIENCE_S)
    assert (report.frames_sent, report.frames_delivered) == (600, 600)
    assert audio_of(as_readers_see_it(read_back(kafka)[report.session_id])) == samples.tobytes()
