"""Real audio, calls made of it, and a core that is fed with them."""

from __future__ import annotations

import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from agents.vad.core import VadCore
from agents.vad.tiny.detector import TinyDetector
from schemas.records import (
    SAMPLE_RATE_HZ,
    AudioFrame,
    Coverage,
    Encoding,
    FlowRecord,
    FrameMark,
    FrameSpan,
    SessionEnd,
    SessionRecord,
    SessionStart,
    Stamps,
)
from streams.core import Input, SessionKey, SessionState
from streams.settings import load_settings

DATA = Path(__file__).parents[2] / "data"
STARTED_US = 1_700_000_000_000_000


def read(name: str) -> NDArray[np.int16]:
    """The samples of a 16-bit 16 kHz mono file of the test data."""
    with wave.open(str(DATA / name)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (SAMPLE_RATE_HZ, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


@dataclass
class Call:
    """A session as its recorder sends it."""

    session_id: str = "s1"
    partition: int = 0
    records: list[FlowRecord] = field(default_factory=list)
    position: int = 0

    @property
    def ids(self) -> dict[str, str]:
        return {"channel_id": f"ch-{self.session_id}", "session_id": self.session_id, "conversation_id": "call"}

    def captured_us(self, sample: int) -> int:
        return STARTED_US + sample * 1_000_000 // SAMPLE_RATE_HZ

    def start(self) -> Call:
        stamps = Stamps(captured_us=STARTED_US, enqueued_us=STARTED_US)
        self.records.append(
            SessionStart(**self.ids, position_samples=0, encoding="pcm_s16le", sample_rate_hz=SAMPLE_RATE_HZ, stamps=stamps)
        )
        return self

    def frame(self, payload: bytes, samples: int, encoding: Encoding = "pcm_s16le", rate_hz: int = SAMPLE_RATE_HZ) -> Call:
        """Add a frame of so many samples at 16 kHz."""
        end = self.position + samples
        stamps = Stamps(captured_us=self.captured_us(end), enqueued_us=self.captured_us(end) + 1_000)
        self.records.append(
            AudioFrame(
                **self.ids, position_samples=self.position, encoding=encoding, sample_rate_hz=rate_hz, payload=payload, stamps=stamps
            )
        )
        self.position = end
        return self

    def pcm(self, samples: NDArray[np.int16], frames: int | Sequence[int] = 3_200) -> Call:
        """Add 16 kHz audio in frames of a size, or of these sizes over and over."""
        sizes = [frames] if isinstance(frames, int) else list(frames)
        begin, turn = 0, 0
        while begin < len(samples):
            piece = samples[begin : begin + sizes[turn % len(sizes)]]
            self.frame(piece.astype("<i2").tobytes(), len(piece))
            begin, turn = begin + len(piece), turn + 1
        return self

    def g711(self, payload: bytes, frame_bytes: int, encoding: Encoding = "mulaw") -> Call:
        """Add 8 kHz G.711 in frames."""
        for begin in range(0, len(payload), frame_bytes):
            piece = payload[begin : begin + frame_bytes]
            self.frame(piece, 2 * len(piece), encoding, 8_000)
        return self

    def end(self) -> Call:
        stamps = Stamps(captured_us=self.captured_us(self.position))
        self.records.append(SessionEnd(**self.ids, position_samples=self.position, reason="hangup", stamps=stamps))
        return self

    @property
    def key(self) -> SessionKey:
        return SessionKey(self.partition, self.session_id)

    @property
    def inputs(self) -> list[Input]:
        return [Input(self.key, 10 * number, 1_000 + number, record) for number, record in enumerate(self.records)]


@cache
def tiny() -> TinyDetector:
    """The network, loaded once for all tests: it keeps nothing of what it heard."""
    return TinyDetector()


class Ear:
    """A core and all that it says."""

    def __init__(self, **settings: object) -> None:
        self.records: list[SessionRecord] = []
        self.causes: list[tuple[Input, SessionRecord]] = []
        self.finished: list[Input] = []
        made = load_settings(**settings)
        self.core = VadCore(made, self, tiny() if made.vad in ("fusion", "tiny") else None)

    def emit(self, cause: Input, records: Sequence[SessionRecord]) -> None:
        assert cause not in self.finished
        for record in records:
            assert record.stamps.vad_us > 0
            assert (record.stamps.captured_us, record.stamps.enqueued_us) == (
                cause.record.stamps.captured_us,
                cause.record.stamps.enqueued_us,
            )
            stamps = msgspec.structs.replace(record.stamps, vad_us=0)
            unstamped = msgspec.structs.replace(record, stamps=stamps)
            self.records.append(unstamped)
            self.causes.append((cause, unstamped))

    def done(self, cause: Input) -> None:
        assert cause not in self.finished
        self.finished.append(cause)

    async def hear(self, inputs: Sequence[Input], step: int = 1) -> Ear:
        for begin in range(0, len(inputs), step):
            await self.core.step(inputs[begin : begin + step])
        return self

    async def resume(self, inputs: Sequence[Input], state: SessionState, until: int | None = None) -> Ear:
        """Take a session over and hear on, as a restarted worker would."""
        key = inputs[0].key
        self.core.load(key, state)
        warm = [
            Input(key, each.offset, each.appended_ms, each.record, warm=True)
            for each in inputs
            if state.read_from_offset <= each.offset < state.from_offset
        ]
        live = [each for each in inputs if each.offset >= state.from_offset]
        await self.hear([*warm, *live[:until]])
        return self

    def of(self, *kinds: type) -> list[SessionRecord]:
        return [record for record in self.records if isinstance(record, kinds)]


def essence(records: Sequence[SessionRecord]) -> list[SessionRecord]:
    """What must not depend on framing: everything but answers to frames and stamps."""
    kept = []
    for record in records:
        if isinstance(record, (FrameMark, Coverage)):
            continue
        bare = msgspec.structs.replace(record, stamps=Stamps())
        kept.append(msgspec.structs.replace(bare, frames=()) if hasattr(bare, "frames") else bare)
    return kept


def answers(records: Sequence[SessionRecord]) -> list[tuple[int, int, str]]:
    """Every answer to a frame: its span, and who gives it."""
    found = []
    for record in records:
        if isinstance(record, Coverage):
            found.append((record.position_samples, record.end_sample, record.stage))
        spans: Sequence[FrameSpan] = getattr(record, "frames", ())
        found += [(span.start_sample, span.end_sample, "inference") for span in spans]
    return found


@pytest.fixture(scope="session")
def speech() -> NDArray[np.int16]:
    """Three utterances with kitchen noise and near silence between them, 20 s."""
    rng = np.random.default_rng(7)
    quiet = (rng.normal(0, 6, 12_345)).astype("<i2")
    return np.concatenate(
        [
            read("en/goforward.wav"),
            read("noise/doing_the_dishes_4s.wav")[:30_000] // 2,
            read("en/librispeech_1995-1837-0001.wav"),
            quiet,
            read("zh/aishell1_BAC009S0724W0121.wav"),
        ]
    )


@pytest.fixture(scope="session")
def prompt() -> bytes:
    """A telephone prompt, 5.5 s of 8 kHz mu-law."""
    import av

    with av.open(str(DATA / "telephone/thanks_mulaw_8k.wav")) as file:
        return b"".join(bytes(packet) for packet in file.demux(audio=0))


@pytest.fixture
def call() -> Callable[..., Call]:
    """Makes calls."""
    return Call


@pytest.fixture
def ear() -> Callable[..., Ear]:
    """Makes cores with a memory of what they said."""
    return Ear


@pytest.fixture
def load() -> Callable[[str], NDArray[np.int16]]:
    """Reads a file of the test data."""
    return read


@pytest.fixture(name="essence")
def _essence() -> Callable[[Sequence[SessionRecord]], list[SessionRecord]]:
    return essence


@pytest.fixture(name="answers")
def _answers() -> Callable[[Sequence[SessionRecord]], list[tuple[int, int, str]]]:
    return answers
