"""Word errors downstream: what the recogniser makes of the segments, against what it makes of the true boundaries."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from agents.vad.segmenter import Rules
from agents.vad.spectrum import HOP_SAMPLES
from ops.evaluate.vad.candidates import Candidate
from ops.evaluate.vad.measure import segments_of
from ops.train.vad.labels import label
from ops.train.vad.scenes import LINES, rms, send
from ops.train.vad.sources import of_kind, read_audio, recordings
from schemas.records import SAMPLE_RATE_HZ
from streams.settings import Settings

if TYPE_CHECKING:
    from agents.inference.whisper import WhisperDecoder

__all__ = ["Recogniser"]

#: Orders by speakers that training never heard, each in a second of noise on either side; so many keep the time in minutes.
_ORDERS: Final = 48
_AROUND_SAMPLES: Final = SAMPLE_RATE_HZ
_SNRS_DB: Final = (5, 10, 20)
_LEVEL: Final = np.float32(0.06)


@dataclass(frozen=True, slots=True)
class _Utterance:
    text: str
    samples: NDArray[np.float32]
    speech: NDArray[np.bool_]


class Recogniser:
    """Counts word errors of the configured Whisper model.

    Args:
        audio_dir: where the recordings are.
        settings: which model.
    """

    def __init__(self, audio_dir: Path, settings: Settings) -> None:
        self._audio_dir, self._settings = audio_dir, settings

    def of_reference(self) -> float:
        """Return the share of words that are wrong with the true boundaries, pre-roll and tail as configured."""
        return self._errors([each.speech for each in self._utterances])

    def of(self, candidate: Candidate) -> float:
        """Return the share of words that are wrong with a detector's segments."""
        return self._errors([candidate.judge([each.samples])[0].speech for each in self._utterances])

    def _errors(self, decisions: Sequence[NDArray[np.bool_]]) -> float:
        from ops.measure import word_errors

        rules = Rules.of(self._settings)
        written = []
        for utterance, speech in zip(self._utterances, decisions, strict=True):
            found, _ = segments_of(speech, rules, len(utterance.samples))
            pieces = [utterance.samples[int(each.start * HOP_SAMPLES) : int(each.end * HOP_SAMPLES)] for each in found]
            written.append(" ".join(self._decoder.final(piece, "en").text for piece in pieces))
        counted = word_errors([each.text for each in self._utterances], written)
        return counted.rate or 0.0

    @cached_property
    def _decoder(self) -> WhisperDecoder:
        from agents.inference.models import resolve
        from agents.inference.whisper import WhisperDecoder

        return WhisperDecoder(resolve(self._settings.model, self._settings.cache_dir).folder)

    @cached_property
    def _utterances(self) -> list[_Utterance]:
        with (self._audio_dir / "orders" / "transcripts.tsv").open(encoding="utf-8") as table:
            texts = {f"orders/{row['file']}": row["transcript"] for row in csv.DictReader(table, delimiter="\t")}
        found = recordings(self._audio_dir, "held_out")
        spoken = [each for each in of_kind(found, "speech") if each.name in texts and each.name.startswith("orders/test/")]
        noises = [read_audio(each.path) for each in of_kind(found, "noise", "keyboard")]
        chosen = spoken[:: max(1, len(spoken) // _ORDERS)][:_ORDERS]
        return [self._in_noise(texts[each.name], read_audio(each.path), noises, number) for number, each in enumerate(chosen)]

    @staticmethod
    def _in_noise(text: str, samples: NDArray[np.float32], noises: Sequence[NDArray[np.float32]], number: int) -> _Utterance:
        rng = np.random.default_rng(zlib.crc32(f"{text} {number}".encode()))
        samples = samples[: len(samples) // HOP_SAMPLES * HOP_SAMPLES]
        speech = label(samples).speech
        around = _AROUND_SAMPLES // HOP_SAMPLES
        speech = np.pad(speech, around)
        level = rms(samples[np.repeat(speech[around:-around], HOP_SAMPLES)])
        samples = np.pad(samples * (_LEVEL / level), _AROUND_SAMPLES)
        long_enough = [noise for noise in noises if len(noise) >= len(samples)]
        noise = long_enough[number % len(long_enough)]
        start = rng.integers(0, len(noise) - len(samples) + 1)
        noise = noise[start : start + len(samples)]
        mixed = samples + noise * (_LEVEL / rms(noise)) * np.float32(10 ** (-_SNRS_DB[number % len(_SNRS_DB)] / 20))
        return _Utterance(text, send(np.clip(mixed, -1, 1), LINES[number % len(LINES)]), speech)
