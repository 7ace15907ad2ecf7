"""What goes into a step, and in which order results come back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agents.inference.batcher import Batcher, FixedPacing, Pacing
from agents.inference.engine import Block, FinalText, Finish, Hypothesis, Opening, SegmentKey
from agents.inference.instant import InstantEngine


class Watched(InstantEngine):
    """An instant engine that can be held, and keeps what it was asked."""

    def __init__(self, finals_lanes: int = 1) -> None:
        super().__init__()
        self.finals_lanes = finals_lanes
        self.steps: list[list[Block]] = []
        self.closed: list[SegmentKey] = []
        self.going = threading.Event()
        self.finals_going = threading.Event()
        self.going.set()
        self.finals_going.set()

    def step(self, blocks: Sequence[Block]) -> Sequence[Hypothesis]:
        if blocks:
            self.steps.append(list(blocks))
        self.going.wait()
        return super().step(blocks)

    def finish(self, requests: Sequence[Finish]) -> Sequence[FinalText]:
        self.finals_going.wait()
        return super().finish(requests)

    def close(self, keys: Sequence[SegmentKey]) -> None:
        self.closed += keys
        super().close(keys)


class Heard:
    """Keeps what a listener hears."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finals: list[FinalText] = []
        self.failures: list[BaseException] = []

    def stepped(self, blocks: Sequence[Block], hypotheses: Sequence[Hypothesis]) -> None:
        self.blocks += blocks

    def finished(self, finals: Sequence[FinalText]) -> None:
        taken = {block.key for block in self.blocks}
        assert all(final.key in taken for final in finals if final.text), "a final before its blocks"
        self.finals += finals

    def broke(self, failure: BaseException) -> None:
        self.failures.append(failure)


def key(name: object) -> SegmentKey:
    return SegmentKey(str(name), 0)


def block(name: object, chunk: int) -> Block:
    return Block(key=key(name), chunk=chunk, hops=20, pcm=b"x")


@contextlib.asynccontextmanager
async def running(engine: Watched, pacing: Pacing | None = None) -> AsyncIterator[tuple[Batcher, Heard]]:
    heard = Heard()
    batcher = Batcher(engine, heard, pacing)
    batcher.start()
    try:
        yield batcher, heard
    finally:
        engine.going.set()
        engine.finals_going.set()
        await asyncio.to_thread(batcher.stop)


async def until(true: Any) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 as an outsider
            await asyncio.sleep(0.002)


def begin(batcher: Batcher, *names: object) -> None:
    for name in names:
        batcher.open(Opening(key=key(name), start_sample=0))


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=9), max_batch=st.integers(1, 8), lanes=st.integers(0, 2))
def test_every_block_once_in_order_and_every_final(counts: list[int], max_batch: int, lanes: int) -> None:
    async def run() -> None:
        engine = Watched(lanes)
        async with running(engine, FixedPacing(max_batch, 1.0)) as (batcher, heard):
            begin(batcher, *range(len(counts)))
            for chunk in range(max(counts)):
                for name, count in enumerate(counts):
                    if chunk < count:
                        batcher.put(block(name, chunk))
            for name in range(len(counts)):
                batcher.finish(Finish(key=key(name), end_sample=0))
            await until(lambda: len(heard.finals) == len(counts) and len(engine.closed) == len(counts))
            assert not heard.failures
            for step in engine.steps:
                assert len(step) <= max_batch
                assert len({each.key for each in step}) == len(step), "two blocks of one segment in a step"
            for name, count in enumerate(counts):
                assert [each.chunk for each in heard.blocks if each.key == key(name)] == list(range(count))
            assert batcher._held == 0

    asyncio.run(run())


async def test_a_step_is_filled_with_all_that_is_open() -> None:
    engine = Watched()
    async with running(engine, FixedPacing(64, 10_000.0)) as (batcher, heard):
        begin(batcher, *range(5))
        for name in range(5):
            batcher.put(block(name, 0))
            await asyncio.sleep(0.005)
        await until(lambda: len(heard.blocks) == 5)
        assert [len(step) for step in engine.steps] == [5]


async def test_live_segments_go_first_and_late_ones_keep_their_share() -> None:
    engine = Watched()
    engine.going.clear()
    async with running(engine, FixedPacing(8, 0.0)) as (batcher, heard):
        begin(batcher, "first", *range(20))
        batcher.put(block("first", 0))
        await until(lambda: engine.steps)
        for name in range(20):
            for chunk in range(1 if name >= 4 else 20):
                batcher.put(block(name, chunk))
        engine.going.set()
        await until(lambda: len(heard.blocks) == 1 + 16 + 4 * 20)
        late = {key(name) for name in range(4)}
        mixed = engine.steps[1:3]
        assert [sum(each.key in late for each in step) for step in mixed] == [1, 1]
        assert [len(step) for step in mixed] == [8, 8]


async def test_a_closed_segment_is_heard_of_no_more() -> None:
    engine = Watched()
    engine.going.clear()
    async with running(engine, FixedPacing(8, 0.0)) as (batcher, heard):
        begin(batcher, "gone", "stays")
        batcher.put(block("gone", 0))
        batcher.put(block("stays", 0))
        await until(lambda: engine.steps)
        batcher.put(block("gone", 1))
        batcher.close(key("gone"))
        batcher.close(key("never opened"))
        engine.going.set()
        batcher.finish(Finish(key=key("stays"), end_sample=0))
        await until(lambda: heard.finals)
        assert [final.key for final in heard.finals] == [key("stays")]
        assert (key("gone"), 1) not in [(each.key, each.chunk) for each in heard.blocks]
        await until(lambda: set(engine.closed) == {key("gone"), key("stays")})


async def test_a_segment_is_not_closed_under_its_final() -> None:
    engine = Watched()
    engine.finals_going.clear()
    async with running(engine) as (batcher, heard):
        begin(batcher, "s", "other")
        batcher.put(block("s", 0))
        batcher.finish(Finish(key=key("s"), end_sample=0))
        await until(lambda: batcher._segments[key("s")].settling)
        batcher.close(key("s"))
        batcher.put(block("other", 0))
        await until(lambda: len(heard.blocks) == 2)
        assert engine.closed == []
        engine.finals_going.set()
        await until(lambda: engine.closed == [key("s")])


async def test_room_is_waited_for(monkeypatch: Any) -> None:
    monkeypatch.setattr("agents.inference.batcher._HELD_LIMIT", 3)
    engine = Watched()
    engine.going.clear()
    async with running(engine, FixedPacing(8, 0.0)) as (batcher, heard):
        begin(batcher, "s")
        for chunk in range(6):
            batcher.put(block("s", chunk))
        waiting = asyncio.create_task(batcher.room())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        engine.going.set()
        await asyncio.wait_for(waiting, 20)
        await until(lambda: len(heard.blocks) == 6)


async def test_a_failure_is_told() -> None:
    engine = Watched()
    async with running(engine) as (batcher, heard):
        batcher._unclosed.append(key("s"))
        engine.close = lambda keys: 1 / 0  # type: ignore[method-assign, assignment]
        begin(batcher, "s")
        await until(lambda: heard.failures)
        assert isinstance(heard.failures[0], ZeroDivisionError)
