"""``asr bench``: how fast it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ops.logs import quietened
from streams.output import JsonOption

if TYPE_CHECKING:
    from ops.bench.report import Document

__all__ = ["bench"]

bench = typer.Typer(
    help="Measure latency, throughput and where the time goes. Each figure is a distribution or a ratio of one run, written with the "
    "processor, the cores and the versions. Leave the machine alone meanwhile.",
    no_args_is_help=False,
)

_EXIT_LOST: Final = 1
_CHANNELS: Final = (10, 30, 50)
_SECONDS: Final = 30.0


class _Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class _Precision(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"


ChannelsOption = Annotated[list[int] | None, typer.Option(min=1, help="How many channels; repeat it for several runs.  [10, 30, 50]")]
SecondsOption = Annotated[float, typer.Option(min=5, help="How long each run plays.")]
EngineOption = Annotated[str | None, typer.Option(help="What recognises speech: conformer, whisper, instant.  [conformer]")]
ModelOption = Annotated[
    Path | None,
    typer.Option("--model-dir", envvar="ASR_MODEL_DIR", help="A WeNet model.  [the one that comes along, else a random one of its size]"),
]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: PNG, SVG or PDF.")]


def _tell() -> Callable[[str], None]:
    from rich.console import Console

    people = Console(stderr=True, highlight=False)
    return lambda line: people.print(line, style="dim", markup=False)


def _leave(found: Document, json_file: Path | None, plot: Path | None) -> None:
    """Show a document, and write and draw it where that is wanted."""
    from rich.console import Console

    from ops.bench.render import draw, tables_of
    from ops.bench.report import conditions_line, show, write_document

    if json_file is not None:
        write_document(found, json_file)
    if plot is not None:
        draw(found, plot)
    people = Console(stderr=True, highlight=False)
    show(tables_of(found), people)
    people.print(conditions_line(found), style="dim", markup=False)


def _check_lost(runs: Any) -> None:
    if any(run["frames_lost"] for run in runs):
        raise typer.Exit(_EXIT_LOST)


@bench.callback(invoke_without_command=True)
def _road_alone(
    context: typer.Context, channels: ChannelsOption = None, seconds: SecondsOption = _SECONDS, json_file: JsonOption = None
) -> None:
    """Measure latency, throughput and where the time goes; without a command, the road.

    Each figure is a distribution or a ratio of one run, written with the processor, the cores and the versions. Leave the machine alone
    meanwhile.
    """
    if context.invoked_subcommand is None:
        road(channels, seconds, json_file)


@bench.command()
def road(channels: ChannelsOption = None, seconds: SecondsOption = _SECONDS, json_file: JsonOption = None, plot: PlotOption = None) -> None:
    """Measure what the road costs: Kafka, Faust, detection and features, with an engine that answers at once."""
    from rich.console import Console

    from ops.bench.road import measure_road

    found = measure_road(channels or _CHANNELS, seconds, Console(stderr=True, highlight=False))
    _leave(found, json_file, plot)
    _check_lost(found["results"]["runs"])


@bench.command()
def system(
    channels: ChannelsOption = None,
    seconds: SecondsOption = _SECONDS,
    engine: EngineOption = None,
    model_dir: ModelOption = None,
    search: Annotated[bool, typer.Option("--search/--no-search", help="Look for the most channels with P95 ≤ 300 ms.")] = True,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure frame and word latency of calls through the whole system, what a channel costs, and how many channels it carries."""
    from rich.console import Console

    from ops.bench.system import measure_system

    people = Console(stderr=True, highlight=False)
    found = measure_system(channels or _CHANNELS, seconds, people, engine=engine, model_dir=model_dir, search=search)
    _leave(found, json_file, plot)
    _check_lost(run for run in found["results"]["runs"] if run["channels"] in (channels or _CHANNELS))


