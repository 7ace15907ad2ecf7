"""Examples put together from clips."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ops.train.augment import IGNORED_PHONE, Mixer, line, masked, phone_targets
from ops.train.clips import DIGIT_NAMES, PHONES, Clip, Phone, Word

SECOND = 16_000
VOICE = np.random.default_rng(3)


def order_clip(text: str, speaker: str) -> Clip:
    """Speak a text as noise: 0.3 s of silence, 0.25 s for each word, 0.3 s of silence."""
    lead, length = int(0.3 * SECOND), SECOND // 4
    words = tuple(Word(word, lead + number * length, lead + (number + 1) * length) for number, word in enumerate(text.split()))
    end = words[-1].end
    pcm = VOICE.normal(0, 3000, end + lead).astype(np.int16)
    pcm[:lead] = pcm[end:] = 0
    phones = (Phone(0, 0, lead), *(Phone(PHONES.index("AA"), word.start, word.end) for word in words), Phone(0, end, len(pcm)))
    return Clip(name=text, source="order", speaker=speaker, text=text, words=words, phones=phones, pcm=pcm)


def digit_clip(text: str) -> Clip:
    pcm = VOICE.normal(0, 3000, SECOND // 3).astype(np.int16)
    return Clip(
        name=text, source="digit", speaker="d", text=text, words=(Word(text, 0, len(pcm)),), phones=(Phone(5, 0, len(pcm)),), pcm=pcm
    )


@pytest.fixture
def mixer() -> Mixer:
    texts = (
        "can i get a small latte with milk",
        "make me a dark roast mocha with a bit of sugar",
        "i want an iced coffee",
        "brew a large americano",
    )
    orders = [order_clip(text, "s1") for text in texts * 2]
    digits = [digit_clip(word) for word in ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")]
    noise = [VOICE.normal(0, 500, SECOND).astype(np.int16)]
    prompt = order_clip("please enter your number", "p")
    return Mixer(
        [
            *orders,
            *digits,
            Clip(name="p", source="prompt", speaker="p", text=prompt.text, words=prompt.words, phones=prompt.phones, pcm=prompt.pcm),
        ],
        noise,
        noise,
    )


def test_a_seed_names_its_examples(mixer: Mixer) -> None:
    first, again = ([mixer.example(choose) for _ in range(5)] for choose in (random.Random(4), random.Random(4)))
    for one, other in zip(first, again, strict=True):
        assert one.text == other.text
        np.testing.assert_array_equal(one.features, other.features)


def test_examples_hold_together(mixer: Mixer) -> None:
    choose = random.Random(5)
    for _ in range(60):
        example = mixer.example(choose)
        assert np.isfinite(example.features).all()
        assert len(example.phones) == max(0, (len(example.features) - 3) // 4)
        speech = int((example.phones > 0).sum())
        # Each word of an order lasts 250 ms, about six encoder frames at most speeds; digits last 330 ms.
        assert bool(example.text) == (speech > 0)
        assert speech >= 3 * len(example.text.split())


def test_digits_are_one_after_another(mixer: Mixer) -> None:
    piece = mixer.digit_piece(random.Random(1), count=4)
    assert len(piece.text.split()) <= 4
    assert piece.phones is not None
    assert [phone.phone for phone in piece.phones] == [5] * len(piece.text.split())
    assert all(before.start < after.start for before, after in zip(piece.phones, piece.phones[1:], strict=False))


def test_digits_of_many_voices_are_alike_put_together(mixer: Mixer) -> None:
    choose = random.Random(3)
    for _ in range(20):
        piece = mixer._number(choose)
        assert piece.phones is not None
        assert len(piece.phones) == len(piece.text.split())
        for phone in piece.phones:
            assert np.abs(piece.samples[phone.start : phone.end]).max() > 0


def test_a_number_share_of_1_leaves_numbers_alone(mixer: Mixer) -> None:
    mixer._number_share = 1.0
    digits = set(DIGIT_NAMES)
    assert all(set(mixer._piece(random.Random(seed)).text.split()) <= digits for seed in range(20))


def test_phones_fall_on_the_frames_that_hear_them() -> None:
    # Encoder frame t has its middle at 42.5 + 40 t ms.
    targets = phone_targets((Phone(7, 80 * 16, 160 * 16),), 43)
    assert targets.tolist() == [0, 7, 7, 0, 0, 0, 0, 0, 0, 0]
    assert (phone_targets(None, 43) == IGNORED_PHONE).all()


def test_a_line_takes_the_upper_half_of_the_band() -> None:
    low, high = (np.sin(2 * np.pi * hz * np.arange(SECOND) / SECOND).astype(np.float32) for hz in (1000, 6000))
    for mulaw in (False, True):
        assert np.corrcoef(line(low, mulaw), low)[0, 1] > 0.99
        assert np.abs(line(high, mulaw)).mean() < 0.02
    assert not np.array_equal(line(low, mulaw=True), line(low, mulaw=False))


def test_masks_hide_behind_the_mean() -> None:
    features, mean = np.ones((300, 80), np.float32), np.full(80, 7, np.float32)
    hidden = masked(features, mean, random.Random(2))
    assert set(np.unique(hidden)) == {1.0, 7.0}
    assert (features == 1).all()
