"""Calls for the demo: real recordings of known words, put together to dialogues and single callers with pauses, noise and music on hold.

The recordings are in ``calls/``; its ``MANIFEST.tsv`` holds what is said, where each word ends, and whose licence it is. A call is a
function of its seed, so that two runs of the demo can be compared.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ops.measure import SpokenWord
from schemas.records import SAMPLE_RATE_HZ, Encoding

__all__ = [
    "MANIFEST_COLUMNS",
    "Call",
    "Clip",
    "Party",
    "assemble",
    "call_seconds",
    "callers",
    "calls_folder",
    "clips",
    "hold_music",
    "line_sizes",
    "mulaw",
    "noises",
    "read_clip",
    "read_manifest",
]

MANIFEST_COLUMNS: Final = ("file", "kind", "voice", "licence", "source", "seconds", "transcript", "word_ends_ms")

#: A telephone's usual level of speech, and how far the background lies below it.
_SPEECH_DBFS: Final = -24.0
_BACKGROUND_BELOW_DB: Final = (24.0, 36.0)
_MUSIC_DBFS: Final = -28.0
_FULL_SCALE: Final = 32_768

_PICK_UP_SECONDS: Final = (0.5, 1.2)
#: Between turns; the lowest values are shorter than what the VAD closes.
_DIALOGUE_PAUSE_SECONDS: Final = (0.25, 1.2)
_SINGLE_PAUSE_SECONDS: Final = (0.5, 1.8)
_OVERLAP_SECONDS: Final = 0.3
_OVERLAP_SHARE: Final = 0.15
#: After the last word there is silence long enough for the VAD to end the segment by itself.
_HANG_UP_SECONDS: Final = 0.8
#: Calls too short for a hold have none.
_HOLD_FROM_SECONDS: Final = 20.0
_CALL_SECONDS: Final = (25.0, 40.0)

_G711_HZ: Final = 8_000


@dataclass(frozen=True, slots=True)
class Clip:
    """One recording of one voice.

    Attributes:
        file: its name in the folder of calls.
        voice: who speaks.
        transcript: what is said.
        words: the words with where they end, in 16 kHz samples from the clip's start.
    """

    file: str
    voice: str
    transcript: str
    words: tuple[SpokenWord, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Party:
    """One side of a call, on its own channel.

    Attributes:
        name: ``agent`` or ``customer``.
        voice: whose recordings it is made of.
        pcm: int16 at 16 kHz.
        words: what is said, in order, in 16 kHz samples from the call's start.
        encoding: how it goes on the wire.
        sample_rate_hz: the rate on the wire.
    """

    name: str
    voice: str
    pcm: NDArray[np.int16]
    words: tuple[SpokenWord, ...]
    encoding: Encoding
    sample_rate_hz: int

    @property
    def transcript(self) -> str:
        """Everything that is said."""
        return " ".join(word.text for word in self.words)

    def payload(self) -> bytes:
        """Return the audio as it goes on the wire."""
        if self.encoding == "pcm_s16le":
            return self.pcm.astype("<i2").tobytes()
        from scipy.signal import resample_poly

        narrow = resample_poly(self.pcm.astype(np.float32), _G711_HZ, SAMPLE_RATE_HZ)
        return mulaw(np.clip(np.rint(narrow), -_FULL_SCALE, _FULL_SCALE - 1).astype(np.int16)).tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of one or two parties, all of the same length."""

    parties: tuple[Party, ...]


def calls_folder() -> Path:
    """Return the folder that holds the recordings."""
    return Path(str(resources.files("ops.demo"))) / "calls"


def read_manifest() -> list[dict[str, str]]:
    """Return the rows of ``MANIFEST.tsv``."""
    with (calls_folder() / "MANIFEST.tsv").open(encoding="utf-8", newline="") as manifest:
        return list(csv.DictReader(manifest, delimiter="\t", quoting=csv.QUOTE_NONE))


