from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
import uvloop
from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import GroupLoadInProgressError, KafkaConnectionError, KafkaError, NotCoordinatorForGroupError
from aiokafka.protocol.commit import OffsetFetchResponse_v3
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.structs import OffsetAndMetadata, TopicPartition

from streams.lease import Lease
from streams.settings import Settings
from streams.transport import Consumer, _confirm, _heed_refusals, _heeding, _NothingRead, _pace, heed_closed_connections

AT = TopicPartition("asr.audio", 1)


def test_no_record_is_dropped_for_what_was_read_before() -> None:
    """Faust remembers what it read last, and drops what lies before it: also what a partition was sought back for."""
    memory = _NothingRead()
    memory[AT] = 72
    memory.update({AT: 72})
    assert memory[AT] is None
    memory.pop(AT, None)
    assert memory[TopicPartition("asr.audio", 2)] is None


async def test_a_seek_is_made_on_the_consumer_s_own_thread() -> None:
    """From another one, what the consumer's thread is just unpacking would move the position on again."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    sought: list[tuple[object, int, int]] = []

    class ConsumerThread:
        def seek(self, partition: object, offset: int) -> None:
            sought.append((partition, offset, threading.get_ident()))

        async def call_thread(self, work):  # type: ignore[no-untyped-def]
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))

    await Consumer._seek(SimpleNamespace(_thread=ConsumerThread()), AT, 67)
    assert sought == [(AT, 67, thread.ident)]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def test_a_lease_hears_of_heartbeats_that_the_group_answers() -> None:
    lease = Lease(0.05)
    known = True

    async def beat() -> bool:
        return known

    coordinator = SimpleNamespace(generation=3, _do_heartbeat=beat)
    _confirm(coordinator, lease)
    lease.tick()
    time.sleep(0.1)  # noqa: ASYNC251 a process that stands still
    assert not lease.holds(3)
    known = False
    await coordinator._do_heartbeat()
    assert not lease.holds(3)
    known = True
    await coordinator._do_heartbeat()
    assert lease.holds(3)
    assert not lease.holds(2)


@pytest.mark.parametrize(("refusal", "looks_elsewhere"), [(GroupLoadInProgressError, 0), (NotCoordinatorForGroupError, 1)])
async def test_a_coordinator_that_does_not_know_the_commits_yet_is_asked_again(refusal: type[KafkaError], looks_elsewhere: int) -> None:
    """It says so beside an empty answer, which aiokafka by itself would take for a group that never committed anything."""
    answers = [
        OffsetFetchResponse_v3(0, [], refusal.errno),
        OffsetFetchResponse_v3(0, [(AT.topic, [(AT.partition, 67, "state", 0)])], 0),
    ]
    looked = 0

    class Coordinator(GroupCoordinator):
        group_id = "asr"
        _retry_backoff_ms = 1

        def __init__(self) -> None:
            """Connect to nothing."""

        async def ensure_coordinator_known(self) -> None:
            """Know it."""

        async def _send_req(self, request: object) -> OffsetFetchResponse_v3:
            return answers.pop(0)

        def coordinator_dead(self) -> None:
            nonlocal looked
            looked += 1

    coordinator = Coordinator()
    _heed_refusals(coordinator)
    assert await coordinator.fetch_committed_offsets([AT]) == {AT: OffsetAndMetadata(67, "state")}
    assert (answers, looked) == ([], looks_elsewhere)


async def test_fetches_from_a_broker_keep_the_distance_that_is_asked_for() -> None:
    sent_s: dict[int, list[float]] = {1: [], 2: []}

    async def fetch(_assignment: object, node_id: int, _request: object) -> bool:
        sent_s[node_id].append(time.monotonic())
        return True

    intervals_s = iter((0.03, 0.0, 0.06, 0.0, 0.0))
    fetcher = SimpleNamespace(_proc_fetch_request=fetch)
    _pace(fetcher, lambda: next(intervals_s))
    for node_id in (1, 2, 1, 1, 2):
        assert await fetcher._proc_fetch_request(None, node_id, None)
    assert sent_s[1][1] - sent_s[1][0] >= 0.03
    assert sent_s[1][2] - sent_s[1][1] >= 0.06


@pytest.mark.broker
def test_a_request_on_a_connection_that_was_just_closed_can_be_repeated(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch, a heartbeat, a question for the coordinator: whichever comes first after a broker was killed."""
    monkeypatch.setattr(AIOKafkaConnection, "send", AIOKafkaConnection.send)  # as it was, afterwards
    heed_closed_connections()
    host, port = settings.bootstrap_servers.split(",")[0].split(":")

    async def ask() -> None:
        connection = await create_conn(host, int(port))
        await connection.send(MetadataRequest([]))
        connection._writer.transport.abort()
        await asyncio.sleep(0)
        with pytest.raises(KafkaConnectionError, match="handler is closed"):
            await connection.send(MetadataRequest([]))
        assert not connection.connected()

    uvloop.run(ask())


def test_other_failures_of_a_connection_are_passed_on() -> None:
    def send(*_: object) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        _heeding(send)(SimpleNamespace(), None)
