"""``asr soak`` with a handful of calls: the whole way, embedded broker and all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.cli import app


@pytest.mark.broker
@pytest.mark.timeout(900)
def test_a_few_calls_come_through_whole_and_the_same(tmp_path: Path) -> None:
    arguments = ["soak", "--calls", "20", "--lines", "2", "--speed", "2", "--output-dir", str(tmp_path / "report"), "--json", "-"]
    result = CliRunner().invoke(app, arguments, env={"ASR_DATA_DIR": str(tmp_path / "data")})
    assert result.exit_code in (0, 1), result.output  # so few calls may look like growth
    report = json.loads(result.stdout)
    assert report["tally"]["failures"] == {}
    assert (report["calls"], report["frames_lost"], report["finals_different"]) == (20, 0, 0)
    assert report["tally"]["frames_answered"] == report["tally"]["frames_sent"] == 20 * 8
    assert report["tally"]["finals"] >= 20
    assert report["tally"]["hotwords_pushed"] >= 1
    last = report["samples"][-1]
    assert last["calls"] == 20
    assert {"broker", "gateway", "recorder", "vad worker", "features worker", "inference worker", "engine"} <= set(last["processes"])
    assert all(held["rss_bytes"] > 0 and held["threads"] > 0 and held["handles"] > 0 for held in last["processes"].values())
    assert {"audio", "sessions", "transcripts", "coverage"} <= set(last["topic_bytes"])
    assert json.loads((tmp_path / "report" / "soak.json").read_text()) == report
    assert (tmp_path / "report" / "soak.png").exists()
