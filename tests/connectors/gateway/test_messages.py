"""The formats, which must stay as they are: desktops are built on them."""

from __future__ import annotations

from typing import Any

import msgspec

from connectors.gateway.messages import (
    CancelledMessage,
    FinalMessage,
    GoneMessage,
    LatencyMessage,
    PartialMessage,
    SessionMessage,
    SnapshotMessage,
    conversation_info,
    latency_info,
    partial_info,
    segment_info,
    session_info,
    session_texts,
)
from connectors.results import Results

NOW_US = 1_760_000_000_000_000


def as_json(value: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def call(party: Any) -> Results:
    results = Results()
    customer, agent = party("1"), party("2", name="agent")
    for record in (customer.state(), agent.state(), customer.ended(0, "one two"), agent.ended(1, "three"), customer.ended(2, "four")):
        results.apply(record, NOW_US)
    for record in (customer.ended(0, "1 2", "refined"), customer.partial(3, "fi"), customer.frame(0)):
        results.apply(record, NOW_US)
    return results


def test_a_snapshot_holds_sessions_with_their_texts(party: Any) -> None:
    view = call(party).sessions["call-1-1"]
    snapshot = as_json(SnapshotMessage(cursor="a-0", server_us=NOW_US, sessions=(session_texts(view, NOW_US, last=1),)))
    assert list(snapshot) == ["type", "cursor", "server_us", "sessions"]
    (session,) = snapshot["sessions"]
    assert session["session"] == {
        "session_id": "call-1-1",
        "channel_id": "1",
        "conversation_id": "call-1",
        "state": "open",
        "reason": "",
        "party": "customer",
        "language": "en",
        "direction": "inbound",
        "source": "",
        "started_us": view.started_us,
        "covered_ms": 0,
        "finals": 2,
        "words": 0,
        "gaps": 0,
        "flags": [],
        "latency": as_json(latency_info([view], NOW_US)),
    }
    assert session["omitted"] == 1
    assert session["segments"] == [{"segment": 2, "start_ms": 4000, "end_ms": 6000, "text": "four", "confidence": 0.92, "language": "en"}]
    assert session["partials"] == [{"segment": 3, "start_ms": 6000, "end_ms": 6100, "text": "fi", "stable_text": ""}]


def test_live_messages(party: Any) -> None:
    view = call(party).sessions["call-1-1"]
    owner = {"session_id": "call-1-1", "channel_id": "1", "conversation_id": "call-1"}
    assert as_json(PartialMessage(**owner, partial=partial_info(view.partials[3]))) == {
        "type": "partial",
        **owner,
        "partial": {"segment": 3, "start_ms": 6000, "end_ms": 6100, "text": "fi", "stable_text": ""},
    }
    assert as_json(FinalMessage(cursor="a-1", **owner, segment=segment_info(view.segments[0]))) == {
        "type": "final",
        "cursor": "a-1",
        **owner,
        "segment": {
            "segment": 0,
            "start_ms": 0,
            "end_ms": 2000,
            "text": "one two",
            "confidence": 0.92,
            "language": "en",
            "refined": "1 2",
        },
    }
    assert as_json(CancelledMessage(cursor="a-2", **owner, segment=4)) == {"type": "cancelled", "cursor": "a-2", **owner, "segment": 4}
    assert as_json(GoneMessage(cursor="a-3", **owner)) == {"type": "gone", "cursor": "a-3", **owner}
    assert as_json(SessionMessage(session=session_info(view, NOW_US)))["type"] == "session"


def test_latencies_are_null_where_nothing_was_measured(party: Any) -> None:
    unknown = {"frame_p50_ms": None, "frame_p95_ms": None, "text_ms": None, "text_us": 0}
    assert as_json(latency_info([], NOW_US)) == unknown
    view = call(party).sessions["call-1-1"]
    measured = latency_info([view], NOW_US)
    assert measured.frame_p50_ms == measured.frame_p95_ms is not None
    assert measured.text_us == NOW_US
    message = as_json(LatencyMessage(server_us=NOW_US, all=measured, sessions={"call-1-1": measured}))
    assert list(message) == ["type", "server_us", "all", "sessions"]


def test_a_conversation_lists_everybodys_turns_with_words(party: Any) -> None:
    view = call(party).conversation("call-1")
    assert view is not None
    conversation = as_json(conversation_info(view, NOW_US))
    assert [(turn["party"], turn["segment"]["text"]) for turn in conversation["turns"]] == [
        ("customer", "one two"),
        ("agent", "three"),
        ("customer", "four"),
    ]
    assert conversation["turns"][1]["segment"]["words"][0]["text"] == "three"
