"""What a recogniser must be able to do: the one interface behind which engines sit.

It is batch-first: every call carries whatever is ready over all sessions. An engine lives in a process of its own (``process.py``),
knows nothing of Kafka, and is called by one thread at a time per lane: *live* (``open``, ``step``, ``close``) and *finals* (``finish``).
An engine whose ``finals_apart`` is False gets both lanes on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from schemas.records import Word

__all__ = ["Block", "Engine", "Final", "Finish", "Hypothesis", "Opening", "SegmentKey"]


class SegmentKey(NamedTuple):
    """A segment of a session; unique over the life of the system."""

    session_id: str
    segment: int


class Opening(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A segment begins."""

    key: SegmentKey
    start_sample: int
    language: str = ""
    model_digest: str = ""


class Block(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One chunk of a segment: ``hops`` of 10 ms, as features (float32 little-endian, frames x dims), audio (int16), or both.

    ``pcm`` holds the hops and up to 240 samples of lookahead, which the next block's audio repeats.
    """

    key: SegmentKey
    chunk: int
    hops: int
    features: bytes = b""
    pcm: bytes = b""


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The text of an open segment so far; free to change, free to depend on load."""

    key: SegmentKey
    text: str
    stable_text: str
    end_sample: int


class Finish(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A segment is complete: all its blocks have been stepped."""

    key: SegmentKey
    end_sample: int
    hotword_version: str = ""


class Final(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What was said in a segment: a function of its audio, the model and the hotword version, of nothing else."""

    key: SegmentKey
    text: str
    raw_text: str
    words: tuple[Word, ...]
    confidence: float
    language: str


class Engine(Protocol):
    """A recogniser."""

    name: str
    #: SHA-256 over the model's files, hexadecimal.
    model_digest: str
    finals_apart: bool

    def open(self, segments: Sequence[Opening]) -> None:
        """Begin segments."""

    def step(self, blocks: Sequence[Block]) -> Sequence[Hypothesis]:
        """Take at most one block of each segment; return the hypotheses that changed, of any open segment.

        It must not wait for slow decoding: the next blocks are waiting.
        """

    def finish(self, requests: Sequence[Finish]) -> Sequence[Final]:
        """Return the final of each request, in order."""

    def close(self, keys: Sequence[SegmentKey]) -> None:
        """Forget segments: finished, cancelled or moved away. Unknown keys are no error."""
