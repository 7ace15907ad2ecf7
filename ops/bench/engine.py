"""The engine alone: how long a step takes, by how many channels share it and what it computes in; and what waiting for company is worth.

A *step* is everything from feature blocks to partial texts: encoder, CTC head, beam search. The encoder's own time is given beside it, and
how often its best token is that of fp32. The *pacing* is measured with the product's batcher in front of the engine's process, blocks
coming as they do from channels that all speak: each every 200 ms, at a moment of its own.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ops.bench.load import FRAME_SAMPLES, LOOKAHEAD_SAMPLES, speech_tracks
from ops.bench.models import BUNDLED_SIZE, LARGE_SIZE, Size, model_directory, write_random_model
from ops.bench.report import Document, Table, distribution, document, figure, percentiles
from ops.measure import cores

if TYPE_CHECKING:
    from agents.inference.conformer.loader import LoadedModel
    from agents.inference.conformer.streaming import Precision
    from agents.inference.engine import Block, FinalText, Hypothesis
    from agents.inference.pacing import Pacing

__all__ = ["BATCHES", "measure_engine", "tables"]

BATCHES: Final = (1, 10, 30, 50)
_SIZES: Final = (BUNDLED_SIZE, LARGE_SIZE)
_HOPS: Final = 20
#: 20 s of audio are the longest segment.
_LONGEST_BLOCKS: Final = 95
_WARM_STEPS: Final = 5
#: Steps that are timed: enough for a P95, and at most so long.
_STEPS: Final = 80
_STEPS_S: Final = 6.0
_BLOCK_S: Final = 0.2
_PACED_CHANNELS: Final = (10, 50)
_PACED_S: Final = 20.0
#: The adaptive pacing looks after 1 s, and then every 10 s: by now it has found its pace.
_SETTLED_S: Final = 11.2
#: Sizes and waits in ms that never change, to hold the adaptive pacing against.
_FIXED: Final = ((1, 0.0), (32, 5.0), (64, 50.0))


def measure_engine(
    *,
    batches: Sequence[int],
    precisions: Sequence[Precision] | None,
    device: str,
    threads: int | None,
    model_dir: Path | None,
    large: bool,
    pacing: bool,
    tell: Callable[[str], None] = lambda _line: None,
) -> Document:
    """Time steps for each model, precision and batch; and the pacings against each other.

    Args:
        batches: channels to a step.
        precisions: what to compute in; None: all that the device has.
        device: ``cpu`` or ``cuda``.
        threads: of the processor; None: all cores.
        model_dir: a WeNet model in place of a random one of the bundled size.
        large: also time a model of 35 M parameters.
        pacing: also hold the pacings against each other (CPU only).
        tell: hears what is going on.
    """
    import torch

    threads = threads or cores()
    torch.set_num_threads(threads)
    chosen = precisions or (("fp32", "bf16", "fp16") if device == "cuda" else ("fp32", "bf16", "int8"))
    features = _features(max(*batches, *_PACED_CHANNELS))
    steps: list[dict[str, Any]] = []
    paced: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="asr-bench-") as root:
        for size in _SIZES if large else _SIZES[:1]:
            folder = _model(size, model_dir, Path(root))
            steps += _time_steps(size.name, folder, batches, chosen, device, threads, features, tell)
        if pacing and device == "cpu":
            paced = [*_compare_pacings(_model(BUNDLED_SIZE, model_dir, Path(root)), features, tell)]
    conditions: dict[str, Any] = {"device": device, "threads": threads}
    if device == "cuda":
        conditions["gpu"] = torch.cuda.get_device_name()
    return document("engine", conditions, {"steps": steps, "pacing": paced})


def _model(size: Size, model_dir: Path | None, root: Path) -> Path:
    if size is BUNDLED_SIZE:
        return model_directory(model_dir, root / size.name, size)
    write_random_model(root / size.name, size)
    return root / size.name


def _features(channels: int) -> NDArray[np.float32]:
    """Return the features of speech, by channel and block: (channels, blocks, 20, mel)."""
    from agents.features.fbank import Fbank

    fbank = Fbank()
    tracks = speech_tracks(channels, (_LONGEST_BLOCKS + 1) * FRAME_SAMPLES / 16_000)
    starts = range(0, _LONGEST_BLOCKS * FRAME_SAMPLES, FRAME_SAMPLES)
    return np.stack([fbank([track[start : start + FRAME_SAMPLES + LOOKAHEAD_SAMPLES].tobytes() for start in starts]) for track in tracks])


# ---------------------------------------------------------------------- steps


def _time_steps(
    name: str,
    folder: Path,
    batches: Sequence[int],
    precisions: Sequence[Precision],
    device: str,
    threads: int,
    features: NDArray[np.float32],
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    import torch

    from agents.inference.conformer.loader import load_model

    loaded = load_model(folder)
    parameters = sum(weight.numel() for part, weight in loaded.model.named_parameters() if not part.startswith("decoder."))
    loaded.model.to(torch.device(device))
    reference = _best_tokens(loaded, "fp32", features)
    found = []
    for precision in precisions:
        agrees = float(np.mean(_best_tokens(loaded, precision, features) == reference))
        for batch in batches:
            whole_ms = _engine_steps(folder, precision, device, threads, features[:batch])
            encoder_ms = _encoder_steps(loaded, precision, features[:batch])
            row: dict[str, Any] = {
                "model": name,
                "parameters": parameters,
                "precision": precision,
                "batch": batch,
                "step_ms": distribution(whole_ms),
                "encoder_ms": distribution(encoder_ms),
                "agrees_with_fp32": round(agrees, 5),
            }
            if device == "cuda":
                row["encoder_without_graphs_ms"] = distribution(_encoder_steps(loaded, precision, features[:batch], graphs=False))
            tell(f"{name} {precision}, batch {batch}: step P50 {figure(row['step_ms']['p50'])} ms")
            found.append(row)
    return found


def _windows(features: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Yield what the encoder takes of each channel, block by block: (channels, 23, mel)."""
    before = np.repeat(features[:, 0, :1], 3, axis=1)
    for number in range(features.shape[1]):
        window = np.concatenate((before, features[:, number]), 1)
        before = window[:, -3:]
        yield window


