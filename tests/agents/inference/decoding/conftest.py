"""WeNet's vectors, and the plain Python that the compiled code is held against."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

WENET = Path(__file__).parents[3] / "data" / "wenet"

Prefix = tuple[int, ...]
Bonus = Callable[[Prefix], float]


@dataclass
class Vectors:
    """What WeNet computed with one of its models."""

    name: str
    search: dict[str, Any] = field(init=False)
    arrays: dict[str, NDArray[Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.search = json.loads((WENET / self.name / "search.json").read_text(encoding="utf-8"))
        with np.load(WENET / self.name / "ctc.npz") as file:
            self.arrays = dict(file)

    @property
    def units_path(self) -> Path:
        return WENET / "models" / self.name / "units.txt"

    @property
    def bpe_path(self) -> Path | None:
        path = WENET / "models" / self.name / "bpe.model"
        return path if path.exists() else None


@pytest.fixture(scope="session", params=["u2", "u2pp"])
def vectors(request: pytest.FixtureRequest) -> Vectors:
    return Vectors(request.param)


@pytest.fixture(scope="session")
def u2pp() -> Vectors:
    return Vectors("u2pp")


@pytest.fixture(scope="session")
def hotword_vectors() -> list[dict[str, Any]]:
    return json.loads((WENET / "hotwords.json").read_text(encoding="utf-8"))


@dataclass
class _Alignments:
    """What is known of one prefix after a frame."""

    blank: float = -math.inf
    token: float = -math.inf
    best_blank: float = -math.inf
    best_token: float = -math.inf
    sureness: float = -math.inf
    times_blank: tuple[int, ...] = ()
    times_token: tuple[int, ...] = ()

    @property
    def all(self) -> float:
        return log_add(self.blank, self.token)

    @property
    def best(self) -> tuple[float, tuple[int, ...]]:
        if self.best_blank > self.best_token:
            return self.best_blank, self.times_blank
        return self.best_token, self.times_token

    def grow(self, log_prob: float, total: float, best: float, times: tuple[int, ...], frame: int) -> None:
        self.token = log_add(self.token, total + log_prob)
        if self.best_token < best + log_prob:
            self.best_token, self.sureness, self.times_token = best + log_prob, log_prob, (*times, frame)


def log_add(*values: float) -> float:
    top = max(values)
    return top if top == -math.inf else top + math.log(sum(math.exp(value - top) for value in values))


def plain_search(
    log_probs: NDArray[np.floating], beam: int, blank: int = 0, bonus: Bonus = lambda _: 0.0, final: Bonus = lambda _: 0.0
) -> list[tuple[Prefix, float, tuple[int, ...]]]:
    """The search of ``prefix_beam.py`` over one segment, in dictionaries: (prefix, score, times), best first.

    ``bonus`` is added to a prefix while the search goes on, ``final`` when it is over.
    """
    hypotheses = {(): _Alignments(blank=0.0, best_blank=0.0, best_token=0.0)}
    for frame, row in enumerate(np.asarray(log_probs)):
        grown: dict[Prefix, _Alignments] = {}
        for unit in np.argsort(-row, kind="stable")[:beam].tolist():
            log_prob = float(row[unit])
            for prefix, old in hypotheses.items():
                best, times = old.best
                if unit == blank:
                    new = grown.setdefault(prefix, _Alignments())
                    new.blank = log_add(new.blank, old.all + log_prob)
                    new.best_blank, new.times_blank = best + log_prob, times
                    continue
                if prefix and prefix[-1] == unit:
                    new = grown.setdefault(prefix, _Alignments())
                    new.token = log_add(new.token, old.token + log_prob)
                    if new.best_token < old.best_token + log_prob:
                        new.best_token = old.best_token + log_prob
                        if new.sureness < log_prob:
                            new.sureness, new.times_token = log_prob, (*old.times_token[:-1], frame)
                    grown.setdefault((*prefix, unit), _Alignments()).grow(log_prob, old.blank, old.best_blank, old.times_blank, frame)
                else:
                    grown.setdefault((*prefix, unit), _Alignments()).grow(log_prob, old.all, best, times, frame)
        ranked = sorted(grown.items(), key=lambda item: item[1].all + bonus(item[0]), reverse=True)
        hypotheses = dict(ranked[:beam])
    result = [(prefix, some.all + final(prefix), some.best[1]) for prefix, some in hypotheses.items() if some.all > -math.inf]
    return sorted(result, key=lambda one: one[1], reverse=True)


def plain_hotwords(prefix: Sequence[int], phrases: dict[Prefix, float]) -> tuple[float, float]:
    """What completed hotwords bring a prefix, and what an unfinished one adds for the time being."""
    tokens = tuple(prefix)
    earned = sum(
        len(phrase) * boost
        for phrase, boost in phrases.items()
        for start in range(len(tokens) - len(phrase) + 1)
        if tokens[start : start + len(phrase)] == phrase
    )
    for length in range(len(tokens), 0, -1):
        fitting = [boost for phrase, boost in phrases.items() if phrase[:length] == tokens[-length:]]
        if fitting:
            return earned, length * max(fitting)
    return earned, 0.0


@dataclass
class PlainLm:
    """A back-off n-gram over words, by the book. ``grams`` are (log10 probability, log10 back-off)."""

    grams: dict[tuple[str, ...], tuple[float, float]]
    weight: float
    word_bonus: float
    oov_penalty: float
    sentence_end: bool = True

    @property
    def order(self) -> int:
        return max(len(gram) for gram in self.grams)

    def log10(self, context: tuple[str, ...], word: str) -> float:
        if (*context, word) in self.grams:
            return self.grams[*context, word][0]
        return self.grams.get(context, (0.0, 0.0))[1] + self.log10(context[1:], word)

    def words(self, words: Sequence[str]) -> float:
        """The score of finished words that begin a sentence."""
        context: tuple[str, ...] = ("<s>",) if ("<s>",) in self.grams else ()
        total = 0.0
        for word in words:
            total += self.word_bonus
            if (word,) not in self.grams:
                total += self.oov_penalty
                if ("<unk>",) not in self.grams:
                    context = ()
                    continue
                word = "<unk>"
            context = context[-(self.order - 1) :] if self.order > 1 else ()
            total += self.weight * math.log(10) * self.log10(context, word)
            context = (*context, word)
        self._context = context[-(self.order - 1) :] if self.order > 1 else ()
        return total

    def open(self, words: Sequence[str], unfinished: str) -> float:
        """The score of a text whose last word is being spelt."""
        total = self.words(words)
        if not unfinished:
            return total
        known = [(gram[0], log10) for gram, (log10, _) in self.grams.items() if len(gram) == 1 and gram[0][0] != "<"]
        fitting = [log10 for word, log10 in known if word.startswith(unfinished)]
        if fitting:
            return total + self.word_bonus + self.weight * math.log(10) * max(fitting)
        unknown = self.grams.get(("<unk>",), (0.0, 0.0))[0]
        return total + self.word_bonus + self.oov_penalty + self.weight * math.log(10) * unknown

    def sentence(self, words: Sequence[str]) -> float:
        total = self.words(words)
        if self.sentence_end and ("</s>",) in self.grams:
            total += self.weight * math.log(10) * self.log10(self._context, "</s>")
        return total


@pytest.fixture(scope="session")
def plain() -> Any:
    """The plain versions by name."""

    class Plain:
        search = staticmethod(plain_search)
        hotwords = staticmethod(plain_hotwords)
        Lm = PlainLm
        log_add = staticmethod(log_add)

    return Plain
