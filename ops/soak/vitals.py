"""What processes and topics hold, looked at again and again while the calls go on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
import psutil

__all__ = ["OWN", "Held", "Latencies", "Sample", "Vitals"]

#: The process that plays and measures.
OWN: Final = "recorder"
_SEGMENTS: Final = "*.log"


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a process holds; those of one role are added up."""

    rss_bytes: int
    threads: int
    handles: int


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Frame latencies since the sample before, in ms; None without any."""

    frames: int = 0
    p50_ms: float | None = None
    p95_ms: float | None = None
    max_ms: float | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A moment.

    Attributes:
        at_s: since the calls began.
        calls: calls that were over.
        open_calls: calls that were not.
        processes: what each holds, by role.
        topic_bytes: what each topic takes on disk; empty where the brokers' disk is not ours.
        latency: how late frames were.
    """

    at_s: float
    calls: int
    open_calls: int
    processes: dict[str, Held]
    topic_bytes: dict[str, int]
    latency: Latencies


class Vitals:
    """Takes samples in a thread: a context manager.

    Args:
        every_s: how often.
        progress: how many calls are over, and how many open.
        latencies: the latencies since it was asked last.
        broker_folder: where the brokers keep their data; None: elsewhere.
        namespace: whose topics.

    Attributes:
        samples: those taken so far.
    """

    def __init__(
        self,
        every_s: float,
        progress: Callable[[], tuple[int, int]],
        latencies: Callable[[], Latencies],
        broker_folder: Path | None,
        namespace: str,
    ) -> None:
        self.samples: list[Sample] = []
        self._every_s = every_s
        self._progress = progress
        self._latencies = latencies
        self._broker_folder = broker_folder
        self._prefix = f"{namespace}."
        self._began_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitals", daemon=True)

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def take(self) -> None:
        """Take a sample now."""
        over, still_open = self._progress()
        self.samples.append(
            Sample(
                at_s=round(time.monotonic() - self._began_s, 3),
                calls=over,
                open_calls=still_open,
                processes=held_by_role(),
                topic_bytes=self._topic_bytes(),
                latency=self._latencies(),
            )
        )

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.take()

    def _topic_bytes(self) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        if self._broker_folder is None:
            return {}
        for folder in self._broker_folder.glob(f"node-*/data/{self._prefix}*"):
            topic = folder.name.removeprefix(self._prefix).rpartition("-")[0]
            with contextlib.suppress(OSError):  # a segment that is being removed
                sizes[topic] += sum(file.stat().st_size for file in folder.glob(_SEGMENTS))
        return dict(sorted(sizes.items()))


def held_by_role() -> dict[str, Held]:
    """Return what this process and those below it hold."""
    own = psutil.Process()
    rss: Counter[str] = Counter()
    threads: Counter[str] = Counter()
    handles: Counter[str] = Counter()
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            role = OWN if process == own else _role(process)
            with process.oneshot():
                rss[role] += process.memory_info().rss
                threads[role] += process.num_threads()
                handles[role] += process.num_fds()
    return {role: Held(rss_bytes=rss[role], threads=threads[role], handles=handles[role]) for role in sorted(rss)}


def _role(process: psutil.Process) -> str:
    command = process.cmdline()
    if "kafka.Kafka" in command:
        return "broker"
    if any("agents.inference.serve" in part for part in command):
        return "engine"
    if "faust" in command:
        return f"{process.environ().get('ASR_STAGE') or 'whole'} worker"
    if "gateway" in command:
        return "gateway"
    module = next((part for part in command[1:] if part.startswith(("agents.", "ops."))), "")
    return module.rpartition(".")[2] or process.name()
