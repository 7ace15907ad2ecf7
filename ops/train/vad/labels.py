"""Where speech is in a clean recording, hop by hop: where there is energy, and Silero agrees.

Energy finds boundaries to a hop but takes a breath or a slammed door for speech; Silero knows speech but blurs its boundaries. So a
hop is speech if it is loud enough and lies in, or close to, what Silero calls speech. Hops that are loud without Silero's consent, or
the other way round, are *doubtful*: training leaves them out.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import binary_closing, binary_dilation, binary_opening

from agents.vad.silero import Silero
from agents.vad.spectrum import HOP_SAMPLES

__all__ = ["Labels", "label", "silero_probabilities"]

#: Silero's consent: lower than its usual 0.5, because energy decides too.
_CONSENT: Final = 0.35
#: And it holds for 80 ms around, the blur of its windows of 32 ms and of its memory.
_BLUR_HOPS: Final = 8
#: Loud enough: within 38 dB of the loud parts of speech, and 8 dB above the quiet of the recording.
_RANGE_DB: Final = 38.0
_OVER_QUIET_DB: Final = 8.0
_LOUD_PERCENTILE: Final = 95
_QUIET_PERCENTILE: Final = 5
#: The closure of a plosive, up to 120 ms, belongs to its word; what is loud for less than 30 ms does not begin one.
_CLOSURE_HOPS: Final = 12
_CLICK_HOPS: Final = 3
_POWER_GUARD: Final = 1e-10


class Labels(NamedTuple):
    """One boolean a hop each."""

    speech: NDArray[np.bool_]
    doubtful: NDArray[np.bool_]


def silero_probabilities(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return Silero's probability for each hop of one channel: that of the window that holds the hop's middle."""
    silero = _silero()
    window, context = silero.window_samples, silero.context_samples
    count = -(-len(samples) // window)
    padded = np.pad(samples, (context, count * window - len(samples)))
    state = np.zeros((1, silero.state_size), np.float32)
    said = np.zeros(count, np.float32)
    for number in range(count):
        first = number * window
        probability, state = silero(padded[np.newaxis, first : first + context + window], state)
        said[number] = probability[0]
    middles = np.arange(len(samples) // HOP_SAMPLES) * HOP_SAMPLES + HOP_SAMPLES // 2
    return said[middles // window]


def label(samples: NDArray[np.float32]) -> Labels:
    """Return where speech is in a clean recording at 16 kHz."""
    hops = len(samples) // HOP_SAMPLES
    power = np.square(samples[: hops * HOP_SAMPLES]).reshape(hops, HOP_SAMPLES).mean(axis=1)
    level_db = 10 * np.log10(power + _POWER_GUARD)
    likely = silero_probabilities(samples) > _CONSENT
    if not likely.any():
        return Labels(np.zeros(hops, np.bool_), level_db > np.percentile(level_db, _QUIET_PERCENTILE) + _OVER_QUIET_DB)
    peak_db = np.percentile(level_db[likely], _LOUD_PERCENTILE)
    quiet_db = np.percentile(level_db, _QUIET_PERCENTILE)
    loud = level_db > max(peak_db - _RANGE_DB, min(quiet_db + _OVER_QUIET_DB, peak_db - _OVER_QUIET_DB))
    loud = binary_opening(loud, np.ones(_CLICK_HOPS, np.bool_))
    loud = binary_closing(np.pad(loud, _CLOSURE_HOPS), np.ones(_CLOSURE_HOPS, np.bool_))[_CLOSURE_HOPS:-_CLOSURE_HOPS]
    speech = loud & binary_dilation(likely, np.ones(2 * _BLUR_HOPS + 1, np.bool_))
    return Labels(speech, (loud | likely) & ~speech)


@cache
def _silero() -> Silero:
    return Silero()
