"""The labelled set: speech with known boundaries in noise, from speakers and noises that training never heard.

It is rebuilt from the recordings of ``ops/train/vad/sources.tsv``: the same scenes each time, whose contents ``scenes.tsv`` names one by
one. Within one ratio of speech to noise no recording is used twice, and no recorded noise is looped. There are two such sets, of other
speakers, noises and pieces of music each: thresholds are chosen on the one of the split *development*; the *held-out* one only tells how
good they are. The first is the harder one: half of what is said there is said faster or slower, much of it in rooms, more beside babble.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from agents.vad.spectrum import HOP_SAMPLES
from ops.train.vad.scenes import LINES, Clip, Line, Placed, Scene, at_speed, babble, clips, compose, rms, send, string_digits
from ops.train.vad.sounds import SOUNDS
from ops.train.vad.sources import Recording, Split, of_kind, read_audio, recordings
from schemas.records import SAMPLE_RATE_HZ

__all__ = ["SNRS_DB", "Part", "TestScene", "build", "regions", "write_manifest"]

Samples = NDArray[np.float32]
Part = Literal["recorded", "generated"]

#: Another edition is another draw of everything. Once its figures have led to a change, an edition is no longer blind.
_EDITION: Final = 5

SNRS_DB: Final = (-5, 0, 5, 10, 15, 20)
#: Generated noise lasts as long as it takes; recorded noise at most this, so that the longest do not outweigh the others.
_GENERATED_SECONDS: Final = 24
_LONGEST_SECONDS: Final = 36
_SHORTEST_SECONDS: Final = 6
#: Longer than the closing, so that utterances are regions of their own.
_GAPS_S: Final = (0.7, 2.5)
#: Levels of speech, and of noise alone, in decibels of full scale.
_SPEECH_DB: Final = (-34.0, -18.0)
_NOISE_DB: Final = (-50.0, -25.0)
_DIGITS_SHARE: Final = 0.15
#: The development set is to be harder than what it stands for: so many clips come at another speed, so many scenes from a room, and babble
#: so many times.
_OTHER_SPEED_SHARE: Final = 0.5
_SPEEDS: Final = (0.85, 1.2)
_ROOM_SHARE: Final = 0.4
_BABBLES: Final = 4
#: Pauses up to this belong to a region, and what is shorter than the other is none.
_JOINED_HOPS: Final = 30
_SHORTEST_REGION_HOPS: Final = 10


@dataclass(frozen=True, slots=True)
class TestScene:
    """One scene.

    Attributes:
        name: what it is called.
        part: whether its noise was recorded or generated.
        noise: the kind of noise.
        noise_name: the recording and where it begins there, or the generator.
        snr_db: speech to noise; None for noise alone.
        line: how it came.
        samples: what arrives, float32 at 16 kHz.
        speech: whether each hop is speech.
        placed: what is said where.
    """

    __test__ = False

    name: str
    part: Part
    noise: str
    noise_name: str
    snr_db: int | None
    line: Line
    samples: Samples
    speech: NDArray[np.bool_]
    placed: tuple[Placed, ...]

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / SAMPLE_RATE_HZ


def regions(speech: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the reference regions, first hop and one past the last: gaps under 300 ms joined, specks under 100 ms left out."""
    hops = np.flatnonzero(speech)
    if not len(hops):
        return []
    breaks = np.flatnonzero(np.diff(hops) > _JOINED_HOPS)
    firsts, lasts = hops[np.r_[0, breaks + 1]], hops[np.r_[breaks, -1]] + 1
    return [(int(a), int(b)) for a, b in zip(firsts, lasts, strict=True) if b - a >= _SHORTEST_REGION_HOPS]


class _Deck:
    """Clips, each dealt once before any comes again."""

    def __init__(self, rng: np.random.Generator, utterances: Sequence[Clip], digits: Sequence[Clip], *, hard: bool) -> None:
        self._rng, self._utterances, self._digits = rng, utterances, digits
        self._left: list[int] = []
        #: Whether some are spoken faster or slower.
        self.hard: Final = hard

    def deal(self) -> Clip:
        clip = self._next()
        if self.hard and self._rng.random() < _OTHER_SPEED_SHARE:
            return at_speed(clip, float(self._rng.uniform(*_SPEEDS)))
        return clip

    def _next(self) -> Clip:
        if self._rng.random() < _DIGITS_SHARE:
            return string_digits(self._rng, self._digits)
        self._left = self._left or self._rng.permutation(len(self._utterances)).tolist()
        return self._utterances[self._left.pop()]


