"""What the recognisers are judged by: orders and numbers of speakers that training never heard, in several conditions.

The *orders* are whole recordings, with the silence around them. The *digits* are numbers of 3 to 16 digits, put together from one
speaker's single digits; nobody was recorded reading a number out. A condition changes the audio, never the words:

* ``clean``: 16 kHz PCM, as recorded;
* ``mulaw``: 8 kHz G.711, as a telephone line delivers it;
* ``noise20``, ``noise10``, ``noise5``: 16 kHz PCM beside noise that training never heard, so many dB below the speech.
"""

from __future__ import annotations

import csv
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from connectors.recorder.framing import PCM_16K, WireFormat
from connectors.recorder.media import MemorySource
from ops.demo.calls import mulaw
from ops.train.augment import Mixer
from ops.train.clips import digit_clips
from ops.train.vad.labels import label
from ops.train.vad.scenes import rms
from ops.train.vad.sources import read_audio, recordings
from schemas.records import SAMPLE_RATE_HZ
from streams.errors import UserError

__all__ = ["CONDITIONS", "SETS", "Split", "Utterance", "utterances"]

Split = Literal["dev", "test"]

SETS: Final = ("orders", "digits")
CONDITIONS: Final = ("clean", "mulaw", "noise20", "noise10", "noise5")
#: Whose digits each split has; the recipe never trains on them.
DIGIT_SPEAKERS: Final[dict[Split, str]] = {"dev": "yweweler", "test": "lucas"}
_NUMBERS: Final = 60
_NUMBERS_SEED: Final = 7
#: Before and after a number, as before and after a recorded order.
_AROUND_SAMPLES: Final = SAMPLE_RATE_HZ // 2
_FULL_SCALE: Final = 32_767.0
_TELEPHONE_HZ: Final = 8_000
_MULAW_8K: Final = WireFormat("mulaw", _TELEPHONE_HZ)
_NOISE: Final = "noise"


class Utterance(NamedTuple):
    """What somebody says.

    Attributes:
        name: of the recording, or of the number.
        text: the words.
        samples: float32 in [-1, 1) at 16 kHz.
    """

    name: str
    text: str
    samples: NDArray[np.float32]

    def in_condition(self, condition: str, noises: Sequence[NDArray[np.float32]]) -> MemorySource:
        """Return the audio as a recorder plays it.

        Args:
            condition: one of `CONDITIONS`.
            noises: what noise is taken from, float32 at 16 kHz; which, and where in it, follows from the utterance's name.

        Raises:
            UserError: there is no such condition.
        """
        if condition == "clean":
            return MemorySource(_payload(self.samples), self.name, PCM_16K)
        if condition == "mulaw":
            import soxr

            narrow = soxr.resample(self.samples, SAMPLE_RATE_HZ, _TELEPHONE_HZ)
            return MemorySource(mulaw(_int16(narrow)).tobytes(), self.name, _MULAW_8K)
        if condition in CONDITIONS:
            return MemorySource(_payload(self._beside(noises, int(condition.removeprefix(_NOISE)))), self.name, PCM_16K)
        raise UserError(f"There is no condition {condition!r}", f"Choose from {', '.join(CONDITIONS)}.")

    def _beside(self, noises: Sequence[NDArray[np.float32]], snr_db: int) -> NDArray[np.float32]:
        rng = np.random.default_rng(zlib.crc32(f"{self.name} {snr_db}".encode()))
        noise = noises[int(rng.integers(len(noises)))]
        noise = np.resize(np.roll(noise, -int(rng.integers(len(noise)))), len(self.samples))
        speech = label(self.samples).speech
        hop = SAMPLE_RATE_HZ // 100
        spoken = self.samples[: len(speech) * hop][np.repeat(speech, hop)]
        level = rms(spoken if len(spoken) else self.samples)
        mixed: NDArray[np.float32] = self.samples + noise * (level / rms(noise)) * np.float32(10 ** (-snr_db / 20))
        # Loud recordings beside loud noise are turned down, not clipped.
        return np.asarray(mixed / max(1.0, float(np.abs(mixed).max())), np.float32)


def utterances(audio_dir: Path, name: str, split: Split) -> list[Utterance]:
    """Return a set.

    Args:
        audio_dir: the folder of the recordings.
        name: one of `SETS`.
        split: which speakers.

    Raises:
        UserError: there is no such set, or its recordings are missing.
    """
    makers = {"orders": _orders, "digits": _digits}
    if name not in makers:
        raise UserError(f"There is no set {name!r}", f"Choose from {', '.join(SETS)}.")
    found = list(makers[name](audio_dir, split))
    if not found:
        raise UserError(f"{audio_dir} has no recordings for {name} ({split})", "ops/train/vad/sources.tsv says where they come from.")
    return found


def held_out_noises(audio_dir: Path) -> list[NDArray[np.float32]]:
    """Return the noises that training never heard."""
    return [read_audio(each.path) for each in recordings(audio_dir, "held_out", "noise", "keyboard")]


def _orders(audio_dir: Path, split: Split) -> Iterator[Utterance]:
    table = audio_dir / "orders" / "transcripts.tsv"
    if not table.exists():
        return
    with table.open(encoding="utf-8", newline="") as rows:
        for row in csv.DictReader(rows, delimiter="\t", quoting=csv.QUOTE_NONE):
            if row["split"] == split:
                yield Utterance(row["file"], row["transcript"], read_audio(audio_dir / "orders" / row["file"]))


def _digits(audio_dir: Path, split: Split) -> Iterator[Utterance]:
    speaker = DIGIT_SPEAKERS[split]
    clips = list(digit_clips(audio_dir, [speaker]))
    if not clips:
        return
    mixer, choose = Mixer(clips, [], []), random.Random(_NUMBERS_SEED)  # noqa: S311 - seeded draws, no secrets
    for number in range(_NUMBERS):
        piece = mixer.digit_piece(choose, speaker)
        yield Utterance(f"{speaker}-{number}", piece.text, np.pad(piece.samples, _AROUND_SAMPLES))


def _int16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    return np.clip(np.round(samples * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE).astype(np.int16)


def _payload(samples: NDArray[np.float32]) -> bytes:
    return _int16(samples).astype("<i2").tobytes()
