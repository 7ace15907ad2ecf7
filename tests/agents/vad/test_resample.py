import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.vad.decode import decode
from agents.vad.resample import DELAY_SAMPLES, Upsampler


def in_pieces(samples, sizes):
    upsampler, pieces, begin, turn = Upsampler(), [], 0, 0
    while begin < len(samples):
        size = sizes[turn % len(sizes)]
        pieces.append(upsampler.push(samples[begin : begin + size]))
        begin, turn = begin + size, turn + 1
    return np.concatenate([*pieces, upsampler.flush()])


@given(st.lists(st.integers(1, 2_000), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_pieces_give_the_same_samples_as_one_block(prompt, sizes):
    samples = decode(prompt, "mulaw")[:12_000]
    assert np.array_equal(in_pieces(samples, sizes), in_pieces(samples, [len(samples)]))


def test_pieces_of_20_ms_give_the_same_samples_as_one_block(prompt):
    samples = decode(prompt, "mulaw")
    whole = in_pieces(samples, [len(samples)])
    assert np.array_equal(in_pieces(samples, [160]), whole)
    assert len(whole) == 2 * len(samples)
    assert whole.dtype == np.float32


@pytest.mark.parametrize("frequency_hz", [300, 1_000, 3_400])
def test_a_tone_of_the_telephone_band_keeps_its_place_and_level(frequency_hz):
    def tone(rate_hz):
        return np.sin(2 * np.pi * frequency_hz * np.arange(rate_hz) / rate_hz).astype(np.float32)

    inner = slice(200, -200)
    assert np.abs(in_pieces(tone(8_000), [1_600])[inner] - tone(16_000)[inner]).max() < 0.01


def test_the_mirror_image_above_4_khz_is_gone(prompt):
    spectrum = np.abs(np.fft.rfft(in_pieces(decode(prompt, "mulaw"), [1_600]))) ** 2
    bin_hz = 8_000 / (len(spectrum) - 1)
    assert spectrum[int(4_600 / bin_hz) :].sum() < 1e-5 * spectrum.sum()


def test_output_trails_by_the_delay_until_flushed():
    upsampler = Upsampler()
    assert len(upsampler.push(np.zeros(800, np.float32))) == 1_600 - DELAY_SAMPLES
    assert len(upsampler.push(np.zeros(3, np.float32))) == 6
    assert len(upsampler.flush()) == DELAY_SAMPLES
    assert len(upsampler.push(np.zeros(800, np.float32))) == 1_600 - DELAY_SAMPLES
