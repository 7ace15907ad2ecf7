"""An Apache Kafka of one or three nodes as child processes, in a directory that survives restarts.

Every node is a broker and a controller (KRaft). What they are set to is ``server.properties`` beside this file, apart from what depends on
the place: ids, ports, directories, replication.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from ops.broker.runtime import KAFKA_VERSION, BrokerError, find_java, kafka_classpath

__all__ = ["EmbeddedBroker", "Node"]

_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05
#: Room for an hour of 50 channels (138 GB / 24) is not asked for, only enough to start and to say something when it runs out.
_MIN_FREE_BYTES: Final = 512 * 2**20
_JAVA_OPTIONS: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true")
_MANIFEST: Final = "cluster.json"
_LOG_LINES_READ: Final = 200
_LOG_LINES_SHOWN: Final = 10
_LOG_ERROR: Final = re.compile(r"\b(ERROR|FATAL)\b|^Exception in|^Caused by|^Error:|^java\.")

#: Runs a command that the kernel kills as soon as the thread that started it is gone (prctl's PR_SET_PDEATHSIG is 1).
_DIE_WITH_PARENT: Final = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def render_properties(template: str, values: Mapping[str, str]) -> str:
    """Return a properties file with some values replaced in place, comments kept, and keys that it lacked at its end."""
    missing = dict(values)
    lines = []
    for line in template.splitlines():
        key = line.partition("=")[0].strip()
        lines.append(f"{key}={missing.pop(key)}" if key in missing and not line.startswith("#") else line)
    if missing:
        lines += ["", "# --- Set by the caller ---", *(f"{key}={value}" for key, value in missing.items())]
    return "\n".join(lines) + "\n"


class Node:
    """One Kafka process.

    Attributes:
        node_id: counts from 1.
        port: where clients connect.
        folder: its configuration, data and logs.
        process: the running Java, or the last one that ran; None before the first start.
    """

    def __init__(
        self, node_id: int, host: str, port: int, folder: Path, command: list[str], threads: ThreadPoolExecutor, inherited: tuple[int, ...]
    ) -> None:
        self.node_id = node_id
        self.host = host
        self.port = port
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._command = command
        self._threads = threads
        self._inherited = inherited

    @property
    def config_file(self) -> Path:
        """Its ``server.properties``."""
        return self.folder / "server.properties"

    @property
    def log_file(self) -> Path:
        """Kafka's log."""
        return self.folder / "kafka.log"

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process; it is not ready yet when this returns.

        Raises:
            BrokerError: its port is taken.
        """
        if self.is_running:
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as taken:
                raise BrokerError(
                    f"Kafka cannot listen on {self.host}:{self.port} ({taken.strerror})",
                    "If another Kafka runs there, use that one or stop it; else choose another --port.",
                ) from taken
        self.process = self._run("kafka.Kafka", str(self.config_file))

    def format(self, cluster_id: str) -> subprocess.Popen[bytes] | None:
        """Start to format its storage, unless that was done before."""
        if (self.folder / "data" / "meta.properties").is_file():
            return None
        return self._run("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self.config_file), "--ignore-formatted")

    def terminate(self) -> None:
        """Ask the process to stop."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and wait until it is gone."""
        self._signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def log_tail(self) -> str:
        """Return what its log and its output say last: the errors where there are any, else the last lines."""
        recent: list[str] = []
        for file in (self.log_file, self.folder / "jvm.out"):
            if file.is_file():
                recent += file.read_text(errors="replace").splitlines()[-_LOG_LINES_READ:]
        errors = [line for line in recent if _LOG_ERROR.search(line)]
        return "\n".join((errors or recent)[-_LOG_LINES_SHOWN:])

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running and self.process is not None:
            self.process.send_signal(number)

    def _run(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [*self._command, f"-Dasr.kafka.log={self.log_file}", *arguments]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, *command]

        def popen() -> subprocess.Popen[bytes]:
            with (self.folder / "jvm.out").open("wb") as output:
                # A session of its own: a Ctrl-C in the terminal is for us, who stop the nodes in order.
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=self._inherited,
                )

        # The kernel ends it with the thread that started it, so that thread must live as long as the broker.
        return self._threads.submit(popen).result()


