"""The engine's process: it comes back, with everything it knew, and a segment that brings it down costs itself alone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from agents.inference.core import InferenceCore
from agents.inference.engine import Block, Engine, EngineError, Finish, Opening, SegmentKey
from agents.inference.frames import EngineSpec
from agents.inference.instant import InstantEngine
from agents.inference.process import EngineProcess
from schemas.records import LogEvent, Session
from streams.settings import Settings

INSTANT = EngineSpec(factory="agents.inference.instant:InstantEngine")
HANG_MS = 300


@contextmanager
def running(spec: EngineSpec = INSTANT, timeout_ms: int = 10_000) -> Iterator[EngineProcess]:
    engine = EngineProcess(spec, timeout_ms=timeout_ms)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def blocks(session: str, count: int = 4) -> list[Block]:
    return [Block(key=SegmentKey(session, 0), chunk=number, hops=20, pcm=f"{session} {number}".encode()) for number in range(count)]


def begin(engine: Engine, *sessions: str) -> None:
    engine.open([Opening(key=SegmentKey(session, 0), start_sample=0) for session in sessions])


def finals(engine: Engine, *sessions: str) -> dict[str, tuple[str, str]]:
    found = engine.finish([Finish(key=SegmentKey(session, 0), end_sample=12_800) for session in sessions])
    return {final.key.session_id: (final.text, final.error) for final in found}


def whole(engine: Engine, *sessions: str) -> dict[str, tuple[str, str]]:
    begin(engine, *sessions)
    for step in zip(*map(blocks, sessions), strict=True):
        engine.step(step)
    found = finals(engine, *sessions)
    engine.close([SegmentKey(session, 0) for session in sessions])
    return found


def undisturbed(*sessions: str) -> dict[str, tuple[str, str]]:
    return whole(InstantEngine(), *sessions)


def test_it_is_the_engine() -> None:
    with running() as engine:
        assert (engine.name, engine.model_digest, engine.finals_lanes) == ("instant", InstantEngine.model_digest, 0)
        begin(engine, "s")
        (hypothesis,) = engine.step(blocks("s", 1))
        assert hypothesis.text == "1 blocks"
        assert engine.step([]) == ()
        assert whole(engine, "a", "b") == undisturbed("a", "b")


def test_its_process_has_no_kafka_and_dies_with_the_worker() -> None:
    worker = f"""
