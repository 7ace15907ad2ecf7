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

PATIENCE_S = 30.0
#: Nothing is committed here: the consumer group is not joined.
NEVER_MS = 3_600_000

Feed = Callable[[Sequence[Record | bytes]], Awaitable[None]]


class Fed:
    """A stage that was fed: what it said lies on the topics."""

    def __init__(self, settings: Settings, stage: Stage, tenure: Tenure) -> None:
        self._settings = settings
        self._stage = stage
        self._tenure = tenure

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
        deadline_s = time.monotonic() + PATIENCE_S
        while tenure.frontier.settled_to < len(records) and time.monotonic() < deadline_s:  # noqa: ASYNC110 as an outsider
            await asyncio.sleep(0.02)
        assert tenure.frontier.settled_to == len(records), "some inputs were never settled"
        try:
            yield Fed(own, stage, tenure)
        finally:
            await stage.stop()
            await app.outbox.stop()

    return fed  # type: ignore[return-value]
