"""``asr gateway``, as it is called."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from streams.settings import Settings

TIMEOUT_S = 30


def asr_gateway(settings: Settings, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from ops.cli import main; main()", "gateway", *options],
        env={
            **os.environ,
            "ASR_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
            "ASR_NAMESPACE": settings.namespace,
            "PYTHONUNBUFFERED": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.broker
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_names_its_address_and_stops_cleanly(settings: Settings, publish: Any, party: Any, how: signal.Signals) -> None:
    publish(party().state())
    process = asr_gateway(settings, "--port", "0")
    try:
        assert process.stdout is not None
        assert re.match(r"Live captions on http://127\.0\.0\.1:\d+/", process.stdout.readline())
        process.send_signal(how)
        _, complaints = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert (process.returncode, complaints) == (0, "")


def test_a_taken_port_is_one_line_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = asr_gateway(Settings(), "--port", str(port))
        _, complaints = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert complaints == f"asr: Port {port} of 127.0.0.1 is taken. Choose another with --port or ASR_GATEWAY_PORT, or stop what uses it.\n"


def test_an_absent_cluster_is_told_of_and_waited_for() -> None:
    process = asr_gateway(Settings(bootstrap_servers="127.0.0.1:1"), "--port", "0")
    try:
        assert process.stderr is not None
        told = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "No Kafka at 127.0.0.1:1 answers" in told
    assert "asr broker" in told
    assert "The gateway waits." in told
