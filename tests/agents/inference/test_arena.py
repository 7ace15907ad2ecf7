"""Blocks in shared memory: they arrive as they were sent, one request at a time, and nothing is left of it when an engine is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.inference.arena import ARENA_BYTES, Arena
from agents.inference.engine import Block, Finish, Opening, SegmentKey
from agents.inference.frames import EngineSpec, LodgedReplay, LodgedStep, Open, Replay, Step, pack, to_engine
from agents.inference.process import EngineProcess

_FRAME_HEAD_BYTES = 4
LARGE_BYTES = 200_000
SHM = "/dev/shm"  # noqa: S108 it is only looked at
KEY = SegmentKey("s", 0, 3)
BLOCKS = st.lists(
    st.builds(
        Block,
        key=st.builds(SegmentKey, st.text(max_size=8), st.integers(0, 9), st.integers(0, 9)),
        chunk=st.integers(0, 99),
        hops=st.integers(0, 20),
        features=st.binary(max_size=300),
        pcm=st.binary(max_size=300),
        quiet=st.booleans(),
    ),
    max_size=6,
).map(tuple)


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Arena, Arena]]:
    """The worker's side and the engine's, for the smallest request too."""
    monkeypatch.setattr("agents.inference.arena._WORTH_BYTES", 1)
    ours = Arena()
    theirs = Arena(os.dup(ours.descriptor))
    yield ours, theirs
    ours.close()
    theirs.close()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blocks=BLOCKS, replays=st.booleans())
def test_blocks_arrive_as_they_were_sent(arenas: tuple[Arena, Arena], blocks: tuple[Block, ...], replays: bool) -> None:
    ours, theirs = arenas
    request = Replay(7, Opening(key=KEY, start_sample=5), blocks) if replays else Step(7, blocks)
    message = ours.lodge(request)
    has_payload = any(block.features or block.pcm for block in blocks)
    assert isinstance(message, LodgedReplay if replays else LodgedStep) == has_payload
    assert theirs.fetch(to_engine.decode(pack(message)[_FRAME_HEAD_BYTES:])) == request
    ours.free(7)


def test_a_request_lies_there_until_it_is_answered(arenas: tuple[Arena, Arena]) -> None:
    ours, theirs = arenas
    first, second = (Step(number, (Block(key=KEY, chunk=number, hops=20, features=b"%d" % number),)) for number in (1, 2))
    lodged = ours.lodge(first)
    assert isinstance(lodged, LodgedStep)
    assert ours.lodge(second) is second, "it goes whole"
    ours.free(2)
    assert ours.lodge(second) is second
    assert theirs.fetch(lodged) == first
    ours.free(1)
    assert isinstance(ours.lodge(second), LodgedStep)


def test_what_is_small_goes_whole() -> None:
    arena = Arena()
    small = Step(1, (Block(key=KEY, chunk=0, hops=20, features=bytes(6_400)),))
    assert arena.lodge(small) is small
    assert isinstance(arena.lodge(Step(2, small.blocks * 20)), LodgedStep)
    arena.close()


def test_what_has_no_room_goes_whole(arenas: tuple[Arena, Arena]) -> None:
    ours, theirs = arenas
    large = Step(1, (Block(key=KEY, chunk=0, hops=20, pcm=bytes(ARENA_BYTES)), Block(key=KEY, chunk=1, hops=20, pcm=b"!")))
    assert ours.lodge(large) is large
    full = Step(2, large.blocks[:1])
    assert theirs.fetch(ours.lodge(full)) == full
    other = Open(3, (Opening(key=KEY, start_sample=0),))
    assert ours.lodge(other) is other
    ours.close()
    ours.free(2)
    assert ours.lodge(full) is full, "an engine that is gone has no memory"


def session(engine: EngineProcess, number: int, size: int) -> str:
    """Take a session through an engine; return its final, which is made of every byte."""
    key = SegmentKey(f"s{number}", 0)
    engine.open([Opening(key=key, start_sample=0)])
    for chunk in range(6):
        engine.step([Block(key=key, chunk=chunk, hops=20, features=b"%d" % chunk * size, pcm=b"p" * chunk)])
    (final,) = engine.finish([Finish(key=key, end_sample=0)])
    engine.close([key])
    assert not final.error
    return final.text


def test_an_engine_hears_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, sizes = EngineSpec(factory="agents.inference.instant:InstantEngine"), (0, 1, LARGE_BYTES, ARENA_BYTES)
    said = []
    for lodge in (Arena.lodge, lambda _arena, request: request):
        monkeypatch.setattr(Arena, "lodge", lodge)
        engine = EngineProcess(spec)
        engine.start()
        said.append([session(engine, number, size) for number, size in enumerate(sizes)])
        engine.stop()
    assert said[0] == said[1]
    assert len(set(said[0])) == len(sizes)


def entries(folder: str) -> list[str]:
    """Return what is in a folder."""
    return sorted(path.name for path in Path(folder).iterdir())


def mapped() -> int:
    """Return how many arenas this process has mapped."""
    return Path("/proc/self/maps").read_text().count("asr-blocks")


def test_engines_that_are_killed_in_the_middle_leave_nothing() -> None:
    engine = EngineProcess(EngineSpec(factory="agents.inference.instant:InstantEngine"))
    before, in_shm = mapped(), entries(SHM)
    engine.start()
    expected = session(engine, 0, LARGE_BYTES)
    open_files = len(entries("/proc/self/fd"))
    for number in range(1, 4):
        said: list[str] = []
        caller = threading.Thread(target=lambda said=said, number=number: said.append(session(engine, number, LARGE_BYTES)))
        caller.start()
        os.kill(engine.pid, signal.SIGKILL)
        caller.join(timeout=60)
        assert said == [expected], "the new engine was given every block"
        assert engine.restarts == number
    assert mapped() == before + 1
    assert len(entries("/proc/self/fd")) == open_files
    engine.stop()
    assert mapped() == before
    assert entries(SHM) == in_shm
