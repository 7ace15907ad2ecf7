"""FFmpeg's spectral denoiser ``afftdn``, for what the detectors hear; the recogniser hears the original."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schemas.records import SAMPLE_RATE_HZ

__all__ = ["DELAY_SAMPLES", "GRID_SAMPLES", "Denoiser"]

# Take up to 18 dB off noise that lies under -25 dB.
_OPTIONS: Final = "nr=18:nf=-25"

#: The filter works in steps of a 1/80 s. Two instances agree only if both began on the same grid of steps.
GRID_SAMPLES: Final = SAMPLE_RATE_HZ // 80
#: Its output comes two steps late; :class:`Denoiser` leaves them out, so that positions do not shift.
DELAY_SAMPLES: Final = 2 * GRID_SAMPLES


class Denoiser:
    """One channel's filter.

    Its state cannot be saved, but it fades: an instance that starts later, on the grid, gives the same samples after half a second, to
    the bit.
    """

    def __init__(self) -> None:
        from av.filter import Graph

        self._graph = Graph()
        self._graph.threads = 1  # one channel has nothing to share out, and 50 graphs would start 100 threads
        source = self._graph.add_abuffer(format="fltp", sample_rate=SAMPLE_RATE_HZ, layout="mono", time_base=Fraction(1, SAMPLE_RATE_HZ))
        denoise = self._graph.add("afftdn", _OPTIONS)
        sink = self._graph.add("abuffersink")
        source.link_to(denoise)
        denoise.link_to(sink)
        self._graph.configure()
        self._asked_samples = 0
        # What comes in the first second depends on the size of the first output: it is always this, and thrown away.
        self._ask(DELAY_SAMPLES)
        self._taken_samples = self._given_samples = 0

    def push(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take 16 kHz samples and return what is ready: all whole steps so far, less ``DELAY_SAMPLES``."""
        from av.audio.frame import AudioFrame

        if not len(samples):
            return np.zeros(0, np.float32)
        frame = AudioFrame.from_ndarray(samples[np.newaxis], format="fltp", layout="mono")
        frame.sample_rate = SAMPLE_RATE_HZ
        frame.pts = self._taken_samples
        self._taken_samples += len(samples)
        self._graph.push(frame)
        ready = self._taken_samples // GRID_SAMPLES * GRID_SAMPLES
        if not self._given_samples and ready >= DELAY_SAMPLES:
            self._pull(DELAY_SAMPLES)
        return self._pull(ready - self._given_samples) if ready > self._given_samples >= DELAY_SAMPLES else np.zeros(0, np.float32)

    def _pull(self, count: int) -> NDArray[np.float32]:
        """Take so many samples, which are ready, at once: step by step they cost an eighth more."""
        self._ask(count)
        frame: Any = self._graph.pull()
        self._given_samples += count
        # This is half the price of to_ndarray(); the buffer is padded.
        return np.frombuffer(frame.planes[0], np.float32, count)

    def _ask(self, count: int) -> None:
        if count != self._asked_samples:
            self._graph.set_audio_frame_size(count)
            self._asked_samples = count
