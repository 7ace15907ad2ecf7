"""Records to ``asr.audio``: idempotent, acknowledged by all replicas, each on its session's partition, bounded in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.errors import UserError
from streams.kafka import MissingTopicError, asked, idempotent_producer_config, translated
from streams.settings import Settings
from streams.topics import AUDIO

__all__ = ["STOPPED", "AudioProducer", "SendError"]

#: Why what is left in a queue at the end is lost.
STOPPED: Final = "It was stopped before the broker had taken everything. Let it run on, or see why the broker is slow."
#: Purged records only need their callbacks called.
_PURGE_TIMEOUT_S: Final = 1.0
_ADMIN_TIMEOUT_S: Final = 5.0
#: Audio waits longer for a broker than other records do: memory is bounded, for sources are read no further once the queue is full.
_DELIVERY_TIMEOUT_MS: Final = 300_000
_FOR_EVER_MS: Final = 0
_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 librdkafka's own names
_OWN_FAULT: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError._BAD_MSG})  # noqa: SLF001


class SendError(UserError):
    """A record was not delivered.

    Args:
        cause: why.
        remedy: what to do about it.
        is_own_fault: sent again, it would fail again.
        is_fatal: the client fails from now on, whatever it is given.
    """

    def __init__(self, cause: str, remedy: str = "", *, is_own_fault: bool = False, is_fatal: bool = False) -> None:
        super().__init__(cause, remedy)
        self.is_own_fault = is_own_fault
        self.is_fatal = is_fatal


class AudioProducer:
    """Sends records from one thread: callbacks come while it polls or finishes.

    Args:
        settings: where to, and how.
        patient: try for ever, for whoever sends the records keeps them; else for 5 minutes.
    """

    def __init__(self, settings: Settings, *, patient: bool = False) -> None:
        self._settings = settings
        self._topic = AUDIO.full_name(settings)
        timeout_ms = _FOR_EVER_MS if patient else _DELIVERY_TIMEOUT_MS
        self._config = idempotent_producer_config(settings) | {"delivery.timeout.ms": timeout_ms}
        self._producer = Producer(self._config)

    def check(self) -> str:
        """Make sure that the topic can be reached and has the session's partitions; return the cluster's id.

        Raises:
            UserError: it has not; the message says what to do.
        """
        metadata = asked(self._settings, "list its topics", lambda client: client.list_topics(timeout=_ADMIN_TIMEOUT_S))
        if self._topic not in metadata.topics:
            raise MissingTopicError(
                f"Kafka at {self._settings.bootstrap_servers} has no topic {self._topic}", "Create the topics with `asr topics create`."
            )
        found = len(metadata.topics[self._topic].partitions)
        if found < self._settings.partitions:
            raise UserError(
                f"The topic {self._topic} has {found} partitions, fewer than ASR_PARTITIONS={self._settings.partitions}",
                f"Set ASR_PARTITIONS={found} everywhere, or create the topics anew.",
            )
        return str(metadata.cluster_id)

    def offer(self, partition: int, key: bytes, value: bytes, on_delivery: Callable[[SendError | None], None]) -> bool:
        """Hand a record over; return False if the queue is full.

        Args:
            partition: the session's.
            key: the record's.
            value: the record.
            on_delivery: called once if it was taken, with None when all replicas have it, else with why they have not.
        """

        def delivered(error: KafkaError | None, _message: Message | None) -> None:
            on_delivery(None if error is None else self._explain(error))

        try:
            self._producer.produce(self._topic, value=value, key=key, partition=partition, on_delivery=delivered)
        except BufferError:
            return False
        except KafkaException as failure:
            on_delivery(self._explain(failure.args[0]))
        return True

    def poll(self, wait_s: float = 0.0) -> None:
        """Call what is due of the ``on_delivery`` callbacks."""
        self._producer.poll(wait_s)

    def renew(self) -> None:
        """Begin with a new client; callbacks of what the old one held come with an error. For errors that a client does not survive."""
        old, self._producer = self._producer, Producer(self._config)
        _purge(old)

    def finish(self, deadline_s: float) -> None:
        """Wait until all is delivered; callbacks of what is not by then come with an error.

        Args:
            deadline_s: on the monotonic clock.
        """
        if self._producer.flush(max(0.0, deadline_s - time.monotonic())):
            _purge(self._producer)

    def _explain(self, error: KafkaError) -> SendError:
        if error.code() in _PURGED:
            return SendError(STOPPED)
        reason = translated(error, self._settings, f"take audio on {self._topic}")
        return SendError(reason.cause, reason.remedy, is_own_fault=error.code() in _OWN_FAULT, is_fatal=error.fatal())


def _purge(producer: Producer) -> None:
    producer.purge()
    producer.flush(_PURGE_TIMEOUT_S)
