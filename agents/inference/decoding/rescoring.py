"""Attention rescoring: the decoders' opinion on each hypothesis, joined to the first pass'. Numbers only; the model runs elsewhere.

    score = (1 - reverse_weight) x left to right + reverse_weight x right to left + first_pass_weight x first pass + bonus

each decoder's score being the sum over the hypothesis' tokens and the end of the sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["DecoderInputs", "Rescored", "decoder_inputs", "rescore", "token_log_probs"]


class DecoderInputs(NamedTuple):
    """Padded hypotheses of a batch, for the decoders.

    Attributes:
        lengths: (N,) int64, tokens of each hypothesis; a decoder sees one more.
        targets: (N, L + 1) int64; tokens, then eos to the end of the row.
        reversed_targets: (N, L + 1) int64; the same, tokens in reverse.
        inputs: (N, L + 1) int64; sos and tokens, then eos.
        reversed_inputs: (N, L + 1) int64; sos and reversed tokens, then eos.
    """

    lengths: NDArray[np.int64]
    targets: NDArray[np.int64]
    reversed_targets: NDArray[np.int64]
    inputs: NDArray[np.int64]
    reversed_inputs: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rescored:
    """Hypotheses of one segment, in the order given.

    Attributes:
        winner: place of the best; of equals the first.
        scores: (H,) float64.
        confidences: (H,) float64; e to the decoders' score per token, the end counted as one.
        token_confidences: H arrays float64 of L; each token's probability, the mean of both decoders where both count.
    """

    winner: int
    scores: NDArray[np.float64]
    confidences: NDArray[np.float64]
    token_confidences: tuple[NDArray[np.float64], ...]

    @property
    def confidence(self) -> float:
        """The winner's."""
        return float(self.confidences[self.winner])


def decoder_inputs(hypotheses: Sequence[Sequence[int] | NDArray[np.integer]], sos: int, eos: int) -> DecoderInputs:
    """Return what the decoders take for hypotheses of one or many segments.

    >>> decoder_inputs([[5, 6], [7]], sos=1, eos=2).reversed_inputs
    array([[1, 6, 5],
           [1, 7, 2]])
    """
    lengths = np.array([len(tokens) for tokens in hypotheses], np.int64)
    width = int(lengths.max(initial=0)) + 1
    targets = np.full((len(hypotheses), width), eos, np.int64)
    flat = [token for tokens in hypotheses for token in tokens]
    real = np.arange(width) < lengths[:, None]
    targets[real] = flat
    backwards = np.where(real, lengths[:, None] - 1 - np.arange(width), np.arange(width))
    reversed_targets = np.take_along_axis(targets, backwards, axis=1)
    start = np.full((len(hypotheses), 1), sos, np.int64)
    return DecoderInputs(
        lengths, targets, reversed_targets, np.hstack([start, targets[:, :-1]]), np.hstack([start, reversed_targets[:, :-1]])
    )


def token_log_probs(log_probs: NDArray[np.floating], targets: NDArray[np.integer]) -> NDArray[np.floating]:
    """Return the log-probability of each target, (N, L + 1), out of a decoder's (N, L + 1, V).

    Where the decoder runs on a device this is the same ``gather``, done there.
    """
    return np.take_along_axis(log_probs, np.asarray(targets)[..., None], axis=2)[..., 0]


def rescore(
    first_pass: Sequence[NDArray[np.floating] | Sequence[float]],
    lengths: NDArray[np.integer],
    left_to_right: NDArray[np.floating],
    right_to_left: NDArray[np.floating] | None = None,
    *,
    first_pass_weight: float = 0.5,
    reverse_weight: float = 0.0,
    bonuses: Sequence[NDArray[np.floating] | Sequence[float]] | None = None,
) -> list[Rescored]:
    """Score the hypotheses of a batch of segments.

    Args:
        first_pass: for each segment, the scores of its H hypotheses (at least one); WeNet's are ``Hypothesis.score``.
        lengths: (N,) tokens of all hypotheses, segment by segment.
        left_to_right: (N, L + 1) log-probabilities of tokens and eos, as ``token_log_probs`` returns them; what stands after is not read.
        right_to_left: the same of the right-to-left decoder, in its order (the hypothesis' last token first).
        first_pass_weight: what the first pass counts.
        reverse_weight: what the right-to-left decoder counts, 0 to 1.
        bonuses: for each segment, what to add unweighted: hotwords, say, if ``first_pass`` is without.

    Raises:
        ValueError: a number of hypotheses or a weight is not as it must be.
    """
    sizes = [len(scores) for scores in first_pass]
    if sum(sizes) != len(lengths) or len(left_to_right) != len(lengths) or min(sizes, default=1) < 1:
        raise ValueError(f"{len(left_to_right)} hypotheses were decoded of {sum(sizes)}, and every segment needs one")
    if not 0 <= reverse_weight <= 1 or (reverse_weight > 0 and right_to_left is None):
        raise ValueError("reverse_weight must be 0 to 1, and 0 without a right-to-left decoder")
    counts = np.asarray(lengths, np.int64)
    place = np.arange(left_to_right.shape[1])
    # Tokens and the end.
    scored = place <= counts[:, None]
    forwards = np.where(scored, left_to_right, 0.0).astype(np.float64)
    decoder = forwards.sum(axis=1)
    confidence = np.exp(forwards)
    if reverse_weight > 0 and right_to_left is not None:
        backwards = np.where(scored, right_to_left, 0.0).astype(np.float64)
        decoder = (1 - reverse_weight) * decoder + reverse_weight * backwards.sum(axis=1)
        mirrored = np.where(place < counts[:, None], counts[:, None] - 1 - place, place)
        confidence = (confidence + np.exp(np.take_along_axis(backwards, mirrored, axis=1))) / 2
    confidences = np.exp(decoder / (counts + 1))
    first = np.concatenate([np.asarray(scores, np.float64) for scores in first_pass]) if sizes else np.empty(0)
    totals = decoder + first_pass_weight * first
    if bonuses is not None:
        totals = totals + np.concatenate([np.asarray(bonus, np.float64) for bonus in bonuses])
    results = []
    start = 0
    for size in sizes:
        rows = range(start, start + size)
        tokens = tuple(confidence[row, : counts[row]] for row in rows)
        scores = totals[start : start + size]
        results.append(Rescored(int(np.argmax(scores)), scores, confidences[start : start + size], tokens))
        start += size
    return results
