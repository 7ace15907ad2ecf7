"""A whole worker around a core that only counts, to prove the runtime: run it like ``faust -A streams worker``.

Each frame of a session is answered by a SpeechChunk that holds how many frames came before it and a digest over all of them, so a frame
lost, repeated, or taken out of order changes everything after it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence

from schemas.codec import Codec
from schemas.records import AudioFrame, SessionEnd, SpeechChunk
from streams import topics
from streams.application import StreamsApp
from streams.core import Emitter, Input, SessionKey, SessionState
from streams.settings import Settings, load_settings
from streams.stage import Route

ROUTE = Route("vad", topics.AUDIO, topics.SPEECH)


def following(count: int, digest: bytes, payload: bytes) -> tuple[int, bytes]:
    """Return the state after one more frame."""
    return count + 1, hashlib.blake2b(digest + payload, digest_size=8).digest()


class CountingCore:
    """Counts the frames of each session and digests them."""

    def __init__(self, settings: Settings, emitter: Emitter) -> None:
        self._emitter = emitter
        self._sessions: dict[SessionKey, tuple[int, bytes]] = {}
        self._next_offset: dict[SessionKey, int] = {}
        # How long a step takes, so that a worker can be killed with work in its hands.
        self._step_s = float(os.environ.get("COUNTING_STEP_S", "0"))
        # Inputs, as partition:offset, that are never done: work that a batcher or an engine still has.
        self._held = set(os.environ.get("COUNTING_HOLD", "").split())

    async def start(self) -> None:
        """Nothing to warm up."""

    async def stop(self) -> None:
        """Nothing to let go of."""

    def load(self, key: SessionKey, state: SessionState) -> None:
        self._sessions[key] = int.from_bytes(state.state[:8], "big"), state.state[8:]
        self._next_offset[key] = state.from_offset

    def drop(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)

    async def step(self, inputs: Sequence[Input]) -> None:
        time.sleep(self._step_s)  # noqa: ASYNC251 a worker that is busy with its step
        for each in inputs:
            count, digest = self._sessions.setdefault(each.key, (0, b""))
            record = each.record
            self._next_offset[each.key] = each.offset + 1
            if isinstance(record, AudioFrame):
                self._sessions[each.key] = following(count, digest, record.payload)
                chunk = SpeechChunk(
                    channel_id=record.channel_id,
                    session_id=record.session_id,
                    conversation_id=record.conversation_id,
                    position_samples=record.position_samples,
                    segment=0,
                    chunk=count,
                    hops=20,
                    pcm=self._sessions[each.key][1],
                )
                self._emitter.emit(each, [chunk])
            elif isinstance(record, SessionEnd):
                self._emitter.emit(each, [record])
                del self._sessions[each.key]
            if f"{each.key.partition}:{each.offset}" not in self._held:
                self._emitter.done(each)

    def snapshot(self, key: SessionKey) -> SessionState | None:
        if key not in self._sessions:
            return None
        count, digest = self._sessions[key]
        offset = self._next_offset[key]
        return SessionState(offset, offset, count.to_bytes(8, "big") + digest)


def build(settings: Settings) -> StreamsApp:
    """Build the worker's app."""
    app = StreamsApp(settings, Codec())
    stage, source = app.add_stage(ROUTE, CountingCore)

    @app.agent(source, name="counting")
    async def counting(stream):  # type: ignore[no-untyped-def]
        async for event in stream.events():
            await stage.accept(event)

    return app


if __name__ == "__main__":
    build(load_settings()).main()
