"""What the road costs: continuous calls through the whole system, with an engine that answers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ops.bench.report import Document, Table, document, percentiles

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["measure_road", "tables"]

_MIN_PARTITIONS: Final = 8

#: What is switched off in each case. The engine is ``instant`` in all: it takes blocks and answers at once, with no text.
_CASES: Final[Mapping[str, dict[str, Any]]] = {
    "kafka and faust alone": {"vad": "off", "feature_kind": "none"},
    "with detection and features": {"vad": "fusion", "feature_kind": "fbank"},
}


def measure_road(channels: Sequence[int], seconds: float, console: Console) -> Document:
    """Play calls through the system for each number of channels: through Kafka and Faust alone, then with detection and features."""
    from ops.demo.run import run_demo
    from streams.settings import load_settings

    runs = []
    for count in channels:
        for case, switched_off in _CASES.items():
            console.print(f"[bold]{count} channels, {case}[/bold]")
            wishes = {"engine": "instant", "partitions": max(_MIN_PARTITIONS, count), **switched_off}
            report = run_demo(load_settings(**wishes), wishes, console, channels=count, seconds=seconds, headless=True, seed=0)
            runs.append({"case": case, **msgspec.to_builtins(report)})
    return document("road", {"seconds": seconds}, {"runs": runs})


def tables(found: Document) -> list[Table]:
    """Return the runs as a table."""
    rows = tuple(
        (str(run["channels"]), run["case"], *percentiles(run["frame_latency_ms"]), str(run["frames_sent"]), str(run["frames_lost"]))
        for run in found["results"]["runs"]
    )
    headings = ("channels", "case", "P50", "P95", "P99", "max", "frames", "lost")
    return [Table("Frame latency in ms with an engine that answers at once", headings, rows)]