import sys, time
from agents.inference.process import EngineProcess
from agents.inference.frames import EngineSpec
engine = EngineProcess(EngineSpec(factory="agents.inference.instant:InstantEngine"))
engine.start()
print(engine.pid, flush=True)
time.sleep({HANG_MS})
"""
    with subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        engine = psutil.Process(int(process.stdout.readline()))
        loaded = {Path(mapped.path).name for mapped in engine.memory_maps()}
        assert not [name for name in loaded if "kafka" in name or "faust" in name or "torch" in name]
        engine.send_signal(signal.SIGINT)
        engine.send_signal(signal.SIGTERM)
        assert engine.is_running()
        process.kill()
        engine.wait(timeout=10)


def test_it_ends_when_it_is_stopped() -> None:
    with running() as engine:
        process = psutil.Process(engine.pid)
    assert not process.is_running()
    with pytest.raises(EngineError, match="stopped"):
        engine.step([])


@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        ("misbehaving:refuse", "there is no model in /models/of-nobody"),
        ("misbehaving:vanish", "exit status 7"),
        ("misbehaving:nothing", "nothing"),
        ("no_such_module:engine", "no_such_module"),
    ],
)
@pytest.mark.usefixtures("misbehaving")
def test_an_engine_that_cannot_be_loaded_says_why(factory: str, cause: str) -> None:
    engine = EngineProcess(EngineSpec(factory=factory))
    with pytest.raises(EngineError, match=cause):
        engine.start()
    engine.stop()


def test_killed_between_requests_it_knows_all_segments_again() -> None:
    with running() as engine:
        begin(engine, "a", "b")
        for step in zip(blocks("a", 2), blocks("b", 2), strict=True):
            engine.step(step)
        os.kill(engine.pid, signal.SIGKILL)
        for step in zip(blocks("a")[2:], blocks("b")[2:], strict=True):
            engine.step(step)
        assert finals(engine, "a", "b") == undisturbed("a", "b")
        assert engine.restarts == 1


@pytest.mark.parametrize("how", ["die", "hang", "fail"])
@pytest.mark.parametrize("when", ["step", "final"])
def test_one_mishap_changes_nothing(how: str, when: str, misbehaving: str, tmp_path: Path) -> None:
    spec = EngineSpec(factory=misbehaving, options={"once_in": str(tmp_path)})
    sessions = (f"{how}-{when}", "good")
    with running(spec, HANG_MS) as engine:
        assert whole(engine, *sessions) == undisturbed(*sessions)
        assert engine.restarts == 1


@pytest.mark.parametrize("how", ["die", "hang", "fail"])
@pytest.mark.parametrize("when", ["step", "final"])
def test_a_poisoned_segment_costs_itself_alone(how: str, when: str, misbehaving: str) -> None:
    poisoned = f"{how}-{when}"
    causes = {"die": "process died", "hang": "no answer for 0.3 s", "fail": "ValueError: no such sound"}
    with running(EngineSpec(factory=misbehaving), HANG_MS) as engine:
        found = whole(engine, "good", poisoned, "fine")
        text, error = found.pop(poisoned)
        assert text == ""
        assert causes[how] in error
        assert found == undisturbed("good", "fine")
        assert whole(engine, "later") == undisturbed("later"), "it works on"


@pytest.mark.parametrize(
    ("poisoned", "cause"),
    [
        ("curse-step", r"ValueError: no such file: \\ud800"),
        ("curse-final", r"\\ud800"),
        ("babble", "UnicodeEncodeError"),
        ("exit-step", "died"),
    ],
)
def test_what_cannot_be_sent_silences_no_lane(poisoned: str, cause: str, misbehaving: str) -> None:
    with running(EngineSpec(factory=misbehaving), timeout_ms=30_000) as engine:
        found = whole(engine, "good", poisoned)
        text, error = found.pop(poisoned)
        assert text == ""
        assert re.search(cause, error)
        assert found == undisturbed("good")
        assert whole(engine, "later") == undisturbed("later")


@pytest.mark.parametrize("how", ["die", "hang"])
def test_hotwords_that_bring_engines_down_are_given_up(how: str, misbehaving: str, caplog: pytest.LogCaptureFixture) -> None:
    with running(EngineSpec(factory=misbehaving), HANG_MS) as engine:
        begin(engine, "good")
        engine.step(blocks("good")[:1])
        engine.hotwords("sound", "/hotwords/sound")
        engine.hotwords(f"{how}-learn", "/hotwords/poisoned")
        assert [message for message in caplog.messages if "given up" in message and f"hotwords {how}-learn" in message]
        restarts = engine.restarts
        os.kill(engine.pid, signal.SIGKILL)
        for block in blocks("good")[1:]:
            engine.step([block])
        assert finals(engine, "good") == undisturbed("good")
        assert engine.restarts == restarts + 1, "the next engine is spared"


def test_a_long_final_does_not_hold_up_steps(misbehaving: str, tmp_path: Path) -> None:
    spec = EngineSpec(factory=misbehaving, options={"once_in": str(tmp_path)})
    with running(spec, timeout_ms=2_000) as engine, ThreadPoolExecutor(1) as pool:
        begin(engine, "hang-final", "live")
        waiting = pool.submit(finals, engine, "hang-final")
        while not (tmp_path / "hang-final").exists():
            time.sleep(0.005)
        engine.step(blocks("live", 1))
        assert not waiting.done()
        assert waiting.result() == {"hang-final": ("", "")}


def test_finals_step_back_from_what_is_live(misbehaving: str) -> None:
    with running(EngineSpec(factory=misbehaving, options={"finals_lanes": 2})) as engine:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        begin(engine, "a", "b")
        assert len(finals(engine, "a")) == 1

        def niceness() -> list[int]:
            return sorted(os.getpriority(os.PRIO_PROCESS, thread.id) - own for thread in psutil.Process(engine.pid).threads())

        while niceness()[-2:] != [4, 4]:  # a lane steps back when its thread begins
            time.sleep(0.005)
        assert niceness()[0] == 0
        assert niceness().count(4) == 2


def test_an_engine_that_cannot_be_started_again_ends_everything(misbehaving: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.inference.process._FAILED_STARTS", 2)
    with running(EngineSpec(factory=misbehaving)) as engine:
        monkeypatch.setenv("PYTHONPATH", "")
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="No module named 'misbehaving'"):
            while True:
                engine.step([])


async def test_a_stage_with_an_engine_that_is_killed_and_poisoned(call: SimpleNamespace, misbehaving: str) -> None:
    """The whole of it: four sessions, one of them poisoned, and kill -9 in the middle; the others' finals are as undisturbed."""
    names = ("one", "two", "die-step", "three")

    def flows() -> list[Any]:
        made = [call.flow(name) for name in names]
        for flow in made:
            flow.begin()
            for _ in range(2):
                flow.begin_segment()
                for _ in range(4):
                    flow.block()
                flow.end_segment()
            flow.end()
        return made

    async def run(engine: Engine, disturb: Any = None) -> Any:
        emitted = call.emitted()
        inputs: Sequence[Any] = call.interleaved(*flows())
        core = InferenceCore(Settings(engine="instant"), emitted, engine)
        await core.start()
        try:
            for number, each in enumerate(inputs):
                await core.step([each])
                if number == len(inputs) // 3 and disturb:
                    disturb()
            async with asyncio.timeout(60):
                await emitted.settle(inputs)
        finally:
            await core.stop()
        return emitted

    expected = await run(InstantEngine())
    engine = EngineProcess(EngineSpec(factory=misbehaving), timeout_ms=5_000)
    await asyncio.to_thread(engine.start)
    emitted = await run(engine, lambda: os.kill(engine.pid, signal.SIGKILL))
    for name in ("one", "two", "three"):
        assert [final.text for final in emitted.finals(name)] == [final.text for final in expected.finals(name)]
        assert call.covered(emitted, name) == call.covered(expected, name)
        assert emitted.of(Session, name)[-1].flags == ()
    assert [final.text for final in emitted.finals("die-step")] == ["", ""]
    assert call.covered(emitted, "die-step") == call.covered(expected, "die-step"), "its frames are answered all the same"
    assert emitted.of(Session, "die-step")[-1].flags == ("engine_failed",)
    assert [log.event for log in emitted.of(LogEvent, "die-step")].count("failed") == 2
