from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.chaos.takeover import Answers, Mark, distribution, measure

S = 1_000_000
END_US = 30 * S


def channel(partition: int, late_ms: dict[tuple[float, float], float]) -> Answers:
    """A channel with a frame every 200 ms, answered after 50 ms, but for those captured within the spans given, in s."""
    captured_us = np.arange(200_000, END_US, 200_000, dtype=np.int64)
    latency_ms = np.full(len(captured_us), 50.0)
    for (start_s, end_s), each_ms in late_ms.items():
        latency_ms[(captured_us >= start_s * S) & (captured_us < end_s * S)] = each_ms
    return Answers(partition, captured_us, captured_us + (latency_ms * 1_000).astype(np.int64))


def catching_up(partition: int, at_s: float, until_s: float) -> Answers:
    """A channel whose frames captured from one time on are all answered at another one."""
    calm = channel(partition, {})
    held = (calm.captured_us >= at_s * S) & (calm.captured_us < until_s * S)
    return Answers(partition, calm.captured_us, np.where(held, np.int64(until_s * S + 50_000), calm.answered_us))


def mark(at_s: float, *partitions: int, what: str = "kill", everybody: bool = False) -> Mark:
    return Mark(at_us=round(at_s * S), what=what, kind="kill", target="vad-0", partitions=partitions, everybody=everybody)


def test_takeover_ends_with_the_answer_to_the_first_frame_from_which_all_is_well() -> None:
    (times,) = measure([mark(10.1, 1)], {"1": catching_up(1, 10.1, 11.5), "2": channel(2, {})}, END_US)
    # The frames of 11.4 s and earlier wait till 11.55; that of 11.4 has waited 150 ms only, so all is well from 11.4 on.
    assert times.takeover_ms == {"1": pytest.approx(1_450)}
    assert times.stall_ms == pytest.approx(50)


def test_one_answer_in_time_between_late_ones_is_no_end() -> None:
    late = channel(1, {(10, 11): 900, (11.2, 12): 500})
    (times,) = measure([mark(10, 1)], {"1": late}, END_US)
    # The last late one is captured at 11.8 s.
    assert times.takeover_ms["1"] == pytest.approx(2_300)


def test_silence_that_another_stage_answers_ahead_of_speech_is_no_end() -> None:
    (times,) = measure([mark(10, 1)], {"1": channel(1, {(10, 10.5): 4_000})}, END_US)
    assert times.takeover_ms["1"] == pytest.approx(4_400)


def test_a_replay_of_frames_captured_before_the_kill_counts_for_nothing() -> None:
    answers = channel(1, {(10, 12): 400})
    early = answers.captured_us < 10 * S
    replayed = Answers(1, answers.captured_us, np.where(early, answers.answered_us + 700_000, answers.answered_us))
    (times,) = measure([mark(10, 1)], {"1": replayed}, END_US)
    assert times.takeover_ms["1"] == pytest.approx(2_200)


def test_a_channel_that_was_never_late_is_not_counted() -> None:
    (times,) = measure([mark(10, 1)], {"1": channel(1, {})}, END_US)
    assert (times.takeover_ms, times.untouched) == ({}, 1)


def test_what_is_not_well_before_the_next_strike_counts_up_to_it() -> None:
    times, _ = measure([mark(10, 1), mark(15, 2)], {"1": channel(1, {(10, 20): 400}), "2": channel(2, {})}, END_US)
    assert times.takeover_ms["1"] == pytest.approx(5_000)
    assert times.unfinished == 1


def test_frames_that_were_never_answered_are_late() -> None:
    lost = channel(1, {})
    answered_us = np.where(lost.captured_us == 12 * S, np.iinfo(np.int64).max, lost.answered_us)
    (times,) = measure([mark(10, 1)], {"1": Answers(1, lost.captured_us, answered_us)}, END_US)
    assert times.takeover_ms["1"] > 1e6


def test_a_stall_is_the_worst_of_the_channels_that_nobody_owned_who_was_struck() -> None:
    channels = {"1": channel(1, {(10, 12): 2_000}), "2": channel(2, {(14, 14.5): 800}), "3": channel(3, {(9, 9.5): 5_000})}
    (times,) = measure([mark(10, 1)], channels, END_US)
    assert (times.stall_ms, times.stalled_channel) == (pytest.approx(800), "2")


def test_frames_on_their_way_when_the_next_is_struck_are_no_stall_of_the_one_before() -> None:
    others = channel(2, {(14.8, 16): 5_000})
    first, second = measure([mark(10, 1), mark(15, 3)], {"1": channel(1, {}), "2": others, "3": channel(3, {})}, END_US)
    assert (first.stall_ms, second.stall_ms) == (pytest.approx(50), pytest.approx(5_000))


def test_two_struck_at_once_are_no_others_to_each_other() -> None:
    channels = {"1": channel(1, {(10, 12): 2_000}), "2": channel(2, {(10, 12): 1_500}), "3": channel(3, {})}
    one, other = measure([mark(10, 1), mark(10.001, 2)], channels, END_US)
    assert one.takeover_ms.keys() == {"1"}
    assert other.takeover_ms.keys() == {"2"}
    assert one.stall_ms == other.stall_ms == pytest.approx(50)


def test_where_everybody_is_struck_there_are_no_others() -> None:
    (times,) = measure([mark(10, everybody=True)], {"1": channel(1, {(10, 11): 700}), "2": channel(2, {(10, 11): 700})}, END_US)
    assert times.takeover_ms.keys() == {"1", "2"}
    assert times.stall_ms is None


@given(st.integers(0, 20), st.integers(2, 30))
def test_takeover_is_as_long_as_the_frames_were_late(start: int, frames: int) -> None:
    """However the strike lies to the frames, a takeover is the time up to the answer of the last late frame."""
    at_s = 5.003 + start * 0.013
    until_s = at_s + frames * 0.2
    (times,) = measure([mark(at_s, 1)], {"1": channel(1, {(at_s, until_s): 301})}, END_US)
    captured_us = channel(1, {}).captured_us
    first_good_us = captured_us[captured_us >= round(until_s * S)][0]
    assert times.takeover_ms["1"] == pytest.approx((first_good_us - 200_000 + 301_000 - round(at_s * S)) / 1_000, abs=1)


def test_distributions() -> None:
    assert distribution([]) == {"count": 0, "p50": None, "p95": None, "max": None}
    assert distribution([1.0, 2.0, 3.0]) == {"count": 3, "p50": 2, "p95": 3, "max": 3}
