"""What the topics hold of one call: its audio, to be sent again as it came, and its finals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from connectors.recorder.framing import WireFormat
from schemas.codec import Codec, DecodeError
from schemas.records import AudioFrame, FlowRecord, Heartbeat, SessionEnd, SessionStart, Transcript, VersionChange
from streams.kafka import read_to_end
from streams.settings import Settings
from streams.topics import AUDIO, TRANSCRIPTS

if TYPE_CHECKING:
    from ops.replay.catalog import Call

__all__ = ["audio_of", "finals_of"]

#: Clocks of recorders and brokers differ, and a start is stamped when it was captured: it is looked for from this long before.
_SLACK_MS: Final = 60_000


def audio_of(settings: Settings, codec: Codec, call: Call) -> Iterator[tuple[FlowRecord, bytes]]:
    """Yield what the recorder sent of a call, in order and without repeats, and the hotwords that came into force; each with its bytes.

    A call whose beginning is gone from the log begins with what is left; one that was closed without a word from its recorder ends as well.

    Args:
        settings: the system that recorded it.
        codec: reads and writes its records.
        call: the call; nothing more comes of it.
    """
    ordinal, end_sample = -1, 0
    last: FlowRecord | None = None
    since_ms = call.session.started_us // 1_000 - _SLACK_MS
    for message in read_to_end(settings, [AUDIO], partitions=[call.partition], start=since_ms):
        value = message.value()
        try:
            record = codec.decode(value)
        except DecodeError:
            continue
        if not isinstance(record, FlowRecord) or record.session_id != call.session_id:
            continue
        if isinstance(record, VersionChange):  # the pipeline's own: outside of the recorder's numbers
            if last is not None:
                yield record, bytes(value or b"")
            continue
        if not isinstance(record, (SessionStart, AudioFrame, Heartbeat, SessionEnd)) or record.ordinal <= ordinal:
            continue
        if last is None and not isinstance(record, SessionStart):
            if not isinstance(record, AudioFrame):
                continue
            start = _start(call, record)
            yield start, codec.encode(start)
        ordinal, last = record.ordinal, record
        if isinstance(record, AudioFrame):
            end_sample = record.position_samples + _samples(record)
        yield record, bytes(value or b"")
        if isinstance(record, SessionEnd):
            return
    if last is not None:
        end = SessionEnd(
            channel_id=last.channel_id,
            session_id=last.session_id,
            conversation_id=last.conversation_id,
            position_samples=max(end_sample, last.position_samples),
            stamps=last.stamps,
            ordinal=ordinal + 1,
            reason="timeout",
        )
        yield end, codec.encode(end)


def finals_of(settings: Settings, codec: Codec, calls: list[Call]) -> dict[str, list[Transcript]]:
    """Return the finals of calls by session, in the order of their audio; the first of those with the same segment stands."""
    found: dict[str, dict[int, Transcript]] = {call.session_id: {} for call in calls}
    for message in read_to_end(settings, [TRANSCRIPTS], partitions={call.partition for call in calls}):
        try:
            record = codec.decode(message.value())
        except DecodeError:  # a tombstone, or damaged
            continue
        if isinstance(record, Transcript) and record.kind == "final" and record.session_id in found:
            found[record.session_id].setdefault(record.segment, record)
    return {session: sorted(finals.values(), key=lambda final: final.position_samples) for session, finals in found.items()}


def _start(call: Call, frame: AudioFrame) -> SessionStart:
    session = call.session
    return SessionStart(
        channel_id=frame.channel_id,
        session_id=frame.session_id,
        conversation_id=frame.conversation_id,
        position_samples=frame.position_samples,
        stamps=frame.stamps,
        ordinal=frame.ordinal - 1,
        party=session.party,
        language=session.language,
        source=session.source,
        encoding=frame.encoding,
        sample_rate_hz=frame.sample_rate_hz,
    )


def _samples(frame: AudioFrame) -> int:
    try:
        wire = WireFormat(frame.encoding, frame.sample_rate_hz)
    except (ValueError, KeyError):
        return 0
    return len(frame.payload) // wire.bytes_per_sample * wire.positions_per_sample
