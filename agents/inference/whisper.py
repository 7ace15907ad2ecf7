"""The engine ``whisper``: faster-whisper on CTranslate2. Open vocabulary, good text, no streaming of its own.

So it is used in two ways. *Finals*: one decoding of the whole segment with nothing but its audio to go by: temperature 0, no earlier text,
no prefix, always the same window; the same result whatever the load. *Partials*: the open segment is decoded anew now and then, as load
allows, on what capacity the finals leave; they are free to differ.

Whisper needs *silent audio* behind the speech. Measured with tiny.en on 120 telephone prompts and orders of 0.6 to 19 s, one thread:

====================  ============  =============  ===================
window                words wrong   texts looping  encoder
====================  ============  =============  ===================
at least 6 s          25 %          16             50 ms
at least 8 s          10 %          5              63 ms
at least 10 s         9 %           3              60 to 80 ms
at least 15 s         5 %           none           100 to 160 ms
====================  ============  =============  ===================

With no more than 2 s behind the speech whatever its length, half the words are wrong; the encoder takes 450 ms for a window of 30 s.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agents.inference.agreement import Agreement
from agents.inference.engine import Block, FinalText, Finish, Hypothesis, Opening, SegmentKey
from agents.inference.models import digest_of
from agents.inference.postprocess import readable
from agents.inference.repetition import loop_start, repeats_itself
from schemas.records import SAMPLE_RATE_HZ, Word

__all__ = ["Decoding", "WhisperDecoder", "WhisperEngine"]

log = logging.getLogger(__name__)

_Audio = npt.NDArray[np.float32]

_BYTES_PER_HOP: Final = 2 * SAMPLE_RATE_HZ // 100
_SAMPLES_PER_MS: Final = SAMPLE_RATE_HZ // 1_000
_INT16_SCALE: Final = 1 / 32_768
_FRAMES_PER_S: Final = 100
#: What the model was trained on; no window is longer.
_LONGEST_WINDOW_S: Final = 30.0
#: A longer segment is decoded in pieces: the window, less the silence that must follow.
_LONGEST_PIECE_S: Final = 28.0
#: Where a piece may be cut: in the quietest tenth of a second of its last seconds.
_CUT_RANGE_S: Final = 5.0
_CUT_STEP_SAMPLES: Final = SAMPLE_RATE_HZ // 10


class _Window(NamedTuple):
    """How much the decoder hears: at least ``floor_s``, and ``beyond_s`` of silence after the speech."""

    floor_s: float
    beyond_s: float

    def samples(self, speech_samples: int) -> int:
        seconds = min(_LONGEST_WINDOW_S, max(self.floor_s, speech_samples / SAMPLE_RATE_HZ + self.beyond_s))
        return max(round(seconds * SAMPLE_RATE_HZ), speech_samples)


#: Tried one after the other until the text does not loop.
_FINAL_WINDOWS: Final = (_Window(15.0, 2.0), _Window(20.0, 4.0), _Window(30.0, 10.0))
#: Cheaper; a text that loops is not shown.
_PARTIAL_WINDOW: Final = _Window(10.0, 2.0)
#: Wrong words on the 120 files: 5.4 % with 1, 4.5 % with 5, for 3 ms more.
_FINAL_BEAMS: Final = 5
_PARTIAL_BEAMS: Final = 1
#: The fastest speech has about 7 tokens a second; a decoder that writes more than this has lost the thread.
_TOKENS_PER_S: Final = 10
_TOKENS_ALWAYS: Final = 16
#: Whisper's own bounds for "nobody speaks here".
_NO_SPEECH_PROBABILITY: Final = 0.6
_NO_SPEECH_LOG_PROBABILITY: Final = -1.0
_PREPENDED: Final = "\"'“¿([{-"
_APPENDED: Final = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001 Chinese punctuation is meant


class _Spoken(NamedTuple):
    """A word with its times in seconds from the start of the decoded audio."""

    text: str
    start_s: float
    end_s: float
    confidence: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """What the model heard.

    Attributes:
        text: as the model wrote it.
        pieces: the text cut into words, each with the space before it.
        words: words with times, if they were asked for.
        confidence: the geometric mean of its tokens' probabilities.
        language: Whisper's code.
        looped: whether the model repeated itself, so that the text is not to be trusted.
    """

    text: str = ""
    pieces: tuple[str, ...] = ()
    words: tuple[_Spoken, ...] = ()
    confidence: float = 0.0
    language: str = ""
    looped: bool = False


class WhisperDecoder:
    """A Whisper model: audio in, text out, nothing kept. Several threads may call it.

    Args:
        folder: the model, in CTranslate2's format.
        threads: CPU threads for each decoding.
        workers: decodings at the same time.
    """

    def __init__(self, folder: Path, *, threads: int = 1, workers: int = 1) -> None:
        from faster_whisper import WhisperModel
        from faster_whisper.tokenizer import Tokenizer

        self._model = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=threads, num_workers=workers)
        self._languages = frozenset(self._model.supported_languages)
        self._make_tokenizer = Tokenizer
        self._tokenizers: dict[str, Any] = {}

    def known_language(self, tag: str) -> str:
        """Return Whisper's code of a BCP 47 tag, or nothing if the model does not know the language."""
        code = tag.replace("_", "-").split("-")[0].lower()
        return code if code in self._languages else ""

    def final(self, audio: _Audio, language: str = "") -> Decoding:
        """Decode a whole segment: a function of the audio and the language alone.

        Args:
            audio: mono at 16 kHz, between -1 and 1; any length.
            language: Whisper's code; empty: detected.
        """
        parts: list[tuple[float, Decoding]] = []
        for start, piece in _pieces(audio):
            for window in _FINAL_WINDOWS:
                decoding = self._decode(piece, language, window, _FINAL_BEAMS, words=True)
                if not decoding.looped:
                    break
            parts.append((start / SAMPLE_RATE_HZ, decoding))
        return _joined(parts)

    def partial(self, audio: _Audio, language: str = "") -> Decoding:
        """Decode the segment so far, quickly: its last 28 s at most."""
        return self._decode(audio[-round(_LONGEST_PIECE_S * SAMPLE_RATE_HZ) :], language, _PARTIAL_WINDOW, _PARTIAL_BEAMS, words=False)

    def _decode(self, audio: _Audio, language: str, window: _Window, beams: int, *, words: bool) -> Decoding:
        heard = np.zeros(window.samples(len(audio)), dtype=np.float32)
        heard[: len(audio)] = audio
        encoded = self._model.encode(self._model.feature_extractor(heard, padding=0).astype(np.float32))
        tokenizer = self._tokenizer(language or self._detected(encoded))
        prompt = [*tokenizer.sot_sequence, tokenizer.no_timestamps]
        seconds = len(audio) / SAMPLE_RATE_HZ
        cap = min(_TOKENS_ALWAYS + math.ceil(_TOKENS_PER_S * seconds), self._model.max_length - len(prompt))
        result = self._model.model.generate(
            encoded,
            [prompt],
            beam_size=beams,
            max_length=len(prompt) + cap,
            return_scores=True,
            return_no_speech_prob=True,
            suppress_blank=True,
            suppress_tokens=tokenizer.suppressed,
        )[0]
        log_probability = result.scores[0]
        if result.no_speech_prob > _NO_SPEECH_PROBABILITY and log_probability < _NO_SPEECH_LOG_PROBABILITY:
            return Decoding(language=tokenizer.language_code)
        tokens = [token for token in result.sequences_ids[0] if token < tokenizer.eot]
        loop = loop_start(tokens)
        looped = loop is not None or len(tokens) >= cap or repeats_itself(tokenizer.decode(tokens))
        if loop is not None and len(tokens) > _TOKENS_PER_S * seconds:
            tokens = tokens[:loop]  # nobody can have said that: the first time stands for all
        return Decoding(
            text=tokenizer.decode(tokens),
            pieces=tuple(tokenizer.split_to_word_tokens(tokens)[0]) if tokens else (),
            words=self._aligned(tokenizer, tokens, encoded, seconds) if words and tokens else (),
            confidence=math.exp(log_probability),
            language=tokenizer.language_code,
            looped=looped,
        )

    def _aligned(self, tokenizer: Any, tokens: list[int], encoded: Any, seconds: float) -> tuple[_Spoken, ...]:
        from faster_whisper.transcribe import merge_punctuations

        frames = max(2, math.ceil(seconds * _FRAMES_PER_S))
        (words,) = self._model.find_alignment(tokenizer, [tokens], encoded, frames)
        merge_punctuations(words, _PREPENDED, _APPENDED)
        return tuple(
            # numpy's numbers are not Python's: the message to the worker takes only those.
            _Spoken(word["word"].strip(), min(float(word["start"]), seconds), min(float(word["end"]), seconds), float(word["probability"]))
            for word in words
            if word["word"].strip()
        )

    def _detected(self, encoded: Any) -> str:
        if not self._model.model.is_multilingual:
            return "en"
        token, _ = self._model.model.detect_language(encoded)[0][0]
        return str(token).strip("<|>")

    def _tokenizer(self, language: str) -> Any:
        tokenizer = self._tokenizers.get(language)
        if tokenizer is None:
            from faster_whisper.transcribe import get_suppressed_tokens

            tokenizer = self._make_tokenizer(self._model.hf_tokenizer, self._model.model.is_multilingual, "transcribe", language)
            tokenizer.suppressed = get_suppressed_tokens(tokenizer, [-1])
            self._tokenizers[language] = tokenizer
        return tokenizer


