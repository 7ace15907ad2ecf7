"""The inference stage: what follows from its inputs, in which order, and that a restart anywhere changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.inference.core import InferenceCore
from agents.inference.engine import EngineError
from agents.inference.instant import InstantEngine
from schemas.codec import Codec
from schemas.records import (
    AudioFlag,
    Coverage,
    Heartbeat,
    LogEvent,
    Partial,
    SegmentStart,
    Session,
    SessionRecord,
    Stamps,
    Transcript,
    VersionChange,
)
from streams.core import Input, SessionKey, SessionState
from streams.errors import UserError
from streams.settings import Settings
from streams.stage import record_key

INSTANT = Settings(engine="instant")
SNAPSHOT_BYTES = 600


@contextlib.asynccontextmanager
async def running(emitted: Any, engine: Any = None) -> AsyncIterator[InferenceCore]:
    core = InferenceCore(INSTANT, emitted, engine or InstantEngine())
    await core.start()
    try:
        yield core
    finally:
        await core.stop()


def canonical(record: SessionRecord) -> SessionRecord:
    """Return a record without what may differ in a replay."""
    return msgspec.structs.replace(record, stamps=Stamps(), epoch=0)


async def run(call: SimpleNamespace, *flows: Any) -> tuple[list[Input], Any]:
    emitted = call.emitted()
    inputs = call.interleaved(*flows)
    async with running(emitted) as core:
        for each in inputs:
            await core.step([each])
        await emitted.settle(inputs)
    return inputs, emitted


async def test_one_call(call: SimpleNamespace) -> None:
    flow = call.flow()
    flow.begin(party="agent", language="en", direction="inbound", source="trunk 7")
    flow.silence(4_000)
    flow.begin_segment()
    for _ in range(3):
        flow.block()
    flow.mark()
    flow.end_segment(hotword_version="h1")
    flow.silence(8_000)
    flow.begin_segment()
    flow.block()
    flow.cancel_segment()
    flow.end()
    inputs, emitted = await run(call, flow)
    assert len(emitted.settled) == len(inputs)

    final, cancelled = emitted.finals()
    assert (final.kind, final.segment, final.position_samples, final.end_sample) == ("final", 0, 4_000, 4_000 + 9_600)
    assert final.text.startswith("3 blocks ")
    assert (final.engine, final.model_digest, final.hotword_version, final.language) == ("instant", InstantEngine.model_digest, "h1", "en")
    assert final.covered_to_sample == 13_920
    assert all(4_000 // 16 <= word.start_ms <= word.end_ms <= 13_600 // 16 for word in final.words)
    assert (cancelled.kind, cancelled.segment, cancelled.text) == ("cancelled", 1, "")

    assert call.covered(emitted, "s") == [
        (4_000, 7_200),
        (7_200, 10_400),
        (10_400, 13_600),
        (13_600, 13_920),
        (21_600, 24_800),
        (24_800, 25_120),
    ]
    coverage = emitted.of(Coverage)
    assert all(each.decoded_to_sample == each.end_sample for each in coverage[:3])
    assert coverage[3].decoded_to_sample == 13_600, "a mark adds nothing that the decoder has heard"
    assert all((each.stamps.captured_us, each.stamps.enqueued_us) == (7, 8) for each in coverage)
    assert all(each.stamps.inference_us > each.stamps.features_us == 2 for each in coverage)

    started, at_final, ended = emitted.of(Session)
    assert (started.state, started.party, started.direction, started.source) == ("open", "agent", "inbound", "trunk 7")
    assert (at_final.finals, at_final.words, at_final.covered_to_sample) == (1, 3, 13_920)
    assert (ended.state, ended.reason, ended.segments, ended.finals, ended.cancelled) == ("closed", "hangup", 2, 1, 1)
    assert ended.covered_to_sample == ended.position_samples == 25_120
    assert [event.event for event in emitted.of(LogEvent)] == ["session_start", "final", "cancelled", "session_end"]


async def test_partials_show_the_text_when_it_changes(call: SimpleNamespace) -> None:
    flow = call.flow()
    flow.begin()
    flow.begin_segment()
    emitted = call.emitted()
    async with running(emitted) as core:
        for number in range(7):
            flow.block()
            inputs = call.interleaved(flow)
            await core.step(inputs[-1:] if number else inputs)
            while len(emitted.of(Coverage)) <= number:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        core.drop(SessionKey(0, "s"))
    partials = emitted.of(Partial)
    assert [partial.text for partial in partials] == ["1 blocks", "6 blocks"]
    assert [partial.end_sample for partial in partials] == [3_200, 19_200]
    assert all(partial.position_samples == 0 for partial in partials)
    assert partials[1].stamps.captured_us == flow.records[7].stamps.captured_us


async def test_a_log_event_is_about_200_bytes(call: SimpleNamespace) -> None:
    flow = call.flow("0f8fad5b-d9cb-469f-a165-70867728950e")
    flow.begin()
    flow.begin_segment()
    flow.block()
    flow.end_segment()
    flow.end()
    _, emitted = await run(call, flow)
    assert all(len(Codec().encode(event)) < 260 for event in emitted.of(LogEvent))


async def test_a_segment_without_audio_is_accounted_for(call: SimpleNamespace) -> None:
    flow = call.flow()
    flow.begin()
    flow.begin_segment()
    flow.end_segment()
    flow.end()
    _, emitted = await run(call, flow)
    (final,) = emitted.finals()
    assert (final.kind, final.text, final.words, final.confidence) == ("final", "", (), 0.0)
    assert emitted.of(Session)[-1].finals == 1


async def test_what_is_left_of_a_segment_is_decoded(call: SimpleNamespace) -> None:
    """Records that are gone for good (deleted before they were read) take no other words with them."""
    flow = call.flow()
    flow.begin()
    for _ in range(4):
        flow.begin_segment()
        flow.block()
        flow.block()
        flow.end_segment()
    flow.end()
    lost = {1, 8, 12}  # the first start, the second end, the third end
    emitted = call.emitted()
    inputs = [each for each in call.interleaved(flow) if each.offset not in lost]
    async with running(emitted) as core:
        await core.step(inputs)
        await emitted.settle(inputs)
    finals = emitted.finals()
    assert [final.segment for final in finals] == [0, 1, 2, 3]
    assert [final.text.split()[0] for final in finals] == ["2", "2", "2", "2"]
    assert [final.end_sample for final in finals] == [6_400, 12_800, 19_200, 25_600]


async def test_what_is_wrong_with_the_audio_is_in_the_session_and_the_log(call: SimpleNamespace) -> None:
    flow = call.flow()
    flow.begin()
    flow.add(AudioFlag, flag="clipping", detail="3 % of the samples are clipped")
    flow.add(AudioFlag, flag="dc_offset")
    flow.end("hangup")
    _, emitted = await run(call, flow)
    assert [session.flags for session in emitted.of(Session)] == [(), ("clipping",), ("clipping", "dc_offset"), ("clipping", "dc_offset")]
    logged = [(record.event, record.text) for record in emitted.of(LogEvent)]
    assert ("clipping", "3 % of the samples are clipped") in logged


async def test_gaps_versions_and_idle_times_are_kept(call: SimpleNamespace) -> None:
    flow = call.flow()
    flow.begin()
    flow.gap(1_600)
    flow.add(VersionChange, kind="hotwords", name="orders", version="v2")
    flow.silence(160_000)
    flow.add(Heartbeat)
    quiet_from = flow.records[-1].stamps.captured_us
    for later_s in (29, 30, 35):
        flow.add(Heartbeat)
        flow.records[-1] = msgspec.structs.replace(flow.records[-1], stamps=Stamps(captured_us=quiet_from + later_s * 1_000_000))
    flow.silence(3_200)
    flow.add(Heartbeat)
    flow.end("timeout")
    _, emitted = await run(call, flow)
    states = [session.state for session in emitted.of(Session)]
    assert states == ["open", "idle", "open", "closed"]
    ended = emitted.of(Session)[-1]
    assert (ended.gaps, ended.gap_samples, ended.hotword_version, ended.reason) == (1, 1_600, "v2", "timeout")
    assert "gap" in [event.event for event in emitted.of(LogEvent)]


async def test_a_dropped_session_says_nothing_more(call: SimpleNamespace) -> None:
    flow = call.flow()
    flow.begin()
    flow.begin_segment()
    flow.block()
    flow.end_segment()
    emitted = call.emitted()
    async with running(emitted) as core:
        await core.step(call.interleaved(flow))
        core.drop(SessionKey(0, "s"))
        said = len(emitted.records)
        await asyncio.sleep(0.1)
        assert len(emitted.records) == said
        assert core.snapshot(SessionKey(0, "s")) is None


async def test_a_state_of_another_release_is_refused(call: SimpleNamespace) -> None:
    core = InferenceCore(INSTANT, call.emitted(), InstantEngine())
    with pytest.raises(UserError, match="version 99"):
        core.load(SessionKey(0, "s"), SessionState(0, 0, msgspec.msgpack.encode((99,))))


async def test_a_change_of_model_is_marked_where_it_happens(call: SimpleNamespace) -> None:
    """A call that a worker with another model takes over: from the next segment that begins there, in the log and the session."""

    class Newer(InstantEngine):
        model_digest = "f" * 64

    flow = call.flow()
    flow.begin()
    for _ in range(3):
        flow.begin_segment()
        flow.block()
        flow.end_segment()
    flow.end()
    inputs = call.interleaved(flow)
    before, after = call.emitted(), call.emitted()
    async with running(before) as core:
        await core.step(inputs[:4])
        await before.settle(inputs[:4])
        assert core.report.model_digest == InstantEngine.model_digest
        state = core.snapshot(SessionKey(0, "s"))
    assert state is not None
    async with running(after, Newer()) as core:
        core.load(SessionKey(0, "s"), state)
        await core.step(inputs[4:])
        await after.settle(inputs[4:])
    changes = [(event.position_samples, event.text) for event in after.of(LogEvent) if event.event == "model_changed"]
    assert changes == [(3_200, f"{InstantEngine.model_digest[:16]} -> {16 * 'f'}")], "once, where the first segment begins"
    assert after.of(Session)[-1].flags == ("model_changed",)
    assert {final.model_digest for final in after.finals()} == {"f" * 64}
    assert [event.event for event in before.of(LogEvent)] == ["session_start", "final"]

    # A segment that names a model, by the beginning of its digest, is decoded with that one or marked.
    named = call.flow()
    named.begin()
    for digest in (InstantEngine.model_digest[:16], "e" * 16):
        named.add(SegmentStart, segment=named.segment, model_digest=digest)
        named.start = named.position
        named.block()
        named.end_segment()
    _, emitted = await run(call, named)
    assert [event.text.split()[0] for event in emitted.of(LogEvent) if event.event == "model_changed"] == ["e" * 16]


async def test_the_stage_ends_with_the_engines_last_failure(call: SimpleNamespace) -> None:
    class Broken(InstantEngine):
        def step(self, blocks: Any) -> Any:
            raise EngineError("no more electricity")

    flow = call.flow()
    flow.begin()
    flow.begin_segment()
    flow.block()
    async with running(call.emitted(), Broken()) as core:
        with pytest.raises(EngineError, match="no more electricity"):
            for _ in range(1_000):
                await core.step(call.interleaved(flow) if not flow.records[3:] else [])
                await asyncio.sleep(0.005)
                flow.records.append(flow.records[-1])


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("segment"), st.integers(0, 6), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 2), st.just(False)),
        st.tuples(st.just("gap"), st.integers(1, 4_000), st.just(False)),
        st.tuples(st.just("silence"), st.integers(1, 9_000), st.just(False)),
    ),
    max_size=6,
)


def script(call: SimpleNamespace, session: str, actions: list[tuple[str, int, bool]]) -> Any:
    flow = call.flow(session)
    flow.begin(party="customer", source="x" * 300, language="en")
    for action, amount, marked in actions:
        if action == "gap":
            flow.gap(amount)
        elif action == "silence":
            flow.silence(amount)
        else:
            flow.begin_segment()
            for number in range(amount):
                flow.block(hops=20 if number + 1 < amount else 7)
                if marked:
                    flow.mark()
            flow.end_segment() if action == "segment" else flow.cancel_segment()
    flow.end()
    return flow


def lasting(emitted: Any, session: str) -> tuple[dict[int, Any], Any, dict[str, tuple[str, str]]]:
    """Return a session's transcripts by segment, its last Session record and its log by key, without what may differ."""
    transcripts: dict[int, Any] = {}
    for record in emitted.of(Transcript, session):
        assert transcripts.setdefault(record.segment, canonical(record)) == canonical(record), "a final changed"
    log = {record_key(event): (event.event, event.text) for event in emitted.of(LogEvent, session)}
    return transcripts, canonical(emitted.of(Session, session)[-1]), log


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=ACTIONS, other=ACTIONS, data=st.data())
def test_a_restart_anywhere_changes_nothing(call: SimpleNamespace, one: Any, other: Any, data: st.DataObject) -> None:
    asyncio.run(restart_anywhere(call, script(call, "s", one), script(call, "t", other), data))


