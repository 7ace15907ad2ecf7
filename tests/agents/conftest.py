"""What the agents' tests share: a stage as a worker has it, fed through its Faust agent, its outputs read back from the real broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from schemas import Record, default_codec
from streams.application import create_app
from streams.checkpoint import Snapshot
from streams.kafka import plain_consumer
from streams.settings import Settings
from streams.stage import Stage
from streams.tenure import Tenure
from streams.topic_admin import ensure_topics
from streams.topics import Topic

PATIENCE_S = 120.0
#: Nothing is committed here, for the consumer group is not joined; more than any machine has been up.
NEVER_MS = 10**12

Feed = Callable[[Sequence[Record | bytes]], Awaitable[None]]


class Fed:
    """A stage that was fed: what it said lies on the topics."""

    def __init__(self, settings: Settings, stage: Stage, tenure: Tenure) -> None:
        self._settings = settings
        self._stage = stage
        self._tenure = tenure

    async def more(self, records: Sequence[Record]) -> None:
        """Feed further records past the agent, and wait until they are settled."""
        for record in records:
            value = default_codec().encode(record)
            await self._stage.read(0, self._tenure.frontier.next_offset, time.time_ns() // 1_000_000, b"7", value)
        await settled(self._tenure)

    def captured(self) -> Snapshot:
        """Return the state that the stage would commit now."""
        self._tenure.candidate = None
        self._stage._capture(0.0)
        assert self._tenure.candidate is not None, "the stage sees no reason to commit what changed"
        snapshot, _ = self._tenure.candidate
        return snapshot

    async def said(self, topic: Topic, count: int) -> list[Record]:
        """Return the records on a topic once there are that many."""

        def read() -> list[Record]:
            consumer = plain_consumer(self._settings, [topic])
            records: list[Record] = []
            deadline_s = time.monotonic() + PATIENCE_S
            while len(records) < count and time.monotonic() < deadline_s:
                message = consumer.poll(0.1)
                if message is not None and not message.error():
                    records.append(default_codec().decode(message.value()))
            consumer.close()
            return records

        records = await asyncio.to_thread(read)
        assert len(records) == count
        return records


async def settled(tenure: Tenure) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while tenure.frontier.open_inputs and time.monotonic() < deadline_s:  # noqa: ASYNC110 as an outsider
        await asyncio.sleep(0.02)
    assert not tenure.frontier.open_inputs, "some inputs were never settled"


@pytest.fixture
def stage_fed_with(settings: Settings) -> Callable[..., AsyncIterator[Fed]]:
    """A context: the agent of a stage, fed with records in a row on partition 0, then finished with all of them."""

    @asynccontextmanager
    async def fed(stage_name: str, records: Sequence[Record | bytes], **overrides: object) -> AsyncIterator[Fed]:
        own = settings.model_copy(update={"stage": stage_name, "snapshot_interval_ms": NEVER_MS, **overrides})
        await asyncio.to_thread(ensure_topics, own)
        app = create_app(own)
        app.loop = asyncio.get_running_loop()
        app.finalize()
        app.flow_control.resume()
        (stage,) = app.stages
        await app.outbox.start()
        await stage.start()
        tenure = stage.tenures[0] = Tenure(0, Snapshot(epoch=1), 0, numbered_by_recorder=stage_name == "vad")
        (agent,) = app.agents.values()
        async with agent.test_context() as wrapper:
            for record in records:
                value = record if isinstance(record, bytes) else default_codec().encode(record)
                await wrapper.put(value, key=b"7")
        await settled(tenure)
        assert tenure.frontier.settled_to == len(records)
        try:
            yield Fed(own, stage, tenure)
        finally:
            await stage.stop()
            await app.outbox.stop()

    return fed  # type: ignore[return-value]
