"""What all detectors of our own hear: the power spectrum of each hop, computed once for all of them and for all channels."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.fft import rfft

from schemas.records import SAMPLE_RATE_HZ

__all__ = ["BINS", "BIN_HZ", "HOP_SAMPLES", "WINDOW_SAMPLES", "power_spectra"]

#: 10 ms: the step of every decision.
HOP_SAMPLES: Final = SAMPLE_RATE_HZ // 100
#: 20 ms: what a decision hears; it ends with the hop.
WINDOW_SAMPLES: Final = 2 * HOP_SAMPLES

#: What one bin of a spectrum is wide: 50 Hz.
BIN_HZ: Final = SAMPLE_RATE_HZ / WINDOW_SAMPLES
BINS: Final = WINDOW_SAMPLES // 2 + 1

_WINDOW: Final[NDArray[np.float32]] = np.hanning(WINDOW_SAMPLES + 1)[:-1].astype(np.float32)
# Makes the sum over all bins the mean square of the samples, full scale 1: both sides of the spectrum, the window's power, Parseval.
_SCALE: Final = np.float32(2 / (WINDOW_SAMPLES * float(np.square(_WINDOW).sum())))
_SCALED_WINDOW: Final[NDArray[np.float32]] = (_WINDOW * np.sqrt(_SCALE)).astype(np.float32)
# So many rows at a time stay in the processor's cache.
_ROWS: Final = 128


def power_spectra(windows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the power in each bin; a row's result does not depend on the other rows.

    Args:
        windows: float32, hops x ``WINDOW_SAMPLES``, in [-1, 1).

    Returns:
        float32, hops x ``BINS``; a row's sum is its mean square.
    """
    power = np.empty((len(windows), BINS), np.float32)
    for begin in range(0, len(windows), _ROWS):
        spectrum = rfft(windows[begin : begin + _ROWS] * _SCALED_WINDOW, axis=1)
        # The parts of complex64 side by side: squared in place, then added in pairs.
        parts = spectrum.view(np.float32)
        np.square(parts, out=parts)
        np.add(parts[:, ::2], parts[:, 1::2], out=power[begin : begin + _ROWS])
    return power
