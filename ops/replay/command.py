"""``asr replay``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from streams.errors import UserError
from streams.output import JsonOption, write_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ops.replay.catalog import Call
    from ops.replay.compare import Comparison
    from streams.settings import Settings

__all__ = ["replay"]

_EXIT_DIFFERENT: Final = 1
#: Everything else of this machine goes first.
_NICENESS: Final = 15
_DEFAULT_LOAD: Final = 8.0
_MS_PER_S: Final = 1_000


def replay(
    session: Annotated[list[str] | None, typer.Option(metavar="ID", help="A session; may be given several times.")] = None,
    channel: Annotated[list[str] | None, typer.Option(metavar="ID", help="All calls of a channel; may be given several times.")] = None,
    from_: Annotated[
        str, typer.Option("--from", metavar="TIME", help="Calls that reach beyond a time: 2026-11-30T14:00, 14:00, or 2h ago.")
    ] = "",
    to: Annotated[str, typer.Option(metavar="TIME", help="Calls that began before a time.")] = "",
    engine: Annotated[str | None, typer.Option(help="What recognises speech.  [default: ASR_ENGINE]", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option(help="Its model: a name, or a folder.  [default: ASR_MODEL, ASR_MODEL_DIR]", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting, such as vad_closing_ms=500.")
    ] = None,
    load: Annotated[float, typer.Option(min=0.1, help="As much work as so many live channels, at most.")] = _DEFAULT_LOAD,
    into: Annotated[
        str,
        typer.Option(metavar="NAMESPACE", help="Put the results there and leave them.  [default: a new one, removed]", show_default=False),
    ] = "",
    same: Annotated[bool, typer.Option("--same", help="Exit with 1 unless all segments come out the same, to the letter.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Take stored calls through an engine, a model or other settings once more, and show what comes out differently.

    What the recorders sent is read from asr.audio, which keeps it for a day
    (ASR_AUDIO_RETENTION_MS), and goes through stages of its own: their
    topics and groups begin with another name, they yield to everything else
    on this machine, and --load bounds what they do. Live calls, and what is
    stored of these, are not touched. Each call is taken as a whole, with the
    hotwords that were in force then.

    [bold]asr replay --session 3f2a90c1d5e87b64 --same[/bold]
    an audit: the same engine again must say the same

    [bold]asr replay --channel 7 --from 2h --engine conformer --json -[/bold]
    another engine on the last two hours of a channel

    The JSON holds calls, identical, stored_words, differing_words, settings
    (what was different), and sessions: for each its texts, engines, models
    and differences, word by word with their times. The exit code is 0, or 1
    with --same where something differs.
    """
    # Not for --help.
    import os

    import msgspec
    from rich.console import Console

    from ops.replay.catalog import Wanted, find, moment_us
    from streams.registry import codec_for
    from streams.settings import load_settings

    wanted = Wanted(
        frozenset(session or ()),
        frozenset(channel or ()),
        moment_us(from_) if from_ else None,
        moment_us(to) if to else None,
    )
    if wanted == Wanted(frozenset(), frozenset()):
        raise UserError("Which calls are meant?", "Name some with --session, --channel, --from or --to.")
    live = load_settings()
    wishes = _wishes(engine, model, set_ or [])
    load_settings(**wishes)
    console = Console(stderr=json_file is not None and str(json_file) == "-", highlight=False)
    found = find(live, codec_for(live.schema_registry_url), wanted)
    calls = [call for call in found if call.is_over]
    if len(calls) < len(found):
        console.print(f"{len(found) - len(calls)} calls are not over yet, and left out.", style="yellow")
    if not calls:
        raise UserError("All calls that are meant are still open", "Replay them when they are over.")
    os.nice(_NICENESS)
    comparisons = _replayed(live, wishes, calls, console, load=load, into=into)
    _print(comparisons, console)
    if json_file is not None:
        write_json(
            json_file,
            {
                "calls": len(comparisons),
                "identical": sum(each.identical for each in comparisons),
                "stored_words": sum(each.stored_words for each in comparisons),
                "differing_words": sum(each.differing_words for each in comparisons),
                "settings": wishes,
                "namespace": into or None,
                "sessions": [msgspec.to_builtins(each) for each in comparisons],
            },
        )
    if same and not all(each.identical for each in comparisons):
        raise typer.Exit(_EXIT_DIFFERENT)


