"""What is killed, in which way and in which moment: a schedule that follows from a seed alone.

Strikes come in rounds. Each round has every kind of kill that was asked for, in an order of its own, so that a short run is no run of the
same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from streams.errors import UserError

__all__ = ["GROUPS", "KINDS", "ROLES", "Kind", "Layout", "Moment", "Role", "Strike", "kinds_of", "make_plan"]

Kind = Literal["kill", "freeze", "pair", "rebalance", "broker", "recorder", "gateway", "stall", "rolling", "join"]
Moment = Literal["any", "segment"]
Layout = Literal["stages", "all"]
#: What a worker does: one stage, or all of them.
Role = Literal["vad", "features", "inference", "all"]

#: The kinds of workers that each layout has.
ROLES: Final[dict[Layout, tuple[Role, ...]]] = {"stages": ("vad", "features", "inference"), "all": ("all",)}

#: What each kind does, for people, and how many kills it counts. Planned ones kill nobody.
KINDS: Final[dict[Kind, tuple[str, int]]] = {
    "kill": ("SIGKILL to a worker", 1),
    "freeze": ("SIGSTOP to a worker, SIGCONT when another has taken over", 1),
    "pair": ("SIGKILL to two workers at once, of different stages where there are such", 2),
    "rebalance": ("SIGKILL to a worker, and to the other one while the first one's successor joins", 2),
    "broker": ("SIGKILL to a broker", 1),
    "recorder": ("SIGKILL to a recorder", 1),
    "gateway": ("SIGKILL to the gateway", 1),
    "stall": ("SIGSTOP to all recognition engines for 10 s: nobody takes over, all have a backlog to catch up with", 1),
    "rolling": ("a planned restart of all workers of a stage, one after the other", 0),
    "join": ("a planned third worker that joins a stage and leaves it again", 0),
}
#: Names for several kinds.
GROUPS: Final[dict[str, tuple[Kind, ...]]] = {
    "workers": ("kill", "freeze", "pair", "rebalance"),
    "planned": ("rolling", "join"),
}

#: How often a kind comes in a round: workers of each stage are what dies most. Planned changes come one in each round, in turn.
_ROUND: Final[tuple[tuple[Kind, int], ...]] = (
    ("kill", 3),
    ("freeze", 2),
    ("pair", 1),
    ("rebalance", 1),
    ("broker", 2),
    ("recorder", 1),
    ("gateway", 1),
    ("stall", 1),
)
#: Which broker of three: the one that leads a busy partition, that coordinates the stages' groups, that is the cluster's controller.
BROKER_ROLES: Final = ("leader", "coordinator", "controller")
#: After all is well again, so long passes until the next strike.
_PAUSE_S: Final = (1.0, 3.0)
#: A supervisor starts a dead process again after so long.
_RESTART_S: Final = (0.0, 2.0)
_FREEZE_S: Final = (3.0, 10.0)
_STALL_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One blow, or one planned change.

    Attributes:
        kind: what is done.
        kills: how many processes it kills or stops.
        roles: what the workers do that are hit; empty where it is not about workers.
        number: which of several equal processes.
        moment: ``segment``: while a channel of the victim is in the middle of a segment.
        broker: what the broker does that is hit, where there are several.
        pause_s: how long all has been well before.
        restart_s: how long the dead stay dead.
        freeze_s: how long the stopped stay stopped.
    """

    kind: Kind
    kills: int
    roles: tuple[Role, ...] = ()
    number: int = 0
    moment: Moment = "any"
    broker: str = ""
    pause_s: float = 0.0
    restart_s: float = 0.0
    freeze_s: float = 0.0


def kinds_of(names: Sequence[str]) -> tuple[Kind, ...]:
    """Return the kinds that names mean.

    Raises:
        UserError: a name means none.
    """
    kinds: list[Kind] = []
    for name in names:
        if name not in KINDS and name not in GROUPS:
            raise UserError(f"There is nothing called {name!r} to strike", f"Choose among {', '.join([*GROUPS, *KINDS])}.")
        kinds += [kind for kind in KINDS if kind == name or kind in GROUPS.get(name, ())]
    return tuple(dict.fromkeys(kinds))


def make_plan(
    kills: int, seed: int, kinds: Sequence[Kind], *, layout: Layout = "stages", brokers: int = 1, workers: int = 2, recorders: int = 2
) -> list[Strike]:
    """Return the strikes, in order, with exactly so many kills where a kind that kills one is among them, else at least so many.

    Args:
        kills: how many.
        seed: the same one gives the same plan.
        kinds: what may come.
        layout: which kinds of workers there are.
        brokers: how many there are.
        workers: of each kind.
        recorders: how many there are.

    Raises:
        UserError: none of the kinds kills.
    """
    if workers == 1:
        # There is no other one to kill while the first one's successor joins.
        kinds = [kind for kind in kinds if kind != "rebalance"]
    if kills and not any(KINDS[kind][1] for kind in kinds):
        raise UserError("Nothing of that kills anything", "Add workers, broker, recorder or gateway, or ask for 0 kills.")
    rng = random.Random(seed)  # noqa: S311 reproducible, not secret
    # Over the rounds, each kind has its turn at each stage, and at each part that a broker plays.
    turns = {kind: itertools.count(rng.randrange(len(BROKER_ROLES))) for kind in KINDS}
    several = {"broker": brokers, "recorder": recorders, "gateway": 1}
    planned = itertools.cycle([kind for kind in kinds if not KINDS[kind][1]])
    plan: list[Strike] = []
    left = kills
    while left > 0:
        deck = [kind for kind, times in _ROUND if kind in kinds for _ in range(times)]
        deck += itertools.islice(planned, 1)
        rng.shuffle(deck)
        for kind in deck:
            if left <= 0:
                break
            if KINDS[kind][1] > left and any(KINDS[other][1] == 1 for other in kinds):
                continue
            plan.append(_strike(kind, next(turns[kind]), rng, ROLES[layout], several=several.get(kind, workers)))
            left -= plan[-1].kills
    return plan


def _strike(kind: Kind, turn: int, rng: random.Random, roles: Sequence[Role], *, several: int) -> Strike:
    hit = {"pair": 2, "broker": 0, "recorder": 0, "gateway": 0}.get(kind, 1)
    # Engines are what the last stage has.
    turn = len(roles) - 1 if kind == "stall" else turn
    return Strike(
        kind=kind,
        kills=KINDS[kind][1],
        roles=tuple(roles[(turn + each) % len(roles)] for each in range(hit)),
        number=rng.randrange(several),
        moment=rng.choice(("segment", "segment", "any")) if kind in ("kill", "freeze", "pair") else "any",
        broker=BROKER_ROLES[turn % len(BROKER_ROLES)] if kind == "broker" and several > 1 else "",
        pause_s=round(rng.uniform(*_PAUSE_S), 2),
        restart_s=round(rng.uniform(*_RESTART_S), 2),
        freeze_s={"freeze": round(rng.uniform(*_FREEZE_S), 2), "stall": _STALL_S}.get(kind, 0.0),
    )
