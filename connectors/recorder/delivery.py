"""Records on their way to Kafka, in each partition's order, whatever becomes of the brokers: in memory, then on disk, then there.

While brokers answer, records go straight to the client and are kept until they are acknowledged. Once a partition's oldest record has
waited for ``spool_after_ms``, all that are not acknowledged are written to disk, and so are those that follow: a recorder that is killed
from then on loses nothing that it has written. When the broker takes records again, those on disk go first, in order. A repeat is
possible where a recorder was killed between a record's arrival and its acknowledgement; readers drop it by its ordinal.

When there is no room on disk, *the newest frames are dropped*: each call keeps its beginning as one piece, and what is missing is a gap
in it, marked and counted by the pipeline. Starts and ends of calls have a reserve of their own; a call whose start finds no room is
dropped as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from connectors.recorder import metrics
from connectors.recorder.framing import WireFormat
from connectors.recorder.producer import STOPPED, AudioProducer, SendError
from connectors.recorder.spool import Log, Manifest, Position, Spool, SpoolError, SpoolFullError, leftovers
from schemas.codec import Codec, DecodeError
from schemas.records import AudioFrame, FlowRecord, SessionEnd, SessionStart
from streams.kafka import UnreachableError
from streams.settings import Settings

__all__ = ["Delivery", "Receipt"]

log = logging.getLogger(__name__)

#: What may be on its way for one partition: 8 s of one channel of 16 kHz PCM. With 64 partitions that bounds the memory to 16 MB, and
#: as much again in the client.
_WINDOW_BYTES: Final = 256 * 1_024
#: What goes from disk to the client at each look: 25 MB/s, and no call that is being recorded waits longer than a few ms for it.
_REFILL_BYTES: Final = 512 * 1_024
_LOOK_S: Final = 0.02
_SYNC_S: Final = 1.0
_RENEW_S: Final = 1.0
_TELL_EVERY_S: Final = 30.0
#: How long a full queue may block, without a spool, before it is tried again.
_FULL_QUEUE_WAIT_S: Final = 0.05
#: Room that frames leave for starts and ends of calls, at 250 bytes each: 2,000 calls.
_RESERVE_BYTES: Final = 2**20
_NO_ROOM: Final = "There was no room on disk for it while no broker took it. See ASR_SPOOL_MAX_BYTES, and the disk."

_EVENT, _FRAME = 0, 1


class Receipt(Protocol):
    """Who is told what became of records, each once."""

    def delivered(self, frames: int) -> None:
        """All replicas have a record, which holds so many frames (0 or 1)."""

    def lost(self, frames: int, why: str) -> None:
        """A record will never arrive."""

    def kept(self, frames: int) -> None:
        """A record is on disk; the next recorder will send it."""


@dataclass(slots=True, eq=False)
class _Sent:
    """A record that the client has. ``end`` is the place after it on disk, if it is there."""

    kind: int
    key: bytes
    value: bytes
    receipt: Receipt
    handed_s: float
    end: Position | None = None
    settled: bool = False
    failure: str = ""

    @property
    def size_bytes(self) -> int:
        return len(self.key) + len(self.value)


@dataclass(slots=True, eq=False)
class _Lane:
    """One partition's records, in order: first ``sent``, then what of ``log`` was not read yet."""

    number: int
    log: Log | None = None
    #: New records go to the log, for something in it has not been handed over yet.
    spooling: bool = False
    sent: deque[_Sent] = field(default_factory=deque)
    sent_bytes: int = 0
    #: How many of ``sent`` are on disk too.
    sent_on_disk: int = 0
    #: Who waits for the records in the log that were not read yet, and how many frames each holds.
    receipts: deque[Receipt] = field(default_factory=deque)
    frames: deque[int] = field(default_factory=deque)
    #: Something of it stays on disk for the next recorder.
    keeps: bool = False
    #: Of a recorder that died: the calls that it left open.
    orphans: _Orphans | None = None

    def stalled_since(self, now_s: float) -> float:
        """Return for how long its oldest record has waited for a broker, in s."""
        return now_s - self.sent[0].handed_s if self.sent else 0.0


