"""The demo as it is called, on a real Kafka with its own workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from ops.cli import app
from streams.settings import Settings

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]

#: Cold workers on a busy machine.
PATIENCE_S = 150


def start(settings: Settings, *arguments: str) -> subprocess.Popen[str]:
    env = {
        "ASR_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ASR_NAMESPACE": settings.namespace,
        "ASR_PARTITIONS": str(settings.partitions),
        "ASR_DATA_DIR": str(settings.data_dir),
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", "from ops.cli import main; main()", "demo", *arguments],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )


def ours(settings: Settings) -> list[psutil.Process]:
    """Return the processes that a demo with these settings started, by the folder that they work in."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("ASR_DATA_DIR", "").startswith(str(settings.data_dir)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"ended without saying {text!r}: {lines} {process.stderr and process.stderr.read()}")


def test_a_bounded_run_answers_every_frame(settings: Settings) -> None:
    with start(settings, "--seconds", "8", "--channels", "3", "--seed", "1", "--headless", "--json", "-") as process:
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    report = json.loads(output)
    assert (report["channels"], report["sessions"], report["frames_sent"]) == (3, 3, 120)
    assert (report["frames_answered"], report["frames_lost"], report["frames_duplicated"]) == (120, 0, 0)
    assert report["sessions_closed"] == 3
    assert report["words_timed"] > 0
    assert report["wer"] < 0.5
    assert report["engine"] == "conformer"
    assert report["frame_latency_ms"]["p50"] > 0
    assert "lost 0" in errors
    assert ours(settings) == []
    assert list((settings.data_dir / "runs").iterdir()) == [], "logs of a run that went well are not kept"


def test_ctrl_c_hangs_up_and_sums_up(settings: Settings) -> None:
    with start(settings, "--channels", "2", "--engine", "instant", "--port", "0") as process:
        title = read_until(process, "live page")[-1]
        page = title.rpartition("live page: ")[2].strip()
        with urllib.request.urlopen(page, timeout=10) as answer:  # noqa: S310 - our own page
            assert answer.status == 200
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Hanging up" in output
    assert ", lost 0, duplicated 0" in output
    assert ours(settings) == []


def test_a_worker_that_dies_is_named(settings: Settings) -> None:
    with start(settings, "--channels", "1", "--engine", "instant", "--headless") as process:
        read_until(process, "Playing")
        worker = next(each for each in ours(settings) if each.environ().get("ASR_STAGE") == "features" and each.name().startswith("python"))
        worker.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "The features worker was ended by SIGKILL" in errors
    assert "Traceback" not in errors
    assert ours(settings) == []
    assert list((settings.data_dir / "runs").iterdir()), "the logs are wanted"


def test_a_killed_demo_leaves_nobody_behind(settings: Settings) -> None:
    with start(settings, "--channels", "1", "--engine", "instant", "--headless") as process:
        read_until(process, "Playing")
        assert ours(settings)
        process.kill()
    wait_for(lambda: ours(settings) == [], 10)


def test_a_wrong_engine_is_told_at_once(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--engine", "nonsense"], env={"ASR_DATA_DIR": str(tmp_path)})
    assert result.exit_code != 0
    assert "ENGINE" in str(result.exception) + result.output
