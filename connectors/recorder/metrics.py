"""What a recorder counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

__all__ = ["DROPPED_FRAMES", "OUTAGE", "SPOOL_BYTES", "SPOOL_FULL", "TAKEN_UP"]

OUTAGE = Gauge("asr_recorder_outage_partitions", "Partitions whose records go to disk, for no broker takes them.")
SPOOL_BYTES = Gauge("asr_recorder_spool_bytes", "What the records on disk take.")
SPOOL_FULL = Gauge("asr_recorder_spool_full", "1 while there is no room on disk and frames are dropped.")
DROPPED_FRAMES = Counter(
    "asr_recorder_dropped_frames_total", "Frames dropped because there was no room on disk; each is a gap in its call."
)
TAKEN_UP = Counter("asr_recorder_taken_up_records_total", "Records sent that an earlier recorder had left on disk.")
