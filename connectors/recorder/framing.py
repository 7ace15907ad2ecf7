"""Cuts and gathers coded samples into frames with exact positions. Pure: no files, no clock, no Kafka."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from schemas.records import SAMPLE_RATE_HZ, Encoding
from streams.errors import UserError

__all__ = ["DEFAULT_FRAME_MS", "MAX_FRAME_MS", "MIN_FRAME_MS", "PCM_16K", "Frame", "Framer", "WireFormat", "frames_of", "record_ms"]

#: 100 to 200 ms keep the latency promise: longer frames wait too long for their last sample.
DEFAULT_FRAME_MS: Final = 200
MIN_FRAME_MS: Final = 20
MAX_FRAME_MS: Final = 500
#: Shorter frames are gathered to this: at 20 ms, 50 channels would be 2,500 records/s, and a stage's cost goes by the record.
_GATHERED_MS: Final = 100

_WIRE_RATES_HZ: Final = (8_000, SAMPLE_RATE_HZ)
_BYTES_PER_SAMPLE: Final[dict[Encoding, int]] = {"pcm_s16le": 2, "mulaw": 1, "alaw": 1}
_MS_PER_S: Final = 1_000


@dataclass(frozen=True, slots=True)
class WireFormat:
    """How samples travel: mono, 8 or 16 kHz.

    Raises:
        ValueError: another rate.
    """

    encoding: Encoding
    sample_rate_hz: int

    def __post_init__(self) -> None:
        if self.sample_rate_hz not in _WIRE_RATES_HZ:
            raise ValueError(f"audio travels at 8000 or 16000 Hz, not at {self.sample_rate_hz}")

    @property
    def bytes_per_sample(self) -> int:
        """How many bytes a sample takes."""
        return _BYTES_PER_SAMPLE[self.encoding]

    @property
    def positions_per_sample(self) -> int:
        """How far a sample advances the position, which counts 16 kHz samples: 2 at 8 kHz."""
        return SAMPLE_RATE_HZ // self.sample_rate_hz

    def __str__(self) -> str:
        name = {"pcm_s16le": "PCM16", "mulaw": "G.711 mu-law", "alaw": "G.711 A-law"}[self.encoding]
        return f"{name} {self.sample_rate_hz // _MS_PER_S} kHz"


#: What everything that is not 8 kHz G.711 becomes.
PCM_16K: Final = WireFormat("pcm_s16le", SAMPLE_RATE_HZ)


class Frame(NamedTuple):
    """A piece of a session's audio; positions count 16 kHz samples since the session began."""

    start_sample: int
    end_sample: int
    payload: bytes


def record_ms(frame_ms: int, *, gather: bool = True) -> int:
    """Return how much audio a record holds when a source delivers ``frame_ms`` at a time.

    Args:
        frame_ms: 20 to 500.
        gather: gather whole short frames until they hold at least 100 ms.

    Raises:
        UserError: outside of 20 to 500 ms.

    Examples:
        20 ms become 100, 30 become 120, 200 stay.
    """
    if not MIN_FRAME_MS <= frame_ms <= MAX_FRAME_MS:
        raise UserError(f"Frames of {frame_ms} ms are not accepted", f"Choose {MIN_FRAME_MS} to {MAX_FRAME_MS} ms; 100 to 200 are best.")
    return frame_ms * -(-_GATHERED_MS // frame_ms) if gather and frame_ms < _GATHERED_MS else frame_ms


class Framer:
    """Cuts chunks of any length into frames of one length; only the last may be shorter.

    It holds less than one frame and one chunk. Bytes that are no whole sample at the very end are dropped.

    Args:
        wire: how the chunks are coded.
        frame_ms: the length of a frame.
    """

    def __init__(self, wire: WireFormat, frame_ms: int) -> None:
        self._wire = wire
        self._frame_bytes = wire.sample_rate_hz * frame_ms // _MS_PER_S * wire.bytes_per_sample
        self._held = bytearray()
        self._position_samples = 0

    def push(self, chunk: bytes) -> Iterator[Frame]:
        """Take a chunk and yield the frames that it completes."""
        self._held += chunk
        whole = len(self._held) - len(self._held) % self._frame_bytes
        ready, self._held = bytes(self._held[:whole]), self._held[whole:]
        for start in range(0, whole, self._frame_bytes):
            yield self._frame(ready[start : start + self._frame_bytes])

    def flush(self) -> Iterator[Frame]:
        """Yield what is left, if there is any, as the last frame."""
        whole = len(self._held) - len(self._held) % self._wire.bytes_per_sample
        rest = bytes(self._held[:whole])
        self._held.clear()
        if rest:
            yield self._frame(rest)

    def _frame(self, payload: bytes) -> Frame:
        start = self._position_samples
        self._position_samples += len(payload) // self._wire.bytes_per_sample * self._wire.positions_per_sample
        return Frame(start, self._position_samples, payload)


def frames_of(chunks: Iterable[bytes], wire: WireFormat, frame_ms: int) -> Generator[Frame, None, None]:
    """Yield the frames of a session's whole audio, reading chunks only as they are needed.

    Where the chunks break off with an exception, that comes after the frames of what was read.
    """
    framer = Framer(wire, frame_ms)
    try:
        for chunk in chunks:
            yield from framer.push(chunk)
    except Exception:
        yield from framer.flush()
        raise
    yield from framer.flush()
