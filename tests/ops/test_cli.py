"""The command line as a person meets it."""

from __future__ import annotations

import importlib
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ops import cli
from streams.errors import UserError

_HEAVY = ("torch", "faust", "av", "faster_whisper", "onnxruntime", "scipy", "pydantic", "confluent_kafka")


def _asr(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from ops.cli import main; main()", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Lets a test add commands of its own, in modules that it writes to ``tmp_path``."""
    monkeypatch.syspath_prepend(tmp_path)
    return monkeypatch


def _add(command: pytest.MonkeyPatch, name: str, target: str) -> None:
    command.setitem(cli.COMMANDS, name, cli.Command(target, "A test.", "Tests"))


def test_help_lists_every_command_without_its_libraries() -> None:
    probe = (
        "import sys\n"
        "from ops.cli import app\n"
        "try:\n"
        "    app(['--help'])\n"
        "except SystemExit as end:\n"
        f"    print('loaded:', [name for name in {_HEAVY!r} if name in sys.modules], 'exit', end.code)\n"
    )
    shown = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.rstrip().endswith("loaded: [] exit 0")
    assert all(f" {name} " in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_exists_and_teaches(name: str) -> None:
    module, _, attribute = cli.COMMANDS[name].target.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    assert isinstance(target, typer.Typer) or target.__doc__
    shown = CliRunner().invoke(cli.app, [name, "--help"])
    assert shown.exit_code == 0
    assert f"asr {name}" in shown.output or f" {name} " in shown.output


def test_unknown_command_is_named_and_a_similar_one_suggested() -> None:
    result = _asr("brokr")
    assert result.returncode == 2
    assert "'broker'" in result.stderr
    assert "Traceback" not in result.stderr


def test_version_is_the_distribution_s() -> None:
    assert _asr("--version").stdout.startswith("asr-streams ")


def test_command_of_a_missing_module_fails_alone(command: pytest.MonkeyPatch) -> None:
    _add(command, "ghost", "ops.no_such_module:run")
    result = CliRunner().invoke(cli.app, ["ghost"])
    assert result.exit_code == 2
    assert "'ghost' is not part of this installation (ops.no_such_module is missing)" in result.output
    assert CliRunner().invoke(cli.app, ["topics", "explain"]).exit_code == 0


def test_command_without_its_library_names_it(command: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needs_library.py").write_text("import no_such_library\n")
    _add(command, "needy", "needs_library:run")
    result = CliRunner().invoke(cli.app, ["needy"])
    assert result.exit_code == 2
    assert "'no_such_library', which is not installed" in result.output


def test_mistake_is_one_line_and_exit_code_2(command: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mistaken.py").write_text(
        "from streams.errors import UserError\n"
        "def run() -> None:\n"
        "    'Fail.'\n"
        "    raise UserError('There is no file [a].wav, and ' + 'so on ' * 40, 'Name another.')\n"
    )
    _add(command, "mistaken", "mistaken:run")
    result = CliRunner().invoke(cli.app, ["mistaken"])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("asr: There is no file [a].wav, and so on")
    assert line.endswith(". Name another.")


def test_wrong_setting_names_its_variable() -> None:
    result = CliRunner().invoke(cli.app, ["topics", "explain"], env={"ASR_PARTITIONS": "many"})
    assert result.exit_code == 2
    assert "ASR_PARTITIONS" in result.stderr
    assert "'many'" in result.stderr


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_a_command_cleanly(number: signal.Signals, exit_code: int, tmp_path: Path) -> None:
    (tmp_path / "patient.py").write_text(
        "import time\n"
        "def run() -> None:\n"
        "    'Wait.'\n"
        "    try:\n"
        "        print('waiting', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('cleaned up', flush=True)\n"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from ops import cli\n"
        "cli.COMMANDS['patient'] = cli.Command('patient:run', 'Wait.', 'Tests')\n"
        "cli.main()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, "patient"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        rest, errors = process.communicate(timeout=30)
    assert process.returncode == exit_code
    assert rest == "cleaned up\n"
    assert "Traceback" not in errors


@pytest.mark.parametrize(("flags", "level"), [([], logging.WARNING), (["-v"], logging.INFO), (["-vv"], logging.DEBUG)])
def test_verbosity_sets_the_log_level(flags: list[str], level: int) -> None:
    root = logging.getLogger()
    before, handlers = root.level, root.handlers[:]
    try:
        CliRunner().invoke(cli.app, [*flags, "topics", "explain"])
        assert root.level == level
    finally:
        root.handlers[:] = handlers
        root.setLevel(before)


def test_user_error_says_cause_and_remedy() -> None:
    assert str(UserError("It is broken", "Mend it.")) == "It is broken. Mend it."
    assert str(UserError("It is broken")) == "It is broken"
