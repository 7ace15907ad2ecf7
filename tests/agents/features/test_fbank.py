"""Features equal Kaldi's, and do not depend on what they are computed together with."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchaudio.compliance import kaldi

from agents.features.fbank import CHUNK_SAMPLES, Fbank, frame_count
from agents.features.mfcc import Mfcc

DATA = Path(__file__).parents[2] / "data"


def speech(name: str) -> np.ndarray:
    with wave.open(str(DATA / name)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")


def kaldi_fbank(samples: np.ndarray) -> torch.Tensor:
    return kaldi.fbank(torch.tensor(samples, dtype=torch.float32)[None], num_mel_bins=80, dither=0.0, sample_frequency=16_000.0)


def kaldi_mfcc(samples: np.ndarray) -> torch.Tensor:
    return kaldi.mfcc(torch.tensor(samples, dtype=torch.float32)[None], num_ceps=13, dither=0.0, sample_frequency=16_000.0)


@pytest.mark.parametrize("name", ["en/goforward.wav", "en/librispeech_1995-1837-0001.wav", "zh/aishell1_BAC009S0724W0121.wav"])
def test_fbank_equals_kaldi_on_real_audio(name: str) -> None:
    samples = speech(name)
    (ours,) = Fbank()([samples.tobytes()])
    np.testing.assert_allclose(ours, kaldi_fbank(samples).numpy(), rtol=0, atol=1e-5)


def test_mfcc_equals_kaldi_on_real_audio() -> None:
    samples = speech("en/goforward.wav")
    (ours,) = Mfcc()([samples.tobytes()])
    assert ours.shape[1] == 13
    np.testing.assert_allclose(ours, kaldi_mfcc(samples).numpy(), rtol=0, atol=1e-3)


def test_chunks_joined_are_the_whole() -> None:
    samples = speech("en/goforward.wav")
    hops = 20
    chunks = [samples[start : start + CHUNK_SAMPLES].tobytes() for start in range(0, len(samples), hops * 160)]
    joined = np.concatenate(Fbank()(chunks))
    np.testing.assert_allclose(joined, kaldi_fbank(samples).numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("samples", "frames"), [(0, 0), (399, 0), (400, 1), (559, 1), (560, 2), (3_440, 20)])
def test_frames_of_a_chunk(samples: int, frames: int) -> None:
    assert frame_count(samples) == frames
    (features,) = Fbank()([bytes(2 * samples)])
    assert features.shape == (frames, 80)


def test_digital_silence_is_finite() -> None:
    (features,) = Fbank()([bytes(2 * CHUNK_SAMPLES)])
    assert np.isfinite(features).all()


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, CHUNK_SAMPLES), min_size=1, max_size=40), seed=st.integers(0, 1_000))
def test_the_batch_changes_no_bit(lengths: list[int], seed: int) -> None:
    samples = np.random.default_rng(seed).integers(-32_768, 32_767, (len(lengths), CHUNK_SAMPLES), dtype=np.int16)
    pieces = [row[:length].tobytes() for row, length in zip(samples, lengths, strict=True)]
    extract = Fbank()
    together = [features.tobytes() for features in extract(pieces)]
    assert together == [extract([piece])[0].tobytes() for piece in pieces]
