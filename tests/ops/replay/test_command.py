"""``asr replay`` on a real broker: the same engine says the same, other settings do not, and live calls do not notice.

The engine is ``instant``: its finals are digests of all features that it was given, so one sample more or less would change them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from connectors.recorder.media import open_media
from connectors.recorder.recorder import Recorder, SessionReport
from ops.cli import app
from schemas.codec import default_codec
from schemas.records import Coverage, Session, WorkerStatus
from streams import topics
from streams.kafka import admin_client, end_offsets, partitions_of, read_to_end
from streams.settings import Settings
from streams.topic_admin import ensure_topics

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]

CALLS = Path(__file__).parents[3] / "ops" / "demo" / "calls"
CLIPS = ("jfk.flac", "order_s01_84e34eca.flac")
PATIENCE_S = 240.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {PATIENCE_S:.0f} s"
        time.sleep(0.1)


def read(settings: Settings, topic: topics.Topic) -> list[Any]:
    return [default_codec().decode(message.value()) for message in read_to_end(settings, [topic])]


@pytest.fixture(autouse=True)
def no_stepping_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in the process of the tests here, and would slow all that follow."""
    monkeypatch.setattr("ops.replay.command._NICENESS", 0)


@pytest.fixture
def environment(settings: Settings, tmp_path: Path) -> dict[str, str]:
    return {
        "ASR_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ASR_NAMESPACE": settings.namespace,
        "ASR_PARTITIONS": str(settings.partitions),
        "ASR_SNAPSHOT_MAX_BYTES": "32767",
        "ASR_ENGINE": "instant",
        "ASR_DATA_DIR": str(tmp_path),
    }


@pytest.fixture
def live(settings: Settings, environment: dict[str, str], tmp_path: Path) -> Iterator[Settings]:
    """A live system: all stages in one worker."""
    ensure_topics(settings)
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "faust", "-A", "streams", "worker", "-l", "info"],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: any(isinstance(each, WorkerStatus) and each.partitions for each in read(settings, topics.WORKERS)), "a worker's start"
        )
        yield settings
    finally:
        worker.kill()
        worker.wait()


def record(settings: Settings, *channels: str) -> list[SessionReport]:
    """Play a clip on each channel, and wait until it is all over."""
    with Recorder(settings, realtime=False) as recorder:
        playbacks = []
        for number, channel in enumerate(channels):
            (source,) = open_media(CALLS / CLIPS[number % len(CLIPS)])
            playbacks.append(recorder.play(source, channel))
        reports = [playback.result(PATIENCE_S) for playback in playbacks]
    wanted = {report.session_id for report in reports}
    wait_until(
        lambda: (
            wanted <= {each.session_id for each in read(settings, topics.SESSIONS) if isinstance(each, Session) and each.state == "closed"}
        ),
        "the end of the calls",
    )
    return reports


def replayed(environment: dict[str, str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(app, ["replay", *arguments, "--json", "-"], env=environment)
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.stdout), result.stderr


def test_the_same_engine_says_the_same_and_live_calls_do_not_notice(live: Settings, environment: dict[str, str]) -> None:
    reports = record(live, "1", "2", "3")
    before = sum(end_offsets(live, partitions_of(live, [topics.TRANSCRIPTS, topics.SPEECH, topics.FEATURES])).values())

    exit_code, same, shown = replayed(environment, "--channel", "1", "--channel", "2", "--same")
    assert exit_code == 0
    assert (same["calls"], same["identical"], same["differing_words"]) == (2, 2, 0)
    assert same["stored_words"] > 0
    assert {each["session_id"] for each in same["sessions"]} == {report.session_id for report in reports[:2]}
    assert "2 calls: 2 the same to the letter" in shown

    # Nothing of it went onto the live topics, and nothing of it is left.
    assert before == sum(end_offsets(live, partitions_of(live, [topics.TRANSCRIPTS, topics.SPEECH, topics.FEATURES])).values())
    assert not [
        name for name in admin_client(live).list_topics(timeout=10).topics if ".replay-" in name and name.startswith(live.namespace)
    ]

    exit_code, other, shown = replayed(environment, "--session", reports[0].session_id, "--set", "vad_max_segment_ms=1000", "--same")
    assert exit_code == 1
    assert (other["calls"], other["identical"]) == (1, 0)
    (call,) = other["sessions"]
    assert call["replayed_segments"] > call["stored_segments"]
    assert call["differing_words"] > 0
    assert "[-" in shown
    assert "{+" in shown

    # The live worker goes on as before.
    (report,) = record(live, "2")
    answered = [each for each in read(live, topics.COVERAGE) if isinstance(each, Coverage) and each.session_id == report.session_id]
    assert len(answered) == report.frames_sent


def test_what_is_meant_must_be_said_and_be_there(live: Settings, environment: dict[str, str]) -> None:
    for arguments, message in (
        ([], "Which calls are meant?"),
        (["--session", "nobody"], "None of the 0 calls"),
        (["--from", "yesterday"], "is no time"),
        (["--channel", "1", "--set", "colour=blue"], "names no setting"),
        (["--channel", "1", "--set", "vad_closing_ms=long"], "ASR_VAD_CLOSING_MS"),
    ):
        result = CliRunner().invoke(app, ["replay", *arguments], env=environment)
        assert result.exit_code == 2
        assert message in result.output