@dataclass(frozen=True, slots=True)
class _Noise:
    part: Part
    kind: str
    name: str
    draw: Callable[[np.random.Generator], Samples]


def _noises(found: Sequence[Recording], voices: Sequence[Clip], *, alone: bool, babbles: int) -> Iterator[_Noise]:
    """Yield the noises: recorded ones whole if they are heard alone, else a stretch of the longer ones."""
    for recording in of_kind(found, "noise", "keyboard", "music", "tone"):
        samples = read_audio(recording.path)
        kind = "room" if "room" in recording.name else "dishes" if recording.kind == "noise" else recording.kind
        if alone:
            yield _Noise("recorded", kind, recording.name, lambda _, samples=samples: samples)  # type: ignore[misc]
        elif len(samples) >= _SHORTEST_SECONDS * SAMPLE_RATE_HZ:
            yield _Noise("recorded", kind, recording.name, lambda rng, samples=samples: _stretch(rng, samples))  # type: ignore[misc]
    length = _GENERATED_SECONDS * SAMPLE_RATE_HZ
    for name, sound in SOUNDS.items():
        yield _Noise("generated", name, name, lambda rng, sound=sound: sound(rng, length))  # type: ignore[misc]
    for number in range(1, babbles + 1):
        yield _Noise("generated", "babble", f"babble {number}", lambda rng: babble(rng, voices, length))


def _stretch(rng: np.random.Generator, samples: Samples) -> Samples:
    length = min(len(samples), _LONGEST_SECONDS * SAMPLE_RATE_HZ)
    start = rng.integers(0, len(samples) - length + 1)
    return samples[start : start + length]


def build(audio_dir: Path, snrs_db: Sequence[int] = SNRS_DB, split: Split = "held_out") -> list[TestScene]:
    """Build the set of a split.

    Raises:
        UserError: recordings are missing.
    """
    found = recordings(audio_dir, split)
    utterances, digits = clips(of_kind(found, "speech")), clips(of_kind(found, "digits"))
    hard = split == "development"
    made: list[TestScene] = []
    for snr_db in (*snrs_db, None):
        rng = _generator(split, f"utterances {snr_db}")
        deck = _Deck(rng, utterances, digits, hard=hard)
        for noise in _noises(found, utterances, alone=snr_db is None, babbles=_BABBLES if hard else 1):
            name = f"{noise.name} at {snr_db} dB" if snr_db is not None else f"{noise.name} alone"
            line = LINES[len(made) % len(LINES)]
            made.append(_scene(name, noise, snr_db, line, deck, _generator(split, name)))
    return made


def _generator(split: Split, name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(f"{_EDITION} {split} {name}".encode()))


def _scene(name: str, noise: _Noise, snr_db: int | None, line: Line, deck: _Deck, rng: np.random.Generator) -> TestScene:
    sound = noise.draw(rng)
    length = len(sound) // HOP_SAMPLES * HOP_SAMPLES
    sound = sound[:length] / rms(sound[:length])
    hops = length // HOP_SAMPLES
    scene = Scene(np.zeros(length, np.float32), np.zeros(hops, np.bool_), np.zeros(hops, np.bool_))
    gain = np.float32(10 ** (rng.uniform(*(_NOISE_DB if snr_db is None else _SPEECH_DB)) / 20))
    if snr_db is None:
        mixed = sound * gain
    else:
        scene = compose(rng, length, deck.deal, _GAPS_S, reverberant=deck.hard and bool(rng.random() < _ROOM_SHARE))
        level = rms(scene.samples[np.repeat(scene.speech, HOP_SAMPLES)]) if scene.placed else np.float32(1)
        mixed = (scene.samples / level + sound * np.float32(10 ** (-snr_db / 20))) * gain
    mixed = send(np.clip(mixed, -1, 1), line)
    return TestScene(name, noise.part, noise.kind, noise.name, snr_db, line, mixed, scene.speech, tuple(scene.placed))


def write_manifest(scenes: Sequence[TestScene], path: Path) -> None:
    """Write what each scene is made of."""
    lines = ["scene\tpart\tnoise\tsnr_db\tline\tseconds\tspeech"]
    for scene in scenes:
        said = "; ".join(f"{placed.name} at {placed.start_sample}" for placed in scene.placed)
        snr = "" if scene.snr_db is None else str(scene.snr_db)
        lines.append("\t".join((scene.name, scene.part, scene.noise_name, snr, scene.line, f"{scene.seconds:.2f}", said)))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
