"""The system under chaos: brokers, workers of each stage, recorders and a gateway, each of which can be killed and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType  # type: ignore[attr-defined]

from ops.broker import EmbeddedBroker, Node
from ops.chaos.cluster import Cluster
from ops.chaos.plan import ROLES, Layout, Role
from ops.processes import Child, Children, WorkerWatch, environment
from streams.errors import UserError
from streams.kafka import admin_client
from streams.settings import Settings
from streams.topic_admin import ensure_topics
from streams.topics import TOPICS

__all__ = ["Fleet", "Member"]

_START_TIMEOUT_S: Final = 240.0
_POLL_S: Final = 0.1
#: Longer than any run: a day.
_VERSIONS_KEPT_MS: Final = 24 * 3_600_000
_STABLE: Final = "Stable"
#: Marks the command of an engine's process.
_ENGINE: Final = "agents.inference.serve"
#: A cluster's node needs 2 s; on a busy machine longer.
_NODE_TIMEOUT_S: Final = 240.0


@dataclass(slots=True, eq=False)
class Member:
    """A process of the fleet, through all its lives.

    Attributes:
        name: such as ``vad-0``, ``recorder-1``, ``gateway``.
        role: of a worker; None for others.
        command: what is run.
        overrides: settings of its own.
        lives: how often it was started.
        child: its present process; None while it is dead.
        started_us: when that was started.
        due: whether it should be running.
        stopped: whether SIGSTOP holds it.
    """

    name: str
    role: Role | None
    command: tuple[str, ...]
    overrides: dict[str, Any]
    lives: int = 0
    child: Child | None = None
    started_us: int = 0
    due: bool = True
    stopped: bool = False

    @property
    def life(self) -> str:
        """The name of its present life, which its journal and its log have."""
        return f"{self.name}.{self.lives}"

    @property
    def pid(self) -> int | None:
        """Its process, while that runs."""
        return self.child.process.pid if self.child is not None and self.child.process.poll() is None else None


class Fleet:
    """All processes of a system; a context manager.

    Args:
        settings: the configuration.
        folder: for logs, journals and the brokers' data.
        overrides: settings that differ from the environment, for every process.
        workers: of each role.
        layout: a worker for each stage, or for all of them.
        nodes: brokers, 1 or 3.
        worker_command: arguments to Python that run a worker.
        on_progress: told what is being waited for.

    Attributes:
        settings: as they are in force.
        members: by name.
        roles: of the workers, in the order in which a record meets them.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        overrides: Mapping[str, Any],
        *,
        workers: int = 2,
        layout: Layout = "stages",
        nodes: int = 1,
        worker_command: Sequence[str] = ("-m", "faust", "-A", "streams", "worker", "-l", "info"),
        on_progress: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self.folder = folder
        # Nothing is shared with what else runs here: spools, workers' files.
        self.settings = settings.model_copy(update={**overrides, "data_dir": folder})
        self.members: dict[str, Member] = {}
        self.roles = ROLES[layout]
        self._overrides = {**overrides, "data_dir": folder}
        self._workers = workers
        self._nodes = nodes
        self._worker_command = tuple(worker_command)
        self._on_progress = on_progress
        self._children = Children()
        self._broker: EmbeddedBroker | None = None
        self._watch: WorkerWatch | None = None
        self._cluster: Cluster | None = None
        self._lock = threading.Lock()
        self._known: dict[Role, Mapping[str, tuple[int, ...]]] = {}

    # ------------------------------------------------------------------ from start to end

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if "bootstrap_servers" not in self._overrides:
            self._broker = EmbeddedBroker(
                self.folder / "kafka", nodes=self._nodes, cache_dir=self.settings.cache_dir, on_progress=self._on_progress
            )
            self._broker.start()
            self._override(bootstrap_servers=self._broker.bootstrap_servers)
        ensure_topics(self.settings)
        self._keep_every_version()
        self._watch = WorkerWatch(self.settings)
        self._cluster = Cluster(self.settings.bootstrap_servers)
        self._cluster.start()
        for copy in range(self._workers):
            for role in self.roles:
                self.start(self.worker(role, copy))
        self.wait_whole()

    def _keep_every_version(self) -> None:
        """Keep compacted topics from being compacted during the run: what was overwritten is to be checked too."""
        admin = admin_client(self.settings)
        entry = ConfigEntry("min.compaction.lag.ms", str(_VERSIONS_KEPT_MS), incremental_operation=AlterConfigOpType.SET)
        resources = [
            ConfigResource(ResourceType.TOPIC, topic.full_name(self.settings), incremental_configs=[entry])
            for topic in TOPICS
            if "compact" in topic.cleanup
        ]
        for altered in admin.incremental_alter_configs(resources).values():
            altered.result()

    def stop(self) -> None:
        """End everything."""
        for member in self.members.values():
            member.due = False
            if member.stopped:
                self.thaw(member)
        self._children.stop()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        if self._broker is not None:
            self._broker.stop()
            self._broker = None

    def _override(self, **overrides: Any) -> None:
        self._overrides |= overrides
        self.settings = self.settings.model_copy(update=overrides)

    @property
    def cluster(self) -> Cluster:
        """Answers questions about the groups and the brokers."""
        assert self._cluster is not None  # noqa: S101 entered
        return self._cluster

    # ------------------------------------------------------------------ members

    def worker(self, role: Role, copy: int) -> Member:
        """Return a worker of a role; a new one is not started yet."""
        name = f"{role}-{copy}"
        if name not in self.members:
            self.members[name] = Member(name, role, self._worker_command, {"stage": "" if role == "all" else role, "metrics_port": 0})
        return self.members[name]

    def workers(self, role: Role) -> list[Member]:
        """Return a role's workers that should be running."""
        return [member for member in self.members.values() if member.role == role and member.due]

    def gateway(self) -> Member:
        """Return the gateway; a new one is not started yet."""
        if "gateway" not in self.members:
            with socket.socket() as probe:
                probe.bind((self.settings.gateway_host, 0))
                self._override(gateway_port=probe.getsockname()[1])
            self.members["gateway"] = Member("gateway", None, ("-c", "from ops.cli import main; main()", "gateway"), {})
        return self.members["gateway"]

    def add(self, name: str, command: Sequence[str]) -> Member:
        """Return another process under a name; a new one is not started yet."""
        return self.members.setdefault(name, Member(name, None, tuple(command), {}))

    def start(self, member: Member, *arguments: str) -> None:
        """Start a member, in its next life."""
        member.lives += 1
        member.due = True
        member.stopped = False
        member.started_us = time.time_ns() // 1_000
        own = {"worker_id": member.life} if member.role else {}
        with self._lock:
            member.child = self._children.start(
                member.life,
                [sys.executable, *member.command, *arguments],
                env=environment({**self._overrides, **member.overrides, **own}),
                log_file=self.folder / f"{member.life}.log",
            )

    def kill(self, member: Member) -> int:
        """Kill a member with SIGKILL; return when, Unix time in µs."""
        return self._signal(member, signal.SIGKILL)

    def freeze(self, member: Member) -> int:
        """Stop a member with SIGSTOP; return when."""
        member.stopped = True
        return self._signal(member, signal.SIGSTOP)

    def thaw(self, member: Member) -> int:
        """Let a stopped member go on; return when."""
        member.stopped = False
        return self._signal(member, signal.SIGCONT)

    def terminate(self, member: Member) -> int:
        """Ask a member to end; return when."""
        return self._signal(member, signal.SIGTERM)

    def engines(self, role: Role) -> list[int]:
        """Return the processes in which a role's workers recognise."""
        found = []
        for pid in filter(None, (member.pid for member in self.workers(role))):
            children = psutil.Process(pid).children(recursive=True)
            found += [child.pid for child in children if _ENGINE in " ".join(child.cmdline())]
        return found

    @staticmethod
    def signal_all(pids: Sequence[int], number: signal.Signals) -> int:
        """Signal processes that are no members; return when."""
        at_us = time.time_ns() // 1_000
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return at_us

    def wait_gone(self, member: Member, timeout_s: float = 30.0) -> None:
        """Wait for a member's end.

        Raises:
            UserError: it does not end.
        """
        if member.child is None:
            return
        try:
            member.child.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise UserError(f"The {member.life} did not end within {timeout_s:.0f} s", f"Its log is {member.child.log_file}") from None
        self._forget(member)

    def _forget(self, member: Member) -> None:
        """Let go of a process that has ended: it must not count as one that died."""
        if member.child is not None:
            self._children.forget(member.child)
            member.child = None

    def _signal(self, member: Member, number: signal.Signals) -> int:
        at_us = time.time_ns() // 1_000
        if (pid := member.pid) is not None:
            os.kill(pid, number)
        return at_us

    def deaths(self) -> list[str]:
        """Return what died though nobody killed it, with the cause of each; and let it be dead."""
        told = []
        for member in self.members.values():
            if member.due and member.child is not None and (death := member.child.death()) is not None:
                told.append(str(death))
                self._forget(member)
        return told

    # ------------------------------------------------------------------ whole or not

    def wait_whole(self, on_look: Callable[[], None] | None = None, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait until every worker that should run says so, in its present life, and every group is stable with all of them.

        Args:
            on_look: called again and again; it may start what has died.
            timeout_s: the most to wait.

        Raises:
            UserError: not within the time, or somebody died and nobody looks after that; the message says who.
        """
        deadline_s = time.monotonic() + timeout_s
        while missing := self.missing():
            self._on_progress(f"Waiting for {', '.join(missing)}")
            if on_look is not None:
                on_look()
            elif deaths := self.deaths():
                raise UserError(deaths[0])
            if time.monotonic() > deadline_s:
                raise UserError(f"{missing[0]} was not there within {timeout_s:.0f} s", f"The logs are in {self.folder}")
            assert self._watch is not None  # noqa: S101 entered
            self._watch.listen(_POLL_S)

    def missing(self) -> list[str]:
        """Return which workers are not at work."""
        assert self._watch is not None  # noqa: S101 entered
        self._watch.listen(0)
        running = {status.worker_id for status in self._watch.running()}
        workers = [member for member in self.members.values() if member.role and member.due]
        missing = [member.name for member in workers if member.pid is None or member.life not in running]
        if missing:
            return missing
        if len(self.nodes) > 1 and (short := self.cluster.short_of_copies()):
            return [f"copies of {short} partitions"]
        members = {role: self.owned(role) for role in self.roles}
        return [member.name for member in workers if member.role and not members[member.role].get(member.life)]

    def group(self, role: Role) -> str:
        """Return the consumer group of a role's workers."""
        return self.settings.namespace if role == "all" else f"{self.settings.namespace}.{role}"

    def owned(self, role: Role) -> Mapping[str, tuple[int, ...]]:
        """Return which partitions each worker's present life owns, by the group's own account; nothing while the group is not stable."""
        group = self.cluster.group(self.group(role))
        if group.state != _STABLE:
            return {}
        self._known[role] = group.owned
        return group.owned

    def owned_lately(self, role: Role) -> Mapping[str, tuple[int, ...]]:
        """Return the same as of the last moment in which the group was stable."""
        return self.owned(role) or self._known.get(role, {})

    def joins(self, role: Role) -> bool:
        """Return whether somebody is being let into a role's group, or let out."""
        return self.cluster.group(self.group(role)).state not in (_STABLE, "")

    # ------------------------------------------------------------------ brokers

    @property
    def nodes(self) -> list[Node]:
        """The brokers' processes; none where they are another's."""
        return self._broker.nodes if self._broker is not None else []

    def node_that(self, does: str, busy_partition: int) -> Node:
        """Return the broker that leads a partition of the audio, coordinates the group of the recognisers, or is the controller."""
        node_id: int | None = None
        if does == "controller":
            state = self.nodes[0].folder / "data" / "__cluster_metadata-0" / "quorum-state"
            node_id = int(json.loads(state.read_text())["leaderId"])
        elif does == "coordinator":
            node_id = self.cluster.coordinator(self.group(self.roles[-1]))
        elif does == "leader":
            node_id = self.cluster.leader(f"{self.settings.namespace}.audio", busy_partition)
        return next((node for node in self.nodes if node.node_id == node_id), self.nodes[0])

    def restart_node(self, node: Node) -> None:
        """Start a killed broker again and wait until every partition has all its copies.

        Raises:
            UserError: it does not come back.
        """
        node.start()
        deadline_s = time.monotonic() + _NODE_TIMEOUT_S
        while self.cluster.short_of_copies():
            if time.monotonic() > deadline_s or not node.is_running:
                raise UserError(f"The broker {node.node_id} did not come back", f"Its last log lines:\n{node.log_tail()}")
            time.sleep(_POLL_S)
