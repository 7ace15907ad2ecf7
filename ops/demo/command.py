"""``asr demo``: the whole system at work on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from streams.errors import UserError

__all__ = ["demo"]

_EXIT_LOST: Final = 1
_DEFAULT_CHANNELS: Final = 8
#: Few partitions start sooner; channels with a partition of their own do not wait for each other.
_MIN_PARTITIONS: Final = 8
#: An hour of eight channels is 0.9 GB on the way through three topics.
_AUDIO_RETENTION_MS: Final = 600_000


def demo(
    channels: Annotated[int, typer.Option(min=1, max=500, help="How many telephone channels to play.")] = _DEFAULT_CHANNELS,
    seconds: Annotated[
        float | None, typer.Option(min=1, envvar="ASR_DEMO_SECONDS", help="How long to play; without it until Ctrl-C.", show_default=False)
    ] = None,
    headless: Annotated[bool, typer.Option("--headless", help="No page and no live table, only the summary.")] = False,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Port of the live page; 0: any free one.  [default: 8080, or a free one]", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write what was measured as JSON; - for standard output.", show_default=False, allow_dash=True),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="What recognises speech: conformer, whisper, instant. [ASR_ENGINE]", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which calls are put together.")] = 0,
) -> None:
    """See it all work: real recordings as live calls, through Kafka, into text.

    It starts a broker, a worker for each stage and the gateway, plays dialogues and single callers in real time (some as 8 kHz G.711, with
    noise and music on hold), and shows the text here and on the live page, whose address it prints. With ASR_BOOTSTRAP_SERVERS it
    uses that Kafka, and the workers that run there.

    At the end it says how many frames were sent, answered, lost and duplicated, how late frames and words came, and how many words were
    wrong against the known transcripts. The exit code is 1 if a frame was lost.
    """
    # Not for --help.
    from rich.console import Console

    from ops.demo.run import run_demo
    from streams.settings import load_settings

    to_stdout = str(json_file) == "-"
    if json_file is not None and not json_file.absolute().parent.is_dir():
        # Found out before the run, not after it.
        raise UserError(f"There is no folder {json_file.absolute().parent}", "Make it, or choose another file for --json.")
    console = Console(stderr=to_stdout, highlight=False, soft_wrap=True)
    wishes: dict[str, Any] = {"engine": engine, "gateway_port": port}
    wishes = {name: wish for name, wish in wishes.items() if wish is not None}
    settings = load_settings(**wishes)
    if "bootstrap_servers" not in settings.model_fields_set:
        small = {"partitions": max(_MIN_PARTITIONS, channels), "audio_retention_ms": _AUDIO_RETENTION_MS}
        wishes |= {name: value for name, value in small.items() if name not in settings.model_fields_set}
    report = run_demo(
        load_settings(**wishes), wishes, console, channels=channels, seconds=seconds, headless=headless, seed=seed, engine_wished=engine
    )
    if to_stdout:
        typer.echo(report.to_json(), nl=False)
    elif json_file is not None:
        json_file.write_bytes(report.to_json())
    if report.frames_lost:
        raise typer.Exit(_EXIT_LOST)
