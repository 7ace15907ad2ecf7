from __future__ import annotations

import time
from collections import defaultdict

import pytest

from connectors.recorder.recorder import Recorder
from ops.demo.player import Played, Player
from schemas.codec import default_codec
from schemas.records import AudioFrame, FlowRecord, SessionEnd, SessionStart
from streams.kafka import end_offsets, partitions_of, plain_consumer
from streams.settings import Settings
from streams.topic_admin import ensure_topics
from streams.topics import AUDIO

pytestmark = pytest.mark.broker


def play(settings: Settings, channels: int, seconds: float | None, stop_after_s: float = 60) -> list[Played]:
    ensure_topics(settings, [AUDIO])
    with Recorder(settings) as recorder:
        played: list[Played] = []
        player = Player(recorder, channels, seconds, seed=1, announce=played.append)
        player.start()
        began_s = time.monotonic()
        while not player.is_over:
            time.sleep(0.05)
            player.play_due()
            if time.monotonic() - began_s > stop_after_s:
                player.stop()
    return played


def read_all(settings: Settings) -> dict[str, list[FlowRecord]]:
    """Return everything on asr.audio by session."""
    partitions = partitions_of(settings, [AUDIO])
    left = sum(end_offsets(settings, partitions).values())
    records: dict[str, list[FlowRecord]] = defaultdict(list)
    consumer = plain_consumer(settings, partitions)
    while left:
        message = consumer.poll(10)
        assert message is not None, "the topic ended early"
        left -= 1
        record = default_codec().decode(message.value())
        assert isinstance(record, FlowRecord)
        records[record.session_id].append(record)
    consumer.close()
    return records


def test_lines_fill_the_time_side_by_side(settings: Settings) -> None:
    played = play(settings, channels=3, seconds=1.5)
    records = read_all(settings)
    assert [each.channel_id for each in played] == ["1", "2", "3"]
    assert [each.party.name for each in played] == ["agent", "customer", "customer"]
    agent_us, customer_us, single_us = (each.playback.started_us for each in played)
    assert agent_us == customer_us, "the parties of a call begin at the same moment"
    assert 0 < abs(single_us - agent_us) < 200_000, "two lines begin within a frame, and not at the same moment"
    conversations = [each.playback.info.conversation_id for each in played]
    assert conversations[0] == conversations[1] != conversations[2]
    for each in played:
        start, *frames, end = records[each.session_id]
        assert isinstance(start, SessionStart)
        assert isinstance(end, SessionEnd)
        assert end.position_samples == 24_000
        assert start.party == each.party.name
        audio = [frame for frame in frames if isinstance(frame, AudioFrame)]
        assert b"".join(frame.payload for frame in audio) == each.party.payload()
        assert [span.start_sample for span in each.playback.report().spans] == [frame.position_samples for frame in audio]
    assert {records[each.session_id][1].encoding for each in played} == {"pcm_s16le", "mulaw"}  # type: ignore[attr-defined]


def test_hanging_up_ends_what_would_go_on(settings: Settings) -> None:
    played = play(settings, channels=2, seconds=None, stop_after_s=1.0)
    for each in played:
        report = each.playback.report()
        assert report.reason == "hangup"
        assert 0 < report.audio_ms < 3_000
        assert report.frames_lost == 0
