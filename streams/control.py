"""What administrators push while calls are live, as every worker reads it: a plain consumer beside the stages, in no group.

A table would stand still in each rebalance; this reads on, so a push reaches all workers within moments, whatever else goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import KafkaError, TopicPartition

from schemas.codec import Codec, DecodeError
from schemas.digest import hotword_version
from schemas.records import HotwordList, Rejected
from streams import metrics
from streams.errors import UserError
from streams.kafka import ClusterError, plain_consumer
from streams.settings import Settings
from streams.topics import HOTWORDS

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

__all__ = ["VERSION_SEPARATOR", "Control", "HotwordBook", "PushedList", "archive_key", "pushed_list"]

log = logging.getLogger(__name__)

#: Joins the versions of several lists that are in force together.
VERSION_SEPARATOR: Final = "+"
#: Between a list's name and its version, in the key of the copy that outlives the next push.
_ARCHIVED: Final = ":"
#: Those who compile a list get this long before sessions begin to name it: 50,000 phrases take less.
_HEAD_START_S: Final = 1.0
_POLL_S: Final = 0.2
#: A broker or a registry that does not answer is asked again after this long.
_ASK_AGAIN_S: Final = 5.0
#: Lists that are out of force stay in memory up to this size, the newest ones: 20 of 50,000 phrases. Of others it is known where they lie.
_VALUES_KEPT_BYTES: Final = 32 * 2**20
_FETCH_S: Final = 10.0
#: What is there when a worker starts is to be known before it works; a topic that cannot be read is no reason to do nothing.
_CATCH_UP_S: Final = 15.0


def archive_key(name: str, version: str) -> str:
    """Return the key of a list's copy that stays when another version is pushed, so that a replay finds it."""
    return f"{name}{_ARCHIVED}{version}"


class PushedList(NamedTuple):
    """A list of hotwords as it lies on the topic.

    Attributes:
        name: its name.
        version: what it is called by content; empty: no phrases.
        pushed_us: when it was pushed, Unix time in microseconds.
        phrases: how many.
        value: the record, encoded; empty where it was too much to keep, see :meth:`Control.fetched`.
        offset: where it lies.
    """

    name: str
    version: str
    pushed_us: int
    phrases: int
    value: bytes
    offset: int = 0


def pushed_list(codec: Codec, key: str, value: bytes) -> PushedList:
    """Return what a record of the topic holds.

    Raises:
        DecodeError: it cannot be used.
    """
    record = codec.decode(value)
    if not isinstance(record, HotwordList):
        raise DecodeError(f"a {type(record).__name__} does not belong on this topic")
    if key not in (record.name, archive_key(record.name, record.version)):
        raise DecodeError(f"the list {record.name!r} stands under the key {key!r}")
    content = hotword_version(record.phrases)
    if record.version != content:
        raise DecodeError(f"the list {record.name!r} is called version {record.version!r}, but its content is {content!r}")
    return PushedList(record.name, record.version, record.pushed_us, len(record.phrases), value)


@dataclass(slots=True)
class HotwordBook:
    """The lists that are in force, by name, and every version that a session may still name."""

    in_force: dict[str, PushedList] = field(default_factory=dict)
    archive: dict[str, PushedList] = field(default_factory=dict)

    def take(self, key: str, pushed: PushedList | None) -> None:
        """Take a record of the topic, or its deletion (None)."""
        archived = _ARCHIVED in key
        if pushed is None:
            (self.archive if archived else self.in_force).pop(key, None)
            return
        if not archived:
            self.in_force[key] = pushed
        if pushed.version:
            key = archive_key(pushed.name, pushed.version)
            # The copy's own record stays; the one under the list's name goes with the next push.
            lasting = self.archive.pop(key, pushed) if not archived else pushed
            self.archive[key] = pushed._replace(offset=lasting.offset)
            self._forget_values()

    def _forget_values(self) -> None:
        """Let go of what the oldest lists hold, when all that are out of force hold too much."""
        needed = {archive_key(pushed.name, pushed.version) for pushed in self.in_force.values()}
        kept_bytes = 0
        for key, pushed in reversed(self.archive.items()):
            kept_bytes += len(pushed.value)
            if kept_bytes > _VALUES_KEPT_BYTES and key not in needed and pushed.value:
                self.archive[key] = pushed._replace(value=b"")

    @property
    def version(self) -> str:
        """What is in force: all lists together; empty: no phrases."""
        return VERSION_SEPARATOR.join(sorted({pushed.version for pushed in self.in_force.values() if pushed.version}))

    @property
    def names(self) -> str:
        """The lists that are in force, for people."""
        return ", ".join(sorted(name for name, pushed in self.in_force.items() if pushed.version))

    def parts(self, version: str) -> tuple[PushedList, ...] | None:
        """Return the lists that a version is made of, or None if one is not known."""
        known = {pushed.version: pushed for pushed in self.archive.values()}
        wanted = version.split(VERSION_SEPARATOR)
        return tuple(known[part] for part in wanted) if all(part in known for part in wanted) else None


