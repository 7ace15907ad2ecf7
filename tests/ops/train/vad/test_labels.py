from pathlib import Path

import numpy as np
import soundfile

from ops.train.vad.labels import label

DATA = Path(__file__).parents[3] / "data"


def test_words_are_speech_and_what_lies_around_them_is_not():
    samples, _ = soundfile.read(DATA / "en/goforward.wav", dtype="float32")
    labels = label(samples)
    hops = np.flatnonzero(labels.speech)
    # By ear and eye: "go" begins at 0.47 s, "meters" ends at 2.2 s.
    assert 0.35 < hops[0] / 100 < 0.55
    assert 2.05 < (hops[-1] + 1) / 100 < 2.4
    assert not (labels.speech & labels.doubtful).any()


def test_noise_is_not_speech():
    samples, _ = soundfile.read(DATA / "noise/doing_the_dishes_4s.wav", dtype="float32")
    assert label(samples).speech.mean() < 0.1
