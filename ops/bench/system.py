"""The whole system under continuous calls: how late frames and words are, what that costs, how many channels it carries.

Processor time is read from the kernel for each process of the system while the calls play, from the third second to the last: what starting
costs is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ops.bench import sampling
from ops.bench.capacity import most_channels
from ops.bench.models import BUNDLED_SIZE, model_directory
from ops.bench.report import Document, Table, document, figure, percentiles

if TYPE_CHECKING:
    import psutil
    from rich.console import Console

    from ops.measure import Report

__all__ = ["PREPROCESSING", "measure_stages", "measure_system", "stage_tables", "tables"]

_MIN_PARTITIONS: Final = 8
_AUDIO_RETENTION_MS: Final = 600_000
_WARM_S: Final = 2.0
_PROMISED_MS: Final = 300
_SEARCH_FIRST: Final = 60
_SEARCH_MOST: Final = 240
_SEARCH_RESOLUTION: Final = 0.1
#: The product's target: for 50 channels, within a frame of 200 ms.
_TARGET_CHANNELS: Final = 50
_FRAME_MS: Final = 200
PREPROCESSING: Final = ("decoding audio", "resampling", "denoising", "detection", "features")
_RECOGNITION: Final = ("encoder", "search", "finals", "writing")


@dataclass(slots=True)
class _Meter:
    """Reads processor time while it is entered: of the processes around, and what their samplers found."""

    seconds: float
    samples: Path | None = None
    #: CPU seconds by process, over :attr:`took_s`.
    used_s: dict[str, float] = field(default_factory=dict)
    parts_s: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0
    _thread: threading.Thread | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Measure, from the third second on, until the calls are over."""
        self._over.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        if self._over.wait(_WARM_S):
            return
        began_s, before = time.time(), _processor_seconds()
        self._over.wait(self.seconds - _WARM_S)
        ended_s, after = time.time(), _processor_seconds()
        self.took_s = ended_s - began_s
        for (pid, role), until_s in after.items():
            self.used_s[role] = self.used_s.get(role, 0.0) + until_s - before.get((pid, role), 0.0)
        if self.samples is not None:
            self.parts_s = sampled_between(self.samples, began_s, ended_s)


def _processor_seconds() -> dict[tuple[int, str], float]:
    """Return the processor time used so far by this process and all below it, by process id and role."""
    import psutil

    own = psutil.Process()
    used: dict[tuple[int, str], float] = {}
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used[process.pid, "recorders and reader" if process == own else _role(process)] = times.user + times.system
    return used


