"""What a run of chaos came to: as JSON, as a table, and as a picture of channels over time."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from ops.chaos.health import Growth, Lag
from ops.chaos.run import Outcome
from ops.chaos.takeover import IN_TIME_MS, Answers, Times, distribution
from ops.measure import cores, processor

__all__ = ["PROMISED_STALL_MS", "PROMISED_TAKEOVER_MS", "as_json", "draw", "faults", "show"]

#: What is promised of 95 % of takeovers, and of all stalls.
PROMISED_TAKEOVER_MS: Final = 3_000
PROMISED_STALL_MS: Final = 1_000
#: What a successor reads again begins with an open segment (20 s), or with what was last heard of a call whose recorder was killed, until
#: that is closed: after 30 s here, see ``command.py``, of silence that one VAD has heard. Each takeover of it and each outage of the
#: brokers begins anew; three in a row are to be borne.
_LAG_BOUND_S: Final = 4 * 30.0
#: What a process may grow by in a run without being called leaky: caches fill, arenas do not shrink.
_GROWTH_BOUNDS: Final = {"rss_bytes": 128 * 2**20, "threads": 4, "handles": 16}
_US_PER_S: Final = 1_000_000
#: After a stall, live frames are looked at for so long.
_CATCH_UP_US: Final = 10 * _US_PER_S
_DPI: Final = 110
_COLOURS: Final = {"kill": "#c0392b", "stop": "#8e44ad", "continue": "#2980b9", "leave": "#7f8c8d", "join": "#27ae60"}


def as_json(outcome: Outcome, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what was found. The first keys are what programs look for, and stay as they are."""
    verdict = outcome.verdict
    kills = [times for times in outcome.times if times.mark.what in ("kill", "stop")]
    planned = [times for times in outcome.times if times.mark.what in ("leave", "join")]
    lag = _worst_lag(outcome)
    return {
        "kills": outcome.kills,
        "frames_lost": verdict.frames_lost,
        "finals_changed": verdict.finals_changed,
        "gaps_filled": verdict.gaps_filled,
        "takeover_ms": distribution(_takeovers(kills, sole=False)),
        "stall_ms": distribution(_stalls(outcome.times)),
        "faults": faults(outcome),
        "outage_ms": distribution(_takeovers(kills, sole=True)),
        "handover_ms": distribution(_takeovers(planned, sole=False)),
        "catch_up": _catch_up(outcome),
        "takeover_ms_by_kind": {
            kind: distribution(_takeovers([times for times in kills if times.mark.kind == kind], sole=False))
            for kind in dict.fromkeys(times.mark.kind for times in kills)
        },
        "stall_ms_by_kind": {
            kind: distribution(_stalls([times for times in outcome.times if f"{times.mark.kind} {times.mark.what}" == kind]))
            for kind in dict.fromkeys(f"{times.mark.kind} {times.mark.what}" for times in outcome.times)
        },
        "frame_latency_ms": _latency(outcome.answers),
        "checked": {name: value for name, value in asdict(verdict).items() if name != "findings" and not name.startswith("_")},
        "findings": verdict.findings,
        "deaths": outcome.deaths,
        "committed_lag": {
            "s_max": lag.seconds,
            "topic": lag.topic,
            "partition": lag.partition,
            "at_s": lag.at_s,
            "records_at_end": max((lag.records for lag in outcome.lag_at_end), default=0),
        },
        "growth": [asdict(growth) for growth in outcome.growths],
        "marks": [_mark(times, outcome.begun_us) for times in outcome.times],
        "seconds": round((outcome.ended_us - outcome.begun_us) / _US_PER_S, 1),
        "processor": processor(),
        "cores": cores(),
        "arguments": arguments,
    }


def faults(outcome: Outcome) -> dict[str, Any]:
    """Return what must not be: the verdict's faults, an early end, processes that died by themselves, commits left behind, and leaks."""
    found: dict[str, Any] = dict(outcome.verdict.faults)
    if outcome.broken_off:
        found["broken_off"] = outcome.broken_off
    if outcome.deaths:
        found["deaths"] = len(outcome.deaths)
    if (lag_s := _worst_lag(outcome).seconds) > _LAG_BOUND_S:
        found["committed_lag_s"] = lag_s
    if leaks := [growth.life for growth in outcome.growths if _leaks(growth)]:
        found["leaks"] = leaks
    return found