def _wishes(engine: str | None, model: str | None, others: Sequence[str]) -> dict[str, Any]:
    """Return what the caller wants to be different, by the settings' names."""
    from streams.settings import Settings, load_settings

    wishes: dict[str, Any] = {}
    for other in others:
        name, equals, value = other.partition("=")
        name = name.strip().lower().removeprefix("asr_")
        if not equals or name not in Settings.model_fields:
            raise UserError(f"--set {other} names no setting", "Write NAME=VALUE; `asr config` lists all names.")
        wishes[name] = value
    if engine is not None:
        wishes["engine"] = engine
    if model is not None:
        engine_in_force = engine or load_settings().engine
        wishes["model_dir" if engine_in_force == "conformer" else "model"] = model
    return wishes


def _replayed(
    live: Settings, wishes: Mapping[str, Any], calls: Sequence[Call], console: Console, *, load: float, into: str
) -> list[Comparison]:
    from ops.processes import System
    from ops.replay.run import Replay, replayed_settings
    from streams.settings import load_settings

    overrides = replayed_settings(live, wishes, into)
    order = {call.session_id: number for number, call in enumerate(calls)}
    with (
        console.status("Starting") as status,
        System(load_settings(**overrides), "replay", overrides=overrides, on_progress=lambda what: status.update(what)) as system,
        Replay(live, system, load=load, keep=bool(into)) as running,
    ):

        def show(done: int, sent_s: float) -> None:
            status.update(f"{done} of {len(calls)} calls done, {sent_s:.0f} s of audio sent")

        return sorted(running.compare(calls, show), key=lambda each: order[each.session_id])


def _print(comparisons: Sequence[Comparison], console: Console) -> None:
    from rich.table import Table

    table = Table("channel", "session", "segments", "words", "differing", "", box=None, header_style="bold")
    for each in comparisons:
        segments = str(each.stored_segments)
        if each.replayed_segments != each.stored_segments:
            segments += f" → {each.replayed_segments}"
        words = str(each.stored_words) + (f" → {each.replayed_words}" if each.replayed_words != each.stored_words else "")
        share = f"{each.differing_words}" + (f" ({each.differing_words / each.stored_words:.0%})" if each.stored_words else "")
        said = "the same" if each.identical else "the same words" if not each.differing_words else ""
        table.add_row(each.channel_id, each.session_id, segments, words, share, ", ".join(filter(None, (said, each.note))))
    console.print(table)
    for each in comparisons:
        if each.differing_words:
            console.print(f"\n[bold]channel {each.channel_id}, session {each.session_id}[/bold]")
            for difference in each.differences:
                console.print(_shown(difference.at_ms, difference.stored, difference.replayed), soft_wrap=True)
    differing, stored = sum(each.differing_words for each in comparisons), sum(each.stored_words for each in comparisons)
    identical = sum(each.identical for each in comparisons)
    console.print(f"\n{len(comparisons)} calls: {identical} the same to the letter; {differing} of {stored} words differ.")
    engines = sorted({(each.stored_engine, each.stored_model[:12]) for each in comparisons if each.stored_engine})
    now = sorted({(each.replayed_engine, each.replayed_model[:12]) for each in comparisons if each.replayed_engine})
    for label, used in (("stored", engines), ("replayed", now)):
        if used:
            console.print(f"{label} by " + ", ".join(f"{name} {digest}" for name, digest in used), style="dim")


def _shown(at_ms: int, stored: str, replayed: str) -> Text:
    """Return a difference as wdiff writes it: [-stored-] {+replayed+}."""
    from rich.text import Text

    line = Text(f"{at_ms / _MS_PER_S:8.1f} s  ", style="dim")
    if stored:
        line.append(f"[-{stored}-]", style="red")
    if stored and replayed:
        line.append(" ")
    if replayed:
        line.append(f"{{+{replayed}+}}", style="green")
    return line
