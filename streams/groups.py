"""Which consumer groups there are, and how calls move from one to another while they are live.

All stages in one worker share the group ``<namespace>``; a stage that runs alone has ``<namespace>.<stage>``. State belongs to a group, for
it lies in its commits. So to go from the one way of running to the other, the commits are copied, snapshots and all: the new workers begin
where the old ones stood, and both may run for a while. They mark what they write with their epochs, which the copy lets leap, so every
reader drops what the old ones still write.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.structs import OffsetAndMetadata, TopicPartition
from confluent_kafka.admin import AdminClient

from schemas.records import StageName
from streams import topics
from streams.checkpoint import Committed, Snapshot
from streams.errors import UserError
from streams.kafka import ClusterError, aiokafka_client_config, asked
from streams.settings import STAGES, Settings
from streams.topics import Topic

__all__ = ["SOURCES", "GroupsError", "Layout", "Moved", "committed_of", "group_of", "move_groups", "moved"]

Layout = Literal["all", "stages"]

#: What each stage reads.
SOURCES: Final[Mapping[StageName, Topic]] = {"vad": topics.AUDIO, "features": topics.SPEECH, "inference": topics.FEATURES}
#: More owners than a partition can get through in the group that is left, while its workers still run.
_EPOCH_LEAP: Final = 1_000


class GroupsError(UserError):
    """A move that would lose something, or that has nothing to move."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What was moved of one stage.

    Attributes:
        stage: the stage.
        source: the group that it was taken from.
        target: the group that has it now.
        partitions: how many.
        sessions: open sessions in their snapshots.
    """

    stage: StageName
    source: str
    target: str
    partitions: int
    sessions: int


def group_of(settings: Settings, stage: StageName, layout: Layout) -> str:
    """Return the consumer group that has a stage's state."""
    return settings.namespace if layout == "all" else f"{settings.namespace}.{stage}"


def moved(source: Mapping[TopicPartition, Committed], target: Mapping[TopicPartition, Committed]) -> dict[TopicPartition, Committed]:
    """Return the commits for a group that is to go on where another one stands.

    Args:
        source: what the other group has committed.
        target: what this one has, from an earlier time.

    Raises:
        GroupsError: this group is the one that is further.
        SnapshotError: a snapshot is of a version that this release does not read.
    """
    result = {}
    for tp, each in source.items():
        if not each.metadata:
            continue
        snapshot = Snapshot.unpack(each.metadata)
        there = target.get(tp)
        if there is not None and there.metadata and Snapshot.unpack(there.metadata).epoch > snapshot.epoch:
            raise GroupsError(
                f"{tp.topic}-{tp.partition} has had more owners in the group that it would move to than in the one that it would leave",
                "The calls are there already: start that group's workers.",
            )
        onward = msgspec.structs.replace(snapshot, epoch=snapshot.epoch + _EPOCH_LEAP)
        result[tp] = Committed(each.offset, onward.pack(max_bytes=2 * len(each.metadata)))
    return result


async def committed_of(settings: Settings, group: str) -> dict[TopicPartition, Committed]:
    """Return what a group has committed.

    Raises:
        ClusterError: the cluster does not answer.
    """
    async with _Admin(settings) as admin:
        answer = await admin._send_request(OffsetFetchRequest(group, None), await admin.find_coordinator(group))  # noqa: SLF001
    # aiokafka's own call does not look at this one: a coordinator that does not know the group's commits yet would pass for a new group.
    if answer.error_code:
        raise ClusterError(f"What {group} has committed cannot be read now ({for_code(answer.error_code).__name__})", "Try again.")
    return {
        TopicPartition(topic, number): Committed(offset, metadata)
        for topic, partitions in answer.topics
        for number, offset, metadata, _ in partitions
    }


def move_groups(settings: Settings, to: Layout) -> list[Moved]:
    """Copy the state of all stages to the groups of another way of running, whose workers are started next.

    Args:
        settings: where the brokers are.
        to: ``stages``: a group for each; ``all``: one group for all.

    Raises:
        GroupsError: a group to move to has workers, or is further already; or there is nothing to move.
        ClusterError: the cluster does not answer.
    """
    targets = {stage: group_of(settings, stage, to) for stage in STAGES}
    _check_nobody_works_in(settings, sorted(set(targets.values())))
    return asyncio.run(_move_groups(settings, "all" if to == "stages" else "stages", targets))


async def _move_groups(settings: Settings, left: Layout, targets: Mapping[StageName, str]) -> list[Moved]:
    plan: dict[str, dict[TopicPartition, Committed]] = defaultdict(dict)
    report = []
    for stage in STAGES:
        source = group_of(settings, stage, left)
        name = SOURCES[stage].full_name(settings)
        mine = {tp: each for tp, each in (await committed_of(settings, source)).items() if tp.topic == name}
        commits = moved(mine, await committed_of(settings, targets[stage]))
        plan[targets[stage]] |= commits
        sessions = sum(len(Snapshot.unpack(each.metadata).sessions) for each in commits.values())
        report.append(Moved(stage, source, targets[stage], len(commits), sessions))
    if not any(plan.values()):
        raise GroupsError(
            f"No worker has committed anything in {', '.join(sorted({each.source for each in report}))}",
            "There is nothing to move: simply start the workers.",
        )
    for group, commits in plan.items():
        await _commit(settings, group, commits)
    return report


def _check_nobody_works_in(settings: Settings, groups: list[str]) -> None:
    def question(client: AdminClient) -> list[Any]:
        # (aiokafka 0.14 cannot read Kafka 4's answer about a group that has members.)
        answers: Any = client.describe_consumer_groups(groups)
        return [answer.result() for answer in answers.values()]

    for group in asked(settings, "describe its consumer groups", question):
        if group.members:
            raise GroupsError(
                f"The group {group.group_id} has workers ({len(group.members)})", "Stop them first: what they commit would undo the move."
            )


async def _commit(settings: Settings, group: str, commits: Mapping[TopicPartition, Committed]) -> None:
    if not commits:
        return
    consumer = AIOKafkaConsumer(group_id=group, enable_auto_commit=False, **aiokafka_client_config(settings))
    try:
        await consumer.start()
        consumer.assign(list(commits))
        # A member that joined meanwhile makes the broker refuse it.
        await consumer.commit({tp: OffsetAndMetadata(each.offset, each.metadata) for tp, each in commits.items()})
    except KafkaError as refused:
        raise ClusterError(
            f"The commits could not be copied to the group {group} ({refused})", "Nothing has moved: try again."
        ) from refused
    finally:
        await consumer.stop()


class _Admin:
    """An admin client for as long as it is needed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: Any = None

    async def __aenter__(self) -> Any:
        self._client = AIOKafkaAdminClient(**aiokafka_client_config(self._settings))
        try:
            await self._client.start()
        except KafkaError as silence:
            raise ClusterError(
                f"No Kafka at {self._settings.bootstrap_servers} answers ({silence})",
                "Start one with `asr broker`, or set ASR_BOOTSTRAP_SERVERS to one that runs.",
            ) from silence
        return self._client

    async def __aexit__(self, *_failure: object) -> None:
        await self._client.close()
