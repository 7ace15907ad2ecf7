"""The hotword automaton against WeNet's numbers, against its rule by brute force, and free of WeNet's two defects."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.inference.decoding.hotwords import FORMAT, MAX_PHRASE_UNITS, Hotwords, RejectedPhrase
from agents.inference.decoding.prefix_beam import PrefixBeamSearch
from agents.inference.decoding.units import UnitTable
from schemas.digest import hotword_digest
from schemas.records import Hotword

UNITS = UnitTable(["<blank>", "<unk>", *"abcdef"])


def listed(phrases: dict[str, float]) -> list[Hotword]:
    return [Hotword(phrase=phrase, boost=boost) for phrase, boost in phrases.items()]


def tokens_of(text: str) -> list[int]:
    return [UNITS.ids[character] for character in text]


def same_tables(one: Hotwords, other: Hotwords) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one.tables, other.tables, strict=True))


@pytest.mark.parametrize("name", ["zh_plain", "zh_overlap", "mixed_bpe"])
def test_every_increment_is_wenets(hotword_vectors: list[dict[str, Any]], name: str) -> None:
    expected = next(one for one in hotword_vectors if one["name"] == name)
    folder = Path(__file__).parents[3] / "data" / "wenet"
    units = UnitTable.read(folder / expected["units"], folder / expected["bpe_model"] if expected["bpe_model"] else None)
    hotwords = Hotwords.compile(listed(dict.fromkeys(expected["phrases"], expected["context_score"])), units)
    assert len(hotwords.tables.states) == expected["num_nodes"] + 1
    assert (hotwords.phrases, hotwords.rejected) == (len(expected["phrases"]), ())
    for sequence in expected["sequences"]:
        earned, pending = hotwords.bonuses(sequence["tokens"])
        assert pending.tolist() == pytest.approx(sequence["partial_match_part"], abs=1e-9)
        assert earned.tolist() == pytest.approx(sequence["total_if_finalized_here"], abs=1e-9)
        assert (earned + pending).tolist() == pytest.approx(sequence["cumulative"], abs=1e-9)
        assert np.diff(earned + pending, prepend=0.0).tolist() == pytest.approx(sequence["increments"], abs=1e-9)


PHRASES = st.dictionaries(st.text("abc", min_size=1, max_size=5), st.sampled_from([-2.0, 0.0, 0.5, 1.0, 3.0]), max_size=12)


@given(PHRASES, st.text("abcd", max_size=20), st.randoms())
@settings(deadline=None)
def test_the_rule_holds_at_every_position_and_the_order_means_nothing(
    plain: Any, phrases: dict[str, float], text: str, random: Any
) -> None:
    hotwords = Hotwords.compile(listed(phrases), UNITS)
    spelt = {tuple(tokens_of(phrase)): boost for phrase, boost in phrases.items()}
    earned, pending = hotwords.bonuses(tokens_of(text))
    for end in range(len(text)):
        expected = plain.hotwords(tokens_of(text[: end + 1]), spelt)
        assert (earned[end], pending[end]) == pytest.approx(expected, abs=1e-9)
    shuffled = listed(phrases) + listed({phrase: boost - 1 for phrase, boost in list(phrases.items())[:2]})
    random.shuffle(shuffled)
    again = Hotwords.compile(shuffled, UNITS)
    assert again.digest == hotwords.digest
    assert same_tables(again, hotwords)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_the_rule_holds_where_many_units_lead_on(plain: Any, seed: int) -> None:
    """More than 64 units, and states with more than 16 followers: where short masks no longer tell units apart."""
    rng = np.random.default_rng(seed)
    units = UnitTable(["<blank>", *(chr(0x4E00 + index) for index in range(199))])
    starts = rng.integers(1, 200, 3)
    spelt = {(int(rng.choice(starts)), *rng.integers(1, 200, rng.integers(1, 3)).tolist()): 1.0 for _ in range(150)}
    hotwords = Hotwords.compile(listed({units.text(tokens): boost for tokens, boost in spelt.items()}), units)
    text = [token for index in rng.integers(0, len(spelt), 8) for token in list(spelt)[index][: rng.integers(1, 4)]]
    earned, pending = hotwords.bonuses(text)
    for end in range(len(text)):
        assert (earned[end], pending[end]) == pytest.approx(plain.hotwords(text[: end + 1], spelt), abs=1e-9)


def test_a_phrase_after_a_longer_one_that_begins_with_it_counts(hotword_vectors: list[dict[str, Any]], vectors: Any) -> None:
    units = UnitTable.read(vectors.units_path)
    text = units.spell(["北京"])[0]
    for phrases in (["北京大学", "北京"], ["北京", "北京大学"]):
        earned, pending = Hotwords.compile(listed(dict.fromkeys(phrases, 3.0)), units).bonuses(text)
        assert (earned[-1], pending[-1]) == (6.0, 6.0)


def test_at_the_end_a_hotword_speaks_for_its_hypothesis_and_not_against_it() -> None:
    log_probs = np.log(np.array([[[0.2, 0.01, 0.69, 0.1, 0, 0, 0, 0], [0.2, 0.01, 0.1, 0.29, 0.4, 0, 0, 0]]], np.float32) + 1e-6)
    search = PrefixBeamSearch(2, len(UNITS))
    search.open([0])
    search.open([1], Hotwords.compile(listed({"ab": 3.0}), UNITS))
    search.step([0, 1], np.concatenate([log_probs, log_probs]))
    plain, favoured = search.finish([0, 1])
    assert UNITS.text(plain.best.tokens) == "ac"
    assert UNITS.text(favoured.best.tokens) == "ab"
    assert favoured.best.hotword_score == 6.0
    without = next(one for one in plain.hypotheses if UNITS.text(one.tokens) == "ab")
    assert favoured.best.score == pytest.approx(without.score + 6.0)
    # Ranked by what is reported; and a beginning alone counts nothing any more.
    assert [one.score for one in favoured.hypotheses] == sorted((one.score for one in favoured.hypotheses), reverse=True)
    assert next(one for one in favoured.hypotheses if UNITS.text(one.tokens) == "a").hotword_score == 0.0


def test_phrases_that_cannot_be_used_are_reported_and_the_others_work() -> None:
    hotwords = Hotwords.compile(
        [
            Hotword(phrase="xyz a", boost=1.0),
            Hotword(phrase="ab", boost=1.0),
            Hotword(phrase="  ", boost=1.0),
            Hotword(phrase="c", boost=math.nan),
            Hotword(phrase="a" * (MAX_PHRASE_UNITS + 1), boost=1.0),
            Hotword(phrase=" AB", boost=2.0),
        ],
        UNITS,
    )
    assert hotwords.phrases == 1
    assert hotwords.rejected == (
        RejectedPhrase("  ", "it is empty"),
        RejectedPhrase("a" * 101, "it has 101 units; 100 are the most"),
        RejectedPhrase("c", "its boost is nan, which is no number"),
        RejectedPhrase("xyz a", "the model has no unit for x, y, z"),
    )
    earned, _ = hotwords.bonuses(tokens_of("ab"))
    assert earned[-1] == 4.0


def test_the_digest_is_of_the_content() -> None:
    one = hotword_digest(listed({"ab": 1.0, "c": 2.0}))
    assert one == hotword_digest(listed({"c": 2.0, "ab": 1.0}))
    assert one == hotword_digest([*listed({"c": 2.0, " ab ": 0.5}), *listed({"ab": 1.0})])
    others: list[dict[str, float]] = [{"ab": 1.0}, {"ab": 1.0, "c": 3.0}, {"a": 1.0, "bc": 2.0}]
    assert len({one, *(hotword_digest(listed(other)) for other in others)}) == 4
    assert Hotwords.none(8).digest == hotword_digest([])
    assert len(one) == 64


def test_compiled_lists_travel(tmp_path: Path) -> None:
    hotwords = Hotwords.compile(listed({"ab": 1.0, "abc": 2.0, "bcd": 1.5, "xy": 1.0}), UNITS)
    hotwords.save(tmp_path / "list")
    for again in (pickle.loads(pickle.dumps(hotwords)), Hotwords.load(tmp_path / "list")):  # noqa: S301 our own
        assert same_tables(again, hotwords)
        assert (again.digest, again.units, again.phrases, again.rejected) == (hotwords.digest, 8, 3, hotwords.rejected)
        assert again.bonuses(tokens_of("abcd"))[0].tolist() == hotwords.bonuses(tokens_of("abcd"))[0].tolist()
    about = tmp_path / "list" / "hotwords.json"
    about.write_text(about.read_text(encoding="utf-8").replace(f'"format": {FORMAT}', '"format": 0'), encoding="utf-8")
    with pytest.raises(ValueError, match=f"holds hotwords of format 0, not {FORMAT}: compile the list again"):
        Hotwords.load(tmp_path / "list")


def test_fifty_thousand_phrases(u2pp: Any) -> None:
    units = UnitTable.read(u2pp.units_path)
    rng = np.random.default_rng(0)
    pool = [unit for unit in units.units if len(unit) == 1 and unit != "▁"]
    phrases = sorted({"".join(rng.choice(pool, rng.integers(3, 8))) for _ in range(52_000)})[:50_000]
    hotwords = Hotwords.compile(listed(dict.fromkeys(phrases, 2.0)), units)
    usable = [tokens for tokens in units.spell(phrases) if isinstance(tokens, list)]
    assert hotwords.phrases == len({tuple(tokens) for tokens in usable}) > 10_000
    for tokens in usable[:: len(usable) // 50]:
        earned, pending = hotwords.bonuses(tokens)
        assert pending[-1] == 2.0 * len(tokens)
        assert earned[-1] >= 2.0 * len(tokens)
