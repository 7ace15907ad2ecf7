"""The system's processes for a command that needs all of it: broker, topics, one worker for each stage, gateway.

:class:`System` starts what is missing, says when all is ready, notices when one dies and why, and leaves nothing behind: every process
leads a group of its own that is ended as a whole, and the kernel ends it with us, however that happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from schemas.codec import DecodeError
from schemas.records import StageName, WorkerStatus
from streams.errors import UserError
from streams.registry import codec_for
from streams.settings import STAGES, Settings
from streams.topics import WORKERS

if TYPE_CHECKING:
    from confluent_kafka import Consumer

    from ops.broker import EmbeddedBroker

__all__ = ["Child", "Children", "ProcessDied", "System", "WorkerWatch", "cause_of_death", "environment", "read_log_tail"]

#: A cold worker needs 4 to 6 s on two cores, the first one of a machine also compiles and may fetch its model.
_START_TIMEOUT_S: Final = 180.0
#: Workers finish and commit what they hold in less than 3 s; whoever does not is killed.
_STOP_TIMEOUT_S: Final = 3.0
#: Workers write their status every second; one that missed three is gone.
_STATUS_VALID_US: Final = 3_500_000
#: Long enough for the next status of every worker that runs.
_LOOK_S: Final = 1.5
_CONNECT_TIMEOUT_S: Final = 0.5
_POLL_S: Final = 0.1
_LOG_LINES: Final = 10

#: Runs a command that the kernel kills as soon as the thread that started it is gone (prctl's PR_SET_PDEATHSIG is 1).
_DIE_WITH_PARENT: Final = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
#: How Python ends a traceback.
_EXCEPTION: Final = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt|Died)\b.*")
#: How Faust announces what ends it; what follows are the echoes of stopping half-started services.
_FATAL: Final = re.compile(r"\[\^Worker\]: Error: |Crashed reason=")
_WHILE_HANDLING: Final = "During handling of the above exception, another exception occurred:"
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: Enough of a log's end for the tracebacks of a death.
_LOG_BYTES: Final = 256 * 1_024


class ProcessDied(UserError):  # noqa: N818 - it says what happened
    """One of the system's processes ended by itself."""


def read_log_tail(file: Path, lines: int | None = None) -> list[str]:
    """Return the last lines of a log that say something; none if there is no log."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - _LOG_BYTES))
            text = _ESCAPES.sub("", log.read().decode("utf-8", "replace"))
    except OSError:
        return []
    said = [line.rstrip() for line in text.splitlines() if line.strip()]
    return said if lines is None else said[-lines:]


def cause_of_death(log: Sequence[str]) -> str:
    """Return the line of a log that says what a process died of: its exception, not those that came of that; empty if none does.

    Examples:
        >>> cause_of_death(["Traceback", "KeyError: 7", _WHILE_HANDLING, "OSError: 5"])
        'KeyError: 7'
    """
    fatal = next((at for at, line in enumerate(log) if _FATAL.search(line)), None)
    if fatal is not None:
        found = next((line for line in log[fatal:] if _EXCEPTION.match(line)), None)
        return found or log[fatal].strip()
    exceptions = [at for at, line in enumerate(log) if _EXCEPTION.match(line)]
    while len(exceptions) > 1 and _WHILE_HANDLING in log[exceptions[-2] : exceptions[-1]]:
        exceptions.pop()
    if exceptions:
        return log[exceptions[-1]]
    return log[-1].strip() if log else ""


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """A process that was started here.

    Attributes:
        name: what it is, for people.
        process: the process, leader of its own group.
        log_file: everything that it prints.
    """

    name: str
    process: subprocess.Popen[bytes]
    log_file: Path

    def death(self) -> ProcessDied | None:
        """Return why it ended, or None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        log = read_log_tail(self.log_file)
        cause = cause_of_death(log)
        said = "Its last lines:\n" + "\n".join(f"  {line}" for line in log[-_LOG_LINES:]) if log else "It printed nothing."
        return ProcessDied(f"The {self.name} {how}" + (f": {cause}" if cause else ""), f"{said}\nIts log is {self.log_file}")

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Children:
    """Processes that end with this one. Not for use by several threads."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        # The kernel ends a child with the thread that started it, so that thread must live as long as they do.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="children")

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str], log_file: Path) -> Child:
        """Start a process, its output in a log file."""
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, *command]

        def popen() -> subprocess.Popen[bytes]:
            with log_file.open("ab") as log:
                # A session of its own: a Ctrl-C in the terminal is for us, who stop them in order.
                return subprocess.Popen(
                    command, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )

        child = Child(name, self._thread.submit(popen).result(), log_file)
        self._children.append(child)
        return child

    def forget(self, child: Child) -> None:
        """Let go of one: its end is no news any more."""
        self._children.remove(child)

    def check(self) -> None:
        """Raise if one has ended.

        Raises:
            ProcessDied: with its cause and its last log lines.
        """
        for child in self._children:
            if (death := child.death()) is not None:
                raise death

    def stop(self) -> None:
        """Ask all to end, and after 3 s insist. Stopping twice is no error."""
        for child in self._children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
            # Also what it started and left behind.
            child.signal_group(signal.SIGKILL)
            child.process.wait()
        self._children.clear()
        self._thread.shutdown()


class WorkerWatch:
    """Knows which workers run, from the heartbeats on ``asr.workers``.

    Args:
        settings: where the brokers are.
    """

    def __init__(self, settings: Settings) -> None:
        from streams.kafka import plain_consumer

        self._consumer: Consumer = plain_consumer(settings, [WORKERS])
        self._codec = codec_for(settings.schema_registry_url)
        self._statuses: dict[str, WorkerStatus] = {}

    def close(self) -> None:
        """Stop listening."""
        self._consumer.close()

    def listen(self, seconds: float) -> None:
        """Take what comes for a while."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self._consumer.poll(left_s)
            if message is None or message.error() or message.value() is None:
                continue
            with contextlib.suppress(DecodeError):
                status = self._codec.decode(message.value())
                if isinstance(status, WorkerStatus):
                    self._statuses[status.worker_id] = status

    def running(self) -> list[WorkerStatus]:
        """Return the workers that run and own partitions: those of which a recent heartbeat said so."""
        now_us = time.time_ns() // 1_000
        return [
            status
            for status in self._statuses.values()
            if status.state == "running" and status.partitions and now_us - status.at_us < _STATUS_VALID_US
        ]

    def stages(self) -> set[StageName]:
        """Return the stages that are at work."""
        return {stage for status in self.running() for stage in STAGES if stage in status.stages}

    def describe(self) -> str:
        """Return what each worker is doing, for people who wonder why nothing happens."""
        states = [
            f"{'+'.join(status.stages)} ({status.worker_id}): {status.sessions} sessions, {status.lag_records} records behind, "
            f"load {status.load:.0%}"
            for status in self.running()
        ]
        silent = [stage for stage in STAGES if stage not in self.stages()]
        return "; ".join(states + ([f"no worker runs {', '.join(silent)}"] if silent else []))


