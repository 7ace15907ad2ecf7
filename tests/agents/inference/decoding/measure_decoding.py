"""Measures the search: ``python tests/agents/inference/decoding/measure_decoding.py``, one line of JSON for each case.

Posteriors are made up to look like a trained model's: two of three frames are blank, one in three tokens has rivals, and hotwords occur.
Each step of all sessions is timed ten times, turn about with the other cases, in CPU time of this thread. A step's time is the least of its
ten: what other programs do to caches and clocks falls away.

The last case is the whole engine, with the model that comes along, on real calls: what 50,000 hotwords cost a step of encoder and search.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.inference.decoding.hotwords import Hotwords
from agents.inference.decoding.lm import NgramLm
from agents.inference.decoding.prefix_beam import BeamOptions, PrefixBeamSearch
from agents.inference.decoding.units import UnitTable
from schemas.records import Hotword

SESSIONS = 50
STEP_FRAMES = 5
SEGMENT_FRAMES = 250
PHRASES = 50_000
REPEATS = 10


def unit_table(size: int) -> UnitTable:
    """Return blank, unk and as many Chinese characters as the vocabulary has room for."""
    return UnitTable(["<blank>", "<unk>", *(chr(0x4E00 + index) for index in range(size - 2))])


def phrases_of(units: UnitTable, rng: np.random.Generator) -> list[str]:
    """Return different phrases of two to six units."""
    found: dict[str, None] = {}
    while len(found) < PHRASES:
        tokens = rng.integers(2, len(units), rng.integers(2, 7))
        found["".join(units.units[token] for token in tokens)] = None
    return list(found)


def posteriors(units: UnitTable, phrases: list[str], rng: np.random.Generator) -> NDArray[np.float32]:
    """Return log-probabilities (sessions, frames, V)."""
    logits = rng.normal(0.0, 1.5, (SESSIONS, SEGMENT_FRAMES, len(units))).astype(np.float32)
    for session in range(SESSIONS):
        tokens: list[int] = []
        while len(tokens) < SEGMENT_FRAMES:
            if rng.random() < 0.1:
                tokens += [units.ids[character] for character in phrases[rng.integers(len(phrases))]]
            else:
                tokens.append(int(rng.integers(2, len(units))))
        frame = 0
        while frame < SEGMENT_FRAMES:
            for _ in range(rng.integers(1, 4)):
                if frame < SEGMENT_FRAMES:
                    logits[session, frame, 0] += rng.uniform(8, 20)
                    frame += 1
            if frame < SEGMENT_FRAMES:
                logits[session, frame, tokens[frame]] += rng.uniform(9, 16)
                logits[session, frame, 0] += rng.uniform(0, 10)
                if rng.random() < 1 / 3:
                    rivals = rng.integers(2, len(units), 3)
                    logits[session, frame, rivals] += rng.uniform(6, 12, 3)
                frame += 1
    logits -= logits.max(axis=2, keepdims=True)
    return (logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))).astype(np.float32)


def arpa(units: UnitTable, rng: np.random.Generator) -> str:
    """Return a trigram over the vocabulary's characters: 50,000 pairs, 50,000 triples."""
    words = list(units.units[2:])
    grams: list[list[tuple[str, ...]]] = [[("<s>",), ("</s>",), ("<unk>",), *((word,) for word in words)]]
    grams.append(sorted({(words[a], words[b]) for a, b in rng.integers(0, len(words), (50_000, 2))}))
    pairs = grams[1]
    grams.append(sorted({(*pairs[rng.integers(len(pairs))], words[rng.integers(len(words))]) for _ in range(50_000)}))
    lines = ["\\data\\", *(f"ngram {order}={len(some)}" for order, some in enumerate(grams, 1))]
    for order, some in enumerate(grams, 1):
        lines.append(f"\\{order}-grams:")
        for gram in some:
            backoff = "" if order == len(grams) else f"\t{-rng.uniform(0, 0.5):.4f}"
            lines.append(f"{-rng.uniform(0.5, 4):.4f}\t{' '.join(gram)}{backoff}")
    return "\n".join([*lines, "\\end\\", ""])


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds of this thread that a call takes, and its result."""
    before = time.thread_time_ns()
    result = work()
    return (time.thread_time_ns() - before) / 1e6, result


def start_s() -> dict[str, float]:
    """Return the CPU seconds of a process that gets ready to search, without and with compiled functions on disk."""
    program = "from agents.inference.decoding.prefix_beam import PrefixBeamSearch; PrefixBeamSearch(1, 500).compile(); "
    program += "import time; print(time.process_time())"
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"NUMBA_CACHE_DIR": directory}
        runs = [subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True) for _ in range(2)]
    return dict(zip(("cold", "warm"), (round(float(run.stdout), 2) for run in runs), strict=True))


def report(**line: Any) -> None:
    """Print one line."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def measure(size: int) -> None:
    """Measure with a vocabulary of some size."""
    rng = np.random.default_rng(size)
    units = unit_table(size)
    phrases = phrases_of(units, rng)
    log_probs = posteriors(units, phrases, rng)
    few = Hotwords.compile([Hotword(phrase=phrase, boost=3.0) for phrase in phrases[:100]], units)
    hotword_ms, hotwords = timed(lambda: Hotwords.compile([Hotword(phrase=phrase, boost=3.0) for phrase in phrases], units))
    faint = Hotwords.compile([Hotword(phrase=phrase, boost=0.0) for phrase in phrases], units)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "lm.arpa"
        path.write_text(arpa(units, rng), encoding="utf-8")
        lm_ms, lm = timed(lambda: NgramLm.read(path, units, weight=0.3))
    states = len(hotwords.tables.states)
    report(case="build", vocabulary=size, hotwords_ms=round(hotword_ms), states=states, lm_ms=round(lm_ms))

    plain, skip = BeamOptions(), BeamOptions(blank_skip=0.9999)
    cases: dict[str, tuple[Hotwords | None, NgramLm | None, BeamOptions]] = {
        "plain": (None, None, plain),
        "100 hotwords": (few, None, plain),
        "50,000 hotwords": (hotwords, None, plain),
        "50,000 hotwords of boost 0": (faint, None, plain),
        "lm": (None, lm, plain),
        "50,000 hotwords, lm": (hotwords, lm, plain),
        "skip": (None, None, skip),
        "50,000 hotwords, skip": (hotwords, None, skip),
    }
    searches = {name: PrefixBeamSearch(SESSIONS, size, options, model) for name, (_, model, options) in cases.items()}
    steps = [np.ascontiguousarray(log_probs[:, start : start + STEP_FRAMES]) for start in range(0, SEGMENT_FRAMES, STEP_FRAMES)]
    slots = np.arange(SESSIONS)
    times = {name: np.empty((REPEATS, len(steps))) for name in cases}
    for repeat in range(REPEATS):
        for name, search in searches.items():
            search.open(slots, cases[name][0])
            for index, frames in enumerate(steps):
                times[name][repeat, index], _ = timed(lambda search=search, frames=frames: search.step(slots, frames))
    means = {name: float(some.min(axis=0).mean()) for name, some in times.items()}
    exact = searches["plain"].finish(slots)
    for name, search in searches.items():
        p50, p95 = np.percentile(times[name], [50, 95])
        finish_ms, results = timed(lambda search=search: search.finish(slots))
        swap_ms, _ = timed(lambda search=search: search.swap(slots, None if search.hotwords(0) else few))
        skipped = sum(result.skipped_frames for result in results) / (SESSIONS * SEGMENT_FRAMES)
        alike = [a.best.tokens.tolist() == b.best.tokens.tolist() for a, b in zip(results, exact, strict=True)]
        report(
            case=name,
            vocabulary=size,
            step_ms=round(means[name], 3),
            to_plain=round(means[name] / means["plain"], 3),
            p50_ms=round(float(p50), 3),
            p95_ms=round(float(p95), 3),
            skipped=round(skipped, 3),
            same_best_as_plain=sum(alike) / len(alike),
            finish_ms=round(finish_ms, 2),
            swap_10s_ms=round(swap_ms, 2),
        )


