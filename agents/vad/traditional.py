"""A detector without training: sub-band levels against an adaptive noise estimate, in the spirit of AMR-WB's (ITU-T G.722.2).

Each hop of 10 ms is judged on a window of 20 ms that ends with it. Levels in twelve bands are set against the noise estimated in
each; their mean signal-to-noise ratio must exceed a threshold that is lower in loud noise. What stays spectrally flat is white noise,
and steady tones (dial tone, ringback, keys) are no speech either, however loud. A burst of speech hangs over, so that weak ends
are kept.

What adapts goes hop by hop, over all channels at once.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.vad.spectrum import BIN_HZ

__all__ = ["Traditional"]

# AMR-WB's twelve bands, but without what lies below 100 Hz: direct current, and the hum of its switching; a line at 8 kHz leaves the last
# two silent.
_BAND_EDGES_HZ: Final = (100, 200, 400, 600, 800, 1_200, 1_600, 2_000, 2_400, 3_200, 4_000, 4_800, 6_400)
_EDGES: Final = np.array([round(edge / BIN_HZ) for edge in _BAND_EDGES_HZ])
_BANDS: Final = len(_EDGES) - 1
_TELEPHONE: Final = slice(round(300 / BIN_HZ), round(3_400 / BIN_HZ))


def _power(level_db: float) -> np.float32:
    return np.float32(10 ** (level_db / 10))


# Nothing under this is speech: a faint voice on a telephone is at -50 dB of full scale, and denoised up to 18 dB under that.
_SPEECH_FLOOR: Final = _power(-68)
# No band's noise is taken to be under this; 16-bit rounding alone is at -101 in all.
_NOISE_FLOOR: Final = _power(-85)
_NOISE_AT_START: Final = _power(-70)
# A band's ratio counts up to 15 dB: one band alone, of hum or a whistle, does not make it speech.
_RATIO_CAP: Final = np.float32(30)

# The threshold of the mean ratio, by the noise in all bands: straight between the two in decibels.
_QUIET_DB, _QUIET_RATIO = np.float32(-65), 6.0
_LOUD_DB, _LOUD_RATIO = np.float32(-35), 2.2
_RATIO_SLOPE: Final = np.float32((_LOUD_RATIO - _QUIET_RATIO) / (_LOUD_DB - _QUIET_DB))
_RATIO_AT_ZERO: Final = np.float32(_LOUD_RATIO - _LOUD_DB * _RATIO_SLOPE)

# The flatness (geometric over arithmetic mean of the power spectrum) of white noise is exp(-0.577) = 0.56, denoised 0.4; of vowels,
# under 0.1. Flat for the last 200 ms and flat now is noise; so an "s" in a word is not.
_FLAT: Final = np.float32(0.33)
_FLAT_NOW: Final = np.float32(0.2)
_FLATNESS_AT_START: Final = np.float32(0.5)
_FLATNESS_AVERAGE: Final = np.float32(0.05)
_LOG_GUARD: Final = np.float32(1e-12)

# A tone: two spectral lines hold nearly all power above 300 Hz, and stay where they are for 140 ms. A vowel, denoised, comes close to
# that: at 95 % a third of all speech passed for tones.
_LINE_BINS: Final = 2
# The window spreads a line over its bin and two others, at worst equally over two: its bin alone holds a third or more.
_LINE_SPREAD: Final = np.float32(3)
_TONE_SHARE: Final = np.float32(0.99)
_TONE_HOPS: Final = 14
_TONE_FLOOR_BIN: Final = _TELEPHONE.start

# The estimate of a band's noise moves by these shares of the difference, each hop.
_DOWN: Final = np.float32(0.05)
_UP_IN_SILENCE: Final = np.float32(0.03)
_UP_WHEN_STEADY: Final = np.float32(0.06)
# Silence is believed after 80 ms; speech that does not change for 600 ms is noise after all.
_SILENCE_HOPS: Final = 8
_STEADY_HOPS: Final = 60
# Steady: the bands' levels are on average within this factor (in power) of their running mean.
_STEADY_RATIO: Final = np.float32(6)
_AVERAGE: Final = np.float32(0.15)

# A click of less than 30 ms is no speech; after 50 ms of speech the decision holds for 140 ms.
_ONSET_HOPS: Final = 3
_BURST_HOPS: Final = 5
_HANGOVER_HOPS: Final = 14

# Where a channel's state keeps what: one float32 vector.
_NOISE: Final = slice(0, _BANDS)
_MEAN: Final = slice(_BANDS, 2 * _BANDS)
_STEADY, _BURST, _HANG, _SILENT, _TONE, _LINE_1, _LINE_2, _FLATNESS = range(2 * _BANDS, 2 * _BANDS + 8)


class _Spectra(NamedTuple):
    """What one hop's decision needs, for many hops: leading axes as in the input."""

    bands: NDArray[np.float32]
    loud: NDArray[np.bool_]
    flatness: NDArray[np.float32]
    flat: NDArray[np.bool_]
    #: The lines of a pure sound, where the hop before had them.
    steady_lines: NDArray[np.bool_]


