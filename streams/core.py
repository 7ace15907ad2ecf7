"""What a stage is, apart from Kafka: a core that is fed the records of its sessions, in order, and says what follows from them.

A core is plain numpy or torch code. The runtime around it (``streams/stage.py``) reads, orders and fences its inputs, numbers, sends and
acknowledges its outputs, and commits its state with the offsets. So a core's author has four things to get right: say what follows, be
deterministic, name the state, and load it again as exact bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from schemas.records import FlowRecord, SessionRecord

__all__ = ["Core", "Emitter", "Input", "Report", "Reporting", "SessionKey", "SessionState"]


class SessionKey(NamedTuple):
    """A session where it lives: its records stay on one partition number through every stage."""

    partition: int
    session_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """One record for a core.

    Attributes:
        key: the session.
        offset: its Kafka offset on the stage's input topic.
        appended_ms: when the broker appended it, Unix time in ms.
        record: the record; repeats and records of fenced writers have been dropped.
        warm: it lies before the session's snapshot: only what forgets by itself (a filter, a ring of audio) may hear it,
            nothing may follow from it.
        tenure: the runtime's mark of the ownership under which it was read; nothing to a core.
    """

    key: SessionKey
    offset: int
    appended_ms: int
    record: FlowRecord
    warm: bool = False
    tenure: object = None


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session's state after a certain input, small enough to travel with a commit.

    Attributes:
        read_from_offset: the first input that a restart must read for this session, warm-up included.
        from_offset: the first input that a restart must take; inputs from ``read_from_offset`` to here come as ``warm``.
        state: whatever else the core needs, as exact bits.
    """

    read_from_offset: int
    from_offset: int
    state: bytes


class Emitter(Protocol):
    """How a core says what follows from an input. Both calls belong on the stage's event loop."""

    def emit(self, cause: Input, records: Sequence[SessionRecord]) -> None:
        """Send records that follow from an input, in this order; the runtime fills epoch and ordinal."""

    def done(self, cause: Input) -> None:
        """Say that nothing more follows from an input. Each input that is not warm is done exactly once."""


class Core(Protocol):
    """One stage's work on all sessions of this worker. Every call is made on its event loop, in the order of the inputs."""

    async def start(self) -> None:
        """Get ready to be fast: load models, warm up. The worker joins its group only afterwards."""

    async def stop(self) -> None:
        """Let go of threads and processes."""

    def load(self, key: SessionKey, state: SessionState) -> None:
        """Take over a session: its inputs follow, warm ones first."""

    def drop(self, key: SessionKey) -> None:
        """Forget a session that moved to another worker. Nothing is to be emitted for it any more."""

    async def step(self, inputs: Sequence[Input]) -> None:
        """Take everything that is ready now, over all sessions; each session's inputs are in order.

        The next call comes when this one returns; results may be emitted later. A session without ``load`` begins with its SessionStart.
        """

    def snapshot(self, key: SessionKey) -> SessionState | None:
        """Return a session's state after all inputs of the steps so far, or None if the session is over."""


class Report(NamedTuple):
    """What a worker's engine decides with, and how it keeps up.

    Attributes:
        model_digest: the model that new segments are decoded with.
        hotword_version: the hotwords that it is ready to use and that are in force; empty for none.
        channels: channels of speech without a pause that it can follow; 0: not known.
        behind_ms: how long what waits longest for the engine has waited.
    """

    model_digest: str = ""
    hotword_version: str = ""
    channels: int = 0
    behind_ms: int = 0


@runtime_checkable
class Reporting(Protocol):
    """A core that can tell."""

    @property
    def report(self) -> Report:
        """How it is now."""
