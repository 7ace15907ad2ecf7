"""``asr record`` as people and programs call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from connectors.recorder.command import _channel_ids, _parties
from connectors.recorder.media import open_media
from ops.cli import app
from schemas.codec import default_codec
from schemas.records import AudioFrame, FlowRecord, SessionEnd, SessionStart
from streams.errors import UserError
from streams.kafka import end_offsets, partitions_of, plain_consumer
from streams.settings import Settings
from streams.topic_admin import create_topics
from streams.topics import AUDIO

CODES = bytes(range(256)) * 50


@pytest.fixture
def environment(settings: Settings) -> dict[str, str]:
    create_topics(settings, [AUDIO])
    return {
        "ASR_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ASR_NAMESPACE": settings.namespace,
        "ASR_PARTITIONS": str(settings.partitions),
    }


def read_back(settings: Settings) -> dict[str, list[FlowRecord]]:
    """Return all records on the topic by session, in order."""
    left = sum(end_offsets(settings, partitions_of(settings, [AUDIO])).values())
    found: dict[str, list[FlowRecord]] = {}
    consumer = plain_consumer(settings, [AUDIO])
    for _ in range(1_000):
        message = consumer.poll(0.1) if left else None
        if message is not None:
            record = default_codec().decode(message.value())
            assert isinstance(record, FlowRecord)
            found.setdefault(record.session_id, []).append(record)
            left -= 1
    consumer.close()
    assert left == 0
    return found


def stereo_call(audio) -> Path:
    return audio.mulaw("call.wav", np.frombuffer(CODES + CODES[::-1], np.uint8).reshape(2, -1).T.tobytes(), channels=2)


@pytest.mark.broker
def test_a_stereo_call_and_a_second_file(settings: Settings, environment: dict[str, str], audio) -> None:
    call, other = stereo_call(audio), audio.wav("other.wav", audio.tone(0.5, 8_000).tobytes(), rate_hz=8_000)
    summary_file = audio.folder / "summary.json"
    result = CliRunner().invoke(
        app,
        ["record", str(call), str(other), "--fast", "--channel", "41", "--party", "agent", "--language", "en", "--json", str(summary_file)],
        env=environment,
    )
    assert result.exit_code == 0, result.output
    assert "channel 41: call.wav (left), G.711 mu-law 8 kHz" in result.output
    assert "channel 43: other.wav, PCM16 16 kHz" in result.output

    summary = json.loads(summary_file.read_text())
    assert (summary["channels"], summary["frames_sent"], summary["frames_delivered"], summary["frames_lost"]) == (3, 19, 19, 0)
    assert summary["audio_ms"] == 1_600 + 1_600 + 500
    assert set(summary["frame_lateness_ms"]) == {"p50", "p95", "p99", "max"}
    left, right, alone = summary["sessions"]
    assert [session["channel_id"] for session in summary["sessions"]] == ["41", "42", "43"]
    assert [session["partition"] for session in summary["sessions"]] == [41 % 4, 42 % 4, 43 % 4]
    assert left["conversation_id"] == right["conversation_id"] != alone["conversation_id"]
    assert left["started_us"] == right["started_us"]

    found = read_back(settings)
    assert b"".join(record.payload for record in found[left["session_id"]] if isinstance(record, AudioFrame)) == CODES
    assert b"".join(record.payload for record in found[right["session_id"]] if isinstance(record, AudioFrame)) == CODES[::-1]
    start = found[alone["session_id"]][0]
    assert isinstance(start, SessionStart)
    assert (start.party, start.language, start.source) == ("agent", "en", "other.wav")


@pytest.mark.broker
def test_the_summary_can_be_piped(environment: dict[str, str], audio) -> None:
    result = CliRunner().invoke(app, ["record", str(stereo_call(audio)), "--fast", "--json", "-"], env=environment)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["frames_lost"] == 0
    assert "Channels: 2. Frames: 16 sent, 16 delivered, 0 lost." in result.stderr


@pytest.mark.broker
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_hangs_up(settings: Settings, environment: dict[str, str], audio, number: signal.Signals, exit_code: int) -> None:
    arguments = ["record", str(audio.mulaw("call.wav", CODES)), "--loop", "--frame-ms", "20"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from ops.cli import main; main()", *arguments],
        env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("channel 1: call.wav, G.711 mu-law 8 kHz, session ")
    partitions = partitions_of(settings, [AUDIO])
    while sum(end_offsets(settings, partitions).values()) < 3:  # it began, and some frames are there
        assert process.poll() is None
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == exit_code, output
    assert "Traceback" not in output

    (records,) = read_back(settings).values()
    assert isinstance(records[0], SessionStart)
    assert isinstance(records[-1], SessionEnd)
    assert records[-1].reason == "hangup"
    assert [record.ordinal for record in records] == list(range(len(records)))


def test_every_bad_file_gets_its_reason_and_nothing_is_sent(audio) -> None:
    files = [audio.raw("empty.wav", b""), audio.mulaw("good.wav", CODES), audio.raw("text.wav", b"hello"), audio.folder / "none.wav"]
    result = CliRunner().invoke(app, ["record", *map(str, files)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"asr: {files[0]}: is empty",
        f"{files[2]}: has no WAV header, nor that of any other kind of audio",
        f"{files[3]}: no such file or directory",
    ]


def test_a_summary_that_cannot_be_written_is_a_mistake_of_one_line(environment: dict[str, str], audio) -> None:
    arguments = ["record", str(stereo_call(audio)), "--fast", "--json", str(audio.folder / "none" / "a.json")]
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [["--frame-ms", "19"], ["--frame-ms", "501"], ["--direction", "up"], ["--partition", "-1"], []])
def test_wrong_options_are_refused(audio, arguments: list[str]) -> None:
    files = [str(audio.mulaw("a.wav", CODES))] if arguments else []
    assert CliRunner().invoke(app, ["record", *arguments, *files]).exit_code == 2


def test_channels_count_up() -> None:
    assert list(_channel_ids("7", 3)) == ["7", "8", "9"]
    assert list(_channel_ids("desk", 3)) == ["desk", "desk.2", "desk.3"]


def test_parties_are_for_all_channels_or_for_each(audio) -> None:
    mono, stereo = open_media(audio.mulaw("a.wav", CODES)), open_media(stereo_call(audio))
    assert _parties([mono, stereo], []) == [[""], ["", ""]]
    assert _parties([mono, stereo], ["agent"]) == [["agent"], ["agent", "agent"]]
    assert _parties([stereo], ["agent", "customer"]) == [["agent", "customer"]]
    with pytest.raises(UserError, match=r"has 1 channel, but there are 2 parties"):
        _parties([mono], ["agent", "customer"])
