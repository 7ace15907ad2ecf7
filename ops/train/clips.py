"""Recordings with their words and phones in time, as the training takes them.

A *clip* is 16 kHz audio of one speaker, its transcript and, where the forced alignment came through, when each word and each phone was
said. Clips lie in *shards*: an ``.npz`` of one long int16 array and a JSON table. Shards of synthetic speech can be added while the
training runs; it reads new ones at its next epoch.
"""

# ruff: noqa: S311 - seeded draws, no secrets
from __future__ import annotations

import csv
import functools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import soundfile
import soxr

from schemas.records import SAMPLE_RATE_HZ

__all__ = [
    "DIGIT_NAMES",
    "PHONES",
    "SILENCE",
    "Clip",
    "Phone",
    "Word",
    "align",
    "read_audio",
    "read_shard",
    "recorded_clips",
    "write_shard",
]

DIGIT_NAMES: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
#: The CMU phone set; a phone's number is its place here.
PHONES: Final = tuple("SIL AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH".split())  # noqa: SIM905
SILENCE: Final = 0
#: pocketsphinx counts time in frames of 10 ms.
_ALIGNER_FRAME_SAMPLES: Final = SAMPLE_RATE_HZ // 100

#: Fewer than this share of a transcript's letters being words means that it holds figures or abbreviations: not what was said.
_SPEAKABLE: Final = re.compile(r"[a-z' ]+")


class Phone(msgspec.Struct, frozen=True, array_like=True):
    """A phone from ``start`` to ``end``, in samples from the clip's start."""

    phone: int
    start: int
    end: int


class Word(msgspec.Struct, frozen=True, array_like=True):
    """A word from ``start`` to ``end``, in samples from the clip's start."""

    text: str
    start: int
    end: int


class Clip(msgspec.Struct, frozen=True, kw_only=True):
    """One recording; ``pcm`` is int16 at 16 kHz."""

    name: str
    #: ``order``, ``digit``, ``prompt``, ``english`` or ``synthetic``.
    source: str
    speaker: str
    text: str
    #: Empty where the alignment failed.
    words: tuple[Word, ...] = ()
    phones: tuple[Phone, ...] = ()
    #: The aligner's mean score per frame of speech (natural log, arbitrary zero); the lower, the more doubtful the transcript.
    score: float = 0.0
    pcm: np.ndarray


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    source: str
    speaker: str
    text: str
    words: tuple[Word, ...]
    phones: tuple[Phone, ...]
    score: float
    samples: int


def read_audio(path: Path) -> np.ndarray:
    """Read a file as int16, 16 kHz, its first channel."""
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    mono = samples[:, 0]
    if rate_hz != SAMPLE_RATE_HZ:
        mono = soxr.resample(mono, rate_hz, SAMPLE_RATE_HZ)
    pcm: np.ndarray = np.clip(np.round(mono * 32768), -32768, 32767).astype(np.int16)
    return pcm


@functools.cache
def _aligner(patient: bool) -> Any:
    from pocketsphinx import Decoder

    # Some speakers are hardly like those the aligner's model knows: with these beams it loses none of their words, but often their phones.
    beams = {"beam": 1e-120, "wbeam": 1e-100, "pbeam": 1e-100} if patient else {}
    return Decoder(lm=None, samprate=SAMPLE_RATE_HZ, loglevel="FATAL", **beams)


class _Span(NamedTuple):
    """A word or phone in the aligner's frames; silence is a word of its own."""

    name: str
    start: int
    duration: int
    score: int = 0

    @property
    def spoken(self) -> bool:
        return not self.name.startswith(("<", "[", "SIL"))

    @property
    def samples(self) -> tuple[int, int]:
        return self.start * _ALIGNER_FRAME_SAMPLES, (self.start + self.duration) * _ALIGNER_FRAME_SAMPLES


