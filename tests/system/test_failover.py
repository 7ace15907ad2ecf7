"""The whole pipeline, its processes stopped and killed in the middle of calls: every frame answered, every final as if nothing had been.

The engine is ``instant``: its finals are digests of all features that it was given, so one sample more or less would change them. What is
checked here is read raw from the topics, from offset 0, with every version of every final.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from connectors.recorder.media import FileSource, open_media
from connectors.recorder.recorder import Recorder, SessionReport
from schemas import Coverage, Record, Session, Transcript, WorkerStatus, default_codec
from streams import topics
from streams.groups import move_groups
from streams.kafka import plain_consumer
from streams.settings import Settings
from streams.topic_admin import ensure_topics
from streams.topics import Topic

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

CALLS = Path(__file__).parents[2] / "ops" / "demo" / "calls"
#: Speech of three voices, in several segments each.
CLIPS = ("librivox_sense_0870.flac", "jfk.flac", "order_s01_84e34eca.flac")
PATIENCE_S = 180.0
T = TypeVar("T", bound=Record)
Canonical = tuple[int, int, int, str, str, tuple[object, ...], str]


class Workers:
    """``faust -A streams worker`` processes, as an operator starts them."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, stage: str = "") -> subprocess.Popen[bytes]:
        name = f"{stage or 'all'}-{len(self._running)}"
        environment = {
            **os.environ,
            "ASR_BOOTSTRAP_SERVERS": self._settings.bootstrap_servers,
            "ASR_NAMESPACE": self._settings.namespace,
            "ASR_PARTITIONS": str(self._settings.partitions),
            "ASR_SNAPSHOT_MAX_BYTES": "32767",
            "ASR_ENGINE": "instant",
            "ASR_STAGE": stage,
            "ASR_WORKER_ID": name,
            "ASR_DATA_DIR": str(self._folder),
        }
        with (self._folder / f"{name}.log").open("wb") as log:
            # From another folder than the project's: it is installed.
            worker = subprocess.Popen(
                [sys.executable, "-m", "faust", "-A", "streams", "worker", "-l", "info"],
                cwd=self._folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._running.append(worker)
        wait_until(lambda: self._is_ready(name), f"the start of {name}")
        return worker

    def _is_ready(self, name: str) -> bool:
        statuses = read(self._settings, topics.WORKERS, WorkerStatus)
        return any(status.worker_id == name and status.state == "running" and status.partitions for status in statuses)

    def stop(self) -> None:
        for worker in self._running:
            if worker.poll() is None:
                worker.kill()
            worker.wait()


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[Workers]:
    ensure_topics(settings)
    started = Workers(settings, tmp_path)
    yield started
    started.stop()


class Played(NamedTuple):
    """What came of a few calls."""

    reports: list[SessionReport]
    finals: dict[str, list[Canonical]]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {PATIENCE_S:.0f} s"
        time.sleep(0.1)


def read(settings: Settings, topic: Topic, kind: type[T]) -> list[T]:
    """Return everything that is on a topic now, raw, from offset 0."""
    consumer = plain_consumer(settings, [topic], config={"enable.partition.eof": True})
    records, left = [], topic.partition_count(settings)
    while left:
        message = consumer.poll(1.0)
        if message is None:
            continue
        if message.error():
            left -= 1
            continue
        record = default_codec().decode(message.value())
        if isinstance(record, kind):
            records.append(record)
    consumer.close()
    return records


def play(settings: Settings, disturb: Callable[[], None] = lambda: None) -> Played:
    """Play all clips at once as live calls; do something in the middle; return what was sent and what came of it."""
    with Recorder(settings) as recorder:
        playbacks = [recorder.play(source_of(clip), str(number)) for number, clip in enumerate(CLIPS)]
        time.sleep(2.5)
        disturb()
        reports = [playback.result(PATIENCE_S) for playback in playbacks]
    sessions = {report.session_id for report in reports}

    def closed() -> set[str]:
        return {each.session_id for each in read(settings, topics.SESSIONS, Session) if each.state == "closed"}

    wait_until(lambda: sessions <= closed(), "the end of all sessions")
    return Played(reports, {report.channel_id: finals_of(settings, report.session_id) for report in reports})


def source_of(clip: str) -> FileSource:
    (source,) = open_media(CALLS / clip)
    return source


def finals_of(settings: Settings, session_id: str) -> list[Canonical]:
    """Return the canonical part of each final of a session; no final may have been written in two versions."""
    versions: dict[int, set[Canonical]] = defaultdict(set)
    for each in read(settings, topics.TRANSCRIPTS, Transcript):
        if each.session_id == session_id and each.kind == "final":
            words = tuple((word.text, word.start_ms, word.end_ms) for word in each.words)
            canonical = (each.segment, each.position_samples, each.end_sample, each.text, each.raw_text, words, each.model_digest)
            versions[each.segment].add(canonical)
    assert all(len(written) == 1 for written in versions.values()), "a final was written in two versions"
    return [next(iter(versions[segment])) for segment in sorted(versions)]


def check_every_frame_answered(settings: Settings, played: Played) -> None:
    answered: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for each in read(settings, topics.COVERAGE, Coverage):
        answered[each.session_id].add((each.position_samples, each.end_sample))
    for report in played.reports:
        sent = {(span.start_sample, span.end_sample) for span in report.spans}
        assert report.frames_lost == 0
        assert answered[report.session_id] == sent
    (gaps,) = {each.gaps for each in read(settings, topics.SESSIONS, Session) if each.state == "closed"}
    assert gaps == 0, "audio was replaced by silence, though the recorder lost none"


def test_killed_and_restarted_workers_change_nothing(settings: Settings, workers: Workers) -> None:
    """All stages in one worker: undisturbed; then killed while another takes over; then stopped in order and started again."""
    first = workers.start()
    undisturbed = play(settings)
    assert all(len(finals) >= 1 for finals in undisturbed.finals.values())
    check_every_frame_answered(settings, undisturbed)

    second = workers.start()
    killed = play(settings, first.kill)
    check_every_frame_answered(settings, killed)
    assert killed.finals == undisturbed.finals

    def restart() -> None:
        second.terminate()
        assert second.wait(PATIENCE_S) == 0
        workers.start()

    restarted = play(settings, restart)
    check_every_frame_answered(settings, restarted)
    assert restarted.finals == undisturbed.finals


def test_a_killed_stage_is_replaced_and_nothing_is_lost(settings: Settings, workers: Workers) -> None:
    """A process for each stage, each killed with SIGKILL in the middle of calls and started again."""
    stages = {stage: workers.start(stage) for stage in ("vad", "features", "inference")}
    undisturbed = play(settings)

    def kill_each_in_turn() -> None:
        for stage, worker in stages.items():
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            stages[stage] = workers.start(stage)

    disturbed = play(settings, kill_each_in_turn)
    check_every_frame_answered(settings, disturbed)
    assert disturbed.finals == undisturbed.finals


def test_calls_move_from_one_worker_to_one_for_each_stage_and_back_while_they_are_live(settings: Settings, workers: Workers) -> None:
    """All stages in one process, then a process for each, then one again, each time in the middle of calls."""
    everything = [workers.start()]
    undisturbed = play(settings)

    def to_stages() -> None:
        move_groups(settings, "stages")
        everything.extend(workers.start(stage) for stage in ("vad", "features", "inference"))
        everything[0].terminate()
        assert everything[0].wait(PATIENCE_S) == 0

    def back() -> None:
        move_groups(settings, "all")
        workers.start()
        for stage in everything[1:]:
            stage.terminate()
        assert [stage.wait(PATIENCE_S) for stage in everything[1:]] == [0, 0, 0]

    for change in (to_stages, back):
        moving = play(settings, change)
        check_every_frame_answered(settings, moving)
        assert moving.finals == undisturbed.finals
