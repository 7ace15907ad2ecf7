"""How phrases are spelt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agents.inference.decoding.units import UnitTable

PIECES = ["<blank>", "<unk>", "<sos/eos>", "▁", "▁AB", "▁A", "A", "B", "C", "BC", "▁ABCD", "北", "京", "'S"]


def test_phrases_are_spelt_as_by_wenets_tokenisers(vectors: Any, hotword_vectors: list[dict[str, Any]]) -> None:
    units = UnitTable.read(vectors.units_path, vectors.bpe_path)
    lists = [one for one in hotword_vectors if one["units"] == f"models/{vectors.name}/units.txt"]
    assert lists
    for one in lists:
        assert units.spell(one["phrases"]) == one["phrase_tokens"]


def test_without_a_piece_model_the_longest_unit_is_taken(u2pp: Any) -> None:
    units = UnitTable.read(u2pp.units_path)
    assert units.pieces
    assert [units.units[unit] for unit in units.spell(["GREAT LOSS"])[0]] == ["▁GREAT", "▁L", "OS", "S"]
    assert [units.units[unit] for unit in units.spell(["清华LIFE"])[0]] == ["清", "华", "▁LIFE"]


@pytest.mark.parametrize(
    ("phrase", "spelt"),
    [
        ("AB", ["▁AB"]),
        # The longest first unit would leave D without one.
        ("ABC", ["▁AB", "C"]),
        ("ABBC", ["▁AB", "BC"]),
        ("CAB", ["▁", "C", "A", "B"]),
        ("ab's  北京", ["▁AB", "'S", "北", "京"]),
        ("ＡＢ", ["▁AB"]),
        ("北AB京", ["北", "▁AB", "京"]),
    ],
)
def test_pieces(phrase: str, spelt: list[str]) -> None:
    units = UnitTable(PIECES)
    (found,) = units.spell([phrase])
    assert [units.units[unit] for unit in found] == spelt


def test_a_split_that_spells_all_is_preferred_to_a_longer_first_unit() -> None:
    units = UnitTable(["<blank>", "▁AB", "▁A", "BC"])
    assert units.spell(["ABC"]) == [[2, 3]]
    assert UnitTable(["<unk>", "▁", "▁a"]).spell(["a<unk>"]) == ["the model has no unit for <, >, k, n, u"]


@pytest.mark.parametrize(
    ("phrase", "reason"),
    [
        ("", "it is empty"),
        (" \u3000", "it is empty"),
        ("ABX北", "the model has no unit for X"),
        ("öÉ", "the model has no unit for É, Ö"),
        ("<unk>", "the model has no unit for <, >, K, N, U"),
        ("ABCD'", "the model has no units that spell it"),
    ],
)
def test_what_cannot_be_spelt_has_a_reason(phrase: str, reason: str) -> None:
    assert UnitTable(PIECES).spell([phrase]) == [reason]


def test_characters_have_spaces_between_words_and_the_case_of_the_units() -> None:
    lower = UnitTable(["<blank>", "<unk>", "<space>", "a", "b", "北"])
    assert lower.spell(["Ab  B北", "ac"]) == [[3, 4, 2, 4, 5], "the model has no unit for c"]
    assert lower.text([3, 4, 2, 4, 5]) == "ab b北"
    assert lower.spell(["<unk>"]) == ["the model has no unit for <, >, k, n, u"]
    both = UnitTable(["<blank>", "a", "A"])
    assert both.spell(["aA", "a a"]) == [[1, 2], "the model has no units that spell it"]


def test_unit_files(tmp_path: Path) -> None:
    path = tmp_path / "units.txt"
    path.write_text("<blank> 0\n▁ 2\na 1\n", encoding="utf-8")
    assert UnitTable.read(path).units == ("<blank>", "a", "▁")
    path.write_text("<blank> 0\na\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: a unit and its id are expected, not 'a'"):
        UnitTable.read(path)
    path.write_text("<blank> 0\na 2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="the ids must be 0 to 1"):
        UnitTable.read(path)
    with pytest.raises(ValueError, match="a unit stands twice"):
        UnitTable(["a", "a"])
    with pytest.raises(ValueError, match="is no SentencePiece model"):
        UnitTable(["a"], path)