def align(pcm: np.ndarray, text: str) -> tuple[tuple[Word, ...], tuple[Phone, ...], float]:
    """Find when each word and phone of ``text`` was said.

    Returns:
        Words, phones (silence among them, without gaps) and the mean score; all empty where a word is unknown to the aligner or the text
        does not fit. The score is 0 where only the words could be found: their phones then share each word's time evenly.
    """
    words: list[_Span] = []
    for patient in (False, True):
        decoder = _aligner(patient)
        words = words or _align_words(decoder, pcm, text)
        phones = _align_phones(decoder, pcm) if words and not patient else []
        if phones:
            break
    phones = phones or [
        _Span(name, start, end - start)
        for word in words
        for names in [(decoder.lookup_word(word.name) or "SIL").split() if word.spoken else ["SIL"]]
        for edges in [[word.start + word.duration * number // len(names) for number in range(len(names) + 1)]]
        for name, start, end in zip(names, edges, edges[1:], strict=False)
    ]
    scores = [(phone.score, phone.duration) for phone in phones if phone.spoken and phone.score]
    return (
        tuple(Word(word.name.split("(")[0], word.samples[0], min(word.samples[1], len(pcm))) for word in words if word.spoken),
        tuple(
            Phone(PHONES.index(phone.name) if phone.name in PHONES else SILENCE, *phone.samples) for phone in phones if phone.duration > 0
        ),
        sum(score for score, _ in scores) / max(1, sum(duration for _, duration in scores)),
    )


def _align_words(decoder: Any, pcm: np.ndarray, text: str) -> list[_Span]:
    """Return the words of the text in time, silence among them; nothing if they do not fit."""
    if not text or any(decoder.lookup_word(word) is None for word in text.split()):
        return []
    decoder.set_align_text(text)
    _run(decoder, pcm)
    if decoder.hyp() is None:
        return []
    words = [_Span(span.word, span.start_frame, span.end_frame + 1 - span.start_frame) for span in decoder.seg()]
    return words if [word.name.split("(")[0] for word in words if word.spoken] == text.split() else []


def _align_phones(decoder: Any, pcm: np.ndarray) -> list[_Span]:
    """Return the phones of the words just aligned; nothing if this finer search gets lost."""
    decoder.set_alignment()
    try:
        _run(decoder, pcm)
    except RuntimeError:
        return []
    # Entries of an alignment that was let go of point into freed memory: they are read here and not kept.
    alignment = decoder.get_alignment()
    return [_Span(phone.name, phone.start, phone.duration, phone.score) for word in alignment for phone in word]


def _run(decoder: Any, pcm: np.ndarray) -> None:
    decoder.start_utt()
    decoder.process_raw(pcm.tobytes(), full_utt=True)
    decoder.end_utt()


def aligned(name: str, source: str, speaker: str, text: str, pcm: np.ndarray) -> Clip:
    """Return the clip with its alignment."""
    words, phones, score = align(pcm, text)
    return Clip(name=name, source=source, speaker=speaker, text=text, words=words, phones=phones, score=score, pcm=pcm)


def write_shard(path: Path, clips: Iterable[Clip]) -> None:
    """Write clips to a shard, so that a reader sees all of it or nothing."""
    rows, pcm = [], []
    for clip in clips:
        rows.append(
            _Row(
                name=clip.name,
                source=clip.source,
                speaker=clip.speaker,
                text=clip.text,
                words=clip.words,
                phones=clip.phones,
                score=clip.score,
                samples=len(clip.pcm),
            )
        )
        pcm.append(clip.pcm)
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, pcm=np.concatenate(pcm), table=np.frombuffer(msgspec.json.encode(rows), np.uint8))
    unfinished.rename(path)


def read_shard(path: Path) -> list[Clip]:
    """Read the clips of a shard."""
    with np.load(path) as shard:
        pcm, table = shard["pcm"], shard["table"].tobytes()
    clips, position = [], 0
    for row in msgspec.json.decode(table, type=list[_Row]):
        clips.append(
            Clip(
                name=row.name,
                source=row.source,
                speaker=row.speaker,
                text=row.text,
                words=row.words,
                phones=row.phones,
                score=row.score,
                pcm=pcm[position : position + row.samples],
            )
        )
        position += row.samples
    return clips


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


class _Recording(NamedTuple):
    """A file, and what is said in it."""

    name: str
    source: str
    speaker: str
    text: str
    path: Path

    def clip(self) -> Clip:
        """Read and align it."""
        return aligned(self.name, self.source, self.speaker, self.text, read_audio(self.path))


def _orders(audio_dir: Path, split: str) -> Iterator[_Recording]:
    for row in _table(audio_dir / "orders" / "transcripts.tsv"):
        if row["split"] == split:
            yield _Recording(row["file"], "order", row["speaker"], row["transcript"], audio_dir / "orders" / row["file"])


def _digits(audio_dir: Path, speakers: Iterable[str]) -> Iterator[_Recording]:
    for speaker in speakers:
        for path in sorted((audio_dir / "fsdd" / "recordings").glob(f"?_{speaker}_*.wav")):
            yield _Recording(path.name, "digit", speaker, DIGIT_NAMES[int(path.name[0])], path)


def _prompts(audio_dir: Path) -> Iterator[_Recording]:
    """Yield the telephone prompts (digits among them) and the few other English recordings whose transcript is in plain words."""
    for row in _table(audio_dir / "MANIFEST.tsv"):
        path, text = row["path"], re.sub(r"[.,?!;:]+", " ", row["transcript"].lower().replace("-", " ").replace("\u2019", "'"))
        text = " ".join(text.split())
        if not text or not _SPEAKABLE.fullmatch(text):
            continue
        if path.startswith("telephone/asterisk/digits_"):
            yield _Recording(path, "digit", "prompts", text, audio_dir / path)
        elif path.startswith("telephone/asterisk/"):
            yield _Recording(path, "prompt", "prompts", text, audio_dir / path)
        elif path.startswith(("en/librivox", "en/librispeech", "en/arctic")):
            yield _Recording(path, "english", path.split("_")[1], text, audio_dir / path)


def order_clips(audio_dir: Path, split: str) -> Iterator[Clip]:
    """Yield the recorded orders of a split: ``train``, ``dev`` or ``test``."""
    return (recording.clip() for recording in _orders(audio_dir, split))


def digit_clips(audio_dir: Path, speakers: Iterable[str]) -> Iterator[Clip]:
    """Yield the single recorded digits of the named speakers."""
    return (recording.clip() for recording in _digits(audio_dir, speakers))


def recorded_clips(audio_dir: Path, held_out: Iterable[str]) -> tuple[int, Iterator[Clip]]:
    """Return how many recordings may be trained on, and those, read and aligned one by one."""
    speakers = sorted({path.name.split("_")[1] for path in (audio_dir / "fsdd" / "recordings").glob("*.wav")} - set(held_out))
    recordings = [*_orders(audio_dir, "train"), *_digits(audio_dir, speakers), *_prompts(audio_dir)]
    return len(recordings), (recording.clip() for recording in recordings)


def synthetic_clips(count: int, seed: int) -> Iterator[Clip]:
    """Yield spoken phrases of the basic synthetic voices."""
    from ops.train.phrases import phrase
    from ops.train.voices import BASIC_ENGINES

    return _spoken_clips(count, seed, phrase, BASIC_ENGINES)


def number_clips(count: int, seed: int, engines: Mapping[str, float]) -> Iterator[Clip]:
    """Yield numbers, and now and then an order, of the engines named, each with how often it speaks."""
    from ops.train.phrases import number_phrase

    return _spoken_clips(count, seed, number_phrase, engines)


def _spoken_clips(count: int, seed: int, phrase: Callable[[random.Random], str], engines: Mapping[str, float]) -> Iterator[Clip]:
    from ops.train.voices import speak

    choose = random.Random(seed)
    for number in range(count):
        text = phrase(choose)
        pcm, voice = speak(text, choose, engines)
        yield aligned(f"synthetic-{seed}-{number}", "synthetic", voice, text, pcm)
