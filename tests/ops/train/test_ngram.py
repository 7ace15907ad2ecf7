"""The domain's n-gram."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ops.train.ngram import BEGIN, END, Ngram, domain_sentences, read_arpa, train_ngram, write_arpa


@pytest.fixture(scope="module")
def ngram() -> Ngram:
    return train_ngram(domain_sentences(["can i get a latte", "make me a small mocha with soy milk"]))


@pytest.mark.parametrize("context", [(), ("a",), (BEGIN, "can"), ("can", "i"), ("one", "two"), ("never", "heard")])
def test_probabilities_add_up_to_one(ngram: Ngram, context: tuple[str, ...]) -> None:
    words = [words[0] for words in ngram.probabilities if len(words) == 1 and words != (BEGIN,)]
    assert math.fsum(math.exp(ngram.score(context, word)) for word in words) == pytest.approx(1, abs=1e-6)


def test_what_was_said_is_likelier(ngram: Ngram) -> None:
    assert ngram.sentence("make me a small mocha") > ngram.sentence("mocha small a me make") + 10
    assert ngram.score(("card",), "zebra") == ngram.score(("card",), "<unk>")


def test_arpa_keeps_the_scores(ngram: Ngram, tmp_path: Path) -> None:
    write_arpa(tmp_path / "domain.arpa", ngram)
    again = read_arpa(tmp_path / "domain.arpa")
    assert again.order == 3
    for text in ("can i get a latte", "nine nine two oh", "i want a zebra"):
        assert again.sentence(text) == pytest.approx(ngram.sentence(text), abs=0.01)
    assert again.score((), END) == pytest.approx(ngram.score((), END), abs=1e-3)
