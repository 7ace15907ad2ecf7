"""What the gateway says, as JSON. These formats are stable: fields are added, never renamed or given another meaning.

Times: ``*_ms`` count from the session's start (latencies are durations), ``*_us`` are Unix times in microseconds. Texts are whatever was
recognised: escape them. A client passes over types and fields that it does not know.

**WebSocket** ``/ws``: one JSON object a text message, told apart by ``type``. First a ``snapshot`` (or, with ``?after=CURSOR``, where the
gateway still has all that came since, a ``resumed``), then what happens:

========== ===================================================== ===========================================================
type       means                                                 fields
========== ===================================================== ===========================================================
snapshot   everything there is to show; forget what was before   cursor, server_us, sessions: each a ``session``, its texts
resumed    you have missed what follows, and nothing else        cursor, server_us
session    a session is new or changed                           session
partial    the text of an open segment so far                    session_id, channel_id, conversation_id, partial
final      a segment is finished; it will not change             cursor, session_id, channel_id, conversation_id, segment
refined    a second pass over a finished segment, beside it      cursor, session_id, channel_id, conversation_id, segment
cancelled  a segment was no speech: remove it                    cursor, session_id, channel_id, conversation_id, segment
                                                                 (its number)
gone       a closed session is no longer shown: remove it        cursor, session_id, channel_id, conversation_id
latency    latencies, once a second                              server_us, all, sessions: by session id
========== ===================================================== ===========================================================

``cursor`` is opaque: keep the last one seen and pass it on reconnecting. A reader that is too slow gets only the newest of each partial,
session and latency, but every final, refined, cancelled and gone; one that falls behind even with these is closed with code 1013 and may
come back at once. Query: ``session``, ``channel``, ``conversation`` (each may be repeated) limit what is sent; ``segments`` limits the
finished segments of each session in the snapshot.

**HTTP**: ``/api/sessions`` (``?state=``, ``?channel=``) → ``{"sessions": [session]}``; ``/api/sessions/ID`` → a session with its texts and
words; ``/api/conversations/ID`` → ``{"conversation_id", "sessions", "turns"}``; errors → ``{"error": "..."}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from connectors.results import ConversationView, SegmentView, SessionView, quantile, to_ms
from schemas.records import Partial, Word

__all__ = [
    "CancelledMessage",
    "ConversationInfo",
    "ErrorInfo",
    "FinalMessage",
    "GoneMessage",
    "LatencyInfo",
    "LatencyMessage",
    "Message",
    "PartialInfo",
    "PartialMessage",
    "RefinedMessage",
    "ResumedMessage",
    "SegmentInfo",
    "SessionInfo",
    "SessionMessage",
    "SessionTexts",
    "SessionsInfo",
    "SnapshotMessage",
    "TurnInfo",
    "conversation_info",
    "latency_info",
    "partial_info",
    "segment_info",
    "session_info",
    "session_texts",
]

_MEDIAN: Final = 0.5
_MOST: Final = 0.95


class LatencyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of a session, or of all: over the last 30 s, null where nothing was measured."""

    #: Capture of a frame's last sample until its answer could be read.
    frame_p50_ms: float | None = None
    frame_p95_ms: float | None = None
    #: The same for the newest text and the audio that it reaches to.
    text_ms: float | None = None
    #: When the newest text came; 0 before the first.
    text_us: int = 0


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finished segment."""

    segment: int
    start_ms: int
    end_ms: int
    text: str
    confidence: float
    language: str = ""
    #: The text of a second pass, where there is one.
    refined: str | None = None
    #: Only over HTTP.
    words: tuple[Word, ...] = ()


class PartialInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The text of an open segment so far; ``stable_text``, its beginning, is not expected to change."""

    segment: int
    start_ms: int
    end_ms: int
    text: str
    stable_text: str


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One channel of one call: ``state`` is open, idle or closed."""

    session_id: str
    channel_id: str
    conversation_id: str
    state: str
    reason: str
    party: str
    language: str
    direction: str
    source: str
    started_us: int
    covered_ms: int
    finals: int
    words: int
    gaps: int
    flags: tuple[str, ...]
    latency: LatencyInfo


class SessionTexts(msgspec.Struct, frozen=True, kw_only=True):
    """A session and what was said in it; ``omitted`` counts finished segments before the first one here."""

    session: SessionInfo
    segments: tuple[SegmentInfo, ...]
    partials: tuple[PartialInfo, ...]
    omitted: int = 0


class TurnInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A finished segment of a call and whose it is."""

    session_id: str
    channel_id: str
    party: str
    segment: SegmentInfo


class ConversationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A call: its sessions, and everybody's turns in the order in which they were said."""

    conversation_id: str
    sessions: tuple[SessionInfo, ...]
    turns: tuple[TurnInfo, ...]


class SessionsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/api/sessions``."""

    sessions: tuple[SessionInfo, ...]


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request could not be answered."""

    error: str


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A message over the WebSocket."""


class SnapshotMessage(Message, frozen=True, kw_only=True, tag="snapshot"):
    """Everything there is to show."""

    cursor: str
    server_us: int
    sessions: tuple[SessionTexts, ...]


class ResumedMessage(Message, frozen=True, kw_only=True, tag="resumed"):
    """What was missed follows."""

    cursor: str
    server_us: int


class SessionMessage(Message, frozen=True, kw_only=True, tag="session"):
    """A session is new or changed."""

    session: SessionInfo


class LatencyMessage(Message, frozen=True, kw_only=True, tag="latency"):
    """Latencies of the sessions that are shown, and of all together."""

    server_us: int
    all: LatencyInfo
    sessions: Mapping[str, LatencyInfo]


class _SessionsOwn(Message, frozen=True, kw_only=True):
    session_id: str
    channel_id: str
    conversation_id: str


class PartialMessage(_SessionsOwn, frozen=True, kw_only=True, tag="partial"):
    """The text of an open segment so far."""

    partial: PartialInfo


class FinalMessage(_SessionsOwn, frozen=True, kw_only=True, tag="final"):
    """A segment is finished."""

    cursor: str
    segment: SegmentInfo


class RefinedMessage(_SessionsOwn, frozen=True, kw_only=True, tag="refined"):
    """A second pass over a finished segment."""

    cursor: str
    segment: SegmentInfo


class CancelledMessage(_SessionsOwn, frozen=True, kw_only=True, tag="cancelled"):
    """A segment was no speech."""

    cursor: str
    segment: int


class GoneMessage(_SessionsOwn, frozen=True, kw_only=True, tag="gone"):
    """A session is no longer shown."""

    cursor: str


def latency_info(views: Sequence[SessionView], now_us: int) -> LatencyInfo:
    """Return the latencies of sessions together."""
    values_ms = sorted(value for view in views for value in view.latency.values_ms(now_us))
    newest = max(views, key=lambda view: view.text_us, default=None)
    return LatencyInfo(
        frame_p50_ms=round(quantile(values_ms, _MEDIAN), 1) if values_ms else None,
        frame_p95_ms=round(quantile(values_ms, _MOST), 1) if values_ms else None,
        text_ms=None if newest is None or newest.text_latency_ms is None else round(newest.text_latency_ms, 1),
        text_us=0 if newest is None else newest.text_us,
    )


def segment_info(view: SegmentView, *, words: bool = False) -> SegmentInfo:
    """Return a finished segment, its words too where wanted."""
    said = view.transcript
    return SegmentInfo(
        segment=view.segment,
        start_ms=to_ms(said.position_samples),
        end_ms=to_ms(said.end_sample),
        text=said.text,
        confidence=round(said.confidence, 3),
        language=said.language,
        refined=None if view.refined is None else view.refined.text,
        words=said.words if words else (),
    )


def partial_info(record: Partial) -> PartialInfo:
    """Return an open segment."""
    return PartialInfo(
        segment=record.segment,
        start_ms=to_ms(record.position_samples),
        end_ms=to_ms(record.end_sample),
        text=record.text,
        stable_text=record.stable_text,
    )


def session_info(view: SessionView, now_us: int) -> SessionInfo:
    """Return a session without its texts."""
    record = view.record
    return SessionInfo(
        session_id=view.session_id,
        channel_id=view.channel_id,
        conversation_id=view.conversation_id,
        state=view.state,
        reason=record.reason if record else "",
        party=view.party,
        language=record.language if record else "",
        direction=record.direction if record else "unknown",
        source=record.source if record else "",
        started_us=view.started_us,
        covered_ms=to_ms(record.covered_to_sample) if record else 0,
        finals=len(view.segments),
        words=record.words if record else 0,
        gaps=record.gaps if record else 0,
        flags=record.flags if record else (),
        latency=latency_info([view], now_us),
    )


def session_texts(view: SessionView, now_us: int, *, last: int | None = None, words: bool = False) -> SessionTexts:
    """Return a session with its texts.

    Args:
        view: the session.
        now_us: Unix time.
        last: how many finished segments at most, the newest ones; None: all.
        words: with the words of each.
    """
    finals = view.finals()
    omitted = 0 if last is None else max(0, len(finals) - last)
    return SessionTexts(
        session=session_info(view, now_us),
        segments=tuple(segment_info(segment, words=words) for segment in finals[omitted:]),
        partials=tuple(partial_info(partial) for partial in view.open_partials()),
        omitted=omitted,
    )


def conversation_info(view: ConversationView, now_us: int) -> ConversationInfo:
    """Return a call."""
    return ConversationInfo(
        conversation_id=view.conversation_id,
        sessions=tuple(session_info(session, now_us) for session in view.sessions),
        turns=tuple(
            TurnInfo(
                session_id=session.session_id,
                channel_id=session.channel_id,
                party=session.party,
                segment=segment_info(segment, words=True),
            )
            for session, segment in view.turns()
        ),
    )
