"""Log-mel features for training: Kaldi's fbank in numpy, with an optional warp of frequencies that makes another vocal tract of a voice."""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import scipy.fft

from schemas.records import SAMPLE_RATE_HZ

__all__ = ["HOP_SAMPLES", "MEL_BINS", "fbank"]

MEL_BINS: Final = 80
HOP_SAMPLES: Final = SAMPLE_RATE_HZ // 100
_WINDOW_SAMPLES: Final = SAMPLE_RATE_HZ // 40
_FFT_SAMPLES: Final = 512
_PRE_EMPHASIS: Final = 0.97
_LOW_HZ: Final = 20.0
_NYQUIST_HZ: Final = SAMPLE_RATE_HZ / 2
#: Above this the warp bends back so that Nyquist stays where it is.
_WARP_EDGE_HZ: Final = 6000.0
#: First formants lie below the one, second and third ones mostly above the other: each part may have a factor of its own.
_LOW_FORMANTS_HZ: Final = 1000.0
_HIGH_FORMANTS_HZ: Final = 2500.0
_FLOOR: Final = np.float32(np.finfo(np.float32).eps)
#: Povey's window: a Hann window to the power of 0.85.
_WINDOW: Final = ((0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW_SAMPLES) / (_WINDOW_SAMPLES - 1))) ** 0.85).astype(np.float32)


def _mel(hz: np.ndarray) -> np.ndarray:
    return 1127.0 * np.log1p(hz / 700.0)


@functools.lru_cache(maxsize=64)
def _filters(low_warp: float, high_warp: float) -> np.ndarray:
    """Return the triangular filters, (257, 80) float32, for a voice whose low and high formants lie so many times as high."""
    hz = np.arange(_FFT_SAMPLES // 2) * SAMPLE_RATE_HZ / _FFT_SAMPLES
    edge = _WARP_EDGE_HZ * min(1.0, 1.0 / high_warp)
    before = (0.0, _LOW_FORMANTS_HZ, _HIGH_FORMANTS_HZ, edge, _NYQUIST_HZ)
    after = (0.0, low_warp * _LOW_FORMANTS_HZ, high_warp * _HIGH_FORMANTS_HZ, high_warp * edge, _NYQUIST_HZ)
    mel = _mel(np.interp(hz, before, after))
    points = np.linspace(_mel(np.array(_LOW_HZ)), _mel(np.array(_NYQUIST_HZ)), MEL_BINS + 2)
    left, centre, right = points[:-2], points[1:-1], points[2:]
    rising, falling = (mel[:, None] - left) / (centre - left), (right - mel[:, None]) / (right - centre)
    filters = np.zeros((_FFT_SAMPLES // 2 + 1, MEL_BINS), np.float32)
    filters[:-1] = np.clip(np.minimum(rising, falling), 0, None)
    return filters


def fbank(pcm: np.ndarray, low_warp: float = 1.0, high_warp: float = 1.0) -> np.ndarray:
    """Return the features of int16-scaled samples.

    Args:
        pcm: (samples,) int16, or float32 at int16 scale.
        low_warp: factor on the first formants (below 1 kHz); 1 leaves them.
        high_warp: factor on the others (above 2.5 kHz; in between it goes from the one to the other).

    Returns:
        (frames, 80) float32, no dither, frames that do not fit left out.
    """
    count = max(0, 1 + (len(pcm) - _WINDOW_SAMPLES) // HOP_SAMPLES)
    if not count:
        return np.zeros((0, MEL_BINS), np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(pcm.astype(np.float32), _WINDOW_SAMPLES)[::HOP_SAMPLES][:count]
    frames = frames - frames.mean(1, keepdims=True)
    frames = frames - _PRE_EMPHASIS * np.concatenate((frames[:, :1], frames[:, :-1]), 1)
    spectrum = scipy.fft.rfft(frames * _WINDOW, _FFT_SAMPLES)
    power = spectrum.real**2 + spectrum.imag**2
    features: np.ndarray = np.log(np.maximum(power @ _filters(low_warp, high_warp), _FLOOR))
    return features
