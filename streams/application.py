"""The Faust app: one consumer group, the stages that this worker runs, and nothing else.

``faust -A streams worker`` builds it through :data:`streams.app`. Each stage's agent is registered by its own module, imported here by
name: a module that cannot be imported stops the worker with its real cause.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import faust
import uvloop
from faust.app.base import BootStrategy
from faust.types import TP
from prometheus_client import start_http_server

from schemas.codec import Codec
from schemas.records import Rejected, WorkerStatus
from streams import metrics, topics
from streams.control import Control
from streams.core import Core, Emitter, Report, Reporting
from streams.errors import UserError
from streams.kafka import MissingTopicError, UnreachableError, aiokafka_producer_config, broker_credentials, broker_url, partitions_of
from streams.lease import Lease
from streams.outbox import Outbox, OutboxError
from streams.registry import codec_for
from streams.retention import sweep, sweep_interval_s
from streams.settings import Settings
from streams.stage import Route, Stage
from streams.transport import Transport, heed_closed_connections

__all__ = ["StreamsApp", "create_app"]

log = logging.getLogger(__name__)

_AGENT_MODULES: Final = {stage: f"agents.{stage}.agent" for stage in ("vad", "features", "inference")}

#: A heartbeat often enough that several fit into the shortest session timeout.
_HEARTBEATS_PER_SESSION_TIMEOUT: Final = 5
#: The most that a rebalance waits for a stuck member.
_REBALANCE_TIMEOUT_S: Final = 3.0
_REQUEST_TIMEOUT_S: Final = 5.0
_REACH_AGAIN_S: Final = 5.0
#: How soon a topic that was made anew, or got more partitions, is noticed (Kafka's default: five minutes).
_METADATA_MAX_AGE_MS: Final = 10_000
#: Records that Faust may hold for a stage; the stage itself holds the rest.
_STREAM_BUFFER_RECORDS: Final = 256
_STATUS_INTERVAL_S: Final = 1.0
#: At most 100 fetches a second.
_FETCH_INTERVAL_S: Final = 0.01
#: Frames of 40 sessions and more gather for a fifth of a frame: 50 channels make 25 fetches of 10 frames a second, and not 100 of 2 or 3.
_GATHERING_PER_SESSION_S: Final = 0.001
_LONGEST_GATHERING_S: Final = 0.04
#: A worker that is restarted every day must sweep too; but not while it takes over.
_FIRST_SWEEP_S: Final = 60.0
_FLUSH_TIMEOUT_S: Final = 3.0


class _NoWeb(BootStrategy):
    """Faust's worker command switches its web server on whatever the app says: its one port would stop a host's second worker."""

    enable_web = False


class StreamsApp(faust.App):
    """A worker: a Faust app with its stages."""

    BootStrategy = _NoWeb

    def __init__(self, settings: Settings, codec: Codec) -> None:
        self.settings = settings
        self.codec = codec
        self.lease = Lease(settings.session_timeout_ms / 1_000)
        self.outbox = Outbox(aiokafka_producer_config(settings), self._outbox_failed)
        self.stages: list[Stage] = []
        self.control = Control(settings, codec, self._reject)
        self._status_under_way = False
        #: As of the last status: the consumer's thread must not count what this one changes.
        self._sessions_lately = 0
        self._started_us = time.time_ns() // 1_000
        super().__init__(
            settings.group,
            broker=broker_url(settings),
            broker_credentials=broker_credentials(settings),
            # Nothing is kept on disk; a directory of its own lets several workers share a host.
            datadir=str(settings.data_dir / "workers" / settings.worker_name),
            store="memory://",
            autodiscover=False,
            topic_partitions=settings.partitions,
            topic_replication_factor=settings.replication_factor,
            # Topics are created by `asr topics create`, from the one table.
            topic_allow_declare=False,
            topic_disable_leader=True,
            table_standby_replicas=0,
            # Offsets are committed by the stages: nothing to wait for, nothing for Faust to commit.
            stream_wait_empty=False,
            stream_buffer_maxsize=_STREAM_BUFFER_RECORDS,
            consumer_auto_offset_reset="earliest",
            consumer_metadata_max_age_ms=_METADATA_MAX_AGE_MS,
            # So that the group itself tells which worker owns what.
            broker_client_id=settings.worker_name,
            broker_session_timeout=settings.session_timeout_ms / 1_000,
            broker_heartbeat_interval=settings.session_timeout_ms / 1_000 / _HEARTBEATS_PER_SESSION_TIMEOUT,
            broker_rebalance_timeout=_REBALANCE_TIMEOUT_S,
            # Faust refuses a session that outlasts a request; Kafka's own lower bound for sessions is 6 s.
            broker_request_timeout=max(_REQUEST_TIMEOUT_S, settings.session_timeout_ms / 1_000),
            producer_request_timeout=_REQUEST_TIMEOUT_S,
        )
        self.on_rebalance_complete.connect(self._take_over)

    def fetch_interval_s(self) -> float:
        """Return the time to leave between two fetches from a broker; it costs a record half of it on average.

        Frames of different channels come at as many different moments. Fetched one by one they would be one step and one request of every
        stage after this one each, so the first stage lets them gather, the longer the more there are.
        """
        if any(stage.route.source is not topics.AUDIO for stage in self.stages):
            return _FETCH_INTERVAL_S
        return min(_LONGEST_GATHERING_S, max(_FETCH_INTERVAL_S, _GATHERING_PER_SESSION_S * self._sessions_lately))

    def add_stage(self, route: Route, make_core: Callable[[Settings, Emitter], Core]) -> tuple[Stage, Any]:
        """Add a stage; return it and the Faust topic that its agent is to read."""
        stage = Stage(
            self,
            self.settings,
            route,
            make_core,
            self.codec,
            self.outbox,
            control=self.control,
            lease=self.lease,
            loop=None,
            beacon=self.beacon,
        )
        self.stages.append(stage)
        source = self.topic(
            stage.source_name,
            key_type=bytes,
            value_type=bytes,
            key_serializer="raw",
            value_serializer="raw",
            partitions=self.settings.partitions,
            # Faust neither tracks nor commits these offsets: streams/checkpoint.py does.
            acks=False,
        )
        return stage, source

    async def on_first_start(self) -> None:
        """Make room for what Faust may want to keep."""
        self.conf.datadir.parent.mkdir(parents=True, exist_ok=True)
        await super().on_first_start()

    async def on_start(self) -> None:
        """Make the stages ready before the group is joined: a cold worker must not be given partitions."""
        await super().on_start()
        if self.settings.metrics_port:
            self._serve_metrics(self.settings.metrics_port)
        await self._wait_for_brokers()
        await self.outbox.start()
        await self.control.start()
        for stage in self.stages:
            await stage.start()
        self._publish_status("starting")

    async def on_started(self) -> None:
        """Tell the world that the worker is there."""
        await super().on_started()
        _stop_logging_for_the_spinner()
        self.add_future(self._report_status())
        if "inference" in self.settings.stages and self.settings.results_retention_ms:
            self.add_future(self._let_finished_calls_go())

    async def on_stop(self) -> None:
        """Finish what was taken and commit it, while the group still holds us."""
        self._publish_status("stopping")
        await asyncio.gather(*(stage.drain() for stage in self.stages))
        await super().on_stop()
        for stage in self.stages:
            await stage.stop()
        await self.control.stop()
        await self.outbox.flush(_FLUSH_TIMEOUT_S)
        await self.outbox.stop()

    async def _wait_for_brokers(self) -> None:
        """Return when a broker answers and has our topics; until then say what is wrong: who restarts us could do no better."""
        while not self.should_stop:
            try:
                await asyncio.to_thread(partitions_of, self.settings, topics.TOPICS)
            except (MissingTopicError, UnreachableError) as wrong:
                log.error("%s The worker waits.", wrong)  # noqa: TRY400 it is all in the message
                await self.sleep(_REACH_AGAIN_S)
            else:
                return

    async def _take_over(self, *_args: Any, **_kwargs: Any) -> None:
        assignment: set[TP] = self.consumer.assignment()
        for stage in self.stages:
            await stage.take_over({tp.partition for tp in assignment if tp.topic == stage.source_name})

    def _reject(self, rejected: Rejected) -> None:
        self.outbox.send(topics.REJECTED.full_name(self.settings), None, rejected.key, self.codec.encode(rejected), lambda: None)

    def _outbox_failed(self, failure: OutboxError) -> None:
        log.critical("%s", failure)
        self.add_future(self.crash(failure))

    def _new_transport(self) -> Transport:
        return Transport(self.conf.broker_consumer, self)

    def _serve_metrics(self, port: int) -> None:
        try:
            start_http_server(port)
        except OSError as taken:
            cause = f"Metrics cannot be served on port {port} ({taken.strerror})"
            raise UserError(cause, "Choose another ASR_METRICS_PORT; 0 is none.") from taken

    async def _report_status(self) -> None:
        while not self.should_stop:
            self._publish_status("running")
            await self.sleep(_STATUS_INTERVAL_S)

    async def _let_finished_calls_go(self) -> None:
        """Sweep the results of the partitions that this worker owns, again and again; see ``streams/retention.py``."""
        interval_s = sweep_interval_s(self.settings)
        codec = codec_for(self.settings.schema_registry_url)
        await self.sleep(min(interval_s, _FIRST_SWEEP_S))
        while not self.should_stop:
            owned = {number for stage in self.stages if stage.route.stage == "inference" for number in stage.tenures}
            try:
                swept = await asyncio.to_thread(sweep, self.settings, codec, owned) if owned else None
            except UserError as failure:
                log.warning("finished calls could not be let go, and will be next time: %s", failure)
            else:
                if swept is not None and swept.left:
                    log.info("%d finished calls left, %d stay", swept.left, swept.kept)
            await self.sleep(interval_s)

    def _publish_status(self, state: Any) -> None:
        settings = self.settings
        for stage in self.stages:
            metrics.OPEN_INPUTS.labels(stage.route.stage).set(stage.open_inputs)
            metrics.SESSIONS.labels(stage.route.stage).set(stage.session_count)
        self._sessions_lately = sum(stage.session_count for stage in self.stages)
        report = next((stage.core.report for stage in self.stages if isinstance(stage.core, Reporting)), Report())
        status = WorkerStatus(
            worker_id=settings.worker_name,
            host=socket.gethostname(),
            pid=os.getpid(),
            stages=settings.stages,
            started_us=self._started_us,
            at_us=time.time_ns() // 1_000,
            state=state,
            partitions=sum(len(stage.tenures) for stage in self.stages),
            sessions=self._sessions_lately,
            lag_records=sum(stage.open_inputs for stage in self.stages),
            load=sum(stage.take_busy_s() for stage in self.stages) / _STATUS_INTERVAL_S,
            engine=settings.engine if "inference" in settings.stages else "",
            model_digest=report.model_digest,
            hotword_version=report.hotword_version,
            channels=report.channels,
            behind_ms=report.behind_ms,
        )
        if self._status_under_way and state == "running":
            return  # the brokers are away: one is enough to tell that we live
        self._status_under_way = True
        topic = topics.WORKERS.full_name(settings)
        self.outbox.send(topic, None, settings.worker_name.encode(), self.codec.encode(status), self._status_arrived)

    def _status_arrived(self) -> None:
        self._status_under_way = False


def _stop_logging_for_the_spinner() -> None:
    """Set the root logger back to the level that was asked for.

    Faust's start-up spinner turns with every log record, so from ``-l warn`` upwards Faust makes all of them, for good: aiokafka's took a
    seventh of a busy worker's time.
    """
    if logging.root.handlers:
        logging.root.setLevel(logging.root.handlers[0].level)


def create_app(settings: Settings) -> StreamsApp:
    """Build the app for a worker.

    Raises:
        ImportError: a stage's module cannot be imported; the message is the real cause.
    """
    # A worker's time is mostly the event loop's: uvloop takes a quarter less of it. Faust makes its loops after this.
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    heed_closed_connections()
    app = StreamsApp(settings, codec_for(settings.schema_registry_url))
    for stage in settings.stages:
        import_module(_AGENT_MODULES[stage]).register(app)
    return app
