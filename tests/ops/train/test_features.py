"""Training features against Kaldi's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchaudio.compliance import kaldi

from ops.train.features import fbank

NOISE = np.random.default_rng(1).normal(0, 2000, 16_000).astype(np.int16)


def test_equal_to_kaldi() -> None:
    expected = kaldi.fbank(torch.from_numpy(NOISE.astype(np.float32))[None], num_mel_bins=80, dither=0.0, energy_floor=0.0)
    ours = fbank(NOISE)
    assert ours.shape == (98, 80)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected.numpy(), atol=2e-3)


@pytest.mark.parametrize("samples,frames", [(0, 0), (399, 0), (400, 1), (560, 2)])
def test_only_whole_frames(samples: int, frames: int) -> None:
    assert fbank(np.ones(samples, np.int16)).shape == (frames, 80)


@pytest.mark.parametrize("warp", [0.86, 1.16])
def test_a_warp_moves_formants(warp: float) -> None:
    tone = (8000 * np.sin(2 * np.pi * 1500 * np.arange(16_000) / 16_000)).astype(np.int16)
    plain, warped = fbank(tone).mean(0).argmax(), fbank(tone, warp, warp).mean(0).argmax()
    assert (warped > plain) == (warp > 1)
    assert np.isfinite(fbank(tone, warp, warp)).all()


def test_low_and_high_formants_move_apart() -> None:
    low, high = ((8000 * np.sin(2 * np.pi * hz * np.arange(16_000) / 16_000)).astype(np.int16) for hz in (500, 3_000))
    plain_low, plain_high = fbank(low).mean(0).argmax(), fbank(high).mean(0).argmax()
    assert fbank(low, 1.15, 0.9).mean(0).argmax() > plain_low
    assert fbank(high, 1.15, 0.9).mean(0).argmax() < plain_high