def measure_engine() -> None:
    """Measure steps of the whole engine over real speech, with and without 50,000 phrases of its own domain in force."""
    import random

    from agents.features.fbank import Fbank
    from agents.inference.conformer.engine import ConformerEngine, ConformerOptions
    from agents.inference.engine import Block, Opening, SegmentKey
    from agents.inference.models import wenet_directory
    from ops.demo.calls import callers, read_clip
    from ops.train.phrases import phrase
    from schemas.records import SAMPLE_RATE_HZ

    folder = wenet_directory(None)
    engine = ConformerEngine(folder, ConformerOptions(device="cpu", slots=SESSIONS))
    choose = random.Random(1)
    found: dict[str, None] = {}
    while len(found) < PHRASES:
        found[phrase(choose)] = None
    units = UnitTable.read(folder / "units.txt", folder / "bpe.model")
    hotwords = Hotwords.compile([Hotword(phrase=each, boost=3.0) for each in found], units)

    block_samples, lookahead_samples, seconds = SAMPLE_RATE_HZ // 5, 240, 10
    speech = np.concatenate([read_clip(clip.file) for clip in callers()])
    fbank = Fbank()
    steps: list[list[Block]] = [[] for _ in range(5 * seconds)]
    for session in range(SESSIONS):
        at = session * (len(speech) - seconds * SAMPLE_RATE_HZ - lookahead_samples) // SESSIONS
        starts = range(at, at + seconds * SAMPLE_RATE_HZ, block_samples)
        features = fbank([speech[start : start + block_samples + lookahead_samples].tobytes() for start in starts])
        for chunk, each in enumerate(features):
            key = SegmentKey(str(session), 0)
            steps[chunk].append(Block(key=key, chunk=chunk, hops=20, features=each.astype("<f4").tobytes()))

    keys = [block.key for block in steps[0]]
    cases = {"none": None, "50,000": hotwords}
    times = {name: np.empty((REPEATS, len(steps))) for name in cases}
    for repeat in range(REPEATS):
        for name, listed in cases.items():
            engine.use_hotwords("v1" if listed else "", listed)
            engine.open([Opening(key=key, start_sample=0) for key in keys])
            for index, blocks in enumerate(steps):
                times[name][repeat, index], _ = timed(lambda blocks=blocks: engine.step(blocks))
            engine.close(keys)
    means = {name: round(float(some.min(axis=0).mean()), 3) for name, some in times.items()}
    slower = round(means["50,000"] / means["none"], 3)
    report(case="engine step", sessions=SESSIONS, phrases=hotwords.phrases, states=len(hotwords.tables.states), ms=means, to_none=slower)


if __name__ == "__main__":
    report(case="start, cpu s", **start_s())
    for vocabulary in (500, 5_000):
        measure(vocabulary)
    measure_engine()
