"""Calls that never were: recorded speech with known boundaries, placed in noise at a known ratio and sent over a line.

Everything is drawn from one generator, so that a seed names its scenes. Training and evaluation make their scenes here, from recordings
of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.signal import butter, fftconvolve, sosfilt

from agents.vad.decode import decode, to_int16
from agents.vad.resample import Upsampler
from agents.vad.spectrum import HOP_SAMPLES
from ops.train.vad.labels import Labels, label
from ops.train.vad.sources import Recording, read_audio
from schemas.records import SAMPLE_RATE_HZ, Encoding

__all__ = [
    "LINES",
    "Clip",
    "Line",
    "Placed",
    "Scene",
    "at_speed",
    "babble",
    "clips",
    "compose",
    "lose_packets",
    "room",
    "send",
    "string_digits",
    "tilted",
]

Samples = NDArray[np.float32]

Line = Literal["wide", "narrow", "mulaw", "alaw"]
LINES: Final[tuple[Line, ...]] = ("wide", "narrow", "mulaw", "alaw")

_TELEPHONE_HZ: Final = 8_000
_MS: Final = SAMPLE_RATE_HZ // 1_000
#: Speech is cut out of its recording with this much around it, faded in and out.
_MARGIN_HOPS: Final = 12
_FADE_SAMPLES: Final = 40 * _MS
#: A recording of more than 8 s is taken apart at its pauses of more than 400 ms.
_LONG_HOPS: Final = 800
_PAUSE_HOPS: Final = 40
#: Every clip comes at this level while it is speech; a scene's gain follows.
_SPEECH_RMS: Final = np.float32(0.05)
#: A packet holds 20 ms.
_PACKET_SAMPLES: Final = 20 * _MS
_QUIET: Final = np.float32(1e-9)


@dataclass(frozen=True, slots=True)
class Clip:
    """Speech with its labels, one boolean a hop each; a whole number of hops."""

    name: str
    speaker: str
    samples: Samples
    speech: NDArray[np.bool_]
    doubtful: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Placed:
    """A clip in a scene."""

    name: str
    start_sample: int


@dataclass(slots=True)
class Scene:
    """Audio as a channel hears it at 16 kHz, and what is known of it.

    Attributes:
        samples: float32, a whole number of hops.
        speech: whether each hop is speech.
        doubtful: whether that is not certain.
        placed: what was said where.
    """

    samples: Samples
    speech: NDArray[np.bool_]
    doubtful: NDArray[np.bool_]
    placed: list[Placed] = field(default_factory=list)


def rms(samples: Samples) -> np.float32:
    """Return the root of the mean square, never zero."""
    return np.float32(np.sqrt(np.square(samples, dtype=np.float64).mean()) + _QUIET)


def clips(found: Sequence[Recording]) -> list[Clip]:
    """Read recordings, label them, and cut the speech out of each; those without any are left out."""
    made = []
    for recording in found:
        samples = read_audio(recording.path)
        labels = label(samples)
        for first, last in _stretches(labels.speech):
            name = recording.name if last - first == len(labels.speech) else f"{recording.name}[{first}:{last}]"
            made.append(_cut(name, recording.speaker, samples, labels, first, last))
    return made


def _stretches(speech: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the hops from the first to the last speech with the margins; in pieces, if long and if there are pauses."""
    hops = np.flatnonzero(speech)
    if not len(hops):
        return []
    pauses = np.flatnonzero(np.diff(hops) > _PAUSE_HOPS) if len(speech) > _LONG_HOPS else np.zeros(0, np.intp)
    firsts, lasts = hops[np.r_[0, pauses + 1]], hops[np.r_[pauses, -1]] + 1
    return [(max(0, int(a) - _MARGIN_HOPS), min(len(speech), int(b) + _MARGIN_HOPS)) for a, b in zip(firsts, lasts, strict=True)]


