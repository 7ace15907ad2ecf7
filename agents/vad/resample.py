"""8 kHz to 16 kHz, the same sample for sample however the audio is cut into pieces."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.signal import firwin

from schemas.records import SAMPLE_RATE_HZ

__all__ = ["DELAY_SAMPLES", "NARROWBAND_HZ", "Upsampler"]

#: The rate of a telephone line.
NARROWBAND_HZ: Final = 8_000
_FACTOR: Final = SAMPLE_RATE_HZ // NARROWBAND_HZ

# A half-band low-pass: 65 taps under a Kaiser window that stops 60 dB pass 3.5 kHz (a telephone ends at 3.4) and stop 4.5 kHz.
_TAPS: Final = 65
_KAISER_BETA: Final = 5.65

#: Output trails the input by this many 16 kHz samples (half the filter, 2 ms); positions do not shift.
DELAY_SAMPLES: Final = _TAPS // 2
# The input samples that an output sample needs before its own block: all the filter's taps that are not zeros of the upsampling.
_HISTORY_SAMPLES: Final = (_TAPS - 1) // _FACTOR

# Half of a half-band filter's taps are zero but for the middle one, so every other output sample is an input sample, times this; the
# samples between are made by the other half of the taps. Upsampling by 2 halves the level, hence the factor.
_FILTER: Final[NDArray[np.float32]] = (
    _FACTOR * firwin(_TAPS, NARROWBAND_HZ / 2, window=("kaiser", _KAISER_BETA), fs=SAMPLE_RATE_HZ)
).astype(np.float32)
_MIDDLE: Final = _FILTER[_TAPS // 2]
_BETWEEN: Final = np.ascontiguousarray(_FILTER[1::2])


class Upsampler:
    """One channel's polyphase filter. It remembers 32 input samples (4 ms) and nothing else."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._history = np.zeros(_HISTORY_SAMPLES, np.float32)
        self._ahead = DELAY_SAMPLES

    def push(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take 8 kHz samples and return what is ready at 16 kHz: twice as many, the first time ``DELAY_SAMPLES`` fewer."""
        block = np.concatenate([self._history, samples])
        self._history = block[len(block) - _HISTORY_SAMPLES :]
        ready = np.empty(len(samples) * _FACTOR, np.float32)
        middle = _HISTORY_SAMPLES // 2
        np.multiply(block[middle : middle + len(samples)], _MIDDLE, out=ready[::2])
        if len(samples):
            ready[1::2] = np.convolve(block[1:], _BETWEEN, "valid")
        dropped = min(self._ahead, len(ready))
        self._ahead -= dropped
        return ready[dropped:]

    def flush(self) -> NDArray[np.float32]:
        """Return what is still owed, as if silence followed, and begin anew."""
        owed = self.push(np.zeros(DELAY_SAMPLES // _FACTOR, np.float32))
        self._reset()
        return owed
