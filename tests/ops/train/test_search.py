"""The plain beam search."""

from __future__ import annotations

from itertools import groupby, product

import numpy as np
import pytest

from ops.train.ngram import train_ngram
from ops.train.search import Fusion, prefix_beam_search
from ops.train.tokens import BLANK, Tokens, train_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    path = tmp_path_factory.mktemp("tokens") / "bpe.model"
    train_tokens(path, ["can i get a latte"] * 50, 96, 1)
    return Tokens(path)


def test_tokens_there_and_back(tokens: Tokens) -> None:
    for text in ("can i get a latte with soy milk", "nine nine two oh", "i'd like a cortado"):
        assert tokens.decode(tokens.encode(text)) == text
    assert tokens.units[:3] == ["<blank>", "<unk>", "<sos/eos>"]


def test_probabilities_of_all_paths_are_added(tokens: Tokens) -> None:
    """Against brute force over every path of five frames and four tokens."""
    drawn = np.random.default_rng(2).dirichlet(np.ones(4), 5)
    tried = (BLANK, 3, 4, 5)
    scores = np.full((5, len(tokens.units)), -30.0)
    scores[:, tried] = np.log(drawn)
    expected: dict[tuple[int, ...], float] = {}
    for path in product(range(4), repeat=5):
        prefix = tuple(tried[token] for token, _ in groupby(path) if tried[token] != BLANK)
        expected[prefix] = expected.get(prefix, 0.0) + float(np.prod(drawn[np.arange(5), path]))
    found = {prefix: score for score, _, prefix in prefix_beam_search(scores, tokens, beam=10_000)}
    assert found.keys() == expected.keys()
    for prefix, probability in expected.items():
        assert found[prefix] == pytest.approx(np.log(probability))


def test_an_ngram_decides_between_equals(tokens: Tokens) -> None:
    one, two = tokens.encode("latte"), tokens.encode("get")
    scores = np.full((8, len(tokens.units)), np.log(1e-6))
    for frame, (first, second) in enumerate(zip(one + [BLANK] * 8, two + [BLANK] * 8, strict=False)):
        if frame < len(scores):
            scores[frame, first] = np.log(0.5) if first != second else 0.0
            scores[frame, second] = np.log(0.45) if first != second else 0.0
    plain = prefix_beam_search(scores, tokens)
    fusion = Fusion(train_ngram([("get", 50.0), ("latte", 1.0)]), weight=3.0, word_bonus=0.0)
    assert plain[0][1] == "latte"
    assert prefix_beam_search(scores, tokens, fusion=fusion)[0][1] == "get"
