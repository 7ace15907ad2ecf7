"""Payload bytes to samples: linear PCM and both laws of ITU-T G.711."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.records import Encoding

__all__ = ["FULL_SCALE", "bytes_per_sample", "decode", "to_int16"]

#: A 16-bit sample of this size is 1.0.
FULL_SCALE: Final = 32_768


def _mulaw_table() -> NDArray[np.float32]:
    """Return the value of each mu-law byte, in [-1, 1): sign, three bits of exponent, four of mantissa, all inverted (G.711, table 2a)."""
    code = ~np.arange(256, dtype=np.uint8)
    bias = 0x84
    magnitude = ((((code & 0x0F).astype(np.int32) << 3) + bias) << ((code & 0x70) >> 4)) - bias
    return (np.where(code & 0x80, -magnitude, magnitude) / FULL_SCALE).astype(np.float32)


def _alaw_table() -> NDArray[np.float32]:
    """Return the value of each A-law byte, in [-1, 1): even bits inverted, the lowest two of eight exponents linear (G.711, table 1a)."""
    code = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent = ((code & 0x70) >> 4).astype(np.int32)
    mantissa = (code & 0x0F).astype(np.int32) << 4
    magnitude = np.where(exponent == 0, mantissa + 0x08, (mantissa + 0x108) << np.maximum(exponent - 1, 0))
    return (np.where(code & 0x80, magnitude, -magnitude) / FULL_SCALE).astype(np.float32)


_G711: Final[dict[Encoding, NDArray[np.float32]]] = {"mulaw": _mulaw_table(), "alaw": _alaw_table()}


def bytes_per_sample(encoding: Encoding) -> int:
    """Return how many bytes of a payload hold one sample."""
    return 1 if encoding in _G711 else 2


def decode(payload: bytes, encoding: Encoding) -> NDArray[np.float32]:
    """Return the samples of a payload, in [-1, 1).

    An odd last byte of 16-bit PCM is half a sample and left out.

    Args:
        payload: the bytes as on the wire.
        encoding: how they are coded.

    Returns:
        float32, one value a sample.
    """
    if encoding == "pcm_s16le":
        samples = np.frombuffer(payload, "<i2", count=len(payload) // bytes_per_sample(encoding))
        return samples.astype(np.float32) / np.float32(FULL_SCALE)
    return _G711[encoding][np.frombuffer(payload, np.uint8)]


def to_int16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    """Return samples in [-1, 1) as 16-bit PCM, rounded, clipped; what :func:`decode` made of PCM comes back as it was."""
    rounded = np.rint(samples * np.float32(FULL_SCALE))
    clipped: NDArray[np.int16] = np.clip(rounded, -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)
    return clipped
