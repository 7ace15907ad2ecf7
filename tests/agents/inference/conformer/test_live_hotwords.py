"""Hotwords that are pushed while calls are live: from the audio topic to the finals, with the real stages, engine and compiler."""

from __future__ import annotations

import asyncio
import contextlib
import wave
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from agents.features.core import FeaturesCore
from agents.inference.conformer.engine import ConformerEngine, conformer_engine
from agents.inference.core import InferenceCore
from agents.inference.decoding.compiler import ListCompiler
from agents.inference.frames import Compile, Compiled
from agents.inference.hotwords import CompilerProcess
from agents.vad.core import VadCore
from schemas import default_codec
from schemas.digest import hotword_version
from schemas.records import (
    AudioFrame,
    Coverage,
    FlowRecord,
    Hotword,
    HotwordList,
    Partial,
    Rejected,
    SegmentEnd,
    SessionEnd,
    SessionRecord,
    SessionStart,
    Stamps,
    Transcript,
    VersionChange,
)
from streams.control import Control, PushedList, archive_key
from streams.core import Input, SessionKey
from streams.settings import Settings

DATA = Path(__file__).parents[3] / "data"
MODEL = DATA / "wenet" / "models" / "u2pp"
SETTINGS = Settings(engine="conformer", model_dir=MODEL, itn=False, vad="traditional", vad_denoise=False)
KEY = SessionKey(0, "s")
CHANGE_SAMPLE = 48_000
FAVOURED = (Hotword(phrase="门会长", boost=9.0), Hotword(phrase="☎", boost=9.0))


def pushed(name: str, phrases: Sequence[Hotword]) -> PushedList:
    record = HotwordList(name=name, version=hotword_version(phrases), pushed_us=1, phrases=tuple(phrases))
    return PushedList(name, record.version, 1, len(phrases), default_codec().encode(record), 7)


