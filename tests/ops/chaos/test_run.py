"""A short run of chaos, as ``asr chaos`` makes it: nothing is lost, nothing is changed. Its times are told, not asserted."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.chaos.plan import Strike
from ops.chaos.report import as_json, draw
from ops.chaos.run import Chaos, Options
from ops.cli import app
from streams.settings import load_settings

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

CHANNELS = 4
PLAN = (
    Strike(kind="kill", kills=1, roles=("vad",), moment="segment"),
    Strike(kind="freeze", kills=1, roles=("inference",), number=1, freeze_s=3.0),
    Strike(kind="pair", kills=2, roles=("features", "inference"), restart_s=1.0),
    Strike(kind="recorder", kills=1, number=1),
)


def test_killed_processes_cost_nothing(bootstrap_servers: str, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    overrides = {
        "bootstrap_servers": bootstrap_servers,
        "namespace": f"test-{uuid.uuid4().hex[:8]}",
        # Two channels share one, and so a snapshot.
        "partitions": CHANNELS - 1,
        "engine": "instant",
        "snapshot_max_bytes": 32_767,
        # The calls of a killed recorder are closed after it.
        "session_lost_ms": 8_000,
    }
    options = Options(channels=CHANNELS, plan=PLAN, seed=1, call_s=10.0, gateway=False)
    outcome = Chaos(load_settings(), overrides, tmp_path / "run", options).run()
    result = as_json(outcome, {"channels": CHANNELS})
    for name in ("takeover_ms", "stall_ms", "seconds"):
        record_property(name, result[name])
    print(json.dumps({key: value for key, value in result.items() if key not in ("growth", "arguments")}, indent=1))  # noqa: T201 shown on failure

    assert result["kills"] == 5
    assert outcome.verdict.findings == []
    assert outcome.verdict.faults == {}
    assert outcome.deaths == []
    assert (result["frames_lost"], result["finals_changed"], result["gaps_filled"]) == (0, 0, 0)
    assert outcome.verdict.finals > 0
    assert {channel for channel, answers in outcome.answers.items() if len(answers.captured_us)} == {
        str(1 + number) for number in range(CHANNELS)
    }
    assert [mark["what"] for mark in result["marks"]] == ["kill", "stop", "continue", "kill", "kill", "kill"]
    # Both of a stage's workers own something, so each strike has victims.
    assert all(mark["partitions"] for mark in result["marks"] if mark["what"] in ("kill", "stop"))
    draw(outcome, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size


def test_nothing_is_started_for_a_wrong_wish() -> None:
    told = CliRunner().invoke(app, ["chaos", "--targets", "brokers"])
    assert told.exit_code == 2
    assert "nothing called 'brokers' to strike" in told.output
    assert CliRunner().invoke(app, ["chaos", "--targets", "planned"]).exit_code == 2
