from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agents.inference.conformer.engine import conformer_engine
from ops.bench.load import FRAME_SAMPLES, BatchedRecogniser, play, speech_tracks

MODEL = Path(__file__).parents[2] / "data" / "wenet" / "models" / "u2pp"


@pytest.fixture(scope="module")
def recogniser() -> BatchedRecogniser:
    return BatchedRecogniser(conformer_engine(str(MODEL), precision="fp32", slots=8, numbers=False))


def test_tracks_are_the_same_again_and_differ_by_channel() -> None:
    one, other = speech_tracks(2, 1.5)
    assert len(one) == len(other) == 24_000
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(speech_tracks(2, 1.5)[1], other)


def test_every_frame_is_answered_and_calls_can_follow_calls(recogniser: BatchedRecogniser) -> None:
    tracks = speech_tracks(3, 2.0)
    for _ in range(2):
        load = play(recogniser, tracks)
        assert load.finished
        assert load.latency.p95 is not None
        assert load.holds(load.latency.p95)
        assert not load.holds(load.latency.p95 / 2)


def test_what_is_heard_does_not_depend_on_company(recogniser: BatchedRecogniser) -> None:
    tracks = speech_tracks(3, 2.0, seed=1)
    play(recogniser, tracks)
    together = [recogniser.text(channel) for channel in range(3)]
    play(recogniser, tracks[1:2])
    assert recogniser.text(0) == together[1]


class Deaf:
    """Answers nobody."""

    def start(self, channels: int, answered: object) -> None:
        self.frames = 0

    def put(self, channel: int, number: int, pcm: np.ndarray) -> None:
        assert len(pcm) == FRAME_SAMPLES
        self.frames += 1

    def stop(self) -> None:
        pass

    def text(self, channel: int) -> str:
        return ""


def test_who_falls_behind_for_good_is_stopped() -> None:
    deaf = Deaf()
    load = play(deaf, [np.zeros(100 * FRAME_SAMPLES, np.int16)])
    assert not load.finished
    assert deaf.frames == 10
    assert not load.holds(1e9)
