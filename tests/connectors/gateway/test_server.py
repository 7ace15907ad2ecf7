"""The server, over real sockets; where it says so, with records on a real Kafka."""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from connectors.gateway.server import Gateway, make_app, serve
from connectors.results import Received
from streams.errors import UserError
from streams.settings import Settings, load_settings

TIMEOUT_S = 20


class Client:
    """A WebSocket client."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.cursor = ""

    async def next(self, kind: str | None = None) -> dict[str, Any]:
        """Return the next message, of a kind if given; latencies come all the time and are passed over unless asked for."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                message = json.loads(await self.socket.receive_str())
                self.cursor = message.get("cursor", self.cursor)
                if message["type"] == kind or (kind is None and message["type"] != "latency"):
                    return message


@asynccontextmanager
async def connected(url: str, *, compress: int = 15, **query: Any) -> AsyncIterator[Client]:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{url}ws", params=query, compress=compress, max_msg_size=0) as socket,
    ):
        yield Client(socket)


async def got(url: str, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.text()


def feed_to(gateway: Gateway, *records: Any) -> None:
    for record in records:
        gateway.take(Received(record, time.time_ns() // 1_000))


@pytest.fixture
async def here() -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway that is given its records by the test."""
    async with serve(load_settings(gateway_port=0), read=False) as (gateway, url):
        gateway.catch_up()
        yield gateway, url


# --- with Kafka


@pytest.fixture
async def gateway(settings: Settings, publish: Any) -> AsyncIterator[Callable[[], Any]]:
    """Runs gateways on the real Kafka, whose topics exist."""
    yield lambda: serve(settings.model_copy(update={"gateway_port": 0}))


@pytest.mark.broker
async def test_a_client_gets_a_snapshot_and_then_what_happens(gateway: Any, publish: Any, party: Any) -> None:
    customer, agent = party("1"), party("2", name="agent")
    await asyncio.to_thread(
        publish, customer.state(), agent.state(), customer.ended(0, "hello"), agent.partial(0, "good"), customer.frame(0)
    )
    async with gateway() as (_, url), connected(url) as client:
        snapshot = await client.next()
        assert snapshot["type"] == "snapshot"
        texts = {each["session"]["session_id"]: each for each in snapshot["sessions"]}
        assert [segment["text"] for segment in texts[customer.session_id]["segments"]] == ["hello"]
        assert [partial["text"] for partial in texts[agent.session_id]["partials"]] == ["good"]

        assert (await client.next("latency"))["all"]["frame_p50_ms"] > 0

        await asyncio.to_thread(publish, agent.partial(0, "good morning"))
        assert (await client.next("partial"))["partial"]["text"] == "good morning"
        await asyncio.to_thread(publish, agent.ended(0, "good morning how can I help"))
        final = await client.next("final")
        assert final["segment"]["text"] == "good morning how can I help"
        await asyncio.to_thread(publish, customer.partial(1, "uh"), customer.ended(1, kind="cancelled"))
        assert (await client.next("cancelled"))["segment"] == 1
        await asyncio.to_thread(publish, customer.state("closed", seconds=9, reason="hangup"))
        while (told := await client.next("session"))["session"]["state"] != "closed":
            pass
        assert told["session"]["reason"] == "hangup"


@pytest.mark.broker
async def test_a_client_that_comes_back_gets_what_it_missed(gateway: Any, publish: Any, party: Any) -> None:
    caller = party()
    await asyncio.to_thread(publish, caller.state(), caller.ended(0, "one"))
    async with gateway() as (_, url), connected(url) as watching:
        async with connected(url) as client:
            await client.next()
            await asyncio.to_thread(publish, caller.ended(1, "two"))
            await client.next("final")
        await watching.next()
        await asyncio.to_thread(publish, caller.ended(2, "three"), caller.partial(3, "fo"))
        while (await watching.next())["type"] != "partial":
            pass
        async with connected(url, after=client.cursor) as again:
            kinds = [await again.next() for _ in range(4)]
        assert [message["type"] for message in kinds] == ["resumed", "session", "final", "partial"]
        assert kinds[2]["segment"]["text"] == "three"
        assert kinds[3]["partial"]["text"] == "fo"


@pytest.mark.broker
async def test_after_a_restart_of_the_gateway_a_client_gets_a_snapshot(gateway: Any, publish: Any, party: Any) -> None:
    caller = party()
    await asyncio.to_thread(publish, caller.state(), caller.ended(0, "one"))
    async with gateway() as (_, url), connected(url) as client:
        await client.next()
    async with gateway() as (_, url), connected(url, after=client.cursor) as again:
        snapshot = await again.next()
    assert snapshot["type"] == "snapshot"
    assert snapshot["sessions"][0]["segments"][0]["text"] == "one"


@pytest.mark.broker
async def test_it_is_healthy_once_it_has_read_what_there_is(gateway: Any, publish: Any, party: Any) -> None:
    await asyncio.to_thread(publish, party().state())
    async with gateway() as (running, url):
        await asyncio.wait_for(running.ready.wait(), TIMEOUT_S)
        assert await got(f"{url}healthz") == (200, "ok\n")
        status, metrics = await got(f"{url}metrics")
    assert status == 200
    assert 'asr_gateway_records_total{record="Session"} 1.0' in metrics
    assert 'asr_gateway_sessions{state="open"} 1.0' in metrics


@pytest.mark.broker
async def test_missing_topics_are_a_users_mistake(settings: Settings) -> None:
    with pytest.raises(UserError, match="asr topics create"):
        async with serve(settings.model_copy(update={"gateway_port": 0})):
            pass


# --- slow readers


#: They do not compress, and fill the sockets' buffers soon.
LONG_TEXTS = ["".join(random.Random(seed).choices(string.ascii_letters, k=12_000)) for seed in range(10)]


async def test_a_slow_reader_loses_partials_and_no_final(here: tuple[Gateway, str], party: Any) -> None:
    gateway, url = here
    caller = party()
    feed_to(gateway, caller.state())
    async with connected(url, compress=0) as client:
        await client.next()
        sent_partials = 0
        for segment in range(100):
            for long_text in LONG_TEXTS:
                sent_partials += 1
                feed_to(gateway, caller.partial(segment, long_text))
                await asyncio.sleep(0)
            feed_to(gateway, caller.ended(segment, f"final {segment}"))
        feed_to(gateway, caller.partial(100, "the end"))
        finals, partials = [], []
        while not partials or partials[-1] != "the end":
            message = await client.next()
            if message["type"] == "final":
                finals.append(message["segment"]["text"])
            elif message["type"] == "partial":
                partials.append(message["partial"]["text"])
    assert finals == [f"final {segment}" for segment in range(100)]
    assert len(partials) < sent_partials


async def test_a_reader_that_falls_behind_with_finals_is_sent_away_and_begins_anew(party: Any) -> None:
    gateway = Gateway(load_settings(), lasting_limit=20)
    gateway.catch_up()
    caller = party()
    feed_to(gateway, caller.state())
    async with TestServer(make_app(gateway)) as server:
        url = str(server.make_url("/"))
        async with connected(url, compress=0) as client:
            await client.next()
            for segment in range(1_500):
                feed_to(gateway, caller.ended(segment, LONG_TEXTS[segment % len(LONG_TEXTS)]))
                await asyncio.sleep(0)
            seen = 0
            while (message := await client.socket.receive(TIMEOUT_S)).type is aiohttp.WSMsgType.TEXT:
                seen += json.loads(message.data)["type"] == "final"
                client.cursor = json.loads(message.data).get("cursor", client.cursor)
            assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.TRY_AGAIN_LATER)
            assert seen < 1_500
        async with connected(url, after=client.cursor, segments=1_000) as again:
            snapshot = await again.next()
        assert snapshot["type"] == "snapshot"
        assert len(snapshot["sessions"][0]["segments"]) == 1_000 and snapshot["sessions"][0]["omitted"] == 500
        assert "asr_gateway_overflows_total 1.0" in (await got(f"{url}metrics"))[1]


# --- what is asked for


async def test_a_client_may_limit_what_it_is_sent(here: tuple[Gateway, str], party: Any) -> None:
    gateway, url = here
    one, other = party("1"), party("2")
    feed_to(gateway, one.state(), other.state(), one.ended(0, "a"), one.ended(1, "b"))
    async with connected(url, channel="1", segments="1") as client:
        snapshot = await client.next()
        (session,) = snapshot["sessions"]
        assert [segment["text"] for segment in session["segments"]] == ["b"]
        feed_to(gateway, other.ended(0, "not for us"), one.ended(2, "c"))
        assert (await client.next("final"))["segment"]["text"] == "c"


@pytest.mark.parametrize("segments", ["-1", "many", "1001"])
async def test_a_wrong_limit_is_refused(here: tuple[Gateway, str], segments: str) -> None:
    status, text = await got(f"{here[1]}ws?segments={segments}")
    assert status == 400 and "segments must be a number" in text


async def test_sessions_and_conversations_over_http(here: tuple[Gateway, str], party: Any) -> None:
    gateway, url = here
    customer, agent = party("1", age_s=70), party("2", name="agent")
    feed_to(gateway, customer.state(), agent.state("closed", seconds=3), customer.ended(0, "hello there"), customer.partial(1, "I"))

    _, text = await got(f"{url}api/sessions")
    assert [session["party"] for session in json.loads(text)["sessions"]] == ["customer", "agent"]
    _, text = await got(f"{url}api/sessions?state=open")
    assert [session["party"] for session in json.loads(text)["sessions"]] == ["customer"]
    _, text = await got(f"{url}api/sessions/{customer.session_id}")
    session = json.loads(text)
    assert [word["text"] for word in session["segments"][0]["words"]] == ["hello", "there"]
    assert session["partials"][0]["text"] == "I"
    _, text = await got(f"{url}api/conversations/{customer.conversation}")
    assert [turn["segment"]["text"] for turn in json.loads(text)["turns"]] == ["hello there"]


@pytest.mark.parametrize("path", ["api/sessions/nobody", "api/conversations/nothing"])
async def test_what_is_not_known_is_said_so(here: tuple[Gateway, str], path: str) -> None:
    status, text = await got(here[1] + path)
    assert status == 404 and "is known here" in json.loads(text)["error"]


async def test_until_all_is_read_a_client_waits_and_health_says_so(party: Any) -> None:
    async with serve(load_settings(gateway_port=0), read=False) as (gateway, url):
        assert await got(f"{url}healthz") == (503, "reading what there is\n")
        feed_to(gateway, party().state())
        async with connected(url) as client:
            gateway.catch_up()
            assert len((await client.next())["sessions"]) == 1


async def test_closed_sessions_leave_the_page_and_old_ones_the_memory(here: tuple[Gateway, str], party: Any) -> None:
    gateway, url = here
    caller = party()
    feed_to(gateway, caller.state())
    async with connected(url) as client:
        await client.next()
        feed_to(gateway, caller.state("closed", seconds=5))
        now_us = time.time_ns() // 1_000
        gateway.tick(now_us + 11 * 60 * 1_000_000)
        assert (await client.next("gone"))["session_id"] == caller.session_id
        assert caller.session_id in gateway.results.sessions
        gateway.tick(now_us + 61 * 60 * 1_000_000)
        assert caller.session_id not in gateway.results.sessions


async def test_a_call_that_nobody_closed_leaves_with_the_history(party: Any) -> None:
    """Neither the session nor the note that it was shown stays behind; and a short history also shortens what is shown."""
    async with serve(load_settings(gateway_port=0, gateway_history_ms=60_000), read=False) as (gateway, url):
        gateway.catch_up()
        open_call, closed_call = party(), party(channel="2", conversation="call-2")
        feed_to(gateway, open_call.state(), closed_call.state(), closed_call.state("closed", seconds=5))
        async with connected(url) as client:
            assert len((await client.next())["sessions"]) == 2
            gateway.tick(time.time_ns() // 1_000 + 61_000_000)
            gone = {(await client.next("gone"))["session_id"] for _ in range(2)}
            assert gone == {open_call.session_id, closed_call.session_id}
        assert not gateway.results.sessions
        assert not gateway._told


# --- who may ask


async def test_other_sites_pages_may_not_read_along(here: tuple[Gateway, str]) -> None:
    status, text = await got(f"{here[1]}ws", Origin="https://elsewhere.example")
    assert status == 403 and "ASR_GATEWAY_ORIGINS" in text
    status, _ = await got(here[1], Host="elsewhere.example")
    assert status == 403, "a name that a foreign site lets point here"
    status, _ = await got(here[1], Origin=here[1].rstrip("/"))
    assert status == 200


async def test_origins_that_were_named_may() -> None:
    desk = "https://desk.example"
    async with serve(load_settings(gateway_port=0, gateway_origins=desk), read=False) as (_, url):
        assert (await got(f"{url}api/sessions", Origin=desk))[0] == 200
        assert (await got(f"{url}api/sessions", Host="desk.example"))[0] == 200


async def test_the_page_may_load_nothing_from_elsewhere(here: tuple[Gateway, str]) -> None:
    async with aiohttp.ClientSession() as session, session.get(here[1]) as answer:
        assert answer.content_type == "text/html"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        text = await answer.text()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text


async def test_messages_are_compressed(here: tuple[Gateway, str]) -> None:
    async with connected(here[1]) as client:
        assert client.socket.compress > 0
        await client.next()


# --- the address


async def test_a_taken_port_is_a_users_mistake(here: tuple[Gateway, str]) -> None:
    port = int(here[1].rstrip("/").rpartition(":")[2])
    with pytest.raises(UserError, match=rf"Port {port} of 127.0.0.1 is taken. Choose another with --port"):
        async with serve(load_settings(gateway_port=port), read=False):
            pass


async def test_an_address_of_another_machine_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match=r"Cannot listen on 192\.0\.2\.1:0.*--host"):
        async with serve(load_settings(gateway_host="192.0.2.1", gateway_port=0), read=False):
            pass


async def test_going_down_sends_clients_away(here: tuple[Gateway, str]) -> None:
    async with serve(load_settings(gateway_port=0), read=False) as (gateway, url):
        gateway.catch_up()
        async with aiohttp.ClientSession() as session:
            socket = await session.ws_connect(f"{url}ws")
            client = Client(socket)
            await client.next()
            closing = asyncio.create_task(gateway.close_sockets(make_app(gateway)))
            message = await socket.receive(TIMEOUT_S)
            while message.type is aiohttp.WSMsgType.TEXT:
                message = await socket.receive(TIMEOUT_S)
            await closing
    assert message.data == aiohttp.WSCloseCode.GOING_AWAY
