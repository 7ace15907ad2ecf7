import numpy as np
import pytest

from ops.train.vad.music import in_tempo, played

pytest.importorskip("tinysoundfont", reason="only training plays music")
RATE = 16_000


def test_every_seed_is_a_piece_of_its_own():
    pieces = [played(np.random.default_rng(seed), 4 * RATE) for seed in range(6)]
    for piece in pieces:
        assert (piece.shape, piece.dtype) == ((4 * RATE,), np.float32)
        assert np.isfinite(piece).all()
        assert piece.std() > 0.002
    likeness = np.abs(np.corrcoef(pieces)[np.triu_indices(len(pieces), 1)])
    assert likeness.max() < 0.3


def test_a_seed_names_its_piece():
    assert np.array_equal(played(np.random.default_rng(7), RATE), played(np.random.default_rng(7), RATE))


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_another_tempo_keeps_the_pitch(factor):
    tone = np.sin(2 * np.pi * 440 * np.arange(4 * RATE) / RATE).astype(np.float32)
    changed = in_tempo(tone, factor)
    assert len(changed) == pytest.approx(len(tone) / factor, rel=0.02)
    spectrum = np.abs(np.fft.rfft(changed * np.hanning(len(changed))))
    assert np.argmax(spectrum) * RATE / len(changed) == pytest.approx(440, abs=5)
