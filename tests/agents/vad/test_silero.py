import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from agents.vad.silero import Silero

LENGTH = Silero.context_samples + Silero.window_samples


def probabilities(samples):
    silero, state, said = Silero(), np.zeros((1, Silero.state_size), np.float32), []
    for window in sliding_window_view(samples.astype(np.float32) / 32_768, LENGTH)[:: Silero.window_samples]:
        probability, state = silero(window[np.newaxis], state)
        said.append(probability[0])
    return np.array(said)


def test_speech_is_probable_and_noise_is_not(load):
    assert np.median(probabilities(load("en/librispeech_1995-1837-0001.wav"))) > 0.9
    assert np.median(probabilities(load("noise/doing_the_dishes_4s.wav"))) < 0.1


def test_a_row_does_not_depend_on_the_others(speech):
    silero = Silero()
    rng = np.random.default_rng(3)
    windows = sliding_window_view(speech.astype(np.float32) / 32_768, LENGTH)[::4_001][:60]
    states = rng.normal(0, 0.3, (len(windows), Silero.state_size)).astype(np.float32)
    said, after = silero(windows, states)
    for size in (1, 2, 3, 7, 12, 50):
        rows = rng.permutation(len(windows))[:size]
        some, later = silero(windows[rows], states[rows])
        assert np.array_equal(some, said[rows])
        assert np.array_equal(later, after[rows])
