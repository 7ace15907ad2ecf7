"""What each client is still to be sent."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from connectors.gateway.feed import Feed, Subscriber
from connectors.gateway.messages import (
    CancelledMessage,
    FinalMessage,
    LatencyInfo,
    LatencyMessage,
    PartialInfo,
    PartialMessage,
    SegmentInfo,
    SessionMessage,
    session_info,
)
from connectors.results import Filter, SessionView


def owner(session: str = "s1") -> dict[str, str]:
    return {"session_id": session, "channel_id": session[1:], "conversation_id": "c"}


def partial(text: str, segment: int = 0, session: str = "s1") -> PartialMessage:
    return PartialMessage(**owner(session), partial=PartialInfo(segment=segment, start_ms=0, end_ms=9, text=text, stable_text=""))


def final(text: str, segment: int = 0, session: str = "s1") -> FinalMessage:
    return FinalMessage(cursor="", **owner(session), segment=SegmentInfo(segment=segment, start_ms=0, end_ms=9, text=text, confidence=1.0))


def session(name: str = "s1") -> SessionMessage:
    return SessionMessage(session=session_info(SessionView(name, name[1:], "c"), 0))


def subscriber_of(feed: Feed, wanted: Filter | None = None) -> Subscriber:
    subscriber = Subscriber(wanted or Filter(), feed.limit)
    feed.subscribe(subscriber)
    return subscriber


async def taken(subscriber: Subscriber) -> list[dict[str, Any]]:
    async with asyncio.timeout(5):
        return [msgspec.json.decode(text) for text in await subscriber.take()]


def spoken(messages: list[dict[str, Any]]) -> list[str]:
    return [message["partial" if message["type"] == "partial" else "segment"]["text"] for message in messages]


async def test_a_client_that_does_not_read_loses_partials_and_no_final() -> None:
    feed = Feed()
    slow = subscriber_of(feed)
    for number in range(100):
        feed.publish_partial(partial(f"so far {number}", segment=number // 10))
        if number % 10 == 9:
            feed.publish_lasting(final(f"final {number // 10}", segment=number // 10))
    feed.publish_partial(partial("open", segment=10))
    messages = await taken(slow)
    assert spoken(messages) == [f"final {number}" for number in range(10)] + ["open"]
    assert slow.replaced == 90


async def test_a_session_is_told_before_what_is_said_in_it() -> None:
    feed = Feed()
    client = subscriber_of(feed)
    feed.publish_lasting(final("said"))
    feed.publish_session(session())
    assert [message["type"] for message in await taken(client)] == ["session", "final"]


async def test_a_cancelled_segments_partial_is_not_sent_any_more() -> None:
    feed = Feed()
    client = subscriber_of(feed)
    feed.publish_partial(partial("noise"))
    feed.publish_lasting(CancelledMessage(cursor="", **owner(), segment=0))
    assert [message["type"] for message in await taken(client)] == ["cancelled"]


async def test_taking_waits_until_something_is_due() -> None:
    feed = Feed()
    client = subscriber_of(feed)
    taking = asyncio.create_task(taken(client))
    await asyncio.sleep(0)
    assert not taking.done()
    feed.publish_partial(partial("now"))
    assert spoken(await taking) == ["now"]


async def test_a_client_that_falls_behind_with_finals_is_marked() -> None:
    feed = Feed(limit=3)
    client = subscriber_of(feed)
    for number in range(3):
        feed.publish_lasting(final("said", segment=number))
    assert not client.overflowed.is_set()
    feed.publish_lasting(final("said", segment=3))
    assert client.overflowed.is_set()


async def test_filters_choose_sessions_channels_and_conversations() -> None:
    feed = Feed()
    by_session = subscriber_of(feed, Filter(sessions=frozenset({"s1"})))
    by_channel = subscriber_of(feed, Filter(channels=frozenset({"2"})))
    by_both = subscriber_of(feed, Filter(channels=frozenset({"1", "2"}), conversations=frozenset({"c"})))
    for name in ("s1", "s2", "s3"):
        feed.publish_lasting(final(name, session=name))
    assert spoken(await taken(by_session)) == ["s1"]
    assert spoken(await taken(by_channel)) == ["s2"]
    assert spoken(await taken(by_both)) == ["s1", "s2"]


async def test_latencies_are_made_for_what_each_client_wants() -> None:
    feed = Feed()
    everything, one = subscriber_of(feed), subscriber_of(feed, Filter(sessions=frozenset({"s1"})))

    def make(wanted: Filter) -> LatencyMessage:
        names = [name for name in ("s1", "s2") if wanted.wants(name, "", "")]
        return LatencyMessage(server_us=1, all=LatencyInfo(), sessions=dict.fromkeys(names, LatencyInfo()))

    for _ in range(3):
        feed.publish_latency(make)
    assert [list(message["sessions"]) for message in await taken(everything)] == [["s1", "s2"]]
    assert [list(message["sessions"]) for message in await taken(one)] == [["s1"]]


def test_what_was_missed_follows_the_cursor() -> None:
    feed = Feed()
    feed.publish_lasting(final("first"))
    cursor = feed.cursor
    assert feed.missed(cursor, Filter()) == []
    feed.publish_lasting(final("second", session="s1"))
    feed.publish_lasting(final("third", session="s2"))
    missed = feed.missed(cursor, Filter())
    assert missed is not None and spoken([msgspec.json.decode(text) for text in missed]) == ["second", "third"]
    assert msgspec.json.decode(missed[-1])["cursor"] == feed.cursor
    only = feed.missed(cursor, Filter(sessions=frozenset({"s2"})))
    assert only is not None and spoken([msgspec.json.decode(text) for text in only]) == ["third"]


@pytest.mark.parametrize("cursor", ["", "nonsense", "-", "other-1", "-1"])
def test_a_cursor_that_is_none_of_ours_cannot_be_followed(cursor: str) -> None:
    feed = Feed()
    feed.publish_lasting(final("said"))
    assert feed.missed(cursor, Filter()) is None


def test_a_cursor_that_is_too_old_or_from_the_future_cannot_be_followed() -> None:
    feed = Feed(limit=2)
    start = feed.cursor
    run = start.rpartition("-")[0]
    for number in range(2):
        feed.publish_lasting(final("said", segment=number))
    assert len(feed.missed(start, Filter()) or []) == 2
    feed.publish_lasting(final("said", segment=2))
    assert feed.missed(start, Filter()) is None
    assert feed.missed(f"{run}-99", Filter()) is None
