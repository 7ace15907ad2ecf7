"""The whole pipeline while its only broker is away for longer than a session may be silent: every call goes on as if nothing had been.

The engine is ``instant``: its finals are digests of all features that it was given, so one sample more or less would change them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from connectors.recorder.media import MemorySource
from connectors.recorder.recorder import Recorder, SessionReport
from ops.broker import EmbeddedBroker
from ops.demo.calls import read_clip
from schemas import Coverage, Record, Session, Transcript, WorkerStatus, default_codec
from streams import topics
from streams.kafka import read_to_end
from streams.settings import Settings, load_settings
from streams.topic_admin import ensure_topics
from streams.topics import Topic

pytestmark = [pytest.mark.broker, pytest.mark.timeout(1_200)]

CLIPS = ("jfk.flac", "order_s01_84e34eca.flac")
PATIENCE_S = 240.0
SESSION_LOST_MS = 8_000
#: A minute on a machine that has one to spare.
OUTAGE_S = float(os.environ.get("ASR_TEST_OUTAGE_S", "12"))
T = TypeVar("T", bound=Record)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "kafka") as own:
        yield own


@pytest.fixture
def settings(broker: EmbeddedBroker, tmp_path: Path) -> Settings:
    made = load_settings(
        bootstrap_servers=broker.bootstrap_servers,
        partitions=4,
        data_dir=tmp_path / "data",
        session_lost_ms=SESSION_LOST_MS,
        spool_after_ms=500,
    )
    ensure_topics(made)
    return made


@pytest.fixture
def worker(settings: Settings, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "ASR_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ASR_PARTITIONS": str(settings.partitions),
        "ASR_SESSION_LOST_MS": str(SESSION_LOST_MS),
        "ASR_SNAPSHOT_MAX_BYTES": "32767",
        "ASR_ENGINE": "instant",
        "ASR_DATA_DIR": str(settings.data_dir),
    }
    with (tmp_path / "worker.log").open("wb") as log:
        command = [sys.executable, "-m", "faust", "-A", "streams", "worker", "-l", "info"]
        running = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
    wait_until(lambda: any(status.partitions for status in read(settings, topics.WORKERS, WorkerStatus)), "the worker's start")
    yield running
    running.kill()
    running.wait()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {PATIENCE_S:.0f} s"
        time.sleep(0.1)


def read(settings: Settings, topic: Topic, kind: type[T]) -> list[T]:
    records = (default_codec().decode(message.value()) for message in read_to_end(settings, [topic]) if message.value() is not None)
    return [record for record in records if isinstance(record, kind)]


def audio_of(clip: str) -> np.ndarray:
    """Return a clip, again and again until the outage is over and some more."""
    return np.resize(read_clip(clip), round(16_000 * (OUTAGE_S + 6)))


def play(settings: Settings, disturb: Callable[[], None] = lambda: None) -> dict[str, SessionReport]:
    """Play all clips at once, do something in the middle, wait for the end of all calls."""
    with Recorder(settings, spool=True) as recorder:
        playbacks = [recorder.play(MemorySource(audio_of(clip)), str(number)) for number, clip in enumerate(CLIPS)]
        time.sleep(2.0)
        disturb()
        reports = [playback.result(PATIENCE_S) for playback in playbacks]
    ids = {report.session_id for report in reports}

    def closed() -> set[str]:
        return {each.session_id for each in read(settings, topics.SESSIONS, Session) if each.state == "closed"}

    wait_until(lambda: ids <= closed(), "the end of the calls")
    return {report.channel_id: report for report in reports}


def finals_of(settings: Settings, report: SessionReport) -> list[tuple[int, int, str]]:
    finals = [
        each for each in read(settings, topics.TRANSCRIPTS, Transcript) if each.session_id == report.session_id and each.kind == "final"
    ]
    return sorted({(each.position_samples, each.end_sample, each.text) for each in finals})


def test_an_outage_of_the_broker_is_not_silence(broker: EmbeddedBroker, settings: Settings, worker: subprocess.Popen[bytes]) -> None:
    undisturbed = play(settings)

    def outage() -> None:
        broker.nodes[0].kill()
        time.sleep(OUTAGE_S)
        broker.nodes[0].start()
        broker.wait_ready(PATIENCE_S)

    disturbed = play(settings, outage)
    assert worker.poll() is None, "the worker did not survive the outage"

    answered: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for each in read(settings, topics.COVERAGE, Coverage):
        answered[each.session_id].add((each.position_samples, each.end_sample))
    for channel, report in disturbed.items():
        assert (report.frames_lost, report.frames_kept) == (0, 0)
        assert answered[report.session_id] == {(span.start_sample, span.end_sample) for span in report.spans}
        assert finals_of(settings, report) == finals_of(settings, undisturbed[channel])
    # A timeout may be proposed on a slow machine; it acts only if the broker's append times agree.
    assert {each.reason for each in read(settings, topics.SESSIONS, Session) if each.state == "closed"} == {"hangup"}
    assert {each.gaps for each in read(settings, topics.SESSIONS, Session)} == {0}
