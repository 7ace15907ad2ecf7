"""Rescoring against WeNet's numbers and a plain loop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.inference.decoding.rescoring import decoder_inputs, rescore, token_log_probs


@pytest.mark.parametrize("reverse_weight", [0.0, 0.3])
def test_scores_and_confidences_are_wenets(vectors: Any, reverse_weight: float) -> None:
    results = vectors.search["results"]["aishell"]
    if f"attention_rescoring_rw{reverse_weight}" not in results:
        assert (vectors.name, reverse_weight) == ("u2", 0.3), "only this model has no decoder for that"
        return
    expected = results[f"attention_rescoring_rw{reverse_weight}"]["per_hyp"][:3]
    nbest = results["ctc_prefix_beam_search"]["nbest"][:3]
    inputs = decoder_inputs([one["tokens"] for one in nbest], vectors.search["sos"], vectors.search["eos"])
    # WeNet's rows are as wide as the longest of ten hypotheses.
    width = inputs.inputs.shape[1]
    assert inputs.inputs.tolist() == vectors.arrays["aishell_dec_hyps_in"][:, :width].tolist()
    assert (inputs.lengths + 1).tolist() == vectors.arrays["aishell_dec_hyps_lens"].tolist()
    forwards = token_log_probs(vectors.arrays["aishell_dec_l2r_logp"][:, :width], inputs.targets)
    backwards = None
    if reverse_weight:
        backwards = token_log_probs(vectors.arrays["aishell_dec_r2l_logp"][:, :width], inputs.reversed_targets)
    (found,) = rescore([[one["score"] for one in nbest]], inputs.lengths, forwards, backwards, reverse_weight=reverse_weight)
    # WeNet adds up in float32.
    assert found.scores.tolist() == pytest.approx([one["score"] for one in expected], abs=1e-3)
    assert found.confidences.tolist() == pytest.approx([one["confidence"] for one in expected], rel=1e-4)
    assert found.winner == max(range(3), key=lambda place: expected[place]["score"])
    assert found.confidence == found.confidences[found.winner]


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 1.0]), st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_batch_is_what_a_loop_says(seed: int, reverse_weight: float, with_bonus: bool) -> None:
    rng = np.random.default_rng(seed)
    segments = [[rng.integers(3, 9, rng.integers(0, 7)).tolist() for _ in range(rng.integers(1, 5))] for _ in range(rng.integers(1, 4))]
    first_pass = [rng.normal(size=len(one)).tolist() for one in segments]
    bonuses = [rng.normal(size=len(one)).tolist() for one in segments]
    flat = [tokens for one in segments for tokens in one]
    inputs = decoder_inputs(flat, 1, 2)
    shape = (*inputs.targets.shape, 9)
    l2r, r2l = np.log(rng.dirichlet(np.ones(9), shape[:2])), np.log(rng.dirichlet(np.ones(9), shape[:2]))
    found = rescore(
        first_pass,
        inputs.lengths,
        token_log_probs(l2r, inputs.targets),
        token_log_probs(r2l, inputs.reversed_targets),
        first_pass_weight=0.4,
        reverse_weight=reverse_weight,
        bonuses=bonuses if with_bonus else None,
    )
    row = 0
    for one, first, bonus, result in zip(segments, first_pass, bonuses, found, strict=True):
        scores = []
        for place, tokens in enumerate(one):
            assert inputs.inputs[row, : len(tokens) + 1].tolist() == [1, *tokens]
            assert inputs.reversed_inputs[row, : len(tokens) + 1].tolist() == [1, *tokens[::-1]]
            forwards = sum(l2r[row, index, unit] for index, unit in enumerate([*tokens, 2]))
            backwards = sum(r2l[row, index, unit] for index, unit in enumerate([*tokens[::-1], 2]))
            decoder = (1 - reverse_weight) * forwards + reverse_weight * backwards
            assert result.confidences[place] == pytest.approx(math.exp(decoder / (len(tokens) + 1)))
            scores.append(decoder + 0.4 * first[place] + (bonus[place] if with_bonus else 0.0))
            sure = [math.exp(l2r[row, index, unit]) for index, unit in enumerate(tokens)]
            if reverse_weight:
                mirrored = [math.exp(r2l[row, len(tokens) - 1 - index, unit]) for index, unit in enumerate(tokens)]
                sure = [(a + b) / 2 for a, b in zip(sure, mirrored, strict=True)]
            assert result.token_confidences[place].tolist() == pytest.approx(sure)
            row += 1
        assert result.scores.tolist() == pytest.approx(scores)
        assert result.winner == int(np.argmax(scores))


def test_padding_is_not_read() -> None:
    inputs = decoder_inputs([[5, 6], []], 1, 2)
    values = np.log(np.array([[0.5, 0.5, 0.5], [0.25, np.nan, -1.0]], dtype=np.float64, copy=True).clip(0.1))
    (first, second) = rescore([[0.0], [0.0]], inputs.lengths, values)
    assert first.scores.tolist() == pytest.approx([3 * math.log(0.5)])
    assert second.scores.tolist() == pytest.approx([math.log(0.25)])
    assert second.token_confidences[0].tolist() == []


def test_mistakes_are_named() -> None:
    values = np.zeros((2, 3))
    with pytest.raises(ValueError, match="2 hypotheses were decoded of 3"):
        rescore([[0.0, 0.0, 0.0]], np.array([1, 2]), values)
    with pytest.raises(ValueError, match="every segment needs one"):
        rescore([[0.0, 0.0], []], np.array([1, 2]), values)
    with pytest.raises(ValueError, match="0 without a right-to-left decoder"):
        rescore([[0.0, 0.0]], np.array([1, 2]), values, reverse_weight=0.3)
    assert rescore([], np.empty(0, int), np.empty((0, 1))) == []