@pytest.fixture(scope="module")
def engine() -> ConformerEngine:
    return conformer_engine(str(MODEL), slots=4, numbers=False)


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    """The same sentence three times."""
    with wave.open(str(DATA / "zh" / "aishell1_BAC009S0724W0121.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return np.concatenate([samples, np.zeros(9_600, "<i2")] * 3)


class InThread:
    """Compiles as the compiler's process does, when it is let."""

    def __init__(self, cache_dir: Path) -> None:
        self._compiler = ListCompiler(MODEL, cache_dir)
        self.ordered: list[str] = []
        self.going = asyncio.Event()
        self.going.set()

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def compile(self, version: str, lists: tuple[PushedList, ...], then: Callable[[Compiled], None]) -> None:
        self.ordered.append(version)
        phrases = [(each.phrase, each.boost) for one in lists for each in default_codec().decode(one.value).phrases]  # type: ignore[attr-defined]
        self._waiting = asyncio.ensure_future(self._later(Compile(version, tuple(phrases)), then))

    async def _later(self, request: Compile, then: Callable[[Compiled], None]) -> None:
        await self.going.wait()
        then(self._compiler.compile(request))


@dataclass
class Said:
    """What a stage says."""

    records: list[SessionRecord] = field(default_factory=list)
    settled: int = 0

    def emit(self, cause: Input, records: Sequence[SessionRecord]) -> None:
        self.records += records

    def done(self, cause: Input) -> None:
        self.settled += 1

    @property
    def inputs(self) -> list[Input]:
        """The records that go on, as the next stage reads them."""
        flow = [record for record in self.records if isinstance(record, FlowRecord)]
        return [Input(KEY, offset, 0, record) for offset, record in enumerate(flow)]

    def of(self, kind: type[SessionRecord]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


def audio_topic(speech: np.ndarray, sizes: Sequence[int], changes: dict[int, str]) -> list[Input]:
    """Return a call in frames of these sizes, over and over, in which versions change where a frame ends."""
    ids = {"channel_id": "c", "session_id": "s", "conversation_id": "k"}
    records: list[FlowRecord] = [SessionStart(**ids, position_samples=0, encoding="pcm_s16le", sample_rate_hz=16_000)]
    at, turn = 0, 0
    while at < len(speech):
        if at in changes:
            records.append(VersionChange(**ids, position_samples=at, kind="hotwords", name="orders", version=changes[at]))
        end = min([at + sizes[turn % len(sizes)], len(speech), *(change for change in changes if change > at)])
        stamps = Stamps(captured_us=1_000_000 + end * 125 // 2)
        payload = speech[at:end].tobytes()
        records.append(AudioFrame(**ids, position_samples=at, encoding="pcm_s16le", sample_rate_hz=16_000, payload=payload, stamps=stamps))
        at, turn = end, turn + 1
    records.append(SessionEnd(**ids, position_samples=len(speech), reason="hangup"))
    return [Input(KEY, offset, 0, record) for offset, record in enumerate(records)]


async def upstream(inputs: Sequence[Input]) -> list[Input]:
    """Return what the stages before the engine make of a call."""
    for make in (VadCore, FeaturesCore):
        said = Said()
        core: Any = make(SETTINGS, said)
        await core.start()
        for each in inputs:
            await core.step([each])
        await core.stop()
        inputs = said.inputs
    return list(inputs)


@contextlib.asynccontextmanager
async def inferring(engine: Any, control: Control, compiler: Any) -> AsyncIterator[tuple[InferenceCore, Said]]:
    said = Said()
    core = InferenceCore(SETTINGS, said, engine, control=control, compiler=compiler)
    await core.start()
    try:
        yield core, said
    finally:
        await core.stop()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110 as an outsider
            await asyncio.sleep(0.005)


def canonical(finals: Sequence[Transcript]) -> list[Transcript]:
    return [msgspec.structs.replace(final, stamps=Stamps(), covered_to_sample=0) for final in finals]


async def finals_of(engine: Any, control: Control, compiler: Any, inputs: Sequence[Input], step: int = 1) -> list[Transcript]:
    async with inferring(engine, control, compiler) as (core, said):
        for start in range(0, len(inputs), step):
            await core.step(inputs[start : start + step])
        await until(lambda: said.settled == len(inputs))
    return said.of(Transcript)


async def test_a_change_has_its_place_and_a_replay_finds_the_same(engine: ConformerEngine, speech: np.ndarray, tmp_path: Path) -> None:
    one = pushed("orders", FAVOURED)
    control = Control(SETTINGS, default_codec())
    control.take(archive_key("orders", one.version), one)
    control.take("orders", one)
    changes = {CHANGE_SAMPLE: one.version, 3 * CHANGE_SAMPLE: ""}
    found = []
    for number, sizes in enumerate(((3_200,), (1_600,), (320, 4_000, 160))):
        inputs = await upstream(audio_topic(speech, sizes, changes))
        finals = await finals_of(engine, control, InThread(tmp_path), inputs, step=(1, 7, 10_000)[number])
        found.append(canonical(finals))
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert [final.hotword_version for final in found[0]] == [one.version, one.version, ""]
    assert all(("门会长" in final.raw_text) == bool(final.hotword_version) for final in found[0])

    # By the time of the replay another list is in force, and another worker has the calls.
    other = pushed("orders", [Hotword(phrase="不是", boost=9.0)])
    control.take("orders", other)
    later = await finals_of(engine, control, InThread(tmp_path / "elsewhere"), await upstream(audio_topic(speech, (3_200,), changes)))
    assert canonical(later) == found[0]


async def test_only_the_finals_that_name_a_list_wait_for_it(engine: ConformerEngine, speech: np.ndarray, tmp_path: Path) -> None:
    one = pushed("orders", FAVOURED)
    rejected: list[Rejected] = []
    control = Control(SETTINGS, default_codec(), rejected.append)
    compiler = InThread(tmp_path)
    inputs = await upstream(audio_topic(speech, (3_200,), {2 * CHANGE_SAMPLE: one.version}))
    async with inferring(engine, control, compiler) as (core, said):
        compiler.going.clear()
        control.take(archive_key("orders", one.version), one)
        control.take("orders", one)
        await core.step(inputs)
        await until(lambda: len(said.of(Transcript)) == 1 and len(said.of(Coverage)) == len([each for each in inputs if frames(each)]))
        assert said.of(Transcript)[0].hotword_version == ""
        assert core.report.hotword_version == ""
        assert compiler.ordered == [one.version], "once, though two finals wait"
        compiler.going.set()
        await until(lambda: said.settled == len(inputs))
        assert [final.hotword_version for final in said.of(Transcript)] == ["", one.version, one.version]
        assert core.report.hotword_version == one.version
        control.take("orders", pushed("orders", ()))
        await until(lambda: core.report.hotword_version == "")
    assert len(rejected) == 1
    assert "1 of 2 phrases" in rejected[0].reason
    assert "'☎': the model has no unit for ☎" in rejected[0].reason
    assert (rejected[0].key, rejected[0].offset) == (b"orders", 7)


def frames(each: Input) -> int:
    return len(getattr(each.record, "frames", ()))


async def test_partials_listen_to_a_list_from_the_push_on(engine: ConformerEngine, speech: np.ndarray, tmp_path: Path) -> None:
    control = Control(SETTINGS, default_codec())
    inputs = await upstream(audio_topic(speech, (3_200,), {}))
    first_end, second_end, _ = (number for number, each in enumerate(inputs) if isinstance(each.record, SegmentEnd))
    async with inferring(engine, control, InThread(tmp_path)) as (core, said):
        await core.step(inputs[: first_end - 1])
        await until(lambda: said.settled >= first_end - 3)
        one = pushed("orders", FAVOURED)
        control.take("orders", one)
        await until(lambda: core.report.hotword_version == one.version)
        assert not any("门会长" in partial.text for partial in said.of(Partial))
        await core.step(inputs[first_end - 1 : second_end])
        await until(lambda: any("门会长" in partial.text for partial in said.of(Partial)))
        await core.step(inputs[second_end:])
        await until(lambda: said.settled == len(inputs))
        assert [final.hotword_version for final in said.of(Transcript)] == ["", "", ""], "no record put it in force for the session"


async def test_a_list_that_is_nowhere_is_not_waited_for_for_ever(
    engine: ConformerEngine, speech: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.inference.hotwords._UNKNOWN_WAIT_S", 0.05)
    inputs = await upstream(audio_topic(speech[: len(speech) // 3], (3_200,), {3_200: "gone"}))
    async with inferring(engine, Control(SETTINGS, default_codec()), InThread(tmp_path)) as (core, said):
        await core.step(inputs)
        await until(lambda: said.settled == len(inputs))
    (final,) = said.of(Transcript)
    assert final.hotword_version == "gone"
    assert final.raw_text
    assert "failed" in [record.event for record in said.records if hasattr(record, "event")], "it says that it was decoded without them"


async def test_the_compiler_has_a_process_of_its_own_and_comes_back(tmp_path: Path) -> None:
    compiler = CompilerProcess(MODEL, tmp_path, default_codec())
    compiler.start()
    done: asyncio.Queue[Compiled] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    async def compiled(*phrases: str) -> Compiled:
        one = pushed("orders", [Hotword(phrase=phrase, boost=2.0) for phrase in phrases])
        compiler.compile(one.version, (one,), lambda answer: loop.call_soon_threadsafe(done.put_nowait, answer))
        return await asyncio.wait_for(done.get(), 240)

    try:
        answer = await compiled("门会长", "☎")
        assert (answer.phrases, answer.left_out, answer.fresh, answer.error) == (1, 1, True, "")
        assert answer.examples == (("☎", "the model has no unit for ☎"),)
        assert (Path(answer.folder) / "hotwords.json").exists()
        assert compiler._process is not None
        compiler._process.kill()
        compiler._process.wait()
        again = await compiled("门会长", "☎")
        assert (again.folder, again.fresh) == (answer.folder, False), "another worker of this machine has compiled it"
        process = compiler._process
        for number in range(17):
            last = await compiled(f"门会长{'门' * number}")
        kept = list(Path(last.folder).parent.iterdir())
        assert len(kept) == 16, "those used last"
        assert Path(answer.folder) not in kept
    finally:
        compiler.stop()
    assert process.poll() is not None


async def test_a_compiler_without_a_model_says_so(tmp_path: Path) -> None:
    compiler = CompilerProcess(tmp_path, tmp_path, default_codec())
    compiler.start()
    one = pushed("orders", FAVOURED)
    answers: list[Compiled] = []
    compiler.compile(one.version, (one,), answers.append)
    try:
        await until(lambda: answers)
    finally:
        compiler.stop()
    assert "units.txt" in answers[0].error
