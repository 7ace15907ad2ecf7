"""``asr soak``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from streams.errors import UserError
from streams.output import JsonOption, write_json

__all__ = ["soak"]

_EXIT_GROWS: Final = 1
_DEFAULT_CALLS: Final = 1_000
_DEFAULT_SPEED: Final = 4.0
_DEFAULT_LINES: Final = 10
_SAMPLES: Final = 120
_MIN_SAMPLE_S: Final = 1.0
_MAX_SAMPLE_S: Final = 10.0


def soak(
    calls: Annotated[int, typer.Option(min=1, help="How many calls, of 1.6 s each.")] = _DEFAULT_CALLS,
    speed: Annotated[float, typer.Option(min=0.1, help="How much faster than real time they speak.")] = _DEFAULT_SPEED,
    lines: Annotated[int, typer.Option(min=1, max=64, help="How many of them at the same time.")] = _DEFAULT_LINES,
    engine: Annotated[str, typer.Option(help="What recognises speech.")] = "instant",
    output_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Put soak.json and soak.png there.  [default: nowhere]", show_default=False)
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Let many short calls go through one set of workers, faster than real time, and see whether anything grows.

    Calls open and close on a few lines, one after the other, while another
    list of hotwords is pushed every 10 s and somebody opens the live page
    and leaves it every second. New calls wait while the workers are behind. The system is one of its own (an embedded broker, or another
    namespace on the one that ASR_BOOTSTRAP_SERVERS names) in which minutes
    stand for weeks: results are kept for 60 s, audio for 120 s, and topics
    are cleaned within seconds, so that what must leave is seen leaving.

    Memory, handles and threads of every process, the size of every topic,
    and frame latency are sampled all along. A line is drawn through each,
    warm-up left out (a quarter of the run, at least 90 s if that is not more
    than half of it): flat is what grows by less than 1 KiB, and a twenty-
    thousandth of a handle or thread, for each call. Java's memory and the
    topics are shown, not judged.

    [bold]asr soak --calls 10000 --speed 4 --output-dir var/soak[/bold]
    about ten minutes on two cores

    The JSON holds calls, seconds, frames_lost, finals_different (the same
    audio must always say the same), flat, growth (for each thing: first,
    last, most, per_call, bound_per_call, is_flat), tally and samples. The
    exit code is 1 if something grows, is lost, or comes out differently.
    """
    # Not for --help.
    import secrets
    import time

    from rich.console import Console

    from ops.processes import System
    from ops.soak.report import as_json, draw, growths
    from ops.soak.report import show as show_report
    from ops.soak.run import CALL_S, Soak, hurry_compaction, soak_settings
    from ops.soak.vitals import Vitals
    from streams.settings import load_settings

    if output_dir is not None:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            raise UserError(f"{output_dir} cannot be made ({refused.strerror})", "Choose another --output-dir.") from refused
    console = Console(stderr=str(json_file) == "-", highlight=False)
    overrides = soak_settings(load_settings(), lines, engine, f"soak-{secrets.token_hex(3)}")
    shortest_s = calls / lines * CALL_S / speed
    every_s = min(_MAX_SAMPLE_S, max(_MIN_SAMPLE_S, shortest_s / _SAMPLES))
    with (
        console.status("Starting") as status,
        System(
            load_settings(**overrides), "soak", overrides=overrides, gateway=True, on_progress=lambda what: status.update(what)
        ) as system,
    ):
        hurry_compaction(system.settings)
        with Soak(system, lines=lines, speed=speed) as run:
            folder = system.folder / "kafka"
            with Vitals(every_s, run.progress, run.latencies, folder if folder.is_dir() else None, system.settings.namespace) as vitals:
                began_s = time.monotonic()
                run.play(calls, lambda tally: status.update(f"{tally.over} of {calls} calls over"))
                seconds = time.monotonic() - began_s
                vitals.take()
            samples, tally = vitals.samples, run.tally
        system.keep_logs |= bool(tally.failures)
    arguments = {"calls": calls, "speed": speed, "lines": lines, "engine": engine}
    report = as_json(samples, tally, arguments, seconds)
    show_report(report, console)
    if output_dir is not None:
        write_json(output_dir / "soak.json", report)
        draw(samples, output_dir / "soak.png")
    if json_file is not None:
        write_json(json_file, report)
    judged = bool(growths(samples))
    if (judged and not report["flat"]) or tally.failures or tally.frames_lost or tally.finals_different or tally.over < calls:
        raise typer.Exit(_EXIT_GROWS)
