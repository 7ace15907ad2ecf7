"""What a session must remember besides audio, and its packed form, which travels with the offset commit."""

from __future__ import annotations

import zlib
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from agents.vad.detectors import Listener
from agents.vad.fusion import LONG_AGO
from agents.vad.inspection import Notes
from agents.vad.segmenter import Standing
from schemas.records import VersionChange
from streams.errors import UserError

__all__ = ["Memory", "SnapshotError", "pack", "unpack"]

#: Comes first in every snapshot; to be raised whenever the layout, or the meaning of any number in it, changes.
VERSION: Final = 3
#: What the release before this one wrote: the same without the versions in force, of which it knew none.
_READABLE: Final = (2, VERSION)


class SnapshotError(UserError, ValueError):
    """A snapshot cannot be taken over; the message says why."""


class Memory(msgspec.Struct, array_like=True):
    """All that a session knows of its past, besides the audio and where the detectors are.

    Attributes:
        started: whether its SessionStart was seen.
        expected: the sample that the next frame should start with.
        audio_start: where the audio that is being heard began: the session's start, or the end of a long gap or an idle time.
        last_captured_us: when the last audio was captured, by the recorder's clock.
        last_appended_ms: when the broker appended the last record.
        last_offset: the last input's offset.
        next_chunk: number of the open segment's next chunk.
        standing: where the segmenter stands.
        notes: what the inspection of the audio remembers.
        hotword_version: the hotwords in force; empty for none.
        model_digest: the model in force; empty for the worker's own.
    """

    started: bool = False
    expected: int = 0
    audio_start: int = 0
    last_captured_us: int = 0
    last_appended_ms: int = 0
    last_offset: int = -1
    next_chunk: int = 0
    standing: Standing = Standing()
    notes: Notes = Notes()
    hotword_version: str = ""
    model_digest: str = ""

    def put_in_force(self, change: VersionChange) -> None:
        """Remember a version that is in force from now on."""
        if change.kind == "model":
            self.model_digest = change.version
        else:
            self.hotword_version = change.version


class _PackedListener(msgspec.Struct, array_like=True):
    """Where the detectors are; their states are little-endian, float16 where that says the same, deflated, else float32."""

    next_hop: int
    next_heard: int
    opinions: bytes
    next_window: int
    probability: float
    neural: bytes
    traditional: bytes
    since: int | None = None
    confirmed: bool = False


class _Packed(msgspec.Struct, array_like=True):
    memory: Memory
    listener: _PackedListener | None


def pack(memory: Memory, listener: Listener | None) -> bytes:
    """Return a snapshot as exact bits; about 1,200 bytes with all detectors.

    Args:
        memory: what the session remembers.
        listener: where the detectors are; None between audio, where they start afresh.
    """
    hearing = None
    if listener is not None:
        states = _to_bytes(listener.neural), _to_bytes(listener.traditional)
        hearing = _PackedListener(
            listener.next_hop,
            listener.next_heard,
            listener.opinions.astype(np.uint8).tobytes(),
            listener.next_window,
            float(listener.probability),
            *states,
            listener.since,
            listener.confirmed,
        )
    return bytes([VERSION]) + msgspec.msgpack.encode(_Packed(memory, hearing))


def unpack(state: bytes) -> tuple[Memory, Listener | None]:
    """Return what :func:`pack` was given.

    Raises:
        SnapshotError: the snapshot was written by another version, or is damaged.
    """
    if not state or state[0] not in _READABLE:
        version = state[0] if state else "none"
        raise SnapshotError(
            f"A snapshot of the VAD has version {version}, and this program reads {VERSION}",
            "Run the version that wrote it until its sessions have ended.",
        )
    try:
        packed = msgspec.msgpack.decode(state[1:], type=_Packed)
        listener = None
        if (hearing := packed.listener) is not None:
            states = _from_bytes(hearing.neural), _from_bytes(hearing.traditional)
            opinions = np.frombuffer(hearing.opinions, np.uint8).astype(np.bool_)
            since, confirmed = hearing.since, hearing.confirmed
            if since is None:
                # Speech that is forwarded already goes on.
                confirmed = packed.memory.standing.open
                since = 0 if confirmed else LONG_AGO
            listener = Listener(
                hearing.next_hop,
                hearing.next_heard,
                opinions,
                hearing.next_window,
                np.float32(hearing.probability),
                *states,
                since,
                confirmed,
            )
    except (msgspec.MsgspecError, ValueError) as damage:
        raise SnapshotError(f"A snapshot of the VAD is damaged: {damage}") from damage
    return packed.memory, listener


_FORMATS: Final = {b"h": "<f2", b"f": "<f4"}
#: Half precision, signs and exponents first, then the rest, deflated: a tenth less.
_DEFLATED: Final = b"z"
_BEST: Final = 9


def _to_bytes(state: NDArray[np.float32]) -> bytes:
    with np.errstate(over="ignore"):  # what float16 cannot hold shows in the comparison
        half = state.astype(_FORMATS[b"h"])
    if np.array_equal(half.astype(np.float32).view(np.int32), state.view(np.int32)):
        high, low = (zlib.compress(plane.tobytes(), _BEST) for plane in half.view(np.uint8).reshape(-1, 2).T[::-1])
        deflated = _DEFLATED + len(high).to_bytes(2, "little") + high + low
        return min(deflated, b"h" + half.tobytes(), key=len)
    return b"f" + state.astype(_FORMATS[b"f"]).tobytes()


def _from_bytes(state: bytes) -> NDArray[np.float32]:
    if state[:1] == _DEFLATED:
        split = 3 + int.from_bytes(state[1:3], "little")
        try:
            high, low = (np.frombuffer(zlib.decompress(plane), np.uint8) for plane in (state[3:split], state[split:]))
        except zlib.error as damage:
            raise ValueError(str(damage)) from damage
        state = b"h" + np.stack([low, high], axis=1).tobytes()
    if state[:1] not in _FORMATS:
        raise ValueError("a state has no known format")
    return np.frombuffer(state[1:], _FORMATS[state[:1]]).astype(np.float32)
