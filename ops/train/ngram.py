"""A small word trigram of the domain: estimated with Witten and Bell's interpolation, kept as an ARPA file, scored with back-off."""

# ruff: noqa: S311 - seeded draws, no secrets
from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

__all__ = ["Ngram", "domain_sentences", "read_arpa", "train_ngram", "write_arpa"]

BEGIN: Final = "<s>"
END: Final = "</s>"
UNKNOWN: Final = "<unk>"
#: What all words together that were never counted may have, of all words.
_UNKNOWN_SHARE: Final = 1e-4
#: ARPA's zero.
_LOG10_ZERO: Final = -99.0
_LN10: Final = math.log(10.0)


class Ngram:
    """Conditional probabilities of words, with back-off."""

    def __init__(self, probabilities: Mapping[tuple[str, ...], float], backoffs: Mapping[tuple[str, ...], float]) -> None:
        """Take log10 of probabilities of n-grams and of back-off weights of contexts."""
        self.probabilities, self.backoffs = dict(probabilities), dict(backoffs)
        self.order = max(map(len, self.probabilities))

    def score(self, context: tuple[str, ...], word: str) -> float:
        """Return the natural log of the word's probability after a context, of which the last words count."""
        if (word,) not in self.probabilities:
            word = UNKNOWN
        context = context[max(0, len(context) - self.order + 1) :]
        weight = 0.0
        while context and (*context, word) not in self.probabilities:
            weight += self.backoffs.get(context, 0.0)
            context = context[1:]
        return (weight + self.probabilities[(*context, word)]) * _LN10

    def sentence(self, text: str) -> float:
        """Return the natural log of a sentence's probability, its end included."""
        total = 0.0
        context: tuple[str, ...] = (BEGIN,)
        for word in (*text.split(), END):
            total += self.score(context, word)
            context = (*context, word)
        return total


def train_ngram(sentences: Iterable[tuple[str, float]], order: int = 3) -> Ngram:
    """Estimate an n-gram from sentences, each with how often it counts."""
    counts: list[defaultdict[tuple[str, ...], float]] = [defaultdict(float) for _ in range(order)]
    for sentence, weight in sentences:
        words = (BEGIN, *sentence.split(), END)
        for end in range(1, len(words)):
            for length in range(1, min(order, end + 1) + 1):
                counts[length - 1][words[end - length + 1 : end + 1]] += weight
    vocabulary = {words[0] for words in counts[0]} | {UNKNOWN}
    total = sum(counts[0].values())
    estimates: dict[tuple[str, ...], float] = {
        (word,): _UNKNOWN_SHARE if word == UNKNOWN else (1 - _UNKNOWN_SHARE) * counts[0][(word,)] / total for word in vocabulary
    }
    backoffs: dict[tuple[str, ...], float] = {}
    for length in range(2, order + 1):
        followers: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
        for words, count in counts[length - 1].items():
            followers[words[:-1]][words[-1]] = count
        for context, following in followers.items():
            seen, types = sum(following.values()), len(following)
            # Witten and Bell: a context with many kinds of followers is likely to have yet another.
            new = types / (types + seen)
            lower_seen = 0.0
            for word, count in following.items():
                lower = estimates.get((*context[1:], word)) or _lower(estimates, backoffs, context[1:], word)
                lower_seen += lower
                estimates[(*context, word)] = (1 - new) * count / seen + new * lower
            # What was added to followers that were seen stays with them; the others share the rest.
            rest = 1 - sum(estimates[(*context, word)] for word in following)
            backoffs[context] = max(rest, 1e-9) / max(1 - lower_seen, 1e-9)
    probabilities = {words: math.log10(probability) for words, probability in estimates.items()}
    probabilities[(BEGIN,)] = _LOG10_ZERO
    return Ngram(probabilities, {context: math.log10(weight) for context, weight in backoffs.items()})


def _lower(
    estimates: Mapping[tuple[str, ...], float], backoffs: Mapping[tuple[str, ...], float], context: tuple[str, ...], word: str
) -> float:
    weight = 1.0
    while context and (*context, word) not in estimates:
        weight *= backoffs.get(context, 1.0)
        context = context[1:]
    return weight * estimates[(*context, word)]


def write_arpa(path: Path, ngram: Ngram) -> None:
    """Write an ARPA file."""
    by_length: defaultdict[int, list[tuple[str, ...]]] = defaultdict(list)
    for words in sorted(ngram.probabilities):
        by_length[len(words)].append(words)
    lines = ["\\data\\", *(f"ngram {length}={len(by_length[length])}" for length in sorted(by_length))]
    for length in sorted(by_length):
        lines += ["", f"\\{length}-grams:"]
        for words in by_length[length]:
            backoff = f"\t{ngram.backoffs[words]:.4f}" if words in ngram.backoffs else ""
            lines.append(f"{ngram.probabilities[words]:.4f}\t{' '.join(words)}{backoff}")
    path.write_text("\n".join([*lines, "", "\\end\\", ""]), encoding="utf-8")


def read_arpa(path: Path) -> Ngram:
    """Read an ARPA file."""
    probabilities: dict[tuple[str, ...], float] = {}
    backoffs: dict[tuple[str, ...], float] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = line.split("\t")
        if len(fields) > 1:
            words = tuple(fields[1].split())
            probabilities[words] = float(fields[0])
            if len(fields) > 2:
                backoffs[words] = float(fields[2])
    return Ngram(probabilities, backoffs)


def domain_sentences(transcripts: Iterable[str], seed: int = 1) -> list[tuple[str, float]]:
    """Return what the domain's n-gram is estimated from: the recorded orders, generated ones, numbers, a little small talk."""
    from ops.train.phrases import card_number, order, small_talk

    choose = random.Random(seed)
    return [
        *((text, 1.0) for text in transcripts),
        *((order(choose), 0.2) for _ in range(1_500)),
        *((card_number(choose), 0.25) for _ in range(2_000)),
        *((small_talk(choose), 0.02) for _ in range(3_000)),
    ]
