"""What a worker counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

__all__ = [
    "COMMITTED_LAG_RECORDS",
    "COMMITTED_LAG_SECONDS",
    "DROPPED",
    "HOLES",
    "INPUTS",
    "OPEN_INPUTS",
    "OUTBOX_SECONDS",
    "OUTPUTS",
    "REFUSED_COMMITS",
    "REJECTED",
    "SESSIONS",
    "STEP_FAILURES",
    "STEP_SECONDS",
    "TAKEOVERS",
    "TOMBSTONES",
]

INPUTS = Counter("asr_inputs_total", "Records taken by a stage.", ["stage"])
OUTPUTS = Counter("asr_outputs_total", "Records sent by a stage.", ["stage", "record"])
DROPPED = Counter("asr_dropped_total", "Records passed over: a repeat, or a zombie's.", ["stage", "why"])
REJECTED = Counter("asr_rejected_total", "Records that could not be used; they are on the rejected topic.", ["stage"])
HOLES = Counter(
    "asr_offset_holes_total",
    "Offsets that did not come: read again (reread), no data (gone), deleted before they were read (deleted), or cut off with the end of "
    "the log (truncated); records that the stage before numbered but never sent (upstream).",
    ["stage", "end"],
)
TAKEOVERS = Counter("asr_takeovers_total", "Partitions taken over.", ["stage"])
REFUSED_COMMITS = Counter("asr_refused_commits_total", "Commits that the broker refused.", ["stage"])
OPEN_INPUTS = Gauge("asr_open_inputs", "Inputs taken whose outputs are not all acknowledged.", ["stage"])
COMMITTED_LAG_RECORDS = Gauge(
    "asr_committed_lag_records", "Records of the partition that is furthest behind that a successor would read again.", ["stage"]
)
COMMITTED_LAG_SECONDS = Gauge(
    "asr_committed_lag_seconds",
    "How long a partition has had something to commit without committing anything: an alarm above 30.",
    ["stage"],
)
OUTBOX_SECONDS = Gauge("asr_outbox_seconds", "How long records have been on their way to brokers that acknowledge nothing.")
STEP_FAILURES = Counter("asr_step_failures_total", "Steps that failed and were done again, one input at a time.", ["stage"])
SESSIONS = Gauge("asr_sessions", "Sessions open in a stage.", ["stage"])
STEP_SECONDS = Histogram(
    "asr_step_seconds", "Time of one step over all channels.", ["stage"], buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
)
TOMBSTONES = Counter("asr_retention_tombstones_total", "Tombstones written for calls that were kept long enough.")
