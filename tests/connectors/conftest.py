"""Calls for the tests of what is seen, and a way to put their records onto the topics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import Producer

from schemas.codec import default_codec
from schemas.records import Coverage, Partial, Session, SessionRecord, Stamps, Transcript, Word
from streams.kafka import idempotent_producer_config
from streams.settings import Settings
from streams.topic_admin import ensure_topics
from streams.topics import COVERAGE, PARTIALS, SESSIONS, TRANSCRIPTS

FRAME_SAMPLES = 3_200
SEGMENT_SAMPLES = 32_000

_TOPICS = {Coverage: COVERAGE, Partial: PARTIALS, Session: SESSIONS, Transcript: TRANSCRIPTS}


@dataclass
class Party:
    """One channel of a call, which speaks in segments of 2 s; its text reached us 400 ms after it was said, its frames 120 ms."""

    channel: str = "1"
    conversation: str = "call-1"
    name: str = "customer"
    age_s: int = 60

    def __post_init__(self) -> None:
        self.session_id = f"{self.conversation}-{self.channel}"
        self.started_us = time.time_ns() // 1_000 - self.age_s * 1_000_000

    def _own(self, position: int, behind_ms: int) -> dict[str, object]:
        return {
            "channel_id": self.channel,
            "session_id": self.session_id,
            "conversation_id": self.conversation,
            "epoch": 1,
            "position_samples": position,
            "stamps": Stamps(captured_us=time.time_ns() // 1_000 - behind_ms * 1_000),
        }

    def state(self, state: str = "open", *, seconds: int = 0, reason: str = "") -> Session:
        position = seconds * 16_000
        return Session(
            **self._own(position, 0),
            state=state,
            reason=reason,
            started_us=self.started_us,
            party=self.name,
            language="en",
            direction="inbound",
            covered_to_sample=position,
            decoded_to_sample=position,
            segments=0,
            finals=0,
            cancelled=0,
            words=0,
            gaps=0,
            gap_samples=0,
        )

    def partial(self, segment: int, text: str) -> Partial:
        start = segment * SEGMENT_SAMPLES
        return Partial(**self._own(start, 400), segment=segment, text=text, end_sample=start + len(text) * 800)

    def ended(self, segment: int, text: str = "", kind: str = "final", confidence: float = 0.92) -> Transcript:
        start = segment * SEGMENT_SAMPLES
        words = tuple(
            Word(text=word, start_ms=segment * 2_000 + at * 100, end_ms=segment * 2_000 + at * 100 + 90, confidence=confidence)
            for at, word in enumerate(text.split())
        )
        return Transcript(
            **self._own(start, 400),
            segment=segment,
            kind=kind,
            end_sample=start + SEGMENT_SAMPLES,
            text=text,
            raw_text=text.lower(),
            words=words,
            confidence=confidence,
            language="en",
            covered_to_sample=start + SEGMENT_SAMPLES,
        )

    def frame(self, number: int, behind_ms: int = 120) -> Coverage:
        start = number * FRAME_SAMPLES
        end = start + FRAME_SAMPLES
        return Coverage(**self._own(start, behind_ms), end_sample=end, decoded_to_sample=end, stage="inference")


@pytest.fixture
def party() -> type[Party]:
    """Makes parties of calls."""
    return Party


@pytest.fixture
def publish(settings: Settings) -> Iterator[Callable[..., None]]:
    """Puts records onto their topics, which exist, and waits until they are there."""
    ensure_topics(settings, tuple(_TOPICS.values()))
    producer = Producer(idempotent_producer_config(settings))

    def put(*records: SessionRecord) -> None:
        for record in records:
            topic = _TOPICS[type(record)]
            key = f"{record.session_id}:{record.segment}" if isinstance(record, Transcript) else record.channel_id
            partition = int(record.channel_id) % settings.partitions
            producer.produce(topic.full_name(settings), default_codec().encode(record), key, partition)
        assert producer.flush(10) == 0

    yield put
    producer.flush(10)
