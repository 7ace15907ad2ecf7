from pathlib import Path

import numpy as np
import pytest
import soundfile

from agents.vad.decode import decode
from ops.evaluate.wer.sets import CONDITIONS, Utterance, utterances
from streams.errors import UserError

DATA = Path(__file__).parents[3] / "data"
ORDER = Path(__file__).parents[4] / "ops" / "demo" / "calls" / "order_s46_4bf32777.flac"


@pytest.fixture(scope="module")
def utterance():
    samples, _ = soundfile.read(ORDER, dtype="float32")
    return Utterance("order", "whatever", samples)


@pytest.fixture(scope="module")
def noises():
    return [soundfile.read(DATA / "noise/doing_the_dishes_4s.wav", dtype="float32")[0]]


def heard(source):
    return decode(b"".join(source.chunks()), source.wire.encoding)


def test_clean_audio_is_the_recording(utterance):
    assert np.abs(heard(utterance.in_condition("clean", [])) - utterance.samples).max() < 2 / 32_768


def test_a_telephone_line_has_8_khz_and_mulaw(utterance):
    source = utterance.in_condition("mulaw", [])
    assert (source.wire.encoding, source.wire.sample_rate_hz) == ("mulaw", 8_000)
    assert abs(source.duration_ms - len(utterance.samples) / 16) <= 1


@pytest.mark.parametrize("snr_db", [5, 10, 20])
def test_noise_lies_so_far_below_the_speech(utterance, noises, snr_db):
    mixed = heard(utterance.in_condition(f"noise{snr_db}", noises))
    scale = float(np.dot(mixed, utterance.samples) / np.dot(utterance.samples, utterance.samples))
    noise = mixed / scale - utterance.samples
    # The order has silence around it, which the ratio leaves out: whole, its level is lower.
    ratio_db = 10 * np.log10(np.mean(utterance.samples**2) / np.mean(noise**2))
    assert snr_db - 6 < ratio_db < snr_db + 1


def test_the_same_noise_comes_every_time(utterance, noises):
    first, second = (heard(utterance.in_condition("noise10", noises)) for _ in range(2))
    assert np.array_equal(first, second)


def test_loud_mixtures_are_not_clipped(noises):
    loud = Utterance("loud", "", np.full(16_000, 0.99, np.float32) * np.sin(np.arange(16_000) / 20).astype(np.float32))
    assert np.abs(heard(loud.in_condition("noise5", noises))).max() <= 1


def test_unknown_names_say_what_there_is(utterance, tmp_path):
    with pytest.raises(UserError, match="clean, mulaw"):
        utterance.in_condition("underwater", [])
    with pytest.raises(UserError, match="orders, digits"):
        utterances(tmp_path, "opera", "test")
    with pytest.raises(UserError, match="has no recordings for orders"):
        utterances(tmp_path, "orders", "test")


def test_conditions_are_those_of_the_help():
    assert CONDITIONS == ("clean", "mulaw", "noise20", "noise10", "noise5")
