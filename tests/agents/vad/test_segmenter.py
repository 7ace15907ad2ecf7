import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.vad.segmenter import Cancelled, Closed, Opened, Rules, Segmenter
from streams.settings import load_settings

RULES = Rules.of(load_settings())
HOP = 160


def hops(*stretches):
    """Decisions from lengths in hops, silence first."""
    return np.concatenate([np.full(length, turn % 2 == 1) for turn, length in enumerate(stretches)])


def events(decisions, sizes=(None,), rules=RULES, finish=True):
    segmenter, found, begin, turn = Segmenter(rules), [], 0, 0
    while begin < len(decisions):
        size = sizes[turn % len(sizes)] or len(decisions)
        found += segmenter.advance(begin, decisions[begin : begin + size])
        begin, turn = begin + size, turn + 1
    return found + (segmenter.finish(len(decisions) * HOP, "session_end") if finish else [])


def test_a_segment_has_preroll_and_tail():
    assert events(hops(100, 50, 100)) == [Opened(0, 70 * HOP), Closed(0, 70 * HOP, 170 * HOP, "pause")]


def test_preroll_stops_at_the_start_of_the_audio_and_at_the_segment_before():
    found = events(hops(10, 50, 31, 50, 100))
    assert found == [
        Opened(0, 0),
        Closed(0, 0, 80 * HOP, "pause"),
        Opened(1, 80 * HOP),
        Closed(1, 80 * HOP, 161 * HOP, "pause"),
    ]


def test_a_pause_shorter_than_the_closing_does_not_split_and_one_as_long_does():
    assert [type(event) for event in events(hops(50, 40, 29, 40, 60))] == [Opened, Closed]
    assert [type(event) for event in events(hops(50, 40, 30, 40, 60))] == [Opened, Closed, Opened, Closed]


def test_short_speech_is_cancelled_and_its_number_is_used_up():
    found = events(hops(50, 29, 60, 30, 60))
    assert found[1] == Cancelled(0, 20 * HOP, 79 * HOP, 99 * HOP)
    assert found[2:] == [Opened(1, 109 * HOP), Closed(1, 109 * HOP, 189 * HOP, "pause")]


def test_speech_after_a_cancelled_segment_may_reach_back_into_it():
    found = events(hops(50, 5, 30, 40, 60))
    assert found[1] == Cancelled(0, 20 * HOP, 55 * HOP, 75 * HOP)
    assert found[2] == Opened(1, 55 * HOP)


def test_speech_without_any_pause_is_cut_at_the_cap_and_goes_on_right_there():
    found = events(hops(0, 4_010, 60))
    assert found[:4] == [Opened(0, 0), Closed(0, 0, 320_000, "cap"), Opened(1, 320_000), Closed(1, 320_000, 640_000, "cap")]
    # Ten hops would be too short to be speech, but they are the rest of something longer.
    assert found[4:] == [Opened(2, 640_000), Closed(2, 640_000, 4_030 * HOP, "pause")]


def test_speech_that_ends_with_the_cap_leaves_nothing_behind():
    assert events(hops(0, 2_000, 60)) == [Opened(0, 0), Closed(0, 0, 320_000, "cap")]


def test_towards_the_cap_shorter_pauses_close():
    # 18 s into a segment, two fifths of the cap's last quarter are left, so 120 ms close it.
    found = events(hops(0, 1_800, 13, 500, 60))
    assert found[1] == Closed(0, 0, 1_812 * HOP, "cap")
    assert found[2] == Opened(1, 1_812 * HOP)
    # The same pause early in a segment does not.
    assert events(hops(0, 1_000, 13, 500, 60))[1].end == 1_533 * HOP


def test_at_the_end_of_the_audio_the_open_segment_ends_with_it():
    assert events(hops(50, 40, 5))[-1] == Closed(0, 20 * HOP, 95 * HOP, "session_end")
    assert events(hops(50, 40, 25))[-1] == Closed(0, 20 * HOP, 110 * HOP, "session_end")


def test_after_a_restart_no_segment_reaches_back_before_it():
    segmenter = Segmenter(RULES)
    segmenter.restart(100 * HOP + 7)
    assert segmenter.advance(100, hops(5, 40)) == [Opened(0, 100 * HOP + 7)]


RULE_SETS = st.builds(
    lambda closing, minimum, preroll, tail, cap: Rules(closing, minimum, preroll, min(tail, closing), cap),
    *[st.sampled_from([0, 40, 160, 1_000, 4_800])] * 4,
    st.sampled_from([16_000, 20_000, 50_001]),
)
STRETCHES = st.lists(st.integers(0, 80), min_size=1, max_size=30)


@given(STRETCHES, st.lists(st.integers(1, 60), min_size=1, max_size=6), RULE_SETS)
def test_events_do_not_depend_on_how_decisions_arrive(stretches, sizes, rules):
    decisions = hops(*stretches)
    assert events(decisions, sizes, rules) == events(decisions, (None,), rules)


@given(STRETCHES, RULE_SETS)
def test_segments_are_in_order_and_hold_all_speech(stretches, rules):
    decisions = hops(*stretches)
    found = events(decisions, (None,), rules)
    assert [event.segment for event in found] == [number // 2 for number in range(len(found))]
    covered = np.zeros(len(decisions) * HOP, np.bool_)
    end = 0
    for opened, left in zip(found[::2], found[1::2], strict=True):
        assert isinstance(opened, Opened)
        assert left.start == opened.start >= end
        assert left.end - left.start <= rules.cap
        if isinstance(left, Closed):
            end = left.end
            assert left.end > left.start
        covered[left.start : left.end] = True
    speech = np.repeat(decisions, HOP)
    # A cut at the cap inside a hop leaves that hop's rest out if the next one is silent.
    assert (speech & ~covered).sum() < HOP * max(1, len(found))
    if rules.cap % HOP == 0:
        assert not (speech & ~covered).any()


@given(STRETCHES, RULE_SETS)
def test_what_was_certain_is_never_taken_back(stretches, rules):
    segmenter, certain = Segmenter(rules), 0
    for hop, decision in enumerate(hops(*stretches)):
        for event in segmenter.advance(hop, np.array([decision])):
            if isinstance(event, Opened):
                certain = 0
            else:
                assert event.end >= certain
        if segmenter.standing.open:
            assert segmenter.certain_end >= certain
            certain = segmenter.certain_end


@given(STRETCHES, RULE_SETS)
def test_no_segment_starts_before_what_was_called_the_earliest(stretches, rules):
    segmenter, earliest = Segmenter(rules), 0
    for hop, decision in enumerate(hops(*stretches)):
        for event in segmenter.advance(hop, np.array([decision])):
            if isinstance(event, Opened):
                assert event.start >= earliest
        earliest = segmenter.earliest_start(hop + 1)


def test_rules_come_from_the_settings():
    assert Rules.of(load_settings(vad_closing_ms=250, vad_tail_ms=100)) == Rules(4_000, 4_800, 4_800, 1_600, 320_000)
    assert pytest.approx(RULES.cap / 16_000) == 20