class Control:
    """See the module. All but the reading happens on the event loop.

    Args:
        settings: where the brokers are.
        codec: decodes the records.
        reject: told of records that cannot be used.
        clock: seconds that only go on.
    """

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        reject: Callable[[Rejected], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hotwords = HotwordBook()
        self.settings = settings
        self._codec = codec
        self._send_rejected = reject
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._caught_up = asyncio.Event()
        self._announced = ""
        self._news_s = -math.inf
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Read what is there, and follow what comes.

        Raises:
            ClusterError: the topic does not exist, or no broker answers.
        """
        # Told of the end: compaction may leave nothing at the offsets before it.
        config = {"enable.partition.eof": True}
        consumer = await asyncio.to_thread(plain_consumer, self.settings, [HOTWORDS], "beginning", config)
        self._thread = threading.Thread(target=self._read, args=(consumer, asyncio.get_running_loop()), name="control", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                await self._caught_up.wait()
        except TimeoutError:
            log.warning("the hotwords were not read within %.0f s: going on without those that are not there yet", _CATCH_UP_S)
        self._announced = self.hotwords.version

    async def stop(self) -> None:
        """Read no more."""
        self._stopping.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call a listener after each change."""
        self._listeners.append(listener)

    @property
    def hotwords_to_announce(self) -> str:
        """The version that sessions are to name: the one in force, a moment after it came, so that it is compiled by then."""
        if self._announced != self.hotwords.version and self._clock() >= self._news_s + _HEAD_START_S:
            self._announced = self.hotwords.version
        return self._announced

    def fetched(self, lists: tuple[PushedList, ...]) -> tuple[PushedList, ...]:
        """Return lists with what they hold, from the topic where it was too much to keep. Any thread may ask; it may take seconds.

        Raises:
            LookupError: it is not there any more.
            ClusterError: no broker answers.
        """
        return tuple(each if each.value else each._replace(value=self._read_again(each)) for each in lists)

    def _read_again(self, pushed: PushedList) -> bytes:
        consumer = plain_consumer(self.settings, [TopicPartition(HOTWORDS.full_name(self.settings), 0, pushed.offset)])
        try:
            deadline_s = time.monotonic() + _FETCH_S
            while time.monotonic() < deadline_s:
                message = consumer.poll(_POLL_S)
                if message is None or message.error() is not None:
                    continue
                key, value = (message.key() or b"").decode(errors="replace"), message.value()
                with contextlib.suppress(DecodeError):
                    if value is not None and pushed_list(self._codec, key, value).version == pushed.version:
                        return value
                raise LookupError(f"the list {pushed.name} of version {pushed.version} is not on the topic any more")
        finally:
            consumer.close()
        raise ClusterError(f"the list {pushed.name} did not come within {_FETCH_S:.0f} s")

    @property
    def ever_pushed(self) -> bool:
        """Whether there ever was a list."""
        return bool(self.hotwords.in_force)

    # ------------------------------------------------------------------ on the event loop

    def take(self, key: str, pushed: PushedList | None) -> None:
        """Take a record of the topic, or its deletion (None)."""
        before = self.hotwords.version
        self.hotwords.take(key, pushed)
        if self.hotwords.version == before:
            return
        if self._announced == before:
            self._news_s = self._clock()
        if self._caught_up.is_set():
            log.info("hotwords %s are in force (%s)", self.hotwords.version or "none", self.hotwords.names or "no list")
        for listener in self._listeners:
            listener()

    def reject(self, rejected: Rejected) -> None:
        """Put onto the rejected topic what cannot be used, with its reason."""
        metrics.REJECTED.labels(rejected.stage).inc()
        self._send_rejected(rejected)

    # ------------------------------------------------------------------ on the thread

    def _read(self, consumer: Consumer, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            while not self._stopping.is_set():
                message = consumer.poll(_POLL_S)
                if message is None:
                    continue
                failure = message.error()
                if failure is None:
                    self._take_in_time(message, loop)
                elif failure.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 confluent-kafka has no other name for it
                    loop.call_soon_threadsafe(self._caught_up.set)
                else:
                    log.warning("the hotwords cannot be read now: %s", failure.str())
        consumer.close()

    def _take_in_time(self, message: Message, loop: asyncio.AbstractEventLoop) -> None:
        """Take a record, as soon as the schema registry that it may need answers."""
        while not self._stopping.is_set():
            try:
                self._take_message(message, loop)
            except UserError as away:
                log.error("the hotwords at offset %s cannot be read yet: %s", message.offset(), away)  # noqa: TRY400 it is all in the message
                self._stopping.wait(_ASK_AGAIN_S)
            else:
                return

    def _take_message(self, message: Message, loop: asyncio.AbstractEventLoop) -> None:
        key, value = (message.key() or b"").decode(errors="replace"), message.value()
        try:
            pushed = None if value is None else pushed_list(self._codec, key, value)._replace(offset=message.offset() or 0)
        except DecodeError as unusable:
            rejected = Rejected(
                topic=message.topic() or "",
                partition=message.partition() or 0,
                offset=message.offset() or 0,
                stage="control",
                reason=str(unusable),
                at_us=time.time_ns() // 1_000,
                key=message.key(),
            )
            log.error("record %d of %s rejected: %s", rejected.offset, rejected.topic, rejected.reason)  # noqa: TRY400 the cause is in it
            loop.call_soon_threadsafe(self.reject, rejected)
            return
        loop.call_soon_threadsafe(self.take, key, pushed)
