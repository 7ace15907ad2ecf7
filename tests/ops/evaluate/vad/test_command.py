"""The comparison from end to end, on a set of two scenes made of the test data."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner

from ops.evaluate.command import evaluate
from ops.evaluate.vad.testset import TestScene
from streams.errors import UserError

DATA = Path(__file__).parents[3] / "data"
PROMISED = {"false_trigger_rate", "segment_merge_accuracy", "speech_kept", "onset_error_ms", "cpu_ms_per_channel_second"}


@pytest.fixture
def two_scenes(monkeypatch):
    spoken, _ = soundfile.read(DATA / "en/goforward.wav", dtype="float32")
    noise, _ = soundfile.read(DATA / "noise/doing_the_dishes_4s.wav", dtype="float32")
    spoken, noise = spoken[:44_480], noise[:48_000]
    speech = np.zeros(len(spoken) // 160, np.bool_)
    speech[47:220] = True
    scenes = [
        TestScene("words", "recorded", "room", "room.wav", 20, "wide", spoken, speech, ()),
        TestScene("dishes alone", "recorded", "dishes", "dishes.wav", None, "wide", noise, np.zeros(300, np.bool_), ()),
    ]
    monkeypatch.setattr("ops.evaluate.vad.run.build", lambda *_: scenes)
    return scenes


def run(*arguments):
    return CliRunner().invoke(evaluate, ["vad", *map(str, arguments)], catch_exceptions=False)


def test_it_prints_and_draws(two_scenes, tmp_path):
    done = run("--audio-dir", tmp_path, "--output-dir", tmp_path / "out", "--detectors", "fusion,energy")
    assert done.exit_code == 0
    assert "fusion" in done.stdout
    assert (tmp_path / "out/roc.png").stat().st_size > 10_000
    listed = (tmp_path / "out/scenes.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in listed] == ["scene", "words", "dishes alone"]


def test_json_has_the_promised_keys_for_each_detector(two_scenes, tmp_path):
    names = ["fusion", "tiny", "traditional", "silero", "webrtc", "energy"]
    written = tmp_path / "figures.json"
    run("--audio-dir", tmp_path, "--output-dir", tmp_path / "out", "--json", written)
    figures = json.loads(written.read_text())
    assert list(figures["detectors"]) == names
    for name in names:
        assert figures["detectors"][name].keys() >= PROMISED
        assert figures["detectors"][name]["regions"] == 1
        assert figures["detectors"][name]["cpu_ms_per_channel_second"] > 0
    assert figures["detectors"]["silero"]["segment_merge_accuracy"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--audio-dir", "/nowhere/at/all"], "There is no folder /nowhere/at/all"),
        (["--audio-dir", ".", "--snrs", "loud"], "--snrs takes whole decibels"),
        (["--audio-dir", ".", "--engine", "ears"], "There are no word errors of the engine 'ears'. Choose from whisper"),
        (["--audio-dir", ".", "--detectors", "ears"], "There is no detector 'ears'. Choose from fusion"),
    ],
)
def test_mistakes_are_explained(arguments, said):
    with pytest.raises(UserError, match=said):
        run(*arguments)
