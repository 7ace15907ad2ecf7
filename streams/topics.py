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
    """

    name: str
    key: str
    holds: str
    per_channel: bool
    cleanup: str
    retention_ms: int | None = None
    config: tuple[tuple[str, str], ...] = ()

    def full_name(self, settings: Settings) -> str:
        """Return its name on the cluster, in the namespace of the settings."""
        return settings.namespace + self.name.removeprefix(_NAMESPACE)

    def partition_count(self, settings: Settings) -> int:
        """Return how many partitions it has."""
        return settings.partitions if self.per_channel else 1

    def topic_config(self, settings: Settings) -> dict[str, str]:
        """Return its settings, named as Kafka names them."""
        config = {"cleanup.policy": self.cleanup, **dict(self.config)}
        if "delete" in self.cleanup:
            config["retention.ms"] = str(settings.audio_retention_ms if self.retention_ms is None else self.retention_ms)
        return config


# Compacted topics stay small only if their segments close soon and are cleaned early.
_COMPACT_SOON: Final = (
    ("segment.ms", str(10 * 60 * _SECOND_MS)),
    ("min.cleanable.dirty.ratio", "0.1"),
    ("delete.retention.ms", str(60 * _SECOND_MS)),
)
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
)
SPEECH: Final = Topic("asr.speech", "channel_id", "SpeechChunk and segment events, from the VAD", True, "delete", _HOUR_MS)
FEATURES: Final = Topic("asr.features", "channel_id", "FeatureBlock and segment events, for the engine", True, "delete", _HOUR_MS)
COVERAGE: Final = Topic(
    "asr.coverage", "channel_id", "Coverage, one per recorder frame: who answered it, and how fast", True, "delete", _HOUR_MS
)
PARTIALS: Final = Topic(
    "asr.partials", "channel_id", "Partial: the open segment's text so far", True, "compact,delete", _HOUR_MS, _COMPACT_SOON
)
TRANSCRIPTS: Final = Topic(
    "asr.transcripts", "session_id:segment", "Transcript: the finals, for quality inspection", True, "compact", None, _COMPACT_SOON
)
SESSIONS: Final = Topic("asr.sessions", "session_id", "Session: state, versions, counts, positions", True, "compact", None, _COMPACT_SOON)
LOG: Final = Topic("asr.log", "session_id:position", "LogEvent: the structured log", True, "compact,delete", 7 * _DAY_MS, _COMPACT_SOON)
HOTWORDS: Final = Topic("asr.hotwords", "list name", "HotwordList: phrases to favour", False, "compact", None, _COMPACT_SOON)
MODELS: Final = Topic("asr.models", "model name", "ModelVersion: which model new segments use", False, "compact", None, _COMPACT_SOON)
WORKERS: Final = Topic(
    "asr.workers", "worker id", "WorkerStatus: heartbeat, load, versions in force", False, "compact,delete", _DAY_MS, _COMPACT_SOON
)
REJECTED: Final = Topic(
    "asr.rejected", "the record's own", "Rejected: records that could not be used, and why", False, "delete", 7 * _DAY_MS
)

TOPICS: Final = (AUDIO, SPEECH, FEATURES, COVERAGE, PARTIALS, TRANSCRIPTS, SESSIONS, LOG, HOTWORDS, MODELS, WORKERS, REJECTED)
