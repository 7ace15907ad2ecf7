import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.vad.denoise import DELAY_SAMPLES, GRID_SAMPLES, Denoiser
from agents.vad.front import SETTLE_SAMPLES


def in_pieces(samples, sizes):
    denoiser, pieces, begin, turn = Denoiser(), [], 0, 0
    while begin < len(samples):
        size = sizes[turn % len(sizes)]
        pieces.append(denoiser.push(samples[begin : begin + size]))
        begin, turn = begin + size, turn + 1
    return np.concatenate(pieces)


@pytest.fixture
def samples(speech):
    return speech.astype(np.float32) / 32_768


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_pieces_give_the_same_samples_as_one_block(speech, sizes):
    samples = speech[:32_000].astype(np.float32) / 32_768
    assert np.array_equal(in_pieces(samples, sizes), in_pieces(samples, [len(samples)]))


def test_output_keeps_its_place(samples):
    denoised = in_pieces(samples, [3_200])
    assert len(denoised) == len(samples) // GRID_SAMPLES * GRID_SAMPLES - DELAY_SAMPLES
    inner = slice(20_000, 60_000)
    lags = range(-3, 4)
    likeness = [np.dot(denoised[inner], np.roll(samples, lag)[inner]) for lag in lags]
    assert lags[int(np.argmax(likeness))] == 0


@pytest.mark.parametrize("start", [GRID_SAMPLES * step for step in (1, 80, 333, 512)])
def test_one_that_starts_later_on_the_grid_is_equal_to_the_bit_once_it_has_settled(samples, start):
    whole, later = in_pieces(samples, [3_200]), in_pieces(samples[start:], [3_200])
    both = min(len(whole) - start, len(later))
    assert both > 2 * SETTLE_SAMPLES
    assert np.array_equal(whole[start + SETTLE_SAMPLES : start + both], later[SETTLE_SAMPLES:both])


def test_noise_is_reduced_and_speech_kept(samples, load):
    noise = load("noise/doing_the_dishes_4s.wav").astype(np.float32) / 32_768
    assert np.square(in_pieces(noise, [3_200])).mean() < 0.3 * np.square(noise).mean()
    utterance = load("en/librispeech_1995-1837-0001.wav").astype(np.float32) / 32_768
    assert np.square(in_pieces(utterance, [3_200])).mean() > 0.8 * np.square(utterance).mean()


def test_nothing_in_nothing_out():
    assert len(Denoiser().push(np.zeros(0, np.float32))) == 0
