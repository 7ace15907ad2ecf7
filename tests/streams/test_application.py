"""The Faust app: which agents a worker has, and what happens if one cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streams import application
from streams.application import create_app
from streams.settings import Settings, load_settings


@pytest.mark.parametrize(
    ("stage", "agents", "group"),
    [
        ("", {"vad", "features", "inference"}, "asr"),
        ("vad", {"vad"}, "asr.vad"),
        ("features", {"features"}, "asr.features"),
        ("inference", {"inference"}, "asr.inference"),
    ],
)
async def test_a_worker_has_exactly_the_agents_of_its_stages(stage: str, agents: set[str], group: str, tmp_path: Path) -> None:
    app = create_app(load_settings(stage=stage, data_dir=tmp_path))
    app.finalize()
    assert set(app.agents) == agents
    assert app.conf.id == group
    assert not app.conf.table_standby_replicas


async def test_topics_of_the_audio_path_are_not_acknowledged_by_faust(tmp_path: Path) -> None:
    app = create_app(load_settings(data_dir=tmp_path))
    app.finalize()
    assert all(not agent.channel.acks for agent in app.agents.values())


async def test_a_broken_agent_module_stops_the_worker_with_its_real_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_agent.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(application._AGENT_MODULES, "features", "broken_agent")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        create_app(load_settings(data_dir=tmp_path))


def test_faust_finds_the_app_from_another_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "faust", "-A", "streams", "agents"]
    found = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "ASR_DATA_DIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert all(f"@{agent}" in found.stdout for agent in ("vad", "features", "inference"))


def test_a_wrong_setting_is_named_without_a_traceback_of_ours(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "faust", "-A", "streams", "worker"]
    refused = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "ASR_PARTITIONS": "0"}, capture_output=True, text=True, check=False, timeout=60
    )
    assert refused.returncode != 0
    assert "ASR_PARTITIONS" in refused.stderr


def test_importing_streams_reads_no_environment_and_builds_nothing() -> None:
    check = "import streams, sys; assert 'faust' not in sys.modules and 'streams.application' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, env={**os.environ, "ASR_PARTITIONS": "nonsense"})


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().partitions = 3  # type: ignore[misc]
    assert isinstance(load_settings(), Settings)


async def test_only_the_first_stage_lets_frames_gather_the_longer_the_more_calls_there_are(tmp_path: Path) -> None:
    first = create_app(load_settings(stage="vad", data_dir=tmp_path))
    later = create_app(load_settings(stage="features", data_dir=tmp_path))
    together = create_app(load_settings(data_dir=tmp_path))
    intervals_s = []
    for sessions in (0, 8, 30, 50, 500):
        for app in (first, later, together):
            app._sessions_lately = sessions
        intervals_s.append(first.fetch_interval_s())
        assert later.fetch_interval_s() == together.fetch_interval_s() == application._FETCH_INTERVAL_S
    assert intervals_s == [0.01, 0.01, 0.03, 0.04, 0.04]
