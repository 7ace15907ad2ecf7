"""What goes into a step, and in which order results come back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agents.inference import metrics
from agents.inference.batcher import _LIVE_BLOCKS, Batcher
from agents.inference.engine import Block, FinalText, Finish, Hypothesis, Opening, SegmentKey
from agents.inference.instant import InstantEngine
from agents.inference.pacing import FixedPacing, Pacing


class Watched(InstantEngine):
    """An instant engine that can be held, and keeps what it was asked."""

    def __init__(self, finals_lanes: int = 1, blocks_at_once: int = 1) -> None:
        super().__init__()
        self.finals_lanes = finals_lanes
        self.blocks_at_once = blocks_at_once
        self.steps: list[list[Block]] = []
        self.closed: list[SegmentKey] = []
        self.going = threading.Event()
        self.finals_going = threading.Event()
        self.in_final = threading.Event()
        self.going.set()
        self.finals_going.set()

    def step(self, blocks: Sequence[Block]) -> Sequence[Hypothesis]:
        if blocks:
            self.steps.append(list(blocks))
        self.going.wait()
        return super().step(blocks)

    def finish(self, requests: Sequence[Finish]) -> Sequence[FinalText]:
        self.in_final.set()
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


def take_step(batcher: Batcher, max_batch: int) -> Counter[SegmentKey]:
    """Take what the next step would, and return how many blocks of each segment that are."""
    return Counter(each.key for each in batcher._take(batcher._choose(max_batch)))


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), max_size=6), min_size=1, max_size=30),
    max_batch=st.integers(1, 8),
    at_once=st.sampled_from([1, 25]),
)
def test_no_channel_waits_while_another_is_served_twice(arrivals: list[list[tuple[int, int]]], max_batch: int, at_once: int) -> None:
    """Among those that are live, and among those that catch up; and nobody waits for ever."""
    batcher = Batcher(Watched(blocks_at_once=at_once), Heard())
    begin(batcher, *range(8))
    chunks: Counter[int] = Counter()
    # By segment that waits: its class, and how often each other one of that class was served meanwhile.
    served: dict[SegmentKey, tuple[bool, Counter[SegmentKey]]] = {}
    steps = 0

    def late(name: SegmentKey) -> bool:
        return len(batcher._segments[name].waiting) > _LIVE_BLOCKS

    while arrivals or batcher._ready:
        for name, count in arrivals.pop(0) if arrivals else ():
            for _ in range(count):
                batcher.put(block(name, chunks[name]))
                chunks[name] += 1
        classes = {name: late(name) for name in batcher._ready}
        for name, is_late in classes.items():
            if name not in served or served[name][0] != is_late:
                served[name] = is_late, Counter()
        taken = take_step(batcher, max_batch)
        steps += 1
        for name in taken:
            served.pop(name, None)
        for is_late, others in served.values():
            others.update(name for name in taken if classes[name] == is_late)
            assert not others or max(others.values()) <= 1
        each = {taken[name] for name in taken if classes[name] and batcher._segments[name].waiting}
        assert len(each) <= 1, "who catches up gets as many blocks as the others"
        assert steps < 2_000
    assert batcher._held == 0


def test_after_a_stall_live_channels_go_first_and_the_others_catch_up_side_by_side() -> None:
    """50 channels after 10 s in which nothing was decoded for 40 of them; an engine with time for three steps in 200 ms."""
    batcher = Batcher(Watched(blocks_at_once=25), Heard())
    begin(batcher, *range(50))
    behind, live = range(40), range(40, 50)
    for name in behind:
        for chunk in range(50):
            batcher.put(block(name, chunk))
    backlog = dict.fromkeys(behind, 50)
    for tick in range(1_000):
        for name in range(50):
            batcher.put(block(name, 100 + tick))
        for name in behind:
            backlog[name] += 1
        taken = [take_step(batcher, 64) for _ in range(3)]
        assert all(taken[0][key(name)] == 1 for name in live), "a live block waits for no step but the one under way"
        for step in taken:
            for name in behind:
                backlog[name] -= step[key(name)]
        assert max(backlog.values()) - min(backlog.values()) <= 2
        if not any(backlog.values()):
            break
    # 40 x 50 blocks, of which 120 are taken in each 200 ms, and 40 come: 5 s.
    assert tick <= 25


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
        await until(engine.in_final.is_set)
        batcher.close(key("s"))
        batcher.put(block("other", 0))
        await until(lambda: len(heard.blocks) == 2)
        assert engine.closed == []
        engine.finals_going.set()
        await until(lambda: engine.closed == [key("s")])


async def test_a_final_waits_for_the_step_that_has_its_last_block() -> None:
    engine = Watched()
    async with running(engine, FixedPacing(1, 0.0)) as (batcher, heard):
        begin(batcher, "a")
        batcher.put(block("a", 0))
        await until(lambda: len(heard.blocks) == 1)
        engine.going.clear()
        batcher.put(block("a", 1))
        await until(lambda: len(engine.steps) == 2)
        batcher.finish(Finish(key=key("a"), end_sample=0))
        assert not await asyncio.to_thread(engine.in_final.wait, 0.1), "a final was asked for before its last block was taken"
        engine.going.set()
        await until(lambda: heard.finals)
        assert [each.chunk for each in heard.blocks] == [0, 1]


async def test_a_final_waits_for_the_step_that_opens_its_segment() -> None:
    engine = Watched()
    async with running(engine, FixedPacing(1, 0.0)) as (batcher, heard):
        engine.going.clear()
        begin(batcher, "a")
        await until(lambda: not batcher._unopened)
        batcher.finish(Finish(key=key("a"), end_sample=0))
        assert not await asyncio.to_thread(engine.in_final.wait, 0.1)
        engine.going.set()
        await until(lambda: heard.finals)


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


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=9), max_batch=st.integers(1, 16), at_once=st.integers(2, 25))
def test_several_blocks_of_a_segment_stay_in_order(counts: list[int], max_batch: int, at_once: int) -> None:
    async def run() -> None:
        engine = Watched(1, at_once)
        engine.going.clear()
        async with running(engine, FixedPacing(max_batch, 0.0)) as (batcher, heard):
            begin(batcher, "first", *range(len(counts)))
            batcher.put(block("first", 0))
            await until(lambda: engine.steps)
            for name, count in enumerate(counts):
                for chunk in range(count):
                    batcher.put(block(name, chunk))
            engine.going.set()
            await until(lambda: len(heard.blocks) == 1 + sum(counts))
            for step in engine.steps:
                assert len(step) <= max_batch
                assert max(Counter(each.key for each in step).values()) <= at_once
            for name in ["first", *range(len(counts))]:
                batcher.finish(Finish(key=key(name), end_sample=0))
            await until(lambda: len(heard.finals) == 1 + len(counts))
            for name, count in enumerate(counts):
                assert [each.chunk for each in heard.blocks if each.key == key(name)] == list(range(count))
            assert batcher._held == 0

    asyncio.run(run())


async def test_one_late_segment_gets_what_the_live_ones_leave() -> None:
    engine = Watched(1, 25)
    engine.going.clear()
    async with running(engine, FixedPacing(16, 0.0)) as (batcher, heard):
        begin(batcher, "first", *range(10), "late")
        batcher.put(block("first", 0))
        await until(lambda: engine.steps)
        for chunk in range(30):
            batcher.put(block("late", chunk))
        for name in range(10):
            batcher.put(block(name, 0))
        engine.going.set()
        await until(lambda: len(heard.blocks) == 41)
        assert Counter(each.key for each in engine.steps[1]) == Counter({key("late"): 6} | {key(name): 1 for name in range(10)})
        assert [len(step) for step in engine.steps[2:]] == [16, 5, 3] or [len(step) for step in engine.steps[2:]] == [16, 8]


async def test_of_an_ended_segment_no_text_is_wanted_before_its_final() -> None:
    engine = Watched(1, 25)
    engine.going.clear()
    async with running(engine, FixedPacing(2, 0.0)) as (batcher, heard):
        begin(batcher, "first", "ended", "open")
        batcher.put(block("first", 0))
        await until(lambda: engine.steps)
        for chunk in range(60):
            batcher.put(block("ended", chunk))
        batcher.put(block("open", 0))
        batcher.finish(Finish(key=key("ended"), end_sample=0))
        engine.going.set()
        await until(lambda: heard.finals)
        assert len(engine.steps) == 2
        assert [(each.key, each.quiet) for each in engine.steps[1]] == [(key("open"), False), *[(key("ended"), True)] * 60]


async def test_partials_are_given_up_when_steps_are_late(monkeypatch: Any) -> None:
    monkeypatch.setattr("agents.inference.batcher._LATE_STEP_S", 0.02)
    engine = Watched(1, 25)
    shed = metrics.SHED_SEGMENTS._value.get()
    engine.going.clear()
    async with running(engine, FixedPacing(64, 0.0)) as (batcher, heard):
        begin(batcher, *range(17))
        batcher.put(block(0, 0))
        await until(lambda: engine.steps)
        for name in range(1, 17):
            for chunk in range(3 if name == 5 else 1):
                batcher.put(block(name, chunk))
        await asyncio.sleep(0.03)
        engine.going.set()
        await until(lambda: len(heard.blocks) == 19)
        quiet = {each.key for step in engine.steps for each in step if each.quiet}
        assert len(quiet) == 3, "an eighth of 17, and not again within a second"
        assert key(5) in quiet, "what waits longest goes first"
        assert metrics.SHED_SEGMENTS._value.get() == shed + 3
        batcher.put(block(5, 3))
        await until(lambda: len(heard.blocks) == 20)
        assert heard.blocks[-1].quiet, "to the segment's end"


async def test_it_says_when_more_channels_speak_than_the_machine_carries(caplog: Any) -> None:
    pacing = FixedPacing(64, 1.0)
    pacing.channels = 2
    async with running(Watched(), pacing) as (batcher, heard):
        begin(batcher, "a", "b")
        batcher.put(block("a", 0))
        await until(lambda: len(heard.blocks) == 1)
        assert metrics.OVERLOADED._value.get() == 0
        begin(batcher, "c")
        for chunk in range(1, 4):
            batcher.put(block("a", chunk))
            await until(lambda chunk=chunk: len(heard.blocks) == chunk + 1)
        assert (metrics.SPEAKING._value.get(), metrics.CHANNELS._value.get(), metrics.OVERLOADED._value.get()) == (3, 2, 1)
        assert batcher.channels == 2
    said = [record.message for record in caplog.records if "this machine carries" in record.message]
    assert len(said) == 1
    assert said[0].startswith("3 channels speak, and this machine carries 2")


async def test_partials_are_given_up_when_finals_are_late(monkeypatch: Any) -> None:
    monkeypatch.setattr("agents.inference.batcher._LATE_FINAL_S", 0.02)
    engine = Watched(1, 25)
    engine.finals_batch = 1
    engine.finals_going.clear()
    async with running(engine, FixedPacing(64, 0.0)) as (batcher, heard):
        begin(batcher, "in the lane", "waits", "live")
        for name in ("in the lane", "waits"):
            batcher.put(block(name, 0))
            batcher.finish(Finish(key=key(name), end_sample=0))
        await until(lambda: len(heard.blocks) == 2)
        await asyncio.sleep(0.03)
        batcher.put(block("live", 0))
        await until(lambda: len(heard.blocks) == 3)
        assert heard.blocks[-1].quiet
        engine.finals_going.set()
        await until(lambda: len(heard.finals) == 2)
