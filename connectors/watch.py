"""``asr watch``: follow transcripts in the terminal, as lines, or as JSON.

With ``--json`` each line is an object. ``type`` is ``final``, ``refined``, ``cancelled``, ``session`` or, with ``--partials``, ``partial``;
all have ``session_id``, ``channel_id``, ``conversation_id`` and ``party``. Sessions have ``state``, ``reason``, ``started_us``; the others
have ``segment``, ``start_ms`` and ``end_ms`` (from the session's start) and ``text``; finals and refined ones ``confidence``, ``language``
and ``words`` too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TextIO

import typer

from streams.errors import UserError
from streams.output import JsonOption

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from connectors.results import Change, Received, SessionView, Turn

__all__ = ["Output", "json_output", "line_output", "printable", "terminal_output", "watch"]

#: An open segment lasts 20 s at most: what is older than this tells nothing about now.
_RECENT_MS: Final = 60_000
#: Who speaks is said when a session starts; calls are shorter than this.
_SESSION_MS: Final = 24 * 3_600_000
#: Sessions are forgotten when nothing was read of them for so long: repeats of what a takeover writes again come sooner.
_CLOSED_KNOWN_US: Final = 10 * 60 * 1_000_000
_OPEN_KNOWN_US: Final = _SESSION_MS * 1_000
_REDRAW_S: Final = 0.2
#: Columns of a terminal, so that texts stand below each other: 12:34:56, and a channel with its party.
_CLOCK_CELLS: Final = 8
_WHO_CELLS: Final = 14
_MEDIAN: Final = 0.5
_MOST: Final = 0.95


class Output(Protocol):
    """Where transcripts go."""

    def said(self, turns: Sequence[Turn]) -> None:
        """Show finals that were there before, in the order said."""

    def change(self, change: Change) -> None:
        """Show what changed."""

    def tick(self) -> None:
        """Do what only depends on the time."""


def watch(
    channel: Annotated[list[str] | None, typer.Option(help="Follow this channel only; may be repeated.", show_default=False)] = None,
    session: Annotated[list[str] | None, typer.Option(help="Follow this session only; may be repeated.", show_default=False)] = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="First show every final that Kafka holds, in the order said.")] = False,
    no_follow: Annotated[bool, typer.Option("--no-follow", help="Stop once all that is there has been shown.")] = False,
    partials: Annotated[bool, typer.Option("--partials", help="With --json: also the texts of open segments.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Follow transcripts.

    In a terminal, open segments are shown dim at the bottom and finished ones stay above. Piped, each finished segment is one line: time,
    channel, party and text, with tabs between. With [bold]--json FILE[/bold] (- is standard output) each line is a JSON object.

    Examples: [bold]asr watch --channel 7[/bold], [bold]asr watch --from-start --no-follow --json - | jq .text[/bold]. Ctrl-C stops it.
    """
    from rich.console import Console

    from connectors.results import Filter
    from streams.settings import load_settings

    settings = load_settings()
    wanted = Filter(sessions=frozenset(session or ()), channels=frozenset(channel or ()))
    console = Console()
    try:
        with _output(json_file, console, with_partials=partials) as output:
            _follow(settings, wanted, output, from_start=from_start, follow=not no_follow)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # Whoever read our output has enough; Python must not find that out again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _output(json_file: Path | None, console: Console, *, with_partials: bool) -> AbstractContextManager[Output]:
    if json_file is not None:
        return json_output(json_file, with_partials=with_partials)
    return terminal_output(console) if console.is_terminal else line_output(sys.stdout)


