"""What two hypotheses in a row agree on is stable."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agents.inference.agreement import Agreement


def test_two_in_a_row() -> None:
    agreement = Agreement()
    assert agreement.update([" Go", " four"])
    assert (agreement.text, agreement.stable_text) == ("Go four", "")
    assert agreement.update([" Go", " forward", " ten."])
    assert (agreement.text, agreement.stable_text) == ("Go forward ten.", "Go")
    assert agreement.update([" Go", " forward", " ten", " meters."])
    assert (agreement.text, agreement.stable_text) == ("Go forward ten meters.", "Go forward ten")
    assert agreement.update([" Go", " forward", " ten", " meters."])
    assert agreement.stable_text == "Go forward ten meters."
    assert not agreement.update([" Go", " forward", " ten", " meters."])


def test_chinese_has_no_spaces() -> None:
    agreement = Agreement()
    agreement.update(["你", "好"])
    agreement.update(["你", "好", "吗"])
    assert (agreement.text, agreement.stable_text) == ("你好吗", "你好")


@given(st.lists(st.lists(st.sampled_from([" a", " b", " A,", " c."]), max_size=6), max_size=8))
def test_the_stable_text_begins_the_text(hypotheses: list[list[str]]) -> None:
    agreement = Agreement()
    for words in hypotheses:
        agreement.update(words)
        assert agreement.text == "".join(words).strip()
        assert agreement.text.startswith(agreement.stable_text)