def _timed(step: Callable[[int], object], blocks: int) -> NDArray[np.float64]:
    """Return how long steps took, in ms: the first few are not counted."""
    took_ms: list[float] = []
    began_s = time.perf_counter()
    for number in range(min(blocks, _WARM_STEPS + _STEPS)):
        step_s = time.perf_counter()
        step(number)
        now_s = time.perf_counter()
        if number >= _WARM_STEPS:
            took_ms.append(1_000 * (now_s - step_s))
        if now_s - began_s > _STEPS_S:
            break
    return np.array(took_ms)


def _encoder_steps(loaded: LoadedModel, precision: Precision, features: NDArray[np.float32], *, graphs: bool = True) -> NDArray[np.float64]:
    from agents.inference.conformer.streaming import StreamingEncoder

    batch = len(features)
    encoder = StreamingEncoder(loaded.model, slots=batch, precision=precision)
    slots = list(range(batch))
    encoder.open(slots)
    windows = list(_windows(features))
    # Several blocks at once are never recorded as a graph: two of them, timed, are two steps without.
    if not graphs:
        pairs = [np.concatenate((one, other[:, 3:]), 1) for one, other in zip(windows[::2], windows[1::2], strict=False)]
        return _timed(lambda number: encoder.step(slots, pairs[number], 2).cpu(), len(pairs)) / 2
    return _timed(lambda number: encoder.step(slots, windows[number]).cpu(), len(windows))


def _best_tokens(loaded: LoadedModel, precision: Precision, features: NDArray[np.float32]) -> NDArray[np.int64]:
    from agents.inference.conformer.streaming import StreamingEncoder

    some = features[:10]
    encoder = StreamingEncoder(loaded.model, slots=len(some), precision=precision)
    slots = list(range(len(some)))
    encoder.open(slots)
    best = [encoder.step(slots, window).argmax(-1).cpu().numpy() for window in _windows(some)]
    return np.concatenate(best, 1)


def _engine_steps(folder: Path, precision: Precision, device: str, threads: int, features: NDArray[np.float32]) -> NDArray[np.float64]:
    from agents.inference.conformer.engine import conformer_engine
    from agents.inference.engine import Opening, SegmentKey

    batch = len(features)
    engine = conformer_engine(str(folder), device=device, precision=precision, threads=threads, slots=batch, numbers=False)
    keys = [SegmentKey(str(channel), 0) for channel in range(batch)]
    engine.open([Opening(key=key, start_sample=0) for key in keys])
    blocks = [[_block(key, number, each[number]) for key, each in zip(keys, features, strict=True)] for number in range(features.shape[1])]
    return _timed(lambda number: engine.step(blocks[number]), len(blocks))


def _block(key: Any, number: int, features: NDArray[np.float32]) -> Block:
    from agents.inference.engine import Block

    return Block(key=key, chunk=number, hops=_HOPS, features=features.tobytes())


# ---------------------------------------------------------------------- pacing


@dataclass(slots=True)
class _Answers:
    """Hears from the batcher when blocks are through."""

    at_s: dict[tuple[Any, int], float] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    failure: BaseException | None = None

    def stepped(self, blocks: Sequence[Block], hypotheses: Sequence[Hypothesis]) -> None:
        """Note the blocks."""
        now_s = time.perf_counter()
        if blocks:
            self.batches.append(len(blocks))
        self.at_s.update({(block.key, block.chunk): now_s for block in blocks})

    def finished(self, finals: Sequence[FinalText]) -> None:
        """Nobody asks for finals."""

    def broke(self, failure: BaseException) -> None:
        """Note why."""
        self.failure = failure


