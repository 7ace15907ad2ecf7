"""Sounds that no recording is needed for: noise of every colour, fans, hum, keys, knocks, tones, rings, music of a kind.

Each is a function of a generator and a length, and returns float32 at 16 kHz, of any level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.signal import butter, lfilter, sosfilt

from schemas.records import SAMPLE_RATE_HZ

__all__ = ["SOUNDS", "Sound"]

Samples = NDArray[np.float32]
Sound = Callable[[np.random.Generator, int], Samples]

_NYQUIST_HZ: Final = SAMPLE_RATE_HZ / 2
#: The slope of a spectrum whose power falls by 3, and by 6 dB an octave: amplitude over frequency to this power.
_PINK, _BROWN = 0.5, 1.0


def _seconds(length: int) -> NDArray[np.float64]:
    return np.arange(length) / SAMPLE_RATE_HZ


def _sloped(rng: np.random.Generator, length: int, slope: float) -> Samples:
    """Return noise whose amplitude falls with frequency to the power of ``slope``."""
    spectrum = np.fft.rfft(rng.standard_normal(length))
    frequency = np.maximum(np.fft.rfftfreq(length, 1 / SAMPLE_RATE_HZ), 20.0)
    return np.fft.irfft(spectrum / frequency**slope, length).astype(np.float32)


def white(rng: np.random.Generator, length: int) -> Samples:
    """Noise as loud everywhere."""
    return rng.standard_normal(length).astype(np.float32)


def pink(rng: np.random.Generator, length: int) -> Samples:
    """Noise that falls by 3 dB an octave."""
    return _sloped(rng, length, _PINK)


def brown(rng: np.random.Generator, length: int) -> Samples:
    """Noise that falls by 6 dB an octave: traffic far away."""
    return _sloped(rng, length, _BROWN)


def shaped(rng: np.random.Generator, length: int) -> Samples:
    """Noise through two or three resonances, its level wandering: rooms, engines, air."""
    noise = _sloped(rng, length, rng.uniform(0, 1))
    for _ in range(rng.integers(1, 4)):
        centre = rng.uniform(100, 6_000)
        width = centre * rng.uniform(0.05, 0.6)
        low, high = max(30.0, centre - width), min(_NYQUIST_HZ - 100, centre + width)
        resonance = sosfilt(butter(2, (low, high), "bandpass", fs=SAMPLE_RATE_HZ, output="sos"), noise).astype(np.float32)
        noise = noise + np.float32(rng.uniform(0.3, 3)) * resonance
    levels_db = rng.uniform(-6, 6, length // SAMPLE_RATE_HZ + 2)
    wander_db = np.interp(_seconds(length), np.arange(len(levels_db)), levels_db)
    return (noise * 10 ** (wander_db / 20)).astype(np.float32)


def fan(rng: np.random.Generator, length: int) -> Samples:
    """An air conditioner: pink noise, the blades' hum and a slow beat."""
    seconds = _seconds(length)
    blades_hz = rng.uniform(60, 240)
    noise = _sloped(rng, length, rng.uniform(0.4, 0.9))
    noise /= noise.std()
    tone = sum(np.sin(2 * np.pi * (order * blades_hz * seconds + rng.random())) / order for order in range(1, 5))
    beat = 1 + rng.uniform(0, 0.4) * np.sin(2 * np.pi * rng.uniform(0.3, 6) * seconds)
    return ((noise + rng.uniform(0, 0.8) * tone) * beat).astype(np.float32)


def hum(rng: np.random.Generator, length: int) -> Samples:
    """Mains hum, 50 or 60 Hz and its overtones, on a little noise."""
    seconds, mains_hz = _seconds(length), rng.choice((50.0, 60.0))
    lines = sum(rng.uniform(0.05, 1) / order * np.sin(2 * np.pi * order * mains_hz * seconds) for order in range(1, 16))
    return np.asarray(lines + rng.uniform(0.001, 0.1) * rng.standard_normal(length), np.float32)


def _struck(rng: np.random.Generator, length: int, onsets: NDArray[np.intp], decay_s: tuple[float, float], lines: int) -> Samples:
    """Return blows at some places: each a short burst of noise and a few resonances that die away."""
    out = np.zeros(length + SAMPLE_RATE_HZ, np.float32)
    centres = rng.uniform(150, 6_500, lines)
    for onset in onsets:
        decay = rng.uniform(*decay_s)
        count = min(SAMPLE_RATE_HZ, int(6 * decay * SAMPLE_RATE_HZ) + 64)
        seconds = np.arange(count) / SAMPLE_RATE_HZ
        ring = sum(
            rng.uniform(0.1, 1) * np.sin(2 * np.pi * (centre * rng.uniform(0.97, 1.03) * seconds + rng.random())) for centre in centres
        )
        blow = (rng.uniform(0.2, 2) * rng.standard_normal(count) * np.exp(-seconds / 0.004) + ring * rng.uniform(0, 1)) * np.exp(
            -seconds / decay
        )
        out[onset : onset + count] += rng.uniform(0.15, 1) * blow.astype(np.float32)
    return out[:length]


def keys(rng: np.random.Generator, length: int) -> Samples:
    """Typing: two blows a key, in runs of 3 to 9 keys a second with pauses between."""
    onsets, place = [], rng.integers(0, SAMPLE_RATE_HZ)
    while place < length:
        rate = rng.uniform(3, 9)
        for _ in range(rng.integers(3, 25)):
            onsets.append(place)
            onsets.append(place + int(rng.uniform(0.05, 0.12) * SAMPLE_RATE_HZ))
            place += int(rng.gamma(4, 1 / (4 * rate)) * SAMPLE_RATE_HZ) + 1
        place += int(rng.exponential(0.8) * SAMPLE_RATE_HZ)
    at = np.array([onset for onset in onsets if onset < length], np.intp)
    return _struck(rng, length, at, (0.003, 0.02), int(rng.integers(2, 6))) + 0.003 * pink(rng, length)


