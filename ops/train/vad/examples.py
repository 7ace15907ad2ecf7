"""What TinyVAD trains on: scenes drawn at random, as the bands that the network hears, and where speech is in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import soxr
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from agents.vad.front import Front
from agents.vad.spectrum import HOP_SAMPLES, WINDOW_SAMPLES, power_spectra
from agents.vad.tiny.bands import band_powers
from agents.vad.tiny.network import LOG_GUARD
from ops.train.vad.music import in_tempo, played
from ops.train.vad.scenes import LINES, Clip, Scene, at_speed, babble, clips, compose, lose_packets, rms, send, string_digits, tilted
from ops.train.vad.sounds import SOUNDS
from ops.train.vad.sources import Split, of_kind, read_audio, recordings
from schemas.records import SAMPLE_RATE_HZ

__all__ = ["SCENE_SECONDS", "Examples", "Material", "hear", "make"]

Samples = NDArray[np.float32]

SCENE_SECONDS: Final = 16
_SCENE_SAMPLES: Final = SCENE_SECONDS * SAMPLE_RATE_HZ
#: Speech to noise, in decibels; one scene in ten is nearly clean.
_SNR_DB: Final = (-5.0, 20.0)
_CLEAN_SNR_DB: Final = (30.0, 50.0)
#: Levels of speech and of noise alone, in decibels of full scale.
_SPEECH_DB: Final = (-42.0, -12.0)
_NOISE_DB: Final = (-65.0, -15.0)
#: How often what is drawn, if a scene has noise: recorded rooms, recorded music, music composed for the scene, babble; else generated.
_NOISES: Final = (0.22, 0.14, 0.20, 0.09)
#: Hard scenes: where detectors fail most.
_HARD_SNR_DB: Final = (-8.0, 5.0)
_HARD_NOISES: Final = (0.15, 0.30, 0.15, 0.22)
#: So many scenes are denoised, as they are where the detector works by default.
_DENOISED: Final = 0.65
#: So many scenes hold no speech.
_SPEECHLESS: Final = 0.2


class Examples(NamedTuple):
    """Scenes side by side.

    Attributes:
        bands: powers, float16 of their natural logarithm, scenes x hops x bands.
        speech: whether each hop is speech.
        doubtful: whether that is not certain.
    """

    bands: NDArray[np.float16]
    speech: NDArray[np.bool_]
    doubtful: NDArray[np.bool_]


class Material:
    """The recordings of a split, and scenes drawn from them.

    Args:
        audio_dir: where the recordings are.
        split: which of them.
        music_dir: a folder of more music, for hard scenes.
    """

    def __init__(self, audio_dir: Path, split: Split, music_dir: Path | None = None) -> None:
        found = recordings(audio_dir, split)
        self._utterances = clips(of_kind(found, "speech"))
        self._digits = clips(of_kind(found, "digits"))
        self._noises = [read_audio(each.path) for each in of_kind(found, "noise", "keyboard", "tone")]
        self._music = [read_audio(each.path) for each in of_kind(found, "music")]
        more = sorted(path for path in music_dir.iterdir() if path.is_file()) if music_dir else []
        self._all_music = self._music + [read_audio(path) for path in more]

    def speech(self, rng: np.random.Generator, voice: Sequence[Clip]) -> Clip:
        """Draw something to say: an utterance, or a number; most of them by a voice that is not quite the speaker's."""
        clip = string_digits(rng, self._digits) if rng.random() < 0.3 else voice[int(rng.integers(len(voice)))]
        return at_speed(clip, float(rng.uniform(0.86, 1.18))) if rng.random() < 0.7 else clip

    def noise(self, rng: np.random.Generator, length: int, *, hard: bool = False) -> Samples:
        """Draw something to hear besides speech."""
        kind = int(np.searchsorted(np.cumsum(_HARD_NOISES if hard else _NOISES), rng.random(), side="right"))
        music = self._all_music if hard else self._music
        if kind == 0:
            noise = self._stretch(rng, self._noises, length)
        elif kind == 1:
            noise = self._stretch(rng, music, length, keeps_time=rng.random() < 0.5)
            if rng.random() < 0.3:
                noise = noise + self._stretch(rng, music, length) * np.float32(rng.uniform(0.2, 1.5))
        elif kind == 2:
            noise = played(rng, length)
        elif kind == 3:
            noise = babble(rng, self._utterances, length)
        else:
            noise = SOUNDS[rng.choice(sorted(SOUNDS))](rng, length)
        return tilted(rng, noise) if rng.random() < 0.5 else noise

    def scene(self, rng: np.random.Generator, *, hard: bool = False) -> Scene:
        """Draw a scene; a hard one has louder noise, more often music and babble."""
        gaps_s = (0.3, float(rng.uniform(0.8, 4)))
        if rng.random() < _SPEECHLESS:
            gaps_s = (SCENE_SECONDS, SCENE_SECONDS)
        scene = compose(rng, _SCENE_SAMPLES, lambda: self.speech(rng, self._utterances), gaps_s, reverberant=rng.random() < 0.3)
        noise = self.noise(rng, _SCENE_SAMPLES, hard=hard)
        noise = noise / rms(noise)
        if rng.random() < 0.35:
            more = self.noise(rng, _SCENE_SAMPLES, hard=hard)
            noise = noise + more / rms(more) * np.float32(10 ** (rng.uniform(-12, 6) / 20))
            noise /= rms(noise)
        if scene.placed:
            snrs_db = _HARD_SNR_DB if hard else _CLEAN_SNR_DB if rng.random() < 0.1 else _SNR_DB
            snr_db = rng.uniform(*snrs_db)
            active = np.repeat(scene.speech, HOP_SAMPLES)
            level = rms(scene.samples[active])
            mixed = scene.samples + noise * level * np.float32(10 ** (-snr_db / 20))
            mixed *= np.float32(10 ** (rng.uniform(*_SPEECH_DB) / 20)) / level
        else:
            mixed = noise * np.float32(10 ** (rng.uniform(*_NOISE_DB) / 20))
        if rng.random() < 0.05:
            mixed += np.float32(rng.uniform(-0.05, 0.05))
        mixed = send(np.clip(mixed, -1, 1), LINES[rng.integers(len(LINES))])
        if rng.random() < 0.2:
            mixed = lose_packets(rng, mixed, rng.uniform(0.01, 0.08))
        scene.samples = mixed
        return scene

    @staticmethod
    def _stretch(rng: np.random.Generator, sounds: Sequence[Samples], length: int, *, keeps_time: bool = False) -> Samples:
        """Return a stretch of a recording, over and over if it is short; the longer a recording, the more often it is drawn.

        It comes at another speed, pitch and all; or, if it keeps time, in another key and at a tempo that has nothing to do with it.
        """
        weights = np.array([len(sound) for sound in sounds], float) ** 0.5
        sound = sounds[rng.choice(len(sounds), p=weights / weights.sum())]
        start = rng.integers(len(sound))
        # At another speed it is another instrument, another room.
        speed = float(rng.uniform(0.65, 1.5)) if rng.random() < 0.7 else 1.0
        tempo = float(rng.uniform(0.7, 1.4)) if keeps_time else 1.0
        stretch = np.resize(np.roll(sound, -start), int(length * speed * tempo) + 2 * SAMPLE_RATE_HZ)
        if tempo != 1.0:
            stretch = in_tempo(stretch, tempo)
        if speed != 1.0:
            stretch = soxr.resample(stretch, SAMPLE_RATE_HZ * speed, SAMPLE_RATE_HZ, quality="MQ")
        return stretch[:length].astype(np.float32)