def _follow(settings: Any, wanted: Any, output: Output, *, from_start: bool, follow: bool) -> None:
    """Read until interrupted, or until all that was there has been read."""
    from connectors.results import Results, ResultsConsumer, Turn
    from streams.topics import COVERAGE, PARTIALS, SESSIONS, TRANSCRIPTS

    batches: SimpleQueue[Sequence[Received] | Exception | None] = SimpleQueue()
    since_ms = {SESSIONS: None, TRANSCRIPTS: None} if from_start else {SESSIONS: _SESSION_MS, TRANSCRIPTS: _RECENT_MS}
    reader = ResultsConsumer(
        settings,
        batches.put,
        caught_up=lambda: batches.put(None),
        failed=batches.put,
        since_ms={**since_ms, PARTIALS: _RECENT_MS, COVERAGE: _RECENT_MS},
    )
    results = Results()
    live = False
    reader.start()
    try:
        while follow or not live:
            match _next(batches):
                case Exception() as failure:
                    raise UserError(f"Reading the results stopped: {failure}") from failure
                case None:
                    live = True
                    if from_start:
                        views = [view for view in results.sessions.values() if _wants(wanted, view)]
                        output.said(sorted((Turn(view, one) for view in views for one in view.finals()), key=lambda turn: turn.said_us))
                case batch:
                    for record, arrived_us in batch:
                        change = results.apply(record, arrived_us)
                        if live and change is not None and _wants(wanted, change.session):
                            output.change(change)
            output.tick()
            if live:
                now_us = time.time_ns() // 1_000
                results.forget_before(now_us - _CLOSED_KNOWN_US, now_us - _OPEN_KNOWN_US)
    finally:
        reader.stop()


def _next(batches: SimpleQueue[Sequence[Received] | Exception | None]) -> Sequence[Received] | Exception | None:
    try:
        return batches.get(timeout=_REDRAW_S)
    except Empty:
        return ()


def _wants(wanted: Any, view: SessionView) -> bool:
    return bool(wanted.wants(view.session_id, view.channel_id, view.conversation_id))


def printable(text: str) -> str:
    """Return a text without what could move a terminal's cursor or break a line: texts are whatever was recognised."""
    return "".join(character if character.isprintable() else " " for character in text)


