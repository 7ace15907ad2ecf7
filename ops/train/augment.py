"""Training examples: recorded and synthetic clips put together into calls that never were, sent through lines and rooms that never were.

Everything is drawn from one generator, so that a seed names its examples.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import scipy.signal
import soxr

from ops.train.clips import SILENCE, Clip, Phone
from ops.train.features import HOP_SAMPLES, MEL_BINS, fbank
from ops.train.phrases import card_number, digit_string, order
from schemas.records import SAMPLE_RATE_HZ

__all__ = ["IGNORED_PHONE", "Example", "Mixer", "Piece", "line", "phone_targets"]

#: What the phone loss leaves out: frames of clips that could not be aligned.
IGNORED_PHONE: Final = -100
_TELEPHONE_HZ: Final = 8_000
_MULAW: Final = 255.0
_FULL_SCALE: Final = 32767.0
#: Examples longer than this are drawn again: 14 s is beyond nearly all of them.
_LONGEST_SAMPLES: Final = 14 * SAMPLE_RATE_HZ
_SHORTEST_SAMPLES: Final = SAMPLE_RATE_HZ // 4
#: Where cuts meet: 5 ms, short enough not to blur a stop.
_FADE_SAMPLES: Final = SAMPLE_RATE_HZ // 200
#: The most words of a clip that are taken where few are wanted.
_FEW_WORDS: Final = 4
#: A speaker's voice is only cut up into new sentences where there are enough words to choose from.
_SPLICED_CLIPS: Final = 6

#: How many of the numbers are said by another recorded voice at each digit.
_MANY_VOICES_SHARE: Final = 0.2
#: Where the gains of a drawn microphone are set, how much they vary, and how long its filter rings: 8 ms.
_COLOUR_HZ: Final = (0, 125, 250, 500, 1000, 2000, 4000, 8000)
_COLOUR_DB: Final = 4.0
_COLOUR_TAPS: Final = 129

#: Encoder frame t hears feature frames 4 t to 4 t + 6 of 10 ms; its middle lies 3 hops and half a window in.
_FRAME_SAMPLES: Final = 4 * HOP_SAMPLES
_FRAME_MIDDLE_SAMPLES: Final = 3 * HOP_SAMPLES + SAMPLE_RATE_HZ // 80


class Piece(NamedTuple):
    """A stretch of speech on its way to an example: float32 samples within [-1, 1]."""

    samples: np.ndarray
    text: str
    #: None where nobody knows.
    phones: tuple[Phone, ...] | None


class Example(NamedTuple):
    """What the model trains on."""

    #: (frames, 80) float32.
    features: np.ndarray
    text: str
    #: One phone for each encoder frame, int64.
    phones: np.ndarray


def _rms(samples: np.ndarray) -> float:
    return float(np.sqrt(np.mean(samples**2))) + 1e-9


def phone_targets(phones: Sequence[Phone] | None, feature_frames: int) -> np.ndarray:
    """Return the phone at each encoder frame's middle, int64; `IGNORED_PHONE` everywhere if they are not known."""
    count = max(0, (feature_frames - 3) // 4)
    if phones is None:
        return np.full(count, IGNORED_PHONE)
    targets = np.full(count, SILENCE)
    for phone in phones:
        first = -(-(phone.start - _FRAME_MIDDLE_SAMPLES) // _FRAME_SAMPLES)
        last = -(-(phone.end - _FRAME_MIDDLE_SAMPLES) // _FRAME_SAMPLES)
        targets[max(first, 0) : max(last, 0)] = phone.phone
    return targets


def _cut(clip: Clip, start: int, end: int) -> Piece:
    """Cut a clip; phones that lie across the cut are cut with it."""
    start, end = max(0, start), min(end, len(clip.pcm))
    samples = clip.pcm[start:end].astype(np.float32) / _FULL_SCALE
    phones = tuple(
        Phone(phone.phone, max(phone.start - start, 0), min(phone.end, end) - start)
        for phone in clip.phones
        if phone.end > start and phone.start < end
    )
    return Piece(samples, clip.text, phones if clip.phones else None)


def _join(pieces: Sequence[Piece], gaps: Sequence[int]) -> Piece:
    """Put pieces one after another, with gaps between them in samples; a negative gap lets them overlap. Ends are faded over 5 ms."""
    position, placed = 0, []
    for piece, gap in zip(pieces, [0, *gaps], strict=True):
        position = max(0, position + gap)
        placed.append(position)
        position += len(piece.samples)
    samples = np.zeros(max(start + len(piece.samples) for start, piece in zip(placed, pieces, strict=True)), np.float32)
    fade = np.linspace(0, 1, _FADE_SAMPLES, dtype=np.float32)
    for start, piece in zip(placed, pieces, strict=True):
        faded = piece.samples.copy()
        if len(faded) > 2 * _FADE_SAMPLES:
            faded[:_FADE_SAMPLES] *= fade
            faded[-_FADE_SAMPLES:] *= fade[::-1]
        samples[start : start + len(faded)] += faded
    known = all(piece.phones is not None for piece in pieces)
    phones = tuple(
        Phone(phone.phone, phone.start + start, phone.end + start)
        for start, piece in zip(placed, pieces, strict=True)
        for phone in piece.phones or ()
    )
    return Piece(samples, " ".join(piece.text for piece in pieces if piece.text), phones if known else None)


def _at_speed(piece: Piece, speed: float) -> Piece:
    """Play a piece faster or slower, pitch and all."""
    samples = soxr.resample(piece.samples, SAMPLE_RATE_HZ * speed, SAMPLE_RATE_HZ, quality="MQ")
    phones = piece.phones and tuple(Phone(phone.phone, int(phone.start / speed), int(phone.end / speed)) for phone in piece.phones)
    return Piece(samples, piece.text, phones)


def _mulaw(samples: np.ndarray) -> np.ndarray:
    """Send samples within [-1, 1] through 8-bit mu-law."""
    compressed = np.sign(samples) * np.log1p(_MULAW * np.abs(samples)) / np.log1p(_MULAW)
    rounded = np.round(compressed * 127.5 - 0.5) + 0.5
    compressed = np.clip(rounded / 127.5, -1, 1)
    expanded: np.ndarray = (np.sign(compressed) * np.expm1(np.abs(compressed) * np.log1p(_MULAW)) / _MULAW).astype(np.float32)
    return expanded


def line(samples: np.ndarray, mulaw: bool) -> np.ndarray:
    """Send samples over a telephone line: 8 kHz, and 8-bit mu-law if asked."""
    narrow = soxr.resample(samples, SAMPLE_RATE_HZ, _TELEPHONE_HZ, quality="MQ")
    if mulaw:
        narrow = _mulaw(narrow)
    wide = soxr.resample(narrow, _TELEPHONE_HZ, SAMPLE_RATE_HZ, quality="MQ")
    return np.pad(wide[: len(samples)], (0, max(0, len(samples) - len(wide))))


class Mixer:
    """Draws examples from clips, noise and music.

    ``strength``, from 0 to 1, is a factor on how often each kind of change to the sound is made; at less than 1, many examples are but a
    few words.
    """

    def __init__(
        self,
        clips: Sequence[Clip],
        noise: Sequence[np.ndarray],
        music: Sequence[np.ndarray],
        synthetic_share: float = 0.3,
        number_share: float = 0.48,
        strength: float = 1.0,
    ) -> None:
        self._orders = [clip for clip in clips if clip.source == "order"]
        self._other = [clip for clip in clips if clip.source in {"prompt", "english"} and len(clip.pcm) < _LONGEST_SAMPLES]
        self._synthetic = [clip for clip in clips if clip.source == "synthetic"]
        self._synthetic_share = synthetic_share if self._synthetic else 0.0
        self._number_share = number_share
        self._noise, self._music = list(noise), list(music)
        self._strength = strength
        # Few words at a time are what CTC learns from first: in a long sentence it long finds nothing but blanks.
        self._few_words_share = 0.1 + 0.9 * (1 - strength)
        digits: dict[str, dict[str, list[Clip]]] = defaultdict(lambda: defaultdict(list))
        for clip in clips:
            if clip.source == "digit":
                digits[clip.speaker][clip.text].append(clip)
        self._digits = {speaker: dict(words) for speaker, words in digits.items()}
        self._spoken = self._words_by_speaker()

    def _words_by_speaker(self) -> list[dict[str, list[tuple[Clip, int]]]]:
        by_speaker: dict[str, list[Clip]] = defaultdict(list)
        for clip in self._orders:
            if clip.words:
                by_speaker[clip.speaker].append(clip)
        spoken = []
        for clips in by_speaker.values():
            if len(clips) >= _SPLICED_CLIPS:
                places: dict[str, list[tuple[Clip, int]]] = defaultdict(list)
                for clip in clips:
                    for number, word in enumerate(clip.words):
                        places[word.text].append((clip, number))
                spoken.append(dict(places))
        return spoken

    def _taken(self, clip: Clip, choose: random.Random) -> Piece:
        """Take a clip, mostly without the long silence around its speech, or a few of its words."""
        if clip.words and choose.random() < self._few_words_share:
            count = choose.randint(1, min(_FEW_WORDS, len(clip.words)))
            first = choose.randint(0, len(clip.words) - count)
            words = clip.words[first : first + count]
            before, after = (int(choose.uniform(0.01, 0.05) * SAMPLE_RATE_HZ) for _ in range(2))
            return _cut(clip, words[0].start - before, words[-1].end + after)._replace(text=" ".join(word.text for word in words))
        if not clip.words or choose.random() < 0.12:
            return _cut(clip, 0, len(clip.pcm))
        before, after = int(choose.uniform(0.05, 0.5) * SAMPLE_RATE_HZ), int(choose.uniform(0.1, 0.6) * SAMPLE_RATE_HZ)
        return _cut(clip, clip.words[0].start - before, clip.words[-1].end + after)

    def _spliced(self, choose: random.Random) -> Piece:
        """Let a recorded speaker say an order that they never said, from words and word sequences cut from those they did."""
        places = choose.choice(self._spoken)
        for _ in range(20):
            text = order(choose)
            words = text.split()
            if all(word in places for word in words):
                break
        else:
            return self._taken(choose.choice(self._orders), choose)
        pieces: list[Piece] = []
        at = 0
        while at < len(words):
            options = choose.sample(places[words[at]], min(6, len(places[words[at]])))
            lengths = [self._matching(clip, number, words[at:]) for clip, number in options]
            # The longest run of words sounds best; shorter ones make more sentences.
            best = max(lengths) if choose.random() < 0.7 else 1
            clip, number = choose.choice([option for option, length in zip(options, lengths, strict=True) if length >= best])
            run = clip.words[number : number + best]
            start, end = run[0].start, run[-1].end
            if at == 0:
                start -= int(choose.uniform(0.05, 0.4) * SAMPLE_RATE_HZ)
            if at + best == len(words):
                end += int(choose.uniform(0.1, 0.5) * SAMPLE_RATE_HZ)
            piece = _cut(clip, start, end)
            speech = clip.pcm[clip.words[0].start : clip.words[-1].end].astype(np.float32) / _FULL_SCALE
            pieces.append(Piece(piece.samples * (0.1 / _rms(speech)), "", piece.phones))
            at += best
        return _join(pieces, [-_FADE_SAMPLES] * (len(pieces) - 1))._replace(text=text)

    @staticmethod
    def _matching(clip: Clip, number: int, words: Sequence[str]) -> int:
        count = 0
        for said, wanted in zip(clip.words[number:], words, strict=False):
            if said.text != wanted:
                break
            count += 1
        return count

    def digit_piece(self, choose: random.Random, speaker: str | None = None, count: int | None = None) -> Piece:
        """Let one speaker read out a number."""
        voice = self._digits[speaker or choose.choice(list(self._digits))]
        words = card_number(choose).split()
        words = [word if word in voice else "zero" for word in (words if count is None else words[:count])]
        pieces = []
        for word in words:
            piece = _cut(clip := choose.choice(voice[word]), 0, len(clip.pcm))
            pieces.append(Piece(piece.samples * (0.1 / _rms(piece.samples)) * 10 ** (choose.uniform(-3, 3) / 20), word, piece.phones))
        grouped = choose.random() < 0.4
        gaps = []
        for number in range(1, len(words)):
            pause = (
                choose.uniform(0.25, 0.8)
                if grouped and number % 4 == 0
                else choose.uniform(-0.04, 0.12)
                if choose.random() < 0.75
                else choose.uniform(0.1, 0.4)
            )
            gaps.append(int(pause * SAMPLE_RATE_HZ))
        return _join(pieces, gaps)

    def _number(self, choose: random.Random) -> Piece:
        """Let one recorded speaker read out a number, or each digit another; with silence around it, as a detector leaves."""
        few = choose.randint(1, _FEW_WORDS) if choose.random() < self._few_words_share else None
        if choose.random() < _MANY_VOICES_SHARE:
            words = digit_string(choose, few or choose.randint(3, 10)).split()
            able = [[voice[word] for voice in self._digits.values() if word in voice] for word in words]
            said = [choose.choice(clips or [voice["zero"] for voice in self._digits.values()]) for clips in able]
            pieces = [_at_speed(_whole(choose.choice(clips)), choose.uniform(0.85, 1.18)) for clips in said]
            gaps = [int(choose.uniform(-0.03, 0.2) * SAMPLE_RATE_HZ) for _ in pieces[1:]]
            piece = _join([_louder(each, choose) for each in pieces], gaps)
        else:
            piece = self.digit_piece(choose, count=few)
        return _in_silence(piece, *(int(choose.uniform(0.0, 0.5) * SAMPLE_RATE_HZ) for _ in range(2)))

    def _piece(self, choose: random.Random) -> Piece:
        if choose.random() < self._synthetic_share:
            piece = self._taken(choose.choice(self._synthetic), choose)
        elif choose.random() < self._number_share:
            piece = self._number(choose)
        else:
            kind = choose.random()
            if kind < 0.58:
                piece = self._taken(choose.choice(self._orders), choose)
            elif kind < 0.9:
                piece = self._spliced(choose)
            else:
                piece = self._taken(choose.choice(self._other), choose)
        return _at_speed(piece, choose.uniform(0.8, 1.25)) if choose.random() < 0.75 * self._strength else piece

    def _sound(self, choose: random.Random, sounds: Sequence[np.ndarray], length: int) -> np.ndarray:
        sound = choose.choice(sounds)
        start = choose.randrange(len(sound))
        return (
            np.resize(np.roll(sound, -start)[: max(length, 1)] if len(sound) > length else np.roll(sound, -start), length).astype(
                np.float32
            )
            / _FULL_SCALE
        )

    def _room(self, samples: np.ndarray, choose: random.Random) -> np.ndarray:
        """Put samples into a room of 0.1 to 0.5 s reverberation."""
        seconds = choose.uniform(0.1, 0.5)
        tail = np.random.default_rng(choose.getrandbits(32)).standard_normal(int(seconds * SAMPLE_RATE_HZ)).astype(np.float32)
        # 60 dB down at the end: e^-6.9.
        tail *= np.exp(np.linspace(0, -6.9, len(tail), dtype=np.float32))
        tail *= choose.uniform(0.2, 0.8) / np.sqrt((tail**2).sum())
        tail[0] = 1.0
        return scipy.signal.fftconvolve(samples, tail)[: len(samples)].astype(np.float32)

    def _channel(self, samples: np.ndarray, choose: random.Random) -> np.ndarray:
        """Send speech through a room, beside noise or music, over a line, at some level. Returns float32 at int16 scale, in whole steps."""
        length = len(samples)
        if choose.random() < 0.6 * self._strength:
            samples = _coloured(samples, choose)
        if choose.random() < 0.3 * self._strength:
            samples = self._room(samples, choose)
        level = _rms(samples)
        if self._noise and choose.random() < 0.55 * self._strength:
            if choose.random() < 0.3:
                noise = np.random.default_rng(choose.getrandbits(32)).standard_normal(length).astype(np.float32)
                if choose.random() < 0.5:
                    noise = scipy.signal.lfilter([1.0], [1.0, -choose.uniform(0.5, 0.97)], noise).astype(np.float32)
            else:
                noise = self._sound(choose, self._noise, length)
            samples = samples + noise * (level / _rms(noise)) * 10 ** (-choose.uniform(5, 28) / 20)
        if self._music and choose.random() < 0.08 * self._strength:
            music = self._sound(choose, self._music, length)
            samples = samples + music * (level / _rms(music)) * 10 ** (-choose.uniform(6, 20) / 20)
        # Peaks between -32 dB and full scale.
        samples = samples * (10 ** (choose.uniform(-32, -0.5) / 20) / (np.abs(samples).max() + 1e-9))
        if choose.random() < 0.55 * self._strength:
            samples = line(samples, choose.random() < 0.6)
        return np.clip(np.round(samples * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE)

    def example(self, choose: random.Random) -> Example:
        """Draw an example."""
        while True:
            if choose.random() < 0.015:
                length = int(choose.uniform(0.5, 4) * SAMPLE_RATE_HZ)
                sounds = choose.choice((self._noise, self._music)) or [np.ones(1, np.int16)]
                piece = Piece(self._sound(choose, sounds, length), "", (Phone(SILENCE, 0, length),))
            else:
                piece = self._piece(choose)
                if choose.random() < 0.12 * self._strength:
                    after = self._piece(choose)
                    piece = _join([_louder(piece, choose), _louder(after, choose)], [int(choose.uniform(0.05, 1.2) * SAMPLE_RATE_HZ)])
            if _SHORTEST_SAMPLES < len(piece.samples) < _LONGEST_SAMPLES:
                break
        low_warp = high_warp = 1.0
        if choose.random() < 0.85 * self._strength:
            warp = choose.uniform(0.82, 1.2)
            low_warp, high_warp = (round(warp * choose.uniform(0.94, 1.06), 2) for _ in range(2))
        features = fbank(self._channel(piece.samples, choose), low_warp, high_warp)
        return Example(features, piece.text, phone_targets(piece.phones, len(features)))


def _whole(clip: Clip) -> Piece:
    return _cut(clip, 0, len(clip.pcm))


def _in_silence(piece: Piece, before: int, after: int) -> Piece:
    """Put silence of so many samples around a piece."""
    phones = piece.phones and tuple(Phone(phone.phone, phone.start + before, phone.end + before) for phone in piece.phones)
    return Piece(np.pad(piece.samples, (before, after)), piece.text, phones)


def _coloured(samples: np.ndarray, choose: random.Random) -> np.ndarray:
    """Send a voice through a microphone of its own: a filter of random gains at each octave."""
    gains = [10 ** (choose.gauss(0.0, _COLOUR_DB) / 20) for _ in _COLOUR_HZ]
    taps = scipy.signal.firwin2(_COLOUR_TAPS, _COLOUR_HZ, gains, fs=SAMPLE_RATE_HZ).astype(np.float32)
    return scipy.signal.fftconvolve(samples, taps, mode="same").astype(np.float32)


def _louder(piece: Piece, choose: random.Random) -> Piece:
    """Bring a piece to a common level, give or take 3 dB."""
    return piece._replace(samples=piece.samples * (0.1 / _rms(piece.samples)) * 10 ** (choose.uniform(-3, 3) / 20))


def masked(features: np.ndarray, mean: np.ndarray, choose: random.Random) -> np.ndarray:
    """Hide bands and moments of the features behind their mean (SpecAugment)."""
    features = features.copy()
    for _ in range(2):
        width = choose.randint(0, 18)
        low = choose.randint(0, MEL_BINS - width)
        features[:, low : low + width] = mean[low : low + width]
    for _ in range(max(1, len(features) // 150)):
        width = choose.randint(0, min(20, len(features) // 8))
        start = choose.randint(0, len(features) - width)
        features[start : start + width] = mean
    return features
