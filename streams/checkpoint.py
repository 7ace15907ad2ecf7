"""State that travels with the offset: what makes a killed worker cost no word.

A stage's state on a partition is committed *inside* the offset commit (Kafka keeps a metadata string beside each offset). The broker stores
both at once, and refuses them from a member of an old generation, so state and offset can never disagree. Three positions are kept apart::

    read from  ≤  snapshot  ≤  emit from

A restart reads from the first (that is the committed offset), warms up what forgets by itself (a filter), loads all else as exact
bits at the second, and sends only what follows from inputs at or after the third, before which every output is on the broker.

This module has three parts: :class:`Snapshot`, what is committed; :class:`Frontier`, which inputs are settled so that it may be; and
:class:`OffsetStore`, the only place that reaches into private names of Faust and aiokafka to do it.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiokafka.errors import KafkaError, OffsetMetadataTooLargeError
from aiokafka.structs import OffsetAndMetadata, TopicPartition

__all__ = ["CommitRefusedError", "Frontier", "OffsetStore", "SessionSnapshot", "Snapshot", "SnapshotError", "Track"]

#: Written first in each snapshot; a snapshot of another version is refused, never guessed at.
SNAPSHOT_VERSION: Final = 1


class SnapshotError(RuntimeError):
    """A committed snapshot cannot be used, or a new one does not fit. Starting or going on would lose state."""


class CommitRefusedError(RuntimeError):
    """The broker did not take a commit: this worker is not the partition's owner any more, or a rebalance is under way."""


class Track(msgspec.Struct, frozen=True, array_like=True):
    """Where a session stands between two stages.

    Attributes:
        upstream_epoch: the highest epoch seen from the stage before; lower ones are a zombie's.
        upstream_ordinal: the last ordinal taken from it; -1 before the first.
        next_ordinal: what this stage's next record of the session will be numbered.
    """

    upstream_epoch: int = 0
    upstream_ordinal: int = -1
    next_ordinal: int = 0


class SessionSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """One session within a partition's snapshot; see :class:`streams.core.SessionState` for the offsets.

    ``heard_offset`` is where its latest record is, if a restart has to meet that again; -1 if not.
    """

    session_id: str
    read_from_offset: int
    from_offset: int
    track: Track
    state: bytes
    heard_offset: int = -1

    @property
    def needed_offset(self) -> int:
        """The first offset that a restart must read for it."""
        return self.read_from_offset if self.heard_offset < 0 else min(self.read_from_offset, self.heard_offset)


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """A stage's state on one partition.

    Attributes:
        epoch: how many owners the partition has had in this stage.
        emit_from_offset: outputs of all inputs before it are on the broker.
        sessions: the open sessions.
        ended: hashes of the sessions that ended last, so that a zombie's repeats do not open them again; those that were closed for want
            of audio are marked.
    """

    epoch: int = 0
    emit_from_offset: int = 0
    sessions: tuple[SessionSnapshot, ...] = ()
    ended: tuple[int, ...] = ()

    @property
    def read_to_offset(self) -> int:
        """The offset up to which the log was read: one that ends before it has lost records."""
        return max([self.emit_from_offset, *(session.from_offset for session in self.sessions)])

    @property
    def commit_offset(self) -> int:
        """The offset to commit: the lowest that a restart must read."""
        return min([self.emit_from_offset, *(session.needed_offset for session in self.sessions)])

    def rebased(self, start: int) -> Snapshot:
        """Return the same state for a log that was made anew: all that is in it is still to be taken."""
        at_start = {"read_from_offset": start, "from_offset": start, "heard_offset": -1}
        sessions = tuple(msgspec.structs.replace(each, **at_start) for each in self.sessions)
        return msgspec.structs.replace(self, emit_from_offset=start, sessions=sessions)

    def pack(self, max_bytes: int) -> str:
        """Return the snapshot as metadata for an offset commit.

        Args:
            max_bytes: the brokers' ``offset.metadata.max.bytes``.

        Raises:
            SnapshotError: it does not fit.
        """
        packed = base64.b64encode(bytes([SNAPSHOT_VERSION]) + msgspec.msgpack.encode(self)).decode("ascii")
        if len(packed) > max_bytes:
            raise SnapshotError(
                f"the state of {len(self.sessions)} sessions on a partition takes {len(packed)} bytes, and the brokers allow {max_bytes}: "
                "raise offset.metadata.max.bytes on the brokers and ASR_SNAPSHOT_MAX_BYTES here, or use more partitions (ASR_PARTITIONS)"
            )
        return packed

    @staticmethod
    def unpack(metadata: str) -> Snapshot:
        """Return the snapshot that an offset commit carried.

        Raises:
            SnapshotError: it is damaged, or of a version that this release does not read.
        """
        try:
            packed = base64.b64decode(metadata, validate=True)
        except binascii.Error as damage:
            raise SnapshotError(f"the committed metadata {metadata[:20]!r}… is no snapshot of this system") from damage
        if not packed or packed[0] != SNAPSHOT_VERSION:
            raise SnapshotError(
                f"the committed snapshot has version {packed[0] if packed else 'none'} and this release reads version {SNAPSHOT_VERSION}: "
                "run the release that wrote it, or finish its calls with that release first"
            )
        try:
            return msgspec.msgpack.decode(packed[1:], type=Snapshot)
        except msgspec.MsgspecError as damage:
            raise SnapshotError(f"the committed snapshot is damaged: {damage}") from damage


