"""Every topic of the system, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from streams.settings import Settings

__all__ = [
    "AUDIO",
    "COVERAGE",
    "FEATURES",
    "HOTWORDS",
    "LOG",
    "MODELS",
    "PARTIALS",
    "REJECTED",
    "SESSIONS",
    "SPEECH",
    "TOPICS",
    "TRANSCRIPTS",
    "WORKERS",
    "Topic",
]

#: The namespace that the names in this table are written with.
_NAMESPACE: Final = "asr"
_SECOND_MS: Final = 1_000
_HOUR_MS: Final = 3_600 * _SECOND_MS
_DAY_MS: Final = 24 * _HOUR_MS


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it must be.

    Attributes:
        name: its name in the default namespace; :meth:`full_name` is the one on the cluster.
        key: what its records are keyed by.
        holds: the records on it, and what they are for.
        per_channel: partitioned like the audio (``Settings.partitions``, the session's own partition number); else one partition.
        cleanup: Kafka's ``cleanup.policy``.
        retention_ms: how long records are kept, where ``cleanup`` deletes; None: ``Settings.audio_retention_ms``.
        config: further settings of the topic.
        bytes_per_channel_s: at most this much for each channel that speaks all the time; 0: negligible or kept per session.
    """

    name: str
    key: str
    holds: str
    per_channel: bool
    cleanup: str
    retention_ms: int | None = None
    config: tuple[tuple[str, str], ...] = ()
    bytes_per_channel_s: int = 0

    def full_name(self, settings: Settings) -> str:
        """Return its name on the cluster, in the namespace of the settings."""
        return settings.namespace + self.name.removeprefix(_NAMESPACE)

    def partition_count(self, settings: Settings) -> int:
        """Return how many partitions it has."""
        return settings.partitions if self.per_channel else 1

    def kept_ms(self, settings: Settings) -> int | None:
        """Return how long its records are kept, in ms; None: for ever, the newest of each key."""
        if "delete" not in self.cleanup:
            return None
        return settings.audio_retention_ms if self.retention_ms is None else self.retention_ms

    def size_bytes(self, settings: Settings, channels: int) -> int | None:
        """Return how large its records can get, replicas apart, with so many channels; None where that has no bound or does not matter."""
        kept_ms = self.kept_ms(settings)
        return self.bytes_per_channel_s * channels * kept_ms // _SECOND_MS if kept_ms and self.bytes_per_channel_s else None

    def topic_config(self, settings: Settings) -> dict[str, str]:
        """Return its settings, named as Kafka names them."""
        config = {"cleanup.policy": self.cleanup, **dict(self.config)}
        kept_ms = self.kept_ms(settings)
        if kept_ms is not None:
            config["retention.ms"] = str(kept_ms)
        return config


# Compacted topics stay small only if their segments close soon and are cleaned early.
_COMPACT_SOON: Final = (
    ("segment.ms", str(10 * 60 * _SECOND_MS)),
    ("min.cleanable.dirty.ratio", "0.1"),
    ("delete.retention.ms", str(60 * _SECOND_MS)),
)
# 50,000 phrases with their boosts take about 1.5 MB; Kafka's own bound is 1 MB.
_LARGE_RECORDS: Final = (("max.message.bytes", str(8 * 2**20)),)
# 16 kHz, 2 bytes a sample.
_PCM_BYTES_PER_S: Final = 32_000
# 100 frames of 80 float32 a second.
_FBANK_BYTES_PER_S: Final = 32_000
# A chunk of 3,200 samples carries 240 more, which the next one repeats.
_SPEECH_BYTES_PER_S: Final = _PCM_BYTES_PER_S * 3_440 // 3_200
# A timeout is decided on the broker's clock, so that a replay decides the same.
_APPEND_TIME: Final = (("message.timestamp.type", "LogAppendTime"),)

AUDIO: Final = Topic(
    "asr.audio",
    "channel_id",
    "AudioFrame and the events of the recorder: what was said, and the only input",
    True,
    "delete",
    None,
    _APPEND_TIME,
    _PCM_BYTES_PER_S,
)
SPEECH: Final = Topic(
    "asr.speech",
    "channel_id",
    "SpeechChunk and segment events, from the VAD",
    True,
    "delete",
    _HOUR_MS,
    bytes_per_channel_s=_SPEECH_BYTES_PER_S,
)
FEATURES: Final = Topic(
    "asr.features",
    "channel_id",
    "FeatureBlock and segment events, for the engine",
    True,
    "delete",
    _HOUR_MS,
    bytes_per_channel_s=max(_FBANK_BYTES_PER_S, _SPEECH_BYTES_PER_S),
)
COVERAGE: Final = Topic(
    "asr.coverage",
    "channel_id",
    "Coverage, one per recorder frame: who answered it, and how fast",
    True,
    "delete",
    _HOUR_MS,
    # 5 frames a second, about 150 bytes each.
    bytes_per_channel_s=750,
)
PARTIALS: Final = Topic(
    "asr.partials", "channel_id", "Partial: the open segment's text so far", True, "compact,delete", _HOUR_MS, _COMPACT_SOON
)
TRANSCRIPTS: Final = Topic(
    "asr.transcripts", "session_id:segment", "Transcript: the finals, for quality inspection", True, "compact", None, _COMPACT_SOON
)
SESSIONS: Final = Topic("asr.sessions", "session_id", "Session: state, versions, counts, positions", True, "compact", None, _COMPACT_SOON)
# Compaction joins what it has cleaned into segments of up to this size, and a segment is deleted when its newest record is old enough.
_SMALL_SEGMENTS: Final = (("segment.bytes", str(4 * 2**20)),)
LOG: Final = Topic(
    "asr.log",
    "session_id:position",
    "LogEvent: the structured log",
    True,
    "compact,delete",
    7 * _DAY_MS,
    _COMPACT_SOON + _SMALL_SEGMENTS,
)
HOTWORDS: Final = Topic(
    "asr.hotwords", "list name", "HotwordList: phrases to favour", False, "compact", None, _COMPACT_SOON + _LARGE_RECORDS
)
MODELS: Final = Topic("asr.models", "model name", "ModelVersion: which model new segments use", False, "compact", None, _COMPACT_SOON)
WORKERS: Final = Topic(
    "asr.workers", "worker id", "WorkerStatus: heartbeat, load, versions in force", False, "compact,delete", _DAY_MS, _COMPACT_SOON
)
REJECTED: Final = Topic(
    "asr.rejected", "the record's own", "Rejected: records that could not be used, and why", False, "delete", 7 * _DAY_MS
)

TOPICS: Final = (AUDIO, SPEECH, FEATURES, COVERAGE, PARTIALS, TRANSCRIPTS, SESSIONS, LOG, HOTWORDS, MODELS, WORKERS, REJECTED)
