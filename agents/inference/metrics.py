"""What the inference stage counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

__all__ = ["ENGINE_RESTARTS", "FAILED_SEGMENTS", "STEP_BLOCKS"]

ENGINE_RESTARTS = Counter("asr_engine_restarts_total", "Engines started in the place of one that died or hung.")
FAILED_SEGMENTS = Counter("asr_failed_segments_total", "Segments that the engine could not decode; their finals have no text.")
STEP_BLOCKS = Histogram(
    "asr_engine_step_blocks", "Blocks that the engine took in one step.", buckets=(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
)
