"""What the inference stage counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

__all__ = [
    "CHANNELS",
    "ENGINE_RESTARTS",
    "FAILED_SEGMENTS",
    "FINAL_LAG",
    "HOTWORD_LEFT_OUT",
    "HOTWORD_PHRASES",
    "HOTWORD_SECONDS",
    "NOT_REFINED",
    "OVERLOADED",
    "SHED_SEGMENTS",
    "SPEAKING",
    "STEP_BLOCKS",
    "STEP_LAG",
    "STEP_SECONDS",
]

ENGINE_RESTARTS = Counter("asr_engine_restarts_total", "Engines started in the place of one that died or hung.")
FAILED_SEGMENTS = Counter("asr_failed_segments_total", "Segments that the engine could not decode; their finals have no text.")
HOTWORD_PHRASES = Gauge("asr_hotword_phrases", "Different phrases in the hotwords that the engine listens to.")
HOTWORD_LEFT_OUT = Gauge("asr_hotword_phrases_left_out", "Phrases of those lists that cannot be used with the model.")
HOTWORD_SECONDS = Histogram(
    "asr_hotword_compile_seconds", "How long it took to compile a list that was pushed.", buckets=(0.01, 0.03, 0.1, 0.3, 1, 2, 5)
)
SHED_SEGMENTS = Counter("asr_engine_shed_segments_total", "Segments that gave up their partials because the engine was behind.")
STEP_BLOCKS = Histogram(
    "asr_engine_step_blocks", "Blocks that the engine took in one step.", buckets=(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
)
STEP_SECONDS = Histogram(
    "asr_engine_step_seconds",
    "How long a step took, the way to the engine included.",
    buckets=(0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1),
)
STEP_LAG = Gauge("asr_engine_step_lag_seconds", "How long the block that waits longest has waited for its step.")
FINAL_LAG = Gauge("asr_engine_final_lag_seconds", "How long the segment that waits longest has waited for its final.")
SPEAKING = Gauge("asr_engine_speaking", "Segments that are open: channels that speak now.")
NOT_REFINED = Counter("asr_segments_not_refined_total", "Segments without a second pass because it could not keep up, or is gone.")
OVERLOADED = Gauge("asr_engine_overloaded", "1 while more channels speak than the engine can follow on this machine.")
CHANNELS = Gauge("asr_engine_channels", "Channels of speech without a pause that the engine can follow on this machine; 0: not known yet.")