class System:
    """Everything that turns audio into text: a context manager, ready when it is entered, gone when it is left.

    The brokers are those that ``ASR_BOOTSTRAP_SERVERS`` names; without it an embedded one is started, with its data in a folder of
    this run. Workers that run already are used; a stage that has none gets one.

    Args:
        settings: the configuration; what the processes are to use beyond the environment must be in ``overrides``.
        name: of the command, for the run's folder.
        overrides: settings that differ from the environment, by field name.
        gateway: start a gateway as well.
        join: before starting anything, look whether a system runs at the configured address, and use that.
        on_progress: told what is being waited for.

    Attributes:
        settings: as they are in force.
        folder: logs of this run, and the embedded broker's data.
        workers: which workers run; None before it was entered.
        joined: whether another's workers do all the work.
        keep_logs: leave the logs of this run where they are; set by itself where it ends in an error.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        *,
        overrides: Mapping[str, Any] | None = None,
        gateway: bool = False,
        join: bool = False,
        on_progress: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self._overrides = dict(overrides or {})
        self.settings = settings.model_copy(update=self._overrides)
        self.folder = settings.data_dir / "runs" / f"{name}-{os.getpid()}-{secrets.token_hex(2)}"
        self.workers: WorkerWatch | None = None
        self.joined = False
        self.keep_logs = False
        self._external = "bootstrap_servers" in settings.model_fields_set
        self._gateway = gateway
        self._join = join
        self._on_progress = on_progress
        self._broker: EmbeddedBroker | None = None
        self._children: Children | None = None

    @property
    def gateway_url(self) -> str:
        """The live page's address."""
        host = self.settings.gateway_host
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104 - only shown
        return f"http://{shown}:{self.settings.gateway_port}/"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self.keep_logs |= isinstance(error, Exception)
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.keep_logs |= isinstance(error, Exception)
        self.stop()

    def check(self) -> None:
        """Raise if one of the processes has ended.

        Raises:
            ProcessDied: a worker or the gateway, with its cause.
            BrokerError: the embedded broker.
        """
        # A dead broker takes the others with it: it is the cause.
        if self._broker is not None:
            self._broker.check()
        if self._children is not None:
            self._children.check()

    def require_engine(self, engine: str) -> None:
        """Make sure that the workers that run recognise with an engine.

        Raises:
            UserError: workers that ran already use another one.
        """
        assert self.workers is not None  # noqa: S101 - entered
        others = {status.engine for status in self.workers.running() if "inference" in status.stages} - {engine}
        if others:
            raise UserError(
                f"The workers that run at {self.settings.bootstrap_servers} use the engine {', '.join(sorted(others))}, not {engine}",
                "Leave --engine out, or stop them.",
            )

    def stop(self) -> None:
        """Stop everything that was started here, in order: gateway and workers, then the broker. Stopping twice is no error."""
        with _undisturbed():
            if self.workers is not None:
                self.workers.close()
                self.workers = None
            if self._children is not None:
                self._children.stop()
                self._children = None
            if self._broker is not None:
                self._broker.stop()
                self._broker = None
            shutil.rmtree(self.folder / "kafka", ignore_errors=True)
            if not self.keep_logs:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        if self._join and self._find_running():
            return
        self._make_folder()
        self._children = Children()
        if not self._external:
            self._start_broker()
        self._create_topics()
        self.workers = self.workers or WorkerWatch(self.settings)
        if self._external:
            self.workers.listen(_LOOK_S)
        missing = [stage for stage in STAGES if stage not in self.workers.stages()]
        for stage in missing:
            self._start_worker(stage)
        if self._gateway:
            self._start_gateway()
        self._wait_ready()
        self.joined = not missing

    def _find_running(self) -> bool:
        """Look whether a whole system runs at the configured address."""
        first = self.settings.bootstrap_servers.split(",")[0].strip()
        host, _, port = first.rpartition(":")
        if not self._external:
            # Nobody said that there is one: a quick look is enough.
            try:
                socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
            except (OSError, ValueError):
                return False
        from streams.kafka import MissingTopicError

        try:
            self.workers = WorkerWatch(self.settings)
        except MissingTopicError:
            return False
        except UserError:
            if self._external:
                raise
            return False
        self.workers.listen(_LOOK_S)
        self.joined = self.workers.stages() == set(STAGES)
        if not self.joined and not self._external:
            self.workers.close()
            self.workers = None
        return self.joined

    def _make_folder(self) -> None:
        runs = self.folder.parent
        try:
            self.folder.mkdir(parents=True)
        except OSError as refused:
            raise UserError(f"{runs} cannot be written to ({refused.strerror})", "Set ASR_DATA_DIR to a folder of yours.") from refused
        for other in runs.iterdir():
            if _is_abandoned(other / "kafka"):
                # Left behind by a run that was killed; its logs may still be wanted, its broker's data are not.
                shutil.rmtree(other / "kafka", ignore_errors=True)

    def _start_broker(self) -> None:
        from ops.broker import EmbeddedBroker

        self._broker = EmbeddedBroker(self.folder / "kafka", cache_dir=self.settings.cache_dir, on_progress=self._on_progress)
        self._broker.start()
        self._use(bootstrap_servers=self._broker.bootstrap_servers)

    def _use(self, **overrides: Any) -> None:
        self._overrides |= overrides
        self.settings = self.settings.model_copy(update=overrides)

    def _create_topics(self) -> None:
        from streams.topic_admin import ensure_topics

        self._on_progress("Creating the topics")
        ensure_topics(self.settings)

    def _start_worker(self, stage: StageName) -> None:
        self._run(
            f"{stage} worker",
            ["-m", "faust", "-A", "streams", "worker", "-l", "warn"],
            stage=stage,
            worker_id=f"{self.folder.name}-{stage}",
            data_dir=self.folder,
            # Three on one host cannot share a port.
            metrics_port=0,
        )

    def _start_gateway(self) -> None:
        port = self.settings.gateway_port
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.settings.gateway_host, port))
            except OSError as taken:
                raise UserError(
                    f"The gateway cannot listen on {self.settings.gateway_host}:{port} ({taken.strerror})", "Choose another --port."
                ) from taken
            self._use(gateway_port=probe.getsockname()[1])
        self._run("gateway", ["-c", "from ops.cli import main; main()", "gateway"])

    def _run(self, name: str, arguments: Sequence[str], **overrides: Any) -> None:
        assert self._children is not None  # noqa: S101 - set before anything is run
        self._children.start(
            name,
            [sys.executable, *arguments],
            env=environment({**self._overrides, **overrides}),
            log_file=self.folder / f"{name.replace(' ', '-')}.log",
        )

    def _wait_ready(self) -> None:
        assert self.workers is not None  # noqa: S101 - set before anything is waited for
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while waiting := self._not_ready():
            self._on_progress(f"Starting {', '.join(waiting)}")
            self.check()
            if time.monotonic() > deadline_s:
                raise UserError(f"The {waiting[0]} was not ready within {_START_TIMEOUT_S:.0f} s", f"The logs are in {self.folder}")
            self.workers.listen(_POLL_S)

    def _not_ready(self) -> list[str]:
        assert self.workers is not None  # noqa: S101
        ready = self.workers.stages()
        waiting = [f"{stage} worker" for stage in STAGES if stage not in ready]
        if self._gateway and not self._gateway_answers():
            waiting.append("gateway")
        return waiting

    def _gateway_answers(self) -> bool:
        try:
            socket.create_connection((self.settings.gateway_host, self.settings.gateway_port), _CONNECT_TIMEOUT_S).close()
        except OSError:
            return False
        return True


def environment(overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return this process's environment with settings by field name as ``ASR_*``."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **{f"ASR_{name.upper()}": str(value) for name, value in overrides.items()}}


def _is_abandoned(broker_folder: Path) -> bool:
    """Return whether a broker's folder is there and no broker holds its lock."""
    try:
        with (broker_folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _undisturbed() -> Any:
    """Keep an impatient second Ctrl-C from leaving processes behind."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread, which signals go to
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
