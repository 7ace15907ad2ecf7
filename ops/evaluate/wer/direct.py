"""A Conformer without the system around it: no detector, no Kafka; whole utterances in the engine, hearing more or less around them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agents.features.fbank import Fbank
from agents.inference.conformer.engine import ConformerEngine, ConformerOptions
from agents.inference.engine import Block, FinalText, Finish, Opening, SegmentKey

__all__ = ["CONTEXTS", "decode", "recognise"]

#: Encoder frames of 40 ms to a block, and blocks of the past; a block of 800 is longer than any utterance: all is heard at once.
CONTEXTS: Final[dict[str, tuple[int, int]]] = {
    "blocks of 200 ms, 1.6 s back": (5, 8),
    "blocks of 200 ms, 3.2 s back": (5, 16),
    "blocks of 800 ms, 3.2 s back": (20, 4),
    "blocks of 4 s, 16 s back (finals)": (100, 4),
    "everything": (800, 0),
}
_HOP_SAMPLES: Final = 160
_HOPS_IN_BLOCK: Final = 20
_FULL_SCALE: Final = 32_767.0


def decode(model_dir: Path, options: ConformerOptions, utterances: Sequence[NDArray[np.float32]]) -> tuple[list[str], list[str]]:
    """Return the last partial and the final of each utterance.

    Args:
        model_dir: a WeNet model directory.
        options: how to recognise.
        utterances: float32 in [-1, 1) at 16 kHz.
    """
    engine = ConformerEngine(model_dir, options)
    partials, finals = [], []
    for samples in utterances:
        pcm = np.clip(np.round(samples * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE).astype(np.int16)
        partial, final = recognise(engine, pcm)
        partials.append(partial)
        finals.append(final.raw_text)
    return partials, finals


def recognise(engine: ConformerEngine, pcm: NDArray[np.int16], hotword_version: str = "") -> tuple[str, FinalText]:
    """Return the last partial and the final of an utterance, as one segment, block after block.

    Args:
        engine: which no other utterance is in.
        pcm: int16 at 16 kHz.
        hotword_version: the list that the final is to name.
    """
    (features,) = Fbank()([pcm.astype("<i2").tobytes()])
    key = SegmentKey("alone", 0)
    engine.open([Opening(key=key, start_sample=0)])
    partial = ""
    for chunk, first in enumerate(range(0, len(features), _HOPS_IN_BLOCK)):
        piece = np.ascontiguousarray(features[first : first + _HOPS_IN_BLOCK])
        block = Block(key=key, chunk=chunk, hops=len(piece), features=piece.astype("<f4").tobytes())
        for hypothesis in engine.step([block]):
            partial = hypothesis.text
    finish = Finish(key=key, end_sample=len(features) * _HOP_SAMPLES, hotword_version=hotword_version)
    (final,) = engine.finish([finish])
    engine.close([key])
    return partial, final
