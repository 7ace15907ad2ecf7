"""The table of topics, and what it makes on a real Kafka."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import NewTopic

from streams.kafka import admin_client
from streams.settings import Settings, load_settings
from streams.topic_admin import Drift, TopicDriftError, create_topics, delete_topics, ensure_topics, find_drift
from streams.topics import AUDIO, HOTWORDS, PARTIALS, TOPICS, TRANSCRIPTS

_CHANNELS = 50
_LARGEST_HOTWORD_LIST_BYTES = 1_500_000


def test_every_topic_has_a_name_of_its_own_and_explains_itself() -> None:
    assert len({topic.name for topic in TOPICS}) == len(TOPICS)
    assert all(topic.name.startswith("asr.") and topic.key and topic.holds for topic in TOPICS)


@pytest.mark.parametrize("namespace", ["asr", "replay-1"])
def test_names_on_the_cluster_begin_with_the_namespace(namespace: str) -> None:
    settings = load_settings(namespace=namespace)
    assert AUDIO.full_name(settings) == f"{namespace}.audio"
    assert {topic.full_name(settings) for topic in TOPICS} == {namespace + topic.name[3:] for topic in TOPICS}


def test_topics_by_channel_all_have_the_same_partition_count() -> None:
    settings = load_settings(partitions=7)
    assert {topic.partition_count(settings) for topic in TOPICS if topic.per_channel} == {7}
    assert {topic.partition_count(settings) for topic in TOPICS if not topic.per_channel} == {1}


def test_retention_of_audio_is_a_setting() -> None:
    settings = load_settings(audio_retention_ms=5_000)
    assert AUDIO.topic_config(settings)["retention.ms"] == "5000"
    assert "retention.ms" not in TRANSCRIPTS.topic_config(settings)


def test_size_of_a_day_of_audio_is_what_the_documentation_says() -> None:
    assert AUDIO.size_bytes(load_settings(), _CHANNELS) == 138_240_000_000
    assert TRANSCRIPTS.size_bytes(load_settings(), _CHANNELS) is None


def test_finals_are_never_deleted_by_age_and_partials_are() -> None:
    assert TRANSCRIPTS.cleanup == "compact"
    assert "delete" in PARTIALS.cleanup


def test_largest_hotword_list_fits_its_topic() -> None:
    assert int(HOTWORDS.topic_config(load_settings())["max.message.bytes"]) > _LARGEST_HOTWORD_LIST_BYTES


@pytest.mark.broker
def test_all_topics_are_made_as_the_table_says_and_only_once(settings: Settings) -> None:
    assert set(ensure_topics(settings)) == {topic.full_name(settings) for topic in TOPICS}
    assert find_drift(settings) == []
    assert ensure_topics(settings) == []


@pytest.mark.broker
def test_missing_topics_are_reported_as_drift(settings: Settings) -> None:
    create_topics(settings, [AUDIO])
    assert find_drift(settings, [AUDIO, TRANSCRIPTS]) == [Drift(TRANSCRIPTS.full_name(settings), "exists", "yes", "no")]


@pytest.mark.broker
def test_other_partition_count_and_cleanup_are_refused_and_left_alone(settings: Settings) -> None:
    name = TRANSCRIPTS.full_name(settings)
    other = NewTopic(name, num_partitions=2, replication_factor=1, config={"cleanup.policy": "delete"})
    admin = admin_client(settings)
    admin.create_topics([other])[name].result()
    with pytest.raises(TopicDriftError, match=r"partitions is 2, not 4.*cleanup\.policy is delete, not compact"):
        ensure_topics(settings, [TRANSCRIPTS])
    assert Drift(name, "partitions", "4", "2") in find_drift(settings, [TRANSCRIPTS])


@pytest.mark.broker
def test_other_retention_is_reported_and_can_be_lived_with(settings: Settings) -> None:
    create_topics(settings, [AUDIO])
    longer = settings.model_copy(update={"audio_retention_ms": 2 * settings.audio_retention_ms})
    drifts = find_drift(longer, [AUDIO])
    assert [(drift.what, drift.is_breaking) for drift in drifts] == [("retention.ms", False)]
    assert ensure_topics(longer, [AUDIO]) == []


@pytest.mark.broker
def test_deleting_topics_that_do_not_exist_is_no_error(settings: Settings) -> None:
    create_topics(settings, [AUDIO])
    delete_topics(settings, [AUDIO, TRANSCRIPTS])
    assert {drift.what for drift in find_drift(settings, [AUDIO, TRANSCRIPTS])} == {"exists"}