def _lines(power: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.float32], NDArray[np.float32]]:
    """Return whether two lines hold nearly all the power above 300 Hz, and in which bins they are, the stronger first."""
    above = power[:, _TONE_FLOOR_BIN:]
    total = above.sum(axis=1)
    rows = np.arange(len(above))
    first = above.argmax(axis=1)
    second = np.zeros_like(first)
    # The stronger line itself and its neighbours hold half of what two lines must; most hops end here.
    likely = above[rows, first] * _LINE_SPREAD > _TONE_SHARE / 2 * total
    pure = np.zeros(len(above), np.bool_)
    if likely.any():
        rest = np.pad(above[likely], ((0, 0), (_LINE_BINS, _LINE_BINS)))
        span = np.arange(2 * _LINE_BINS + 1)
        picked = np.arange(len(rest))[:, np.newaxis]
        rest[picked, first[likely, np.newaxis] + span] = 0
        second[likely] = rest[:, _LINE_BINS:-_LINE_BINS].argmax(axis=1)
        rest[picked, second[likely, np.newaxis] + span] = 0
        pure[likely] = rest.sum(axis=1) < (1 - _TONE_SHARE) * total[likely]
    return pure, first.astype(np.float32), second.astype(np.float32)


def _measure(power: NDArray[np.float32], firsts: NDArray[np.intp], states: NDArray[np.float32]) -> _Spectra:
    """Measure spectra, hops x bins, and note in the states which lines the last of each channel had."""
    bands = np.add.reduceat(power[:, : _EDGES[-1]], _EDGES[:-1], axis=1)
    telephone = np.ascontiguousarray(power[:, _TELEPHONE])
    mean = telephone.mean(axis=1)
    flatness = np.exp(np.log(telephone + _LOG_GUARD).mean(axis=1)) / (mean + _LOG_GUARD)
    pure, line_1, line_2 = _lines(power)
    before_1, before_2 = np.roll(line_1, 1), np.roll(line_2, 1)
    lasts = np.append(firsts[1:], len(power)) - 1
    before_1[firsts], before_2[firsts] = states[:, _LINE_1], states[:, _LINE_2]
    states[:, _LINE_1], states[:, _LINE_2] = line_1[lasts], line_2[lasts]
    # Two equal lines change places.
    stays = (np.abs(line_1 - before_1) <= 1) | (np.abs(line_1 - before_2) <= 1)
    return _Spectra(bands, bands.sum(axis=1) > _SPEECH_FLOOR, flatness, flatness > _FLAT_NOW, pure & stays)


