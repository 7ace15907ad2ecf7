"""``asr chaos``."""

from __future__ import annotations

import logging
import math
import secrets
import shutil
import time
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from ops.logs import quietened
from streams.errors import UserError
from streams.output import JsonOption, write_json

__all__ = ["chaos"]

_EXIT_FAULTY: Final = 1
_SESSION_LOST_MS: Final = 30_000
_ALL: Final = "workers,broker,recorder,gateway,planned"


def chaos(
    channels: Annotated[int, typer.Option(min=1, help="Calls at the same time.")] = 20,
    kills: Annotated[
        int, typer.Option(min=0, help="Processes to kill or stop, one blow after the other, each after all is well again.")
    ] = 10,
    seed: Annotated[int, typer.Option(help="The same one gives the same calls and the same schedule.")] = 0,
    targets: Annotated[
        str,
        typer.Option(
            metavar="KINDS",
            help="What to strike, comma-separated: workers (or kill, freeze, pair, rebalance), broker, recorder, gateway, planned, stall.",
        ),
    ] = _ALL,
    nodes: Annotated[int, typer.Option(help="Brokers: 1, or 3 with all data on each.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Workers of each stage, or of all. Takeover within 3 s needs a second warm one.")] = 2,
    layout: Annotated[
        Literal["stages", "all"], typer.Option(help="A worker for each stage, or workers that run all stages in one process.")
    ] = "stages",
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of the topics; with fewer than channels, some share one.")] = 16,
    engine: Annotated[str, typer.Option(help="instant, whose finals are digests of all that it heard, conformer or whisper.")] = "instant",
    large: Annotated[
        bool, typer.Option("--large", help="With conformer: a random model of 35 M parameters, which costs what a trained one does.")
    ] = False,
    call_s: Annotated[float, typer.Option("--call-s", min=5, help="Length of a call.")] = 25.0,
    strike_for_s: Annotated[
        float | None, typer.Option("--strike-for-s", min=1, help="After so long no strike begins any more, whatever is left of the kills.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", metavar="DIR", help="Where timeline.png, report.json and, with --keep, all logs go.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep all: logs and journals of a run that found nothing, too, and the brokers' data.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Prove that nothing is lost: kill processes under live calls, and compare every word with an undisturbed run.

    Starts brokers, workers of each stage, recorders and a gateway; plays known
    calls undisturbed, then again while it strikes. What was killed is started
    again after 0 to 2 s. A checker that shares no code with the pipeline then
    reads all topics from offset 0. Every version of every final counts.

    The kinds of strikes:
    kill       SIGKILL to a worker, mostly in the middle of a segment
    freeze     SIGSTOP to a worker for 3 to 10 s, then SIGCONT
    pair       SIGKILL to two workers at once, of different stages
    rebalance  SIGKILL to a worker, and to the other one as its successor joins
    broker     SIGKILL to the broker; of three to the one that leads a busy
               partition, coordinates the groups, or controls the cluster
    recorder, gateway  SIGKILL
    stall      SIGSTOP to all engines for 10 s: the catch-up that follows
    rolling, join  planned restarts of a stage; a third worker comes and goes

    [bold]asr chaos --channels 5 --kills 8[/bold]
    a few minutes: one of most kinds

    [bold]asr chaos --channels 5 --kills 8 --layout all[/bold]
    the same with workers that run all stages

    [bold]asr chaos --targets stall --kills 1 --channels 50 --workers 1 --engine conformer[/bold]
    how a backlog of 10 s on 50 channels is caught up with, 2 minutes

    [bold]asr chaos --kills 30 --targets broker,kill --nodes 3[/bold]
    brokers and workers of a cluster

    The JSON holds kills, frames_lost, finals_changed, gaps_filled, takeover_ms
    (p50, p95, max: from a kill until a channel of the killed is answered in
    time again, counted on frames captured after it), stall_ms (the worst answer
    on other channels), outage_ms (the same as takeover, where nobody could take
    over: the only broker, a stall of all engines), catch_up, faults, findings and marks (every blow). The exit
    code is 1 if anything was lost, changed, repeated or leaked.
    """
    # Not for --help.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ops.bench.models import LARGE_SIZE, write_random_model
    from ops.chaos.plan import kinds_of, make_plan
    from ops.chaos.report import as_json, draw, show
    from ops.chaos.run import Chaos, Options
    from streams.settings import load_settings

    console = Console(stderr=json_file == Path("-"), highlight=False)
    settings = load_settings()
    kinds = kinds_of([name.strip() for name in targets.split(",") if name.strip()])
    plan = make_plan(kills, seed, kinds, layout=layout, brokers=nodes, workers=workers)
    overrides: dict[str, Any] = {
        "engine": engine,
        "partitions": partitions,
        "replication_factor": nodes,
        # Several sessions may share a partition's snapshot; the embedded broker allows the protocol's bound.
        "snapshot_max_bytes": 32_767,
        # Who waits for the end of a killed recorder's calls does so at the end of each run.
        "session_lost_ms": _SESSION_LOST_MS,
        "namespace": f"chaos-{secrets.token_hex(3)}",
    }
    if "bootstrap_servers" in settings.model_fields_set:
        overrides["bootstrap_servers"] = settings.bootstrap_servers
    folder = (output_dir or settings.data_dir / "chaos") / time.strftime("%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True)
    except OSError as refused:
        raise UserError(f"{folder} cannot be made ({refused.strerror})", "Choose another --output-dir.") from refused
    if large:
        write_random_model(folder / "model", LARGE_SIZE)
        overrides["model_dir"] = folder / "model"
    options = Options(
        channels=channels,
        plan=plan,
        seed=seed,
        workers=workers,
        layout=layout,
        nodes=nodes,
        call_s=call_s,
        strike_for_s=strike_for_s or math.inf,
    )
    console.print(f"{channels} channels, {sum(strike.kills for strike in plan)} kills. Logs: {folder}", markup=False, soft_wrap=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        # Its brokers die: that clients cannot reach them is no news.
        quietened(logging.CRITICAL, "aiokafka", "streams.kafka"),
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("Starting", total=sum(strike.kills for strike in plan))
        run = Chaos(
            settings,
            overrides,
            folder,
            options,
            on_progress=lambda what: progress.update(bar, description=what),
            # In a log, a line for each blow; on a terminal the bar tells.
            on_strike=lambda what: None if console.is_terminal else console.print(f"{time.strftime('%X')}  {what}", markup=False),
            on_kill=lambda count: progress.advance(bar, count),
        )
        outcome = run.run()
    arguments = {
        "channels": channels,
        "kills": kills,
        "seed": seed,
        "targets": targets,
        "nodes": nodes,
        "workers": workers,
        "layout": layout,
        "partitions": partitions,
        "engine": engine,
        "large": large,
        "call_s": call_s,
    }
    result = as_json(outcome, arguments)
    write_json(folder / "report.json", result)
    try:
        draw(outcome, folder / "timeline.png")
    except ModuleNotFoundError:
        console.print("No picture: matplotlib is not installed (pip install 'asr-streams\\[train]').", style="yellow")
    _tidy(folder, keep=keep or bool(result["faults"]), with_data=keep)
    show(result, console)
    console.print(f"Report and timeline: {folder}", markup=False, soft_wrap=True)
    if json_file is not None:
        write_json(json_file, result)
    if result["faults"]:
        raise typer.Exit(_EXIT_FAULTY)


def _tidy(folder: Path, *, keep: bool, with_data: bool) -> None:
    """Leave the report and the timeline, where there are faults all logs, and the brokers' data only if they were asked for."""
    if not with_data:
        shutil.rmtree(folder / "kafka", ignore_errors=True)
    if keep:
        return
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name not in ("report.json", "timeline.png", "marks.jsonl"):
            entry.unlink()
