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


@pytest.mark.parametrize(("active", "fixed_s", "each_s"), [(50, 0.004, 0.0005), (30, 0.002, 0.001), (50, 0.006, 0.0012)])
def test_the_wait_keeps_the_fixed_part_small(active: int, fixed_s: float, each_s: float) -> None:
    clock = Clock()
    pacing = AdaptivePacing(clock)
    run(pacing, clock, active, 90, fixed_s, each_s)
    found_fixed_s, found_each_s = pacing.costs_s
    if found_each_s:  # steps of one size tell nothing of the parts
        assert found_fixed_s + active * found_each_s == pytest.approx(fixed_s + active * each_s, rel=0.5)
    wait_ms = pacing.pace(active).max_wait_ms
    assert 2 <= wait_ms <= 75
    assert fixed_s <= 0.2 * (wait_ms / 1_000 + fixed_s + each_s)


def test_an_engine_that_costs_nothing_is_not_waited_for() -> None:
    clock = Clock()
    pacing = AdaptivePacing(clock)
    for _ in range(100):
        for blocks in (1, 5, 20):
            pacing.observe(blocks, 1e-5)
        clock.now_s += 1
        pacing.pace(5)
    assert pacing.pace(5).max_wait_ms == pytest.approx(2.0, abs=0.1)


def test_costs_and_channels_are_read_off_the_steps() -> None:
    pacing = AdaptivePacing()
    assert pacing.channels == 0
    for _ in range(50):
        for blocks in (1, 8, 30, 50):
            pacing.observe(blocks, 0.005 + 0.001 * blocks)
    assert pacing.costs_s == pytest.approx((0.005, 0.001))
    # 2.5 steps in 200 ms cost 12.5 ms of the 160 that may be taken: 147 blocks of 1 ms are left.
    assert pacing.channels == 147


def test_a_fixed_pace_stays() -> None:
    pacing = FixedPacing(3, 1.0)
    pacing.observe(1, 1.0)
    assert pacing.pace(50) == Pace(3, 1.0)
