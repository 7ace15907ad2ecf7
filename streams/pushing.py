"""What an administrator does with lists of hotwords: read what is on the topic, push another list, take one out of force."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Producer

from schemas.codec import Codec, DecodeError
from schemas.digest import hotword_version
from schemas.records import Hotword, HotwordList
from streams.control import HotwordBook, PushedList, archive_key, pushed_list
from streams.errors import UserError
from streams.kafka import MAX_RECORD_BYTES, idempotent_producer_config, plain_consumer, translated
from streams.settings import Settings
from streams.topics import HOTWORDS

__all__ = ["MOST_LISTS", "push_hotwords", "read_hotwords"]

#: The lists in force are named together in each session's snapshot.
MOST_LISTS: Final = 8
#: Lists are made by people; more would make everything sound like a phrase, and loop.
_LARGEST_BOOST: Final = 100.0
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DELIVERY_S: Final = 30.0
_READ_S: Final = 30.0
_US_PER_MS: Final = 1_000


def read_hotwords(settings: Settings, codec: Codec) -> HotwordBook:
    """Return what is on the topic.

    Raises:
        ClusterError: the topic does not exist, or no broker answers.
    """
    consumer = plain_consumer(settings, [HOTWORDS], "beginning", {"enable.partition.eof": True})
    book = HotwordBook()
    deadline_s = time.monotonic() + _READ_S
    try:
        while time.monotonic() < deadline_s:
            message = consumer.poll(_READ_S)
            if message is None:
                break
            failure = message.error()
            if failure is not None:
                if failure.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 confluent-kafka has no other name for it
                    return book
                raise translated(failure, settings, "read the hotwords")
            key, value = (message.key() or b"").decode(errors="replace"), message.value()
            try:
                book.take(key, None if value is None else pushed_list(codec, key, value))
            except DecodeError:
                continue  # every worker has refused it, and said so
    finally:
        consumer.close()
    raise UserError(f"The hotwords were not read within {_READ_S:.0f} s", "Is the broker very busy?")


def push_hotwords(settings: Settings, codec: Codec, name: str, phrases: Sequence[Hotword]) -> PushedList:
    """Put a list into force in place of the one of the same name; sessions that run use it from their next segment's end on.

    Beside the list goes a copy that stays when the next one is pushed: whoever replays a segment that names it finds it there. Copies that
    were out of force for longer than audio is kept are deleted.

    Args:
        settings: where the brokers are.
        codec: encodes the records.
        name: of the list: letters, digits, dots, dashes and underscores.
        phrases: the list; an empty one takes it out of force.

    Returns:
        the list as it was pushed.

    Raises:
        UserError: the name or the list cannot be used, or the brokers do not take it.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be a list's name", "Use up to 64 letters, digits, dots, dashes and underscores.")
    for hotword in phrases:
        if not abs(hotword.boost) <= _LARGEST_BOOST:
            raise UserError(f"the boost of {hotword.phrase!r} is {hotword.boost:g}", f"{_LARGEST_BOOST:g} is the most.")
    book = read_hotwords(settings, codec)
    others = [other for other, pushed in book.in_force.items() if pushed.version and other != name]
    if phrases and len(others) >= MOST_LISTS:
        raise UserError(f"{len(others)} lists are in force", f"{MOST_LISTS} are the most: put them together, or clear one.")
    record = HotwordList(name=name, version=hotword_version(phrases), pushed_us=time.time_ns() // 1_000, phrases=tuple(phrases))
    value = codec.encode(record)
    if len(value) > MAX_RECORD_BYTES:
        raise UserError(
            f"the list {name} takes {len(value)} bytes", f"{MAX_RECORD_BYTES} are the most: push it in parts, under several names."
        )
    messages: list[tuple[str, bytes | None]] = []
    if record.version:
        messages.append((archive_key(name, record.version), value))
    messages.append((name, value))
    messages += [(key, None) for key in _outlived(book, name, record, settings.audio_retention_ms)]
    _produce(settings, messages)
    return PushedList(name, record.version, record.pushed_us, len(phrases), value)


def _outlived(book: HotwordBook, name: str, new: HotwordList, kept_ms: int) -> list[str]:
    """Return the keys of copies that no session and no audio can name any more."""
    own = sorted(
        (
            (pushed.pushed_us, key, pushed.version)
            for key, pushed in book.archive.items()
            if pushed.name == name and key.startswith(f"{name}:")
        ),
    )
    if name in book.in_force and not book.in_force[name].version:
        own.append((book.in_force[name].pushed_us, "", ""))
    own.append((new.pushed_us, "", new.version))
    before_us = new.pushed_us - kept_ms * _US_PER_MS
    return [key for (_, key, version), (ended_us, _, _) in pairwise(own) if key and ended_us < before_us and version != new.version]


def _produce(settings: Settings, messages: Sequence[tuple[str, bytes | None]]) -> None:
    producer = Producer(idempotent_producer_config(settings))
    failures: list[KafkaError] = []
    topic = HOTWORDS.full_name(settings)
    try:
        for key, value in messages:
            producer.produce(topic, value, key.encode(), on_delivery=lambda failure, _: failures.append(failure) if failure else None)
        left = producer.flush(_DELIVERY_S)
    except KafkaException as refused:
        raise translated(refused, settings, "take a list of hotwords") from refused
    if failures:
        raise translated(failures[0], settings, "take a list of hotwords")
    if left:
        raise UserError(f"No broker at {settings.bootstrap_servers} took the list within {_DELIVERY_S:.0f} s", "Try again.")