def _cut(name: str, speaker: str, samples: Samples, labels: Labels, first: int, last: int) -> Clip:
    speech, doubtful = labels.speech[first:last], labels.doubtful[first:last]
    cut = samples[first * HOP_SAMPLES : last * HOP_SAMPLES].copy()
    active = np.repeat(speech, HOP_SAMPLES)
    cut *= _SPEECH_RMS / rms(cut[active])
    fade = np.linspace(0, 1, min(_FADE_SAMPLES, len(cut) // 2), dtype=np.float32)
    cut[: len(fade)] *= fade
    cut[len(cut) - len(fade) :] *= fade[::-1]
    return Clip(name, speaker, cut, speech, doubtful)


def string_digits(rng: np.random.Generator, digits: Sequence[Clip]) -> Clip:
    """Return 3 to 8 digits of one speaker, 50 to 250 ms apart, as one clip."""
    speaker = rng.choice(sorted({digit.speaker for digit in digits}))
    voice = [digit for digit in digits if digit.speaker == speaker]
    said = [voice[index] for index in rng.choice(len(voice), rng.integers(3, 9), replace=False)]
    samples, speech, doubtful = [], [], []
    for digit in said:
        # The margins of both neighbours lie between their speech.
        first, last = np.flatnonzero(digit.speech)[[0, -1]]
        pause = int(rng.integers(5, 26))
        samples += [digit.samples[first * HOP_SAMPLES : (last + 1) * HOP_SAMPLES], np.zeros(pause * HOP_SAMPLES, np.float32)]
        speech += [digit.speech[first : last + 1], np.zeros(pause, np.bool_)]
        doubtful += [digit.doubtful[first : last + 1], np.zeros(pause, np.bool_)]
    name = " + ".join(digit.name for digit in said)
    return Clip(name, str(speaker), np.concatenate(samples), np.concatenate(speech), np.concatenate(doubtful))


def at_speed(clip: Clip, speed: float) -> Clip:
    """Play a clip faster or slower, pitch and all."""
    import soxr

    hops = int(len(clip.speech) / speed)
    samples = soxr.resample(clip.samples, SAMPLE_RATE_HZ * speed, SAMPLE_RATE_HZ, quality="MQ").astype(np.float32)
    length = hops * HOP_SAMPLES
    samples = np.pad(samples[:length], (0, max(0, length - len(samples))))
    origin = np.minimum((np.arange(hops) * speed).astype(np.intp), len(clip.speech) - 1)
    return Clip(clip.name, clip.speaker, samples, clip.speech[origin], clip.doubtful[origin])


def babble(rng: np.random.Generator, voices: Sequence[Clip], length: int) -> Samples:
    """Return 4 to 9 people who talk at once, none of them near."""
    out = np.zeros(length, np.float32)
    for _ in range(rng.integers(4, 10)):
        pieces: list[Samples] = []
        while sum(map(len, pieces)) < length + SAMPLE_RATE_HZ:
            pieces.append(voices[int(rng.integers(len(voices)))].samples)
        talk = np.concatenate(pieces)
        start = rng.integers(0, len(talk) - length + 1)
        out += talk[start : start + length] * np.float32(rng.uniform(0.5, 1.5))
    return out


def room(rng: np.random.Generator, samples: Samples) -> Samples:
    """Put speech into a room that rings for 0.1 to 0.5 s."""
    count = int(rng.uniform(0.1, 0.5) * SAMPLE_RATE_HZ)
    # 60 dB down at the end: e^-6.9.
    tail = rng.standard_normal(count) * np.exp(np.linspace(0, -6.9, count))
    tail *= rng.uniform(0.2, 0.7) / np.sqrt(np.square(tail).sum())
    tail[0] = 1.0
    return fftconvolve(samples, tail)[: len(samples)].astype(np.float32)


def tilted(rng: np.random.Generator, samples: Samples) -> Samples:
    """Let a sound pass through a gentle filter, as another microphone or wall would."""
    edge_hz = rng.uniform(200, 3_000)
    part = sosfilt(butter(1, edge_hz, rng.choice(("low", "high")), fs=SAMPLE_RATE_HZ, output="sos"), samples)
    return (samples + rng.uniform(0, 3) * part).astype(np.float32)


def compose(
    rng: np.random.Generator,
    length: int,
    draw: Callable[[], Clip],
    gaps_s: tuple[float, float],
    *,
    reverberant: bool = False,
) -> Scene:
    """Return a scene of one clip after another, with silence between them; none starts that would not end within it.

    Args:
        rng: what is random.
        length: in samples, a whole number of hops.
        draw: draws the next clip.
        gaps_s: the shortest and the longest silence, in seconds.
        reverberant: whether it is spoken in a room.
    """
    hops = length // HOP_SAMPLES
    scene = Scene(np.zeros(length, np.float32), np.zeros(hops, np.bool_), np.zeros(hops, np.bool_))
    place = round(rng.uniform(*gaps_s) * SAMPLE_RATE_HZ / HOP_SAMPLES)
    while place + len((clip := draw()).speech) < hops:
        end = place + len(clip.speech)
        scene.samples[place * HOP_SAMPLES : end * HOP_SAMPLES] += clip.samples
        scene.speech[place:end] = clip.speech
        scene.doubtful[place:end] = clip.doubtful
        scene.placed.append(Placed(clip.name, place * HOP_SAMPLES))
        place = end + round(rng.uniform(*gaps_s) * SAMPLE_RATE_HZ / HOP_SAMPLES)
    if reverberant:
        scene.samples = room(rng, scene.samples)
    return scene


def lose_packets(rng: np.random.Generator, samples: Samples, share: float) -> Samples:
    """Let packets of 20 ms get lost, in runs: silence stands for some, the packet before for others."""
    out = samples.copy()
    lost = rng.random(len(out) // _PACKET_SAMPLES) < share / 2
    lost[1:] |= lost[:-1] & (rng.random(len(lost) - 1) < 0.5)
    repeat = rng.random() < 0.5
    for number in np.flatnonzero(lost):
        begin = number * _PACKET_SAMPLES
        before = out[begin - _PACKET_SAMPLES : begin]
        out[begin : begin + _PACKET_SAMPLES] = before * np.float32(0.7) if repeat and len(before) else 0
    return out


def send(samples: Samples, line: Line) -> Samples:
    """Return what arrives at 16 kHz of audio that was sent over a line, as a recorder delivers it and the front decodes it."""
    if line == "wide":
        return decode(to_int16(samples).astype("<i2").tobytes(), "pcm_s16le")
    import soxr

    narrow = soxr.resample(samples, SAMPLE_RATE_HZ, _TELEPHONE_HZ)[: len(samples) // 2].astype(np.float32)
    narrow = _companded(narrow, line) if line != "narrow" else decode(to_int16(narrow).astype("<i2").tobytes(), "pcm_s16le")
    upsampler = Upsampler()
    return np.concatenate([upsampler.push(narrow), upsampler.flush()])[: len(samples)]


def _companded(samples: Samples, law: Encoding) -> Samples:
    """Round samples to the nearest of the 256 values of a law."""
    values = np.unique(decode(bytes(range(256)), law))
    borders = (values[1:] + values[:-1]) / 2
    return values[np.searchsorted(borders, samples)]
