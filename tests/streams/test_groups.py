"""Moving from one consumer group to another: what is copied, and what is refused."""

from __future__ import annotations

import asyncio
import importlib

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.structs import OffsetAndMetadata, TopicPartition

from ops.groups_command import move
from streams import topics
from streams.checkpoint import Committed, SessionSnapshot, Snapshot, Track
from streams.errors import UserError
from streams.groups import SOURCES, GroupsError, committed_of, group_of, move_groups, moved
from streams.settings import STAGES, Settings
from streams.topic_admin import ensure_topics

AUDIO_0 = TopicPartition("asr.audio", 0)
OPEN = SessionSnapshot("s", 3, 7, Track(1, 6, 9), b"exact bits")


def committed(epoch: int, offset: int = 3) -> Committed:
    return Committed(offset, Snapshot(epoch, 10, (OPEN,), (1, 2)).pack(4_096))


def test_sources_are_what_the_agents_read() -> None:
    routes = {stage: importlib.import_module(f"agents.{stage}.agent").ROUTE for stage in STAGES}
    assert {stage: route.source for stage, route in routes.items()} == SOURCES


def test_a_moved_state_is_the_same_but_for_its_epoch_which_leaps() -> None:
    result = moved({AUDIO_0: committed(5)}, {})
    snapshot = Snapshot.unpack(result[AUDIO_0].metadata)
    assert result[AUDIO_0].offset == 3
    assert snapshot.epoch >= 1_000, "what the old owners still write is dropped, however often they change"
    assert (snapshot.emit_from_offset, snapshot.sessions, snapshot.ended) == (10, (OPEN,), (1, 2))


def test_moving_there_and_back_and_there_again_always_goes_up() -> None:
    there: dict[TopicPartition, Committed] = {}
    here = {AUDIO_0: committed(1)}
    epochs = []
    for _ in range(3):
        there = moved(here, there)
        here = moved(there, here)
        epochs += [Snapshot.unpack(each[AUDIO_0].metadata).epoch for each in (there, here)]
    assert epochs == sorted(set(epochs))


def test_a_move_in_the_wrong_direction_is_refused() -> None:
    with pytest.raises(GroupsError, match="The calls are there already"):
        moved({AUDIO_0: committed(5)}, {AUDIO_0: committed(2_000)})


def test_partitions_that_nobody_has_owned_yet_are_left_out() -> None:
    assert moved({AUDIO_0: Committed(0, "")}, {}) == {}


def test_the_command_names_what_it_takes() -> None:
    with pytest.raises(UserError, match="Say all or stages"):
        move("vad")


@pytest.mark.broker
async def test_commits_are_copied_with_their_snapshots_and_refused_where_somebody_works(settings: Settings) -> None:
    await asyncio.to_thread(ensure_topics, settings)
    name = topics.AUDIO.full_name(settings)
    with pytest.raises(GroupsError, match="nothing to move"):
        await asyncio.to_thread(move_groups, settings, "stages")

    consumer = AIOKafkaConsumer(name, bootstrap_servers=settings.bootstrap_servers, group_id=settings.namespace, enable_auto_commit=False)
    await consumer.start()
    here = TopicPartition(name, 1)
    await consumer.commit({here: OffsetAndMetadata(0, committed(5, 0).metadata)})
    with pytest.raises(GroupsError, match=f"The group {settings.namespace} has workers"):
        await asyncio.to_thread(move_groups, settings, "all")

    report = await asyncio.to_thread(move_groups, settings, "stages")
    assert [(each.stage, each.partitions, each.sessions) for each in report] == [("vad", 1, 1), ("features", 0, 0), ("inference", 0, 0)]
    copied = await committed_of(settings, group_of(settings, "vad", "stages"))
    assert Snapshot.unpack(copied[here].metadata).sessions == (OPEN,)
    await consumer.stop()

    await asyncio.to_thread(move_groups, settings, "all")
    back = await committed_of(settings, settings.namespace)
    assert Snapshot.unpack(back[here].metadata).epoch > Snapshot.unpack(copied[here].metadata).epoch > 5
