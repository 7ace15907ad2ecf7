"""A stage's way out: records to the broker, acknowledged one by one, without a wait on the event loop.

It runs on aiokafka's producer, which has one request under way to each broker and puts whatever has gathered meanwhile, for all
partitions, into the next. librdkafka makes a request for each partition, and a broker's work is mostly requests. One request at a time
also keeps each partition in order; a retry may repeat records, which every reader drops.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

__all__ = ["Outbox", "OutboxError"]

#: Records of one partition that go into one request.
_BATCH_BYTES: Final = 256 * 1_024
_LOOK_S: Final = 0.01


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

    async def start(self) -> None:
        """Connect."""
        self._producer = AIOKafkaProducer(acks="all", max_batch_size=_BATCH_BYTES, **self._config)
        await self._producer.start()
        self.acknowledged_s = time.monotonic()
        self._sender = asyncio.create_task(self._send_waiting(self._producer))

    def send(self, topic: str, partition: int | None, key: bytes | None, value: bytes, on_ack: Callable[[], None]) -> None:
        """Send a record; return at once.

        Args:
            topic: full name of the topic.
            partition: its partition; None: by the key.
            key: the record's key.
            value: the record.
            on_ack: what to do once the broker has it on all replicas.
        """
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
        if self._sender is not None:
            self._sender.cancel()
        if self._producer is not None:
            await self._producer.stop()

    async def _send_waiting(self, producer: AIOKafkaProducer) -> None:
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                while self._waiting:
                    letter = self._waiting.popleft()
                    # Waits only while the partition's batch is full: the broker is slow or away.
                    sent = await producer.send(letter.topic, letter.value, key=letter.key, partition=letter.partition)
                    sent.add_done_callback(partial(self._acknowledge, letter))
        except KafkaError as failure:
            self._on_failure(OutboxError(f"a record could not be sent: {type(failure).__name__}: {failure}"))

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