def _mean(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return each row's mean over the bands; for so few rows ``mean`` itself costs four times as much."""
    mean: NDArray[np.float32] = np.add.reduce(values, axis=1) / np.float32(_BANDS)
    return mean


def _threshold(noise: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the ratio that speech must exceed, from the noise's power in all bands."""
    noise_db = np.float32(10) * np.log10(noise)
    ratio: NDArray[np.float32] = np.minimum(np.maximum(noise_db, _QUIET_DB), _LOUD_DB) * _RATIO_SLOPE + _RATIO_AT_ZERO
    return ratio


class Traditional:
    """The detector. It keeps nothing itself: each channel's state is a float32 vector that the caller holds."""

    state_size: Final = _FLATNESS + 1

    def fresh(self) -> NDArray[np.float32]:
        """Return the state at the start of a channel."""
        state = np.zeros(self.state_size, np.float32)
        state[_NOISE] = state[_MEAN] = _NOISE_AT_START / _BANDS
        state[_STEADY] = _STEADY_HOPS
        state[_FLATNESS] = _FLATNESS_AT_START
        return state

    def __call__(
        self,
        power: NDArray[np.float32],
        counts: NDArray[np.intp],
        states: NDArray[np.float32],
        margins_db: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Judge hops; a channel's result does not depend on the other channels, nor on how its hops are spread over calls.

        Args:
            power: spectra, float32, all channels' hops one after the other x bins.
            counts: how many hops each channel has, in falling order.
            states: float32, channels x ``state_size``.
            margins_db: by how much more than usual speech must stand out, for each channel.

        Returns:
            Whether each hop is speech, in the order of ``power``, and the new states.
        """
        speech = np.zeros(len(power), np.bool_)
        states = states.copy()
        if not len(power):
            return speech, states
        firsts = np.cumsum(counts) - counts
        spectra = _measure(power, firsts, states)
        margins = np.ones(len(states), np.float32) if margins_db is None else np.float32(10) ** (margins_db / np.float32(10))
        alike = counts[0] == counts[-1]
        for hop in range(int(counts[0])):
            channels = int(np.searchsorted(-counts, -hop))  # those that have this many hops come first
            # Where all have as many, as they mostly do, the rows are evenly spaced, and nothing need be copied.
            rows = slice(hop, None, int(counts[0])) if alike else firsts[:channels] + hop
            now: Any = (measure[rows] for measure in spectra)
            speech[rows] = _advance(_Spectra(*now), states[:channels], margins[:channels])
        return speech, states


def _advance(now: _Spectra, states: NDArray[np.float32], margins: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Judge one hop of each channel and move the states, in place, past it."""
    noise = states[:, _NOISE]
    ratio = now.bands / noise
    np.minimum(ratio, _RATIO_CAP, out=ratio)
    run = states[:, _TONE] = np.where(now.steady_lines, states[:, _TONE] + 1, 0)
    tone = run >= _TONE_HOPS
    flatness = states[:, _FLATNESS]
    flatness += (now.flatness - flatness) * _FLATNESS_AVERAGE
    speech = now.loud & (_mean(ratio) > _threshold(np.add.reduce(noise, axis=1)) * margins)
    speech &= ~(tone | ((flatness > _FLAT) & now.flat))

    silent = states[:, _SILENT] = np.where(speech, 0, states[:, _SILENT] + 1)
    _follow_noise(now, states, silent)

    burst = states[:, _BURST] = np.where(speech, states[:, _BURST] + 1, 0)
    hang = np.where(burst >= _BURST_HOPS, _HANGOVER_HOPS, states[:, _HANG] - ~speech)
    hang = states[:, _HANG] = np.where(tone, 0, np.maximum(hang, 0))
    held: NDArray[np.bool_] = (burst >= _ONSET_HOPS) | (hang > 0)
    return held


def _follow_noise(now: _Spectra, states: NDArray[np.float32], silent: NDArray[np.float32]) -> None:
    """Move the noise estimates: down at once, up only in silence, or where nothing has changed for long."""
    mean = states[:, _MEAN]
    lower = np.minimum(now.bands, mean)
    np.maximum(lower, _NOISE_FLOOR, out=lower)
    change = _mean(np.maximum(now.bands, mean) / lower)
    steady = states[:, _STEADY] = np.where(change < _STEADY_RATIO, np.maximum(states[:, _STEADY] - 1, 0), _STEADY_HOPS)
    mean += (now.bands - mean) * _AVERAGE

    up = np.where(silent >= _SILENCE_HOPS, _UP_IN_SILENCE, np.where(steady == 0, _UP_WHEN_STEADY, np.float32(0)))
    noise = states[:, _NOISE]
    difference = now.bands - noise
    noise += difference * np.where(difference < 0, _DOWN, up[:, np.newaxis])
    np.maximum(noise, _NOISE_FLOOR, out=noise)