@bench.command()
def stages(
    channels: Annotated[int, typer.Option(min=1, help="How many channels.")] = 50,
    seconds: SecondsOption = 60.0,
    engine: EngineOption = None,
    model_dir: ModelOption = None,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure which part takes which share of the processor time, in one run of the whole system."""
    from rich.console import Console

    from ops.bench.system import measure_stages

    found = measure_stages(channels, seconds, Console(stderr=True, highlight=False), engine=engine, model_dir=model_dir)
    _leave(found, json_file, plot)
    _check_lost([found["results"]])


@bench.command()
def engine(
    batches: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Channels to a step; repeat it.  [1, 10, 30, 50]")] = None,
    precisions: Annotated[
        list[_Precision] | None, typer.Option("--precision", help="What to compute in; repeat it.  [all that the device has]")
    ] = None,
    device: Annotated[_Device, typer.Option(help="Where to compute.")] = _Device.CPU,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.  [all cores]")] = None,
    model_dir: ModelOption = None,
    large: Annotated[bool, typer.Option("--large/--no-large", help="Also time a random model of 35 M parameters.")] = True,
    pacing: Annotated[bool, typer.Option("--pacing/--no-pacing", help="Also hold the adaptive pacing against fixed ones.")] = True,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure the engine's steps by batch and precision, and adaptive batching against fixed sizes."""
    import torch

    from ops.bench.engine import BATCHES, measure_engine
    from streams.errors import UserError

    if device is _Device.CUDA and not torch.cuda.is_available():
        raise UserError("No GPU can be used here", "Leave --device out, or see whether nvidia-smi shows one.")
    found = measure_engine(
        batches=batches or BATCHES,
        precisions=[precision.value for precision in precisions] if precisions else None,
        device=device.value,
        threads=threads,
        model_dir=model_dir,
        large=large,
        pacing=pacing,
        tell=_tell(),
    )
    _leave(found, json_file, plot)


@bench.command()
def sherpa(
    model_dir: ModelOption = None,
    p95_ms: Annotated[float, typer.Option("--p95-ms", min=1, help="Latency that 95 % of the frames must keep.")] = 100.0,
    seconds: Annotated[float, typer.Option(min=3, max=19, help="How long each trial plays.")] = 5.0,
    precision: Annotated[_Precision | None, typer.Option(help="Of ours, besides fp32.  [the fastest one here]")] = None,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Compare with sherpa-onnx: same weights, same audio, same cores: how many channels at equal latency?"""
    import tempfile

    from ops.bench.models import model_directory
    from ops.bench.sherpa import compare

    with tempfile.TemporaryDirectory(prefix="asr-bench-") as folder:
        model = model_directory(model_dir, Path(folder))
        found = compare(model, p95_ms=p95_ms, seconds=seconds, precision=precision.value if precision else None, tell=_tell())
    _leave(found, json_file, plot)


@bench.command()
def finals(
    hours: Annotated[float, typer.Option(min=0.01, help="Hours of calls; each way takes all of them.")] = 10.0,
    channels: Annotated[int, typer.Option(min=1, help="Calls' channels at the same time.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Which calls.")] = 0,
    all_ways: Annotated[bool, typer.Option("--all-ways/--few-ways", help="Six ways, each thing by itself, instead of two.")] = False,
    resume: Annotated[bool, typer.Option("--resume/--anew", help="Go on from what the JSON file holds, if it is there.")] = False,
    model_dir: ModelOption = None,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Compare finals: alone and in company, in frames of other sizes, as a backlog, after restarts. Exit code 1 if any differ.

    The JSON file is written after every wave of calls, so it may be looked at meanwhile, and Ctrl-C loses no more than a wave: --resume
    goes on from there.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from ops.bench.finals import ALL_WAYS, WAYS, compare_finals
    from ops.bench.report import read_document, write_document

    kept = None if json_file is None or str(json_file) == "-" else json_file

    def keep(found: Document) -> None:
        if kept is not None:
            write_document(found, kept)

    ways = ALL_WAYS if all_ways else WAYS
    begun = read_document(kept) if resume and kept is not None and kept.exists() else None
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with (
        quietened(logging.ERROR, "agents.inference"),
        # That the engine cannot keep up with a backlog is what some ways are for.
        quietened(logging.CRITICAL, "agents.inference.batcher"),
        Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as progress,
    ):
        task = progress.add_task("Calls are made up", total=hours * len(ways))

        def tell(done_hours: float, line: str) -> None:
            progress.update(task, completed=done_hours, description=line)

        found = compare_finals(hours, channels, model_dir=model_dir, ways=ways, seed=seed, begun=begun, tell=tell, keep=keep)
    _leave(found, json_file, plot)
    if any(way["differing"] for way in found["results"]["ways"]):
        raise typer.Exit(_EXIT_LOST)


@bench.command(name="all")
def everything(
    folder: Annotated[Path, typer.Option("--output-dir", help="Where JSON and plots go.")] = Path("var/bench"),
    model_dir: ModelOption = None,
) -> None:
    """Run system, stages, engine and, where it is installed, the comparison with sherpa-onnx: about 20 minutes. Finals are left out."""
    import importlib.util

    folder.mkdir(parents=True, exist_ok=True)

    def files(name: str) -> dict[str, Any]:
        return {"json_file": folder / f"{name}.json", "plot": folder / f"{name}.png"}

    benchmarks: dict[str, Callable[..., None]] = {"system": system, "stages": stages, "engine": engine}
    if importlib.util.find_spec("sherpa_onnx") is not None:
        benchmarks["sherpa"] = sherpa
    failed = False
    for name, measure in benchmarks.items():
        try:
            measure(model_dir=model_dir, **files(name))
        except typer.Exit:
            failed = True  # frames were lost: it has been told, and the others can still be measured
    if failed:
        raise typer.Exit(_EXIT_LOST)


@bench.command()
def render(
    files: Annotated[list[Path], typer.Argument(help="JSON files that benchmarks wrote.", metavar="FILE...")],
    into: Annotated[Path | None, typer.Option("--into", help="Put the tables into their places in this page.", metavar="PAGE")] = None,
) -> None:
    """Turn JSON files into tables in Markdown, or fill the page docs/benchmarks.md."""
    from ops.bench.render import fill_page, tables_of
    from ops.bench.report import conditions_line, read_document
    from streams.errors import UserError

    documents = [read_document(file) for file in files]
    if into is None:
        for found in documents:
            tables = "\n\n".join(table.markdown() for table in tables_of(found))
            typer.echo(f"{tables}\n\nMeasured on {conditions_line(found)}.\n")
        return
    try:
        into.write_text(fill_page(into.read_text(encoding="utf-8"), documents), encoding="utf-8")
    except OSError as refused:
        raise UserError(f"{into} cannot be read or written ({refused.strerror})") from refused
