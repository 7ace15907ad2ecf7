"""Benchmarks for people: tables and plots, made from documents alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ops.bench import engine, finals, road, sherpa, system
from ops.bench.report import Document, Table, conditions_line, fill
from streams.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "fill_page", "tables_of"]

_TABLES: Final[Mapping[str, Callable[[Document], list[Table]]]] = {
    "road": road.tables,
    "system": system.tables,
    "stages": system.stage_tables,
    "engine": engine.tables,
    "sherpa": sherpa.tables,
    "finals": finals.tables,
}
_DPI: Final = 110
_PROMISED_MS: Final = 300


def tables_of(found: Document) -> list[Table]:
    """Return a document's tables.

    Raises:
        UserError: it is of another program's making.
    """
    try:
        make = _TABLES[found["benchmark"]]
    except KeyError:
        raise UserError(f"There is no benchmark {found['benchmark']!r}", f"Known are: {', '.join(_TABLES)}.") from None
    return make(found)


def fill_page(page: str, documents: Sequence[Document]) -> str:
    """Return a page with the documents' tables in their places, each with what it was measured on."""
    for found in documents:
        parts = [table.markdown() for table in tables_of(found)]
        page = fill(page, found["benchmark"], "\n\n".join([*parts, f"Measured on {conditions_line(found)}."]))
    return page


def draw(found: Document, file: Path) -> None:
    """Draw a document.

    Raises:
        UserError: the file cannot be written, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise UserError("Plots need matplotlib, which is not installed", "Install it: pip install matplotlib.") from missing
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    _PLOTS[found["benchmark"]](axes, found)
    around = found["surroundings"]
    figure.suptitle(f"{around['processor']}, {around['cores']} cores", fontsize=9, color="0.4")
    try:
        figure.savefig(file, dpi=_DPI)
    except OSError as refused:
        raise UserError(f"{file} cannot be written ({refused.strerror})", "Choose another file for --plot.") from refused


def _latencies(axes: Axes, groups: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Draw P50, P95 and P99 of some distributions beside each other."""
    for offset, name in enumerate(("p50", "p95", "p99")):
        places = [place + 0.27 * (offset - 1) for place in range(len(groups))]
        axes.bar(places, [found[name] or 0.0 for _, found in groups], 0.25, label=name.upper())
    axes.set_xticks(range(len(groups)), [label for label, _ in groups], fontsize=8)
    axes.set_ylabel("ms")
    axes.legend()


def _draw_road(axes: Axes, found: Document) -> None:
    runs = found["results"]["runs"]
    _latencies(axes, [(f"{run['channels']} channels\n{run['case']}", run["frame_latency_ms"]) for run in runs])
    axes.set_title("Frame latency, engine that answers at once")


def _draw_system(axes: Axes, found: Document) -> None:
    runs = found["results"]["runs"]
    _latencies(axes, [(f"{run['channels']} channels\n{kind}", run[f"{kind}_latency_ms"]) for kind in ("frame", "word") for run in runs])
    axes.axhline(_PROMISED_MS, color="0.5", linestyle="--", linewidth=1)
    axes.set_title(f"Latency, engine {found['conditions']['engine']}")


def _draw_stages(axes: Axes, found: Document) -> None:
    parts: Mapping[str, float] = found["results"]["cpu_cores"]
    names = list(parts)[::-1]
    shares = [100 * parts[name] / sum(parts.values()) for name in names]
    colours = ["C1" if name in system.PREPROCESSING else "C0" for name in names]
    axes.barh(names, shares, color=colours)
    axes.set(
        xlabel="% of processor time (orange: preprocessing)", title=f"Where the time goes at {found['conditions']['channels']} channels"
    )


def _draw_engine(axes: Axes, found: Document) -> None:
    rows = found["results"]["steps"]
    for number, (model, precision) in enumerate(dict.fromkeys((row["model"], row["precision"]) for row in rows)):
        some = [row for row in rows if (row["model"], row["precision"]) == (model, precision) and row["step_ms"]["p50"] is not None]
        batches = [row["batch"] for row in some]
        middle, late = ([row["step_ms"][name] for row in some] for name in ("p50", "p95"))
        axes.plot(batches, middle, "o-", color=f"C{number}", label=f"{model} {precision}")
        axes.fill_between(batches, middle, late, color=f"C{number}", alpha=0.2)
    axes.set(xlabel="channels in a step of 200 ms", ylabel="ms, P50 to P95", yscale="log", title="Time of a step")
    axes.grid(alpha=0.3, which="both")
    axes.legend()


def _draw_sherpa(axes: Axes, found: Document) -> None:
    cases = found["results"]["cases"]
    bars = axes.bar([case["case"] for case in cases], [case["channels_per_core"] for case in cases])
    axes.bar_label(bars)
    axes.tick_params(axis="x", labelsize=8)
    axes.set(ylabel="channels per core", title=f"Channels of speech with P95 ≤ {found['conditions']['p95_ms']:g} ms, same weights")


def _draw_finals(axes: Axes, found: Document) -> None:
    ways = found["results"]["ways"]
    names = [way["way"] for way in ways]
    axes.barh(names, [way["finals"] for way in ways], color="0.8", label="finals")
    axes.barh(names, [sum(way["differing"].values()) for way in ways], color="C3", label="that differ")
    axes.set_title(f"{found['results']['hours']:.1f} hours of calls")
    axes.legend()


_PLOTS: Final[Mapping[str, Callable[[Axes, Document], None]]] = {
    "road": _draw_road,
    "system": _draw_system,
    "stages": _draw_stages,
    "engine": _draw_engine,
    "sherpa": _draw_sherpa,
    "finals": _draw_finals,
}
