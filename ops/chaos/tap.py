"""Reads live what the system answers, to know when each answer could be read. Like the checker, it shares no code with the pipeline."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Final, Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

from ops.chaos.checker import Decoder

__all__ = ["Tap"]

_TOPICS: Final = ("coverage", "sessions")
_METADATA_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.1


class Tap:
    """A reader of coverage and sessions; a context manager.

    Args:
        bootstrap_servers: the brokers.
        namespace: what the topics' names begin with.
        decoder: of the records.

    Attributes:
        read_us: by (partition, offset) of a record on the coverage topic, when it was read, Unix time in µs.
        closed: sessions whose end was written.
    """

    def __init__(self, bootstrap_servers: str, namespace: str, decoder: Decoder) -> None:
        self.read_us: dict[tuple[int, int], int] = {}
        self.closed: set[str] = set()
        self._namespace = namespace
        self._decoder = decoder
        self._stopping = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": f"{namespace}.tap",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 100,
                "reconnect.backoff.ms": 50,
                "reconnect.backoff.max.ms": 500,
                "log_level": 0,
                "error_cb": lambda _error: None,
            }
        )
        self._thread = threading.Thread(target=self._read, name="tap", daemon=True)

    def __enter__(self) -> Self:
        partitions = []
        for topic in _TOPICS:
            name = f"{self._namespace}.{topic}"
            metadata = self._consumer.list_topics(name, timeout=_METADATA_TIMEOUT_S).topics[name]
            partitions += [TopicPartition(name, number, OFFSET_BEGINNING) for number in metadata.partitions]
        self._consumer.assign(partitions)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join()
        self._consumer.close()

    def _read(self) -> None:
        coverage = f"{self._namespace}.coverage"
        while not self._stopping.is_set():
            with contextlib.suppress(KafkaException):
                message = self._consumer.poll(_POLL_S)
                if message is None or message.error():
                    continue
                if message.topic() == coverage:
                    self.read_us[int(message.partition() or 0), int(message.offset() or 0)] = time.time_ns() // 1_000
                    continue
                _, fields = self._decoder.decode(message.value())
                if fields.get("state") == "closed":
                    self.closed.add(fields["session_id"])
