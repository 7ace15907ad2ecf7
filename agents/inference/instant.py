"""An engine that answers at once with what it was given, not with what was said: for measuring everything around an engine, and for tests.

Its text is a digest of the bytes of a segment, so two runs agree exactly if they heard the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from agents.inference.engine import Block, FinalText, Finish, Hypothesis, Opening, SegmentKey
from schemas.records import SAMPLE_RATE_HZ, Word

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["InstantEngine"]

_DIGEST_CHARS: Final = 16
#: One text a second, about as often as speech changes it.
_BLOCKS_PER_PARTIAL: Final = 5
_HOP_SAMPLES: Final = SAMPLE_RATE_HZ // 100
_SAMPLES_PER_MS: Final = SAMPLE_RATE_HZ // 1_000


@dataclass(slots=True)
class _Segment:
    opening: Opening
    blocks: int = 0
    hops: int = 0
    digest: _Hash = field(default_factory=hashlib.sha256)


class InstantEngine:
    """Text such as ``17 blocks 5f3a90c2d1e4b7a6``."""

    name = "instant"
    model_digest = hashlib.sha256(b"instant").hexdigest()
    finals_lanes = 0
    finals_batch = 64
    blocks_at_once = 1

    def __init__(self) -> None:
        self._segments: dict[SegmentKey, _Segment] = {}

    def open(self, segments: Sequence[Opening]) -> None:
        """Begin segments."""
        for opening in segments:
            self._segments[opening.key] = _Segment(opening)

    def step(self, blocks: Sequence[Block]) -> Sequence[Hypothesis]:
        """Add each block to its segment's digest; the text so far is the number of blocks."""
        hypotheses = []
        for block in blocks:
            segment = self._segments[block.key]
            segment.blocks += 1
            segment.hops += block.hops
            for part in (block.features, block.pcm):
                segment.digest.update(len(part).to_bytes(4, "little"))
                segment.digest.update(part)
            end_sample = segment.opening.start_sample + segment.hops * _HOP_SAMPLES
            if segment.blocks % _BLOCKS_PER_PARTIAL == 1:
                text = f"{segment.blocks} blocks"
                hypotheses.append(Hypothesis(key=block.key, text=text, stable_text=text, end_sample=end_sample))
        return hypotheses

    def finish(self, requests: Sequence[Finish]) -> Sequence[FinalText]:
        """Return each segment's digest."""
        return [self._final(request) for request in requests]

    def hotwords(self, version: str, folder: str, *, in_force: bool = True) -> None:
        """Ignore them."""

    def close(self, keys: Sequence[SegmentKey]) -> None:
        """Forget segments."""
        for key in keys:
            self._segments.pop(key, None)

    def stop(self) -> None:
        """Do nothing: there is nothing to let go of."""

    def _final(self, request: Finish) -> FinalText:
        segment = self._segments[request.key]
        text = f"{segment.blocks} blocks {segment.digest.hexdigest()[:_DIGEST_CHARS]}" if segment.blocks else ""
        start_ms, end_ms = (sample // _SAMPLES_PER_MS for sample in (segment.opening.start_sample, request.end_sample))
        words = tuple(Word(text=word, start_ms=start_ms, end_ms=end_ms, confidence=1.0) for word in text.split())
        return FinalText(
            key=request.key, text=text, raw_text=text, words=words, confidence=1.0 if text else 0.0, language=segment.opening.language
        )
