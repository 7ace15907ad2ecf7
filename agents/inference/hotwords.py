"""Hotwords on their way into the engine while calls are live.

A list that is pushed is compiled in the background and learnt by the engine between two steps; from then on partials listen to it. A final
uses the version that its segment's end names, whatever is in force by then. It waits for that version to be learnt; nothing else does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from agents.inference import metrics
from agents.inference.engine import HOTWORD_VERSIONS_KEPT, Finish
from agents.inference.frames import Compile, Compiled, pack, receive
from schemas.codec import Codec
from schemas.records import HotwordList, Rejected
from streams.control import Control, PushedList
from streams.kafka import ClusterError
from streams.topics import HOTWORDS

__all__ = ["Compiler", "CompilerProcess", "LiveHotwords"]

log = logging.getLogger(__name__)

#: A version that a segment names is on the topic, but this worker may not have read it yet: this long it is waited for.
_UNKNOWN_WAIT_S: Final = 5.0
#: So is a compiler at the worker's start.
_START_WAIT_S: Final = 60.0
#: A list takes a second; on a machine that is busy some more.
_COMPILE_TIMEOUT_S: Final = 120.0
_STDERR: Final = 2


class CompilerProcess:
    """Compiles lists in ``decoding/compiler.py``, one after the other; starts it again when it dies.

    Args:
        model_dir: the engine's model.
        cache_dir: where compiled lists are kept.
        codec: decodes pushed lists.
    """

    def __init__(self, model_dir: Path, cache_dir: Path, codec: Codec) -> None:
        self._arguments = [str(model_dir), str(cache_dir)]
        self._codec = codec
        self._orders: queue.SimpleQueue[tuple[str, tuple[PushedList, ...], Callable[[Compiled], None]] | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._answers: Final = msgspec.msgpack.Decoder(Compiled)
        self._stopping = False
        # A process dies with the thread that started it, so this one lives as long.
        self._thread = threading.Thread(target=self._work, name="hotwords", daemon=True)

    def start(self) -> None:
        """Begin to get ready."""
        self._thread.start()

    def stop(self) -> None:
        """End it; orders that wait are forgotten."""
        self._stopping = True
        self._orders.put(None)
        if self._process is not None:
            self._process.kill()
        if self._thread.is_alive():
            self._thread.join()

    def compile(self, version: str, lists: tuple[PushedList, ...], then: Callable[[Compiled], None]) -> None:
        """Order a version, made of lists; ``then`` is called with what became of it, on a thread."""
        self._orders.put((version, lists, then))

    def _work(self) -> None:
        try:
            self._ensure_running()
        except (OSError, EOFError, ValueError) as refused:
            if not self._stopping:
                log.error("the compiler of hotwords cannot be started: %s", refused)  # noqa: TRY400 the cause is in the message
        while (order := self._orders.get()) is not None:
            version, lists, then = order
            then(self._compiled(version, lists))
        self._end()

    def _compiled(self, version: str, lists: tuple[PushedList, ...]) -> Compiled:
        try:
            records = [self._codec.decode(pushed.value) for pushed in lists]
            phrases = [(each.phrase, each.boost) for record in records if isinstance(record, HotwordList) for each in record.phrases]
            connection = self._ensure_running()
            connection.sendall(pack(Compile(version, tuple(phrases))))
            return self._answers.decode(receive(connection))
        except Exception as failure:  # noqa: BLE001 finals wait for what is ordered here, whatever becomes of it
            self._end()
            return Compiled(version, error=str(failure) or "the compiler of hotwords died")

    def _ensure_running(self) -> socket.socket:
        """Return the way to a compiler that is ready.

        Raises:
            OSError: it cannot be started, or does not answer.
            EOFError: it died.
            ValueError: it cannot read the model's units.
        """
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._end()
        ours, theirs = socket.socketpair()
        module = "agents.inference.decoding.compiler"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid()), *self._arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
            )
        finally:
            theirs.close()
        ours.settimeout(_COMPILE_TIMEOUT_S)
        self._connection = ours
        ready = self._answers.decode(receive(ours))
        if ready.error:
            self._end()
            raise ValueError(ready.error)
        return ours

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


class Compiler(Protocol):
    """What compiles lists."""

    def start(self) -> None:
        """Begin to get ready."""

    def stop(self) -> None:
        """End it."""

    def compile(self, version: str, lists: tuple[PushedList, ...], then: Callable[[Compiled], None]) -> None:
        """Order a version; ``then`` is called with what became of it, on any thread."""


class LiveHotwords:
    """See the module. All calls belong on the event loop.

    Args:
        control: what is pushed.
        compiler: compiles it for the engine's model.
        learn: lets the engine learn a version: its name, its folder, whether it is in force, and what to call then.
        finish: asks the engine for a final.
    """

    def __init__(
        self,
        control: Control,
        compiler: Compiler,
        learn: Callable[[str, str, bool, Callable[[], None]], None],
        finish: Callable[[Finish], None],
    ) -> None:
        self._control = control
        self._compiler = compiler
        self._learn = learn
        self._finish = finish
        #: Versions that the engine knows, or that cannot be had, the newest last.
        self._settled: OrderedDict[str, None] = OrderedDict()
        self._ordered: set[str] = set()
        self._held: defaultdict[str, list[Finish]] = defaultdict(list)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fetching: set[asyncio.Task[None]] = set()
        #: The version that partials listen to.
        self.in_force = ""

    async def start(self) -> None:
        """Learn what is in force, and follow what comes."""
        self._loop = asyncio.get_running_loop()
        self._compiler.start()
        self._control.on_change(self._follow)
        self._follow()
        try:
            async with asyncio.timeout(_START_WAIT_S):
                while self._control.hotwords.version not in ("", *self._settled):
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            log.warning("the hotwords in force were not compiled within %.0f s: finals that name them wait", _START_WAIT_S)

    async def stop(self) -> None:
        """Compile no more."""
        await asyncio.to_thread(self._compiler.stop)

    def finish(self, request: Finish) -> None:
        """Ask for a final as soon as the engine knows the hotwords that it names."""
        version = request.hotword_version
        if not version or version in self._settled:
            self._finish(request)
            return
        if version not in self._held and version not in self._ordered:
            log.info("finals wait for the hotwords %s", version)
        self._held[version].append(request)
        self._order(version)
        if version not in self._ordered and self._loop is not None:
            self._loop.call_later(_UNKNOWN_WAIT_S, self._despair, version)

    def _follow(self) -> None:
        """Take notice of a change on the topic."""
        version = self._control.hotwords.version
        if not version:
            self._learn("", "", True, lambda: self._now_in_force(""))
        else:
            self._order(version)
        for held in list(self._held):
            self._order(held)

    def _order(self, version: str) -> None:
        """Order a version, unless it is on its way or not known."""
        if version in self._ordered:
            return
        lists = self._control.hotwords.parts(version)
        if lists is not None:
            self._ordered.add(version)
            if all(each.value for each in lists):
                self._compiler.compile(version, lists, self._compiled)
            else:
                fetching = asyncio.get_running_loop().create_task(self._compile_fetched(version, lists))
                self._fetching.add(fetching)
                fetching.add_done_callback(self._fetching.discard)

    async def _compile_fetched(self, version: str, lists: tuple[PushedList, ...]) -> None:
        """Order a version of which not all is in memory."""
        while True:
            try:
                lists = await asyncio.to_thread(self._control.fetched, lists)
            except ClusterError as away:
                log.warning("the hotwords %s cannot be read yet: %s", version, away)
                await asyncio.sleep(_UNKNOWN_WAIT_S)
            except LookupError as gone:
                self._take(Compiled(version, error=str(gone)))
                return
            else:
                self._compiler.compile(version, lists, self._compiled)
                return

    def _compiled(self, compiled: Compiled) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, compiled)

    def _take(self, compiled: Compiled) -> None:
        version = compiled.version
        if compiled.error:
            log.error("the hotwords %s cannot be compiled: %s", version, compiled.error)
            self._reject(version, f"it cannot be compiled: {compiled.error}")
            self._settle(version)
            return
        metrics.HOTWORD_SECONDS.observe(compiled.took_ms / 1_000)
        if compiled.left_out and compiled.fresh:
            self._complain(compiled)
        in_force = version == self._control.hotwords.version
        if in_force:
            metrics.HOTWORD_PHRASES.set(compiled.phrases)
            metrics.HOTWORD_LEFT_OUT.set(compiled.left_out)

        def then() -> None:
            self._settle(version)
            if in_force:
                self._now_in_force(version)

        self._learn(version, compiled.folder, in_force, then)

    def _complain(self, compiled: Compiled) -> None:
        examples = "; ".join(f"{phrase!r}: {reason}" for phrase, reason in compiled.examples)
        more = " …" if compiled.left_out > len(compiled.examples) else ""
        told = f"{compiled.left_out} of {compiled.left_out + compiled.phrases} phrases cannot be used with this model: {examples}{more}"
        log.warning("hotwords %s: %s", compiled.version, told)
        self._reject(compiled.version, told)

    def _reject(self, version: str, reason: str) -> None:
        for pushed in self._control.hotwords.parts(version) or ():
            self._control.reject(
                Rejected(
                    topic=HOTWORDS.full_name(self._control.settings),
                    partition=0,
                    offset=pushed.offset,
                    stage="inference",
                    reason=f"version {pushed.version}: {reason}",
                    at_us=time.time_ns() // 1_000,
                    key=pushed.name.encode(),
                )
            )

    def _now_in_force(self, version: str) -> None:
        self.in_force = version
        if not version:
            metrics.HOTWORD_PHRASES.set(0)
            metrics.HOTWORD_LEFT_OUT.set(0)
        log.info("the engine listens to the hotwords %s", version or "no more")

    def _settle(self, version: str) -> None:
        """Let the finals go that wait for a version."""
        self._ordered.discard(version)
        self._settled[version] = None
        self._settled.move_to_end(version)
        while len(self._settled) > HOTWORD_VERSIONS_KEPT // 2:  # the engine keeps more: what it is about to forget is learnt again
            self._settled.popitem(last=False)
        for request in self._held.pop(version, ()):
            self._finish(request)
        self._changed.set()

    def _despair(self, version: str) -> None:
        """Let finals go without hotwords that are nowhere to be had: each says so."""
        if version in self._held and version not in self._ordered:
            log.error("the hotwords %s are not on the topic", version)
            for request in self._held.pop(version):
                self._finish(request)
