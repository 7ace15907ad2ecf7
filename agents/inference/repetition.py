"""Decoders that lose the thread repeat themselves; this finds where."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np

__all__ = ["loop_start", "repeats_itself"]

#: Fewer tokens in a row are what people say: "no no no no", a digit four times.
_LOOP_TOKENS: Final = 12
#: A sentence is said twice, rarely three times.
_LOOP_TIMES: Final = 3
#: Whisper's own bound: text of 2.4 times the size of its deflate is repetition.
_COMPRESSION_RATIO: Final = 2.4


def loop_start(tokens: Sequence[int]) -> int | None:
    """Return where a loop begins: the number of tokens up to the end of the first of the repeated pieces; None if there is no loop.

    >>> loop_start([7, 1, 2, 3] + [1, 2, 3] * 3)
    4
    """
    ids = np.asarray(tokens)
    best: int | None = None
    for period in range(1, len(ids) // _LOOP_TIMES + 1):
        same = np.concatenate(([False], ids[period:] == ids[:-period], [False]))
        edges = np.flatnonzero(np.diff(same.astype(np.int8)))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            # Tokens start..end equal those a period earlier: with the first piece, that many in a row.
            length = end - start + period
            if length >= max(_LOOP_TOKENS, _LOOP_TIMES * period) and (best is None or start + period < best):
                best = int(start + period)
    return best


def repeats_itself(text: str) -> bool:
    """Return whether a text compresses too well to be speech; short ones never do."""
    raw = text.encode()
    return len(raw) > _COMPRESSION_RATIO * len(zlib.compress(raw))
