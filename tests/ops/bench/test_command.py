from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops import cli
from ops.bench.report import document, write_document

PAGE = "# Benchmarks\n<!-- bench:engine -->\nNot measured yet.\n<!-- /bench:engine -->\n"
STEP = {"p50": 1.5, "p95": 20.0, "p99": 30.0, "max": 40.0, "count": 9}
ROW = {
    "model": "8x128",
    "parameters": 3_700_000,
    "precision": "bf16",
    "batch": 10,
    "step_ms": STEP,
    "encoder_ms": STEP,
    "agrees_with_fp32": 1.0,
}


@pytest.fixture
def engine_json(tmp_path: Path) -> Path:
    file = tmp_path / "engine.json"
    write_document(document("engine", {"device": "cpu", "threads": 2}, {"steps": [ROW], "pacing": []}), file)
    return file


def asr(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_page_is_filled_from_what_was_measured(engine_json: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert asr("render", engine_json, "--into", page) == (0, "")
    filled = page.read_text()
    assert "| 8x128, 3.7 M | bf16 | 10 | 1.5 |" in filled
    assert "Not measured" not in filled
    code, shown = asr("render", engine_json)
    assert code == 0
    assert "| 8x128, 3.7 M | bf16 | 10 | 1.5 |" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("render", "nowhere.json"), "nowhere.json cannot be read"),
        (("render", "{file}", "--into", "nowhere.md"), "nowhere.md cannot be read or written"),
        (("render", "{file}", "--into", "{empty}"), "no place for engine"),
        (("system", "--model-dir", "nowhere", "--engine", "conformer"), "nowhere holds no WeNet model"),
        (("engine", "--model-dir", "nowhere"), "nowhere holds no WeNet model"),
        (("sherpa", "--seconds", "30"), "--seconds"),
    ],
)
def test_a_mistake_is_told_in_a_line(arguments: tuple[str, ...], says: str, engine_json: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.md"
    empty.write_text("")
    code, shown = asr(*(each.format(file=engine_json, empty=empty) for each in arguments))
    assert code == 2
    assert says in shown
    assert "Traceback" not in shown
