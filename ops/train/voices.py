"""Synthetic speech from the engines in Debian: espeak-ng (formants, many variants) and flite (four recorded voices).

Neither sounds like a caller, but together they speak any phrase in thousands of voices, at no cost and under free licences. They teach
the model what words are made of before it hears the few real speakers.
"""

from __future__ import annotations

import io
import random
import shutil
import subprocess
from typing import Final

import numpy as np
import soundfile
import soxr

from schemas.records import SAMPLE_RATE_HZ

__all__ = ["MissingEngineError", "check_engines", "speak"]

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
#: flite sounds more like speech, espeak-ng has more voices.
_FLITE_SHARE: Final = 0.55
_TIMEOUT_S: Final = 30


class MissingEngineError(Exception):
    """A speech engine is not installed."""


def check_engines() -> None:
    """Make sure that both engines are there.

    Raises:
        MissingEngineError: one is not; the message names the Debian package.
    """
    for program in ("espeak-ng", "flite"):
        if shutil.which(program) is None:
            raise MissingEngineError(
                f"{program} is not installed: install the Debian packages espeak-ng and flite, or train with --synthetic 0"
            )


def speak(text: str, choose: random.Random) -> tuple[np.ndarray, str]:
    """Speak a text in a voice drawn by ``choose``.

    Returns:
        The samples (int16, 16 kHz, mono) and the voice's name.
    """
    if choose.random() < _FLITE_SHARE:
        voice, pitch_hz = choose.choice(_FLITE_VOICES)
        command = [
            "flite", "-voice", voice, "--setf", f"duration_stretch={choose.uniform(0.85, 1.35):.2f}",
            "--setf", f"int_f0_target_mean={pitch_hz * choose.uniform(0.75, 1.4):.0f}", "-t", text, "-o", "/dev/stdout",
        ]  # fmt: skip
    else:
        voice = f"{choose.choice(_ACCENTS)}+{choose.choice(_VARIANTS)}"
        command = [
            "espeak-ng", "-v", voice, "-s", str(choose.randint(125, 210)), "-p", str(choose.randint(20, 80)), "-g",
            str(choose.choice((0, 0, 0, 1, 3, 6))),
            "--stdout", text,
        ]  # fmt: skip
    spoken = subprocess.run(command, capture_output=True, check=True, timeout=_TIMEOUT_S).stdout
    samples, rate_hz = soundfile.read(io.BytesIO(spoken), dtype="float32")
    if rate_hz != SAMPLE_RATE_HZ:
        samples = soxr.resample(samples, rate_hz, SAMPLE_RATE_HZ)
    return (np.clip(samples, -1, 1) * 32767).astype(np.int16), voice
