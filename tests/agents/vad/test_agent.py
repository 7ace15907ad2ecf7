"""The vad agent, through Faust's test context and the real broker."""

from __future__ import annotations

import msgspec
import pytest

from schemas import AudioFrame, Coverage, Rejected, SessionEnd, SessionStart
from streams import topics

pytestmark = pytest.mark.broker

FRAME_SAMPLES = 3_200
START = SessionStart(channel_id="7", session_id="s", conversation_id="k", position_samples=0, encoding="pcm_s16le", sample_rate_hz=16_000)


def silence(number: int) -> AudioFrame:
    return AudioFrame(
        channel_id="7",
        session_id="s",
        conversation_id="k",
        ordinal=number + 1,
        position_samples=number * FRAME_SAMPLES,
        encoding="pcm_s16le",
        sample_rate_hz=16_000,
        payload=bytes(2 * FRAME_SAMPLES),
    )


async def test_silence_is_answered_frame_by_frame_and_not_forwarded(stage_fed_with) -> None:
    frames = [silence(number) for number in range(5)]
    end = SessionEnd(channel_id="7", session_id="s", conversation_id="k", ordinal=6, position_samples=5 * FRAME_SAMPLES, reason="hangup")
    async with stage_fed_with("vad", [START, *frames, end]) as fed:
        coverage = await fed.said(topics.COVERAGE, 5)
        assert all(isinstance(each, Coverage) for each in coverage)
        assert [(each.position_samples, each.end_sample, each.stage, each.epoch) for each in coverage] == [
            (number * FRAME_SAMPLES, (number + 1) * FRAME_SAMPLES, "vad", 1) for number in range(5)
        ]
        onward = await fed.said(topics.SPEECH, 2)
        assert [type(each).__name__ for each in onward] == ["SessionStart", "SessionEnd"]
        assert [each.ordinal for each in onward] == [0, 1]


async def test_what_is_no_record_is_rejected_and_the_next_frame_is_answered(stage_fed_with) -> None:
    async with stage_fed_with("vad", [START, b"\x00no such thing", silence(0)]) as fed:
        (rejected,) = await fed.said(topics.REJECTED, 1)
        assert isinstance(rejected, Rejected)
        assert (rejected.stage, rejected.offset, rejected.key, rejected.value) == ("vad", 1, b"7", b"\x00no such thing")
        await fed.said(topics.COVERAGE, 1)


async def test_a_frame_after_the_end_of_its_session_is_answered_and_goes_no_further(stage_fed_with) -> None:
    end = SessionEnd(channel_id="7", session_id="s", conversation_id="k", ordinal=2, position_samples=FRAME_SAMPLES, reason="hangup")
    late = msgspec.structs.replace(silence(1), ordinal=3)
    async with stage_fed_with("vad", [START, silence(0), end]) as fed:
        assert fed.captured().sessions == ()
        await fed.more([late, msgspec.structs.replace(START, session_id="next")])
        assert len(fed.captured().sessions) == 1, "the next session on the channel goes its way"
        onward = await fed.said(topics.SPEECH, 3)
        assert [each.session_id for each in onward] == ["s", "s", "next"]