def _compare_pacings(folder: Path, features: NDArray[np.float32], tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    from agents.inference.pacing import AdaptivePacing, FixedPacing
    from agents.inference.process import EngineProcess, engine_spec
    from streams.settings import load_settings

    pacings: dict[str, Callable[[], Pacing]] = {"adaptive": AdaptivePacing}
    pacings |= {f"at most {size}, {wait_ms:g} ms": functools.partial(FixedPacing, size, wait_ms) for size, wait_ms in _FIXED}
    for channels in _PACED_CHANNELS:
        for name, make in pacings.items():
            engine = EngineProcess(engine_spec(load_settings(engine="conformer", model_dir=folder, device="cpu")))
            engine.start()
            found = asyncio.run(_pace(engine, make(), features[:channels]))
            tell(f"{channels} channels, {name}: P95 {figure(found['latency_ms']['p95'])} ms, {found['cpu_cores']:.2f} cores")
            yield {"channels": channels, "pacing": name, **found}


async def _pace(engine: Any, pacing: Pacing, features: NDArray[np.float32]) -> dict[str, Any]:
    """Let channels speak for a while; return how late their blocks were, and what the engine took for them."""
    import psutil

    from agents.inference.batcher import Batcher
    from agents.inference.engine import Opening, SegmentKey

    channels, blocks = features.shape[:2]
    answers, process = _Answers(), psutil.Process(engine.pid)
    batcher = Batcher(engine, answers, pacing)
    batcher.start()
    phases_s = np.random.default_rng(0).permutation(channels) / channels * _BLOCK_S
    due_s: dict[tuple[Any, int], float] = {}
    began_s = time.perf_counter()
    cpu_before_s, settled_at_s, settled_batches = 0.0, began_s, 0
    try:
        for number in range(int(_PACED_S / _BLOCK_S)):
            if number == int(_SETTLED_S / _BLOCK_S):
                settled_at_s, cpu_before_s, settled_batches = time.perf_counter(), _cpu_s(process), len(answers.batches)
                due_s.clear()
            for channel in np.argsort(phases_s).tolist():
                key = SegmentKey(str(channel), number // blocks)
                at_s = began_s + number * _BLOCK_S + phases_s[channel]
                await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
                if number % blocks == 0:
                    if number:
                        batcher.close(SegmentKey(str(channel), number // blocks - 1))
                    batcher.open(Opening(key=key, start_sample=0))
                block = _block(key, number % blocks, features[channel, number % blocks])
                due_s[key, block.chunk] = at_s
                batcher.put(block)
        await asyncio.sleep(1.0)
        cpu_s, took_s = _cpu_s(process) - cpu_before_s, time.perf_counter() - settled_at_s
    finally:
        await asyncio.to_thread(batcher.stop)
    if answers.failure is not None:
        raise answers.failure
    late_ms = [1_000 * (answers.at_s[which] - due) for which, due in due_s.items() if which in answers.at_s]
    return {
        "latency_ms": distribution(late_ms),
        "cpu_cores": round(cpu_s / took_s, 4),
        "blocks_per_step": round(float(np.mean(answers.batches[settled_batches:])), 1),
        "unanswered": len(due_s) - len(late_ms),
    }


def _cpu_s(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# ---------------------------------------------------------------------- for people


def tables(found: Document) -> list[Table]:
    """Return the times as tables."""
    conditions, results = found["conditions"], found["results"]
    where = conditions.get("gpu") or f"{conditions['threads']} threads"
    graphs = any("encoder_without_graphs_ms" in row for row in results["steps"])
    rows = tuple(
        (
            f"{row['model']}, {row['parameters'] / 1e6:.1f} M",
            row["precision"],
            str(row["batch"]),
            *percentiles(row["step_ms"], ("p50", "p95", "p99")),
            *percentiles(row["encoder_ms"], ("p50", "p95")),
            *(percentiles(row["encoder_without_graphs_ms"], ("p50",)) if graphs else ()),
            f"{row['agrees_with_fp32']:.2%}",
        )
        for row in results["steps"]
    )
    headings = ("model", "precision", "batch", "step P50", "P95", "P99", "encoder P50", "P95", *(("without graphs",) if graphs else ()))
    found_tables = [Table(f"Time of a step of 200 ms in ms, {where}", (*headings, "best token as in fp32"), rows)]
    if results["pacing"]:
        paced: Sequence[Mapping[str, Any]] = results["pacing"]
        rows = tuple(
            (
                str(row["channels"]),
                row["pacing"],
                *percentiles(row["latency_ms"]),
                figure(row["blocks_per_step"], 1),
                figure(1_000 * row["cpu_cores"], 0),
            )
            for row in paced
        )
        headings = ("channels that all speak", "pacing", "P50", "P95", "P99", "max", "blocks per step", "engine CPU ms per s")
        found_tables.append(Table("From a block to its text in ms, adaptive pacing against fixed ones", headings, rows))
    return found_tables
