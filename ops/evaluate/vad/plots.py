"""Pictures: how far each detector can be moved between missed speech and false alarms, and what they decide of single scenes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agents.vad.spectrum import HOP_SAMPLES
from ops.evaluate.vad.candidates import Verdict
from ops.evaluate.vad.testset import TestScene
from schemas.records import SAMPLE_RATE_HZ

__all__ = ["roc", "timeline"]

_CUTS: Final = 200
_HOPS_PER_S: Final = SAMPLE_RATE_HZ // HOP_SAMPLES
_DPI: Final = 110


def _rates(decided: NDArray[np.bool_], speech: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the shares of noise and of speech that are called speech."""
    return float(decided[~speech].mean()), float(decided[speech].mean())


def roc(scenes: Sequence[TestScene], verdicts: Mapping[str, Sequence[Verdict]], path: Path) -> None:
    """Draw hops of speech kept over hops of noise taken for speech: a curve where there is a score, and the point that is in use."""
    from matplotlib.figure import Figure

    speech = np.concatenate([scene.speech for scene in scenes])
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    for number, (name, given) in enumerate(verdicts.items()):
        colour = f"C{number}"
        decided = np.concatenate([verdict.speech for verdict in given])
        false, kept = _rates(decided, speech)
        axes.plot(false, kept, "o", color=colour, label=f"{name}: {kept:.1%} of speech, {false:.1%} of noise")
        scores = [verdict.score for verdict in given if verdict.score is not None]
        if len(scores) == len(given):
            score = np.concatenate(scores)
            cuts = np.quantile(score, np.linspace(0, 1, _CUTS))
            axes.plot(*np.array([_rates(score > cut, speech) for cut in cuts]).T, color=colour, alpha=0.7)
    axes.set(xlabel="noise taken for speech (hops)", ylabel="speech kept (hops)", xlim=(0, 0.5), ylim=(0.5, 1.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=_DPI)


def timeline(scene: TestScene, verdicts: Mapping[str, Verdict], segments: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """Draw a scene: its spectrum, where speech is, and what each detector decides and returns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 2.5 + 0.45 * (len(verdicts) + 1)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 0.45 * (len(verdicts) + 1)))
    above.specgram(scene.samples + 1e-7, NFFT=512, Fs=SAMPLE_RATE_HZ, noverlap=352, cmap="magma", vmin=-140, vmax=-40)
    above.set(title=f"{scene.name}, {scene.line}", ylabel="Hz")
    rows = {"reference": scene.speech} | {name: verdict.speech for name, verdict in verdicts.items()}
    for row, (name, speech) in enumerate(rows.items()):
        edges = np.flatnonzero(np.diff(np.r_[0, speech.astype(np.int8), 0])).reshape(-1, 2) / _HOPS_PER_S
        below.broken_barh([(begin, end - begin) for begin, end in edges], (-row - 0.35, 0.7), color="k" if row == 0 else f"C{row - 1}")
        for begin, end in segments.get(name, ()):
            below.broken_barh([(begin / _HOPS_PER_S, (end - begin) / _HOPS_PER_S)], (-row - 0.45, 0.9), facecolor="none", edgecolor="0.3")
    below.set_yticks([-row for row in range(len(rows))], list(rows))
    below.set(xlabel="s")
    figure.savefig(path, dpi=_DPI)
