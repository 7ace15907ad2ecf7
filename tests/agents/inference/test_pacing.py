"""The pace of steps: what load and measured costs make of it."""

from __future__ import annotations

import itertools

import pytest

from agents.inference.pacing import AdaptivePacing, FixedPacing, Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run(pacing: AdaptivePacing, clock: Clock, active: int, seconds: float, fixed_s: float, each_s: float) -> list[Pace]:
    """Let steps happen as they would with so many channels that speak without a pause; return the paces, one a second."""
    paces = []
    end_s = clock.now_s + seconds
    blocks = 1
    while clock.now_s < end_s:
        pace = pacing.pace(active)
        if not paces or clock.now_s >= len(paces) + end_s - seconds:
            paces.append(pace)
        took_s = fixed_s + each_s * blocks
        pacing.observe(blocks, took_s)
        period_s = max(took_s, pace.max_wait_ms / 1_000)
        clock.now_s += period_s
        blocks = max(1, min(pace.max_batch, round(active * period_s / 0.2)))
    return paces


@pytest.mark.parametrize(("active", "size"), [(0, 32), (20, 32), (21, 48), (40, 48), (41, 64), (500, 64)])
def test_the_size_follows_the_active_channels(active: int, size: int) -> None:
    assert AdaptivePacing().pace(active).max_batch == size


def test_the_size_moves_smoothly_and_only_when_looked_at() -> None:
    clock = Clock()
    pacing = AdaptivePacing(clock)
    run(pacing, clock, 10, 9, 0.004, 0.0005)
    sizes = [pace.max_batch for pace in run(pacing, clock, 50, 62, 0.004, 0.0005)]
    changes = [place for place in range(1, len(sizes)) if sizes[place] != sizes[place - 1]]
    assert sizes[0] == 32
    assert sizes[-1] == 64
    assert {later - sooner for sooner, later in itertools.pairwise(sizes)} == {0, 8}
    assert all(later - sooner >= 9 for sooner, later in itertools.pairwise(changes))


def steps_per_s(active: int, wait_ms: float, fixed_s: float, each_s: float) -> float:
    """Return how often steps happen when blocks come evenly."""
    blocks_per_s = active / 0.2
    return 1 / ((wait_ms / 1_000 + fixed_s) / (1 - each_s * blocks_per_s))


@pytest.mark.parametrize(("active", "fixed_s", "each_s"), [(50, 0.006, 0.0006), (30, 0.012, 0.0025), (50, 0.012, 0.002)])
def test_a_busy_engine_waits_and_so_has_more_time(active: int, fixed_s: float, each_s: float) -> None:
    clock = Clock()
    pacing = AdaptivePacing(clock)
    waits_ms = [pace.max_wait_ms for pace in run(pacing, clock, active, 90, fixed_s, each_s)]
    assert waits_ms[-1] > 20
    assert max(waits_ms) <= 50
    assert abs(waits_ms[-1] - waits_ms[-11]) < 8, "it settles"
    fixed_share = fixed_s * steps_per_s(active, waits_ms[-1], fixed_s, each_s)
    assert fixed_share < 0.6 * fixed_s * steps_per_s(active, 2.0, fixed_s, each_s)


@pytest.mark.parametrize("active", [1, 5, 50])
def test_an_engine_that_has_time_is_not_waited_for(active: int) -> None:
    clock = Clock()
    pacing = AdaptivePacing(clock)
    run(pacing, clock, active, 60, 0.0001, 0.00001)
    assert pacing.pace(active).max_wait_ms == pytest.approx(2.0, abs=0.5)


def test_costs_and_channels_are_read_off_the_steps() -> None:
    pacing = AdaptivePacing()
    assert pacing.channels == 0
    for _ in range(50):
        for blocks in (1, 8, 30, 50):
            pacing.observe(blocks, 0.005 + 0.001 * blocks)
    assert pacing.costs_s == pytest.approx((0.005, 0.001))
    # A step each 55 ms costs 18.2 ms of the 160 in 200 that may be taken: 141 blocks of 1 ms are left.
    assert pacing.channels == 141


def test_a_fixed_pace_stays() -> None:
    pacing = FixedPacing(3, 1.0)
    pacing.observe(1, 1.0)
    assert pacing.pace(50) == Pace(3, 1.0)
