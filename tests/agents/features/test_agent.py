"""The features agent, through Faust's test context and the real broker."""

from __future__ import annotations

import numpy as np
import pytest

from schemas import FeatureBlock, FrameSpan, SegmentEnd, SegmentStart, SessionStart, SpeechChunk
from streams import topics

pytestmark = pytest.mark.broker

NAMES = {"channel_id": "7", "session_id": "s", "conversation_id": "k"}
FRAME = FrameSpan(start_sample=0, end_sample=3_200, captured_us=11, enqueued_us=12)


async def test_chunks_become_blocks_and_all_else_goes_on_in_order(stage_fed_with) -> None:
    pcm = np.random.default_rng(0).integers(-3_000, 3_000, 3_440, dtype=np.int16).tobytes()
    records = [
        SessionStart(**NAMES, position_samples=0, encoding="pcm_s16le", sample_rate_hz=16_000, epoch=4),
        SegmentStart(**NAMES, position_samples=0, segment=0, ordinal=1, epoch=4),
        SpeechChunk(**NAMES, position_samples=0, segment=0, chunk=0, hops=20, pcm=pcm, ordinal=2, epoch=4, frames=(FRAME,)),
        SegmentEnd(**NAMES, position_samples=3_200, segment=0, start_sample=0, reason="pause", ordinal=3, epoch=4),
    ]
    async with stage_fed_with("features", records, engine="instant") as fed:
        onward = await fed.said(topics.FEATURES, 4)
    assert [type(each).__name__ for each in onward] == ["SessionStart", "SegmentStart", "FeatureBlock", "SegmentEnd"]
    assert [(each.ordinal, each.epoch) for each in onward] == [(0, 1), (1, 1), (2, 1), (3, 1)], "its own numbers, its own epoch"
    block = onward[2]
    assert isinstance(block, FeatureBlock)
    assert (block.kind, block.dims, block.hops, block.frames) == ("fbank", 80, 20, (FRAME,))
    assert np.isfinite(np.frombuffer(block.features, "<f4").reshape(20, 80)).all()
