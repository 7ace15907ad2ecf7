"""What a worker and the processes of its own say to each other: MessagePack in frames of a length and a body, over a socket pair."""

from __future__ import annotations

import socket
import struct
from typing import Any, Final

import msgspec

from agents.inference.engine import Block, FinalText, Finish, Hypothesis, Opening, SegmentKey

__all__ = [
    "Answer",
    "Close",
    "Compile",
    "Compiled",
    "EngineSpec",
    "FromEngine",
    "FromWorker",
    "Learn",
    "Lodged",
    "LodgedReplay",
    "LodgedStep",
    "Open",
    "Ready",
    "Refused",
    "Replay",
    "Request",
    "Settle",
    "Step",
    "pack",
    "receive",
    "to_engine",
    "to_worker",
]

_LENGTH: Final = struct.Struct("<I")


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine to run.

    Attributes:
        factory: what makes it, ``module:callable``.
        options: its keyword arguments.
    """

    factory: str
    options: dict[str, Any] = {}


class Open(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Begin segments."""

    number: int
    segments: tuple[Opening, ...]


class Step(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Take blocks."""

    number: int
    blocks: tuple[Block, ...]


class Settle(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Give finals."""

    number: int
    requests: tuple[Finish, ...]


class Close(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Forget segments."""

    number: int
    keys: tuple[SegmentKey, ...]


class Replay(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Begin one segment and take all of its blocks so far, in one go."""

    number: int
    opening: Opening
    blocks: tuple[Block, ...]


class Learn(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Learn a list of hotwords, and perhaps let partials listen to it from now on."""

    number: int
    version: str
    folder: str
    in_force: bool = True


Request = Open | Step | Settle | Close | Replay | Learn


class Lodged(msgspec.Struct, frozen=True, array_like=True):
    """A block whose features and audio lie in shared memory, right behind those of the block before (``arena.py``)."""

    key: SegmentKey
    chunk: int
    hops: int
    features_bytes: int
    pcm_bytes: int
    quiet: bool


class LodgedStep(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A ``Step`` whose blocks lie in shared memory."""

    number: int
    blocks: tuple[Lodged, ...]


class LodgedReplay(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A ``Replay`` whose blocks lie in shared memory."""

    number: int
    opening: Opening
    blocks: tuple[Lodged, ...]


FromWorker = Request | LodgedStep | LodgedReplay


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The engine is loaded; the first word of its process."""

    name: str
    model_digest: str
    finals_lanes: int
    finals_batch: int
    blocks_at_once: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The engine cannot be loaded; the last word of its process."""

    reason: str


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What a request led to; ``error`` says why to nothing."""

    number: int
    hypotheses: tuple[Hypothesis, ...] = ()
    finals: tuple[FinalText, ...] = ()
    error: str = ""


FromEngine = Ready | Refused | Answer


class Compile(msgspec.Struct, frozen=True, array_like=True):
    """Compile these phrases, (phrase, boost) each, as a version."""

    version: str
    phrases: tuple[tuple[str, float], ...]


class Compiled(msgspec.Struct, frozen=True, array_like=True):
    """What became of a version.

    Attributes:
        version: which.
        folder: where it is, see ``Hotwords.load``; empty: nowhere, and ``error`` says why.
        phrases: different phrases in it.
        left_out: phrases that cannot be used.
        examples: some of those, each with the reason.
        fresh: whether it was compiled now; else an earlier one was found.
        took_ms: how long that took.
        error: why there is none.
    """

    version: str
    folder: str = ""
    phrases: int = 0
    left_out: int = 0
    examples: tuple[tuple[str, str], ...] = ()
    fresh: bool = True
    took_ms: int = 0
    error: str = ""


_encoder: Final = msgspec.msgpack.Encoder()
#: Decodes what the engine's process gets.
to_engine: Final = msgspec.msgpack.Decoder(FromWorker)
#: Decodes what the worker gets.
to_worker: Final = msgspec.msgpack.Decoder(FromEngine)


def pack(message: msgspec.Struct) -> bytes:
    """Return a message as a frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> bytearray:
    """Return the body of the next frame.

    Raises:
        EOFError: the other side is gone.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    body = bytearray(size)
    view = memoryview(body)
    done = 0
    while done < size:
        try:
            got = connection.recv_into(view[done:])
        except ConnectionError:
            got = 0
        if not got:
            raise EOFError
        done += got
    return body
