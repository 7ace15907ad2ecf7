"""A plain CTC prefix beam search with a word n-gram in shallow fusion, to judge models by."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from ops.train.ngram import BEGIN, END, Ngram
from ops.train.tokens import BLANK, SOS_EOS, UNKNOWN, Tokens

__all__ = ["Fusion", "prefix_beam_search"]

#: Tokens less likely than this in a frame are not tried.
_LEAST_LOG_PROBABILITY: Final = math.log(1e-4)
_WORD_BEGIN: Final = "▁"
_NEVER: Final = -math.inf


class Fusion(NamedTuple):
    """How much the n-gram says in the search."""

    ngram: Ngram
    weight: float = 0.5
    #: Natural log added for each word, against the n-gram's liking for few.
    word_bonus: float = 0.5


class _Words(NamedTuple):
    """A prefix as the n-gram sees it."""

    finished: tuple[str, ...]
    unfinished: str
    score: float


def _add(first: float, second: float) -> float:
    if first < second:
        first, second = second, first
    return first if second == _NEVER else first + math.log1p(math.exp(second - first))


def prefix_beam_search(
    scores: np.ndarray, tokens: Tokens, beam: int = 12, fusion: Fusion | None = None
) -> list[tuple[float, str, tuple[int, ...]]]:
    """Search the best token sequences.

    Args:
        scores: CTC log-probabilities, (frames, vocabulary).
        tokens: the vocabulary.
        beam: how many prefixes are kept.
        fusion: an n-gram, where there is one.

    Returns:
        Score (natural log), text and tokens of the prefixes left at the end, best first.
    """

    @cache
    def words(prefix: tuple[int, ...]) -> _Words:
        if not prefix or fusion is None:
            return _Words((BEGIN,), "", 0.0)
        before, piece = words(prefix[:-1]), tokens.units[prefix[-1]]
        if not piece.startswith(_WORD_BEGIN):
            return before._replace(unfinished=before.unfinished + piece)
        return finish(before)._replace(unfinished=piece[1:])

    def finish(state: _Words) -> _Words:
        if fusion is None or not state.unfinished:
            return state
        gain = fusion.weight * fusion.ngram.score(state.finished, state.unfinished) + fusion.word_bonus
        return _Words((*state.finished[-1:], state.unfinished), "", state.score + gain)

    def total(item: tuple[tuple[int, ...], tuple[float, float]]) -> float:
        return _add(*item[1]) + words(item[0]).score

    # A prefix's probability of ending in blank, and in its last token.
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, _NEVER)}
    for frame in scores:
        candidates = [int(token) for token in np.flatnonzero(frame > _LEAST_LOG_PROBABILITY) if token not in (UNKNOWN, SOS_EOS)]
        following: defaultdict[tuple[int, ...], tuple[float, float]] = defaultdict(lambda: (_NEVER, _NEVER))
        for prefix, (blank, token_end) in beams.items():
            for token in candidates:
                score = float(frame[token])
                if token == BLANK:
                    old = following[prefix]
                    following[prefix] = (_add(old[0], _add(blank, token_end) + score), old[1])
                elif prefix and token == prefix[-1]:
                    old = following[prefix]
                    following[prefix] = (old[0], _add(old[1], token_end + score))
                    longer = (*prefix, token)
                    old = following[longer]
                    following[longer] = (old[0], _add(old[1], blank + score))
                else:
                    longer = (*prefix, token)
                    old = following[longer]
                    following[longer] = (old[0], _add(old[1], _add(blank, token_end) + score))
        possible = [item for item in following.items() if max(item[1]) > _NEVER]
        beams = dict(sorted(possible, key=total, reverse=True)[:beam])
    results = []
    for prefix, ends in beams.items():
        state = finish(words(prefix))
        ending = 0.0 if fusion is None else fusion.weight * fusion.ngram.score(state.finished, END)
        results.append((_add(*ends) + state.score + ending, tokens.decode(prefix), prefix))
    return sorted(results, reverse=True)
