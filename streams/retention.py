"""Finished calls leave the results after a while: who lets them go, and why that survives whatever happens to it.

Compacted topics keep the newest record of each key for ever, so calls that are over are taken out by *tombstones*: records without a
value, after which compaction forgets the key. The worker writes them that owns the call's partition in the stage ``inference``, the same
one that writes its results: so each partition has somebody to look after it, and somebody else as soon as that one dies.

Nothing is remembered for it. A *sweep* reads what is on the topics now and writes a tombstone for whatever has outlived its time; one that
was broken off, or done twice, or by two workers, comes to the same in the end. Of a call, the session goes last: as long as it is there,
the next sweep finds the rest. Results without a session go when they are as old.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from schemas.codec import Codec, DecodeError
from schemas.records import Session
from streams import metrics
from streams.core import SessionKey
from streams.errors import UserError
from streams.kafka import idempotent_producer_config, read_to_end, translated
from streams.settings import Settings
from streams.topics import LOG, SESSIONS, TRANSCRIPTS, Topic

__all__ = ["Swept", "session_of", "sweep", "sweep_interval_s"]

#: Ten looks within the time that calls are kept: they leave at most a tenth late.
_LOOKS: Final = 10
_MIN_INTERVAL_S: Final = 10.0
_MAX_INTERVAL_S: Final = 3_600.0
#: A session that nobody closed, though nothing came of it, is taken for finished this long after its time.
_NEVER_CLOSED_MS: Final = 24 * 3_600_000
_FLUSH_S: Final = 30.0
#: A sweep runs within a worker: it must not take its memory.
_CONSUMER_LIMITS: Final = {"queued.max.messages.kbytes": 1_024, "queued.min.messages": 100}
#: Keys: ``session:segment`` and ``session:segment:refined``; ``session:position:event``.
_RESULT_KEY: Final = re.compile(r"(?P<session>.+):\d+(:[a-z_]+)?")


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found.

    Attributes:
        kept: calls that stay.
        left: calls that left.
        tombstones: records that were written for that.
    """

    kept: int
    left: int
    tombstones: int


class _Known(NamedTuple):
    """A session as its newest record says."""

    at_ms: int
    is_closed: bool


def sweep_interval_s(settings: Settings) -> float:
    """Return how often to sweep."""
    return min(_MAX_INTERVAL_S, max(_MIN_INTERVAL_S, settings.results_retention_ms / 1_000 / _LOOKS))


def session_of(key: bytes) -> str:
    """Return the session that a key of ``asr.transcripts`` or ``asr.log`` belongs to; empty if it is none.

    Examples:
        >>> session_of(b"3f2a:12:refined")
        '3f2a'
    """
    found = _RESULT_KEY.fullmatch(key.decode(errors="replace"))
    return found["session"] if found else ""


def sweep(
    settings: Settings,
    codec: Codec,
    partitions: Collection[int] | None = None,
    *,
    now_ms: int | None = None,
    erase: Collection[str] = (),
    write: bool = True,
) -> Swept:
    """Let calls go that are over for longer than they are kept.

    Args:
        settings: where the topics are, and how long calls are kept (``results_retention_ms``; 0: for ever).
        codec: reads session records.
        partitions: which to look after; unset: all.
        now_ms: the time, Unix time in ms; unset: now.
        erase: sessions that go whatever their age and state.
        write: write tombstones; else only look.

    Raises:
        UserError: the cluster does not answer, or refuses.
    """
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    known = _sessions(settings, codec, partitions)
    gone = {entry: state for entry, state in known.items() if entry.session_id in erase or _is_due(state, settings, now_ms)}
    if not gone:
        return Swept(len(known), 0, 0)
    aged_ms = now_ms - settings.results_retention_ms if settings.results_retention_ms else 0
    results = [
        (topic, partition, key)
        for topic, partition, key, at_ms in _result_keys(settings, {entry.partition for entry in gone})
        if (entry := SessionKey(partition, session_of(key))) in gone or (entry not in known and at_ms < aged_ms)
    ]
    if write:
        # The sessions go last: as long as they are there, the next sweep finds what this one may have left.
        _bury(settings, results)
        _bury(settings, [(SESSIONS, entry.partition, entry.session_id.encode()) for entry in gone])
        metrics.TOMBSTONES.inc(len(results) + len(gone))
    return Swept(len(known) - len(gone), len(gone), len(results) + len(gone))


def _is_due(state: _Known, settings: Settings, now_ms: int) -> bool:
    if not settings.results_retention_ms:
        return False
    return state.at_ms < now_ms - settings.results_retention_ms - (0 if state.is_closed else _NEVER_CLOSED_MS)


def _sessions(settings: Settings, codec: Codec, partitions: Collection[int] | None) -> dict[SessionKey, _Known]:
    known: dict[SessionKey, _Known] = {}
    for message in read_to_end(settings, [SESSIONS], partitions=partitions, config=_CONSUMER_LIMITS):
        value = message.value()
        entry = SessionKey(int(message.partition() or 0), bytes(message.key() or b"").decode(errors="replace"))
        if value is None:
            known.pop(entry, None)
            continue
        try:
            record = codec.decode(value)
        except DecodeError:
            continue  # every reader passes over it; it is told of there
        if isinstance(record, Session):
            known[entry] = _Known(message.timestamp()[1], record.state == "closed")
    return known


def _result_keys(settings: Settings, partitions: Collection[int]) -> Iterator[tuple[Topic, int, bytes, int]]:
    """Yield topic, partition and key of everything that is there, and when it was written last."""
    for topic in (TRANSCRIPTS, LOG):
        found: dict[tuple[int, bytes], int] = {}
        for message in read_to_end(settings, [topic], partitions=partitions, config=_CONSUMER_LIMITS):
            place = int(message.partition() or 0), bytes(message.key() or b"")
            if message.value() is None:
                found.pop(place, None)
            else:
                found[place] = message.timestamp()[1]
        for (partition, key), at_ms in found.items():
            yield topic, partition, key, at_ms


def _bury(settings: Settings, keys: Collection[tuple[Topic, int, bytes]]) -> None:
    """Write tombstones, and wait until they are there."""
    producer = Producer(idempotent_producer_config(settings))
    failures: list[KafkaError] = []
    try:
        for topic, partition, key in keys:
            producer.produce(
                topic.full_name(settings),
                None,
                key,
                partition,
                on_delivery=lambda failure, _message: failures.append(failure) if failure else None,
            )
            producer.poll(0)
        left = producer.flush(_FLUSH_S)
    except KafkaException as refused:
        raise translated(refused, settings, "let finished calls go") from refused
    if failures:
        raise translated(failures[0], settings, "let finished calls go")
    if left:
        raise UserError(f"No broker at {settings.bootstrap_servers} let finished calls go within {_FLUSH_S:.0f} s", "The next sweep does.")
