"""What is growth, and what is noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.soak.growth import after_warm_up, slope, trend


def test_a_leak_is_found_under_noise_and_outliers() -> None:
    rng = np.random.default_rng(0)
    calls = np.arange(0, 10_000, 100, dtype=np.float64)
    values = 200e6 + 3_000 * calls + rng.normal(0, 1e6, len(calls))
    values[::5] += 50e6  # a sweep, seen in every fifth sample
    steep, _ = slope(calls, values)
    assert steep == pytest.approx(3_000, rel=0.1)


def test_breathing_is_no_growth() -> None:
    calls = np.arange(0, 10_000, 50, dtype=np.float64)
    breathing = trend("rss", "bytes", calls.tolist(), (200e6 + 5e6 * np.sin(calls / 300)).tolist(), 1_024)
    leak = trend("rss", "bytes", calls.tolist(), (200e6 + 2_000 * calls).tolist(), 1_024)
    assert breathing is not None
    assert leak is not None
    assert breathing.is_flat
    assert not leak.is_flat
    assert (leak.first, leak.last, leak.per_call) == (pytest.approx(200e6), pytest.approx(219.9e6), pytest.approx(2_000))


def test_one_handle_for_each_thousand_calls_is_growth_and_one_in_all_is_not() -> None:
    calls = [float(number) for number in range(0, 10_000, 100)]
    leaking = trend("handles", "", calls, [40 + call // 1_000 for call in calls], 0.5 / 10_000)
    once = trend("handles", "", calls, [40 + (call > 3_000) for call in calls], 0.5 / 10_000)
    assert leaking is not None
    assert once is not None
    assert not leaking.is_flat
    assert once.is_flat


@given(start=st.integers(-10_000, 10_000), steep=st.integers(-1_000, 1_000), count=st.integers(2, 40))
def test_a_line_is_found_exactly(start: int, steep: int, count: int) -> None:
    calls = list(range(count))
    assert slope(calls, [start + steep * call for call in calls]) == (steep, start)


def test_too_little_tells_nothing() -> None:
    assert trend("rss", "bytes", [0.0, 1.0], [1.0, 2.0], 1.0) is None
    assert trend("rss", "bytes", [5.0] * 20, [1.0] * 20, 1.0) is None
    with pytest.raises(ValueError, match="two places"):
        slope([1.0, 1.0], [2.0, 3.0])


@pytest.mark.parametrize(("seconds", "from_s"), [(100, 50), (200, 90), (600, 150)])
def test_the_warm_up_is_left_out(seconds: int, from_s: int) -> None:
    at_s = [float(second) for second in range(seconds + 1)]
    assert after_warm_up(at_s, share=0.25, least_s=90) == from_s
    assert after_warm_up([], share=0.25, least_s=90) == 0
