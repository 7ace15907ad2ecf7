"""Looks after the processes while they run: memory, threads, handles, and how far their commits are behind."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import numpy as np
import psutil

from ops.chaos.cluster import Cluster

__all__ = ["Growth", "Health", "Lag", "Sample", "growths"]

_LOOK_S: Final = 2.0
_LAG_LOOK_S: Final = 5.0
_US_PER_S: Final = 1_000_000
#: A process that has just begun is filling its buffers; one that lives on shorter than this is not judged.
_WARM_S: Final = 30.0
_JUDGED_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process and its children held at a moment."""

    at_us: int
    life: str
    rss_bytes: int
    threads: int
    handles: int


@dataclass(frozen=True, slots=True)
class Lag:
    """How far the commits for a partition were behind its end at a moment."""

    at_us: int
    topic: str
    partition: int
    records: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class Growth:
    """How much a process grew in its life, warm-up apart: the median of its last third less that of its first third.

    Attributes:
        life: the process.
        seconds: how long it was looked at.
        rss_bytes: growth of memory.
        threads: growth in threads.
        handles: growth in open files and sockets.
    """

    life: str
    seconds: float
    rss_bytes: int
    threads: int
    handles: int


class Health:
    """Samples in a thread; a context manager.

    Args:
        cluster: tells of the commits.
        groups: the consumer groups.
        processes: returns the processes to look at now, by the name of their present life.

    Attributes:
        samples: of the processes.
        lags: of the groups.
    """

    def __init__(self, cluster: Cluster, groups: Sequence[str], processes: Callable[[], Mapping[str, int]]) -> None:
        self.samples: list[Sample] = []
        self.lags: list[Lag] = []
        self._groups = tuple(groups)
        self._processes = processes
        self._cluster = cluster
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look, name="health", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join()

    def lag_now(self) -> list[Lag]:
        """Return how far every group is behind on every partition that it has committed; nothing where the brokers do not answer."""
        now_us = time.time_ns() // 1_000
        lags = []
        for group in self._groups:
            committed = self._cluster.committed(group)
            ends = self._cluster.ends(list(committed)) if committed else {}
            lags += [Lag(now_us, topic, number, end - committed[topic, number], end) for (topic, number), end in ends.items()]
        return lags

    def _look(self) -> None:
        lag_due_s = 0.0
        while not self._stopping.wait(_LOOK_S):
            for life, pid in self._processes().items():
                if (sample := _sample(life, pid)) is not None:
                    self.samples.append(sample)
            if time.monotonic() >= lag_due_s:
                lag_due_s = time.monotonic() + _LAG_LOOK_S
                self.lags += self.lag_now()


def _sample(life: str, pid: int) -> Sample | None:
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return Sample(
            time.time_ns() // 1_000,
            life,
            sum(each.memory_info().rss for each in family),
            sum(each.num_threads() for each in family),
            sum(each.num_fds() for each in family),
        )
    except psutil.Error:
        return None


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Return how much each process grew that lived long enough to tell."""
    lives: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.life].append(sample)
    found = []
    for life, mine in lives.items():
        # On a slow machine a start takes long, too.
        begun_us = mine[0].at_us + max(_WARM_S * _US_PER_S, (mine[-1].at_us - mine[0].at_us) / 3)
        warm = [sample for sample in mine if sample.at_us >= begun_us]
        seconds = (warm[-1].at_us - warm[0].at_us) / _US_PER_S if warm else 0.0
        third = len(warm) // 3
        if seconds < _JUDGED_S or not third:
            continue
        table = np.array([(sample.rss_bytes, sample.threads, sample.handles) for sample in warm])
        grown = np.median(table[-third:], axis=0) - np.median(table[:third], axis=0)
        found.append(Growth(life, round(seconds, 1), *(round(float(each)) for each in grown)))
    return found
