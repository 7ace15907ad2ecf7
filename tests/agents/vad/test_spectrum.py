import numpy as np
import pytest

from agents.vad.spectrum import BIN_HZ, BINS, WINDOW_SAMPLES, power_spectra


def test_a_row_sums_to_its_mean_square_and_peaks_at_its_line():
    seconds = np.arange(WINDOW_SAMPLES) / 16_000
    windows = (0.5 * np.sin(2 * np.pi * np.array([[500.0], [1_000.0], [3_000.0]]) * seconds)).astype(np.float32)
    power = power_spectra(windows)
    assert power.shape == (3, BINS)
    assert power.sum(axis=1) == pytest.approx([0.125] * 3, rel=1e-3)
    assert (power.argmax(axis=1) * BIN_HZ).tolist() == [500, 1_000, 3_000]


def test_rows_do_not_depend_on_each_other():
    windows = np.random.default_rng(1).normal(0, 0.1, (97, WINDOW_SAMPLES)).astype(np.float32)
    whole = power_spectra(windows)
    for size in (1, 2, 5, 64):
        assert np.array_equal(power_spectra(windows[:size]), whole[:size])
