import numpy as np
import pytest

from ops.train.vad.scenes import LINES, Clip, at_speed, babble, compose, lose_packets, rms, send, string_digits
from ops.train.vad.sounds import SOUNDS

RATE = 16_000


def clip(name="a", speaker="s", hops=60, margin=12):
    speech = np.zeros(hops, np.bool_)
    speech[margin:-margin] = True
    samples = np.repeat(speech, 160) * np.random.default_rng(1).normal(0, 0.05, hops * 160)
    return Clip(name, speaker, samples.astype(np.float32), speech, np.zeros(hops, np.bool_))


def test_speech_lies_where_the_labels_say():
    scene = compose(np.random.default_rng(2), 10 * RATE, clip, (0.5, 1.0))
    active = np.square(scene.samples).reshape(-1, 160).mean(axis=1) > 0
    assert np.array_equal(active, scene.speech)
    assert len(scene.placed) >= 5
    assert all(scene.speech[placed.start_sample // 160 + 12] for placed in scene.placed)


def test_digits_of_one_speaker_are_strung_together():
    digits = [clip(f"{number}-{speaker}", speaker, 40) for number in range(10) for speaker in "xy"]
    strung = string_digits(np.random.default_rng(3), digits)
    names = strung.name.split(" + ")
    assert 3 <= len(names) <= 8
    assert len({name[-1] for name in names}) == 1 == len(strung.speaker)
    assert len(strung.samples) == 160 * len(strung.speech)


@pytest.mark.parametrize("speed", [0.8, 1.0, 1.3])
def test_labels_follow_the_speed(speed):
    played = at_speed(clip(hops=100, margin=30), speed)
    assert len(played.samples) == 160 * len(played.speech)
    assert played.speech.sum() == pytest.approx(40 / speed, abs=2)
    assert rms(played.samples[np.repeat(~played.speech, 160)]) < 0.2 * rms(played.samples[np.repeat(played.speech, 160)])


@pytest.mark.parametrize("line", LINES)
def test_a_line_keeps_place_and_level(line):
    tone = (0.2 * np.sin(2 * np.pi * 700 * np.arange(RATE) / RATE)).astype(np.float32)
    came = send(tone, line)
    assert len(came) == len(tone)
    middle = slice(RATE // 4, 3 * RATE // 4)
    assert np.corrcoef(came[middle], tone[middle])[0, 1] > 0.99
    assert rms(came[middle]) == pytest.approx(rms(tone[middle]), rel=0.05)


def test_lost_packets_are_whole_ones():
    samples = np.ones(10 * RATE, np.float32)
    lost = lose_packets(np.random.default_rng(4), samples, 0.1).reshape(-1, 320)
    changed = (lost != 1).any(axis=1)
    assert 0.02 < changed.mean() < 0.2
    assert all(len(np.unique(packet)) == 1 for packet in lost)


@pytest.mark.parametrize("name", sorted(SOUNDS))
def test_sounds_are_finite_as_long_as_asked_and_named_by_their_seed(name):
    made = SOUNDS[name](np.random.default_rng(5), 3 * RATE)
    assert (made.shape, made.dtype) == ((3 * RATE,), np.float32)
    assert np.isfinite(made).all()
    assert rms(made) > 1e-6
    assert np.array_equal(made, SOUNDS[name](np.random.default_rng(5), 3 * RATE))


def test_babble_is_of_many():
    voices = [clip(str(number), str(number), 100) for number in range(6)]
    assert rms(babble(np.random.default_rng(6), voices, RATE)) > rms(voices[0].samples)