def _clock(turn: Turn) -> str:
    """Return when a turn began: the time of day here; from the session's start where that is not known."""
    if turn.session.started_us:
        return datetime.fromtimestamp(turn.said_us / 1e6).astimezone().strftime("%H:%M:%S")
    minutes, seconds = divmod(turn.said_us // 1_000_000, 60)
    return f"+{minutes:02}:{seconds:02}"


# --- lines


class _Lines:
    """A line for each final."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def said(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._write(turn)

    def change(self, change: Change) -> None:
        from connectors.results import Turn

        if change.kind == "final":
            self._write(Turn(change.session, change.session.segments[change.segment]))

    def tick(self) -> None:
        """Have nothing to do."""

    def _write(self, turn: Turn) -> None:
        text = turn.segment.transcript.text
        if text:
            fields = _clock(turn), turn.session.channel_id, turn.session.party, text
            print("\t".join(printable(field) for field in fields), file=self._out, flush=True)


@contextmanager
def line_output(out: TextIO) -> Iterator[Output]:
    """Write each final as a line: time, channel, party, text."""
    yield _Lines(out)


# --- JSON


class _JsonLines:
    """An object for each change."""

    def __init__(self, out: TextIO, *, with_partials: bool) -> None:
        self._out = out
        self._with_partials = with_partials

    def said(self, turns: Sequence[Turn]) -> None:
        for session, segment in turns:
            self._write("final", session, segment.final or segment.refined)
            if segment.final and segment.refined:
                self._write("refined", session, segment.refined)

    def change(self, change: Change) -> None:
        match change.kind:
            case "session":
                session = change.session
                self._put(
                    "session", session, state=session.state, reason=getattr(change.record, "reason", ""), started_us=session.started_us
                )
            case "final" | "refined" | "cancelled":
                self._write(change.kind, change.session, change.record)
            case "partial" if self._with_partials:
                self._write("partial", change.session, change.record)

    def tick(self) -> None:
        """Have nothing to do."""

    def _write(self, kind: str, session: SessionView, record: Any) -> None:
        from connectors.results import to_ms

        more: dict[str, Any] = {}
        if kind in {"final", "refined"}:
            more = {"confidence": round(record.confidence, 3), "language": record.language, "words": record.words}
        start_ms, end_ms = to_ms(record.position_samples), to_ms(record.end_sample)
        self._put(kind, session, segment=record.segment, start_ms=start_ms, end_ms=end_ms, text=record.text, **more)

    def _put(self, kind: str, session: SessionView, **fields: object) -> None:
        import msgspec

        owner = {name: getattr(session, name) for name in ("session_id", "channel_id", "conversation_id", "party")}
        self._out.write(msgspec.json.encode({"type": kind, **owner, **fields}).decode() + "\n")
        self._out.flush()


@contextmanager
def json_output(file: Path, *, with_partials: bool) -> Iterator[Output]:
    """Write each change as a JSON object on a line of its own, to a file or (``-``) standard output.

    Raises:
        UserError: the file cannot be written.
    """
    if file == Path("-"):
        yield _JsonLines(sys.stdout, with_partials=with_partials)
        return
    try:
        out = file.open("w", encoding="utf-8")
    except OSError as refused:
        raise UserError(f"{file} cannot be written ({refused.strerror})", "Choose another file for --json.") from refused
    with out:
        yield _JsonLines(out, with_partials=with_partials)


# --- a terminal


class _Terminal:
    """Finals scroll by; what is open stands below them, dim."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live
        self._sessions: dict[str, SessionView] = {}

    def said(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._print(turn)

    def change(self, change: Change) -> None:
        from connectors.results import Turn

        self._sessions[change.session.session_id] = change.session
        if change.kind == "final":
            self._print(Turn(change.session, change.session.segments[change.segment]))

    def tick(self) -> None:
        self._sessions = {name: view for name, view in self._sessions.items() if view.state != "closed" or view.partials}
        self._live.update(self._open_texts())

    def _print(self, turn: Turn) -> None:
        from rich.table import Table
        from rich.text import Text

        said = turn.segment.transcript
        if not said.text:
            return
        row = Table.grid(padding=(0, 2))
        row.add_column()
        row.add_column(min_width=_WHO_CELLS)
        row.add_row(Text(_clock(turn), style="dim"), self._who(turn.session), Text(printable(said.text)))
        self._console.print(row)

    def _who(self, view: SessionView) -> RenderableType:
        from rich.text import Text

        return Text.assemble((printable(view.channel_id), "cyan"), f" {printable(view.party)}" if view.party else "")

    def _open_texts(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        views = sorted(self._sessions.values(), key=lambda view: (len(view.channel_id), view.channel_id))
        rows = Table.grid(padding=(0, 2))
        rows.add_column(min_width=_CLOCK_CELLS)
        rows.add_column(min_width=_WHO_CELLS)
        room = max(0, self._console.height - 2)
        talking = [(view, partial) for view in views for partial in view.open_partials() if partial.text]
        for view, partial in talking[:room]:
            rows.add_row("", self._who(view), Text(printable(partial.text), style="dim italic"))
        return Group(rows, Text(self._summary(views), style="dim"))

    @staticmethod
    def _summary(views: Sequence[SessionView]) -> str:
        from connectors.results import quantile

        now_us = time.time_ns() // 1_000
        values_ms = sorted(value for view in views for value in view.latency.values_ms(now_us))
        channels = sum(view.state != "closed" for view in views)
        if not channels:
            return "Waiting for calls (Ctrl-C stops)"
        latency = f", latency P50 {quantile(values_ms, _MEDIAN):.0f} ms, P95 {quantile(values_ms, _MOST):.0f} ms" if values_ms else ""
        return f"{channels} channel{'s' if channels > 1 else ''}{latency} (Ctrl-C stops)"


@contextmanager
def terminal_output(console: Console) -> Iterator[Output]:
    """Show finals as they come and, below them, what is being said."""
    from rich.live import Live

    with Live(console=console, refresh_per_second=1 / _REDRAW_S, transient=True) as live:
        yield _Terminal(console, live)
