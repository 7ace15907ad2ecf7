"""What a worker counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

__all__ = ["DROPPED", "HOLES", "INPUTS", "OPEN_INPUTS", "OUTPUTS", "REFUSED_COMMITS", "REJECTED", "SESSIONS", "STEP_SECONDS", "TAKEOVERS"]

INPUTS = Counter("asr_inputs_total", "Records taken by a stage.", ["stage"])
OUTPUTS = Counter("asr_outputs_total", "Records sent by a stage.", ["stage", "record"])
DROPPED = Counter("asr_dropped_total", "Records passed over: a repeat, or a zombie's.", ["stage", "why"])
REJECTED = Counter("asr_rejected_total", "Records that could not be used; they are on the rejected topic.", ["stage"])
HOLES = Counter(
    "asr_offset_holes_total", "Offsets that did not come and were read again (reread), or that are gone for good (gone).", ["stage", "end"]
)
TAKEOVERS = Counter("asr_takeovers_total", "Partitions taken over.", ["stage"])
REFUSED_COMMITS = Counter("asr_refused_commits_total", "Commits that the broker refused.", ["stage"])
OPEN_INPUTS = Gauge("asr_open_inputs", "Inputs taken whose outputs are not all acknowledged.", ["stage"])
SESSIONS = Gauge("asr_sessions", "Sessions open in a stage.", ["stage"])
STEP_SECONDS = Histogram(
    "asr_step_seconds", "Time of one step over all channels.", ["stage"], buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
)
