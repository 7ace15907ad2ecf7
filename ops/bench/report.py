"""What a benchmark leaves: a document with its conditions and results, and tables of it for people.

A document is plain JSON: ``benchmark`` names it, ``surroundings`` says on what it ran, ``conditions`` how, ``results`` is what was found.
Everything that is shown, in the terminal, in a plot, or in ``docs/benchmarks.md``, is made from such documents, never by hand.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ops.measure import cores, latency_of, processor
from streams.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

__all__ = ["Document", "Table", "distribution", "document", "fill", "read_document", "show", "surroundings", "write_document"]

Document = dict[str, Any]

_VERSIONS_OF: Final = ("asr-streams", "torch", "numpy", "onnxruntime", "faust-streaming", "aiokafka", "confluent-kafka", "sherpa-onnx")
_BEGIN, _END = "<!-- bench:{} -->", "<!-- /bench:{} -->"
_PERCENTILES: Final = ("p50", "p95", "p99", "max")


@dataclass(frozen=True, slots=True)
class Table:
    """Figures for people.

    Attributes:
        title: what they are, with the unit.
        headings: of the columns.
        rows: as many cells as headings.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return it as Markdown; columns of figures are aligned to the right."""
        figures = [all(_is_figure(row[column]) for row in self.rows) for column in range(len(self.headings))]
        lines = [self.headings, tuple("---:" if right else "---" for right in figures), *self.rows]
        return f"{self.title}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


_FIGURE: Final = re.compile(r"[<>+-]?[\d.,]+( ?%)?|-|none")


def _is_figure(cell: str) -> bool:
    return _FIGURE.fullmatch(cell) is not None


def surroundings() -> dict[str, Any]:
    """Return on what is measured: processor, cores, system, and the versions of what takes the time."""
    found = {}
    for name in _VERSIONS_OF:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": processor(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "versions": found,
    }


def document(benchmark: str, conditions: Mapping[str, Any], results: Any) -> Document:
    """Return what a benchmark leaves."""
    return {"benchmark": benchmark, "surroundings": surroundings(), "conditions": dict(conditions), "results": results}


def distribution(values_ms: NDArray[np.float64] | Sequence[float]) -> dict[str, Any]:
    """Return P50, P95, P99 and the most of some times in ms, and how many they are."""
    return {**msgspec.to_builtins(latency_of(values_ms)), "count": len(values_ms)}


def percentiles(found: Mapping[str, Any], names: Iterable[str] = _PERCENTILES) -> tuple[str, ...]:
    """Return a distribution as cells."""
    return tuple(figure(found[name]) for name in names)


def figure(value: float | None, digits: int | None = None) -> str:
    """Return a number as a cell: three figures where nothing else is wished.

    >>> figure(3.14159), figure(31.4159), figure(314.159), figure(None), figure(0.5, 2)
    ('3.1', '31', '314', '-', '0.50')
    """
    if value is None:
        return "-"
    if digits is None:
        digits = 1 if abs(value) < 10 else 0
    return f"{value:.{digits}f}"


def conditions_line(found: Document) -> str:
    """Return under what a document was measured."""
    around = found["surroundings"]
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    return f"{around['processor']}, {around['cores']} cores; {around['system']}, Python {around['python']}, {versions}"


def show(tables: Iterable[Table], console: Console) -> None:
    """Print tables."""
    from rich.table import Table as RichTable

    for table in tables:
        shown = RichTable(title=table.title)
        for column, heading in enumerate(table.headings):
            shown.add_column(heading, justify="right" if all(_is_figure(row[column]) for row in table.rows) else "left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)


def write_document(found: Document, file: Path) -> None:
    """Write a document.

    Raises:
        UserError: the file cannot be written.
    """
    from streams.output import write_json

    write_json(file, found)


def read_document(file: Path) -> Document:
    """Read a document.

    Raises:
        UserError: it is not one.
    """
    try:
        found = msgspec.json.decode(file.read_bytes())
    except OSError as refused:
        raise UserError(f"{file} cannot be read ({refused.strerror})") from refused
    except msgspec.DecodeError as damaged:
        raise UserError(f"{file} is not JSON ({damaged})", "Write it anew with asr bench … --json.") from damaged
    if not (isinstance(found, dict) and {"benchmark", "surroundings", "conditions", "results"} <= found.keys()):
        raise UserError(f"{file} holds no benchmark", "Write it anew with asr bench … --json.")
    return found


def fill(page: str, benchmark: str, content: str) -> str:
    """Put content between a benchmark's marks in a page.

    >>> print(fill("a <!-- bench:x --> old <!-- /bench:x --> b", "x", "new"))
    a <!-- bench:x -->
    new
    <!-- /bench:x --> b

    Raises:
        UserError: the page has no such marks.
    """
    begin, end = _BEGIN.format(benchmark), _END.format(benchmark)
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise UserError(f"The page has no place for {benchmark}", f"Write {begin} and {end} where it belongs.")
    return f"{before}{begin}\n{content}\n{end}{after}"
