"""Workers that were frozen and wake up, and workers that are merely held up, on a real broker."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from connectors.recorder.media import MemorySource
from connectors.recorder.recorder import Recorder, SessionReport
from connectors.results import Results
from ops.chaos.checker import Decoder, RawRecord, read_raw
from ops.chaos.fleet import Fleet, Member
from ops.demo.calls import assemble
from schemas.records import RECORDS, Record
from streams.settings import load_settings
from streams.topics import COVERAGE, PARTIALS, SESSIONS, TRANSCRIPTS, WORKERS

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
SCHEMAS = Path(__file__).parents[3] / "schemas"
CHANNELS = 4
CALL_S = 20.0
SHORT_CALL_S = 12.0
FREEZE_S = 10.0
FULL = 12
PATIENCE_S = 240.0
RESULTS = tuple(topic.name.removeprefix("asr.") for topic in (COVERAGE, PARTIALS, TRANSCRIPTS, SESSIONS))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {PATIENCE_S:.0f} s"
        time.sleep(0.05)


class System:
    """One worker of the first stages, and two of the recogniser's with an engine that can be held up."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.folder = folder
        self.decoder = Decoder(SCHEMAS)

    def play(self, meanwhile: Callable[[], None] = lambda: None, seconds: float = CALL_S) -> list[SessionReport]:
        """Play the same calls, one on each channel, do something meanwhile, and wait until all of it is transcribed."""
        calls = [assemble(1, seconds, telephone=False, rng=np.random.default_rng(number)) for number in range(CHANNELS)]
        with Recorder(self.fleet.settings) as recorder:
            playbacks = [recorder.play(MemorySource(call.parties[0].payload(), "call"), str(number)) for number, call in enumerate(calls)]
            time.sleep(4)
            meanwhile()
            reports = [playback.result(PATIENCE_S) for playback in playbacks]
        sessions = {report.session_id for report in reports}

        def closed() -> set[str]:
            return {record.fields["session_id"] for record in self.raw("sessions") if record.fields["state"] == "closed"}

        wait_until(lambda: sessions <= closed(), "the end of all sessions")
        return reports

    def raw(self, *topics: str) -> list[RawRecord]:
        settings = self.fleet.settings
        return list(read_raw(settings.bootstrap_servers, settings.namespace, topics, self.decoder))

    def owner(self) -> Member:
        """Return the recogniser that owns the first channel."""
        owned: dict[str, tuple[int, ...]] = {}
        while not owned:
            owned = self.fleet.owned("inference")
        return next(member for member in self.fleet.workers("inference") if 0 in owned[member.life])

    def held_by(self, member: Member) -> int:
        """Return how many inputs a worker says to have in hand."""
        statuses = [record.fields for record in self.raw(WORKERS.name.removeprefix("asr.")) if record.fields["worker_id"] == member.life]
        return int(statuses[-1]["lag_records"])

    def generation(self, group: str) -> int:
        """Return a group's generation, as the brokers keep it: it counts every rebalance."""
        servers = self.fleet.settings.bootstrap_servers
        consumer = Consumer({"bootstrap.servers": servers, "group.id": "test", "enable.partition.eof": True})
        numbers = consumer.list_topics("__consumer_offsets", timeout=10).topics["__consumer_offsets"].partitions
        consumer.assign([TopicPartition("__consumer_offsets", number, OFFSET_BEGINNING) for number in numbers])
        generation, left = -1, len(numbers)
        while left:
            message = consumer.poll(10.0)
            assert message is not None
            if message.error():
                left -= 1
                continue
            key, value = message.key(), message.value()
            # GroupMetadataKey has version 2: a string with its length before it. The value: version, protocol type, generation.
            if key[:2] == b"\x00\x02" and key[4:].decode() == group and value:
                at = 4 + int.from_bytes(value[2:4], "big")
                generation = int.from_bytes(value[at : at + 4], "big")
        consumer.close()
        return generation


