"""What a soak came to: as JSON, as a table, and as a picture over the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from ops.measure import cores, processor
from ops.soak.growth import Growth, after_warm_up, trend
from ops.soak.run import Tally
from ops.soak.vitals import Sample

__all__ = ["BOUND_BYTES_PER_CALL", "as_json", "draw", "growths", "show"]

#: 10 MiB in 10,000 calls: allocators and caches breathe by more than that, a leak of one object for each call is far above.
BOUND_BYTES_PER_CALL: Final = 1_048.576
#: Less than one in 10,000 calls.
_BOUND_COUNT_PER_CALL: Final = 0.5 / 10_000
#: Java takes memory up to its limit as it likes, and the topics of the soak fill before the first of them are cleaned.
_NOT_JUDGED: Final = frozenset({"broker"})
#: The first part fills caches, and what is kept for a while.
_WARM_SHARE: Final = 0.25
#: What the gateway and the brokers remember in a soak, and a sweep on top.
_WARM_S: Final = 90.0
_MIB: Final = 2**20
_DPI: Final = 110


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Return how everything that processes hold changed with the calls, warm-up left out."""
    from_sample = after_warm_up([sample.at_s for sample in samples], share=_WARM_SHARE, least_s=_WARM_S)
    warm = samples[from_sample:]
    found = []
    for role in sorted({role for sample in warm for role in sample.processes}):
        mine = [(float(sample.calls), sample.processes[role]) for sample in warm if role in sample.processes]
        calls = [over for over, _ in mine]
        for what, unit, bound in (
            ("rss_bytes", "bytes", BOUND_BYTES_PER_CALL),
            ("handles", "", _BOUND_COUNT_PER_CALL),
            ("threads", "", _BOUND_COUNT_PER_CALL),
        ):
            values = [float(getattr(held, what)) for _, held in mine]
            grown = trend(f"{role} {what}", unit, calls, values, None if role in _NOT_JUDGED else bound)
            found += [grown] if grown is not None else []
    for topic in sorted({topic for sample in warm for topic in sample.topic_bytes}):
        values = [float(sample.topic_bytes.get(topic, 0)) for sample in warm]
        grown = trend(f"topic {topic}", "bytes", [float(sample.calls) for sample in warm], values, None)
        found += [grown] if grown is not None else []
    return found


def as_json(samples: Sequence[Sample], tally: Tally, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return what was found. These keys are what programs look for, and stay as they are."""
    found = growths(samples)
    return {
        "calls": tally.over,
        "seconds": round(seconds, 1),
        "frames_lost": tally.frames_lost,
        "finals_different": tally.finals_different,
        "flat": bool(found) and all(growth.is_flat for growth in found),
        "growth": [{**msgspec.to_builtins(growth), "is_flat": growth.is_flat} for growth in found],
        "tally": {**asdict(tally), "failures": dict(tally.failures)},
        "samples": [msgspec.to_builtins(sample) for sample in samples],
        "arguments": arguments,
        "processor": processor(),
        "cores": cores(),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print what grew, and by how much."""
    table = Table("", "at first", "at last", "most", "for each call", "bound", box=None, header_style="bold")
    for growth in report["growth"]:
        in_bytes = growth["unit"] == "bytes"
        first, last, most = (_amount(growth[name], in_bytes=in_bytes) for name in ("first", "last", "most"))
        bound = growth["bound_per_call"]
        judged = "" if bound is None else f"{bound:,.0f} B" if in_bytes else f"{bound:g}"
        per_call = f"{growth['per_call']:+,.1f} B" if in_bytes else f"{growth['per_call']:+.5f}"
        style = "" if growth["is_flat"] else "red"
        table.add_row(growth["name"].replace("_bytes", ""), first, last, most, per_call, judged, style=style)
    console.print(table)
    tally = report["tally"]
    a_second = report["calls"] / report["seconds"]
    console.print(
        f"{report['calls']} of {tally['begun']} calls over in {report['seconds']:.0f} s ({a_second:.1f} a second); "
        f"frames: {tally['frames_sent']} sent, {tally['frames_answered']} answered, {tally['frames_lost']} lost; "
        f"{tally['finals']} finals, {tally['finals_different']} different; {tally['hotwords_pushed']} lists of hotwords, "
        f"{tally['visits']} visits to the live page."
    )
    for failure, times in tally["failures"].items():
        console.print(f"{times} times: {failure}", style="red", markup=False)
    console.print("Nothing grows." if report["flat"] else "Something grows.", style="green" if report["flat"] else "red")


def _amount(value: float, *, in_bytes: bool) -> str:
    return f"{value / _MIB:,.1f} MiB" if in_bytes else f"{value:,.0f}"


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draw memory, handles and threads, topics and latency over the calls."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 12), layout="constrained")
    memory, counts, topics, latency = figure.subplots(4, 1, sharex=True)
    calls = [sample.calls for sample in samples]
    for number, role in enumerate(sorted({role for sample in samples for role in sample.processes})):
        at, held = zip(*[(sample.calls, sample.processes[role]) for sample in samples if role in sample.processes], strict=True)
        memory.plot(at, [one.rss_bytes / _MIB for one in held], color=f"C{number}", label=role)
        counts.plot(at, [one.handles for one in held], color=f"C{number}", label=f"{role}: handles")
        counts.plot(at, [one.threads for one in held], color=f"C{number}", linestyle=":", label=f"{role}: threads")
    for topic in sorted({topic for sample in samples for topic in sample.topic_bytes}):
        topics.plot(calls, [max(1, sample.topic_bytes.get(topic, 0)) / _MIB for sample in samples], label=topic)
    for name, label in (("p50_ms", "P50"), ("p95_ms", "P95"), ("max_ms", "max")):
        known = [(sample.calls, getattr(sample.latency, name)) for sample in samples if sample.latency.frames]
        latency.plot(*zip(*known, strict=True), label=label) if known else None
    memory.set(ylabel="memory, MiB", ylim=(0, None))
    counts.set(ylabel="handles, threads", ylim=(0, None))
    topics.set(ylabel="topics on disk, MiB", yscale="log")
    latency.set(ylabel="frame latency, ms", ylim=(0, None), xlabel="calls that are over")
    for axes in (memory, counts, topics, latency):
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.savefig(path, dpi=_DPI)
