"""The features stage: one block for each chunk, everything else through, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from agents.features.core import FeaturesCore
from schemas.records import (
    FeatureBlock,
    FlowRecord,
    FrameSpan,
    SegmentEnd,
    SegmentStart,
    SessionEnd,
    SessionRecord,
    SessionStart,
    SpeechChunk,
    Stamps,
)
from streams.core import Input, SessionKey, SessionState
from streams.settings import Settings


class Recorder:
    """Keeps what a core emits."""

    def __init__(self) -> None:
        self.emitted: list[tuple[Input, SessionRecord]] = []
        self.settled: list[Input] = []

    def emit(self, cause: Input, records: Sequence[SessionRecord]) -> None:
        self.emitted += [(cause, record) for record in records]

    def done(self, cause: Input) -> None:
        self.settled.append(cause)


def record(kind: type[FlowRecord], session: str = "s", position: int = 0, **fields: Any) -> FlowRecord:
    ids = {"channel_id": f"channel-{session}", "session_id": session, "conversation_id": "call"}
    return kind(**ids, position_samples=position, stamps=Stamps(captured_us=1, vad_us=2), **fields)


def chunk(session: str, number: int, samples: int = 3_440, hops: int = 20) -> FlowRecord:
    pcm = np.random.default_rng(number).integers(-9_000, 9_000, samples, dtype=np.int16).tobytes()
    spans = (FrameSpan(start_sample=0, end_sample=3_200, captured_us=7),)
    return record(SpeechChunk, session, number * 3_200, segment=0, chunk=number, hops=hops, pcm=pcm, frames=spans)


def inputs(*records: FlowRecord) -> list[Input]:
    return [Input(SessionKey(0, each.session_id), offset, 0, each) for offset, each in enumerate(records)]


async def run(batch: Sequence[Input], **settings: Any) -> tuple[FeaturesCore, Recorder]:
    recorder = Recorder()
    core = FeaturesCore(Settings(**settings), recorder)
    await core.start()
    try:
        await core.step(batch)
    finally:
        await core.stop()
    return core, recorder


async def test_each_record_leads_to_one_in_order() -> None:
    batch = inputs(
        record(SessionStart, encoding="pcm_s16le", sample_rate_hz=16_000),
        record(SegmentStart, segment=0),
        chunk("s", 0),
        chunk("t", 0),
        chunk("s", 1, samples=700, hops=3),
        record(SegmentEnd, position=3_900, segment=0, start_sample=0, reason="pause"),
    )
    _, recorder = await run(batch, engine="instant")
    assert [cause for cause, _ in recorder.emitted] == batch == recorder.settled
    assert [type(out) for _, out in recorder.emitted] == [
        FeatureBlock if isinstance(each.record, SpeechChunk) else type(each.record) for each in batch
    ]
    assert all(out.stamps.features_us > out.stamps.vad_us == 2 for _, out in recorder.emitted)


async def test_a_passed_record_changes_only_its_stamp() -> None:
    batch = inputs(record(SegmentEnd, position=9, segment=0, start_sample=0, reason="cap", hotword_version="v"))
    _, recorder = await run(batch)
    ((_, out),) = recorder.emitted
    assert msgspec.structs.replace(out, stamps=batch[0].record.stamps) == batch[0].record


@pytest.mark.parametrize(("kind", "dims"), [("fbank", 80), ("mfcc", 13)])
async def test_features_of_a_block(kind: str, dims: int) -> None:
    _, recorder = await run(inputs(chunk("s", 0), chunk("s", 1, samples=300, hops=1)), engine="instant", feature_kind=kind)
    whole, tail = (out for _, out in recorder.emitted)
    assert isinstance(whole, FeatureBlock)
    assert isinstance(tail, FeatureBlock)
    assert (whole.kind, whole.dims, len(whole.features), whole.pcm) == (kind, dims, 4 * 20 * dims, None)
    assert (tail.hops, tail.features) == (1, b"")
    assert whole.frames == (FrameSpan(start_sample=0, end_sample=3_200, captured_us=7),)


async def test_an_engine_that_listens_itself_gets_the_audio() -> None:
    batch = inputs(chunk("s", 0))
    _, recorder = await run(batch, engine="whisper")
    ((_, block),) = recorder.emitted
    assert isinstance(block, FeatureBlock)
    assert (block.kind, block.dims, block.features) == ("none", 0, b"")
    assert isinstance(batch[0].record, SpeechChunk)
    assert block.pcm == batch[0].record.pcm


async def test_a_restart_goes_on_after_the_last_input() -> None:
    batch = inputs(record(SessionStart, encoding="pcm_s16le", sample_rate_hz=16_000), chunk("s", 0))
    core, _ = await run(batch)
    assert core.snapshot(SessionKey(0, "s")) == SessionState(2, 2, b"")
    assert core.snapshot(SessionKey(0, "unknown")) is None
    await core.step([Input(SessionKey(0, "s"), 2, 0, record(SessionEnd, position=3_200, reason="hangup"))])
    assert core.snapshot(SessionKey(0, "s")) is None


async def test_nothing_follows_from_what_only_warms_up() -> None:
    _, recorder = await run([Input(SessionKey(0, "s"), 0, 0, chunk("s", 0), warm=True)])
    assert recorder.emitted == recorder.settled == []


async def test_a_loaded_and_dropped_session_is_forgotten() -> None:
    core = FeaturesCore(Settings(), Recorder())
    core.load(SessionKey(0, "s"), SessionState(5, 5, b""))
    assert core.snapshot(SessionKey(0, "s")) == SessionState(5, 5, b"")
    core.drop(SessionKey(0, "s"))
    assert core.snapshot(SessionKey(0, "s")) is None