def _role(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    if "kafka.Kafka" in command:
        return "broker"
    if "agents.inference.serve" in command:
        return "engine"
    return f"{process.environ().get('ASR_STAGE') or 'other'} worker"


def sampled_between(folder: Path, from_s: float, to_s: float) -> dict[str, float]:
    """Return the processor time by part that the samplers of a folder found between two moments, in s."""
    used: defaultdict[str, float] = defaultdict(float)
    for file in folder.glob("*.jsonl"):
        stage = file.name.partition("-")[0]
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        during = [line for line in lines if from_s <= line["at_s"] <= to_s]
        if len(during) < 2:
            continue
        # The samplers write once a second: brought to the whole time by what is between their first and last line.
        scale = (to_s - from_s) / (during[-1]["at_s"] - during[0]["at_s"])
        for part, until_s in during[-1]["used_s"].items():
            used[_named(stage, part)] += scale * (until_s - during[0]["used_s"].get(part, 0.0))
    return dict(used)


def _named(stage: str, part: str) -> str:
    """Return the part that libraries' threads work for, and that an engine's own loop belongs to."""
    if part == sampling.NATIVE:
        return {"vad": "detection", "features": "features", "engine": "encoder"}.get(stage, sampling.OTHER)
    if stage == "engine" and part == sampling.OTHER:
        return "batching and passing"
    return part


def _run(settings: Mapping[str, Any], channels: int, seconds: float, console: Console, meter: _Meter) -> Report:
    from ops.demo.run import run_demo
    from streams.settings import load_settings

    wishes = {"partitions": max(_MIN_PARTITIONS, channels), "audio_retention_ms": _AUDIO_RETENTION_MS, **settings}
    return run_demo(
        load_settings(**wishes),
        wishes,
        console,
        channels=channels,
        seconds=seconds,
        headless=True,
        seed=0,
        during_play=meter.playing,
    )


@contextlib.contextmanager
def _engine_settings(engine: str | None, model_dir: Path | None) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the settings of the engine to measure, and what it is: the Conformer, with a random model where there is no other."""
    if engine is not None and engine != "conformer":
        yield {"engine": engine}, engine
        return
    with tempfile.TemporaryDirectory(prefix="asr-bench-") as folder:
        model = model_directory(model_dir, Path(folder))
        what = f"a random {BUNDLED_SIZE.name}" if model == Path(folder) else "the bundled model" if model_dir is None else model_dir.name
        yield {"engine": "conformer", "model_dir": model}, f"conformer, {what}"


def measure_system(
    channels: Sequence[int], seconds: float, console: Console, *, engine: str | None, model_dir: Path | None, search: bool
) -> Document:
    """Measure latency and processor time at some numbers of channels, and find the most that keep the promise."""
    runs: list[dict[str, Any]] = []
    with _engine_settings(engine, model_dir) as (settings, what):

        def run(count: int) -> dict[str, Any]:
            known = next((run for run in runs if run["channels"] == count), None)
            if known is not None:
                return known
            console.print(f"[bold]{count} channels[/bold]")
            meter = _Meter(seconds)
            report = _run(settings, count, seconds, console, meter)
            cpu = {role: round(used_s / meter.took_s, 4) for role, used_s in sorted(meter.used_s.items())} if meter.took_s else {}
            runs.append({**msgspec.to_builtins(report), "cpu_cores": cpu})
            return runs[-1]

        def holds(count: int) -> bool:
            found = run(count)
            p95_ms = found["frame_latency_ms"]["p95"]
            return not found["frames_lost"] and p95_ms is not None and p95_ms <= _PROMISED_MS

        for count in channels:
            run(count)
        most = most_channels(holds, max(_SEARCH_FIRST, *channels), _SEARCH_MOST, _SEARCH_RESOLUTION) if search else None
    conditions = {"seconds": seconds, "engine": what, "promised_ms": _PROMISED_MS}
    return document("system", conditions, {"runs": sorted(runs, key=lambda run: run["channels"]), "most_channels": most})


def measure_stages(channels: int, seconds: float, console: Console, *, engine: str | None, model_dir: Path | None) -> Document:
    """Measure which part of the program takes which share of the processor time, in one run of the whole system."""
    hook = str(resources.files("ops.bench") / "sampler")
    with _engine_settings(engine, model_dir) as (settings, what), tempfile.TemporaryDirectory(prefix="asr-bench-") as folder:
        meter = _Meter(seconds, Path(folder))
        path = os.pathsep.join(filter(None, (hook, os.environ.get("PYTHONPATH"))))
        with _environment({sampling.ENVIRONMENT: folder, "PYTHONPATH": path}):
            report = _run(settings, channels, seconds, console, meter)
    parts = dict(meter.parts_s)
    parts |= {role: used_s for role, used_s in meter.used_s.items() if role in {"broker", "recorders and reader"}}
    preprocessing_s = sum(parts.get(part, 0.0) for part in PREPROCESSING)
    recognition_s = sum(parts.get(part, 0.0) for part in _RECOGNITION)
    took_s = meter.took_s or 1.0
    results = {
        **msgspec.to_builtins(report),
        "cpu_cores": {part: round(used_s / took_s, 4) for part, used_s in sorted(parts.items(), key=lambda item: -item[1])},
        "cpu_cores_by_process": {role: round(used_s / took_s, 4) for role, used_s in sorted(meter.used_s.items())},
        "preprocessing_share": round(preprocessing_s / max(preprocessing_s + recognition_s, 1e-9), 4),
        "preprocessing_ms_per_frame_of_50": round(_FRAME_MS * preprocessing_s / took_s * _TARGET_CHANNELS / channels, 2),
    }
    return document("stages", {"seconds": seconds, "channels": channels, "engine": what}, results)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def tables(found: Document) -> list[Table]:
    """Return latency, and what it costs, as tables."""
    runs: Sequence[Mapping[str, Any]] = found["results"]["runs"]
    frames = tuple(
        (
            str(run["channels"]),
            *percentiles(run["frame_latency_ms"]),
            f"{run['frames_within_300_ms']:.1%}",
            *percentiles(run["word_latency_ms"], ("p50", "p95", "p99")),
            str(run["frames_sent"]),
            str(run["frames_lost"]),
        )
        for run in runs
    )
    headings = ("channels", "frame P50", "P95", "P99", "max", "within 300", "word P50", "P95", "P99", "frames", "lost")
    most = found["results"]["most_channels"]
    carried = f"; the most channels with P95 ≤ {found['conditions']['promised_ms']} ms: {most}" if most is not None else ""
    latency = Table(f"Latency in ms, engine {found['conditions']['engine']}{carried}", headings, frames)
    roles = sorted({role for run in runs for role in run["cpu_cores"]})
    costs = tuple(
        (
            str(run["channels"]),
            figure(1_000 * sum(run["cpu_cores"].values()) / run["channels"], 1),
            *(figure(1_000 * run["cpu_cores"].get(role, 0.0) / run["channels"], 1) for role in roles),
        )
        for run in runs
    )
    return [latency, Table("Processor time in ms per second and channel", ("channels", "all", *roles), costs)]


def stage_tables(found: Document) -> list[Table]:
    """Return the shares as a table."""
    results = found["results"]
    parts: Mapping[str, float] = results["cpu_cores"]
    everything = sum(parts.values())
    channels = found["conditions"]["channels"]
    rows = tuple(
        (part, f"{used / everything:.1%}", figure(1_000 * used, 0), figure(_FRAME_MS * used * _TARGET_CHANNELS / channels, 1))
        for part, used in parts.items()
    )
    title = (
        f"Where the processor time goes at {channels} channels ({found['conditions']['engine']}): "
        f"preprocessing is {results['preprocessing_share']:.0%} of preprocessing and recognition, "
        f"and takes {results['preprocessing_ms_per_frame_of_50']:.1f} ms of one core in 200 ms for 50 channels"
    )
    return [Table(title, ("part", "share", "ms of a core per s", "ms per 200 ms for 50 channels"), rows)]
