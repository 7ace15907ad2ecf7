"""What a recogniser must be able to do: the one interface behind which engines sit.

It is batch-first: every call carries whatever is ready over all sessions. An engine lives in a process of its own (``process.py``), knows
nothing of Kafka, and is called in lanes: one thread for what is *live* (``open``, ``step``, ``close``), and ``finals_lanes`` threads for
``finish``, so that a long final does not hold up the live audio. An engine with no lane for finals gets everything on the live thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from schemas.records import Word

__all__ = [
    "HOTWORD_VERSIONS_KEPT",
    "MOST_UTTERANCES",
    "Block",
    "Engine",
    "EngineError",
    "FinalText",
    "Finish",
    "Hypothesis",
    "Opening",
    "SegmentKey",
    "Utterance",
]

#: Lists of hotwords that an engine remembers, those that it learnt last: far more than are pushed within the length of a segment.
HOTWORD_VERSIONS_KEPT: Final = 16
#: Utterances that endpoint rules may make of one segment: each ends with a second of silence, so 20 s hold 20 of them at most.
MOST_UTTERANCES: Final = 100


class EngineError(RuntimeError):
    """The engine cannot work, and starting it again does not help; the message says why."""


class SegmentKey(NamedTuple):
    """A segment of a session, as opened by this worker.

    Attributes:
        session_id: its session.
        segment: its number within the session.
        opening: tells apart several openings of the same segment: a session that left this worker may come back.
    """

    session_id: str
    segment: int
    opening: int = 0


class Opening(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A segment begins."""

    key: SegmentKey
    start_sample: int
    language: str = ""
    model_digest: str = ""


class Block(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One chunk of a segment: ``hops`` of 10 ms, as features (float32 little-endian, frames x dims), audio (int16), or both.

    ``pcm`` holds the hops and up to 240 samples of lookahead, which the next block's audio repeats. ``quiet``: no text is wanted of this
    segment before its final; an engine may save what that takes.
    """

    key: SegmentKey
    chunk: int
    hops: int
    features: bytes = b""
    pcm: bytes = b""
    quiet: bool = False


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


class Utterance(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A part of a segment that says something, as endpoint rules found it; fields as in :class:`FinalText`."""

    start_sample: int
    end_sample: int
    text: str
    raw_text: str
    words: tuple[Word, ...]
    confidence: float


class FinalText(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What was said in a segment: a function of its audio, the model and the hotword version, of nothing else.

    ``error`` says why there is no text where the engine could not decode the segment; ``confidence`` stands outside the function.
    ``utterances`` are what endpoint rules made of the segment, in order, ``MOST_UTTERANCES`` at most; none where no rules act, or nothing
    was said. ``text`` and all else is of the whole segment.
    """

    key: SegmentKey
    text: str
    raw_text: str
    words: tuple[Word, ...]
    confidence: float
    language: str
    error: str = ""
    utterances: tuple[Utterance, ...] = ()


class Engine(Protocol):
    """A recogniser."""

    name: str
    #: SHA-256 over the model's files, hexadecimal.
    model_digest: str
    #: Threads that may call ``finish`` at the same time, beside the live one; 0: the live thread calls it.
    finals_lanes: int
    #: The most finals that are cheaper together than one after the other; 1 for an engine that decodes each on its own.
    finals_batch: int
    #: The most blocks of one segment that are cheaper in one step than one after the other; 1 for an engine that only keeps them.
    blocks_at_once: int

    def open(self, segments: Sequence[Opening]) -> None:
        """Begin segments."""

    def step(self, blocks: Sequence[Block]) -> Sequence[Hypothesis]:
        """Take blocks, in order, of each segment at most ``blocks_at_once``; return the hypotheses that changed, of any open segment.

        It must not wait for slow decoding: the next blocks are waiting. No blocks at all is a question for what changed.
        """

    def finish(self, requests: Sequence[Finish]) -> Sequence[FinalText]:
        """Return the final of each request, in order. It forgets nothing: that is what ``close`` is for."""

    def hotwords(self, version: str, folder: str, *, in_force: bool = True) -> None:
        """Learn a list of hotwords: finals may name its version from now on. Called live.

        Args:
            version: as finals will name it; empty: no hotwords.
            folder: the list, compiled for this engine's model (``decoding.hotwords``).
            in_force: whether partials should listen to it from now on.
        """

    def close(self, keys: Sequence[SegmentKey]) -> None:
        """Forget segments: finished, cancelled or moved away. Unknown keys are no error."""

    def stop(self) -> None:
        """Let go of threads and processes. No call follows."""
