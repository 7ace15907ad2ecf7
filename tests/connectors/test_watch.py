"""Transcripts in the terminal, as lines and as JSON; the command itself on a real Kafka."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from connectors.results import ConversationView, Results
from connectors.watch import Output, json_output, line_output, printable, terminal_output
from streams.errors import UserError
from streams.settings import Settings

TIMEOUT_S = 30


def show(output: Output, *records: Any) -> Results:
    results = Results()
    for record in records:
        change = results.apply(record, time.time_ns() // 1_000)
        if change is not None:
            output.change(change)
        output.tick()
    return results


def test_piped_each_final_is_a_line_and_nothing_else_is(party: Any) -> None:
    caller = party("7")
    out = io.StringIO()
    with line_output(out) as output:
        show(
            output,
            caller.state(),
            caller.partial(0, "hel"),
            caller.ended(0, "Hello."),
            caller.ended(0, "Hello!", "refined"),
            caller.ended(1, kind="cancelled"),
            caller.ended(2, ""),
            caller.ended(3, "Good\tbye.\n\x1b[2J"),
        )
    lines = out.getvalue().splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d\t", "", line) for line in lines] == ["7\tcustomer\tHello.", "7\tcustomer\tGood bye.  [2J"]


def test_where_the_start_is_not_known_times_count_from_it(party: Any) -> None:
    out = io.StringIO()
    with line_output(out) as output:
        show(output, party("7").ended(35, "Hello."))
    assert out.getvalue() == "+01:10\t7\t\tHello.\n"


def test_history_is_shown_in_the_order_said(party: Any) -> None:
    customer, agent = party("1"), party("2", name="agent")
    results = Results()
    for record in (customer.state(), agent.state(), customer.ended(0, "one"), customer.ended(2, "three"), agent.ended(1, "two")):
        results.apply(record, 0)
    out = io.StringIO()
    with line_output(out) as output:
        output.said(ConversationView("", tuple(results.sessions.values())).turns())
    assert [line.rpartition("\t")[2] for line in out.getvalue().splitlines()] == ["one", "two", "three"]


def test_in_a_terminal_finals_stay_and_open_texts_stand_below(party: Any) -> None:
    caller = party("7")
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, _environ={})
    with terminal_output(console) as output:
        show(output, caller.state(), caller.frame(0), caller.ended(0, "Hello [bold]there[/bold]."), caller.partial(1, "and good"))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert "7 customer" in shown
    assert "Hello [bold]there[/bold]." in shown, "texts are no markup"
    assert shown.index("Hello") < shown.index("and good") < shown.rindex("1 channel, latency P50")


@pytest.mark.parametrize("with_partials", [False, True])
def test_json_lines_have_the_documented_keys(party: Any, tmp_path: Path, with_partials: bool) -> None:
    caller = party("7")
    file = tmp_path / "out.jsonl"
    with json_output(file, with_partials=with_partials) as output:
        show(
            output,
            caller.state(),
            caller.partial(0, "hel"),
            caller.ended(0, "Hello there."),
            caller.ended(0, "Hello!", "refined"),
            caller.ended(1, kind="cancelled"),
        )
    objects = [json.loads(line) for line in file.read_text().splitlines()]
    owner = {"session_id": "call-1-7", "channel_id": "7", "conversation_id": "call-1", "party": "customer"}
    partial = {"type": "partial", **owner, "segment": 0, "start_ms": 0, "end_ms": 150, "text": "hel"}
    assert objects == [
        {"type": "session", **owner, "state": "open", "reason": "", "started_us": caller.started_us},
        *([partial] if with_partials else []),
        {
            "type": "final",
            **owner,
            "segment": 0,
            "start_ms": 0,
            "end_ms": 2_000,
            "text": "Hello there.",
            "confidence": 0.92,
            "language": "en",
            "words": [
                {"text": "Hello", "start_ms": 0, "end_ms": 90, "confidence": 0.92},
                {"text": "there.", "start_ms": 100, "end_ms": 190, "confidence": 0.92},
            ],
        },
        {**objects[-2], "type": "refined", "text": "Hello!"},
        {"type": "cancelled", **owner, "segment": 1, "start_ms": 2_000, "end_ms": 4_000, "text": ""},
    ]


def test_a_file_that_cannot_be_written_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"), json_output(tmp_path / "no" / "such", with_partials=False):
        pass


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\u202ec 你好") == "a ]0;title b c 你好"


# --- the command


def environment(settings: Settings) -> dict[str, str]:
    return {**os.environ, "ASR_BOOTSTRAP_SERVERS": settings.bootstrap_servers, "ASR_NAMESPACE": settings.namespace, "PYTHONUNBUFFERED": "1"}


def asr_watch(settings: Settings, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from ops.cli import main; main()", "watch", *options],
        env=environment(settings),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@contextmanager
def watching(settings: Settings, *options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "from ops.cli import main; main()", "watch", *options],
        env=environment(settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.broker
def test_from_start_shows_what_is_there_of_whom_one_asks_for(settings: Settings, publish: Any, party: Any) -> None:
    one, other = party("1"), party("2")
    publish(one.state(), other.state(), one.ended(0, "first"), other.ended(0, "not asked for"), one.ended(1, "second"))
    run = asr_watch(settings, "--from-start", "--no-follow", "--channel", "1")
    assert (run.returncode, run.stderr) == (0, "")
    assert [line.rpartition("\t")[2] for line in run.stdout.splitlines()] == ["first", "second"]
    run = asr_watch(settings, "--from-start", "--no-follow", "--session", other.session_id, "--json", "-")
    assert [json.loads(line)["text"] for line in run.stdout.splitlines()] == ["not asked for"]


@pytest.mark.broker
def test_it_follows_until_ctrl_c(settings: Settings, publish: Any, party: Any) -> None:
    caller = party()
    publish(caller.state(), caller.ended(0, "before"))
    with watching(settings, "--from-start") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().endswith("before\n")
        publish(caller.ended(1, "after"))
        assert process.stdout.readline().endswith("after\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr.read() == ""


@pytest.mark.broker
def test_a_reader_that_has_enough_ends_it_quietly(settings: Settings, publish: Any, party: Any) -> None:
    caller = party()
    publish(caller.state(), caller.ended(0, "before"))
    with watching(settings, "--from-start") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        publish(caller.ended(1, "nobody reads this"))
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr.read() == ""


def test_an_absent_cluster_is_one_line_and_exit_code_2() -> None:
    run = asr_watch(Settings(bootstrap_servers="127.0.0.1:1"))
    assert run.returncode == 2
    assert run.stderr.startswith("asr: No Kafka at 127.0.0.1:1 answers") and run.stderr.count("\n") == 1
