"""Who a session is, and its records: numbered without gaps, each at its exact position. Pure: no clock, no Kafka."""

from __future__ import annotations

import secrets
import zlib
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from connectors.recorder.framing import Frame, WireFormat
from schemas.records import AudioFrame, FlowRecord, Heartbeat, SessionEnd, SessionStart, Stamps

__all__ = ["Direction", "EndReason", "SessionInfo", "SessionRecords", "new_id", "partition_of"]

Direction = Literal["unknown", "inbound", "outbound"]
EndReason = Literal["hangup", "timeout", "failed"]

#: 16 hexadecimal digits: of a billion ids, two are the same with a chance of 3 in 100.
_ID_BYTES: Final = 8

_R = TypeVar("_R", bound=FlowRecord)


def new_id() -> str:
    """Return a new id for a session or a conversation."""
    return secrets.token_hex(_ID_BYTES)


def partition_of(channel_id: str, partitions: int) -> int:
    """Return the partition of a channel, the same on every machine and in every run.

    Channels that are numbers are dealt out in turn, so that up to ``partitions`` of them in a row have one each; others go by CRC-32.

    Examples:
        Of 64 partitions, channel 3 has 3 and channel 67 has 3 too.
    """
    number = int(channel_id) if channel_id.isascii() and channel_id.isdigit() else zlib.crc32(channel_id.encode())
    return number % partitions


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One channel of one call. The fields mean what they mean in ``SessionStart.avsc``."""

    channel_id: str
    session_id: str
    conversation_id: str
    partition: int
    wire: WireFormat
    source: str = ""
    party: str = ""
    language: str = ""
    direction: Direction = "unknown"


class SessionRecords:
    """Makes the records of one session in their order. Times are Unix times in microseconds."""

    def __init__(self, info: SessionInfo) -> None:
        self._info = info
        self._ordinal = 0
        self._position_samples = 0

    @property
    def position_samples(self) -> int:
        """The end of the audio so far, in 16 kHz samples."""
        return self._position_samples

    def start(self, *, captured_us: int, enqueued_us: int) -> SessionStart:
        """Return the first record."""
        info = self._info
        return self._record(
            SessionStart,
            0,
            Stamps(captured_us=captured_us, enqueued_us=enqueued_us),
            party=info.party,
            language=info.language,
            direction=info.direction,
            source=info.source,
            encoding=info.wire.encoding,
            sample_rate_hz=info.wire.sample_rate_hz,
        )

    def frame(self, frame: Frame, *, captured_us: int, enqueued_us: int) -> AudioFrame:
        """Return the record of the next frame; ``captured_us`` is when its last sample was captured."""
        self._position_samples = frame.end_sample
        return self._record(
            AudioFrame,
            frame.start_sample,
            Stamps(captured_us=captured_us, enqueued_us=enqueued_us),
            encoding=self._info.wire.encoding,
            sample_rate_hz=self._info.wire.sample_rate_hz,
            payload=frame.payload,
        )

    def heartbeat(self, *, now_us: int) -> Heartbeat:
        """Return a sign of life, at the end of the audio so far."""
        return self._record(Heartbeat, self._position_samples, Stamps(captured_us=now_us, enqueued_us=now_us))

    def end(self, reason: EndReason, *, now_us: int) -> SessionEnd:
        """Return the last record; its position is the session's length."""
        return self._record(SessionEnd, self._position_samples, Stamps(captured_us=now_us, enqueued_us=now_us), reason=reason)

    def _record(self, kind: type[_R], position_samples: int, stamps: Stamps, **content: Any) -> _R:
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        info = self._info
        return kind(
            channel_id=info.channel_id,
            session_id=info.session_id,
            conversation_id=info.conversation_id,
            position_samples=position_samples,
            stamps=stamps,
            ordinal=ordinal,
            **content,
        )
