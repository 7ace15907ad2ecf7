"""The engine in a process of its own, seen from the worker: an engine like any other, except that it comes back when it dies or hangs.

A worker's heartbeats must never wait for a decoder, and one that hangs can be killed.

The worker keeps the blocks of every open segment. When the engine dies, hangs or fails, a new one gets each segment again, whole and
*alone*, and after that the outstanding finals, one by one. So whatever brings the engine down again is known by name: a segment that did so
twice is given up, its final has no text and says why, and all others go on as if nothing had happened.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from agents.inference.arena import Arena
from agents.inference.engine import HOTWORD_VERSIONS_KEPT, Block, EngineError, FinalText, Finish, Hypothesis, Opening, SegmentKey
from agents.inference.frames import (
    Answer,
    Close,
    EngineSpec,
    Learn,
    Open,
    Ready,
    Refused,
    Replay,
    Request,
    Settle,
    Step,
    pack,
    receive,
    to_worker,
)
from agents.inference.models import resolve, wenet_directory
from streams.settings import Settings

__all__ = ["EngineProcess", "cuts_utterances", "engine_spec", "hotword_model", "second_pass_settings"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Kind = Literal["step", "final"]

#: Loading a model takes a second or two, from a cold disk some more.
_START_TIMEOUT_S: Final = 120.0
#: How often the supervisor looks for requests that are overdue.
_WATCH_S: Final = 0.05
#: How often a segment, or a list of hotwords, may bring the engine down: a machine out of memory is not the segment's fault, twice is.
_STRIKES: Final = 2
#: An engine that lived for this long was well; one that dies sooner is started again after a growing wait.
_WELL_S: Final = 10.0
_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 5.0
#: Starts in a row that may fail: 0.05 + 0.1 + ... + 0.8 s, and the starts themselves.
_FAILED_STARTS: Final = 6
#: Each decoding has its own threads; libraries that start more would only get in each other's way.
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: It makes CTranslate2 ten times slower.
_NOT_INHERITED: Final = ("CT2_USE_MKL",)
_STDERR: Final = 2
_WHISPER_WORKERS: Final = 2


def engine_spec(settings: Settings) -> EngineSpec:
    """Return which engine the settings ask for, with its model found.

    Raises:
        ModelError: the model cannot be had.
    """
    if settings.engine == "instant":
        return EngineSpec(factory="agents.inference.instant:InstantEngine")
    if settings.engine == "conformer":
        return EngineSpec(factory="agents.inference.conformer.engine:conformer_engine", options=_conformer_options(settings))
    model = resolve(settings.model, settings.cache_dir)
    return EngineSpec(
        factory="agents.inference.whisper:WhisperEngine",
        options={
            "folder": str(model.folder),
            "model_digest": model.digest,
            "language": settings.language,
            "threads": settings.threads,
            "workers": settings.engine_workers or _WHISPER_WORKERS,
            "partial_interval_ms": settings.partial_interval_ms,
        },
    )


def second_pass_settings(settings: Settings) -> Settings:
    """Return the settings as the engine of the second pass has them."""
    # No partials are wanted of it.
    return settings.model_copy(update={"engine": settings.final_engine, "model": settings.final_model, "partial_interval_ms": 0})


def cuts_utterances(settings: Settings) -> bool:
    """Return whether endpoint rules cut segments into utterances: no detector ends them, and the engine has what rules look at."""
    return settings.vad == "off" and settings.engine == "conformer"


def hotword_model(settings: Settings) -> Path | None:
    """Return the model that hotwords are compiled for, or None if the engine makes nothing of them.

    Raises:
        ModelError: the model cannot be had.
    """
    if settings.engine != "conformer":
        return None
    wanted = settings.model_dir or (Path(settings.model) if "model" in settings.model_fields_set else None)
    return wenet_directory(wanted)


def _conformer_options(settings: Settings) -> dict[str, Any]:
    return {
        "folder": str(hotword_model(settings)),
        "lm": "" if settings.lm is None else str(settings.lm),
        "lm_weight": settings.lm_weight,
        "lm_word_bonus": settings.lm_word_bonus,
        "device": settings.device,
        "precision": settings.precision,
        "final_precision": settings.final_precision,
        "threads": settings.threads,
        # They compete with the live lane for the processor.
        "finals_lanes": settings.engine_workers or max(1, (os.cpu_count() or 1) // 2),
        "slots": settings.engine_slots,
        "block_frames": settings.chunk_frames,
        "left_blocks": settings.left_chunks,
        "final_block_frames": settings.final_chunk_frames,
        "final_left_blocks": settings.final_left_chunks,
        "beam": settings.beam,
        "ctc_weight": settings.ctc_weight,
        "reverse_weight": settings.reverse_weight,
        "rescoring": settings.rescoring,
        "longest_ms": settings.vad_max_segment_ms,
        "endpoints": cuts_utterances(settings),
        "language": settings.language,
        "numbers": settings.itn,
        "punctuation": settings.punctuation,
        "capitals": settings.sentence_case,
        "cache_dir": str(settings.cache_dir),
    }


class _DownError(Exception):
    """The engine died, hung or failed at a request; the message says which."""


@dataclass(slots=True)
class _Open:
    """A segment as the engine must know it."""

    opening: Opening
    blocks: list[Block] = field(default_factory=list)
    #: How often the engine went down at it, by kind of request.
    strikes: Counter[_Kind] = field(default_factory=Counter)
    failure: str = ""

    def strike(self, kind: _Kind, cause: str) -> None:
        self.strikes[kind] += 1
        if self.strikes[kind] >= _STRIKES:
            self.failure = cause
            self.blocks.clear()


@dataclass(slots=True, eq=False)
class _Child:
    """A running engine."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    arena: Arena
    ready: Ready
    born_s: float
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, request: Request) -> None:
        with self.sending:
            try:
                self.connection.sendall(pack(self.arena.lodge(request)))
            except OSError:
                log.debug("a request was not sent: the engine is gone, as its reader will find")

    def kill(self) -> int:
        """End it, now; return its exit status."""
        self.process.kill()
        status = self.process.wait()
        self.connection.close()
        self.arena.close()
        return status


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way."""

    request: Request
    keys: tuple[SegmentKey, ...]
    child: _Child
    deadline_s: float
    #: Part of a recovery: the supervisor waits for it, and sees what becomes of it.
    alone: bool = False
    answer: Future[Answer] = field(default_factory=Future)
    finals: dict[SegmentKey, FinalText] = field(default_factory=dict)

    @property
    def kind(self) -> _Kind:
        return "final" if isinstance(self.request, Settle) else "step"


class EngineProcess:
    """See the module. Several threads may call it; calls wait while a new engine is brought up.

    Args:
        spec: which engine to run.
        timeout_ms: one that does not answer a request for this long is killed.
    """

    name = ""
    model_digest = ""
    finals_lanes = 0
    finals_batch = 1
    blocks_at_once = 1

    def __init__(self, spec: EngineSpec, *, timeout_ms: int = 30_000) -> None:
        self._spec = spec
        self._timeout_s = timeout_ms / 1_000
        #: How often a new engine had to be started.
        self.restarts = 0
        self._lock = threading.Condition()
        self._child: _Child | None = None  # None while no engine takes requests
        self._spawned: _Child | None = None
        self._failure: EngineError | None = None
        self._book: dict[SegmentKey, _Open] = {}
        #: Hotwords that the engine must know, by version, those learnt last at the end; and which of them partials listen to.
        self._hotwords: dict[str, str] = {}
        self._in_force = ""
        self._hotword_strikes: Counter[str] = Counter()
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._quick_deaths = 0
        self._stopping = threading.Event()
        #: What went wrong: the child, the call at fault if one is known, and the cause.
        self._troubles: queue.SimpleQueue[tuple[_Child, _Call | None, str]] = queue.SimpleQueue()
        self._started: Future[None] = Future()
        # It starts the engine, so it has to live as long as the engine: a process dies with the thread that asked for that.
        self._supervisor = threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True)

    @property
    def pid(self) -> int:
        """Process id of the running engine."""
        if self._spawned is None:
            raise EngineError("the engine was not started")
        return self._spawned.process.pid

    def start(self) -> None:
        """Start the engine and wait until it is loaded.

        Raises:
            EngineError: it cannot be loaded; the message says why.
        """
        self._supervisor.start()
        self._started.result()

    def stop(self) -> None:
        """End the engine; calls that wait for it raise."""
        self._stopping.set()
        with self._lock:
            child = self._spawned
        if child is not None:
            child.process.kill()
        if self._supervisor.is_alive():
            self._supervisor.join()

    # ------------------------------------------------------------------ an engine like any other

    def open(self, segments: Sequence[Opening]) -> None:
        """Begin segments."""

        def enter() -> Sequence[Opening]:
            self._book.update((opening.key, _Open(opening)) for opening in segments)
            return segments

        self._ask(enter, lambda number, taken: Open(number, tuple(taken)), lambda opening: opening.key)

    def step(self, blocks: Sequence[Block]) -> Sequence[Hypothesis]:
        """Take blocks."""

        def enter() -> Sequence[Block]:
            sound = [block for block in blocks if not self._book[block.key].failure]
            for block in sound:
                self._book[block.key].blocks.append(block)
            return sound

        return self._ask(enter, lambda number, taken: Step(number, tuple(taken)), lambda block: block.key).hypotheses

    def finish(self, requests: Sequence[Finish]) -> Sequence[FinalText]:
        """Give finals; a segment that the engine cannot decode gets one without text that says why."""

        def enter() -> Sequence[Finish]:
            return [request for request in requests if not self._book[request.key].failure]

        answer = self._ask(enter, lambda number, taken: Settle(number, tuple(taken)), lambda request: request.key)
        finals = {final.key: final for final in answer.finals}
        return [finals.get(request.key) or self._given_up(request.key) for request in requests]

    def hotwords(self, version: str, folder: str, *, in_force: bool = True) -> None:
        """Make a list of hotwords known, to this engine and to any that takes its place."""

        def enter() -> Sequence[SegmentKey]:
            if version:
                self._hotwords.pop(version, None)
                self._hotwords[version] = folder
                while len(self._hotwords) > HOTWORD_VERSIONS_KEPT:
                    del self._hotwords[next(iter(self._hotwords))]
            if in_force:
                self._in_force = version
            return ()

        self._ask(enter, lambda number, _: Learn(number, version, folder, in_force), lambda key: key)

    def close(self, keys: Sequence[SegmentKey]) -> None:
        """Forget segments."""

        def enter() -> Sequence[SegmentKey]:
            for key in keys:
                self._book.pop(key, None)
            return keys

        self._ask(enter, lambda number, taken: Close(number, tuple(taken)), lambda key: key)

    def _ask(
        self, enter: Callable[[], Sequence[_T]], make: Callable[[int, Sequence[_T]], Request], key: Callable[[_T], SegmentKey]
    ) -> Answer:
        """Send a request and wait for its answer, across whatever befalls the engine.

        Args:
            enter: writes the request into the book, when there is an engine that knows all the rest; returns what to send.
            make: makes the request.
            key: the segment that an item is for.
        """
        with self._lock:
            while (child := self._child) is None:
                if self._failure is not None:
                    raise self._failure
                self._lock.wait()
            number = next(self._numbers)
            items = enter()
            call = _Call(make(number, items), tuple(map(key, items)), child, time.monotonic() + self._timeout_s)
            self._calls[number] = call
        child.send(call.request)
        return call.answer.result()

    def _given_up(self, key: SegmentKey) -> FinalText:
        failure = self._book[key].failure or "the engine gave no final"
        return FinalText(key=key, text="", raw_text="", words=(), confidence=0.0, language="", error=failure)

    # ------------------------------------------------------------------ its life

    def _supervise(self) -> None:
        try:
            child = self._spawn()
        except EngineError as refused:
            self._failure = refused
            self._started.set_exception(refused)
            return
        ready = child.ready
        self.name, self.model_digest = ready.name, ready.model_digest
        self.finals_lanes, self.finals_batch, self.blocks_at_once = ready.finals_lanes, ready.finals_batch, ready.blocks_at_once
        self._put_to_work(child)
        self._started.set_result(None)
        try:
            while not self._stopping.is_set():
                trouble = self._trouble(child)
                if trouble is not None:
                    child = self._replaced(child, *trouble)
        except EngineError as hopeless:
            if not self._stopping.is_set():
                log.error("%s", hopeless)  # noqa: TRY400 the cause is in the message
            self._give_up(hopeless)
        finally:
            if self._spawned is not None:
                self._spawned.kill()
            self._give_up(EngineError("the engine was stopped"))

    def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
        arena = Arena()
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED} | _ENVIRONMENT
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "agents.inference.serve", str(theirs.fileno()), str(os.getpid()), str(arena.descriptor)],
                pass_fds=[theirs.fileno(), arena.descriptor],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # standard output is the worker's
                env=environment,
            )
        finally:
            theirs.close()
        try:
            ours.settimeout(_START_TIMEOUT_S)
            ours.sendall(pack(self._spec))
            first = to_worker.decode(receive(ours))
            ours.settimeout(None)
        except (OSError, EOFError) as silent:
            status = process.poll()
            process.kill()
            ours.close()
            arena.close()
            if isinstance(silent, TimeoutError):
                raise EngineError(f"the engine was not loaded after {_START_TIMEOUT_S:.0f} s") from silent
            raise EngineError(
                f"the engine's process ended while it was loaded (exit status {process.wait() if status is None else status})"
            ) from None
        if not isinstance(first, Ready):
            process.wait()
            ours.close()
            arena.close()
            raise EngineError(first.reason if isinstance(first, Refused) else "the engine's process speaks another version's language")
        child = _Child(process, ours, arena, first, time.monotonic())
        with self._lock:
            self._spawned = child
        threading.Thread(target=self._read, args=(child,), name=f"engine-reader-{process.pid}", daemon=True).start()
        return child

    def _read(self, child: _Child) -> None:
        """Hand out a child's answers until it is gone."""
        while True:
            try:
                answer = to_worker.decode(receive(child.connection))
            except (EOFError, OSError):
                break
            except msgspec.DecodeError as garbled:
                log.error("the engine's process answered with what is no answer: %s", garbled)  # noqa: TRY400 the cause is in the message
                break
            if not isinstance(answer, Answer):
                continue
            child.arena.free(answer.number)
            with self._lock:
                call = self._calls.get(answer.number)
                if call is None:
                    continue
                if not answer.error or call.alone:
                    del self._calls[answer.number]
            if not answer.error:
                call.answer.set_result(answer)
            elif call.alone:
                call.answer.set_exception(_DownError(answer.error))
            else:
                self._troubles.put((child, call, answer.error))
        with self._lock:
            alone = [number for number, call in self._calls.items() if call.alone and call.child is child]
            for number in alone:
                self._calls.pop(number).answer.set_exception(_DownError("the engine's process died"))
        self._troubles.put((child, None, "the engine's process died"))

    def _trouble(self, child: _Child) -> tuple[Sequence[_Call], str] | None:
        """Wait a little; return what went wrong with the engine, if anything did: the calls at fault, and the cause."""
        try:
            troubled, at_fault, cause = self._troubles.get(timeout=_WATCH_S)
            if troubled is child:
                return ([] if at_fault is None else [at_fault]), cause
        except queue.Empty:
            pass
        now_s = time.monotonic()
        with self._lock:
            overdue = [call for call in self._calls.values() if call.deadline_s < now_s]
        return (overdue, f"the engine gave no answer for {self._timeout_s:g} s") if overdue else None

    def _replaced(self, child: _Child, at_fault: Sequence[_Call], cause: str) -> _Child:
        """Bring up a new engine in an old one's place, with everything that the old one knew.

        Raises:
            EngineError: it cannot be started any more, or the worker stops.
        """
        with self._lock:
            self._child = None
            calls, self._calls = list(self._calls.values()), {}
        self._bury(child, cause)
        for call in at_fault or calls:
            self._strike(call.keys, call.kind, cause, one_of_many=len(call.keys) > 1 or len(at_fault or calls) > 1)
        try:
            child = self._respawn()
            while not self._restore(child, calls):
                child = self._respawn()
        except EngineError as hopeless:
            for call in calls:
                call.answer.set_exception(hopeless)
            raise
        for call in calls:
            number = call.request.number
            call.answer.set_result(Answer(number, finals=tuple(call.finals.values())))
        self._put_to_work(child)
        return child

    def _bury(self, child: _Child, cause: str) -> None:
        status = child.kill()
        lived_s = time.monotonic() - child.born_s
        self._quick_deaths = 0 if lived_s >= _WELL_S else self._quick_deaths + 1
        self.restarts += 1
        if not self._stopping.is_set():
            log.warning("%s (exit status %d, after %.1f s); starting it again", cause, status, lived_s)

    def _respawn(self) -> _Child:
        for attempt in range(self._quick_deaths, self._quick_deaths + _FAILED_STARTS):
            wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (attempt - 1)) if attempt else 0.0
            if self._stopping.wait(wait_s):
                raise EngineError("the engine was stopped")
            try:
                return self._spawn()
            except EngineError as refused:
                failure = refused
                log.warning("the engine cannot be started: %s", refused)
        raise EngineError(f"the engine could not be started {_FAILED_STARTS} times in a row: {failure}")

    def _restore(self, child: _Child, calls: Iterable[_Call]) -> bool:
        """Give a new engine every open segment and every outstanding final, each alone; return False if one of them brought it down."""
        try:
            for version, folder in list(self._hotwords.items()):
                self._teach(child, version, folder)
            for key, entry in self._book.items():
                if not entry.failure:
                    self._alone(child, (key,), Replay(next(self._numbers), entry.opening, tuple(entry.blocks)))
            for call in calls:
                for request in call.request.requests if isinstance(call.request, Settle) else ():
                    if request.key not in call.finals and not self._book[request.key].failure:
                        answer = self._alone(child, (request.key,), Settle(next(self._numbers), (request,)))
                        call.finals[request.key] = answer.finals[0]
        except _DownError:
            return False
        return True

    def _teach(self, child: _Child, version: str, folder: str) -> None:
        """Let a new engine learn hotwords; give the list up if it brings engines down: finals that name it say that it is not known."""
        try:
            self._alone(child, (), Learn(next(self._numbers), version, folder, version == self._in_force))
        except _DownError as down:
            self._hotword_strikes[version] += 1
            if self._hotword_strikes[version] >= _STRIKES:
                with self._lock:
                    self._hotwords.pop(version, None)
                log.error("the hotwords %s are given up: %s", version, down)  # noqa: TRY400 the cause is in the message
            raise
        del self._hotword_strikes[version]

    def _alone(self, child: _Child, keys: tuple[SegmentKey, ...], request: Request) -> Answer:
        """Ask a new engine for one thing of one segment, or of none, and hold it against the segment if that brings the engine down."""
        call = _Call(request, keys, child, time.monotonic() + self._timeout_s, alone=True)
        with self._lock:
            self._calls[request.number] = call
        child.send(request)
        try:
            answer = call.answer.result(self._timeout_s)
        except (_DownError, TimeoutError) as down:
            cause = str(down) or f"the engine gave no answer for {self._timeout_s:g} s"
            with self._lock:
                self._calls.pop(request.number, None)
            self._strike(keys, call.kind, cause, one_of_many=False)
            self._bury(child, cause)
            raise _DownError(cause) from down
        for key in keys:
            self._book[key].strikes[call.kind] = 0
        return answer

    def _strike(self, keys: Iterable[SegmentKey], kind: _Kind, cause: str, *, one_of_many: bool) -> None:
        for key in keys:
            entry = self._book.get(key)
            if entry is not None and not (one_of_many and entry.strikes[kind] >= _STRIKES - 1):
                entry.strike(kind, cause)
                if entry.failure:
                    log.error("segment %d of session %s is given up: %s", key.segment, key.session_id, cause)

    def _put_to_work(self, child: _Child) -> None:
        with self._lock:
            self._child = child
            self._lock.notify_all()

    def _give_up(self, failure: EngineError) -> None:
        with self._lock:
            self._child = None
            self._failure = self._failure or failure
            calls, self._calls = list(self._calls.values()), {}
            self._lock.notify_all()
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(self._failure)
