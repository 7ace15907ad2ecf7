"""Sessions as the VAD and features stages make them, and an emitter that holds the core to its contract."""

from __future__ import annotations

import asyncio
import wave
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from schemas.records import (
    Coverage,
    FeatureBlock,
    FlowRecord,
    FrameMark,
    FrameSpan,
    Gap,
    SegmentCancelled,
    SegmentEnd,
    SegmentStart,
    SessionEnd,
    SessionRecord,
    SessionStart,
    Stamps,
    Transcript,
)
from streams.core import Input, SessionKey

DATA = Path(__file__).parents[2] / "data"
BLOCK_SAMPLES = 3_200


@dataclass
class Emitted:
    """Keeps what a core emits, and fails on what the contract forbids."""

    records: list[tuple[Input, SessionRecord]] = field(default_factory=list)
    settled: list[Input] = field(default_factory=list)

    def emit(self, cause: Input, records: Sequence[SessionRecord]) -> None:
        assert cause not in self.settled, "a record for an input that is done"
        self.records += [(cause, record) for record in records]

    def done(self, cause: Input) -> None:
        assert cause not in self.settled, "an input is done twice"
        self.settled.append(cause)

    def of(self, kind: type[SessionRecord], session: str = "") -> list[Any]:
        return [record for _, record in self.records if type(record) is kind and session in ("", record.session_id)]

    def finals(self, session: str = "") -> list[Transcript]:
        return self.of(Transcript, session)

    async def settle(self, inputs: Sequence[Input]) -> None:
        """Wait until every input is done."""
        while len(self.settled) < len(inputs):  # noqa: ASYNC110 as an outsider
            await asyncio.sleep(0.002)
        assert set(self.settled) == set(inputs)


@dataclass
class Flow:
    """Writes one session's records, one after the other."""

    session: str = "s"
    records: list[FlowRecord] = field(default_factory=list)
    position: int = 0
    segment: int = 0
    start: int = 0
    chunk: int = 0

    def add(self, kind: type[FlowRecord], /, **fields: Any) -> None:
        fields.setdefault("position_samples", self.position)
        stamps = Stamps(captured_us=1_000_000 + self.position * 125 // 2, vad_us=1, features_us=2)
        ids = {"channel_id": f"channel-{self.session}", "session_id": self.session, "conversation_id": "call"}
        self.records.append(kind(**ids, ordinal=len(self.records), stamps=stamps, **fields))

    def begin(self, **fields: Any) -> None:
        self.add(SessionStart, encoding="pcm_s16le", sample_rate_hz=16_000, **fields)

    def silence(self, samples: int) -> None:
        self.position += samples

    def gap(self, samples: int) -> None:
        self.add(Gap, missing_samples=samples)
        self.position += samples

    def begin_segment(self) -> None:
        self.add(SegmentStart, segment=self.segment)
        self.start, self.chunk = self.position, 0

    def span(self, samples: int) -> tuple[FrameSpan, ...]:
        return (FrameSpan(start_sample=self.position, end_sample=self.position + samples, captured_us=7, enqueued_us=8),)

    def block(self, pcm: bytes | None = None, hops: int = 20) -> None:
        if pcm is None:
            seed = self.position + 1_000_003 * sum(self.session.encode())
            pcm = np.random.default_rng(seed).integers(-9_000, 9_000, 160 * hops + 240, dtype=np.int16).tobytes()
        frames = self.span(160 * hops)
        self.add(FeatureBlock, segment=self.segment, chunk=self.chunk, hops=hops, kind="none", dims=0, features=b"", pcm=pcm, frames=frames)
        self.position += 160 * hops
        self.chunk += 1

    def mark(self, samples: int = 320) -> None:
        self.add(FrameMark, frames=self.span(samples))

    def end_segment(self, reason: str = "pause", hotword_version: str = "") -> None:
        self.add(SegmentEnd, segment=self.segment, start_sample=self.start, reason=reason, hotword_version=hotword_version)
        self.segment += 1

    def cancel_segment(self) -> None:
        frames = self.span(320)
        self.position += 320
        self.add(SegmentCancelled, segment=self.segment, start_sample=self.start, frames=frames)
        self.segment += 1

    def speech(self, samples: np.ndarray) -> None:
        """Write one segment of real audio."""
        self.begin_segment()
        for start in range(0, len(samples), BLOCK_SAMPLES):
            piece = samples[start : start + BLOCK_SAMPLES + 240]
            self.block(piece.tobytes(), hops=-(-min(BLOCK_SAMPLES, len(samples) - start) // 160))
        self.position = self.start + len(samples)
        self.end_segment()

    def end(self, reason: str = "hangup") -> None:
        self.add(SessionEnd, reason=reason)


def speech(name: str) -> np.ndarray:
    """Return a test file's samples."""
    with wave.open(str(DATA / name)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")


def interleaved(*flows: Flow) -> list[Input]:
    """Return the records of several sessions as one stage reads them."""
    longest = max(len(flow.records) for flow in flows)
    turns = [flow.records[turn] for turn in range(longest) for flow in flows if turn < len(flow.records)]
    return [Input(SessionKey(0, record.session_id), offset, 0, record) for offset, record in enumerate(turns)]


def covered(emitted: Emitted, session: str) -> list[tuple[int, int]]:
    """Return which frames of a session were answered, in the order of the answers."""
    return [(record.position_samples, record.end_sample) for record in emitted.of(Coverage, session)]


@pytest.fixture
def call() -> SimpleNamespace:
    """What a test writes its calls with: ``flow``, ``emitted``, ``interleaved``, ``covered``, ``speech``."""
    return SimpleNamespace(flow=Flow, emitted=Emitted, interleaved=interleaved, covered=covered, speech=speech)


@pytest.fixture
def misbehaving(monkeypatch: pytest.MonkeyPatch) -> str:
    """The factory of the engine in ``misbehaving.py``, which processes can then import."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return "misbehaving:MisbehavingEngine"