def hear(samples: Samples, *, denoise: bool) -> Samples:
    """Return what detectors hear of a channel, from its start on: as many samples, and the silence before them that their windows need."""
    front = Front(0, denoise=denoise, lookback_samples=WINDOW_SAMPLES - HOP_SAMPLES)
    front.push(samples, SAMPLE_RATE_HZ)
    front.finish(len(samples))
    return front.heard[HOP_SAMPLES - WINDOW_SAMPLES : len(samples)]


def bands_of(heard: Samples) -> NDArray[np.float32]:
    """Return the powers of the bands of each hop."""
    return band_powers(power_spectra(sliding_window_view(heard, WINDOW_SAMPLES)[::HOP_SAMPLES]))


def make(material: Material, seed: int, count: int, hard_share: float = 0.0) -> Examples:
    """Draw scenes; each seed gives its own, so many of them hard."""
    bands, speech, doubtful = [], [], []
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        scene = material.scene(rng, hard=number < hard_share * count)
        heard = hear(scene.samples, denoise=bool(rng.random() < _DENOISED))
        bands.append(np.log(bands_of(heard) + np.float32(LOG_GUARD)).astype(np.float16))
        speech.append(scene.speech)
        doubtful.append(scene.doubtful)
    return Examples(np.stack(bands), np.stack(speech), np.stack(doubtful))
