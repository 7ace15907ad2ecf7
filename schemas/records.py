"""Typed twins of the Avro schemas beside this file: one class for each ``.avsc``, the same names and meanings.

The ``.avsc`` files are the contract and hold the documentation of each field. All positions count 16 kHz samples since the
session began, whatever the rate on the wire; ``*_us`` are Unix times in microseconds; ``*_ms`` in results count from the session's start.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

__all__ = [
    "RECORDS",
    "SAMPLE_RATE_HZ",
    "AudioFlag",
    "AudioFrame",
    "Coverage",
    "Encoding",
    "FeatureBlock",
    "FlowRecord",
    "FrameMark",
    "FrameSpan",
    "Gap",
    "Heartbeat",
    "Hotword",
    "HotwordList",
    "LogEvent",
    "ModelVersion",
    "Partial",
    "Record",
    "Rejected",
    "SegmentCancelled",
    "SegmentEnd",
    "SegmentStart",
    "Session",
    "SessionEnd",
    "SessionRecord",
    "SessionStart",
    "SpeechChunk",
    "StageName",
    "Stamps",
    "Timeout",
    "Transcript",
    "VersionChange",
    "Word",
    "WorkerStatus",
]

#: The rate that every position counts in, and that every stage after decoding works at.
SAMPLE_RATE_HZ: Final = 16_000

Encoding = Literal["pcm_s16le", "mulaw", "alaw"]
StageName = Literal["vad", "features", "inference"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A value on a topic."""


class Stamps(msgspec.Struct, frozen=True, kw_only=True):
    """When the record's newest audio passed each stage; 0 where it has not been yet."""

    captured_us: int = 0
    enqueued_us: int = 0
    vad_us: int = 0
    features_us: int = 0
    inference_us: int = 0


class FrameSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One recorder frame that is covered once everything before this point is decoded."""

    start_sample: int
    end_sample: int
    captured_us: int
    enqueued_us: int = 0


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A word with its time in ms from the session's start."""

    text: str
    start_ms: int
    end_ms: int
    confidence: float


class Hotword(msgspec.Struct, frozen=True, kw_only=True):
    """One phrase and what each of its tokens adds to the score (natural log)."""

    phrase: str
    boost: float


class SessionRecord(Record, frozen=True, kw_only=True):
    """What every record of a session carries."""

    channel_id: str
    session_id: str
    conversation_id: str
    epoch: int = 0
    position_samples: int
    stamps: Stamps = Stamps()


class FlowRecord(SessionRecord, frozen=True, kw_only=True):
    """A record on the way from recorder to decoder: ordered with the audio, numbered by its writer."""

    ordinal: int = 0


class AudioFrame(FlowRecord, frozen=True, kw_only=True):
    """A piece of audio, 200 ms by default, as captured."""

    encoding: Encoding
    sample_rate_hz: int
    payload: bytes


class SessionStart(FlowRecord, frozen=True, kw_only=True):
    """The first record of each session."""

    party: str = ""
    language: str = ""
    direction: Literal["unknown", "inbound", "outbound"] = "unknown"
    source: str = ""
    encoding: Encoding
    sample_rate_hz: int


class SessionEnd(FlowRecord, frozen=True, kw_only=True):
    """The session is over; its position is its length."""

    reason: Literal["hangup", "timeout", "failed"]


class Heartbeat(FlowRecord, frozen=True, kw_only=True):
    """The recorder is alive; its position is the audio captured so far."""


class Timeout(FlowRecord, frozen=True, kw_only=True):
    """A proposal to close a session that has gone quiet."""

    silent_ms: int


class Gap(FlowRecord, frozen=True, kw_only=True):
    """Audio that never came; silence stands for it."""

    missing_samples: int


class AudioFlag(FlowRecord, frozen=True, kw_only=True):
    """The audio is not what it is declared to be, or is damaged."""

    flag: str
    detail: str = ""


class SegmentStart(FlowRecord, frozen=True, kw_only=True):
    """Speech began; its position is the first sample, pre-roll included."""

    segment: int
    model_digest: str = ""


class SegmentEnd(FlowRecord, frozen=True, kw_only=True):
    """The segment is complete; its position is one past its last sample."""

    segment: int
    start_sample: int
    reason: Literal["pause", "cap", "session_end", "timeout", "gap"]
    hotword_version: str = ""
    frames: tuple[FrameSpan, ...] = ()


