"""A stage's way out: records to the broker, acknowledged one by one, without a wait on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import KafkaError, Message, Producer

__all__ = ["Outbox", "OutboxError"]

#: How long the poll thread waits for acknowledgements before it looks whether it is to stop.
_POLL_TIMEOUT_S: Final = 0.1
#: How long a full local queue may block before it is tried again.
_FULL_QUEUE_WAIT_S: Final = 0.05
#: librdkafka's RD_KAFKA_PARTITION_UA: let the partitioner choose.
_BY_KEY: Final = -1


class OutboxError(RuntimeError):
    """The broker refused a record for good. Going on would lose it, so the worker must stop and be started again."""


class Outbox:
    """An idempotent producer whose acknowledgements arrive on the event loop.

    Args:
        config: of the confluent-kafka producer; idempotent, with acks from all replicas.
        on_failure: called on the event loop when a record was refused for good.
    """

    def __init__(self, config: dict[str, Any], on_failure: Callable[[OutboxError], None]) -> None:
        self._producer = Producer(config)
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        self._acknowledged: deque[Callable[[], None]] = deque()
        self._waking = threading.Event()
        self._stopping = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="outbox", daemon=True)

    def start(self) -> None:
        """Begin; call it on the event loop that acknowledgements are to arrive on."""
        self._loop = asyncio.get_running_loop()
        self._poller.start()

    def send(self, topic: str, partition: int | None, key: bytes | None, value: bytes, on_ack: Callable[[], None]) -> None:
        """Send a record; ``on_ack`` is called on the event loop once the broker has it on all replicas.

        Args:
            topic: full name of the topic.
            partition: its partition; None: by the key.
            key: the record's key.
            value: the record.
            on_ack: what to do then.
        """

        def delivered(error: KafkaError | None, _message: Message) -> None:
            if error is None:
                self._acknowledged.append(on_ack)
            else:
                refused = OutboxError(f"{topic} did not take a record: {error.str()}")
                self._acknowledged.append(lambda: self._on_failure(refused))
            self._wake()

        placed = _BY_KEY if partition is None else partition
        while True:
            try:
                self._producer.produce(topic, value=value, key=key, partition=placed, on_delivery=delivered)
            except BufferError:  # the local queue is full: the broker is slow or away
                self._producer.poll(_FULL_QUEUE_WAIT_S)
            else:
                return

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all is acknowledged; return whether it was, in time."""
        left = await asyncio.to_thread(self._producer.flush, timeout_s)
        await asyncio.sleep(0)
        self._drain()
        return bool(left == 0)

    def stop(self) -> None:
        """Stop the poll thread. What is not acknowledged by now will not be reported any more."""
        self._stopping.set()
        if self._poller.is_alive():
            self._poller.join()

    def _poll(self) -> None:
        while not self._stopping.is_set():
            self._producer.poll(_POLL_TIMEOUT_S)

    def _wake(self) -> None:
        # One wake-up for all acknowledgements of a poll: the loop's self-pipe costs more than they do.
        if self._loop is not None and not self._waking.is_set():
            self._waking.set()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._waking.clear()
        while self._acknowledged:
            self._acknowledged.popleft()()
