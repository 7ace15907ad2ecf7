"""Pictures of labels, to be checked by eye: what the recording looks like, and where speech was found in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from agents.vad.spectrum import HOP_SAMPLES
from ops.train.vad.labels import label, silero_probabilities
from ops.train.vad.sources import Recording, read_audio
from schemas.records import SAMPLE_RATE_HZ

__all__ = ["draw_labels"]

_LONGEST_SECONDS: Final = 8
_DPI: Final = 90
_DYNAMIC_RANGE_DB: Final = (-130, -40)
_QUIET: Final = np.float32(1e-7)


def draw_labels(found: Sequence[Recording], path: Path) -> None:
    """Draw the first seconds of some recordings, one below the other: spectrum, Silero's probability, and the labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 1.9 * len(found)), layout="constrained")
    rows = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axes, recording in zip(rows, found, strict=True):
        samples = read_audio(recording.path)
        labels, likely = label(samples), silero_probabilities(samples)
        shown = min(len(labels.speech), _LONGEST_SECONDS * SAMPLE_RATE_HZ // HOP_SAMPLES)
        low, high = _DYNAMIC_RANGE_DB
        axes.specgram(samples[: shown * HOP_SAMPLES] + _QUIET, NFFT=320, Fs=SAMPLE_RATE_HZ, noverlap=160, cmap="magma", vmin=low, vmax=high)
        seconds = np.arange(shown) * HOP_SAMPLES / SAMPLE_RATE_HZ
        axes.plot(seconds, likely[:shown] * SAMPLE_RATE_HZ / 2, color="w", linewidth=0.7)
        for marked, colour in ((labels.speech, "lime"), (labels.doubtful, "red")):
            edges = np.flatnonzero(np.diff(np.r_[0, marked[:shown].astype(np.int8), 0])).reshape(-1, 2) * HOP_SAMPLES / SAMPLE_RATE_HZ
            axes.broken_barh([(begin, end - begin) for begin, end in edges], (7_400, 500), color=colour)
        axes.set(title=recording.name, ylabel="Hz")
    figure.savefig(path, dpi=_DPI)