def _pieces(audio: _Audio) -> Iterator[tuple[int, _Audio]]:
    """Yield the audio in pieces that fit into a window, each with where it starts; cut where it is quiet."""
    longest, cut_range = (round(seconds * SAMPLE_RATE_HZ) for seconds in (_LONGEST_PIECE_S, _CUT_RANGE_S))
    start = 0
    while len(audio) - start > longest:
        last = audio[start + longest - cut_range : start + longest]
        quietest = int(np.square(last).reshape(-1, _CUT_STEP_SAMPLES).sum(axis=1).argmin())
        end = start + longest - cut_range + quietest * _CUT_STEP_SAMPLES + _CUT_STEP_SAMPLES // 2
        yield start, audio[start:end]
        start = end
    yield start, audio[start:]


def _joined(parts: Sequence[tuple[float, Decoding]]) -> Decoding:
    """Return the decodings of consecutive pieces as one; each comes with its start in seconds."""
    if len(parts) == 1:
        return parts[0][1]
    return Decoding(
        text="".join(part.text for _, part in parts),
        pieces=tuple(piece for _, part in parts for piece in part.pieces),
        words=tuple(
            word._replace(start_s=start_s + word.start_s, end_s=start_s + word.end_s) for start_s, part in parts for word in part.words
        ),
        confidence=min(part.confidence for _, part in parts),
        language=parts[0][1].language,
        looped=any(part.looped for _, part in parts),
    )