def knocks(rng: np.random.Generator, length: int) -> Samples:
    """Dishes, doors, things put down: irregular blows that ring."""
    count = max(1, rng.poisson(length / SAMPLE_RATE_HZ * rng.uniform(0.5, 5)))
    at = np.sort(rng.integers(0, length, count)).astype(np.intp)
    bed = pink(rng, length)
    bed *= np.float32(rng.uniform(0.0005, 0.01)) / bed.std()
    return _struck(rng, length, at, (0.01, 0.15), int(rng.integers(2, 9))) + bed


def clicks(rng: np.random.Generator, length: int) -> Samples:
    """Single samples gone wrong, and short bursts of them."""
    out = np.zeros(length, np.float32)
    for place in rng.integers(0, length, max(1, rng.poisson(length / SAMPLE_RATE_HZ * rng.uniform(1, 12)))):
        out[place : place + rng.integers(1, 40)] = rng.uniform(-1, 1)
    return out + np.float32(0.002) * white(rng, length)


def _cadenced(rng: np.random.Generator, length: int, lines_hz: tuple[float, ...], on_s: float, off_s: float) -> Samples:
    seconds = _seconds(length) + rng.uniform(0, on_s + off_s)
    tone = sum(np.sin(2 * np.pi * line * seconds) for line in lines_hz)
    envelope = lfilter([0.02], [1, -0.98], (seconds % (on_s + off_s) < on_s).astype(float))
    return np.asarray(tone * envelope + 0.002 * rng.standard_normal(length), np.float32)


def progress(rng: np.random.Generator, length: int) -> Samples:
    """Dial, ringback, busy and congestion tones of several countries."""
    kind = (
        ((425.0,), 1.0, 4.0),
        ((440.0, 480.0), 2.0, 4.0),
        ((400.0, 450.0), 0.4, 0.2),
        ((425.0,), 0.5, 0.5),
        ((480.0, 620.0), 0.5, 0.5),
        ((450.0,), 0.35, 0.35),
        ((350.0, 440.0), 1e6, 0.0),
        ((425.0,), 1e6, 0.0),
        ((1_400.0,), 0.4, 10.0),
    )[rng.integers(9)]
    return _cadenced(rng, length, *kind)


def dialling(rng: np.random.Generator, length: int) -> Samples:
    """Keys of a telephone: two lines each, 60 to 200 ms."""
    out, place = np.zeros(length, np.float32), 0
    while place < length:
        count = min(length - place, int(rng.uniform(0.06, 0.2) * SAMPLE_RATE_HZ))
        seconds = np.arange(count) / SAMPLE_RATE_HZ
        low, high = rng.choice((697, 770, 852, 941)), rng.choice((1_209, 1_336, 1_477))
        out[place : place + count] = np.sin(2 * np.pi * low * seconds) + np.sin(2 * np.pi * high * seconds)
        place += count + int(rng.gamma(2, 0.15) * SAMPLE_RATE_HZ) + 800
    return out + np.float32(0.003) * white(rng, length)


def tune(rng: np.random.Generator, length: int) -> Samples:
    """A tune of plucked or held notes with overtones, over chords and a beat."""
    out = np.zeros(length + 4 * SAMPLE_RATE_HZ, np.float32)
    beat_s = rng.uniform(0.2, 0.6)
    scale = np.array((0, 2, 4, 5, 7, 9, 11))
    root = rng.uniform(110, 260)
    overtones = rng.uniform(0.05, 0.8) ** np.arange(1, 9)
    held = rng.random() < 0.5
    vibrato = rng.uniform(0, 0.006)
    place, degree = 0, int(rng.integers(0, 14))
    while place < length:
        notes = [degree, *(degree - interval for interval in (2, 4, 7)[: rng.integers(0, 4)])]
        duration_s = beat_s * rng.choice((0.5, 1, 1, 2, 3))
        count = int(duration_s * SAMPLE_RATE_HZ * (1.0 if held else 2.0))
        seconds = np.arange(count) / SAMPLE_RATE_HZ
        envelope = np.minimum(seconds / 0.02, 1) * (np.minimum((seconds[-1] - seconds) / 0.05, 1) if held else np.exp(-seconds * 4))
        for note in notes:
            pitch_hz = root * 2 ** ((scale[note % 7] + 12 * (note // 7)) / 12)
            phase = 2 * np.pi * pitch_hz * (seconds + vibrato * np.sin(2 * np.pi * 5.5 * seconds) / 5.5)
            voice = sum(gain * np.sin(order * phase) for order, gain in enumerate(overtones, 1) if order * pitch_hz < _NYQUIST_HZ)
            out[place : place + count] += (voice * envelope).astype(np.float32)
        place += int(duration_s * SAMPLE_RATE_HZ)
        degree = int(np.clip(degree + rng.integers(-3, 4), 0, 20))
    drums = _struck(rng, length, np.arange(0, length, max(800, int(beat_s * SAMPLE_RATE_HZ)), dtype=np.intp), (0.01, 0.08), 3)
    return out[:length] + np.float32(rng.uniform(0, 1.5)) * drums


#: By name, as scenes list them.
SOUNDS: Final[dict[str, Sound]] = {
    sound.__name__: sound for sound in (white, pink, brown, shaped, fan, hum, keys, knocks, clicks, progress, dialling, tune)
}
