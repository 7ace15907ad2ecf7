"""``asr retention`` on a real broker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import Producer
from typer.testing import CliRunner

from ops.cli import app
from schemas import Session, Transcript, default_codec
from streams.kafka import idempotent_producer_config, read_to_end
from streams.settings import Settings
from streams.stage import record_key
from streams.topic_admin import ensure_topics
from streams.topics import LOG, SESSIONS, TRANSCRIPTS

pytestmark = pytest.mark.broker


@pytest.fixture
def environment(settings: Settings) -> dict[str, str]:
    """Two calls that are over."""
    ensure_topics(settings, (SESSIONS, TRANSCRIPTS, LOG))
    producer = Producer(idempotent_producer_config(settings))
    for session_id in ("first", "second"):
        names: dict[str, Any] = {"channel_id": "1", "session_id": session_id, "conversation_id": "c", "position_samples": 0}
        final = Transcript(
            **names, segment=0, kind="final", end_sample=1, text="said", raw_text="said", confidence=1.0, covered_to_sample=1
        )
        counts = dict.fromkeys(
            ("covered_to_sample", "decoded_to_sample", "segments", "finals", "cancelled", "words", "gaps", "gap_samples"), 0
        )
        closed = Session(**names, state="closed", started_us=1, **counts)
        for topic, record in ((TRANSCRIPTS, final), (SESSIONS, closed)):
            producer.produce(topic.full_name(settings), default_codec().encode(record), record_key(record).encode(), 1)
    assert producer.flush(30) == 0
    return {
        "ASR_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ASR_NAMESPACE": settings.namespace,
        "ASR_PARTITIONS": str(settings.partitions),
    }


def run(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["retention", *arguments, "--json", "-"], env=environment)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_it_looks_erases_and_sweeps(settings: Settings, environment: dict[str, str]) -> None:
    assert run(environment) == {"kept": 2, "left": 0, "tombstones": 0, "written": False}
    assert run(environment, "--erase", "first") == {"kept": 1, "left": 1, "tombstones": 2, "written": True}
    newest = {bytes(message.key() or b""): message.value() for message in read_to_end(settings, [TRANSCRIPTS])}
    assert {key for key, value in newest.items() if value is not None} == {b"second:0"}
    assert run(environment, "--sweep")["kept"] == 1

    again = CliRunner().invoke(app, ["retention", "--erase", "first"], env=environment)
    assert again.exit_code == 2
    assert "1 of 1 sessions are not stored" in again.output
    shown = CliRunner().invoke(app, ["retention"], env=environment)
    assert "kept for 30 days" in shown.output
    assert "Calls: 1 stay, 0 are due to leave" in shown.output
