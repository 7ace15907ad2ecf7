"""Segments that endpoint rules cut: each utterance is a final of its own, with a key of its own, and a second pass of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from agents.inference.core import InferenceCore
from agents.inference.engine import MOST_UTTERANCES, Engine, FinalText, Finish, Utterance
from agents.inference.instant import InstantEngine
from schemas.records import LogEvent, Partial, Session, Stamps, Transcript
from streams.core import Input, SessionKey, SessionState
from streams.settings import Settings
from streams.stage import record_key

WITHOUT_VAD = Settings(engine="conformer", vad="off")
BLOCK_SAMPLES = 3_200
UTTERANCE_BLOCKS = 3
SESSION = SessionKey(0, "s")


class Cutting(InstantEngine):
    """An engine whose rules end an utterance after every third block; the last one may be shorter."""

    def finish(self, requests: Sequence[Finish]) -> Sequence[FinalText]:
        return [self._cut(final, request.end_sample) for final, request in zip(super().finish(requests), requests, strict=True)]

    def _cut(self, final: FinalText, end_sample: int) -> FinalText:
        start_sample = self._segments[final.key].opening.start_sample
        starts = range(start_sample, end_sample, UTTERANCE_BLOCKS * BLOCK_SAMPLES)
        utterances = tuple(
            Utterance(
                start_sample=start,
                end_sample=min(end_sample, start + UTTERANCE_BLOCKS * BLOCK_SAMPLES),
                text=f"part {number}",
                raw_text=f"part {number}",
                words=final.words[:number],
                confidence=0.5,
            )
            for number, start in enumerate(starts)
        )
        return msgspec.structs.replace(final, utterances=utterances)


@contextlib.asynccontextmanager
async def running(emitted: Any, second: Engine | None = None) -> AsyncIterator[InferenceCore]:
    core = InferenceCore(WITHOUT_VAD, emitted, Cutting(), second=second)
    await core.start()
    try:
        yield core
    finally:
        await core.stop()


def a_call(call: SimpleNamespace) -> Any:
    """One segment of seven blocks and one of two, right behind one another as without a detector."""
    flow = call.flow()
    flow.begin(language="en")
    for blocks in (7, 2):
        flow.begin_segment()
        for _ in range(blocks):
            flow.block()
        flow.end_segment(reason="cap", hotword_version="h1")
    flow.end()
    return flow


def shown(transcripts: Sequence[Transcript]) -> list[tuple[int, int, int, str]]:
    return [(each.segment, each.position_samples // BLOCK_SAMPLES, each.end_sample // BLOCK_SAMPLES, each.text) for each in transcripts]


FINALS = [(0, 0, 3, "part 0"), (1, 3, 6, "part 1"), (2, 6, 7, "part 2"), (MOST_UTTERANCES, 7, 9, "part 0")]


async def test_each_utterance_is_a_final_of_its_own(call: SimpleNamespace) -> None:
    emitted = call.emitted()
    inputs = call.interleaved(a_call(call))
    async with running(emitted) as core:
        for each in inputs:
            await core.step([each])
        await emitted.settle(inputs)
    finals = emitted.finals()
    assert shown(finals) == FINALS
    assert len({record_key(final) for final in finals}) == len(finals)
    assert {final.hotword_version for final in finals} == {"h1"}
    assert {each.segment for each in emitted.of(Partial)} <= {0, MOST_UTTERANCES}
    assert [(each.text, each.position_samples // BLOCK_SAMPLES) for each in emitted.of(LogEvent) if each.event == "final"] == [
        (text, start) for _, start, _, text in FINALS
    ]
    assert [(each.segments, each.finals) for each in emitted.of(Session)][-1] == (2, 4), "whoever waits for all finals knows how many"


@pytest.mark.parametrize("cut", range(1, 14))
async def test_a_restart_anywhere_says_the_same(call: SimpleNamespace, cut: int) -> None:
    inputs: list[Input] = call.interleaved(a_call(call))
    before, after = call.emitted(), call.emitted()
    async with running(before) as core:
        await core.step(inputs[:cut])
        state: SessionState | None = core.snapshot(SESSION)
    async with running(after) as core:
        if state is not None:
            core.load(SESSION, state)
        again = inputs[state.from_offset if state is not None else 0 :]
        await core.step(again)
        await after.settle(again)
    said = {record_key(final): msgspec.structs.replace(final, stamps=Stamps()) for final in before.finals()}
    for final in after.finals():
        assert said.setdefault(record_key(final), msgspec.structs.replace(final, stamps=Stamps())) == msgspec.structs.replace(
            final, stamps=Stamps()
        )
    assert shown(sorted(said.values(), key=lambda final: final.segment)) == FINALS
    assert (after.of(Session)[-1].finals, after.of(Session)[-1].words) == (4, 6), "nothing is counted twice"


async def test_each_utterance_has_its_own_second_pass(call: SimpleNamespace) -> None:
    emitted = call.emitted()
    inputs = call.interleaved(a_call(call))
    async with running(emitted, InstantEngine()) as core:
        await core.step(inputs)
        await emitted.settle(inputs)
    refined = sorted((each for each in emitted.of(Transcript) if each.kind == "refined"), key=lambda each: each.segment)
    assert [place[:3] for place in shown(refined)] == [place[:3] for place in FINALS]
    assert [each.text.split()[0] for each in refined] == ["3", "3", "1", "2"], "each was given its own blocks"
    assert len({each.text for each in refined}) == len(refined)
