"""Hotwords pushed into calls that run, through a real worker with the engine conformer: ``asr hotwords push`` to the finals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Producer

from schemas import AudioFrame, FlowRecord, Record, Rejected, SessionStart, Stamps, Transcript, VersionChange, WorkerStatus, default_codec
from streams import topics
from streams.kafka import plain_consumer
from streams.settings import Settings
from streams.topic_admin import ensure_topics

pytestmark = [pytest.mark.broker, pytest.mark.timeout(1_800)]

DATA = Path(__file__).parents[1] / "data"
MODEL = DATA / "wenet" / "models" / "u2pp"
PATIENCE_S = 300.0
FRAME_SAMPLES = 3_200
SESSIONS = ("one", "two")


def environment(settings: Settings, folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "ASR_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ASR_NAMESPACE": settings.namespace,
        "ASR_PARTITIONS": str(settings.partitions),
        "ASR_SNAPSHOT_MAX_BYTES": "32767",
        "ASR_ENGINE": "conformer",
        "ASR_MODEL_DIR": str(MODEL),
        "ASR_VAD": "traditional",
        "ASR_ITN": "false",
        "ASR_SESSION_TIMEOUT_MS": "5000",
        "ASR_DATA_DIR": str(folder),
        "ASR_CACHE_DIR": str(folder / "cache"),
    }


@pytest.fixture
def worker(settings: Settings, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    running: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / f"worker-{len(running)}.log").open("wb") as log:
            command = [sys.executable, "-m", "faust", "-A", "streams", "worker", "-l", "warn"]
            running.append(subprocess.Popen(command, env=environment(settings, tmp_path), stdout=log, stderr=subprocess.STDOUT))
        return running[-1]

    yield start
    for each in running:
        each.kill()
        each.wait()


class Talk:
    """Two calls that say the same sentence, and everything that is said of them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
        self._consumer = plain_consumer(settings, [topics.AUDIO, topics.TRANSCRIPTS, topics.WORKERS, topics.REJECTED])
        self._ordinals = dict.fromkeys(SESSIONS, 0)
        self._position = 0
        self.records: list[Record] = []
        with wave.open(str(DATA / "zh" / "aishell1_BAC009S0724W0121.wav")) as file:
            sentence = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        self._sentence = np.concatenate([sentence, np.zeros(16_000 - len(sentence) % FRAME_SAMPLES, "<i2")])
        for session in SESSIONS:
            self._send(session, SessionStart, encoding="pcm_s16le", sample_rate_hz=16_000)

    def _send(self, session: str, kind: type[FlowRecord], **fields: Any) -> None:
        fields.setdefault("position_samples", self._position)
        ids = {"channel_id": session, "session_id": session, "conversation_id": "k", "ordinal": self._ordinals[session]}
        self._ordinals[session] += 1
        value = default_codec().encode(kind(**ids, stamps=Stamps(captured_us=time.time_ns() // 1_000), **fields))
        self._producer.produce(topics.AUDIO.full_name(self._settings), value, session.encode(), partition=SESSIONS.index(session))

    def say(self) -> None:
        for start in range(0, len(self._sentence), FRAME_SAMPLES):
            payload = self._sentence[start : start + FRAME_SAMPLES].tobytes()
            for session in SESSIONS:
                self._send(session, AudioFrame, encoding="pcm_s16le", sample_rate_hz=16_000, payload=payload)
            self._position += len(payload) // 2
        assert self._producer.flush(PATIENCE_S) == 0

    def of(self, kind: type[Record]) -> list[Any]:
        while (message := self._consumer.poll(0.05)) is not None:
            assert message.error() is None, message.error()
            self.records.append(default_codec().decode(message.value()))
        return [record for record in self.records if isinstance(record, kind)]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not happen within {PATIENCE_S:.0f} s"

    def finals(self, segment: int) -> list[Transcript]:
        """Return the finals of a segment, one of each session; the same one may lie there twice, but never another."""
        found = {
            (final.session_id, final.raw_text, final.hotword_version): final for final in self.of(Transcript) if final.segment == segment
        }
        return list(found.values())


def asr(settings: Settings, folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "from ops.cli import main; main()", *arguments, "--json", "-"]
    done = subprocess.run(command, env=environment(settings, folder), capture_output=True, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_push_reaches_calls_that_run(settings: Settings, worker: Callable[[], subprocess.Popen[bytes]], tmp_path: Path) -> None:
    ensure_topics(settings)
    first = worker()
    talk = Talk(settings)
    talk.until(lambda: any(status.state == "running" for status in talk.of(WorkerStatus)), "a worker's start")
    talk.say()
    talk.until(lambda: len(talk.finals(0)) == 2, "finals without hotwords")
    assert all(final.hotword_version == "" and "门会长" not in final.raw_text for final in talk.finals(0))

    listed = tmp_path / "orders.txt"
    listed.write_text("# what people ask for\n门会长\t9\n☎ number\n", encoding="utf-8")
    told = asr(settings, tmp_path, "hotwords", "push", str(listed), "--wait", str(PATIENCE_S))
    version = told["version"]
    assert (told["phrases"], told["workers"], told["using"]) == (2, 1, 1)
    assert "1 of 2 phrases cannot be used" in told["left_out"]
    assert asr(settings, tmp_path, "hotwords", "list")["version"] == version
    talk.until(lambda: len(talk.of(VersionChange)) == 2, "a change for each session")
    assert {(change.session_id, change.kind, change.version) for change in talk.of(VersionChange)} == {
        (session, "hotwords", version) for session in SESSIONS
    }
    talk.say()
    talk.until(lambda: len(talk.finals(1)) == 2, "finals with hotwords")
    assert all(final.hotword_version == version and "门会长" in final.raw_text for final in talk.finals(1))
    status = talk.of(WorkerStatus)[-1]
    assert (status.hotword_version, status.model_digest) == (version, talk.finals(1)[0].model_digest)
    assert len(talk.of(Rejected)) == 1

    first.send_signal(signal.SIGKILL)
    worker()
    talk.say()
    talk.until(lambda: len(talk.finals(2)) == 2, "finals of another worker")
    assert all(final.hotword_version == version and "门会长" in final.raw_text for final in talk.finals(2))
    asr(settings, tmp_path, "hotwords", "clear")
    talk.until(lambda: any(change.version == "" for change in talk.of(VersionChange)), "the list's end")
    talk.until(lambda: sum(change.version == "" for change in talk.of(VersionChange)) == 2, "its end for each session")
    talk.say()
    talk.until(lambda: len(talk.finals(3)) == 2, "finals without hotwords again")
    assert all(final.hotword_version == "" and final.raw_text == talk.finals(0)[0].raw_text for final in talk.finals(3))
    assert all(len(talk.finals(segment)) == 2 for segment in range(4)), "no final changed"
