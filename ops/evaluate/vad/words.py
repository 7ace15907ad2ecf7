"""Word errors downstream: what a recogniser makes of the segments, against what it makes of the true boundaries.

Two sets, neither heard in training: *orders* beside noise, which the bundled model is made for; and *open* English of all kinds, as
recorded and beside noise, which only a recogniser of open speech can take.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from agents.vad.decode import to_int16
from agents.vad.segmenter import Rules
from agents.vad.spectrum import HOP_SAMPLES
from ops.evaluate.vad.candidates import Candidate
from ops.evaluate.vad.measure import segments_of
from ops.train.vad.labels import label
from ops.train.vad.scenes import LINES, Line, rms, send
from ops.train.vad.sounds import SOUNDS
from ops.train.vad.sources import Split, of_kind, read_audio, recordings
from schemas.records import SAMPLE_RATE_HZ
from streams.errors import UserError
from streams.settings import Settings

if TYPE_CHECKING:
    from agents.inference.engine import Engine

__all__ = ["Recogniser"]

Samples = NDArray[np.float32]
_Set = Literal["orders", "open"]

#: What each recogniser is asked.
_SETS: Final[dict[str, tuple[_Set, ...]]] = {"whisper": ("open", "orders"), "conformer": ("orders",)}
_ORDERS_OF: Final[dict[Split, str]] = {"held_out": "orders/test/", "development": "orders/dev/"}
#: What is said in the open recordings.
_TRANSCRIPTS: Final = "open_english.tsv"
#: So many orders: all detectors and both recognisers together are to take ten minutes of one core.
_ORDERS: Final = {"whisper": 24, "conformer": 64}
#: A second of noise on either side.
_AROUND_SAMPLES: Final = SAMPLE_RATE_HZ
_ORDERS_SNRS_DB: Final = (5, 10, 20)
#: None: as recorded; those that take a minute or more come only so.
_OPEN_SNRS_DB: Final = (None, 10)
_LONG_SAMPLES: Final = 60 * SAMPLE_RATE_HZ
_LEVEL: Final = np.float32(0.06)
#: Beside what is longer than any recorded noise.
_LONG_NOISE: Final = "shaped"

_CHUNK_HOPS: Final = 20
_LOOKAHEAD_SAMPLES: Final = 240


@dataclass(frozen=True, slots=True)
class _Utterance:
    text: str
    samples: Samples
    speech: NDArray[np.bool_]


class Recogniser:
    """Counts word errors.

    Args:
        audio_dir: where the recordings are.
        settings: the configuration: which model.
        engine: the recogniser.
        split: whose recordings.

    Raises:
        UserError: there is no such recogniser, or its model is missing.
    """

    def __init__(self, audio_dir: Path, settings: Settings, engine: str, split: Split = "held_out") -> None:
        if engine not in _SETS:
            raise UserError(f"There are no word errors of the engine {engine!r}", f"Choose from {', '.join(_SETS)}.")
        #: Its name.
        self.engine: Final = engine
        self._audio_dir, self._split = audio_dir, split
        # Words are compared as they were recognised.
        changed = {"engine": engine, "itn": False, "punctuation": False, "sentence_case": False}
        self._settings = settings.model_copy(update=changed)
        from agents.inference.process import engine_spec

        self._spec = engine_spec(self._settings)

    def of_reference(self) -> dict[str, float]:
        """Return the share of words that are wrong with the true boundaries, pre-roll and tail as configured, by set."""
        return {place: self._errors(said, [each.speech for each in said]) for place, said in self._sets.items()}

    def of(self, candidate: Candidate) -> dict[str, float]:
        """Return the share of words that are wrong with a detector's segments, by set."""
        return {
            place: self._errors(said, [candidate.judge([each.samples])[0].speech for each in said]) for place, said in self._sets.items()
        }

    def _errors(self, said: Sequence[_Utterance], decisions: Sequence[NDArray[np.bool_]]) -> float:
        from ops.measure import word_errors

        rules = Rules.of(self._settings)
        written = []
        for utterance, speech in zip(said, decisions, strict=True):
            found, _ = segments_of(speech, rules, len(utterance.samples))
            pieces = [utterance.samples[int(each.start * HOP_SAMPLES) : int(each.end * HOP_SAMPLES)] for each in found]
            written.append(" ".join(map(self._final, pieces)))
        return word_errors([each.text for each in said], written, digits_apart=True).rate or 0.0

    def _final(self, samples: Samples) -> str:
        """Return the text of a segment, given to the engine as the stages before it would."""
        from agents.features.fbank import Fbank
        from agents.inference.engine import Block, Finish, Opening, SegmentKey

        key = SegmentKey("evaluation", 0)
        self._engine.open([Opening(key=key, start_sample=0, language="en")])
        pcm = to_int16(samples).astype("<i2")
        pieces = [
            pcm[begin : begin + _CHUNK_HOPS * HOP_SAMPLES + _LOOKAHEAD_SAMPLES] for begin in range(0, len(pcm), _CHUNK_HOPS * HOP_SAMPLES)
        ]
        features = Fbank()([piece.tobytes() for piece in pieces]) if self.engine == "conformer" else [np.zeros(0, np.float32)] * len(pieces)
        for chunk, (piece, heard) in enumerate(zip(pieces, features, strict=True)):
            hops = min(_CHUNK_HOPS, -(-len(piece) // HOP_SAMPLES))
            block = Block(key=key, chunk=chunk, hops=hops, features=heard.astype("<f4").tobytes(), pcm=piece.tobytes(), quiet=True)
            self._engine.step([block])
        (final,) = self._engine.finish([Finish(key=key, end_sample=len(samples))])
        self._engine.close([key])
        if final.error:
            raise UserError(f"The engine {self.engine} cannot decode a segment: {final.error}")
        return final.raw_text

    @cached_property
    def _engine(self) -> Engine:
        from agents.inference.serve import load

        return load(self._spec)

    @cached_property
    def _sets(self) -> dict[str, list[_Utterance]]:
        made = {"open": self._open, "orders": self._orders}
        return {f"{name}, {self.engine}": list(made[name]()) for name in _SETS[self.engine]}

    @cached_property
    def _noises(self) -> list[Samples]:
        return [read_audio(each.path) for each in of_kind(recordings(self._audio_dir, self._split), "noise", "keyboard")]

    def _orders(self) -> Iterator[_Utterance]:
        with (self._audio_dir / "orders" / "transcripts.tsv").open(encoding="utf-8") as table:
            texts = {f"orders/{row['file']}": row["transcript"] for row in csv.DictReader(table, delimiter="\t")}
        found = of_kind(recordings(self._audio_dir, self._split), "speech")
        spoken = [each for each in found if each.name in texts and each.name.startswith(_ORDERS_OF[self._split])]
        count = _ORDERS[self.engine]
        for number, each in enumerate(spoken[:: max(1, len(spoken) // count)][:count]):
            snr_db = _ORDERS_SNRS_DB[number % len(_ORDERS_SNRS_DB)]
            yield self._beside_noise(each.name, texts[each.name], read_audio(each.path), snr_db, LINES[number % len(LINES)])

    def _open(self) -> Iterator[_Utterance]:
        with resources.files(__package__).joinpath(_TRANSCRIPTS).open(encoding="utf-8") as table:
            texts = {row["path"]: row["transcript"] for row in csv.DictReader(table, delimiter="\t")}
        spoken = [each for each in recordings(self._audio_dir, self._split) if each.name in texts]
        for snr_db in _OPEN_SNRS_DB:
            for number, each in enumerate(spoken):
                samples = read_audio(each.path)
                if snr_db is None:
                    yield self._beside_noise(each.name, texts[each.name], samples, None, "wide")
                elif len(samples) < _LONG_SAMPLES:
                    yield self._beside_noise(each.name, texts[each.name], samples, snr_db, LINES[number % len(LINES)])

    def _beside_noise(self, name: str, text: str, samples: Samples, snr_db: int | None, line: Line) -> _Utterance:
        rng = np.random.default_rng(zlib.crc32(f"{name} {snr_db}".encode()))
        samples = samples[: len(samples) // HOP_SAMPLES * HOP_SAMPLES]
        speech = label(samples).speech
        level = rms(samples[np.repeat(speech, HOP_SAMPLES)])
        samples = np.pad(samples * (_LEVEL / level), _AROUND_SAMPLES)
        speech = np.pad(speech, _AROUND_SAMPLES // HOP_SAMPLES)
        if snr_db is not None:
            long_enough = [noise for noise in self._noises if len(noise) >= len(samples)]
            noise = long_enough[int(rng.integers(len(long_enough)))] if long_enough else SOUNDS[_LONG_NOISE](rng, len(samples))
            start = int(rng.integers(0, len(noise) - len(samples) + 1))
            noise = noise[start : start + len(samples)]
            samples = samples + noise * (_LEVEL / rms(noise)) * np.float32(10 ** (-snr_db / 20))
        return _Utterance(text, send(np.clip(samples, -1, 1), line), speech)
