"""The codec inside Faust: a topic and an agent that say ``avro``."""

from __future__ import annotations

import asyncio

import faust
import pytest
from faust.exceptions import ValueDecodeError

from schemas.codec import default_codec
from schemas.faust import AVRO, AvroCodec, register_codec
from schemas.records import Heartbeat, Record

_RECORD = Heartbeat(channel_id="7", session_id="s", conversation_id="c", position_samples=16_000)


@pytest.fixture
async def app() -> faust.App:
    register_codec()
    app = faust.App("avro-test", store="memory://", broker="kafka://127.0.0.1:1")
    app.loop = asyncio.get_running_loop()
    app.finalize()
    app.flow_control.resume()
    return app


async def test_topic_encodes_records(app: faust.App) -> None:
    topic = app.topic("beats", value_serializer=AVRO)
    value, _headers = topic.prepare_value(_RECORD, AVRO, headers={})
    assert value == default_codec().encode(_RECORD)


async def test_stored_bytes_are_decoded(app: faust.App) -> None:
    assert app.serializers.loads_value(None, default_codec().encode(_RECORD), serializer=AVRO) == _RECORD


async def test_damaged_bytes_are_fausts_own_decode_error(app: faust.App) -> None:
    with pytest.raises(ValueDecodeError, match="neither Avro"):
        app.serializers.loads_value(None, b"damaged", serializer=AVRO)


async def test_agent_gets_records(app: faust.App) -> None:
    got: list[Record] = []

    async def listen(stream: faust.Stream[Record]) -> None:
        got.extend([record async for record in stream])

    agent = app.agent(app.topic("beats", value_serializer=AVRO))(listen)
    async with agent.test_context() as context:
        await context.put(_RECORD)
    assert got == [_RECORD]


def test_copy_keeps_its_codec() -> None:
    codec = default_codec()
    assert AvroCodec(codec=codec).clone().dumps(_RECORD) == codec.encode(_RECORD)
