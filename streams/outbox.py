"""A stage's way out: records to the broker, acknowledged one by one, without a wait on the event loop.

It runs on aiokafka's producer, which has one request under way to each broker and puts whatever has gathered meanwhile, for all
partitions, into the next. librdkafka makes a request for each partition, and a broker's work is mostly requests. One request at a time
also keeps each partition in order; a retry may repeat records, which every reader drops.

While the brokers are away, or a topic is, what was to be sent waits, however long: the inputs that it followed from are not committed, so
no other worker could do better. That is said in the log, and in a metric.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaTimeoutError, UnknownTopicOrPartitionError

from streams import metrics

__all__ = ["Outbox", "OutboxError"]

#: Records of one partition that go into one request.
_BATCH_BYTES: Final = 256 * 1_024
_LOOK_S: Final = 0.01
_WATCH_S: Final = 1.0
#: Brokers that acknowledge nothing for this long are told of; a leader that died is replaced sooner.
_ALARM_AFTER_S: Final = 5.0
_ALARM_EVERY_S: Final = 30.0
_STOP_TIMEOUT_S: Final = 2.0

log = logging.getLogger(__name__)


class OutboxError(RuntimeError):
    """The broker refused a record for good. Going on would lose it, so the worker must stop and be started again."""


class _Letter(NamedTuple):
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes
    on_ack: Callable[[], None]


class Outbox:
    """A producer that sends in order and tells when each record is on all replicas.

    Args:
        config: of the aiokafka producer.
        on_failure: called when a record was refused for good.

    Attributes:
        acknowledged_s: when the broker last took a record, or the connection was made (monotonic clock).
    """

    def __init__(self, config: dict[str, Any], on_failure: Callable[[OutboxError], None]) -> None:
        self._config = config
        self._on_failure = on_failure
        self._producer: AIOKafkaProducer | None = None
        self._sender: asyncio.Task[None] | None = None
        self._waiting: deque[_Letter] = deque()
        self._arrived = asyncio.Event()
        self._unacknowledged = 0
        self.acknowledged_s = time.monotonic()
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect."""
        self._producer = AIOKafkaProducer(acks="all", max_batch_size=_BATCH_BYTES, **self._config)
        # aiokafka has one timeout for a request, which must end soon where a broker hangs, and for a record, which must outlast any outage:
        # given up on, it would be lost, and sent again it would come after its successors.
        self._producer._message_accumulator._batch_ttl = math.inf  # noqa: SLF001 private; aiokafka is pinned
        await self._producer.start()
        self.acknowledged_s = time.monotonic()
        self._sender = asyncio.create_task(self._send_waiting(self._producer))
        self._watcher = asyncio.create_task(self._watch())

    def send(self, topic: str, partition: int | None, key: bytes | None, value: bytes, on_ack: Callable[[], None]) -> None:
        """Send a record; return at once.

        Args:
            topic: full name of the topic.
            partition: its partition; None: by the key.
            key: the record's key.
            value: the record.
            on_ack: what to do once the broker has it on all replicas.
        """
        if not self._unacknowledged:
            self.acknowledged_s = time.monotonic()
        self._unacknowledged += 1
        self._waiting.append(_Letter(topic, partition, key, value, on_ack))
        self._arrived.set()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all is acknowledged; return whether it was, in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._unacknowledged:  # noqa: ASYNC110 once, when the worker stops
                    await asyncio.sleep(_LOOK_S)
        return not self._unacknowledged

    async def stop(self) -> None:
        """Disconnect. What is not acknowledged by now will not be reported any more."""
        for task in (self._sender, self._watcher):
            if task is not None:
                task.cancel()
        if self._producer is not None:
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._producer.stop()
            except TimeoutError:
                await self._producer.client.close()

    async def _send_waiting(self, producer: AIOKafkaProducer) -> None:
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                while self._waiting:
                    letter = self._waiting.popleft()
                    sent = await self._handed_over(producer, letter)
                    sent.add_done_callback(partial(self._acknowledge, letter))
        except Exception as failure:  # noqa: BLE001 aiokafka asserts what it does not expect, and who sends no more must not seem to live
            self._on_failure(OutboxError(f"a record could not be sent: {type(failure).__name__}: {failure}"))

    async def _handed_over(self, producer: AIOKafkaProducer, letter: _Letter) -> asyncio.Future[Any]:
        """Give a record to the producer; waits while its partition's batch is full or its topic is not there."""
        while True:
            try:
                sent: asyncio.Future[Any] = await producer.send(letter.topic, letter.value, key=letter.key, partition=letter.partition)
            except KafkaTimeoutError:
                continue
            except UnknownTopicOrPartitionError:
                log.error(  # noqa: TRY400 what is wrong is all in the message
                    "no broker knows the topic %s: %d records wait for it. If the brokers are there, `asr topics create` makes it.",
                    letter.topic,
                    self._unacknowledged,
                )
                continue
            return sent

    async def _watch(self) -> None:
        """Say so while the brokers acknowledge nothing."""
        alarmed_s = -math.inf
        while True:
            await asyncio.sleep(_WATCH_S)
            now_s = time.monotonic()
            waited_s = now_s - self.acknowledged_s if self._unacknowledged else 0.0
            metrics.OUTBOX_SECONDS.set(waited_s)
            if waited_s >= _ALARM_AFTER_S and now_s - alarmed_s >= _ALARM_EVERY_S:
                alarmed_s = now_s
                log.error("the brokers have acknowledged nothing for %.0f s: %d records wait for them", waited_s, self._unacknowledged)

    def _acknowledge(self, letter: _Letter, sent: asyncio.Future[Any]) -> None:
        if sent.cancelled():
            return
        failure = sent.exception()
        if failure is None:
            self._unacknowledged -= 1
            self.acknowledged_s = time.monotonic()
            letter.on_ack()
        else:
            self._on_failure(OutboxError(f"{letter.topic} did not take a record: {type(failure).__name__}: {failure}"))
