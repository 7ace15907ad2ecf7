"""The bundled network: its size, its backends, and that a channel's result depends on nothing but the channel."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from agents.vad.spectrum import BINS, HOP_SAMPLES, WINDOW_SAMPLES, power_spectra
from agents.vad.tiny.bands import BANDS, band_powers
from agents.vad.tiny.detector import TOLERANCE, TinyDetector, model_path
from agents.vad.tiny.network import BLOCK_HOPS, DELAY_BLOCKS, STATE_SIZE
from streams.errors import UserError

LARGEST_BYTES = 120_000


@pytest.fixture(scope="module")
def power(speech):
    heard = speech.astype(np.float32) / 32_768
    spectra = power_spectra(sliding_window_view(heard, WINDOW_SAMPLES)[::HOP_SAMPLES])
    return spectra[: len(spectra) // BLOCK_HOPS * BLOCK_HOPS]


def test_the_model_is_small():
    assert model_path().stat().st_size <= LARGEST_BYTES


def test_the_detector_and_the_network_mean_the_same():
    assert (TinyDetector.unit_hops, TinyDetector.delay_hops) == (BLOCK_HOPS, DELAY_BLOCKS * BLOCK_HOPS)
    assert TinyDetector.state_size == STATE_SIZE


@pytest.mark.parametrize("backend", ["openvino", "torch"])
def test_backends_agree(backend, power):
    reference, other = TinyDetector("onnx"), TinyDetector(backend)
    counts, states = np.array([len(power)]), reference.fresh()[np.newaxis]
    expected, after = reference(power, counts, states)
    said, also = other(power, counts, states)
    assert np.abs(said - expected).max() <= TOLERANCE
    assert also == pytest.approx(after, abs=5e-2)


def test_whole_calls_of_torch_agree_with_block_by_block(power):
    """The form that is trained, over whole calls at once and without rounding of states, is the one that streams."""
    import onnx
    import torch
    from onnx import numpy_helper

    from agents.vad.tiny.network import TinyVad

    network = TinyVad().eval()
    stored = {each.name: numpy_helper.to_array(each) for each in onnx.load(str(model_path())).graph.initializer}
    network.load_state_dict({name: torch.from_numpy(stored[name].astype(np.float32)) for name in network.state_dict()})
    with torch.inference_mode():
        whole, _ = network(torch.from_numpy(band_powers(power))[np.newaxis], torch.zeros(1, STATE_SIZE))
    tiny = TinyDetector()
    streamed, _ = tiny(power, np.array([len(power)]), tiny.fresh()[np.newaxis])
    difference = np.abs(whole.numpy()[0] - streamed)
    assert np.percentile(difference, 99) < 0.02


@pytest.mark.parametrize("backend", ["onnx", "openvino", "torch"])
def test_a_channel_does_not_depend_on_the_others_nor_on_the_calls(backend, power):
    tiny = TinyDetector(backend)
    power = power[:600]
    whole, after = tiny(power, np.array([len(power)]), tiny.fresh()[np.newaxis])
    rng = np.random.default_rng(5)
    channels = 21
    states, heard = np.stack([tiny.fresh()] * channels), np.zeros(channels, int)
    while heard.min() < len(power):
        counts = np.minimum(BLOCK_HOPS * rng.integers(0, 30, channels), len(power) - heard)
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > 0]
        if not len(order):
            continue
        batch = np.concatenate([power[heard[row] : heard[row] + counts[row]] for row in order])
        said, states[order] = tiny(batch, counts[order], states[order])
        for row, mine in zip(order, np.split(said, np.cumsum(counts[order])[:-1]), strict=True):
            assert np.array_equal(mine, whole[heard[row] : heard[row] + counts[row]])
            heard[row] += counts[row]
    assert all(np.array_equal(state, after[0]) for state in states)


def test_states_survive_half_precision(power):
    tiny = TinyDetector()
    _, after = tiny(power[:400], np.array([400]), tiny.fresh()[np.newaxis])
    assert np.array_equal(after.astype(np.float16).astype(np.float32), after)


def test_silence_and_nothing():
    tiny = TinyDetector()
    said, _ = tiny(np.zeros((400, BINS), np.float32), np.array([400]), tiny.fresh()[np.newaxis])
    assert said[40:].max() < 0.1
    said, states = tiny(np.zeros((0, BINS), np.float32), np.zeros(0, int), np.zeros((0, STATE_SIZE), np.float32))
    assert (said.shape, states.shape) == ((0,), (0, STATE_SIZE))


def test_bands_hold_all_power_between_100_hz_and_8_khz():
    power = np.ones((3, BINS), np.float32)
    assert band_powers(power).shape == (3, BANDS)
    assert band_powers(power).sum(axis=1).tolist() == [158.0] * 3


def test_a_missing_backend_is_explained(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(UserError, match="ASR_VAD_BACKEND=openvino needs the Python package openvino"):
        TinyDetector("openvino")
