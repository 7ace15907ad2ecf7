"""Errors of words, and which words are taken for which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from ops.measure import comparable

__all__ = ["Confusion", "Score", "score"]


class Confusion(msgspec.Struct, frozen=True, kw_only=True):
    """What was written for what was said; empty for a word too many, or one that is missing."""

    said: str
    written: str
    count: int


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Errors over some texts, in words.

    Attributes:
        words: words that were said.
        wer: all errors, as a share of them.
        confusions: the most frequent ones first.
    """

    words: int
    wer: float
    substitutions: int
    deletions: int
    insertions: int
    utterances: int
    utterances_wrong: int
    confusions: tuple[Confusion, ...] = ()


def score(said: Sequence[str], written: Sequence[str], confusions: int = 20) -> Score:
    """Compare texts pairwise, after the same normalisation for every recogniser; each digit counts as a word.

    Args:
        said: what was said; none may be without words.
        written: what was written.
        confusions: how many kinds of them to name.
    """
    import jiwer

    references, hypotheses = (
        [comparable(text, digits_apart=True) for text in said],
        [comparable(text, digits_apart=True) for text in written],
    )
    found = jiwer.process_words(references, hypotheses)
    pairs: Counter[tuple[str, str]] = Counter()
    for reference, hypothesis, alignment in zip(found.references, found.hypotheses, found.alignments, strict=True):
        for chunk in alignment:
            ours, theirs = reference[chunk.ref_start_idx : chunk.ref_end_idx], hypothesis[chunk.hyp_start_idx : chunk.hyp_end_idx]
            if chunk.type == "substitute":
                pairs.update(zip(ours, theirs, strict=True))
            elif chunk.type != "equal":
                pairs.update([(word, "") for word in ours] + [("", word) for word in theirs])
    words = found.hits + found.substitutions + found.deletions
    return Score(
        words=words,
        wer=round((found.substitutions + found.deletions + found.insertions) / words, 4),
        substitutions=found.substitutions,
        deletions=found.deletions,
        insertions=found.insertions,
        utterances=len(references),
        utterances_wrong=sum(one != other for one, other in zip(references, hypotheses, strict=True)),
        confusions=tuple(Confusion(said=ours, written=theirs, count=count) for (ours, theirs), count in pairs.most_common(confusions)),
    )
