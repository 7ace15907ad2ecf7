"""The engine's own process: ``python -m agents.inference.serve FD PARENT ARENA``. It knows nothing of Kafka or Faust.

It answers requests from the socket ``FD`` in lanes, one thread for the live ones and some for finals. It lives exactly as long as the
worker: it takes no signal from a terminal, and dies with its parent whatever happens.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import msgspec

from agents.inference.arena import Arena
from agents.inference.engine import Block, Engine
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
    to_engine,
)
from agents.inference.lifetime import live_as_long_as

__all__ = ["load", "main"]

log = logging.getLogger(__name__)

#: How far finals step back from what is live: with 50 channels on two cores, 96 instead of 93 % of the frames are answered within 300 ms.
_FINALS_NICE: Final = 4
_MOST_NICE: Final = 19

_Queue = queue.SimpleQueue[Request]


def load(spec: EngineSpec) -> Engine:
    """Make the engine that a spec names.

    Raises:
        Exception: whatever its import or its making raises.
    """
    module, _, name = spec.factory.partition(":")
    factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return cast("Engine", factory(**spec.options))


def main(arguments: list[str]) -> int:
    """Serve until the worker is gone."""
    live_as_long_as(int(arguments[1]))
    logging.basicConfig(level=logging.WARNING, format="engine: %(levelname)s: %(message)s")
    connection = socket.socket(fileno=int(arguments[0]))
    try:
        spec = msgspec.msgpack.decode(receive(connection), type=EngineSpec)
        engine = load(spec)
    except EOFError:
        return 0
    except Exception as refused:  # noqa: BLE001 its cause is the worker's to report
        connection.sendall(pack(Refused(_printable(str(refused)) or type(refused).__name__)))
        return 1
    _Lanes(engine, connection, Arena(int(arguments[2]))).run()
    # Threads may be deep in a decoding that nobody waits for any more.
    os._exit(0)


class _Lanes:
    """Threads that call the engine."""

    def __init__(self, engine: Engine, connection: socket.socket, arena: Arena) -> None:
        self._engine = engine
        self._connection = connection
        self._arena = arena
        self._sending = threading.Lock()
        self._live: _Queue = queue.SimpleQueue()
        self._finals: _Queue = queue.SimpleQueue() if engine.finals_lanes else self._live
        threading.Thread(target=self._serve, args=(self._live,), daemon=True).start()
        for _ in range(engine.finals_lanes):
            threading.Thread(target=self._serve_finals, daemon=True).start()

    def run(self) -> None:
        """Read requests until the worker is gone."""
        engine = self._engine
        self._send(pack(Ready(engine.name, engine.model_digest, engine.finals_lanes, engine.finals_batch, engine.blocks_at_once)))
        while True:
            try:
                request = self._arena.fetch(to_engine.decode(receive(self._connection)))
            except EOFError:
                return
            (self._finals if isinstance(request, Settle) else self._live).put(request)

    def _serve_finals(self) -> None:
        # Linux has a niceness for each thread; 0 is the calling one.
        os.setpriority(os.PRIO_PROCESS, 0, min(_MOST_NICE, os.getpriority(os.PRIO_PROCESS, 0) + _FINALS_NICE))
        self._serve(self._finals)

    def _serve(self, requests: _Queue) -> None:
        try:
            while True:
                request = requests.get()
                try:
                    answer = pack(self._answer(request))
                except Exception as failure:
                    log.exception("the engine failed")
                    answer = pack(Answer(request.number, error=_printable(f"{type(failure).__name__}: {failure}")))
                self._send(answer)
        except BaseException:
            # Without this lane its requests would never be answered: the worker is to see a death, not a silence.
            log.critical("a lane of the engine ended", exc_info=True)
            os._exit(1)

    def _answer(self, request: Request) -> Answer:
        number = request.number
        match request:
            case Open():
                self._engine.open(request.segments)
            case Step():
                return Answer(number, hypotheses=tuple(self._engine.step(request.blocks)))
            case Settle():
                return Answer(number, finals=tuple(self._engine.finish(request.requests)))
            case Close():
                self._engine.close(request.keys)
            case Replay():
                self._engine.open((request.opening,))
                for some in _in_steps(request.blocks, self._engine.blocks_at_once):
                    self._engine.step(some)
            case Learn():
                self._learn(request)
        return Answer(number)

    def _learn(self, request: Learn) -> None:
        """Let the engine learn hotwords. A list that cannot be had stops nobody: a final that names it will say so."""
        try:
            self._engine.hotwords(request.version, request.folder, in_force=request.in_force)
        except (OSError, ValueError) as refused:
            log.error("the hotwords %s cannot be used: %s", request.version, refused)  # noqa: TRY400 the cause is in the message

    def _send(self, frame: bytes) -> None:
        with self._sending:
            try:
                self._connection.sendall(frame)
            except OSError:
                os._exit(0)  # nobody is left to tell


def _printable(text: str) -> str:
    """Return a text as UTF-8 can carry it: half of a surrogate pair, as a broken file name has, cannot be sent."""
    return text.encode(errors="backslashreplace").decode()


def _in_steps(blocks: Sequence[Block], size: int) -> Iterator[Sequence[Block]]:
    return (blocks[start : start + size] for start in range(0, len(blocks), size))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
