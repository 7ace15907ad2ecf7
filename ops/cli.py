"""The command line: ``asr``.

Each command is a function with Typer annotations, or a Typer app of subcommands, in the module of its subject. It is imported when it
is called: help stays instant, and no command pays for another's libraries. Wherever a command raises
:class:`streams.errors.UserError`, its message goes to standard error as it is and the exit code is 2.
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.console import Console
from rich.logging import RichHandler
from typer.core import TyperCommand, TyperGroup

from streams.errors import UserError

__all__ = ["COMMANDS", "Command", "app", "configure_logging", "main"]

_DISTRIBUTION: Final = "asr-streams"
_EXIT_USER_ERROR: Final = 2
#: What shells report for a process that a signal ended.
_EXIT_SIGNALLED: Final = 128


@dataclass(frozen=True, slots=True)
class Command:
    """A command as the help lists it, and where it is.

    Attributes:
        target: ``module:attribute``, a function or a :class:`typer.Typer`.
        summary: one line for ``asr --help``.
        panel: the heading that the help lists it under.
    """

    target: str
    summary: str
    panel: str


COMMANDS: Final[dict[str, Command]] = {
    "demo": Command("ops.demo.command:demo", "See it all work: a broker, a worker, a live page and bundled calls.", "Start here"),
    "transcribe": Command("ops.transcribe:transcribe", "Turn audio files into text, JSON, SRT or VTT.", "Start here"),
    "record": Command("connectors.recorder.command:record", "Send audio files as live calls.", "Calls"),
    "watch": Command("connectors.watch:watch", "Follow transcripts in the terminal.", "Calls"),
    "gateway": Command("connectors.gateway.command:gateway", "Serve transcripts to browsers over WebSocket.", "Calls"),
    "broker": Command("ops.broker.command:broker", "Run Apache Kafka on this machine.", "Operation"),
    "topics": Command("ops.topics_command:topics", "Create, verify and explain the topics.", "Operation"),
    "groups": Command("ops.groups_command:groups", "Move live calls between one worker for all stages and one for each.", "Operation"),
    "hotwords": Command("ops.hotwords_command:hotwords", "Push phrases to favour while calls are live; list and clear them.", "Operation"),
    "retention": Command("ops.retention_command:retention", "Show how many calls are stored, and let finished ones go.", "Operation"),
    "config": Command("ops.config_command:config", "Show every setting, its value and where it comes from.", "Operation"),
    "replay": Command("ops.replay.command:replay", "Take stored calls through another engine, and show the difference.", "Operation"),
    "eval": Command("ops.evaluate.command:evaluate", "Measure how good the parts are: vad.", "Operation"),
    "chaos": Command("ops.chaos.command:chaos", "Kill processes under live calls, and prove that nothing is lost.", "Operation"),
    "soak": Command("ops.soak.command:soak", "Let thousands of calls through, and see whether anything grows.", "Operation"),
    "bench": Command("ops.bench.command:bench", "Measure latency, throughput and where the time goes.", "Operation"),
}


class _LazyGroup(TyperGroup):
    """Lists :data:`COMMANDS` without importing them, and imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=command.summary, rich_help_panel=command.panel) for name, command in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name else listed, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as mistake:
            # No markup, no wrapping: messages hold brackets and paths that are to be copied.
            Console(stderr=True).print(f"asr: {mistake}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(_EXIT_USER_ERROR) from None


def _load(name: str) -> Any:
    """Import a command and return it as Typer's own kind of command."""
    module_name, _, attribute = COMMANDS[name].target.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{module_name}.".startswith(f"{missing.name}."):
            raise UserError(f"The command {name!r} is not part of this installation ({missing.name} is missing)") from missing
        raise UserError(
            f"The command {name!r} needs the Python package {missing.name!r}, which is not installed",
            f"Install the project again: pip install {_DISTRIBUTION}.",
        ) from missing
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name)(target)
        target = single
    return typer.main.get_command(target)


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,  # they may hold passwords
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{_DISTRIBUTION} {metadata.version(_DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def _asr(
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Say what happens; twice: in every detail.", show_default=False)
    ] = 0,
    _version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Turn live telephone audio into text, with Kafka as the only backbone.

    Settings come from ASR_* variables and a file .env; [bold]asr config[/bold] shows them all. The stages themselves run with
    [bold]faust -A streams worker[/bold].
    """
    configure_logging(verbose)


def configure_logging(verbosity: int) -> None:
    """Send log lines to standard error: warnings; from 1 on also what happens; from 2 on every detail.

    Args:
        verbosity: how many times ``-v`` was given.
    """
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)]
    console = Console(stderr=True)
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=verbosity > 1, rich_tracebacks=True)
        handler.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def main() -> NoReturn:
    """Run the command line; SIGTERM unwinds like Ctrl-C, so that what was started is stopped."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(_EXIT_SIGNALLED + number))
    app(prog_name="asr")
    raise AssertionError  # Typer exits by itself