class Frontier:
    """Which inputs of one partition are settled: nothing more follows from them, and all that followed is acknowledged.

    Inputs begin in the order of their offsets and may settle in any order. Each holds itself open from :meth:`begin` to a first
    :meth:`release`; each output on its way to the broker adds a :meth:`hold` and, acknowledged, a :meth:`release`.
    """

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset
        # Ordered by offset, so that the first key is the lowest open input; a plain dict would be slow to find it.
        self._holds: OrderedDict[int, int] = OrderedDict()
        #: The session of each open input that has one.
        self._sessions: dict[int, str] = {}

    def skip(self, offset: int) -> None:
        """Pass over an input from which nothing follows."""
        self.next_offset = offset + 1

    def begin(self, offset: int, session_id: str = "") -> None:
        """Take an input, of a session if it has one."""
        self._holds[offset] = 1
        self._sessions[offset] = session_id
        self.next_offset = offset + 1

    def hold(self, offset: int) -> None:
        """Keep an input open for one more output."""
        self._holds[offset] += 1

    def release(self, offset: int) -> None:
        """Let go of an input once."""
        left = self._holds[offset] - 1
        if left:
            self._holds[offset] = left
        else:
            del self._holds[offset], self._sessions[offset]

    def committable(self, snapshot: Snapshot) -> Snapshot | None:
        """Return a captured state as it may be committed now, or None if it may not be yet.

        An input that is not settled holds up the state of all that came after it; but not where its own session begins again at or before
        it anyway, as with a segment that is open: then all that follows from it is sent once more. So a call that hangs, whose recorder
        was killed while somebody spoke, holds up none of the others on its partition.
        """
        begins = {session.session_id: session.from_offset for session in snapshot.sessions}
        emit_from = snapshot.emit_from_offset
        for offset in self._holds:
            if offset >= snapshot.emit_from_offset:
                break
            if begins.get(self._sessions[offset], math.inf) > offset:
                return None
            emit_from = min(emit_from, offset)
        return snapshot if emit_from == snapshot.emit_from_offset else msgspec.structs.replace(snapshot, emit_from_offset=emit_from)

    @property
    def settled_to(self) -> int:
        """Every input before this offset is settled."""
        return next(iter(self._holds), self.next_offset)

    @property
    def open_inputs(self) -> int:
        """How many inputs are not settled."""
        return len(self._holds)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a group has committed for a partition."""

    offset: int
    metadata: str


class OffsetStore:
    """Offsets and their metadata of a Faust app's consumer group.

    Faust offers neither metadata nor a commit that says whether it was taken, so this reaches for the aiokafka consumer below it, on the
    thread that owns it. faust-streaming and aiokafka are pinned for that reason.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def fetch(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed]:
        """Return what is committed, for those partitions that have a commit."""
        thread, consumer = self._consumer()
        found = await thread.call_thread(consumer._coordinator.fetch_committed_offsets, list(partitions))  # noqa: SLF001
        return {tp: Committed(each.offset, each.metadata) for tp, each in found.items()}

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int]]:
        """Return the first offset that the broker still has of each partition, and the one that its next record will get."""
        thread, consumer = self._consumer()
        starts = await thread.call_thread(consumer.beginning_offsets, list(partitions))
        ends = await thread.call_thread(consumer.end_offsets, list(partitions))
        return {tp: (starts[tp], ends[tp]) for tp in partitions}

    def log_end(self, partition: TopicPartition) -> int | None:
        """Return where a partition's log ended when it was last read from; None if it was not yet."""
        _, consumer = self._consumer()
        subscription = consumer._subscription.subscription  # noqa: SLF001
        assignment = subscription.assignment if subscription is not None else None
        if assignment is None or partition not in assignment.tps:
            return None
        end: int | None = assignment.state_value(partition).highwater
        return end

    def known_generation(self) -> int:
        """Return the group's generation as this worker knows it."""
        _, consumer = self._consumer()
        generation: int = consumer._coordinator.generation  # noqa: SLF001
        return generation

    async def commit(self, offsets: Mapping[TopicPartition, Committed], generation: int) -> None:
        """Commit offsets with their metadata: one attempt, on behalf of one generation.

        aiokafka's own commit tries again for as long as the brokers cannot be reached, then on behalf of whatever generation it has joined
        meanwhile: a worker that was frozen, and is given the partition back, would write its old state over its successor's.

        Raises:
            CommitRefusedError: this worker does not own the partitions in the group's present generation, or the brokers cannot be asked.
            SnapshotError: the brokers allow less metadata than configured.
        """
        thread, consumer = self._consumer()
        coordinator = consumer._coordinator  # noqa: SLF001
        values = {tp: OffsetAndMetadata(each.offset, each.metadata) for tp, each in offsets.items()}

        async def attempt() -> None:
            await coordinator.ensure_coordinator_known()
            async with coordinator._commit_lock:  # noqa: SLF001
                if coordinator.generation != generation:
                    raise CommitRefusedError(f"the group is in generation {coordinator.generation}, not {generation} any more")
                # The request is made before anything else can happen on this thread.
                await coordinator._do_commit_offsets(None, values)  # noqa: SLF001

        try:
            await thread.call_thread(attempt)
        except OffsetMetadataTooLargeError as large:
            raise SnapshotError(
                "the brokers' offset.metadata.max.bytes is smaller than ASR_SNAPSHOT_MAX_BYTES: raise the one or lower the other"
            ) from large
        except KafkaError as failed:
            raise CommitRefusedError(f"{type(failed).__name__}: {failed}") from failed

    def _consumer(self) -> tuple[Any, Any]:
        thread = self._app.consumer._thread  # noqa: SLF001
        return thread, thread._ensure_consumer()  # noqa: SLF001
