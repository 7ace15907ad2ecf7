"""A worker's time as the owner of one partition: which record comes next, which to take, and where each session stands.

Everything here is decided from offsets, epochs and ordinals alone, without Kafka; ``streams/stage.py`` reads, sends and commits.
"""

from __future__ import annotations

import enum
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from schemas.records import AudioFrame, FlowRecord, SessionStart, Timeout, VersionChange
from streams.checkpoint import Frontier, SessionSnapshot, Snapshot, Track
from streams.core import SessionState

__all__ = ["Order", "Placement", "Standing", "Tenure"]

#: Ended sessions that a partition remembers: far more than can end within a zombie's life.
_ENDED_REMEMBERED: Final = 16
#: Beside the hash of 32 bits of an ended session's name: it was closed because nothing was heard of it.
_LOST: Final = 1 << 32
#: How often a hole is read again before its offsets are taken for gone: a client that loses an event in a rebalance may lose two.
_REREADS: Final = 3


class Order(enum.Enum):
    """How an offset follows on the ones before."""

    NEXT = "next"  #: it is the one that is due
    SEEN = "seen"  #: it was read before: the flow was sought back
    HOLE = "hole"  #: others are due before it, and have to be read again
    WAIT = "wait"  #: it was on its way already when reading again began
    GONE = "gone"  #: reading again led here time after time: what was due is no data, or was deleted


class Placement(enum.Enum):
    """What to do with a record."""

    TAKE = "take"  #: it is new
    WARM = "warm"  #: it lies before its session's snapshot: warm up with it
    DONE = "done"  #: it was done before the takeover, or its session is over
    REPEAT = "repeat"  #: it was taken before
    ZOMBIE = "zombie"  #: its writer had lost the partition
    STRANGER = "stranger"  #: its session was never started here
    LATE = "late"  #: audio of a session that was closed for want of it


@dataclass(slots=True)
class Standing:
    """Where one session stands.

    Attributes:
        read_from_offset: before it nothing needs to be read, see :class:`streams.core.SessionState`.
        from_offset: its first input that is taken, see there.
        epoch: the highest epoch seen from the stage before.
        ordinal: the last ordinal taken from it.
        next_ordinal: what this stage's next record of the session will be numbered.
        start_offset: where its SessionStart is; -1 if the session was taken over.
        seen_s: when something was last heard of it (monotonic clock).
        latest_offset: where its latest record is, or where a restart has to read to meet it again.
        latest: its latest record, for its names and position; None until one has come.
        tracks: (offset, epoch, ordinal) after each input that a restart might have to begin behind.
        numbered: (offset, ordinal) of the first record that followed from each input that anything followed from, as far back.
        hotword_version: the hotwords that were last put in force for it; None: not known since the takeover.
        proposed: the hotwords that this owner has written a change to, and when (monotonic clock).
    """

    read_from_offset: int
    from_offset: int
    epoch: int
    ordinal: int
    next_ordinal: int
    start_offset: int
    seen_s: float
    latest_offset: int
    latest: FlowRecord | None = None
    tracks: deque[tuple[int, int, int]] = field(default_factory=deque)
    numbered: deque[tuple[int, int]] = field(default_factory=deque)
    hotword_version: str | None = None
    proposed: tuple[str, float] = ("", -math.inf)

    def number(self, offset: int) -> int:
        """Return the ordinal of the next record, which follows from the input at an offset.

        Raises:
            RuntimeError: records of a later input went before it: a replay could not number them the same.
        """
        last = self.numbered[-1][0] if self.numbered else -1
        if offset < last:
            raise RuntimeError(f"records that follow from the input at {offset} came after those of the one at {last}")
        ordinal = self.next_ordinal
        if offset > last:
            self.numbered.append((offset, ordinal))
        self.next_ordinal += 1
        return ordinal

    def track_before(self, offset: int) -> Track:
        """Return where the session stood before an input; what lies further back is forgotten."""
        while len(self.tracks) > 1 and self.tracks[1][0] < offset:
            self.tracks.popleft()
        while self.numbered and self.numbered[0][0] < offset:
            self.numbered.popleft()
        _, epoch, ordinal = self.tracks[0]
        return Track(epoch, ordinal, self.numbered[0][1] if self.numbered else self.next_ordinal)


