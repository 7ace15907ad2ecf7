"""The features stage: speech chunks into feature blocks, all channels in one batch; every other record passes through unchanged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy.typing as npt

from schemas.records import FeatureBlock, SessionEnd, SpeechChunk, Stamps
from streams.core import Core, Emitter, Input, SessionKey, SessionState
from streams.settings import Settings

if TYPE_CHECKING:
    from agents.features.fbank import Fbank

__all__ = ["FeaturesCore"]

_Features = npt.NDArray[Any]

#: A step of 50 channels takes 2 ms on one thread; more would only wake each other up.
_TORCH_THREADS: Final = 1


class FeaturesCore(Core):
    """Stateless: a block is a function of its chunk alone.

    Args:
        settings: which features to compute, and whether the engine also wants the audio.
        emitter: takes what follows from the inputs.
    """

    def __init__(self, settings: Settings, emitter: Emitter) -> None:
        self._kind = settings.features
        self._wants_pcm = settings.wants_pcm
        self._emitter = emitter
        self._extract: Fbank | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._next_offsets: dict[SessionKey, int] = {}

    async def start(self) -> None:
        """Load the filterbank and compute once: the first FFT of a process takes 50 ms."""
        if self._kind == "none":
            return
        self._executor = ThreadPoolExecutor(1, "features")
        await asyncio.get_running_loop().run_in_executor(self._executor, self._load)

    async def stop(self) -> None:
        """Let go of the thread."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def load(self, key: SessionKey, state: SessionState) -> None:
        """Take over a session."""
        self._next_offsets[key] = state.from_offset

    def drop(self, key: SessionKey) -> None:
        """Forget a session."""
        self._next_offsets.pop(key, None)

    async def step(self, inputs: Sequence[Input]) -> None:
        """Turn all chunks into blocks at once; pass on the rest."""
        chunks = [each.record for each in inputs if isinstance(each.record, SpeechChunk) and not each.warm]
        features = iter(await self._compute(chunks))
        now_us = time.time_ns() // 1_000
        for each in inputs:
            if each.warm:
                continue
            record = each.record
            stamps = msgspec.structs.replace(record.stamps, features_us=now_us)
            if isinstance(record, SpeechChunk):
                self._emitter.emit(each, (self._block(record, next(features), stamps),))
            else:
                self._emitter.emit(each, (msgspec.structs.replace(record, stamps=stamps),))
            self._emitter.done(each)
            if isinstance(record, SessionEnd):
                self._next_offsets.pop(each.key, None)
            else:
                self._next_offsets[each.key] = each.offset + 1

    def snapshot(self, key: SessionKey) -> SessionState | None:
        """Return where a restart goes on: after the last input, with nothing to remember."""
        next_offset = self._next_offsets.get(key)
        return None if next_offset is None else SessionState(next_offset, next_offset, b"")

    def _load(self) -> None:
        import torch

        from agents.features.fbank import FRAME_SAMPLES, Fbank
        from agents.features.mfcc import Mfcc

        torch.set_num_threads(_TORCH_THREADS)
        make: Callable[[], Fbank] = Mfcc if self._kind == "mfcc" else Fbank
        self._extract = make()
        self._extract([bytes(2 * FRAME_SAMPLES)])

    async def _compute(self, chunks: Sequence[SpeechChunk]) -> Sequence[_Features | None]:
        """Return the features of each chunk, computed off the event loop."""
        if not chunks or self._kind == "none":
            return [None] * len(chunks)
        if self._extract is None:
            raise RuntimeError("the features stage was not started")
        pieces = [chunk.pcm for chunk in chunks]
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._extract, pieces)

    def _block(self, chunk: SpeechChunk, features: _Features | None, stamps: Stamps) -> FeatureBlock:
        return FeatureBlock(
            channel_id=chunk.channel_id,
            session_id=chunk.session_id,
            conversation_id=chunk.conversation_id,
            position_samples=chunk.position_samples,
            stamps=stamps,
            segment=chunk.segment,
            chunk=chunk.chunk,
            hops=chunk.hops,
            kind=self._kind,
            dims=0 if features is None else features.shape[1],
            features=b"" if features is None else features.astype("<f4", copy=False).tobytes(),
            pcm=chunk.pcm if self._wants_pcm else None,
            frames=chunk.frames,
        )
