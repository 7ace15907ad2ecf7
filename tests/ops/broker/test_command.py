"""``asr broker`` as a process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streams.kafka import asked
from streams.settings import load_settings

_ASR = (sys.executable, "-c", "from ops.cli import main; main()")


@pytest.mark.broker
def test_broker_says_where_it_is_answers_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    command = [*_ASR, "broker", "--port", "0", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said: list[str] = []
        while not any("Ctrl-C stops it" in line for line in said):
            line = process.stderr.readline()
            assert line, "".join(said)
            said.append(line)
        found = re.search(r"is ready at (127\.0\.0\.1:\d+)", "".join(said))
        assert found is not None
        assert f"export ASR_BOOTSTRAP_SERVERS={found[1]}\n" in "".join(said)
        settings = load_settings(bootstrap_servers=found[1])
        assert len(asked(settings, "list brokers", lambda client: client.list_topics(timeout=5)).brokers) == 1
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "Traceback" not in rest


def test_mistake_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    result = subprocess.run([*_ASR, "broker", "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"asr: {tmp_path} holds something other")
    assert "Traceback" not in result.stderr
