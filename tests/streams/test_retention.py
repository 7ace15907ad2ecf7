"""Finished calls leave the results: those and no others, whoever sweeps and however often it is broken off."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Producer

from schemas import LogEvent, Session, Transcript, default_codec
from schemas.records import SessionRecord
from streams import retention
from streams.kafka import idempotent_producer_config, read_to_end
from streams.retention import Swept, session_of, sweep, sweep_interval_s
from streams.settings import Settings, load_settings
from streams.stage import record_key
from streams.topic_admin import ensure_topics
from streams.topics import LOG, SESSIONS, TRANSCRIPTS

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
TOPICS = {Session: SESSIONS, Transcript: TRANSCRIPTS, LogEvent: LOG}


class Results:
    """Writes results as they were written some time ago."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._producer = Producer(idempotent_producer_config(settings))

    def call(self, session_id: str, *, partition: int, age_ms: int, state: str = "closed", segments: int = 2) -> None:
        names = {"channel_id": "1", "session_id": session_id, "conversation_id": "c", "position_samples": 0}
        self.put(partition, age_ms, _session(names, "open"))
        for segment in range(segments):
            for kind in ("final", "refined"):
                self.put(partition, age_ms, _transcript(names, segment, kind))
            self.put(partition, age_ms, LogEvent(**names, at_us=0, event="final"))
        self.put(partition, age_ms, _session(names, state))

    def put(self, partition: int, age_ms: int, record: SessionRecord) -> None:
        topic = TOPICS[type(record)].full_name(self._settings)
        at_ms = time.time_ns() // 1_000_000 - age_ms
        self._producer.produce(topic, default_codec().encode(record), record_key(record).encode(), partition, timestamp=at_ms)
        assert self._producer.flush(30) == 0


def _session(names: dict[str, object], state: str) -> Session:
    return Session(
        **names,
        state=state,
        started_us=1,
        covered_to_sample=0,
        decoded_to_sample=0,
        segments=0,
        finals=0,
        cancelled=0,
        words=0,
        gaps=0,
        gap_samples=0,
    )


def _transcript(names: dict[str, object], segment: int, kind: str) -> Transcript:
    return Transcript(**names, segment=segment, kind=kind, end_sample=0, text="said", raw_text="said", confidence=1.0, covered_to_sample=0)


@pytest.fixture
def kept_for_a_day(settings: Settings) -> Settings:
    ensure_topics(settings, tuple(TOPICS.values()))
    return settings.model_copy(update={"results_retention_ms": DAY_MS})


@pytest.fixture
def results(kept_for_a_day: Settings) -> Results:
    return Results(kept_for_a_day)


def remaining(settings: Settings) -> dict[str, set[bytes]]:
    """Return the keys that compaction would keep, by topic."""
    found: dict[str, set[bytes]] = {}
    for topic in TOPICS.values():
        keys = found[topic.name] = set()
        for message in read_to_end(settings, [topic]):
            key = bytes(message.key() or b"")
            (keys.discard if message.value() is None else keys.add)(key)
    return found


def sessions_left(settings: Settings) -> set[str]:
    left = remaining(settings)
    return {key.decode() for key in left[SESSIONS.name]} | {session_of(key) for topic in (TRANSCRIPTS, LOG) for key in left[topic.name]}


def test_keys_tell_their_session() -> None:
    assert session_of(b"3f2a:12") == session_of(b"3f2a:12:refined") == session_of(b"3f2a:3200:session_start") == "3f2a"
    assert session_of(b"call:7:3") == "call:7"
    assert session_of(b"something else") == ""


@pytest.mark.parametrize(("kept_ms", "interval_s"), [(60_000, 10), (HOUR_MS, 360), (30 * DAY_MS, 3_600)])
def test_sweeps_come_often_enough(kept_ms: int, interval_s: float) -> None:
    assert sweep_interval_s(load_settings(results_retention_ms=kept_ms)) == interval_s


@pytest.mark.broker
def test_a_finished_call_leaves_and_no_other(kept_for_a_day: Settings, results: Results) -> None:
    results.call("old", partition=1, age_ms=25 * HOUR_MS)
    results.call("older", partition=2, age_ms=100 * HOUR_MS, segments=0)
    results.call("new", partition=1, age_ms=23 * HOUR_MS)
    results.call("long", partition=1, age_ms=30 * HOUR_MS, state="open")
    results.call("lost", partition=1, age_ms=50 * HOUR_MS, state="idle")

    # 4 finals and second passes, 1 log key (its lines are at one position), 1 session; 1 session; the same as the first.
    assert sweep(kept_for_a_day, default_codec(), write=False) == Swept(2, 3, 13)
    assert sessions_left(kept_for_a_day) == {"old", "older", "new", "long", "lost"}, "it only looked"
    assert sweep(kept_for_a_day, default_codec(), [2, 3]) == Swept(0, 1, 1)
    assert sweep(kept_for_a_day, default_codec()) == Swept(2, 2, 12)
    assert sessions_left(kept_for_a_day) == {"new", "long"}
    assert remaining(kept_for_a_day)[TRANSCRIPTS.name] == {
        f"{session}:{segment}{refined}".encode() for session in ("new", "long") for segment in (0, 1) for refined in ("", ":refined")
    }
    assert sweep(kept_for_a_day, default_codec()) == Swept(2, 0, 0), "a second sweep finds nothing to do"


@pytest.mark.broker
def test_a_sweep_that_is_broken_off_is_finished_by_the_next(
    kept_for_a_day: Settings, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker, after a takeover, or the same one: nothing was remembered."""
    results.call("old", partition=1, age_ms=25 * HOUR_MS)
    bury = retention._bury

    def dies_before_the_sessions(settings: Settings, keys: object) -> None:
        if any(topic is SESSIONS for topic, _, _ in keys):
            raise ConnectionError
        bury(settings, keys[:3])

    monkeypatch.setattr(retention, "_bury", dies_before_the_sessions)
    with pytest.raises(ConnectionError):
        sweep(kept_for_a_day, default_codec())
    assert sessions_left(kept_for_a_day) == {"old"}
    monkeypatch.undo()
    assert sweep(kept_for_a_day, default_codec()).left == 1
    assert sessions_left(kept_for_a_day) == set()


@pytest.mark.broker
def test_what_a_zombie_writes_after_its_call_left_goes_with_the_next_call(kept_for_a_day: Settings, results: Results) -> None:
    names = {"channel_id": "1", "session_id": "gone", "conversation_id": "c", "position_samples": 0}
    results.put(1, 30 * HOUR_MS, _transcript(names, 0, "final"))
    results.call("old", partition=1, age_ms=25 * HOUR_MS)
    sweep(kept_for_a_day, default_codec())
    assert sessions_left(kept_for_a_day) == set()


@pytest.mark.broker
def test_a_call_can_be_erased_at_once_and_others_kept_for_ever(settings: Settings) -> None:
    ensure_topics(settings, tuple(TOPICS.values()))
    for_ever = settings.model_copy(update={"results_retention_ms": 0})
    results = Results(for_ever)
    results.call("asked-for", partition=0, age_ms=0, state="open")
    results.call("ancient", partition=0, age_ms=1_000 * DAY_MS)
    assert sweep(for_ever, default_codec(), erase=["asked-for"]).left == 1
    assert sessions_left(for_ever) == {"ancient"}
