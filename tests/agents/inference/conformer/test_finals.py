"""Finals against WeNet's own search and rescoring, from features on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.inference.conformer.finals import FinalDecoder, FinalOptions, Reading, held_ends
from agents.inference.conformer.loader import LoadedModel, load_model
from agents.inference.conformer.model import encoder_frames
from agents.inference.conformer.streaming import Precision

WENET = Path(__file__).parents[3] / "data" / "wenet"
SEARCH_TOLERANCE, RESCORING_TOLERANCE = 5e-3, 1e-3


@pytest.fixture(scope="module", params=["u2", "u2pp"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(WENET / "models" / request.param)


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> dict[str, Any]:
    name = "u2" if loaded.model.right_to_left is None else "u2pp"
    return dict(json.loads((WENET / name / "search.json").read_text())["results"])


@pytest.fixture(scope="module")
def fbank() -> dict[str, np.ndarray]:
    with np.load(WENET / "fbank.npz") as arrays:
        return {key: arrays[key] for key in arrays}


def same(one: Reading, other: Reading) -> bool:
    """Return whether two readings are the same to the last bit."""
    first = one.rescored is None or other.rescored is None or np.array_equal(one.rescored.scores, other.rescored.scores)
    return (
        first
        and one.tokens.tolist() == other.tokens.tolist()
        and one.frames.tolist() == other.frames.tolist()
        and [each.score for each in one.nbest.hypotheses] == [each.score for each in other.nbest.hypotheses]
    )


@pytest.mark.parametrize("wav", ["aishell", "librispeech"])
@pytest.mark.parametrize("reverse_weight", [0.0, 0.3])
def test_it_is_what_wenet_says(
    loaded: LoadedModel, expected: dict[str, Any], fbank: dict[str, np.ndarray], wav: str, reverse_weight: float
) -> None:
    key = f"attention_rescoring_rw{reverse_weight}"
    if key not in expected[wav]:
        assert loaded.model.right_to_left is None
        return
    reading = FinalDecoder(loaded.model, options=FinalOptions(reverse_weight=reverse_weight)).decode(0, fbank[wav])
    nbest, winner = expected[wav]["ctc_prefix_beam_search"]["nbest"], expected[wav][key]
    assert [each.tokens.tolist() for each in reading.nbest.hypotheses] == [each["tokens"] for each in nbest]
    assert [each.frames.tolist() for each in reading.nbest.hypotheses] == [each["times"] for each in nbest]
    np.testing.assert_allclose([each.score for each in reading.nbest.hypotheses], [each["score"] for each in nbest], atol=SEARCH_TOLERANCE)
    assert reading.rescored is not None
    np.testing.assert_allclose(reading.rescored.scores, [each["score"] for each in winner["per_hyp"]], atol=RESCORING_TOLERANCE)
    assert (reading.tokens.tolist(), reading.frames.tolist()) == (winner["tokens"], winner["times"])
    assert reading.confidence == pytest.approx(winner["confidence"], rel=1e-3)
    np.testing.assert_allclose(reading.token_confidences, winner["tokens_confidence"], rtol=1e-2)


def test_without_rescoring_the_search_decides(loaded: LoadedModel, expected: dict[str, Any], fbank: dict[str, np.ndarray]) -> None:
    reading = FinalDecoder(loaded.model, options=FinalOptions(rescoring=False)).decode(0, fbank["aishell"])
    assert reading.tokens.tolist() == expected["aishell"]["ctc_prefix_beam_search"]["nbest"][0]["tokens"]
    assert reading.rescored is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_lanes_say_the_same_to_the_last_bit(loaded: LoadedModel, fbank: dict[str, np.ndarray], precision: Precision) -> None:
    decoder = FinalDecoder(loaded.model, lanes=3, options=FinalOptions(precision=precision))
    segments = [held_ends(fbank[wav][start:end]) for wav in fbank for start, end in ((0, 200), (33, 371), (100, 423), (7, 9))]
    alone = [decoder.decode(0, segment) for segment in segments]

    def in_lane(lane: int) -> dict[int, Reading]:
        order = [(place + 3 * lane) % len(segments) for place in range(len(segments))]
        return {place: decoder.decode(lane, segments[place]) for place in order}

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(in_lane, range(3)):
            assert all(same(reading, alone[place]) for place, reading in found.items())


def test_a_segment_longer_than_expected_takes_its_own_room(loaded: LoadedModel, fbank: dict[str, np.ndarray]) -> None:
    short = FinalDecoder(loaded.model, options=FinalOptions(max_frames=50))
    usual = FinalDecoder(loaded.model)
    assert same(short.decode(0, fbank["aishell"]), usual.decode(0, fbank["aishell"]))


@pytest.mark.parametrize("frames", [0, 1, 3, 4, 5, 6, 7, 8, 23, 24])
def test_no_frame_is_lost(loaded: LoadedModel, fbank: dict[str, np.ndarray], frames: int) -> None:
    held = held_ends(fbank["aishell"][:frames])
    assert int(encoder_frames(torch.tensor(len(held)))) == -(-frames // 4)
    reading = FinalDecoder(loaded.model).decode(0, held)
    assert reading.nbest.frames == -(-frames // 4)
    assert np.isfinite(reading.confidence)
