import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from agents.vad.spectrum import HOP_SAMPLES, WINDOW_SAMPLES, power_spectra
from agents.vad.traditional import Traditional

RATE_HZ = 16_000


def spectra_of(samples):
    return power_spectra(sliding_window_view(np.asarray(samples, np.float32), WINDOW_SAMPLES)[::HOP_SAMPLES])


def judge(samples):
    detector = Traditional()
    power = spectra_of(samples)
    return detector(power, np.array([len(power)]), detector.fresh()[np.newaxis])[0]


def seconds(count):
    return np.arange(count * RATE_HZ) / RATE_HZ


def share(speech, begin_s=0.0):
    return speech[round(begin_s * 100) :].mean()


def test_silence_is_no_speech():
    assert not judge(np.zeros(RATE_HZ)).any()


@pytest.mark.parametrize("level_db", [-20, -35, -50])
def test_white_noise_is_no_speech(level_db):
    noise = np.random.default_rng(1).normal(0, 10 ** (level_db / 20), 5 * RATE_HZ)
    assert share(judge(noise)) < 0.01


@pytest.mark.parametrize("lines_hz", [(1_000,), (425,), (350, 440), (770, 1_336)])
def test_a_steady_tone_is_no_speech(lines_hz):
    tone = sum(np.sin(2 * np.pi * line * seconds(20 if lines_hz == (1_000,) else 5)) for line in lines_hz)
    assert not judge(0.2 * tone)[25:].any()


def test_steady_coloured_noise_is_learnt():
    rng = np.random.default_rng(2)
    hum = np.convolve(rng.normal(0, 0.02, 8 * RATE_HZ), np.ones(16) / 4, "same")
    assert share(judge(hum), 3) < 0.02


def test_speech_is_speech_also_in_noise(load):
    utterance = load("en/librispeech_1995-1837-0001.wav").astype(np.float32) / 32_768
    assert share(judge(utterance)) > 0.8
    noise = np.random.default_rng(4).normal(0, np.sqrt(np.square(utterance).mean() / 100), len(utterance))
    assert share(judge(utterance + noise)) > 0.6


def test_channels_and_calls_do_not_matter(speech):
    samples = speech.astype(np.float32) / 32_768
    power = spectra_of(samples)[:900]
    detector = Traditional()
    whole, after = detector(power, np.array([900]), detector.fresh()[np.newaxis])
    # Three channels that hear the same from different places, in calls of uneven hops.
    rng = np.random.default_rng(5)
    states = np.stack([detector.fresh()] * 3)
    heard = [0, 0, 0]
    while min(heard) < 900:
        counts = np.minimum(rng.integers(0, 40, 3), 900 - np.array(heard))
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > 0]
        batch = np.concatenate([power[heard[row] : heard[row] + counts[row]] for row in order] or [power[:0]])
        speech_hops, moved = detector(batch, counts[order], states[order])
        states[order] = moved
        for row, mine in zip(order, np.split(speech_hops, np.cumsum(counts[order])[:-1]), strict=False):
            assert np.array_equal(mine, whole[heard[row] : heard[row] + counts[row]])
            heard[row] += counts[row]
    assert all(np.array_equal(state, after[0]) for state in states)
