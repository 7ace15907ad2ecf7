import pytest

from ops.evaluate.wer.scoring import Confusion, score


def test_it_counts_and_names_what_was_taken_for_what():
    found = score(["give me a latte", "four two seven", "an espresso"], ["give me latte", "four two eleven", "an espresso please"])
    assert (found.words, found.substitutions, found.deletions, found.insertions) == (9, 1, 1, 2)
    assert found.wer == round(4 / 9, 4)
    assert (found.utterances, found.utterances_wrong) == (3, 3)
    assert Confusion(said="a", written="", count=1) in found.confusions
    assert Confusion(said="", written="please", count=1) in found.confusions


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("four two seven one", "4271"),
        ("Can I get a small coffee?", "can i get a small coffee"),
        ("three one one", "Three, one, 1."),
        ("i'd like twelve ounces", "I would like 12 ounces."),
    ],
)
def test_two_ways_of_writing_are_no_error(said, written):
    assert score([said], [written]).wer == 0


def test_a_wrong_digit_is_one_error():
    found = score(["four two seven one"], ["4272"])
    assert (found.words, found.substitutions) == (4, 1)
    assert found.confusions == (Confusion(said="1", written="2", count=1),)


def test_nothing_written_is_all_missing():
    found = score(["give me a latte"], [""])
    assert (found.wer, found.deletions) == (1.0, 4)