class SegmentCancelled(FlowRecord, frozen=True, kw_only=True):
    """The segment was too short to be speech."""

    segment: int
    start_sample: int
    frames: tuple[FrameSpan, ...] = ()


class FrameMark(FlowRecord, frozen=True, kw_only=True):
    """Frames that ended inside an open segment without completing a block."""

    frames: tuple[FrameSpan, ...] = ()


class VersionChange(FlowRecord, frozen=True, kw_only=True):
    """From here on another version is in force."""

    kind: Literal["model", "hotwords"]
    name: str
    version: str


class SpeechChunk(FlowRecord, frozen=True, kw_only=True):
    """Speech of one segment: up to 20 hops and 240 samples of lookahead."""

    segment: int
    chunk: int
    hops: int
    pcm: bytes
    frames: tuple[FrameSpan, ...] = ()


class FeatureBlock(FlowRecord, frozen=True, kw_only=True):
    """Features of one SpeechChunk."""

    segment: int
    chunk: int
    hops: int
    kind: Literal["fbank", "mfcc", "none"]
    dims: int
    features: bytes
    pcm: bytes | None = None
    frames: tuple[FrameSpan, ...] = ()


class Coverage(SessionRecord, frozen=True, kw_only=True):
    """A recorder frame has been answered."""

    end_sample: int
    decoded_to_sample: int
    stage: StageName


class Partial(SessionRecord, frozen=True, kw_only=True):
    """The open segment's text so far."""

    segment: int
    text: str
    stable_text: str = ""
    end_sample: int


class Transcript(SessionRecord, frozen=True, kw_only=True):
    """What was said in one segment."""

    segment: int
    kind: Literal["final", "cancelled", "refined"]
    end_sample: int
    text: str
    raw_text: str
    words: tuple[Word, ...] = ()
    confidence: float
    language: str = ""
    engine: str = ""
    model_digest: str = ""
    hotword_version: str = ""
    covered_to_sample: int


class Session(SessionRecord, frozen=True, kw_only=True):
    """The life of one session."""

    state: Literal["open", "idle", "closed"]
    reason: str = ""
    started_us: int
    party: str = ""
    language: str = ""
    direction: str = "unknown"
    source: str = ""
    covered_to_sample: int
    decoded_to_sample: int
    segments: int
    finals: int
    cancelled: int
    words: int
    gaps: int
    gap_samples: int
    model_digest: str = ""
    hotword_version: str = ""
    flags: tuple[str, ...] = ()


class LogEvent(SessionRecord, frozen=True, kw_only=True):
    """One line of the structured log."""

    at_us: int
    event: str
    text: str = ""
    confidence: float = 0.0


class HotwordList(Record, frozen=True, kw_only=True):
    """A list of phrases to favour, as pushed."""

    name: str
    version: str
    pushed_us: int
    phrases: tuple[Hotword, ...]


class ModelVersion(Record, frozen=True, kw_only=True):
    """A version of a model and whether new segments are to use it."""

    name: str
    version: str
    digest: str
    path: str
    active: bool
    pushed_us: int


class WorkerStatus(Record, frozen=True, kw_only=True):
    """A worker's heartbeat."""

    worker_id: str
    host: str
    pid: int
    stages: tuple[str, ...]
    started_us: int
    at_us: int
    state: Literal["starting", "running", "stopping"]
    partitions: int
    sessions: int
    lag_records: int
    load: float
    engine: str = ""
    model_digest: str = ""
    hotword_version: str = ""
    channels: int = 0
    behind_ms: int = 0


class Rejected(Record, frozen=True, kw_only=True):
    """A record that could not be used, whole, and why."""

    topic: str
    partition: int
    offset: int
    stage: str
    reason: str
    at_us: int
    key: bytes | None = None
    value: bytes | None = None


#: Every record that may stand on a topic, by its Avro name.
RECORDS: Final[dict[str, type[Record]]] = {
    record.__name__: record
    for record in (
        AudioFlag,
        AudioFrame,
        SessionStart,
        SessionEnd,
        Heartbeat,
        Timeout,
        Gap,
        SegmentStart,
        SegmentEnd,
        SegmentCancelled,
        FrameMark,
        VersionChange,
        SpeechChunk,
        FeatureBlock,
        Coverage,
        Partial,
        Transcript,
        Session,
        LogEvent,
        HotwordList,
        ModelVersion,
        WorkerStatus,
        Rejected,
    )
}
