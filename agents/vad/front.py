"""A channel's audio by position: the original for the recogniser, and what the detectors hear."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from agents.vad.decode import to_int16
from agents.vad.denoise import DELAY_SAMPLES, GRID_SAMPLES, Denoiser
from agents.vad.resample import NARROWBAND_HZ, Upsampler
from schemas.records import SAMPLE_RATE_HZ

__all__ = ["RATES_HZ", "SETTLE_SAMPLES", "START_GRID_SAMPLES", "Front", "Track"]

#: The rates that frames may have.
RATES_HZ: Final = (NARROWBAND_HZ, SAMPLE_RATE_HZ)

#: A front begins on a multiple of this, with silence up to its first sample: a common multiple of the denoiser's step (200 samples),
#: the hop (160), and Silero's window (512), so that every grid is counted from the session's start.
START_GRID_SAMPLES: Final = 12_800

#: Once it has heard this much, a front is equal to the bit to one that began earlier: the denoiser takes 8,500 samples, the resampler 64.
SETTLE_SAMPLES: Final = SAMPLE_RATE_HZ

_Sample = TypeVar("_Sample", np.int16, np.float32)


class Track(Generic[_Sample]):
    """Samples by position, as far back as they are kept.

    Args:
        start_sample: position of the first sample to come.
        dtype: their type.
    """

    def __init__(self, start_sample: int, dtype: type[_Sample]) -> None:
        #: Position of the first sample kept.
        self.start = start_sample
        self._samples: NDArray[_Sample] = np.zeros(0, dtype)

    @property
    def end(self) -> int:
        """One past the last sample."""
        return self.start + len(self._samples)

    def append(self, samples: NDArray[_Sample]) -> None:
        """Add samples at the end."""
        self._samples = np.concatenate([self._samples, samples])

    def forget(self, before_sample: int) -> None:
        """Drop what lies before a position."""
        if before_sample > self.start:
            before_sample = min(before_sample, self.end)
            self._samples = self._samples[before_sample - self.start :]
            self.start = before_sample

    def __getitem__(self, span: slice) -> NDArray[_Sample]:
        """Return the samples from one position to another.

        Raises:
            IndexError: some are not kept, or not there yet.
        """
        if not self.start <= span.start <= span.stop <= self.end:
            raise IndexError(f"samples {span.start} to {span.stop} are wanted of {self.start} to {self.end}")
        return self._samples[span.start - self.start : span.stop - self.start]


class Front:
    """One channel from a certain sample on. What comes out is the same however the audio is cut into pieces.

    Args:
        start_sample: where its audio begins.
        denoise: whether the detectors hear it denoised.
        lookback_samples: how much silence they hear before the start.
    """

    def __init__(self, start_sample: int, *, denoise: bool, lookback_samples: int = 0) -> None:
        #: Where it really begins, on its grid.
        self.base_sample: Final = start_sample // START_GRID_SAMPLES * START_GRID_SAMPLES
        #: One past the last sample taken.
        self.end_sample = self.base_sample
        #: The original audio.
        self.original: Final = Track(self.base_sample, np.int16)
        #: What the detectors hear.
        self.heard: Final = Track(self.base_sample - lookback_samples, np.float32)
        self._upsampler: Upsampler | None = None
        self._denoiser = Denoiser() if denoise else None
        self.heard.append(np.zeros(lookback_samples, np.float32))
        self.silence(start_sample - self.base_sample)

    def push(self, samples: NDArray[np.float32], sample_rate_hz: int) -> None:
        """Take audio that follows without a gap, float32 in [-1, 1), at one of ``RATES_HZ``, which may change at any time."""
        self.end_sample += len(samples) * SAMPLE_RATE_HZ // sample_rate_hz
        if sample_rate_hz == SAMPLE_RATE_HZ:
            self._end_upsampling()
            self._take(samples)
        else:
            self._upsampler = self._upsampler or Upsampler()
            self._take(self._upsampler.push(samples))

    def silence(self, samples: int) -> None:
        """Take silence in place of audio that never came; none of it changes nothing."""
        if samples:
            self.push(np.zeros(samples, np.float32), SAMPLE_RATE_HZ)

    def finish(self, heard_to_sample: int) -> None:
        """End the audio here: what filters still owe comes out, and silence is heard up to a position. Nothing can follow."""
        self._end_upsampling()
        missing = heard_to_sample - self.heard.end
        if missing > 0:
            self._hear(np.zeros(missing + DELAY_SAMPLES + GRID_SAMPLES, np.float32))

    def forget(self, original_before: int, heard_before: int) -> None:
        """Drop what is not needed any more."""
        self.original.forget(original_before)
        self.heard.forget(heard_before)

    def _end_upsampling(self) -> None:
        if self._upsampler is not None:
            upsampler, self._upsampler = self._upsampler, None
            self._take(upsampler.flush())

    def _take(self, samples: NDArray[np.float32]) -> None:
        self.original.append(to_int16(samples))
        self._hear(samples)

    def _hear(self, samples: NDArray[np.float32]) -> None:
        self.heard.append(self._denoiser.push(samples) if self._denoiser else samples)