@pytest.fixture(scope="module")
def system(bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("zombie")
    overrides = {
        "bootstrap_servers": bootstrap_servers,
        "namespace": f"test-{uuid.uuid4().hex[:8]}",
        "partitions": CHANNELS,
        "engine": "instant",
        "snapshot_max_bytes": 32_767,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAGGARD_DIR", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        command = (str(HERE / "laggard.py"), "worker", "-l", "info")
        with Fleet(load_settings(), folder / "run", overrides, workers=1, worker_command=command) as fleet:
            fleet.start(fleet.worker("inference", 1))
            fleet.wait_whole()
            yield System(fleet, folder)


def finals(records: list[RawRecord], reports: list[SessionReport]) -> dict[tuple[str, int], set[tuple[object, ...]]]:
    """Return, by channel and segment, every version of every final."""
    channels = {report.session_id: report.channel_id for report in reports}
    found: dict[tuple[str, int], set[tuple[object, ...]]] = {}
    for record in records:
        fields = record.fields
        if record.topic == "transcripts" and fields["session_id"] in channels:
            version = (fields["kind"], fields["position_samples"], fields["end_sample"], fields["text"], fields["raw_text"])
            found.setdefault((channels[fields["session_id"]], fields["segment"]), set()).add(version)
    return found


def views(records: list[RawRecord], seed: int) -> Results:
    """Return what a reader sees that gets each partition in its order, and the partitions as they come."""
    rng = random.Random(seed)
    lanes: dict[tuple[str, int], list[RawRecord]] = {}
    for record in records:
        lanes.setdefault((record.topic, record.partition), []).append(record)
    results = Results()
    while lanes:
        lane = rng.choice(list(lanes))
        record = lanes[lane].pop(0)
        if not lanes[lane]:
            del lanes[lane]
        results.apply(as_record(record), 1)
    return results


def as_record(raw: RawRecord) -> Record:
    return msgspec.convert(raw.fields, RECORDS[raw.kind])


def test_a_frozen_worker_that_wakes_up_with_a_full_batcher_changes_nothing(system: System) -> None:
    undisturbed = system.play()
    owner = system.owner()

    def freeze() -> None:
        (system.folder / "slow").touch()
        wait_until(lambda: system.held_by(owner) >= FULL, "a full batcher")
        system.fleet.freeze(owner)
        (system.folder / "slow").unlink()
        time.sleep(FREEZE_S)
        system.fleet.thaw(owner)

    disturbed = system.play(freeze)
    system.fleet.wait_whole()
    records = system.raw(*RESULTS)

    # It had much to say when it woke up, and held it back: else this would prove nothing.
    assert "stood still; sending nothing until the group has answered" in (system.fleet.folder / f"{owner.life}.log").read_text()

    # Every version of every final is the one that there was without it.
    expected, written = finals(records, undisturbed), finals(records, disturbed)
    assert written == expected
    assert all(len(versions) == 1 for versions in written.values())

    # And every reader sees just these, every frame answered, and every session closed, however its partitions come.
    sent = {report.session_id: {(span.start_sample, span.end_sample) for span in report.spans} for report in disturbed}
    for seed in range(5):
        results = views(records, seed)
        assert results.conflicts == 0
        for report in disturbed:
            view = results.sessions[report.session_id]
            shown = {segment.segment: segment.transcript.text for segment in view.finals()}
            assert shown == {
                segment: next(iter(versions))[3] for (channel, segment), versions in expected.items() if channel == report.channel_id
            }
            assert view.state == "closed"
            assert view.frames_answered == len(sent[report.session_id])


def test_a_held_gil_in_the_engine_and_a_busy_processor_evict_nobody(system: System) -> None:
    """3 s each, at the same time: a session of 0.5 s must not end by them."""
    groups = [system.fleet.group(stage) for stage in ("vad", "features", "inference")]
    before = {group: system.generation(group) for group in groups}
    assert all(generation > 0 for generation in before.values())

    def hold_up() -> None:
        (system.folder / "hold").touch()
        burning = "import time; end = time.monotonic() + 3\nwhile time.monotonic() < end: pass"
        burners = [subprocess.Popen([sys.executable, "-c", burning]) for _ in range(os.cpu_count() or 1)]
        assert [burner.wait() for burner in burners] == [0] * len(burners)
        wait_until(lambda: not (system.folder / "hold").exists(), "the end of the held GIL")

    reports = system.play(hold_up, SHORT_CALL_S)
    assert {group: system.generation(group) for group in groups} == before
    assert all(report.frames_lost == 0 for report in reports)
    answered: dict[str, set[tuple[int, int]]] = {}
    for record in system.raw("coverage"):
        span = record.fields["position_samples"], record.fields["end_sample"]
        answered.setdefault(record.fields["session_id"], set()).add(span)
    for report in reports:
        assert answered[report.session_id] == {(span.start_sample, span.end_sample) for span in report.spans}