async def restart_anywhere(call: SimpleNamespace, one: Any, other: Any, data: st.DataObject) -> None:
    inputs, undisturbed = await run(call, one, other)
    cut = data.draw(st.integers(1, len(inputs) - 1), label="cut")
    wait_s = data.draw(st.sampled_from([0.0, 0.0, 0.02]), label="wait_s")

    emitted = call.emitted()
    states: dict[SessionKey, SessionState | None] = {}
    async with running(emitted) as core:
        await core.step(inputs[:cut])
        await asyncio.sleep(wait_s)
        for key in {each.key for each in inputs[:cut]}:
            states[key] = core.snapshot(key)
    done = emitted.settled

    after = call.emitted()
    rest = []
    async with running(after) as core:
        for key, state in states.items():
            if state is not None:
                assert len(state.state) <= SNAPSHOT_BYTES
                assert all(each in done for each in inputs if each.key == key and each.offset < state.from_offset)
                core.load(key, state)
                assert core.snapshot(key) == SessionState(state.from_offset, state.from_offset, state.state)
        for each in inputs:
            state = states.get(each.key)
            if each.key not in states or (state is not None and each.offset >= state.from_offset):
                rest.append(each)
        await core.step(rest)
        await after.settle(rest)

    for session in ("s", "t"):
        whole = call.emitted()
        whole.records = emitted.records + after.records
        assert lasting(whole, session) == lasting(undisturbed, session)
        assert set(call.covered(whole, session)) == set(call.covered(undisturbed, session))
