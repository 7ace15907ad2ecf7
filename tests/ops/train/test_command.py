"""The command line of the recipe: what a person can get wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.train import command
from ops.train.command import app
from streams.errors import UserError


def test_recordings_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no orders/transcripts\.tsv"):
        command.everything(tmp_path, tmp_path / "clips", tmp_path / "run", tmp_path / "model")
    assert not (tmp_path / "clips").exists()


def test_clips_come_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no prepared clips"):
        command.asr(tmp_path, tmp_path / "clips", tmp_path / "run")


def test_a_run_without_a_model_has_nothing_to_copy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model yet"):
        command.export(tmp_path / "model", tmp_path)
    assert not (tmp_path / "model").exists()


def test_a_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ops.train", "export", str(tmp_path / "model"), "--run-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        command.main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines() == [f"ops.train: {tmp_path} has no model yet. It has one after its first epoch."]


def test_the_second_runs_model_goes_with_both_histories(tmp_path: Path) -> None:
    run, second = tmp_path / "run", tmp_path / "run" / "numbers"
    for folder in (run, second):
        (folder / "best").mkdir(parents=True)
        for name in ("log.jsonl", "curves.png", "bpe.model", "lm.arpa", "best/final.pt"):
            (folder / name).write_text(f"{folder.name}'s {name}")
    command.export(tmp_path / "model", second)
    assert (tmp_path / "model" / "final.pt").read_text() == "numbers's best/final.pt"
    assert (tmp_path / "model" / "lm.arpa").read_text() == "numbers's lm.arpa"
    assert (tmp_path / "model" / "training" / "log.jsonl").read_text() == "numbers's log.jsonl"
    assert (tmp_path / "model" / "training" / "first-log.jsonl").read_text() == "run's log.jsonl"


def test_help_lists_the_one_command_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["--help"])
    told = capsys.readouterr().out
    assert 0 < told.index("all") < told.index("prepare")
    assert "more-numbers" in told
