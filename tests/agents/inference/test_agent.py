"""The inference agent, through Faust's test context, the real broker and an engine in its own process."""

from __future__ import annotations

import pytest

from schemas import FeatureBlock, FrameSpan, SegmentEnd, SegmentStart, Session, SessionEnd, SessionStart, Transcript
from streams import topics

pytestmark = pytest.mark.broker

NAMES = {"channel_id": "7", "session_id": "s", "conversation_id": "k", "epoch": 2}
FRAME = FrameSpan(start_sample=0, end_sample=3_200, captured_us=11, enqueued_us=12)


async def test_a_segment_becomes_answers_partials_and_one_final(stage_fed_with) -> None:
    block = FeatureBlock(
        **NAMES, ordinal=2, position_samples=0, segment=0, chunk=0, hops=20, kind="none", dims=0, features=b"", pcm=b"12", frames=(FRAME,)
    )
    records = [
        SessionStart(**NAMES, ordinal=0, position_samples=0, encoding="pcm_s16le", sample_rate_hz=16_000, party="agent"),
        SegmentStart(**NAMES, ordinal=1, position_samples=0, segment=0),
        block,
        SegmentEnd(**NAMES, ordinal=3, position_samples=3_200, segment=0, start_sample=0, reason="pause"),
        SessionEnd(**NAMES, ordinal=4, position_samples=3_200, reason="hangup"),
    ]
    async with stage_fed_with("inference", records, engine="instant") as fed:
        (final,) = await fed.said(topics.TRANSCRIPTS, 1)
        (coverage,) = await fed.said(topics.COVERAGE, 1)
        states = await fed.said(topics.SESSIONS, 3)
        committed = fed.captured()
    assert committed.sessions == (), "a session that is over is not carried on, though its last final came after its last input"
    assert committed.commit_offset == len(records)
    assert isinstance(final, Transcript)
    assert (final.kind, final.segment, final.position_samples, final.end_sample, final.engine) == ("final", 0, 0, 3_200, "instant")
    assert final.text.startswith("1 blocks ")
    assert (coverage.position_samples, coverage.end_sample, coverage.stage, coverage.epoch) == (0, 3_200, "inference", 1)
    assert (coverage.stamps.captured_us, coverage.stamps.enqueued_us) == (11, 12)
    closed = states[-1]
    assert isinstance(closed, Session)
    assert (closed.state, closed.reason, closed.finals, closed.party) == ("closed", "hangup", 1, "agent")
