"""Records to ``asr.audio``: idempotent, acknowledged by all replicas, each on its session's partition, bounded in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from schemas.codec import Codec
from schemas.records import FlowRecord
from streams.errors import UserError
from streams.kafka import idempotent_producer_config, partitions_of, translated
from streams.settings import Settings
from streams.topics import AUDIO

__all__ = ["AudioProducer"]

_STOPPED: Final = "It was stopped before the broker had taken everything. Let it run on, or see why the broker is slow."
#: How long a full queue may block before it is tried again.
_FULL_QUEUE_WAIT_S: Final = 0.05
#: Purged records only need their callbacks called.
_PURGE_TIMEOUT_S: Final = 1.0
#: Audio waits longer for a broker than other records do: memory is bounded, for sources are read no further once the queue is full.
_DELIVERY_TIMEOUT_MS: Final = 300_000


class AudioProducer:
    """Sends records of sessions, from one thread: callbacks come while it sends, polls or finishes.

    Args:
        settings: where to, and how.
        codec: how records become bytes.
    """

    def __init__(self, settings: Settings, codec: Codec) -> None:
        self._settings = settings
        self._codec = codec
        self._topic = AUDIO.full_name(settings)
        self._given_up = threading.Event()
        self._producer = Producer(idempotent_producer_config(settings) | {"delivery.timeout.ms": _DELIVERY_TIMEOUT_MS})

    def check(self) -> None:
        """Make sure that the topic can be reached and has the session's partitions.

        Raises:
            UserError: it has not; the message says what to do.
        """
        found = len(partitions_of(self._settings, [AUDIO]))
        if found < self._settings.partitions:
            raise UserError(
                f"The topic {self._topic} has {found} partitions, fewer than ASR_PARTITIONS={self._settings.partitions}",
                f"Set ASR_PARTITIONS={found} everywhere, or create the topics anew.",
            )

    def send(self, record: FlowRecord, partition: int, on_delivery: Callable[[str | None], None]) -> None:
        """Hand a record over; waits while the queue is full.

        Args:
            record: of a session, in the session's order.
            partition: the session's.
            on_delivery: called once, with None when all replicas have it, else with why it is lost.
        """
        value = self._codec.encode(record)

        def delivered(error: KafkaError | None, _message: Message | None) -> None:
            on_delivery(None if error is None else self._explain(error))

        while True:
            try:
                self._producer.produce(self._topic, value=value, key=record.channel_id.encode(), partition=partition, on_delivery=delivered)
            except BufferError:
                if self._given_up.is_set():
                    on_delivery(_STOPPED)
                    return
                self._producer.poll(_FULL_QUEUE_WAIT_S)
            except KafkaException as failure:
                on_delivery(self._explain(failure))
                return
            else:
                return

    def poll(self) -> None:
        """Call what is due of the ``on_delivery`` callbacks."""
        self._producer.poll(0)

    def give_up(self) -> None:
        """Wait for nothing any more: what does not fit into the queue is lost. Any thread may call it."""
        self._given_up.set()

    def finish(self, deadline_s: float) -> None:
        """Wait until all is delivered; what is not by then is counted as lost.

        Args:
            deadline_s: on the monotonic clock.
        """
        if self._producer.flush(max(0.0, deadline_s - time.monotonic())):
            self._producer.purge()
            self._producer.flush(_PURGE_TIMEOUT_S)

    def _explain(self, error: KafkaError | KafkaException) -> str:
        kafka_error: KafkaError = error.args[0] if isinstance(error, KafkaException) else error
        if kafka_error.name() in ("_PURGE_QUEUE", "_PURGE_INFLIGHT"):
            return _STOPPED
        return str(translated(error, self._settings, f"take audio on {self._topic}"))