def _leaks(growth: Growth) -> bool:
    return any(getattr(growth, name) > bound for name, bound in _GROWTH_BOUNDS.items())


def _takeovers(times: list[Times], *, sole: bool) -> list[float]:
    return [value for each in times if each.mark.sole == sole for value in each.takeover_ms.values()]


def _catch_up(outcome: Outcome) -> dict[str, Any] | None:
    """Return how a backlog was taken that all channels had: until when each was answered in time again, and how its live frames fared."""
    ends = [times for times in outcome.times if times.mark.what == "continue" and times.mark.everybody]
    if not ends:
        return None
    until_well_ms = [took_ms for times in ends for took_ms in times.takeover_ms.values()]
    live = []
    for times in ends:
        at_us = times.mark.at_us
        for answers in outcome.answers.values():
            during = (answers.captured_us >= at_us) & (answers.captured_us < at_us + _CATCH_UP_US)
            live.append(answers.latency_ms[during])
    return {
        "until_well_ms": distribution(until_well_ms) | {"min": round(min(until_well_ms)) if until_well_ms else None},
        "channels_never_late": sum(times.untouched for times in ends),
        "channels_not_well_in_the_end": sum(times.unfinished for times in ends),
        "live_frame_latency_ms": distribution(np.concatenate(live).tolist()),
    }


def _stalls(times: list[Times]) -> list[float]:
    return [each.stall_ms for each in times if each.stall_ms is not None]


def _latency(answers: dict[str, Answers]) -> dict[str, Any]:
    latency_ms = np.concatenate([each.latency_ms for each in answers.values()]) if answers else np.empty(0)
    return distribution(latency_ms.tolist()) | {
        "within_300_ms": round(float((latency_ms <= IN_TIME_MS).mean()), 4) if len(latency_ms) else None
    }


class _Lag(NamedTuple):
    """How old the oldest record was that a successor would have read again, and where and when that was."""

    seconds: float
    topic: str = ""
    partition: int = -1
    at_s: float = 0.0


def _worst_lag(outcome: Outcome) -> _Lag:
    """Return the worst lag of the run, to within the time between two looks."""
    during: dict[tuple[str, int], list[Lag]] = defaultdict(list)
    for lag in outcome.lags:
        if outcome.begun_us <= lag.at_us <= outcome.ended_us:
            during[lag.topic, lag.partition].append(lag)
    worst = _Lag(0.0)
    for (topic, partition), looks in during.items():
        for number, lag in enumerate(looks):
            committed = lag.end_offset - lag.records
            # The oldest record that is not committed came after the last look that did not see it yet.
            unseen_us = [before.at_us for before in looks[:number] if before.end_offset <= committed]
            age_s = (lag.at_us - max(unseen_us, default=outcome.begun_us)) / _US_PER_S if lag.records else 0.0
            if age_s > worst.seconds:
                worst = _Lag(round(age_s, 1), topic, partition, round((lag.at_us - outcome.begun_us) / _US_PER_S, 1))
    return worst


