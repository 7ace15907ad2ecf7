"""``asr bench``: what the road costs. Continuous calls through the whole system, with an engine that answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from streams.output import JsonOption, write_json

__all__ = ["bench"]

_DEFAULT_SECONDS: Final = 30.0
_DEFAULT_CHANNELS: Final = (10, 30, 50)
_MIN_PARTITIONS: Final = 8

#: What is switched off in each case. The engine is ``instant`` in all: it takes blocks and answers at once, with no text.
_CASES: Final[Mapping[str, dict[str, Any]]] = {
    "kafka and faust alone": {"vad": "off", "feature_kind": "none"},
    "with detection and features": {"vad": "fusion", "feature_kind": "fbank"},
}


def bench(
    channels: Annotated[list[int] | None, typer.Option(min=1, help="How many channels; repeat it for several runs.  [10, 30, 50]")] = None,
    seconds: Annotated[float, typer.Option(min=5, help="How long each run plays.")] = _DEFAULT_SECONDS,
    json_file: JsonOption = None,
) -> None:
    """Measure frame latency (capture to answer readable) through Kafka and all stages, at 10, 30 and 50 channels.

    The engine answers at once, so this is the cost of the road: first of Kafka and Faust alone, then with detection and features. Each
    figure is a distribution over all frames of one run. Leave the machine alone meanwhile.
    """
    # Not for --help.
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from ops.demo.run import run_demo
    from streams.settings import load_settings

    console = Console(stderr=True, highlight=False)
    runs = []
    for count in channels or _DEFAULT_CHANNELS:
        for case, switched_off in _CASES.items():
            console.print(f"[bold]{count} channels, {case}[/bold]")
            wishes = {"engine": "instant", "partitions": max(_MIN_PARTITIONS, count), **switched_off}
            report = run_demo(load_settings(**wishes), wishes, console, channels=count, seconds=seconds, headless=True, seed=0)
            runs.append({"case": case, **msgspec.to_builtins(report)})
    if json_file is not None:
        write_json(json_file, {"runs": runs})
    table = Table(title=f"Frame latency in ms ({runs[0]['processor']}, {runs[0]['cores']} cores)")
    for heading in ("channels", "case", "P50", "P95", "P99", "max", "frames", "lost"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for run in runs:
        latency = run["frame_latency_ms"]
        figures = ("-" if latency[key] is None else f"{latency[key]:.0f}" for key in ("p50", "p95", "p99", "max"))
        table.add_row(str(run["channels"]), run["case"], *figures, str(run["frames_sent"]), str(run["frames_lost"]))
    console.print(table)
    if any(run["frames_lost"] for run in runs):
        raise typer.Exit(1)
