"""What is killed, in which way and in which moment: a schedule that follows from a seed alone.

Strikes come in rounds. Each round has every kind that was asked for, in an order of its own, so that a short run is no run of the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from streams.errors import UserError

__all__ = ["GROUPS", "KINDS", "Kind", "Moment", "Strike", "kinds_of", "make_plan"]

Kind = Literal["kill", "freeze", "pair", "rebalance", "broker", "recorder", "gateway", "rolling", "join"]
Moment = Literal["any", "segment"]
Stage = Literal["vad", "features", "inference"]

STAGES: Final[tuple[Stage, ...]] = ("vad", "features", "inference")

#: What each kind does, for people, and how many kills it counts. Planned ones kill nobody.
KINDS: Final[dict[Kind, tuple[str, int]]] = {
    "kill": ("SIGKILL to a worker", 1),
    "freeze": ("SIGSTOP to a worker, SIGCONT when another has taken over", 1),
    "pair": ("SIGKILL to two workers of different stages at once", 2),
    "rebalance": ("SIGKILL to a worker, and to the other one while the first one's successor joins", 2),
    "broker": ("SIGKILL to a broker", 1),
    "recorder": ("SIGKILL to a recorder", 1),
    "gateway": ("SIGKILL to the gateway", 1),
    "rolling": ("a planned restart of all workers of a stage, one after the other", 0),
    "join": ("a planned third worker that joins a stage and leaves it again", 0),
}
#: Names for several kinds.
GROUPS: Final[dict[str, tuple[Kind, ...]]] = {
    "workers": ("kill", "freeze", "pair", "rebalance"),
    "planned": ("rolling", "join"),
}

#: How often a kind comes in a round: workers of each stage are what dies most. A kind with a stage comes once for each of these stages.
_ROUND: Final[tuple[tuple[Kind, tuple[Stage | None, ...]], ...]] = (
    ("kill", ("vad", "features", "inference")),
    ("freeze", ("vad", "inference")),
    ("pair", (None,)),
    ("rebalance", ("inference",)),
    ("broker", (None,)),
    ("recorder", (None,)),
    ("gateway", (None,)),
    ("rolling", ("vad",)),
    ("join", ("features",)),
)
#: Which broker of three: the one that leads a busy partition, that coordinates the stages' groups, that is the cluster's controller.
BROKER_ROLES: Final = ("leader", "coordinator", "controller")
#: After all is well again, so long passes until the next strike.
_PAUSE_S: Final = (1.0, 4.0)
#: A supervisor starts a dead process again after so long.
_RESTART_S: Final = (0.0, 2.0)
_FREEZE_S: Final = (3.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One blow, or one planned change.

    Attributes:
        kind: what is done.
        kills: how many processes it kills or stops.
        stages: of which stages workers are hit; empty where it is not about workers.
        number: which of several equal processes.
        moment: ``segment``: while a channel of the victim is in the middle of a segment.
        role: of the broker, where there are several.
        pause_s: how long all has been well before.
        restart_s: how long the dead stay dead.
        freeze_s: how long the stopped stay stopped.
    """

    kind: Kind
    kills: int
    stages: tuple[Stage, ...] = ()
    number: int = 0
    moment: Moment = "any"
    role: str = ""
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


def make_plan(kills: int, seed: int, kinds: Sequence[Kind], *, brokers: int = 1, workers: int = 2, recorders: int = 2) -> list[Strike]:
    """Return the strikes, in order, with exactly so many kills where a kind that kills one is among them, else at least so many.

    Args:
        kills: how many.
        seed: the same one gives the same plan.
        kinds: what may come.
        brokers: how many there are.
        workers: for each stage.
        recorders: how many there are.

    Raises:
        UserError: none of the kinds kills.
    """
    if kills and not any(KINDS[kind][1] for kind in kinds):
        raise UserError("Nothing of that kills anything", "Add workers, broker, recorder or gateway, or ask for 0 kills.")
    rng = random.Random(seed)  # noqa: S311 reproducible, not secret
    plan: list[Strike] = []
    left = kills
    while left > 0:
        deck = [(kind, stage) for kind, stages in _ROUND if kind in kinds for stage in stages]
        rng.shuffle(deck)
        for kind, stage in deck:
            if left <= 0:
                break
            if KINDS[kind][1] > left and any(KINDS[other][1] == 1 for other in kinds):
                continue
            plan.append(_strike(kind, stage, rng, brokers=brokers, workers=workers, recorders=recorders))
            left -= plan[-1].kills
    return plan


def _strike(kind: Kind, stage: Stage | None, rng: random.Random, *, brokers: int, workers: int, recorders: int) -> Strike:
    stages: tuple[Stage, ...] = (stage,) if stage else ()
    if kind == "pair":
        stages = tuple(rng.sample(STAGES, 2))
    elif kind in ("rebalance", "rolling", "join", "freeze"):
        # The round names one; over many rounds, each has its turn.
        stages = (rng.choice(STAGES),)
    several = {"broker": brokers, "recorder": recorders, "gateway": 1}.get(kind, workers)
    return Strike(
        kind=kind,
        kills=KINDS[kind][1],
        stages=stages,
        number=rng.randrange(several),
        moment=rng.choice(("segment", "segment", "any")) if kind in ("kill", "freeze", "pair") else "any",
        role=rng.choice(BROKER_ROLES) if kind == "broker" and brokers > 1 else "",
        pause_s=round(rng.uniform(*_PAUSE_S), 2),
        restart_s=round(rng.uniform(*_RESTART_S), 2),
        freeze_s=round(rng.uniform(*_FREEZE_S), 2) if kind == "freeze" else 0.0,
    )
