"""Where a Python process spends its processor time: looked at a hundred times a second, from inside.

A thread reads how much processor time every other one has used since the last look (the kernel counts it in ns) and gives it to the part of
the program that it is in: the innermost function of it that belongs to a part. The sum is exact, the division a sample. What threads of
libraries use, which Python knows nothing of, goes to a part of its own.

It is started in the workers and their engine by ``sampler/sitecustomize.py``, which a benchmark puts on their ``PYTHONPATH``: so they run
as they always do, and the product knows nothing of it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final

__all__ = ["ENVIRONMENT", "NATIVE", "OTHER", "PARTS", "part_of", "start"]

#: Names the folder that the samples go to.
ENVIRONMENT: Final = "ASR_BENCH_SAMPLES"
NATIVE: Final = "native threads"
OTHER: Final = "kafka and faust"

_PERIOD_S: Final = 0.01
_WRITE_EVERY_S: Final = 1.0
_NS_PER_S: Final = 1e9
_TASKS: Final = Path("/proc/self/task")

#: What belongs to which part, by the path of the source; the first that fits.
PARTS: Final = (
    ("/agents/vad/decode.py", "decoding audio"),
    ("/agents/vad/resample.py", "resampling"),
    ("/agents/vad/denoise.py", "denoising"),
    ("/agents/vad/", "detection"),
    ("/agents/features/", "features"),
    ("/agents/inference/conformer/finals.py", "finals"),
    ("/agents/inference/conformer/streaming.py", "encoder"),
    ("/agents/inference/conformer/model.py", "encoder"),
    ("/agents/inference/conformer/", "search"),
    ("/agents/inference/decoding/", "search"),
    ("/agents/inference/postprocess.py", "writing"),
    ("/agents/inference/whisper.py", "encoder"),
    ("/agents/inference/", "batching and passing"),
)
_WHOLE: Final = "finals"
_INSIDE_WHOLE: Final = ("encoder", "search")


def part_of(stack: FrameType | None, known: dict[str, str | None]) -> str:
    """Return the part that a stack is in.

    Args:
        stack: the innermost frame.
        known: the parts of files that were seen already; filled.
    """
    found = ""
    while stack is not None:
        file = stack.f_code.co_filename
        if file not in known:
            known[file] = next((part for place, part in PARTS if place in file.replace(os.sep, "/")), None)
        part = known[file]
        # Finals take the encoder and the search as live blocks do: whose they are is said further out.
        if part == _WHOLE and found in _INSIDE_WHOLE:
            return part
        found = found or part or ""
        if found and found not in _INSIDE_WHOLE:
            return found
        stack = stack.f_back
    return found or OTHER


def start(folder: Path) -> None:
    """Sample this process until it ends, into a file of the folder: a line of JSON each second, with the time used so far."""
    stage = "engine" if "agents.inference.serve" in sys.orig_argv else os.environ.get("ASR_STAGE", "")
    if stage:
        threading.Thread(target=_Sampler(folder / f"{stage}-{os.getpid()}.jsonl").run, name="sampler", daemon=True).start()


class _Sampler:
    """See the module."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._used_ns: dict[int, int] = {}
        self._parts: Counter[str] = Counter()
        self._known: dict[str, str | None] = {}

    def run(self) -> None:
        """Sample for ever."""
        own = threading.get_native_id()
        write_s = time.monotonic()
        while True:
            time.sleep(_PERIOD_S)
            natives = {thread.ident: thread.native_id for thread in threading.enumerate()}
            for ident, stack in sys._current_frames().items():  # noqa: SLF001 there is no other way
                native = natives.get(ident)
                if native is not None and native != own:
                    self._parts[part_of(stack, self._known)] += self._since(native)
            if time.monotonic() >= write_s:
                write_s += _WRITE_EVERY_S
                of_python = {native for native in natives.values() if native is not None}
                for task in _tasks() - of_python:
                    self._parts[NATIVE] += self._since(task)
                self._write()

    def _since(self, task: int) -> int:
        """Return the processor time that a thread used since it was asked last, in ns."""
        try:
            used_ns = int((_TASKS / str(task) / "schedstat").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return 0
        before_ns = self._used_ns.get(task, 0)
        self._used_ns[task] = used_ns
        return used_ns - before_ns

    def _write(self) -> None:
        used_s = {part: round(ns / _NS_PER_S, 6) for part, ns in self._parts.items()}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at_s": time.time(), "used_s": used_s}) + "\n")


def _tasks() -> set[int]:
    try:
        return {int(task.name) for task in _TASKS.iterdir()}
    except OSError:
        return set()
