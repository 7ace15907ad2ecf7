"""Faust's Kafka transport, tuned so that takeovers and joins cost tenths of a second.

Three waits of Faust 0.15.3 are shortened: a full second whenever no partition is active (it delays every join and takeover), the
second that a fetch may hold up a rebalance, and the 1.5 s that the driver lets the broker gather records for.

It also tells the worker's :class:`streams.lease.Lease` whether the process runs, and when its group has answered.

And fetches are paced. aiokafka asks again as soon as it has an answer, each time for all partitions: with 50 channels that is one fetch of
50 partitions for almost every record, and the broker does little else. A few ms between fetches let records gather. The app says how many:
what is fetched together goes on together, through all that follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import IllegalStateError, KafkaConnectionError, NotCoordinatorForGroupError, for_code
from aiokafka.protocol.commit import OffsetFetchRequest
from faust.transport.drivers import aiokafka as driver

from streams.lease import TICK_S, Lease

__all__ = ["Transport", "heed_closed_connections"]

_NO_PARTITION_WAIT_S: Final = 0.02
_GETMANY_TIMEOUT_S: Final = 0.1
_FETCH_MAX_WAIT_MS: Final = 50
#: What uvloop says of a connection that is no more.
_CLOSED: Final = "the handler is closed"


def heed_closed_connections() -> None:
    """Let a request on a connection that a dead broker has just closed fail as on any broken one, for all aiokafka clients of the process.

    uvloop raises a ``RuntimeError`` there, where asyncio's own loop drops what is written. aiokafka asks again after every failure that
    it knows; for one that it does not know, it ends the consumer, and with it the worker.
    """
    for name in ("send", "_send_sasl_token"):
        plain = getattr(AIOKafkaConnection, name)
        if not hasattr(plain, "__wrapped__"):
            setattr(AIOKafkaConnection, name, _heeding(plain))


def _heeding(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def heeding(connection: AIOKafkaConnection, *args: Any, **kwargs: Any) -> Any:
        try:
            return send(connection, *args, **kwargs)
        except RuntimeError as closed:
            if _CLOSED not in str(closed):
                raise
            connection.close(reason=CloseReason.CONNECTION_BROKEN)
            raise KafkaConnectionError(f"Connection at {connection.host}:{connection.port} broken: {closed}") from closed

    return heeding


def _pace(fetcher: Any, interval_s: Callable[[], float]) -> None:
    """Keep a fetcher's requests to each broker some time apart."""
    send = fetcher._proc_fetch_request  # noqa: SLF001 private; aiokafka is pinned for this module and for checkpoint.py
    due_s: dict[int, float] = {}

    async def paced(assignment: Any, node_id: int, request: Any) -> Any:
        wait_s = due_s.get(node_id, 0.0) - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        due_s[node_id] = time.monotonic() + interval_s()
        return await send(assignment, node_id, request)

    fetcher._proc_fetch_request = paced  # noqa: SLF001


def _confirm(coordinator: Any, lease: Lease) -> None:
    """Let a lease hear of each heartbeat by which the group knows this member."""
    beat = coordinator._do_heartbeat  # noqa: SLF001

    async def do_heartbeat() -> bool:
        generation, asked_s = coordinator.generation, time.monotonic()
        known: bool = await beat()
        if known:
            lease.confirm(generation, asked_s)
        return known

    coordinator._do_heartbeat = do_heartbeat  # noqa: SLF001


def _heed_refusals(coordinator: Any) -> None:
    """Let a coordinator that does not know a group's commits yet be asked again.

    One that has just taken the group over, or has just been started, refuses for a moment. aiokafka does not look at that refusal, and
    takes it for "nothing was ever committed": a worker would begin with the oldest audio there is, and with an epoch that was used before.
    """
    send = coordinator._send_req  # noqa: SLF001

    async def send_req(request: Any) -> Any:
        response = await send(request)
        if isinstance(request, OffsetFetchRequest) and (code := getattr(response, "error_code", 0)):
            refusal = for_code(code)
            if refusal is NotCoordinatorForGroupError:
                coordinator.coordinator_dead()
            raise refusal(f"the commits of {coordinator.group_id} cannot be read now")
        return response

    coordinator._send_req = send_req  # noqa: SLF001


class _ConsumerThread(driver.AIOKafkaConsumerThread):
    async def on_start(self) -> None:
        await super().on_start()
        consumer = self._ensure_consumer()
        app: Any = self.app  # a StreamsApp
        _pace(consumer._fetcher, app.fetch_interval_s)  # noqa: SLF001
        lease: Lease = app.lease
        _confirm(consumer._coordinator, lease)  # noqa: SLF001
        _heed_refusals(consumer._coordinator)  # noqa: SLF001
        self.add_future(self._tick(lease))

    async def _tick(self, lease: Lease) -> None:
        while not self.should_stop:
            lease.tick()
            await asyncio.sleep(TICK_S)

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        # Hard-coded in the driver; aiokafka reads it when it starts.
        consumer._fetch_max_wait_ms = _FETCH_MAX_WAIT_MS  # noqa: SLF001
        return consumer


class _NothingRead(dict[Any, Any]):
    """Stands for Faust's memory of what was read last, by which it drops whatever comes again.

    What a partition was sought back for comes again. That memory is moved on by records that were on their way when it was sought, so
    Faust would drop what was to be read once more; and the next time again, as long as records are always on their way.
    """

    def __getitem__(self, _partition: Any) -> None:
        return None

    def __setitem__(self, _partition: Any, _offset: Any) -> None:
        pass


class Consumer(driver.Consumer):
    """Faust's consumer with short waits, and with partitions that are resumed where their owner stands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The stages know which offset is due, see streams/tenure.py.
        self._read_offset = _NothingRead()
        #: Where to resume partitions whose state this worker kept through a rebalance: further on than their committed offsets.
        self.resume_at: dict[Any, int] = {}

    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def _seek(self, partition: Any, offset: int) -> None:
        """Seek on the consumer's own thread: elsewhere, what that thread is just unpacking would overrule it."""
        thread = self._thread

        async def seek() -> None:
            thread.seek(partition, offset)

        await thread.call_thread(seek)

    async def perform_seek(self) -> None:
        """Seek all partitions to their committed offsets, or to where their owner stands."""
        await super().perform_seek()
        resume_at, self.resume_at = self.resume_at, {}
        assignment = self.assignment()
        for tp, offset in resume_at.items():
            # A rebalance may take it away at any moment; its next owner begins where it should.
            if tp in assignment:
                with contextlib.suppress(IllegalStateError):
                    await self.seek(tp, offset)

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[Any, Any]]:  # noqa: ASYNC109
        """Yield what arrives within the timeout, which is cut short."""
        async for item in super().getmany(min(timeout, _GETMANY_TIMEOUT_S)):
            yield item

    async def _wait_next_records(self, timeout: float) -> tuple[Any, Any]:  # noqa: ASYNC109
        if self.flow_active and not self.app.client_only and not self._get_active_partitions():
            await self.sleep(_NO_PARTITION_WAIT_S)
            return {}, set()
        return await super()._wait_next_records(timeout)


class Transport(driver.Transport):
    """The transport to give to ``faust.App``."""

    Consumer = Consumer
