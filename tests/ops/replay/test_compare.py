"""Two transcripts of a call, word by word."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ops.replay.compare import compare, pieces
from schemas.records import Transcript, Word

WORDS = st.lists(st.sampled_from(["yes", "no", "seven", "eight", "Well,", "你", "好"]), max_size=12)


def final(text: str, start: int = 0, *, timed: bool = True, engine: str = "a") -> Transcript:
    words = tuple(
        Word(text=word, start_ms=start // 16 + 100 * at, end_ms=start // 16 + 100 * at + 90, confidence=0.9)
        for at, word in enumerate(text.split())
    )
    return Transcript(
        channel_id="7",
        session_id="s",
        conversation_id="c",
        position_samples=start,
        segment=start // 16_000,
        kind="final",
        end_sample=start + 16_000,
        text=text,
        raw_text=text,
        words=words if timed else (),
        confidence=0.9,
        engine=engine,
        model_digest="d" + engine,
        covered_to_sample=start + 16_000,
    )


def test_the_same_is_identical() -> None:
    finals = [final("yes, seven"), final("no", 32_000)]
    found = compare("s", "7", "c", finals, finals)
    assert found.identical
    assert (found.stored_words, found.replayed_words, found.differing_words, found.differences) == (3, 3, 0, ())
    assert found.stored_text == found.replayed_text == "yes, seven no"


def test_changed_missing_and_added_words_have_their_place() -> None:
    stored = [final("I take seven of them"), final("thank you", 32_000)]
    replayed = [final("I take eleven them"), final("thank you very much", 32_000, engine="b")]
    found = compare("s", "7", "c", stored, replayed)
    assert not found.identical
    assert [(each.kind, each.stored, each.replayed, each.at_ms) for each in found.differences] == [
        ("changed", "seven of", "eleven", 200),
        ("added", "", "very much", 2_200),
    ]
    assert found.differing_words == 4
    assert (found.stored_engine, found.replayed_engine, found.replayed_model) == ("a", "b", "db")


def test_case_and_punctuation_are_not_words_but_letters() -> None:
    found = compare("s", "7", "c", [final("Yes, seven.")], [final("yes seven")])
    assert not found.identical
    assert found.differing_words == 0


def test_chinese_is_compared_by_characters() -> None:
    found = compare("s", "7", "c", [final("你好吗", timed=False)], [final("你好马", timed=False)])
    assert [(each.stored, each.replayed) for each in found.differences] == [("吗", "马")]
    assert found.stored_words == 3


def test_other_bounds_are_not_identical() -> None:
    found = compare("s", "7", "c", [final("yes seven")], [final("yes"), final("seven", 16_000)])
    assert not found.identical
    assert (found.stored_segments, found.replayed_segments, found.differing_words) == (1, 2, 0)


def test_nothing_against_something() -> None:
    assert compare("s", "7", "c", [], [final("yes")]).differing_words == 1
    assert compare("s", "7", "c", [final("yes")], []).differing_words == 1
    assert compare("s", "7", "c", [], []).identical


@given(stored=WORDS, replayed=WORDS)
def test_the_pieces_make_up_both_texts(stored: list[str], replayed: list[str]) -> None:
    found = pieces([final(" ".join(stored))], [final(" ".join(replayed))])
    assert [word for piece in found for word in piece.stored] == stored
    assert [word for piece in found for word in piece.replayed] == replayed
    assert all((piece.kind == "same") == (piece.stored == piece.replayed) for piece in found)