class EmbeddedBroker:
    """An Apache Kafka cluster of this process: a context manager, ready when it is entered, stopped when it is left.

    It dies with this process, however that ends. The data stay, and a later start with the same directory continues the same cluster.

    Args:
        data_dir: where it keeps everything; made if missing.
        nodes: 1, or 3 (replication 3, of which 2 acknowledge).
        host: the address that clients connect to.
        port: of the first node, the others follow; 0: free ones.
        cache_dir: where Kafka's jars are kept; default: the configured cache.
        heap_mb: Java's heap for each node.
        overrides: further settings, named as Kafka names them, for every node.
        client_config: settings with which this process asks whether the cluster is ready, named as librdkafka names them.
        on_progress: told what is being waited for.

    Attributes:
        nodes: its processes.

    Raises:
        BrokerError: it cannot start; the message says why and what to do.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        nodes: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        cache_dir: Path | None = None,
        heap_mb: int = 512,
        overrides: Mapping[str, str] | None = None,
        client_config: Mapping[str, str] | None = None,
        on_progress: Callable[[str], None] = lambda _message: None,
    ) -> None:
        if nodes not in {1, 3}:
            raise BrokerError(f"A cluster of {nodes} nodes is not offered", "Choose 1 or 3.")
        self.data_dir = data_dir.absolute()
        self.nodes: list[Node] = []
        self.cluster_id = ""
        self._count = nodes
        self._host = host
        self._port = port
        self._cache_dir = cache_dir
        self._heap_mb = heap_mb
        self._overrides = dict(overrides or {})
        self._client_config = dict(client_config or {})
        self._on_progress = on_progress
        self._lock: IO[str] | None = None
        self._threads: ThreadPoolExecutor | None = None

    @property
    def bootstrap_servers(self) -> str:
        """Where clients connect: ``host:port``, comma-separated."""
        return ",".join(f"{self._host}:{node.port}" for node in self.nodes)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start all nodes and return when the cluster answers.

        Raises:
            BrokerError: it does not.
        """
        java, classpath = find_java(), self._classpath()
        self._lock = lock = self._take_directory()
        self._threads = threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedded-broker")
        try:
            self._check_room()
            self.cluster_id = self._manifest()["cluster_id"]
            command = self._java_command(java, classpath)
            # The nodes hold the lock too: it is free only when the last of them is gone.
            self.nodes = self._lay_out(
                lambda node_id, port, folder: Node(node_id, self._host, port, folder, command, threads, (lock.fileno(),))
            )
            self._format()
            self._on_progress("Starting Kafka")
            for node in self.nodes:
                node.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all nodes: ask, and after 10 s insist. Stopping twice is no error."""
        for node in self.nodes:
            node.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if node.process is not None:
                    node.process.wait(max(0.0, deadline - time.monotonic()))
            node.kill()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def wait_ready(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Return when every node that runs is part of the cluster and the cluster answers.

        Raises:
            BrokerError: a node ended, or the time is over; the message ends with the node's last log lines.
        """
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        config: dict[str, Any] = {
            "bootstrap.servers": self.bootstrap_servers,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
            "error_cb": lambda _error: None,  # that nobody listens yet is no news
            **self._client_config,
        }
        client = AdminClient(config)
        expected = sum(node.is_running for node in self.nodes)
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            with contextlib.suppress(KafkaException):
                answer: Any = client.describe_cluster(request_timeout=1.0).result()
                if len(answer.nodes) >= expected:
                    return
            if time.monotonic() > deadline:
                raise BrokerError(f"Kafka did not answer within {timeout_s:.0f} s", "Its last log lines:\n" + self.nodes[0].log_tail())
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raise if a node has ended by itself.

        Raises:
            BrokerError: with the node's last log lines.
        """
        for node in self.nodes:
            if node.process is not None and not node.is_running:
                raise BrokerError(
                    f"Kafka's node {node.node_id} ended (exit code {node.process.returncode}); its log is {node.log_file}",
                    "Its last lines:\n" + node.log_tail(),
                )

    def _classpath(self) -> str:
        cache_dir = self._cache_dir
        if cache_dir is None:
            from streams.settings import load_settings

            cache_dir = load_settings().cache_dir
        return kafka_classpath(cache_dir, self._on_progress)

    def _take_directory(self) -> IO[str]:
        """Make the directory ours, as long as the file returned is open."""
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            lock = (self.data_dir / "lock").open("a")
        except OSError as refused:
            raise BrokerError(
                f"Kafka cannot keep its data in {self.data_dir} ({refused.strerror})", "Choose another --data-dir."
            ) from refused
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as held:
            lock.close()
            raise BrokerError(f"Another broker uses {self.data_dir}", "Use that one, stop it, or choose another --data-dir.") from held
        return lock

    def _check_room(self) -> None:
        free_bytes = shutil.disk_usage(self.data_dir).free
        if free_bytes < _MIN_FREE_BYTES:
            raise BrokerError(
                f"The disk of {self.data_dir} has only {free_bytes // 2**20} MiB free, and Kafka needs at least {_MIN_FREE_BYTES // 2**20}",
                "Make room, or choose another --data-dir.",
            )

    def _manifest(self) -> dict[str, Any]:
        """Return what the directory says of the cluster in it, after writing that for a new one."""
        file = self.data_dir / _MANIFEST
        if not file.exists():
            others = [path.name for path in self.data_dir.iterdir() if path.name != "lock"]
            if others:
                raise BrokerError(
                    f"{self.data_dir} holds something other than a broker's data ({others[0]})", "Choose an empty --data-dir."
                )
            # Kafka's cluster ids are UUIDs in URL-safe base64 without padding, and never begin with a dash.
            cluster_id = "A" + urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]
            file.write_text(json.dumps({"cluster_id": cluster_id, "nodes": self._count, "kafka": KAFKA_VERSION}, indent=2) + "\n")
        try:
            manifest: dict[str, Any] = json.loads(file.read_text())
            if manifest["nodes"] != self._count:
                raise BrokerError(
                    f"{self.data_dir} holds a cluster of {manifest['nodes']} nodes, not {self._count}",
                    f"Start it with --nodes {manifest['nodes']}, or choose another --data-dir.",
                )
            manifest["cluster_id"].encode("ascii")
        except (ValueError, KeyError, TypeError, AttributeError) as damaged:
            raise BrokerError(f"{file} is damaged ({damaged})", "Choose another --data-dir, or restore it.") from damaged
        return manifest

    def _java_command(self, java: Path, classpath: str) -> list[str]:
        logging_file = self.data_dir / "log4j2.properties"
        logging_file.write_text((resources.files("ops.broker") / "log4j2.properties").read_text(encoding="utf-8"))
        return [str(java), f"-Xmx{self._heap_mb}m", *_JAVA_OPTIONS, f"-Dlog4j2.configurationFile={logging_file}", "-cp", classpath]

    def _lay_out(self, make_node: Callable[[int, int, Path], Node]) -> list[Node]:
        """Write each node's directory and configuration."""
        client_ports = [self._port + index if self._port else free_port(self._host) for index in range(self._count)]
        controller_ports = [free_port() for _ in range(self._count)]
        copies, acknowledging = (1, 1) if self._count == 1 else (3, 2)
        common = {
            "controller.quorum.voters": ",".join(f"{index}@127.0.0.1:{port}" for index, port in enumerate(controller_ports, 1)),
            "default.replication.factor": str(copies),
            "offsets.topic.replication.factor": str(copies),
            "min.insync.replicas": str(acknowledging),
            "transaction.state.log.replication.factor": str(copies),
            "transaction.state.log.min.isr": str(acknowledging),
        }
        template = (resources.files("ops.broker") / "server.properties").read_text(encoding="utf-8")
        nodes = []
        for node_id, (port, controller_port) in enumerate(zip(client_ports, controller_ports, strict=True), 1):
            node = make_node(node_id, port, self.data_dir / f"node-{node_id}")
            node.folder.mkdir(exist_ok=True)
            self._check_cluster(node)
            own = {
                "node.id": str(node_id),
                "listeners": f"CLIENT://{self._host}:{port},CONTROLLER://127.0.0.1:{controller_port}",
                "advertised.listeners": f"CLIENT://{self._host}:{port}",
                "log.dirs": str(node.folder / "data"),
            }
            node.config_file.write_text(render_properties(template, {**common, **own, **self._overrides}))
            nodes.append(node)
        return nodes

    def _check_cluster(self, node: Node) -> None:
        meta = node.folder / "data" / "meta.properties"
        if meta.is_file() and f"cluster.id={self.cluster_id}" not in meta.read_text().splitlines():
            raise BrokerError(
                f"{node.folder} holds the data of another cluster than {self.data_dir / _MANIFEST} names", "Choose another --data-dir."
            )

    def _format(self) -> None:
        """Prepare the storage of new nodes, all at the same time."""
        formatting = [(node, process) for node in self.nodes if (process := node.format(self.cluster_id)) is not None]
        if formatting:
            self._on_progress("Preparing the storage")
        for node, process in formatting:
            if process.wait(_START_TIMEOUT_S):
                raise BrokerError(f"The storage in {node.folder} could not be prepared", "Java said:\n" + node.log_tail())
