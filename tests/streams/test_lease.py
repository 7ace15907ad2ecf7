from __future__ import annotations

from streams.lease import Lease


class Clock:
    """Time that a test moves on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def running(generation: int = 7) -> tuple[Lease, Clock]:
    """Return a lease of a process that has run for a second, and its clock."""
    clock = Clock()
    lease = Lease(0.5, clock)
    for _ in range(10):
        lease.tick()
        clock.now_s += 0.1
        lease.confirm(generation, clock.now_s)
    return lease, clock


def test_a_process_that_runs_may_speak() -> None:
    lease, _ = running()
    assert lease.holds(7)


def test_one_that_has_not_begun_to_tick_may_too() -> None:
    clock = Clock()
    lease = Lease(0.5, clock)
    clock.now_s += 60
    assert lease.holds(-1)


def test_one_that_stood_still_may_not_until_the_group_has_answered_a_new_question() -> None:
    lease, clock = running()
    asked_before_s = clock.now_s
    clock.now_s += 10
    assert not lease.holds(7)
    lease.tick()
    assert not lease.holds(7)
    # An answer that came while it stood still.
    lease.confirm(7, asked_before_s)
    assert not lease.holds(7)
    clock.now_s += 0.1
    lease.confirm(7, clock.now_s)
    assert lease.holds(7)


def test_what_was_owned_in_an_earlier_generation_stays_unsaid() -> None:
    lease, clock = running()
    clock.now_s += 10
    lease.tick()
    lease.confirm(8, clock.now_s)
    assert not lease.holds(7)
    assert lease.holds(8)
    # The next rebalance finds it awake.
    clock.now_s += 0.1
    lease.tick()
    assert lease.holds(9)


def test_to_stand_still_once_more_begins_anew() -> None:
    lease, clock = running()
    for generation in (8, 9):
        clock.now_s += 10
        lease.tick()
        assert not lease.holds(generation)
        lease.confirm(generation, clock.now_s)
        assert lease.holds(generation)


def test_silence_of_the_group_alone_is_no_reason() -> None:
    """Its coordinator may be dead: records flow on meanwhile."""
    lease, clock = running()
    for _ in range(100):
        clock.now_s += 0.1
        lease.tick()
    assert lease.holds(7)