@cache
def read_clip(file: str) -> NDArray[np.int16]:
    """Return a recording as int16 at 16 kHz."""
    import av

    with av.open(str(calls_folder() / file)) as container:
        pcm = np.concatenate([frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]).astype(np.int16)
    pcm.setflags(write=False)
    return pcm


@cache
def clips() -> tuple[Clip, ...]:
    """Return all recordings of speech: those of callers, and of people who read something else."""
    return (*callers(), *_clips("reading"))


@cache
def callers() -> tuple[Clip, ...]:
    """Return the recordings of callers: orders, and numbers read out."""
    return _clips("speech")


def _clips(kind: str) -> tuple[Clip, ...]:
    return tuple(
        Clip(
            row["file"],
            row["voice"],
            row["transcript"],
            tuple(
                SpokenWord(text, int(end_ms) * SAMPLE_RATE_HZ // 1_000)
                for text, end_ms in zip(row["transcript"].split(), row["word_ends_ms"].split(), strict=True)
            ),
        )
        for row in read_manifest()
        if row["kind"] == kind
    )


@cache
def noises() -> tuple[str, ...]:
    """Return the files that hold background noise."""
    return tuple(row["file"] for row in read_manifest() if row["kind"] == "noise")


def line_sizes(channels: int) -> list[int]:
    """Return how many channels each line takes: dialogues (2) and single callers (1) in turn, ``channels`` in all.

    >>> line_sizes(8)
    [2, 1, 2, 1, 2]
    """
    sizes: list[int] = []
    while (left := channels - sum(sizes)) > 0:
        sizes.append(min(left, 1 + (len(sizes) + 1) % 2))
    return sizes


def call_seconds(seconds: float | None, rng: np.random.Generator) -> Iterator[float]:
    """Yield the lengths of a line's calls, which fill the given time exactly; without one they never end."""
    left = float("inf") if seconds is None else seconds
    while left > 0:
        length = float(rng.uniform(*_CALL_SECONDS))
        if left - length < _CALL_SECONDS[0]:
            length = min(left, _CALL_SECONDS[0] + _CALL_SECONDS[1])
        yield length
        left -= length


def assemble(parties: int, seconds: float, *, telephone: bool, rng: np.random.Generator) -> Call:
    """Put a call together.

    Args:
        parties: 1 for a single caller, 2 for a dialogue.
        seconds: its length.
        telephone: 8 kHz mu-law on the wire; else 16 kHz PCM.
        rng: decides who speaks, what, and when.
    """
    length = round(seconds * SAMPLE_RATE_HZ)
    voices = rng.permutation(sorted({clip.voice for clip in callers()}))[:parties]
    decks = [_Deck([clip for clip in callers() if clip.voice == voice], rng) for voice in voices]
    tracks = [_background(length, rng) for _ in voices]
    words: list[list[SpokenWord]] = [[] for _ in voices]

    pauses = _DIALOGUE_PAUSE_SECONDS if parties > 1 else _SINGLE_PAUSE_SECONDS
    hold_at = rng.uniform(0.3, 0.5) * length if seconds >= _HOLD_FROM_SECONDS else length
    cursor = _samples(rng.uniform(*_PICK_UP_SECONDS))
    speaker = 0
    while (clip := decks[speaker].draw(length - _samples(_HANG_UP_SECONDS) - cursor)) is not None:
        speech = _levelled(read_clip(clip.file), _SPEECH_DBFS)
        tracks[speaker][cursor : cursor + len(speech)] += speech
        words[speaker] += [SpokenWord(word.text, cursor + word.end_sample) for word in clip.words]
        cursor += len(speech)
        speaker = (speaker + 1) % parties
        if cursor > hold_at:
            cursor += _samples(rng.uniform(*pauses))
            music = hold_music()[: max(length - cursor, 0)]
            tracks[0][cursor : cursor + len(music)] += music
            cursor, hold_at = cursor + len(music), length
        overlap = parties > 1 and rng.random() < _OVERLAP_SHARE
        cursor += -_samples(_OVERLAP_SECONDS) if overlap else _samples(rng.uniform(*pauses))

    names = ("agent", "customer") if parties > 1 else ("customer",)
    encoding: Encoding = "mulaw" if telephone else "pcm_s16le"
    return Call(
        tuple(
            Party(name, str(voice), _to_int16(track), tuple(said), encoding, _G711_HZ if telephone else SAMPLE_RATE_HZ)
            for name, voice, track, said in zip(names, voices, tracks, words, strict=True)
        )
    )


@cache
def hold_music() -> NDArray[np.float32]:
    """Return two bars of music on hold, float32 at 16 kHz: the beginning of Bach's Prelude in C major (BWV 846), on plucked strings."""
    note_seconds, ring_seconds = 0.18, 1.2
    bars = ((60, 64, 67, 72, 76), (60, 62, 69, 74, 77))
    order = (0, 1, 2, 3, 4, 2, 3, 4)
    notes = [bar[step] for bar in bars for _ in range(2) for step in order]
    time = np.arange(_samples(ring_seconds)) / SAMPLE_RATE_HZ
    track = np.zeros(_samples(len(notes) * note_seconds) + len(time), np.float32)
    for index, note in enumerate(notes):
        pitch_hz = 440.0 * 2 ** ((note - 69) / 12)
        overtones = sum(np.sin(2 * np.pi * pitch_hz * n * time) * np.exp(-time * (2 + 2 * n)) / n for n in (1, 2, 3, 4))
        start = _samples(index * note_seconds)
        track[start : start + len(time)] += np.asarray(overtones, np.float32)
    return _levelled(track, _MUSIC_DBFS)


def mulaw(pcm: NDArray[np.int16]) -> NDArray[np.uint8]:
    """Return int16 samples as G.711 mu-law."""
    bias, clip = 132, 32_635
    magnitude = np.minimum(np.abs(pcm.astype(np.int32)), clip) + bias
    exponent = np.frexp(magnitude.astype(np.float32))[1] - 8  # 132 = 2**7 + 4 is in the lowest of eight segments
    mantissa = (magnitude >> (exponent + 3)) & 0x0F
    sign = np.where(pcm < 0, 0x80, 0)
    return np.asarray(~(sign | exponent << 4 | mantissa) & 0xFF, np.uint8)


class _Deck:
    """A voice's clips in shuffled order, shuffled again whenever they have all been drawn."""

    def __init__(self, all_clips: list[Clip], rng: np.random.Generator) -> None:
        self._all = all_clips
        self._rng = rng
        self._left: list[Clip] = []

    def draw(self, room_samples: int) -> Clip | None:
        """Return the next clip that fits, or None if none of those left does: nobody says the same twice in a row."""
        if not self._left:
            self._left = [self._all[index] for index in self._rng.permutation(len(self._all))]
        clip = next((clip for clip in self._left if len(read_clip(clip.file)) <= room_samples), None)
        if clip is not None:
            self._left.remove(clip)
        return clip


def _samples(seconds: float) -> int:
    return round(seconds * SAMPLE_RATE_HZ)


def _levelled(track: NDArray[np.int16] | NDArray[np.float32], level_dbfs: float) -> NDArray[np.float32]:
    """Return a track, in int16 units, with its RMS at a level."""
    samples = track.astype(np.float32)
    target = _FULL_SCALE * 10 ** (level_dbfs / 20)
    return np.asarray(samples * (target / np.sqrt(np.mean(samples**2))), np.float32)


def _background(length: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Return background noise, in int16 units."""
    noise = _levelled(read_clip(noises()[rng.integers(len(noises()))]), _SPEECH_DBFS - rng.uniform(*_BACKGROUND_BELOW_DB))
    return np.resize(np.roll(noise, rng.integers(len(noise))), length)


def _to_int16(track: NDArray[np.float32]) -> NDArray[np.int16]:
    return np.clip(np.rint(track), -_FULL_SCALE, _FULL_SCALE - 1).astype(np.int16)
