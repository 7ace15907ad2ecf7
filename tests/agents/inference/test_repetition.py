"""Loops are found where they begin, and what people say is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.inference.repetition import loop_start, repeats_itself


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        ([], None),
        ([1, 2, 3], None),
        ([5] * 11, None),
        ([5] * 12, 1),
        ([9, 8, *[5] * 12], 3),
        ([1, 2] * 6, 2),
        ([4, *[1, 2, 3] * 4], 4),
        ([1, 2, 3, 4, 5, 6, 7] * 2, None),
        ([1, 2, 3, 4, 5, 6, 7] * 3, 7),
    ],
)
def test_loops(tokens: list[int], start: int | None) -> None:
    assert loop_start(tokens) == start


@given(
    before=st.lists(st.integers(100, 999), max_size=20, unique=True),
    piece=st.lists(st.integers(0, 99), min_size=4, max_size=9, unique=True),
)
def test_any_piece_three_times(before: list[int], piece: list[int]) -> None:
    assert loop_start(before + piece * 3) == len(before) + len(piece)


@given(st.lists(st.integers(0, 50_000), max_size=100, unique=True))
def test_text_without_repetition(tokens: list[int]) -> None:
    assert loop_start(tokens) is None


def test_text_that_compresses_too_well() -> None:
    assert repeats_itself(" and I'm going to do it again" * 12)
    assert not repeats_itself("no no no")
    assert not repeats_itself("It was the first great sorrow of his life; it was not so much the loss of the cotton itself.")
