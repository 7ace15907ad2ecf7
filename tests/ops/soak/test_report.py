"""What a soak says, from samples that are made up: a leak is named, breathing is not, and the picture is drawn."""

from __future__ import annotations

import io
import math
from pathlib import Path

from rich.console import Console

from ops.soak.report import as_json, draw, show
from ops.soak.run import Tally
from ops.soak.vitals import Held, Latencies, Sample


def samples(leak_bytes_per_call: float = 0.0, handles_per_call: float = 0.0) -> list[Sample]:
    """Ten minutes, 10,000 calls: the gateway fills for a minute, everything breathes, the broker takes what it likes."""
    made = []
    for number in range(121):
        calls = number * 83
        breath = 3e6 * math.sin(number / 5)
        filling = min(number, 12) * 4_000_000
        made.append(
            Sample(
                at_s=number * 5.0,
                calls=calls,
                open_calls=10,
                processes={
                    "inference worker": Held(
                        rss_bytes=round(300e6 + breath + leak_bytes_per_call * calls),
                        threads=30,
                        handles=round(60 + handles_per_call * calls),
                    ),
                    "gateway": Held(rss_bytes=round(90e6 + filling + breath), threads=12, handles=40),
                    "broker": Held(rss_bytes=round(300e6 + 20_000 * calls), threads=90, handles=400),
                },
                topic_bytes={"audio": 1_000_000 * number, "sessions": 200_000},
                latency=Latencies(frames=400, p50_ms=80.0, p95_ms=140.0, max_ms=300.0),
            )
        )
    return made


def report_of(taken: list[Sample]) -> dict[str, object]:
    tally = Tally(begun=9_960, over=9_960, frames_sent=79_680, frames_answered=79_680, finals=9_960, hotwords_pushed=60)
    return as_json(taken, tally, {"calls": 9_960}, 600.0)


def shown(report: dict[str, object]) -> str:
    text = io.StringIO()
    show(report, Console(file=text, width=160))
    return text.getvalue()


def test_breathing_filling_and_java_are_no_growth() -> None:
    report = report_of(samples())
    assert report["flat"] is True
    assert (report["calls"], report["frames_lost"], report["finals_different"]) == (9_960, 0, 0)
    assert "Nothing grows." in shown(report)


def test_a_leak_of_an_object_for_each_call_is_named() -> None:
    report = report_of(samples(leak_bytes_per_call=2_000))
    assert report["flat"] is False
    assert [growth["name"] for growth in report["growth"] if not growth["is_flat"]] == ["inference worker rss_bytes"]  # type: ignore[attr-defined]
    assert "Something grows." in shown(report)


def test_a_handle_for_every_two_hundred_calls_is_named() -> None:
    report = report_of(samples(handles_per_call=0.005))
    assert [growth["name"] for growth in report["growth"] if not growth["is_flat"]] == ["inference worker handles"]  # type: ignore[attr-defined]


def test_a_run_that_is_too_short_is_not_called_flat() -> None:
    assert report_of(samples()[:4])["flat"] is False


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(samples(), tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