class Tenure:
    """One ownership of one partition of a stage's source topic.

    Args:
        number: the partition.
        snapshot: the state that it begins with; its epoch is this tenure's own.
        start: the first offset to read.
        numbered_by_recorder: whether the source is the audio topic: ordinals may jump there (audio was lost), and timeouts and version
            changes, which are written by a VAD, stand outside the recorder's numbering.
    """

    def __init__(self, number: int, snapshot: Snapshot, start: int, *, numbered_by_recorder: bool = False) -> None:
        self.number = number
        #: False once the partition moved: what still comes of it is nobody's.
        self.alive = True
        self.epoch = snapshot.epoch
        self.emit_from_offset = snapshot.emit_from_offset
        self.frontier = Frontier(start)
        #: Whether the core has loaded the sessions that were taken over: before that it cannot tell their state.
        self.loaded = not snapshot.sessions
        self.sessions: dict[str, Standing] = {}
        #: Whether something was taken that no captured state covers.
        self.dirty = False
        #: A captured state and its packed form, until it is committed.
        self.candidate: tuple[Snapshot, str] | None = None
        self.captured_s = 0.0
        #: Everything before it is settled and committed.
        self.committed_to = snapshot.emit_from_offset
        #: Since when there has been more (monotonic clock); None while there is none.
        self.uncommitted_since_s: float | None = None
        self.cut_since_s: float | None = None
        #: The offset that is due while the broker has it, and since when it is waited for (monotonic clock).
        self.awaited = -1, 0.0
        self._numbered_by_recorder = numbered_by_recorder
        self._ended: deque[int] = deque(snapshot.ended, maxlen=_ENDED_REMEMBERED)
        self._rereads = 0
        self._passed_over = -1
        now_s = time.monotonic()
        for each in snapshot.sessions:
            track = each.track
            standing = Standing(
                each.read_from_offset,
                each.from_offset,
                track.upstream_epoch,
                track.upstream_ordinal,
                track.next_ordinal,
                start_offset=-1,
                seen_s=now_s,
                latest_offset=each.needed_offset,
            )
            standing.tracks.append((-1, standing.epoch, standing.ordinal))
            self.sessions[each.session_id] = standing

    # ------------------------------------------------------------------ reading

    def order(self, offset: int) -> Order:
        """Return how an offset follows on the ones before; a HOLE is to be answered by reading again from the one that is due."""
        due = self.frontier.next_offset
        if offset < due:
            return Order.SEEN
        if offset == due:
            self.resume()
            return Order.NEXT
        if self._rereads and offset > self._passed_over:
            self._passed_over = offset
            return Order.WAIT
        # The offsets went back to one that was passed over already, and what is due did not come in between.
        if self._rereads < _REREADS:
            self._rereads, self._passed_over = self._rereads + 1, offset
            return Order.HOLE
        self.resume()
        return Order.GONE

    def resume(self) -> None:
        """Forget about reading again: the flow stands where it should."""
        self._rereads, self._passed_over = 0, -1

    def place(self, offset: int, record: FlowRecord) -> Placement:
        """Return what to do with the record at an offset, and note that it was seen."""
        standing = self.sessions.get(record.session_id)
        if standing is None:
            ended = _hash(record.session_id)
            if offset >= self.emit_from_offset and ended | _LOST in self._ended and isinstance(record, AudioFrame):
                return Placement.LATE
            over = ended in self._ended or ended | _LOST in self._ended
            if offset < self.emit_from_offset or over or isinstance(record, (Timeout, VersionChange)):
                return Placement.DONE
            if not isinstance(record, SessionStart):
                return Placement.STRANGER
            standing = Standing(
                offset, offset, record.epoch, -1, 0, start_offset=offset, seen_s=0.0, latest_offset=offset, hotword_version=""
            )
            standing.tracks.append((-1, record.epoch, -1))
            self.sessions[record.session_id] = standing
        from_vad = self._numbered_by_recorder and isinstance(record, (Timeout, VersionChange))
        if isinstance(record, VersionChange) and record.kind == "hotwords":
            standing.hotword_version = record.version
        if not (from_vad and isinstance(record, VersionChange)):
            standing.seen_s = time.monotonic()
            standing.latest, standing.latest_offset = record, offset
        if offset < standing.from_offset:
            return Placement.WARM if offset >= standing.read_from_offset else Placement.DONE
        if from_vad:
            return Placement.TAKE
        if record.epoch < standing.epoch:
            return Placement.ZOMBIE
        if record.ordinal <= standing.ordinal:
            standing.epoch = record.epoch
            standing.tracks[-1] = (standing.tracks[-1][0], standing.epoch, standing.ordinal)
            return Placement.REPEAT
        standing.epoch, standing.ordinal = record.epoch, record.ordinal
        standing.tracks.append((offset, standing.epoch, standing.ordinal))
        return Placement.TAKE

    def missing_before(self, record: FlowRecord) -> int:
        """Return how many of its session's records the writer numbered, but did not send, before one that is about to be placed."""
        standing = self.sessions.get(record.session_id)
        if standing is None or self._numbered_by_recorder:
            return 0
        return max(0, record.ordinal - standing.ordinal - 1)

    # ------------------------------------------------------------------ state

    def snapshot(self, offset: int, state_of: Callable[[str], SessionState | None]) -> Snapshot:
        """Return the state as it is before the input at an offset.

        Args:
            offset: every input before it has been stepped.
            state_of: gives a session's state, or None if the session is over: it is then forgotten, but for its name's hash.
        """
        sessions = []
        for session_id, standing in list(self.sessions.items()):
            if standing.start_offset >= offset:
                continue  # its start has not been stepped
            state = state_of(session_id)
            if state is None:
                del self.sessions[session_id]
                self._ended.append(_hash(session_id) | (_LOST if isinstance(standing.latest, Timeout) else 0))
                continue
            track = standing.track_before(state.from_offset)
            # Who takes over a session that has gone quiet must know it by name, to propose that it has ended.
            heard = standing.latest_offset if self._numbered_by_recorder else -1
            sessions.append(SessionSnapshot(session_id, state.read_from_offset, state.from_offset, track, state.state, heard))
        return Snapshot(self.epoch, offset, tuple(sessions), tuple(self._ended))

    def silent_since(self, before_s: float) -> Iterator[Standing]:
        """Yield the sessions that nothing was heard of since a time (monotonic clock), though something was before."""
        return (standing for standing in self.sessions.values() if standing.latest is not None and standing.seen_s < before_s)


def _hash(session_id: str) -> int:
    return crc32(session_id.encode())
