"""Questions to the brokers: who is in a group, what it has committed, where partitions end. They may fail: brokers are killed.

It asks with aiokafka, on an event loop in a thread of its own. With librdkafka's admin client a run ended in a segmentation fault of that
library while it was asking.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition

__all__ = ["Cluster", "Group"]

_T = TypeVar("_T")

_TIMEOUT_S: Final = 3.0
_START_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group.

    Attributes:
        state: as Kafka names it, such as ``Stable``; empty where the brokers do not answer.
        owned: the partition numbers of each member, on any topic, by its client id.
    """

    state: str = ""
    owned: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class Cluster:
    """See the module. Any thread may ask.

    Args:
        bootstrap_servers: the brokers.
    """

    def __init__(self, bootstrap_servers: str) -> None:
        self._servers = bootstrap_servers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._admin: Any = None
        self._consumer: Any = None

    def start(self) -> None:
        """Connect."""
        self._thread.start()
        self._run(self._start(), _START_TIMEOUT_S)

    def close(self) -> None:
        """Disconnect."""
        self._asked(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def group(self, name: str) -> Group:
        """Return who is in a group, and what each member owns; an empty one while the brokers do not say."""
        return self._asked(self._describe(name)) or Group()

    def coordinator(self, group: str) -> int | None:
        """Return the broker that coordinates a group; None while there is none."""
        return self._asked(self._admin.find_coordinator(group))

    def leader(self, topic: str, partition: int) -> int | None:
        """Return the broker that leads a partition; None while there is none."""
        described = self._asked(self._admin.describe_topics([topic])) or []
        leaders = {each["partition"]: each["leader"] for topic in described for each in topic["partitions"]}
        return leaders.get(partition)

    def short_of_copies(self) -> int:
        """Return how many partitions have fewer copies in step than they should; 1 while the brokers do not say."""
        described = self._asked(self._admin.describe_topics())
        if described is None:
            return 1
        return sum(len(each["isr"]) < len(each["replicas"]) for topic in described for each in topic["partitions"])

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        """Return a group's committed offsets, by topic and partition; nothing while the brokers do not say."""
        offsets = self._asked(self._admin.list_consumer_group_offsets(group)) or {}
        return {(at.topic, at.partition): found.offset for at, found in offsets.items()}

    def ends(self, partitions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the offsets that the next records will get; nothing while the brokers do not say."""
        ends = self._asked(self._consumer.end_offsets([TopicPartition(*each) for each in partitions])) or {}
        return {(at.topic, at.partition): end for at, end in ends.items()}

    async def _start(self) -> None:
        self._admin = AIOKafkaAdminClient(bootstrap_servers=self._servers, request_timeout_ms=round(_TIMEOUT_S * 1_000))
        self._consumer = AIOKafkaConsumer(bootstrap_servers=self._servers, request_timeout_ms=round(_TIMEOUT_S * 1_000))
        await self._admin.start()
        await self._consumer.start()

    async def _stop(self) -> None:
        await self._admin.close()
        await self._consumer.stop()

    async def _describe(self, name: str) -> Group:
        (response,) = await self._admin.describe_consumer_groups([name])
        (group,) = (dict(zip(("error", "group", "state", "type", "protocol", "members"), each, strict=False)) for each in response.groups)
        owned = {}
        for _, client_id, _, _, assigned, *_ in group["members"]:
            assignment = ConsumerProtocolMemberAssignment.decode(assigned) if assigned else None
            owned[client_id] = tuple(sorted({at.partition for at in assignment.partitions()})) if assignment is not None else ()
        return Group(group["state"], owned)

    def _asked(self, question: Coroutine[Any, Any, _T]) -> _T | None:
        """Return the answer, or None where the brokers do not give one in time."""
        try:
            return self._run(question, _TIMEOUT_S)
        except (KafkaError, TimeoutError, OSError):
            return None

    def _run(self, question: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        asked = asyncio.run_coroutine_threadsafe(asyncio.wait_for(question, timeout_s), self._loop)
        return asked.result()
