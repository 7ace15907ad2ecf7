"""The HTTP and WebSocket server. What it says is described in :mod:`connectors.gateway.messages`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import WSCloseCode, web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from connectors.gateway.feed import Feed, Subscriber, encode
from connectors.gateway.messages import (
    CancelledMessage,
    ErrorInfo,
    FinalMessage,
    GoneMessage,
    LatencyInfo,
    LatencyMessage,
    PartialMessage,
    RefinedMessage,
    ResumedMessage,
    SessionMessage,
    SessionsInfo,
    SnapshotMessage,
    conversation_info,
    latency_info,
    partial_info,
    segment_info,
    session_info,
    session_texts,
)
from connectors.gateway.metrics import GatewayMetrics
from connectors.results import FROM_THE_BEGINNING, Change, Filter, Received, Results, ResultsConsumer, SessionView
from schemas.records import Coverage, Partial
from streams.errors import UserError
from streams.kafka import UnreachableError
from streams.settings import Settings
from streams.topics import SESSIONS, TRANSCRIPTS

__all__ = ["Gateway", "make_app", "serve"]

_log = logging.getLogger(__name__)

_PING_S: Final = 30.0
_TICK_S: Final = 1.0
_REACH_AGAIN_S: Final = 5.0
#: How long a client may take over closing; one that is too slow to read is likely too slow to answer.
_CLOSE_S: Final = 2.0
#: How long a closed session stays on the page, at most.
_CLOSED_SHOWN_US: Final = 10 * 60 * 1_000_000
_SNAPSHOT_SEGMENTS: Final = 50
_SNAPSHOT_SEGMENTS_MOST: Final = 1_000
#: Clients say nothing; what they say is passed over, and a long message is an abuse.
_CLIENT_MESSAGE_BYTES: Final = 4_096

_PAGE: Final = {"/": ("index.html", "text/html"), "/page.js": ("page.js", "text/javascript"), "/style.css": ("style.css", "text/css")}
_SECURITY_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _now_us() -> int:
    return time.time_ns() // 1_000


class Gateway:
    """Keeps the view of every session and tells clients what changes. Belongs to one event loop.

    Args:
        settings: the address, the history, the origins that may connect.
        lasting_limit: how many lasting messages may wait for a slow client.

    Attributes:
        results: the views.
        ready: set once all that was there has been read.
        failure: why reading stopped, if it did.
    """

    def __init__(self, settings: Settings, *, lasting_limit: int | None = None) -> None:
        self.settings = settings
        self.results = Results()
        self.feed = Feed() if lasting_limit is None else Feed(lasting_limit)
        self.ready = asyncio.Event()
        self.failure: Exception | None = None
        self.metrics = GatewayMetrics(self.results, self.feed)
        self._told: set[str] = set()
        self._reader: ResultsConsumer | None = None
        self._sockets: set[web.WebSocketResponse] = set()

    @property
    def is_healthy(self) -> bool:
        """Whether what it shows is what there is."""
        return self.failure is None and self.ready.is_set() and (self._reader is None or self._reader.reachable)

    # --- from Kafka

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Follow the result topics for as long as the context lasts; begin as soon as the cluster answers.

        Raises:
            UserError: the cluster refuses, or a topic is missing.
        """
        loop = asyncio.get_running_loop()

        def deliver(batch: Sequence[Received]) -> None:
            # Waiting for the loop holds the reader back when records come faster than they can be shown.
            asyncio.run_coroutine_threadsafe(self._take(batch), loop).result()

        history_ms = self.settings.gateway_history_ms
        self._reader = ResultsConsumer(
            self.settings,
            deliver,
            caught_up=lambda: loop.call_soon_threadsafe(self.catch_up),
            failed=lambda failure: loop.call_soon_threadsafe(self._fail, failure),
            since_ms={**FROM_THE_BEGINNING, SESSIONS: history_ms, TRANSCRIPTS: history_ms},
        )
        await self._begin(self._reader)
        ticking = asyncio.create_task(self._tick_forever())
        try:
            yield
        finally:
            ticking.cancel()
            await asyncio.to_thread(self._reader.stop)

    async def _begin(self, reader: ResultsConsumer) -> None:
        """Begin to read; wait for a cluster that is away: it may be starting, as the whole machine is."""
        while True:
            try:
                await asyncio.to_thread(reader.start)
            except UnreachableError as away:
                _log.error("%s The gateway waits.", away)
                await asyncio.sleep(_REACH_AGAIN_S)
            else:
                return

    def take(self, received: Received) -> None:
        """Take a record and tell whom it concerns."""
        change = self.results.apply(received.record, received.arrived_us)
        self.metrics.records.labels(type(received.record).__name__).inc()
        if change is None:
            return
        if isinstance(change.record, Coverage) and change.record.stamps.captured_us:
            self.metrics.frame_latency.observe(max(0, received.arrived_us - change.record.stamps.captured_us) / 1e6)
        if self.ready.is_set():
            self._tell(change)

    def catch_up(self) -> None:
        """Say that all that was there has been taken."""
        self._told = {view.session_id for view in self._shown(_now_us())}
        self.ready.set()

    def tick(self, now_us: int) -> None:
        """Tell latencies, and let go of what is old."""
        self.feed.publish_latency(lambda wanted: self._latencies(wanted, now_us))
        history_us = self.settings.gateway_history_ms * 1_000
        for view in list(self.results.sessions.values()):
            is_old = view.touched_us < now_us - history_us
            if view.session_id in self._told and (is_old or not self._is_shown(view, now_us)):
                self._told.discard(view.session_id)
                self.feed.publish_lasting(GoneMessage(cursor="", **_owner(view)))
            if is_old:
                self.results.forget(view.session_id)

    async def _take(self, batch: Sequence[Received]) -> None:
        for received in batch:
            self.take(received)

    def _fail(self, failure: Exception) -> None:
        self.failure = failure
        _log.error("reading results stopped: %s", failure)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self.ready.is_set():
                self.tick(_now_us())

    def _tell(self, change: Change) -> None:
        view = change.session
        now_us = _now_us()
        if change.kind == "session" or (view.session_id not in self._told and self._is_shown(view, now_us)):
            self._told.add(view.session_id)
            self.feed.publish_session(SessionMessage(session=session_info(view, now_us)))
        match change.kind:
            case "partial":
                assert isinstance(change.record, Partial)  # noqa: S101 - what the kind means
                self.feed.publish_partial(PartialMessage(**_owner(view), partial=partial_info(change.record)))
            case "final":
                self.feed.publish_lasting(FinalMessage(cursor="", **_owner(view), segment=segment_info(view.segments[change.segment])))
            case "refined":
                self.feed.publish_lasting(RefinedMessage(cursor="", **_owner(view), segment=segment_info(view.segments[change.segment])))
            case "cancelled":
                self.feed.publish_lasting(CancelledMessage(cursor="", **_owner(view), segment=change.segment))

    # --- to clients

    def opening(self, wanted: Filter, after: str, segments: int) -> list[str]:
        """Return what a client is told first.

        Args:
            wanted: the sessions that it wants.
            after: the last cursor that it saw; empty: none.
            segments: how many finished segments of each session a snapshot holds.
        """
        now_us = _now_us()
        views = [view for view in self._shown(now_us) if wanted.wants(view.session_id, view.channel_id, view.conversation_id)]
        missed = self.feed.missed(after, wanted) if after else None
        if missed is None:
            texts = tuple(session_texts(view, now_us, last=segments) for view in views)
            return [encode(SnapshotMessage(cursor=self.feed.cursor, server_us=now_us, sessions=texts))]
        return [
            encode(ResumedMessage(cursor=after, server_us=now_us)),
            *(encode(SessionMessage(session=session_info(view, now_us))) for view in views),
            *missed,
            *(encode(PartialMessage(**_owner(view), partial=partial_info(one))) for view in views for one in view.open_partials()),
        ]

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """``/ws``: a snapshot or what was missed, then what happens."""
        segments_text = request.query.get("segments", str(_SNAPSHOT_SEGMENTS))
        if not segments_text.isdecimal() or int(segments_text) > _SNAPSHOT_SEGMENTS_MOST:
            return _json(ErrorInfo(error=f"segments must be a number from 0 to {_SNAPSHOT_SEGMENTS_MOST}, not {segments_text!r}"), 400)
        wanted = Filter(
            *(frozenset(request.query.getall(name, ())) for name in ("session", "channel", "conversation")),
        )
        socket = web.WebSocketResponse(heartbeat=_PING_S, timeout=_CLOSE_S, max_msg_size=_CLIENT_MESSAGE_BYTES)
        await socket.prepare(request)
        self._sockets.add(socket)
        self.metrics.clients.inc()

        subscriber = Subscriber(wanted, self.feed.limit)

        async def send() -> str:
            await self.ready.wait()
            opening = self.opening(wanted, request.query.get("after", ""), int(segments_text))
            self.feed.subscribe(subscriber)  # no pause between the two: nothing falls between, nothing comes twice
            for text in opening:
                await socket.send_str(text)
            while True:
                for text in await subscriber.take():
                    await socket.send_str(text)
                    self.metrics.sent.inc()

        async def fall_behind() -> str:
            await subscriber.overflowed.wait()
            return "overflowed"

        try:
            if await _first_of(send(), fall_behind(), _listen(socket)) == "overflowed":
                self.metrics.overflows.inc()
                await socket.close(code=WSCloseCode.TRY_AGAIN_LATER, message=b"too slow")
        finally:
            self.feed.unsubscribe(subscriber)
            self.metrics.replaced.inc(subscriber.replaced)
            self.metrics.clients.dec()
            self._sockets.discard(socket)
        return socket

    async def close_sockets(self, _app: web.Application) -> None:
        """Send every client away: the gateway is going down."""
        await asyncio.gather(*(socket.close(code=WSCloseCode.GOING_AWAY, message=b"the gateway stops") for socket in set(self._sockets)))

    async def sessions(self, request: web.Request) -> web.Response:
        """``/api/sessions``: what is known of every session, without texts."""
        now_us = _now_us()
        states, channels = set(request.query.getall("state", ())), set(request.query.getall("channel", ()))
        views = [
            view
            for view in self.results.sessions.values()
            if (not states or view.state in states) and (not channels or view.channel_id in channels)
        ]
        views.sort(key=lambda view: (view.started_us, view.channel_id))
        return _json(SessionsInfo(sessions=tuple(session_info(view, now_us) for view in views)))

    async def session(self, request: web.Request) -> web.Response:
        """``/api/sessions/{id}``: a session with its texts and words."""
        view = self.results.sessions.get(request.match_info["id"])
        if view is None:
            return _json(ErrorInfo(error=f"no session {request.match_info['id']!r} is known here"), 404)
        return _json(session_texts(view, _now_us(), words=True))

    async def conversation(self, request: web.Request) -> web.Response:
        """``/api/conversations/{id}``: a call with everybody's turns."""
        view = self.results.conversation(request.match_info["id"])
        if view is None:
            return _json(ErrorInfo(error=f"no conversation {request.match_info['id']!r} is known here"), 404)
        return _json(conversation_info(view, _now_us()))

    async def health(self, _request: web.Request) -> web.Response:
        """``/healthz``: 200 while what is shown is what there is, else 503 and why."""
        if self.is_healthy:
            return web.Response(text="ok\n")
        why = (
            f"reading stopped: {self.failure}"
            if self.failure
            else "Kafka does not answer"
            if self.ready.is_set()
            else "reading what there is"
        )
        return web.Response(status=503, text=f"{why}\n")

    async def numbers(self, _request: web.Request) -> web.Response:
        """``/metrics``: for Prometheus."""
        return web.Response(body=generate_latest(self.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _shown(self, now_us: int) -> list[SessionView]:
        return [view for view in self.results.sessions.values() if self._is_shown(view, now_us)]

    def _is_shown(self, view: SessionView, now_us: int) -> bool:
        shown_us = min(_CLOSED_SHOWN_US, self.settings.gateway_history_ms * 1_000)
        return view.state != "closed" or now_us - view.touched_us < shown_us

    def _latencies(self, wanted: Filter, now_us: int) -> LatencyMessage:
        views = [
            view
            for view in self._shown(now_us)
            if view.state != "closed" and wanted.wants(view.session_id, view.channel_id, view.conversation_id)
        ]
        each: dict[str, LatencyInfo] = {view.session_id: latency_info([view], now_us) for view in views}
        return LatencyMessage(server_us=now_us, all=latency_info(views, now_us), sessions=each)


def make_app(gateway: Gateway) -> web.Application:
    """Return the server's application; :meth:`Gateway.reading` is not part of it."""
    app = web.Application(middlewares=[_only_trusted(gateway.settings)])
    for path, (name, content_type) in _PAGE.items():
        app.router.add_get(path, _static(name, content_type))
    app.router.add_get("/ws", gateway.socket)
    app.router.add_get("/api/sessions", gateway.sessions)
    app.router.add_get("/api/sessions/{id}", gateway.session)
    app.router.add_get("/api/conversations/{id}", gateway.conversation)
    app.router.add_get("/healthz", gateway.health)
    app.router.add_get("/metrics", gateway.numbers)
    app.on_response_prepare.append(_secure)
    app.on_shutdown.append(gateway.close_sockets)
    return app


@asynccontextmanager
async def serve(settings: Settings, *, read: bool = True) -> AsyncIterator[tuple[Gateway, str]]:
    """Run the gateway for as long as the context lasts.

    Args:
        settings: the address, the cluster.
        read: follow the result topics; False: only what :meth:`Gateway.take` is given.

    Yields:
        The gateway and the address of its page.

    Raises:
        UserError: the address cannot be had, the cluster refuses, or a topic is missing.
    """
    gateway = Gateway(settings)
    runner = web.AppRunner(make_app(gateway), access_log=None)
    await runner.setup()
    try:
        host, port = settings.gateway_host, settings.gateway_port
        site = web.TCPSite(runner, host, port, reuse_address=True)
        try:
            await site.start()
        except OSError as failure:
            raise _address_error(host, port, failure) from failure
        address = runner.addresses[0]
        page = f"http://{_in_url('localhost' if _is_any(address[0]) else address[0])}:{address[1]}/"
        async with gateway.reading() if read else contextlib.nullcontext():
            yield gateway, page
    finally:
        await runner.cleanup()


def _address_error(host: str, port: int, failure: OSError) -> UserError:
    if failure.errno == errno.EADDRINUSE:
        return UserError(f"Port {port} of {host} is taken", "Choose another with --port or ASR_GATEWAY_PORT, or stop what uses it.")
    if failure.errno == errno.EACCES:
        return UserError(f"Port {port} of {host} is not for everybody", "Choose one from 1024 on with --port or ASR_GATEWAY_PORT.")
    return UserError(f"Cannot listen on {host}:{port}: {failure.strerror or failure}", "Name an address of this machine with --host.")


def _is_any(host: str) -> bool:
    return ipaddress.ip_address(host).is_unspecified


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _owner(view: SessionView) -> dict[str, str]:
    return {"session_id": view.session_id, "channel_id": view.channel_id, "conversation_id": view.conversation_id}


def _json(answer: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json", status=status)


def _static(name: str, content_type: str) -> Callable[[web.Request], Coroutine[Any, Any, web.Response]]:
    body = (resources.files("connectors.gateway") / name).read_bytes()

    async def serve_it(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return serve_it


async def _secure(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_SECURITY_HEADERS)


def _only_trusted(settings: Settings) -> Any:
    """Refuse other sites' pages: a browser would let any of them open our WebSocket and read along."""
    allowed = {origin.strip().rstrip("/") for origin in settings.gateway_origins.split(",") if origin.strip()}
    allowed_hosts = {urlsplit(origin).netloc for origin in allowed}

    @web.middleware
    async def only_trusted(
        request: web.Request, handler: Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]
    ) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is not None and origin not in allowed and urlsplit(origin).netloc != request.host:
            return _json(ErrorInfo(error=f"pages of {origin} may not connect; ASR_GATEWAY_ORIGINS names those that may"), 403)
        # A name that a foreign site lets point to this machine (DNS rebinding) would make its pages look like ours.
        if _is_loopback(settings.gateway_host) and not _is_loopback(_host_of(request.host)) and request.host not in allowed_hosts:
            return _json(ErrorInfo(error=f"{request.host} is not this gateway's name; ASR_GATEWAY_ORIGINS names further ones"), 403)
        return await handler(request)

    return only_trusted


def _host_of(netloc: str) -> str:
    return urlsplit(f"//{netloc}").hostname or ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


async def _listen(socket: web.WebSocketResponse) -> str:
    """Read until the client goes; reading is what answers pings."""
    async for _ in socket:
        pass
    return "gone"


async def _first_of(*works: Coroutine[Any, Any, str]) -> str:
    """Return what the first of them returns; the others are cancelled. A client that goes while it is written to is ``gone``."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    except ConnectionError:
        return "gone"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