#: New audio that a partial is worth: a word or two; at first, with the pre-roll, about one.
_NEW_AUDIO_S: Final = 0.6
#: The share of the workers' time that partials may take; the rest is for finals, and for the rest of the machine.
_PARTIALS_SHARE: Final = 0.5
#: How often threads look for a segment that is due.
_LOOK_S: Final = 0.02
#: A decoding's expected time before any was measured.
_FIRST_COST_S: Final = 0.15
_COST_SMOOTHING: Final = 0.1


#: How far decoding steps back (``nice``): on a machine with few processors, audio is to be taken on time, whatever is being decoded.
_NICE: Final = 3


def _yield_to_others() -> None:
    """Let this thread, and those that it starts, go behind all others of the machine."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


@dataclass(slots=True, eq=False)
class _Segment:
    opening: Opening
    opened_s: float
    body: bytearray = field(default_factory=bytearray)
    tail: bytes = b""
    agreement: Agreement = field(default_factory=Agreement)
    heard_samples: int = 0
    decoded_s: float = 0.0
    decoding: bool = False
    finishing: bool = False

    @property
    def samples(self) -> int:
        return (len(self.body) + len(self.tail)) // 2

    def audio(self) -> _Audio:
        return np.frombuffer(bytes(self.body) + self.tail, dtype="<i2").astype(np.float32) * np.float32(_INT16_SCALE)


class WhisperEngine:
    """See the module.

    Args:
        folder: the model, in CTranslate2's format.
        model_digest: SHA-256 over its files; computed if not given.
        language: BCP 47 tag for sessions that name none; empty: detected, or the model's only one.
        threads: CPU threads for each decoding.
        workers: decodings at the same time.
        partial_interval_ms: the shortest time between two partials of a segment; 0: no partials.
    """

    name = "whisper"
    finals_batch = 1
    blocks_at_once = 1

    def __init__(
        self,
        folder: str,
        *,
        model_digest: str = "",
        language: str = "",
        threads: int = 1,
        workers: int = 2,
        partial_interval_ms: int = 1_000,
    ) -> None:
        self.model_digest = model_digest or digest_of(Path(folder))
        self.finals_lanes = workers
        with ThreadPoolExecutor(1, initializer=_yield_to_others) as loader:
            self._decoder = loader.submit(WhisperDecoder, Path(folder), threads=threads, workers=workers).result()
            # The first decoding of a process takes longer; better now than when somebody speaks.
            loader.submit(self._decoder.final, np.zeros(SAMPLE_RATE_HZ, dtype=np.float32)).result()
        self._language = language
        self._workers = workers
        self._interval_s = partial_interval_ms / 1_000
        self._segments: dict[SegmentKey, _Segment] = {}
        self._changed: dict[SegmentKey, Hypothesis] = {}
        self._cost_s = _FIRST_COST_S
        self._running = 0
        self._stopping = False
        self._lock = threading.Condition()
        self._threads = [
            threading.Thread(target=self._decode_partials, name=f"partials-{number}", daemon=True)
            for number in range(workers if partial_interval_ms else 0)
        ]
        for thread in self._threads:
            thread.start()

    def open(self, segments: Sequence[Opening]) -> None:
        """Begin segments."""
        now_s = time.monotonic()
        with self._lock:
            for opening in segments:
                self._segments[opening.key] = _Segment(opening, now_s)
            self._lock.notify_all()

    def step(self, blocks: Sequence[Block]) -> Sequence[Hypothesis]:
        """Keep the audio; return what the partial decodings found since the last call."""
        with self._lock:
            for block in blocks:
                segment = self._segments[block.key]
                hops_bytes = block.hops * _BYTES_PER_HOP
                segment.body += block.pcm[:hops_bytes]
                segment.tail = block.pcm[hops_bytes:]
            changed, self._changed = self._changed, {}
        return list(changed.values())

    def finish(self, requests: Sequence[Finish]) -> Sequence[FinalText]:
        """Decode each segment whole."""
        return [self._final(request) for request in requests]

    def hotwords(self, version: str, folder: str, *, in_force: bool = True) -> None:
        """Ignore them."""

    def close(self, keys: Sequence[SegmentKey]) -> None:
        """Forget segments."""
        with self._lock:
            for key in keys:
                self._segments.pop(key, None)
                self._changed.pop(key, None)

    def stop(self) -> None:
        """End the threads; a decoding that runs comes to its end first."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    # ------------------------------------------------------------------ finals

    def _final(self, request: Finish) -> FinalText:
        with self._lock:
            segment = self._segments[request.key]
            segment.finishing = True
            self._changed.pop(request.key, None)
            start_sample = segment.opening.start_sample
            audio = segment.audio()[: max(0, request.end_sample - start_sample)]
        with self._at_work():
            decoding = self._decoder.final(audio, self._language_of(segment)) if len(audio) else Decoding()
        start_ms, end_ms = start_sample // _SAMPLES_PER_MS, request.end_sample // _SAMPLES_PER_MS
        return FinalText(
            key=request.key,
            text=readable(decoding.text, segment.opening.language or self._language or decoding.language),
            raw_text=decoding.text,
            words=tuple(
                Word(
                    text=word.text,
                    start_ms=min(end_ms, start_ms + round(1_000 * word.start_s)),
                    end_ms=min(end_ms, start_ms + round(1_000 * word.end_s)),
                    confidence=round(word.confidence, 2),
                )
                for word in decoding.words
            ),
            confidence=round(decoding.confidence, 2),
            language=decoding.language,
        )

    def _language_of(self, segment: _Segment) -> str:
        return self._decoder.known_language(segment.opening.language) or self._decoder.known_language(self._language)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Count a decoding that partials must leave room for."""
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._lock.notify_all()

    # ------------------------------------------------------------------ partials

    def _decode_partials(self) -> None:
        _yield_to_others()
        while (segment := self._next_due()) is not None:
            with self._lock:
                audio = segment.audio()
            started_s = time.monotonic()
            try:
                decoding = self._decoder.partial(audio, self._language_of(segment))
            except Exception:
                log.exception("a partial of %s failed", segment.opening.key)
                decoding = Decoding(looped=True)
            with self._lock:
                self._running -= 1
                self._cost_s += _COST_SMOOTHING * (time.monotonic() - started_s - self._cost_s)
                segment.decoding = False
                segment.heard_samples = len(audio)
                self._take(segment, decoding)
                self._lock.notify_all()

    def _take(self, segment: _Segment, decoding: Decoding) -> None:
        key = segment.opening.key
        if decoding.looped or segment.finishing or self._segments.get(key) is not segment:
            return
        if segment.agreement.update(decoding.pieces):
            self._changed[key] = Hypothesis(
                key=key,
                text=segment.agreement.text,
                stable_text=segment.agreement.stable_text,
                end_sample=segment.opening.start_sample + segment.heard_samples,
            )

    def _next_due(self) -> _Segment | None:
        """Wait for a segment whose partial is due, and return it; None when the engine stops."""
        with self._lock:
            while not self._stopping:
                segment = self._longest_waiting() if self._running < self._workers else None
                if segment is not None:
                    segment.decoding = True
                    segment.decoded_s = time.monotonic()
                    self._running += 1
                    return segment
                self._lock.wait(_LOOK_S if self._segments else None)
            return None

    def _longest_waiting(self) -> _Segment | None:
        """Return the segment that was decoded longest ago, of those with enough new audio after a long enough time."""
        now_s = time.monotonic()
        interval_s = max(self._interval_s, len(self._segments) * self._cost_s / (_PARTIALS_SHARE * self._workers))
        due = [
            segment
            for segment in self._segments.values()
            if not (segment.decoding or segment.finishing)
            and segment.samples - segment.heard_samples >= _NEW_AUDIO_S * SAMPLE_RATE_HZ
            and now_s - segment.decoded_s >= interval_s
        ]
        return min(due, key=lambda segment: segment.decoded_s or segment.opened_s, default=None)