def _mark(times: Times, begun_us: int) -> dict[str, Any]:
    mark = times.mark
    return {
        "at_s": round((mark.at_us - begun_us) / _US_PER_S, 2),
        "what": mark.what,
        "kind": mark.kind,
        "target": mark.target,
        "note": mark.note,
        "partitions": list(mark.partitions),
        "takeover_ms": round(max(times.takeover_ms.values())) if times.takeover_ms else None,
        "channels_touched": len(times.takeover_ms),
        "channels_untouched": times.untouched,
        "channels_not_well_before_the_next": times.unfinished,
        "stall_ms": round(times.stall_ms) if times.stall_ms is not None else None,
        "stalled_channel": times.stalled_channel,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print what was found, for people."""
    table = Table(
        title=f"{result['kills']} kills, {result['arguments']['channels']} channels, {result['seconds']:.0f} s", title_justify="left"
    )
    for column in ("", "count", "P50 ms", "P95 ms", "max ms"):
        table.add_column(column, justify="right" if column else "left")
    rows = {
        "takeover": result["takeover_ms"],
        **{f"  {kind}": figures for kind, figures in result["takeover_ms_by_kind"].items() if figures["count"]},
        "stall of others": result["stall_ms"],
        "nobody could take over": result["outage_ms"],
        "planned handover": result["handover_ms"],
        "frame latency": result["frame_latency_ms"],
    }
    for name, figures in rows.items():
        if figures["count"]:
            table.add_row(name, *(str(figures[key]) for key in ("count", "p50", "p95", "max")))
    console.print(table)
    if (caught_up := result["catch_up"]) is not None:
        well_ms, live_ms = caught_up["until_well_ms"], caught_up["live_frame_latency_ms"]
        console.print(
            f"After the stall, {well_ms['count']} channels were in time again after {well_ms['min']} to {well_ms['max']} ms "
            f"(P50 {well_ms['p50']}, P95 {well_ms['p95']}), {caught_up['channels_never_late']} were never late. "
            f"Frames captured in the 10 s after it: P50 {live_ms['p50']}, P95 {live_ms['p95']}, max {live_ms['max']} ms."
        )
    checked = result["checked"]
    console.print(
        f"Frames: {checked['frames_sent']} sent, {checked['frames_lost']} lost. Finals: {checked['finals']}, "
        f"{checked['finals_changed']} changed, {checked['finals_in_two_versions']} in two versions. Gaps filled: {checked['gaps_filled']}. "
        f"Commits at most {result['committed_lag']['s_max']} s behind."
    )
    for name, count in result["faults"].items():
        console.print(f"{name}: {count}", style="red", markup=False)
    for finding in [*result["findings"], *result["deaths"]]:
        console.print(f"  {finding}", style="red", markup=False, soft_wrap=True)


def draw(outcome: Outcome, path: Path) -> None:
    """Draw channels over time: how late each frame was answered, and what was struck when.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    channels = list(outcome.answers)
    seconds = (outcome.ended_us - outcome.begun_us) / _US_PER_S
    figure = Figure(figsize=(min(40.0, 8 + seconds / 20), 2.5 + 0.28 * len(channels)), layout="constrained")
    axes = figure.subplots()
    shown = None
    for row, channel in enumerate(channels):
        answers = outcome.answers[channel]
        at_s = (answers.captured_us - outcome.begun_us) / _US_PER_S
        latency_ms = np.clip(answers.latency_ms, 1, 1e5)
        shown = axes.scatter(
            at_s, np.full(len(at_s), row), c=latency_ms, s=6, marker="s", cmap="RdYlGn_r", norm=LogNorm(30, 3_000), linewidths=0
        )
        gaps = np.flatnonzero(np.diff(answers.captured_us) > _US_PER_S)
        axes.hlines(np.full(len(gaps), row), at_s[gaps], at_s[gaps + 1], color="0.8", linewidth=1)
    for times in outcome.times:
        struck_s = (times.mark.at_us - outcome.begun_us) / _US_PER_S
        colour = _COLOURS[times.mark.what]
        axes.axvline(struck_s, color=colour, linewidth=0.8, alpha=0.8)
        axes.text(
            struck_s, len(channels) - 0.3, f"{times.mark.what} {times.mark.target}", rotation=90, fontsize=6, color=colour, va="bottom"
        )
    if shown is not None:
        figure.colorbar(shown, ax=axes, label="frame latency in ms", pad=0.01)
    axes.set(
        xlabel=f"seconds since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(outcome.begun_us / _US_PER_S))}",
        ylabel="channel",
        xlim=(0, seconds),
        ylim=(-0.7, len(channels) - 0.3),
        yticks=range(len(channels)),
        yticklabels=channels,
    )
    figure.savefig(path, dpi=_DPI)
