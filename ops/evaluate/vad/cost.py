"""What preprocessing costs: processor time of each part for 50 channels, step by step of 200 ms, on one core."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from agents.features.fbank import Fbank
from agents.vad.decode import decode
from agents.vad.detectors import Channel, Detectors, Thresholds
from agents.vad.front import Front
from agents.vad.resample import NARROWBAND_HZ
from agents.vad.session import CHUNK_HOPS, LOOKAHEAD_SAMPLES
from agents.vad.spectrum import HOP_SAMPLES
from streams.settings import Settings

__all__ = ["CHANNELS", "PARTS", "Cost", "measure", "report"]

CHANNELS: Final = 50
PARTS: Final = ("decode", "resample and denoise", "detect", "features")
_FRAME_BYTES: Final = NARROWBAND_HZ // 5
_WARM_UP_STEPS: Final = 10
_CALL_SECONDS: Final = 60.0
#: Channels hear the same call from other places on, so that some speak while others are silent.
_APART_BYTES: Final = 7_001


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Processor time in ms for all channels and 200 ms of audio: the median over the steps, and the P95."""

    p50_ms: float
    p95_ms: float


def measure(settings: Settings, steps: int) -> dict[str, Cost]:
    """Measure; mu-law at 8 kHz, as telephone lines deliver it, is the dearest to take.

    Args:
        settings: which detectors, and whether they hear denoised audio.
        steps: how many to measure.

    Returns:
        The cost of each of ``PARTS``, and of all.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        spent = _spent_ms(settings, steps)
    finally:
        torch.set_num_threads(threads)
    whole = {**dict(zip(PARTS, spent.T, strict=True)), "all": spent.sum(axis=1)}
    return {
        name: Cost(p50_ms=round(float(np.median(each)), 2), p95_ms=round(float(np.percentile(each, 95)), 2)) for name, each in whole.items()
    }


def report(settings: Settings, steps: int, json_file: Path | None) -> None:
    """Measure, and print a table or write JSON."""
    costs = measure(settings, steps)
    if json_file is not None:
        from ops.measure import cores, processor

        found = {"channels": CHANNELS, "audio_ms": 200, "steps": steps, "processor": processor(), "cores": cores(), "parts": costs}
        written = msgspec.json.format(msgspec.json.encode(found), indent=2)
        if str(json_file) == "-":
            sys.stdout.write(written.decode() + "\n")
        else:
            json_file.write_bytes(written + b"\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Processor time for {CHANNELS} channels and 200 ms, median over {steps} steps", title_justify="left")
    for column in ("part", "P50 ms", "P95 ms"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, each in costs.items():
        table.add_row(name, f"{each.p50_ms:.2f}", f"{each.p95_ms:.2f}")
    Console().print(table)


def _spent_ms(settings: Settings, steps: int) -> NDArray[np.float64]:
    """Return the processor time of each step, steps x parts."""
    payload = _call()
    detectors, extract = Detectors(settings), Fbank()
    detectors.warm_up()
    fronts = [Front(0, denoise=settings.vad_denoise, lookback_samples=detectors.lookback_samples) for _ in range(CHANNELS)]
    channels = [Channel(detectors.start(0), front.heard, Thresholds.of(settings)) for front in fronts]
    chunk_samples = CHUNK_HOPS * HOP_SAMPLES + LOOKAHEAD_SAMPLES
    spent = []
    for step in range(_WARM_UP_STEPS + steps):
        begins = [(step * _FRAME_BYTES + number * _APART_BYTES) % (len(payload) - _FRAME_BYTES) for number in range(CHANNELS)]
        stamps = [time.process_time()]
        decoded = [decode(payload[begin : begin + _FRAME_BYTES], "mulaw") for begin in begins]
        stamps.append(time.process_time())
        for front, samples in zip(fronts, decoded, strict=True):
            front.push(samples, NARROWBAND_HZ)
        stamps.append(time.process_time())
        detectors.decide(channels)
        stamps.append(time.process_time())
        ends = [front.original.end for front in fronts]
        chunks = [front.original[max(0, end - chunk_samples) : end] for front, end in zip(fronts, ends, strict=True)]
        began = time.process_time()
        extract([chunk.astype("<i2").tobytes() for chunk in chunks])
        after = time.process_time()
        for front, channel, end in zip(fronts, channels, ends, strict=True):
            front.forget(end - chunk_samples, detectors.needed_from_sample(channel.listener))
        if step >= _WARM_UP_STEPS:
            spent.append([*np.diff(stamps), after - began])
    return np.array(spent) * 1_000


def _call() -> bytes:
    """Return one side of a call, as G.711."""
    from ops.demo.calls import assemble

    return assemble(1, _CALL_SECONDS, telephone=True, rng=np.random.default_rng(0)).parties[0].payload()
