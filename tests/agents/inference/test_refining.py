"""The second pass: its text stands beside the final, once, and nothing waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from agents.inference.core import InferenceCore
from agents.inference.engine import EngineError, FinalText, Finish
from agents.inference.instant import InstantEngine
from agents.inference.process import engine_spec, second_pass_settings
from schemas.records import Coverage, Session, Transcript
from streams.core import SessionKey
from streams.settings import Settings, SettingsError, load_settings
from streams.stage import record_key


class Second(InstantEngine):
    """A second engine, which can be held, or broken."""

    name = "second"
    model_digest = "2" * 64
    finals_lanes = 1

    def __init__(self) -> None:
        super().__init__()
        self.going = threading.Event()
        self.going.set()
        self.failure: Exception | None = None

    def finish(self, requests: Sequence[Finish]) -> Sequence[FinalText]:
        self.going.wait()
        if self.failure is not None:
            raise self.failure
        return super().finish(requests)


@contextlib.asynccontextmanager
async def running(emitted: Any, second: Second) -> AsyncIterator[InferenceCore]:
    core = InferenceCore(Settings(engine="instant"), emitted, InstantEngine(), second=second)
    await core.start()
    try:
        yield core
    finally:
        second.going.set()
        await core.stop()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 as an outsider
            await asyncio.sleep(0.002)


def a_call(call: SimpleNamespace, segments: int = 2) -> Any:
    flow = call.flow()
    flow.begin(language="en")
    for _ in range(segments):
        flow.begin_segment()
        flow.block()
        flow.block()
        flow.end_segment(hotword_version="h1")
    flow.begin_segment()
    flow.cancel_segment()
    flow.end()
    return flow


def finals(emitted: Any, kind: str) -> list[Transcript]:
    return sorted((each for each in emitted.of(Transcript) if each.kind == kind), key=lambda each: each.segment)


async def test_it_stands_beside_the_final(call: SimpleNamespace) -> None:
    emitted = call.emitted()
    inputs = call.interleaved(a_call(call))
    second = Second()
    async with running(emitted, second) as core:
        second.going.clear()
        await core.step(inputs)
        await until(lambda: len(emitted.settled) == len(inputs) - 2)
        assert [each.segment for each in finals(emitted, "final")] == [0, 1], "nothing waits for the second pass"
        assert emitted.of(Session)[-1].state == "closed"
        assert finals(emitted, "refined") == []
        second.going.set()
        await emitted.settle(inputs)
    for final, refined in zip(finals(emitted, "final"), finals(emitted, "refined"), strict=True):
        assert (final.engine, refined.engine, refined.model_digest) == ("instant", "second", second.model_digest)
        assert (refined.segment, refined.position_samples, refined.end_sample) == (final.segment, final.position_samples, final.end_sample)
        assert refined.text == final.text, "it has heard the same"
        assert (final.hotword_version, refined.hotword_version) == ("h1", "")
        assert record_key(refined) == f"{record_key(final)}:refined"
    assert len(call.covered(emitted, "s")) == len({*call.covered(emitted, "s")}) == len(emitted.of(Coverage))


async def test_a_session_that_leaves_takes_its_second_pass_along(call: SimpleNamespace) -> None:
    emitted = call.emitted()
    second = Second()
    async with running(emitted, second) as core:
        second.going.clear()
        await core.step(call.interleaved(a_call(call)))
        await until(lambda: len(finals(emitted, "final")) == 2)
        core.drop(SessionKey(0, "s"))
        said = len(emitted.records)
        second.going.set()
        await asyncio.sleep(0.1)
        assert len(emitted.records) == said


async def test_if_it_cannot_keep_up_segments_go_without(call: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.inference.refining._MOST_WAITING", 1)
    emitted = call.emitted()
    inputs = call.interleaved(a_call(call, segments=4))
    second = Second()
    async with running(emitted, second) as core:
        second.going.clear()
        await core.step(inputs)
        await until(lambda: len(finals(emitted, "final")) == 4)
        second.going.set()
        await emitted.settle(inputs)
    assert [each.segment for each in finals(emitted, "refined")] == [0]


async def test_what_has_waited_for_too_long_goes_without(call: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted = call.emitted()
    inputs = call.interleaved(a_call(call, segments=4))
    second = Second()
    async with running(emitted, second) as core:
        second.going.clear()
        await core.step(inputs[:-6])
        await until(lambda: len(finals(emitted, "final")) == 3)
        held = len(inputs[:-6]) - len(emitted.settled)
        assert held == 3, "each waits for its second pass"
        monkeypatch.setattr("agents.inference.refining._LONGEST_WAIT_S", 0.0)
        await core.step(inputs[-6:])
        await until(lambda: len(finals(emitted, "final")) == 4)
        assert len(inputs) - len(emitted.settled) == 1, "only the newest waits: the commit goes on"
        monkeypatch.undo()
        second.going.set()
        await emitted.settle(inputs)
    assert [each.segment for each in finals(emitted, "refined")] == [3]


async def test_if_it_is_gone_the_worker_goes_on(call: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    emitted = call.emitted()
    inputs = call.interleaved(a_call(call))
    second = Second()
    second.failure = EngineError("no more memory")
    async with running(emitted, second) as core:
        await core.step(inputs)
        await emitted.settle(inputs)
        await core.step([])
    assert len(finals(emitted, "final")) == 2
    assert finals(emitted, "refined") == []
    assert "there is no second pass any more: no more memory" in caplog.text


def test_the_settings_name_it() -> None:
    settings = Settings(engine="conformer", final_engine="whisper")
    assert (settings.wants_pcm, settings.features) == (True, "fbank")
    spec = engine_spec(second_pass_settings(settings))
    assert spec.factory == "agents.inference.whisper:WhisperEngine"
    assert spec.options["partial_interval_ms"] == 0
    assert (Settings(engine="conformer").wants_pcm, Settings(engine="whisper").features) == (False, "none")
    with pytest.raises(SettingsError, match="second pass by the same engine"):
        load_settings(engine="whisper", final_engine="whisper")
