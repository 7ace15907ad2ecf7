"""The topics on the cluster against the table in ``topics.py``: made where they are missing, compared where they exist, never changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType  # type: ignore[attr-defined]

from streams.errors import UserError
from streams.kafka import ClusterError, asked
from streams.settings import Settings
from streams.topics import TOPICS, Topic

__all__ = ["Drift", "TopicDriftError", "create_topics", "delete_topics", "ensure_topics", "find_drift"]

log = logging.getLogger(__name__)

#: For the first answer; a person is waiting.
_CONTACT_TIMEOUT_S: Final = 5.0
#: For the work: hundreds of partitions on a machine that is busy.
_TIMEOUT_S: Final = 30.0
_GONE_LOOK_S: Final = 0.05
_POLL_S: Final = 0.05
#: Another value of these loses records or puts them where nobody looks.
_BREAKING: Final = frozenset({"exists", "partitions", "cleanup.policy", "message.timestamp.type", "max.message.bytes"})


@dataclass(frozen=True, slots=True)
class Drift:
    """One way in which a topic is not what the table says.

    Attributes:
        topic: its name on the cluster.
        what: ``exists``, ``partitions``, ``replication_factor``, or a setting as Kafka names it.
        expected: by the table and the settings.
        actual: on the cluster.
    """

    topic: str
    what: str
    expected: str
    actual: str

    @property
    def is_breaking(self) -> bool:
        """Whether the system cannot work with it."""
        return self.what in _BREAKING

    def __str__(self) -> str:
        return f"{self.topic}: {self.what} is {self.actual}, not {self.expected}"


class TopicDriftError(UserError):
    """A topic is there, but not as the system needs it."""


def ensure_topics(settings: Settings, topics: Sequence[Topic] = TOPICS) -> list[str]:
    """Make the topics that are missing, and refuse those that exist but would break the system.

    Args:
        settings: where the brokers are; namespace, partitions, replication and retention.
        topics: those that are needed.

    Returns:
        The full names of the topics that were made.

    Raises:
        TopicDriftError: an existing topic has another partition count or cleanup; nothing was changed.
        ClusterError: the cluster does not answer or refuses.
    """
    made = create_topics(settings, topics)
    drifts = find_drift(settings, topics)
    breaking = [drift for drift in drifts if drift.is_breaking]
    if breaking:
        raise TopicDriftError(
            "; ".join(map(str, breaking)),
            "Set ASR_PARTITIONS to what the topics have, or choose another ASR_NAMESPACE; `asr topics verify` shows all differences.",
        )
    for drift in drifts:
        log.warning("Topic %s", drift)
    return made


def create_topics(settings: Settings, topics: Sequence[Topic] = TOPICS) -> list[str]:
    """Make the topics that are missing, and return their full names once every partition has a leader.

    Raises:
        ClusterError: the cluster does not answer or refuses.
    """

    def create(client: AdminClient) -> list[str]:
        existing = client.list_topics(timeout=_CONTACT_TIMEOUT_S).topics
        missing = [topic for topic in topics if topic.full_name(settings) not in existing]
        if not missing:
            return []
        answers = client.create_topics([_new_topic(topic, settings) for topic in missing], operation_timeout=_TIMEOUT_S)
        for answer in answers.values():
            try:
                answer.result()
            except KafkaException as failure:
                # Another worker was quicker.
                if failure.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
        names = list(answers)
        _wait_for_leaders(client, names)
        return names

    return asked(settings, "create the topics", create)


def delete_topics(settings: Settings, topics: Sequence[Topic] = TOPICS) -> None:
    """Remove the topics with all their records, and wait until they are gone; those that do not exist are no error.

    Raises:
        ClusterError: the cluster does not answer or refuses.
    """
    names = {topic.full_name(settings) for topic in topics}

    def delete(client: AdminClient) -> None:
        answers = client.delete_topics(list(names), operation_timeout=_TIMEOUT_S)
        for answer in answers.values():
            try:
                answer.result()
            except KafkaException as failure:
                if failure.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
        # Brokers hear of it a moment after the controller has agreed.
        deadline_s = time.monotonic() + _TIMEOUT_S
        while names & client.list_topics(timeout=_CONTACT_TIMEOUT_S).topics.keys() and time.monotonic() < deadline_s:
            time.sleep(_GONE_LOOK_S)

    asked(settings, "delete the topics", delete)


def find_drift(settings: Settings, topics: Sequence[Topic] = TOPICS) -> list[Drift]:
    """Return every difference between the topics on the cluster and the table.

    Raises:
        ClusterError: the cluster does not answer or refuses.
    """

    def compare(client: AdminClient) -> list[Drift]:
        metadata = client.list_topics(timeout=_CONTACT_TIMEOUT_S).topics
        by_name = {topic.full_name(settings): topic for topic in topics}
        found = [name for name in by_name if name in metadata]
        configs = _configs(client, found)
        drifts = []
        for name, topic in by_name.items():
            if name not in metadata:
                drifts.append(Drift(name, "exists", "yes", "no"))
                continue
            partitions = metadata[name].partitions
            expected: dict[str, str] = {
                "partitions": str(topic.partition_count(settings)),
                "replication_factor": str(settings.replication_factor),
                **topic.topic_config(settings),
            }
            actual = {
                "partitions": str(len(partitions)),
                "replication_factor": str(min((len(partition.replicas) for partition in partitions.values()), default=0)),
                **configs[name],
            }
            drifts += [
                Drift(name, what, value, actual.get(what, "unset"))
                for what, value in expected.items()
                if not _same(value, actual.get(what))
            ]
        return drifts

    return asked(settings, "describe the topics", compare)


def _same(expected: str, actual: str | None) -> bool:
    # Kafka lists the cleanup policies in an order of its own.
    return actual is not None and set(expected.split(",")) == set(actual.split(","))


def _new_topic(topic: Topic, settings: Settings) -> NewTopic:
    return NewTopic(
        topic.full_name(settings),
        num_partitions=topic.partition_count(settings),
        replication_factor=settings.replication_factor,
        config=topic.topic_config(settings),
    )


def _configs(client: AdminClient, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return each topic's settings, defaults included."""
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    if not resources:
        return {}
    answers: dict[Any, Any] = client.describe_configs(resources, request_timeout=_TIMEOUT_S)
    return {resource.name: {key: entry.value for key, entry in answer.result().items()} for resource, answer in answers.items()}


def _wait_for_leaders(client: AdminClient, names: Sequence[str]) -> None:
    """Return once all brokers asked know a leader for every partition: until then a producer's first record would wait."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        known = client.list_topics(timeout=_TIMEOUT_S).topics
        if all(name in known and all(partition.leader >= 0 for partition in known[name].partitions.values()) for name in names):
            return
        if time.monotonic() > deadline:
            raise ClusterError(f"The topics {', '.join(names)} were made, but have no leader yet", "See the brokers' logs.")
        time.sleep(_POLL_S)
