"""``asr topics``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.cli import app
from streams.settings import Settings
from streams.topic_admin import delete_topics
from streams.topics import AUDIO, TOPICS

_KEYS = {"name", "key", "holds", "partitions", "cleanup", "retention_ms", "max_bytes", "config"}


def _environment(settings: Settings) -> dict[str, str]:
    return {
        "ASR_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ASR_NAMESPACE": settings.namespace,
        "ASR_PARTITIONS": str(settings.partitions),
    }


def test_explain_shows_every_topic_and_needs_no_kafka() -> None:
    result = CliRunner().invoke(app, ["topics", "explain"], env={"ASR_BOOTSTRAP_SERVERS": "127.0.0.1:1"})
    assert result.exit_code == 0
    assert all(topic.name in result.output for topic in TOPICS)
    assert "138 GB" in result.output


def test_explain_as_json_has_stable_keys(tmp_path: Path) -> None:
    file = tmp_path / "topics.json"
    result = CliRunner().invoke(app, ["topics", "explain", "--channels", "10", "--json", str(file)])
    assert result.exit_code == 0
    explained = json.loads(file.read_text())
    assert [set(topic) for topic in explained] == [_KEYS] * len(TOPICS)
    assert explained[0]["name"] == AUDIO.name
    assert explained[0]["max_bytes"] == 27_648_000_000


def test_json_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["topics", "explain", "--json", str(tmp_path / "none" / "file.json")])
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


@pytest.mark.broker
def test_create_then_verify_then_notice_what_is_missing(settings: Settings) -> None:
    env = _environment(settings)
    created = CliRunner().invoke(app, ["topics", "create", "--json", "-"], env=env)
    assert (created.exit_code, len(json.loads(created.stdout)["created"])) == (0, len(TOPICS))
    again = CliRunner().invoke(app, ["topics", "create"], env=env)
    assert "0 created, 12 existed" in again.stdout
    assert CliRunner().invoke(app, ["topics", "verify"], env=env).exit_code == 0

    delete_topics(settings, [AUDIO])
    verified = CliRunner().invoke(app, ["topics", "verify", "--json", "-"], env=env)
    assert verified.exit_code == 1
    assert json.loads(verified.stdout)["drift"] == [
        {"topic": AUDIO.full_name(settings), "what": "exists", "expected": "yes", "actual": "no", "breaking": True}
    ]
    shown = CliRunner().invoke(app, ["topics", "verify"], env=env)
    assert shown.exit_code == 1
    assert "exists" in shown.stdout


@pytest.mark.broker
def test_verify_shows_expected_and_actual_and_changes_nothing(settings: Settings) -> None:
    env = _environment(settings)
    assert CliRunner().invoke(app, ["topics", "create"], env=env).exit_code == 0
    other = env | {"ASR_PARTITIONS": "8"}
    for _ in range(2):
        drift = json.loads(CliRunner().invoke(app, ["topics", "verify", "--json", "-"], env=other).stdout)["drift"]
        assert {(entry["what"], entry["expected"], entry["actual"]) for entry in drift} == {("partitions", "8", "4")}
        assert len(drift) == sum(topic.per_channel for topic in TOPICS)
    refused = CliRunner().invoke(app, ["topics", "create"], env=other)
    assert refused.exit_code == 2
    assert "ASR_PARTITIONS" in refused.stderr


def test_no_broker_is_said_in_one_line_with_what_to_do() -> None:
    result = CliRunner().invoke(app, ["topics", "verify"], env={"ASR_BOOTSTRAP_SERVERS": "127.0.0.1:1"})
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "No Kafka at 127.0.0.1:1 answers" in line
    assert "`asr broker`" in line
