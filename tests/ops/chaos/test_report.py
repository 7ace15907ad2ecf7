from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from rich.console import Console

from ops.chaos.checker import Verdict
from ops.chaos.health import Growth, Lag, Sample, growths
from ops.chaos.report import as_json, draw, faults, show
from ops.chaos.run import Outcome
from ops.chaos.takeover import Answers, Mark, measure

S = 1_000_000


def outcome(**more: object) -> Outcome:
    captured_us = np.arange(0, 60 * S, 200_000, dtype=np.int64)
    late_us = np.where((captured_us >= 20 * S) & (captured_us < 21 * S), 22 * S - captured_us, 60_000)
    answers = {"1": Answers(1, captured_us, captured_us + late_us), "2": Answers(2, captured_us, captured_us + 60_000)}
    marks = [
        Mark(at_us=20 * S, what="kill", kind="kill", target="vad-0", partitions=(1,)),
        Mark(at_us=40 * S, what="kill", kind="broker", target="broker-1", everybody=True, sole=True),
    ]
    fields: dict[str, object] = {
        "verdict": Verdict(sessions=2, frames_sent=600, finals=7),
        "times": measure(marks, answers, 60 * S),
        "kills": 2,
        "deaths": [],
        "answers": answers,
        "begun_us": 0,
        "ended_us": 60 * S,
        "lags": [Lag(S, "asr.audio", 1, 0, 10), Lag(55 * S, "asr.audio", 1, 0, 290), Lag(59 * S, "asr.audio", 1, 20, 310)],
        "lag_at_end": [],
        "growths": [],
        "samples": [],
    }
    return Outcome(**{**fields, **more})  # type: ignore[arg-type]


def test_what_programs_look_for_is_there() -> None:
    result = as_json(outcome(), {"channels": 2})
    assert (result["kills"], result["frames_lost"], result["finals_changed"], result["gaps_filled"]) == (2, 0, 0, 0)
    assert result["takeover_ms"] == {"count": 1, "p50": 2000, "p95": 2000, "max": 2000}
    assert result["stall_ms"]["max"] == 60
    # The only broker has nobody who could take over, and is told of apart; it cost nothing here.
    assert result["outage_ms"]["count"] == 0
    # At 59 s, 20 records were not committed, and none of them was there at 55 s.
    assert result["committed_lag"] == {"s_max": 4.0, "topic": "asr.audio", "partition": 1, "at_s": 59.0, "records_at_end": 0}
    assert result["faults"] == {}
    assert result["marks"][0]["takeover_ms"] == 2000


def test_every_fault_is_told() -> None:
    leaky = Growth("vad-0.1", 90.0, rss_bytes=200 * 2**20, threads=0, handles=0)
    found = faults(
        outcome(
            verdict=Verdict(frames_lost=1, finals_in_two_versions=2),
            deaths=["The vad-0.1 ended"],
            growths=[leaky, Growth("vad-1.1", 90.0, 5, 1, 2)],
            lags=[Lag(S, "asr.audio", 1, 0, 10), Lag(123 * S, "asr.audio", 1, 300, 310)],
            broken_off="in 3 of 3: broker: it did not come back",
            ended_us=130 * S,
        )
    )
    assert found.pop("broken_off") == "in 3 of 3: broker: it did not come back"
    assert found == {"frames_lost": 1, "finals_in_two_versions": 2, "deaths": 1, "committed_lag_s": 122.0, "leaks": ["vad-0.1"]}


def test_a_person_reads_figures_and_faults(tmp_path: Path) -> None:
    ran = outcome(verdict=Verdict(frames_lost=1, findings=["channel 1: one frame was not answered"]))
    written = io.StringIO()
    show(as_json(ran, {"channels": 2}), Console(file=written, width=120))
    assert "2 kills, 2 channels, 60 s" in written.getvalue()
    assert "frames_lost: 1" in written.getvalue()
    assert "channel 1: one frame was not answered" in written.getvalue()
    draw(ran, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_growth_is_told_of_processes_that_lived_long_enough() -> None:
    def life(name: str, seconds: int, leak_bytes: int) -> list[Sample]:
        return [Sample(at * S, name, 1_000_000 + leak_bytes * at, 5, 9 + at // 50) for at in range(0, seconds, 2)]

    found = {growth.life: growth for growth in growths([*life("short", 60, 10), *life("flat", 150, 0), *life("leaky", 150, 1_000)])}
    assert found.keys() == {"flat", "leaky"}
    assert (found["flat"].rss_bytes, found["flat"].threads) == (0, 0)
    assert 50_000 <= found["leaky"].rss_bytes <= 80_000
    assert found["leaky"].handles > 0
