"""Silence of a session, and silence of the brokers: only the first one is a timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from schemas import AudioFrame, Timeout, default_codec
from schemas.records import SessionStart
from streams import topics
from streams.checkpoint import Snapshot
from streams.settings import Settings, load_settings
from streams.stage import Route, Stage
from streams.tenure import Tenure

LOST_S = 90.0


class Brokers:
    """In place of the outbox: what was sent, and when the brokers last took something."""

    def __init__(self) -> None:
        self.acknowledged_s = 0.0
        self.timeouts: list[Timeout] = []

    def send(self, topic: str, partition: int | None, key: bytes | None, value: bytes, on_ack: Callable[[], None]) -> None:
        record = default_codec().decode(value)
        assert isinstance(record, Timeout)
        assert (topic, partition) == ("asr.audio", 0)
        self.timeouts.append(record)


@pytest.fixture
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
def stage(brokers: Brokers) -> Stage:
    def no_core(_settings: Settings, _emitter: Any) -> Any:
        return object()

    made = Stage(None, load_settings(), Route("vad", topics.AUDIO, topics.SPEECH), no_core, default_codec(), brokers)  # type: ignore[arg-type]
    tenure = Tenure(0, Snapshot(), 0, numbered_by_recorder=True)
    names = {"channel_id": "1", "session_id": "s", "conversation_id": "c"}
    tenure.place(0, SessionStart(**names, position_samples=0, encoding="pcm_s16le", sample_rate_hz=16_000))
    frame = AudioFrame(**names, position_samples=0, ordinal=1, encoding="pcm_s16le", sample_rate_hz=16_000, payload=bytes(6_400))
    tenure.place(1, frame)
    tenure.sessions["s"].seen_s = 0.0
    made.tenures[0] = tenure
    return made


def seconds_go_by(stage: Stage, brokers: Brokers, start: int, end: int, *, away: bool = False) -> None:
    for now in range(start, end):
        if not away:
            brokers.acknowledged_s = float(now)
        assert stage.proposals is not None
        stage.proposals.look(stage.tenures.values(), float(now))


def test_a_session_that_nothing_is_heard_of_is_proposed_to_have_ended(stage: Stage, brokers: Brokers) -> None:
    seconds_go_by(stage, brokers, 0, 91)
    assert brokers.timeouts == []
    seconds_go_by(stage, brokers, 91, 150)
    (timeout,) = brokers.timeouts
    assert (timeout.session_id, timeout.silent_ms) == ("s", 91_000)
    seconds_go_by(stage, brokers, 150, 200)
    assert len(brokers.timeouts) == 2, "it is proposed again if it did not act"


def test_an_outage_of_the_brokers_is_not_silence(stage: Stage, brokers: Brokers) -> None:
    """Neither while they are away, however long, nor at once when they are back: recorders have all the time to send what they kept."""
    seconds_go_by(stage, brokers, 0, 60)
    seconds_go_by(stage, brokers, 60, 400, away=True)
    assert brokers.timeouts == []
    seconds_go_by(stage, brokers, 400, 490)
    assert brokers.timeouts == []
    seconds_go_by(stage, brokers, 490, 492)
    assert len(brokers.timeouts) == 1


def test_a_broker_that_is_slow_for_a_moment_changes_nothing(stage: Stage, brokers: Brokers) -> None:
    seconds_go_by(stage, brokers, 0, 60)
    seconds_go_by(stage, brokers, 60, 62, away=True)
    seconds_go_by(stage, brokers, 62, 92)
    assert len(brokers.timeouts) == 1
