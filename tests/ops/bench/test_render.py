from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ops.bench.render import draw, fill_page, tables_of
from ops.bench.report import Document, document
from streams.errors import UserError

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"
MS = {"p50": 1.5, "p95": 20.0, "p99": 300.0, "max": 400.0, "count": 9}
NOTHING = {"p50": None, "p95": None, "p99": None, "max": None, "count": 0}
RUN = {
    "channels": 10,
    "case": "kafka and faust alone",
    "frame_latency_ms": MS,
    "word_latency_ms": NOTHING,
    "frames_within_300_ms": 0.987,
    "frames_sent": 1_500,
    "frames_lost": 0,
    "cpu_cores": {"broker": 0.1, "engine": 0.25},
}
STEP = {
    "model": "8x128",
    "parameters": 3_700_000,
    "precision": "bf16",
    "batch": 10,
    "step_ms": MS,
    "encoder_ms": MS,
    "agrees_with_fp32": 0.995,
}
CASE = {
    "case": "sherpa-onnx fp32",
    "most_channels": 40,
    "channels_per_core": 20.0,
    "trials": [{"channels": 40, "cpu_cores": 1.5, "finished": True, "latency_ms": MS}],
}
WAY = {
    "way": "alone",
    "finals": 100,
    "words": 900,
    "differing": {"text": 2},
    "confidences_differing": 0,
    "took_s": 1.0,
    "cpu_s": 1.0,
    "segments_per_step": 1.0,
    "examples": [],
}
RESULTS: dict[str, tuple[dict[str, Any], Any]] = {
    "road": ({"seconds": 30}, {"runs": [RUN]}),
    "system": ({"engine": "conformer", "promised_ms": 300}, {"runs": [RUN, {**RUN, "channels": 50}], "most_channels": 72}),
    "stages": (
        {"channels": 50, "engine": "conformer"},
        {**RUN, "cpu_cores": {"encoder": 0.4, "denoising": 0.1}, "preprocessing_share": 0.2, "preprocessing_ms_per_frame_of_50": 20.0},
    ),
    "engine": (
        {"device": "cpu", "threads": 2},
        {"steps": [STEP], "pacing": [{"channels": 10, "pacing": "adaptive", "latency_ms": MS, "blocks_per_step": 3.5, "cpu_cores": 0.1}]},
    ),
    "sherpa": (
        {"p95_ms": 100.0, "threads": 2, "parameters": 3_700_000},
        {
            "texts": {"clips": 20, "same": 20, "differing": []},
            "cases": [CASE, {**CASE, "case": "ours bf16", "most_channels": 0, "trials": []}],
        },
    ),
    "finals": ({}, {"hours": 10.1, "ways": [WAY]}),
}


def made(benchmark: str) -> Document:
    conditions, results = RESULTS[benchmark]
    return document(benchmark, conditions, results)


@pytest.mark.parametrize("benchmark", RESULTS)
def test_every_benchmark_has_tables_and_a_plot(benchmark: str, tmp_path: Path) -> None:
    tables = tables_of(made(benchmark))
    assert tables
    for table in tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.headings)}
    draw(made(benchmark), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_a_place_for_every_benchmark_and_is_filled_from_documents_alone() -> None:
    documents = [made(benchmark) for benchmark in RESULTS]
    page = fill_page(PAGE.read_text(encoding="utf-8"), documents)
    assert "| 10 | 1.5 | 20 | 300 | 400 | 98.7% |" in page
    assert "the most channels with P95 ≤ 300 ms: 72" in page
    assert fill_page(page, documents) == page


def test_a_gpu_has_a_column_more() -> None:
    found = made("engine")
    found["conditions"] |= {"device": "cuda", "gpu": "a card"}
    found["results"] = {"steps": [{**STEP, "encoder_without_graphs_ms": MS}], "pacing": []}
    (table,) = tables_of(found)
    assert "without graphs" in table.headings
    assert "a card" in table.title


def test_a_benchmark_of_another_release_is_refused() -> None:
    with pytest.raises(UserError, match="no benchmark 'weather'"):
        tables_of(document("weather", {}, {}))