class Delivery:
    """Sends records from one thread: receipts are told while it sends, polls or finishes.

    Args:
        settings: where to, how, and what may lie on disk.
        codec: how records become bytes.
        spool: keep on disk what no broker takes; else whoever sends is held back.
    """

    def __init__(self, settings: Settings, codec: Codec, *, spool: bool = False) -> None:
        self._settings = settings
        self._codec = codec
        self._keeps = spool and settings.spool_max_bytes > 0
        self._producer = AudioProducer(settings, patient=self._keeps)
        self._spool: Spool | None = None
        self._lanes: dict[int, _Lane] = {}
        self._taken_up: list[tuple[Spool, list[_Lane]]] = []
        self._startless: set[str] = set()
        self._given_up = threading.Event()
        self._finishing = False
        # A client that has failed is replaced; what the old one still says counts only if it is good.
        self._generation = 0
        self._broken: SendError | None = None
        self._renew_s = self._look_s = self._sync_s = 0.0
        self._told_s = -math.inf
        self._outage_s: float | None = None
        self._dropped_frames = 0

    def check(self) -> None:
        """Make sure that the topic can be reached, and take up what earlier recorders left on disk.

        A recorder that is restarted while no broker answers goes on if an earlier one left records here: an outage is under way.

        Raises:
            UserError: the brokers or the disk cannot be used; the message says what to do.
        """
        parent = self._parent
        try:
            cluster_id = self._producer.check()
        except UnreachableError as unreachable:
            found = self._cluster_of_leftovers(parent) if self._keeps else None
            if found is None:
                raise
            log.warning("%s. Audio goes to disk until one does.", unreachable.cause)
            cluster_id = found
        if not self._keeps:
            return
        manifest = Manifest(cluster_id=cluster_id, namespace=self._settings.namespace, bootstrap_servers=self._settings.bootstrap_servers)
        self._spool = Spool.create(parent, self._settings.spool_max_bytes, manifest)
        for folder, other in leftovers(parent):
            if (other.cluster_id, other.namespace) == (cluster_id, self._settings.namespace) and folder != self._spool.folder:
                self._take_up(folder)

    @property
    def is_behind(self) -> bool:
        """Whether records wait on disk. Any thread may ask."""
        return bool(self._taken_up) or any(lane.log is not None for lane in list(self._lanes.values()))

    def send(self, record: FlowRecord, partition: int, receipt: Receipt) -> None:
        """Take a record; without a spool it waits while too many are on their way.

        Args:
            record: of a session, in the session's order.
            partition: the session's.
            receipt: told once what became of it.
        """
        lane = self._lanes.setdefault(partition, _Lane(partition))
        kind = _FRAME if isinstance(record, AudioFrame) else _EVENT
        key, value = record.channel_id.encode(), self._codec.encode(record)
        if self._spool is None:
            self._send_waiting(lane, kind, key, value, receipt)
        elif lane.spooling or not self._hand_over(lane, kind, key, value, receipt):
            self._begin_spooling(lane)
            self._keep(lane, record, kind, key, value, receipt)

    def poll(self) -> None:
        """Tell receipts, and see after what waits."""
        self._producer.poll()
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            self._look(now_s)

    def give_up(self) -> None:
        """Wait for nothing any more: without a spool, what does not fit into the queue is lost. Any thread may call it."""
        self._given_up.set()

    def finish(self, deadline_s: float) -> None:
        """Wait until all is delivered; what is not by then is kept on disk, or lost.

        Args:
            deadline_s: on the monotonic clock.
        """
        while self._waiting() and time.monotonic() < deadline_s and not self._given_up.is_set():
            self._producer.poll(_LOOK_S)
            self._look(time.monotonic())
        self._finishing = True
        if self._spool is not None:
            for lane in self._all_lanes():
                if lane.sent:
                    self._begin_spooling(lane)
            self._spool.sync()
        self._producer.finish(0.0)
        for lane in self._all_lanes():
            while lane.receipts:
                lane.receipts.popleft().kept(lane.frames.popleft())
        for spool, _ in self._taken_up:
            spool.close()
        if self._spool is not None:
            self._spool.close()

    # ------------------------------------------------------------------ to the client

    def _send_waiting(self, lane: _Lane, kind: int, key: bytes, value: bytes, receipt: Receipt) -> None:
        while not self._hand_over(lane, kind, key, value, receipt, window_bytes=None):
            if self._given_up.is_set():
                receipt.lost(kind, STOPPED)
                return
            self._producer.poll(_FULL_QUEUE_WAIT_S)

    def _hand_over(
        self,
        lane: _Lane,
        kind: int,
        key: bytes,
        value: bytes,
        receipt: Receipt,
        *,
        end: Position | None = None,
        window_bytes: int | None = _WINDOW_BYTES,
    ) -> bool:
        """Give a record to the client; return False if too much is on its way already."""
        if window_bytes is not None and lane.sent_bytes >= window_bytes:
            return False
        sent = _Sent(kind, key, value, receipt, time.monotonic(), end)
        lane.sent.append(sent)
        lane.sent_bytes += sent.size_bytes
        lane.sent_on_disk += end is not None
        if self._offer(lane, sent):
            return True
        lane.sent.pop()
        lane.sent_bytes -= sent.size_bytes
        lane.sent_on_disk -= end is not None
        return False

    def _offer(self, lane: _Lane, sent: _Sent) -> bool:
        return self._producer.offer(lane.number, sent.key, sent.value, partial(self._answered, lane, sent, self._generation))

    def _answered(self, lane: _Lane, sent: _Sent, generation: int, error: SendError | None) -> None:
        if error is not None and not self._finishing:
            if generation != self._generation:
                return  # it was handed to the next client
            if error.is_fatal or (self._keeps and not error.is_own_fault):
                self._broken = self._broken or error
                return
        sent.settled, sent.failure = True, "" if error is None else str(error)
        self._settle(lane)

    def _settle(self, lane: _Lane) -> None:
        """Tell what became of records, in order."""
        end = None
        while lane.sent and lane.sent[0].settled:
            sent = lane.sent.popleft()
            lane.sent_bytes -= sent.size_bytes
            lane.sent_on_disk -= sent.end is not None
            if not sent.failure:
                end = end if lane.keeps else sent.end or end
                sent.receipt.delivered(sent.kind)
            elif self._finishing and sent.end is not None:
                lane.keeps = True
                sent.receipt.kept(sent.kind)
            else:
                sent.receipt.lost(sent.kind, sent.failure)
        if lane.log is None:
            return
        if not (lane.spooling or lane.sent_on_disk or lane.keeps):
            lane.log.clear()
            lane.log = None
        elif end is not None:
            lane.log.acknowledge(end)

    def _renew(self, now_s: float) -> None:
        """Give everything that is on its way to a new client, in order: the old one has failed."""
        if self._broken is None or now_s < self._renew_s:
            return
        self._renew_s = now_s + _RENEW_S
        if now_s >= self._told_s + _TELL_EVERY_S:
            self._told_s = now_s
            log.error("%s. It is tried again until it is taken.", self._broken)
        self._broken = None
        self._generation += 1
        self._producer.renew()
        for lane in self._all_lanes():
            for sent in list(lane.sent):
                if not sent.settled and not self._offer(lane, sent):
                    self._broken = SendError("The client's queue is full")
                    return

    # ------------------------------------------------------------------ to the disk and back

    def _begin_spooling(self, lane: _Lane) -> None:
        """Write what is on its way to disk too: from now on a record is there before anything else happens to it."""
        if lane.spooling or self._spool is None:
            return
        if lane.log is None:
            lane.log = self._spool.log(lane.number)
        lane.spooling = True
        if self._outage_s is None:
            self._outage_s = time.monotonic()
            log.warning("No broker takes the records of partition %d: they go to disk, to %s.", lane.number, self._spool.folder)
        for sent in lane.sent:
            if sent.end is None:
                try:
                    sent.end = lane.log.append(sent.kind, sent.key, sent.value)
                except SpoolFullError as full:
                    self._alarm(full)
                    break
                lane.sent_on_disk += 1
        lane.log.skip()

    def _keep(self, lane: _Lane, record: FlowRecord, kind: int, key: bytes, value: bytes, receipt: Receipt) -> None:
        """Write a record to disk, or drop it if there is no room."""
        assert lane.log is not None  # noqa: S101 - it is spooling
        startless = record.session_id in self._startless
        essential = isinstance(record, (SessionStart, SessionEnd))
        reserve_bytes = 0 if essential else min(_RESERVE_BYTES, self._settings.spool_max_bytes // 16)
        try:
            if not startless:
                lane.log.append(kind, key, value, reserve_bytes=reserve_bytes)
        except SpoolFullError as full:
            if isinstance(record, SessionStart):
                self._startless.add(record.session_id)
            self._drop(kind, receipt)
            self._alarm(full)
        else:
            if startless:
                self._drop(kind, receipt)
            else:
                metrics.SPOOL_FULL.set(0)
                lane.receipts.append(receipt)
                lane.frames.append(kind)
        if isinstance(record, SessionEnd):
            self._startless.discard(record.session_id)

    def _drop(self, frames: int, receipt: Receipt) -> None:
        self._dropped_frames += frames
        metrics.DROPPED_FRAMES.inc(frames)
        receipt.lost(frames, _NO_ROOM)

    def _alarm(self, full: SpoolFullError) -> None:
        metrics.SPOOL_FULL.set(1)
        now_s = time.monotonic()
        if now_s >= self._told_s + _TELL_EVERY_S:
            self._told_s = now_s
            log.error(
                "AUDIO IS BEING LOST: no broker takes it, and there is no room for it on disk (%s). Frames are dropped, %d so far; "
                "each is a gap in its call. Bring the brokers back, or make room: ASR_SPOOL_MAX_BYTES, ASR_SPOOL_DIR.",
                full,
                self._dropped_frames,
            )

    def _look(self, now_s: float) -> None:
        """See after what waits: to the disk what has waited long, to the client what comes from the disk."""
        self._renew(now_s)
        if not self._keeps:
            return
        spooling = [lane for lane in self._all_lanes() if lane.spooling]
        for lane in self._lanes.values():
            if not lane.spooling and lane.stalled_since(now_s) * 1_000 > self._settings.spool_after_ms:
                self._begin_spooling(lane)
        for lane in spooling:
            self._refill(lane, _REFILL_BYTES // len(spooling), now_s)
        self._close_taken_up()
        if self._spool is not None and spooling and now_s >= self._sync_s:
            self._sync_s = now_s + _SYNC_S
            with contextlib.suppress(OSError):  # the next record that is written will tell
                self._spool.sync()
        if self._outage_s is not None and not any(lane.spooling for lane in self._lanes.values()):
            log.warning("All records that went to disk have been sent, %.0f s after the first of them.", now_s - self._outage_s)
            self._outage_s = None
            metrics.SPOOL_FULL.set(0)
        metrics.OUTAGE.set(len(spooling))
        metrics.SPOOL_BYTES.set(self._spool.size_bytes if self._spool is not None else 0)

    def _refill(self, lane: _Lane, budget_bytes: int, now_s: float) -> None:
        """Hand over what comes next from disk, unless nothing moves."""
        if lane.log is None or lane.stalled_since(now_s) * 1_000 > self._settings.spool_after_ms:
            return
        while budget_bytes > 0:
            entry = lane.log.peek()
            if entry is None:
                self._all_read(lane)
                return
            receipt: Receipt = lane.orphans or lane.receipts[0]
            if not self._hand_over(lane, entry.kind, entry.key, entry.value, receipt, end=entry.end):
                return
            lane.log.advance()
            if lane.orphans is not None:
                lane.orphans.see(entry.value)
            else:
                lane.receipts.popleft()
                lane.frames.popleft()
            budget_bytes -= len(entry.value)

    def _all_read(self, lane: _Lane) -> None:
        """Everything of the log is with the client."""
        lane.spooling = False
        while lane.receipts:  # only where the disk has damaged what was written
            lane.receipts.popleft().lost(lane.frames.popleft(), "It was damaged on disk.")
        if lane.orphans is not None:
            for end in lane.orphans.ends():
                self._hand_over(lane, _EVENT, end.channel_id.encode(), self._codec.encode(end), lane.orphans, window_bytes=None)
        self._settle(lane)

    def _waiting(self) -> bool:
        return any(lane.sent or lane.spooling for lane in self._all_lanes())

    def _all_lanes(self) -> Iterator[_Lane]:
        for _, lanes in self._taken_up:
            yield from lanes
        yield from self._lanes.values()

    # ------------------------------------------------------------------ what earlier recorders left

    @property
    def _parent(self) -> Path:
        return self._settings.spool_dir or self._settings.data_dir / "spool"

    def _cluster_of_leftovers(self, parent: Path) -> str | None:
        ours = (self._settings.namespace, self._settings.bootstrap_servers)
        return next((m.cluster_id for _, m in leftovers(parent) if (m.namespace, m.bootstrap_servers) == ours), None)

    def _take_up(self, folder: Path) -> None:
        try:
            spool = Spool(folder, self._settings.spool_max_bytes)
        except SpoolError:
            return  # its recorder lives
        lanes = [_Lane(number, spool.log(number), spooling=True, orphans=_Orphans(self._codec)) for number in spool.numbers()]
        if lanes:
            log.warning("Sending %.1f MB that a recorder before has left in %s.", spool.size_bytes / 1e6, folder)
            self._taken_up.append((spool, lanes))
        else:
            spool.close()

    def _close_taken_up(self) -> None:
        for done in [entry for entry in self._taken_up if all(lane.log is None and not lane.sent for lane in entry[1])]:
            self._taken_up.remove(done)
            done[0].close()


class _Orphans:
    """The calls of a recorder that died, as its records say. Their lines are dead too, so they are ended."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._open: dict[str, FlowRecord] = {}

    def see(self, value: bytes) -> None:
        """Note a record that is sent on its behalf."""
        metrics.TAKEN_UP.inc()
        try:
            record = self._codec.decode(value)
        except DecodeError:
            return  # a stage will reject it, with its reason
        if isinstance(record, SessionEnd):
            self._open.pop(record.session_id, None)
        elif isinstance(record, FlowRecord):
            self._open[record.session_id] = record

    def ends(self) -> Iterator[SessionEnd]:
        """Yield the ends of the calls that are open."""
        for last in self._open.values():
            yield SessionEnd(
                channel_id=last.channel_id,
                session_id=last.session_id,
                conversation_id=last.conversation_id,
                position_samples=_end_of(last),
                stamps=last.stamps,
                ordinal=last.ordinal + 1,
                reason="failed",
            )
        self._open.clear()

    def delivered(self, frames: int) -> None:
        """Nobody waits for it any more."""

    def lost(self, frames: int, why: str) -> None:
        """Tell the log: nobody else can be told."""
        log.error("A record of an earlier recorder is lost: %s", why)

    def kept(self, frames: int) -> None:
        """It stays where it is."""


def _end_of(record: FlowRecord) -> int:
    """Return where the audio up to a record ends."""
    if not isinstance(record, AudioFrame):
        return record.position_samples
    try:
        wire = WireFormat(record.encoding, record.sample_rate_hz)
    except (ValueError, KeyError):
        return record.position_samples
    return record.position_samples + len(record.payload) // wire.bytes_per_sample * wire.positions_per_sample
