from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.chaos.plan import BROKER_ROLES, GROUPS, KINDS, ROLES, kinds_of, make_plan
from streams.errors import UserError

ALL = tuple(KINDS)
KILLING = [kind for kind, (_, kills) in KINDS.items() if kills]


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    assert make_plan(50, 7, ALL) == make_plan(50, 7, ALL)
    assert make_plan(50, 7, ALL) != make_plan(50, 8, ALL)


@given(st.integers(0, 60), st.integers(0, 1_000), st.sets(st.sampled_from(ALL), min_size=1).map(tuple), st.sampled_from((1, 3)))
def test_there_are_as_many_kills_as_were_asked_for(kills: int, seed: int, kinds: tuple, brokers: int) -> None:  # type: ignore[type-arg]
    if kills and not set(kinds) & set(KILLING):
        with pytest.raises(UserError, match="kills anything"):
            make_plan(kills, seed, kinds)
        return
    plan = make_plan(kills, seed, kinds, brokers=brokers)
    counted = sum(strike.kills for strike in plan)
    exact = any(KINDS[kind][1] == 1 for kind in kinds)
    assert counted == kills if exact else kills <= counted <= kills + 1
    assert {strike.kind for strike in plan} <= set(kinds)
    assert all(0 <= strike.number < 3 and 0 <= strike.restart_s <= 2 for strike in plan)


def test_fifty_kills_hit_every_kind_every_stage_and_every_role_of_a_broker() -> None:
    plan = make_plan(50, 0, ALL, brokers=3)
    assert {strike.kind for strike in plan} == set(ALL)
    for kind in ("kill", "freeze"):
        hit = Counter(role for strike in plan if strike.kind == kind for role in strike.roles)
        assert set(hit) == set(ROLES["stages"])
    assert all(len(set(strike.roles)) == 2 for strike in plan if strike.kind == "pair")
    assert {strike.broker for strike in plan if strike.kind == "broker"} == set(BROKER_ROLES)
    assert any(strike.moment == "segment" for strike in plan)
    assert all(3 <= strike.freeze_s <= 10 for strike in plan if strike.kind == "freeze")


def test_names_stand_for_kinds_and_a_wrong_one_is_told() -> None:
    assert kinds_of(["workers", "broker", "kill"]) == (*GROUPS["workers"], "broker")
    with pytest.raises(UserError, match="nothing called 'brokers' to strike"):
        kinds_of(["brokers"])


def test_workers_of_all_stages_are_hit_as_such_and_a_lone_one_never_while_its_successor_joins() -> None:
    plan = make_plan(50, 0, ALL, layout="all", workers=3)
    assert {strike.roles for strike in plan} == {(), ("all",), ("all", "all")}
    assert "rebalance" not in {strike.kind for strike in make_plan(50, 0, ALL, workers=1)}
