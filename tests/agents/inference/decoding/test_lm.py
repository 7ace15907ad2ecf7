"""The n-gram against the textbook."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.inference.decoding import kernels
from agents.inference.decoding.lm import ArpaError, NgramLm
from agents.inference.decoding.prefix_beam import BeamOptions, PrefixBeamSearch
from agents.inference.decoding.units import UnitTable

TOY = """
A trigram by hand.

\\data\\
ngram 1=7
ngram 2=5
ngram 3=2

\\1-grams:
-99\t<s>\t-0.5
-1.0\t</s>
-2.0\t<unk>
-0.7\tGO\t-0.3
-0.9\tFOR\t-0.2
-1.1\tFORWARD\t-0.1
-1.3\tTEN

\\2-grams:
-0.2\t<s> GO\t-0.4
-0.3\tGO FORWARD\t-0.6
-0.4\tFORWARD TEN
-0.5\tGO FOR\t-0.05
-0.6\tTEN </s>

\\3-grams:
-0.1\t<s> GO FORWARD
-0.15\tGO FORWARD TEN

\\end\\
"""
PIECES = UnitTable(["<blank>", "<unk>", "<sos/eos>", "▁", "▁GO", "▁FOR", "WARD", "▁TEN", "F", "O", "R", "E", "北", "T", "N"])
LN10 = math.log(10)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.arpa"
    path.write_text(TOY, encoding="utf-8")
    return path


def spelt(text: str) -> list[int]:
    return [PIECES.ids[unit] for unit in text.split()]


@pytest.mark.parametrize(
    ("pieces", "log10"),
    [
        ("▁GO ▁FOR WARD ▁TEN", -0.2 - 0.1 - 0.15 - 0.6),
        # However the words are cut into units.
        ("▁ ▁GO ▁ F O R WARD ▁ T E N", -0.2 - 0.1 - 0.15 - 0.6),
        # The first word needs no boundary.
        ("T E N", -0.5 - 1.3 - 0.6),
        # FORWARD TEN is known, TEN TEN is not: back off to nothing.
        ("▁FOR WARD ▁TEN ▁TEN", (-0.5 - 1.1) + -0.4 + (0.0 - 1.3) + -0.6),
        # <s> GO FOR backs off once, FOR </s> again.
        ("▁GO ▁FOR", -0.2 + (-0.4 - 0.5) + (-0.05 - 0.2 - 1.0)),
        ("", -0.5 - 1.0),
        ("▁", -0.5 - 1.0),
        # Blank and the like are no part of any word.
        ("▁GO <sos/eos>", -0.2 + (-0.4 - 0.3 - 1.0)),
    ],
)
def test_sentences(toy: Path, pieces: str, log10: float) -> None:
    lm = NgramLm.read(toy, PIECES, weight=1.0)
    assert lm.order == 3
    assert lm.score(spelt(pieces)) == pytest.approx(log10 * LN10)


def test_weight_bonus_and_penalty(toy: Path) -> None:
    lm = NgramLm.read(toy, PIECES, weight=0.5, word_bonus=0.7, oov_penalty=-4.0, sentence_end=False)
    assert lm.score(spelt("▁GO ▁FOR WARD")) == pytest.approx(0.5 * LN10 * (-0.2 - 0.1) + 2 * 0.7)
    # Unknown words: spelt wrong, by <unk>, and by a Chinese character; each is <unk> in its context.
    for unknown in ("▁GO O", "<unk>", "▁GO <unk>", "北"):
        assert lm.score(spelt(unknown)) == pytest.approx(0.5 * LN10 * (-0.5 - 2.0) + 0.7 - 4.0)
    assert lm.score(spelt("北 ▁GO")) == pytest.approx(0.5 * LN10 * (-0.5 - 2.0 - 0.7) + 2 * 0.7 - 4.0)
    # Two characters are two words.
    assert lm.score(spelt("北 北")) == pytest.approx(0.5 * LN10 * (-0.5 - 2.0 - 2.0) + 2 * (0.7 - 4.0))


def test_a_model_without_unk_forgets_its_context_at_an_unknown_word(tmp_path: Path) -> None:
    path = tmp_path / "small.arpa"
    path.write_text(
        "\\data\\\nngram 1=2\nngram 2=1\n\\1-grams:\n-0.5 GO -0.3\n-0.6 TEN\n\\2-grams:\n-0.1 GO TEN\n\\end\\\n", encoding="utf-8"
    )
    lm = NgramLm.read(path, PIECES, weight=1.0, oov_penalty=-4.0)
    assert lm.score(spelt("▁GO ▁TEN")) == pytest.approx(LN10 * (-0.5 - 0.1))
    assert lm.score(spelt("▁GO E ▁TEN")) == pytest.approx(-4.0 + LN10 * -0.6)


def test_case_can_be_ignored(toy: Path) -> None:
    lower = UnitTable([unit if unit.startswith("<") else unit.lower() for unit in PIECES.units])
    tokens = spelt("▁GO ▁FOR WARD ▁TEN")
    expected = NgramLm.read(toy, PIECES).score(tokens)
    assert NgramLm.read(toy, lower, ignore_case=True).score(tokens) == expected
    assert NgramLm.read(toy, lower).score(tokens) < expected - 20


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_model_and_any_text_as_by_the_book(
    plain: Any, tmp_path_factory: pytest.TempPathFactory, seed: int, order: int, unk: bool, ends: bool
) -> None:
    rng = np.random.default_rng(seed)
    words = ["GO", "FOR", "FORE", "TEN", "R", "北", "TENOR"]
    known = list(rng.permutation(words)[: rng.integers(1, len(words) + 1)])
    levels = [[("<s>",), *([("</s>",)] if ends else []), *([("<unk>",)] if unk else []), *((word,) for word in known)]]
    for _ in range(order - 1):
        if not levels[-1]:
            break
        longer = {(*levels[-1][rng.integers(len(levels[-1]))], str(rng.choice(known))) for _ in range(6)}
        levels.append(sorted(gram for gram in longer if "</s>" not in gram[:-1]))
    grams = {gram: (-float(rng.uniform(0.1, 3)), -float(rng.uniform(0, 1))) for level in levels for gram in level}
    path = tmp_path_factory.mktemp("lm") / "random.arpa"
    lines = ["\\data\\", *(f"ngram {index}={len(level)}" for index, level in enumerate(levels, 1) if level)]
    for index, level in enumerate(levels, 1):
        if level:
            lines.append(f"\\{index}-grams:")
            lines += [f"{grams[gram][0]!r} {' '.join(gram)} {grams[gram][1]!r}" for gram in level]
    path.write_text("\n".join([*lines, "\\end\\"]), encoding="utf-8")
    lm = NgramLm.read(path, PIECES, weight=0.6, word_bonus=0.3, oov_penalty=-2.0)
    model = plain.Lm(grams, 0.6, 0.3, -2.0)

    tokens = rng.integers(1, len(PIECES), 12).tolist()
    earned, pending = np.empty(len(tokens)), np.empty(len(tokens))
    total = kernels.follow_lm(lm.tables, np.array(tokens, np.int32), earned, pending)
    finished: list[str] = []
    unfinished = ""
    for place, token in enumerate(tokens):
        unit = PIECES.units[token]
        if unit.startswith("▁") or unit == "北":
            finished += [unfinished] if unfinished else []
            unfinished = unit.removeprefix("▁")
        elif unit != "<sos/eos>":
            unfinished += unit.replace("<unk>", "?")
        if unit == "北":
            finished.append(unit)
            unfinished = ""
        assert earned[place] == pytest.approx(model.words(finished), abs=1e-9)
        assert earned[place] + pending[place] == pytest.approx(model.open(finished, unfinished), abs=1e-9)
    assert total == pytest.approx(model.sentence(finished + ([unfinished] if unfinished else [])), abs=1e-9)
    assert lm.score(tokens) == total


def test_the_search_listens(toy: Path) -> None:
    # ▁FOR or ▁TEN after ▁GO: the model is almost sure of neither; the n-gram is.
    probabilities = np.full((1, 3, len(PIECES)), 1e-4, np.float32)
    probabilities[0, 0, PIECES.ids["▁GO"]] = 0.99
    probabilities[0, 1, [PIECES.ids["▁FOR"], PIECES.ids["▁TEN"]]] = 0.45, 0.55
    probabilities[0, 2, [PIECES.ids["WARD"], PIECES.ids["E"]]] = 0.4, 0.6
    log_probs = np.log(probabilities / probabilities.sum(axis=2, keepdims=True))
    texts = []
    for lm in (None, NgramLm.read(toy, PIECES, weight=0.5, oov_penalty=-5.0)):
        search = PrefixBeamSearch(1, len(PIECES), BeamOptions(), lm)
        search.open([0])
        search.step([0], log_probs)
        (result,) = search.finish([0])
        texts.append(PIECES.text(result.best.tokens))
        for one in result.hypotheses:
            assert one.lm_score == pytest.approx(lm.score(one.tokens) if lm else 0.0)
    assert texts == ["GO TENE", "GO FORWARD"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("\\end\\", ""), r"ends in line \d+ without"),
        (("ngram 2=5", "ngram 2=6"), "announces {1: 7, 2: 6, 3: 2} n-grams, the file holds {1: 7, 2: 5, 3: 2}"),
        (("ngram 2=5", "ngram two"), r"line 6: 'ngram N=COUNT' is expected, not 'ngram two'"),
        (("\\2-grams:", "\\4-grams:"), "4-grams are not expected here"),
        (("-0.9\tFOR", "x\tFOR"), "line 14: a log-probability, 1 words and perhaps a back-off are expected"),
        (("-0.4\tFORWARD TEN", "-0.4\tFORWARD TEN x y"), "line 21: a log-probability, 2 words"),
        (("-0.4\tFORWARD TEN", "-0.4\tFORWARD NINE"), "the n-gram 'FORWARD NINE' stands without 'NINE'"),
        (("-0.15\tGO FORWARD TEN", "-0.15\tTEN GO TEN"), "the n-gram 'TEN GO TEN' stands without 'TEN GO'"),
        (("-0.9\tFOR\t", "-0.9\tGO\t"), "the word 'GO' stands twice"),
        (("-0.4\tFORWARD TEN", "-0.4\tGO FOR"), "an n-gram stands twice"),
    ],
)
def test_broken_files_are_refused_with_the_line(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "broken.arpa"
    assert TOY.count(change[0]) == 1
    path.write_text(TOY.replace(*change), encoding="utf-8")
    with pytest.raises(ArpaError, match=message):
        NgramLm.read(path, PIECES)


def test_mistakes_are_named(toy: Path) -> None:
    with pytest.raises(ValueError, match="weight must be at least 0 and oov_penalty at most 0"):
        NgramLm.read(toy, PIECES, weight=-1.0)
    with pytest.raises(ValueError, match="made for 15 units, not 8"):
        PrefixBeamSearch(1, 8, lm=NgramLm.read(toy, PIECES))
