"""Continuous audio on many channels in real time, for a recogniser in this process: how late are its answers?

Frames come when they would be captured, each channel at a moment of its own within the frame. A frame's latency is the time from then until
the recogniser has decoded every block that the frame completes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ops.measure import Latency, latency_of
from schemas.records import SAMPLE_RATE_HZ

if TYPE_CHECKING:
    from agents.inference.conformer.engine import ConformerEngine

__all__ = ["BatchedRecogniser", "Load", "Recogniser", "SherpaRecogniser", "play", "speech_tracks"]

FRAME_SAMPLES: Final = SAMPLE_RATE_HZ // 5
#: A block's features need so much of the next frame: the last window is 25 ms long and the hop 10.
LOOKAHEAD_SAMPLES: Final = 240
_FRAME_S: Final = FRAME_SAMPLES / SAMPLE_RATE_HZ
_HOPS: Final = 20
#: The first second is not counted: everything is used for the first time.
_WARM_FRAMES: Final = 5
#: Whoever is so late has lost; there is no use in going on.
_HOPELESS_S: Final = 2.0
_FULL_SCALE: Final = 32_768.0


class Load(NamedTuple):
    """What a recogniser made of a load.

    Attributes:
        latency: of the frames.
        cpu_share: cores of processor time that were used, all threads of this process.
        finished: whether all frames were answered; a recogniser that fell behind for good is stopped.
    """

    latency: Latency
    cpu_share: float
    finished: bool

    def holds(self, p95_ms: float) -> bool:
        """Return whether 95 % of the frames were answered within some time."""
        return self.finished and self.latency.p95 is not None and self.latency.p95 <= p95_ms


class Recogniser(Protocol):
    """Takes frames in one thread and answers them in others."""

    def start(self, channels: int, answered: Callable[[int, int], None]) -> None:
        """Begin with new calls; ``answered`` is to hear of each channel and frame number."""

    def put(self, channel: int, number: int, pcm: NDArray[np.int16]) -> None:
        """Take a channel's next frame."""

    def stop(self) -> None:
        """End all calls, and threads; what waits is dropped."""

    def text(self, channel: int) -> str:
        """Return what was heard on a channel so far."""


@dataclass(slots=True)
class _Frames:
    """What waits on a channel."""

    waiting: deque[tuple[int, NDArray[np.int16]]]
    busy: bool = False


class BatchedRecogniser:
    """Our engine, without Kafka and without finals: features and live steps of whatever is ready, as large as it may be.

    Args:
        engine: of which ``close`` ends all calls.
        max_batch: the most channels to a step.
    """

    def __init__(self, engine: ConformerEngine, max_batch: int = 64) -> None:
        from agents.features.fbank import Fbank

        self._engine, self._max_batch = engine, max_batch
        self._fbank = Fbank()
        self._thread: threading.Thread | None = None
        self._texts: dict[int, str] = {}

    def start(self, channels: int, answered: Callable[[int, int], None]) -> None:
        """Open a segment for each channel."""
        from agents.inference.engine import Opening, SegmentKey

        self._keys = [SegmentKey(str(channel), 0) for channel in range(channels)]
        self._engine.open([Opening(key=key, start_sample=0) for key in self._keys])
        self._tails = [np.zeros(0, np.int16) for _ in range(channels)]
        self._chunks = [0] * channels
        self._texts = dict.fromkeys(range(channels), "")
        self._waiting: dict[int, deque[tuple[int, NDArray[np.int16]]]] = {}
        self._due = threading.Condition()
        self._stopping = False
        self._answered = answered
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, channel: int, number: int, pcm: NDArray[np.int16]) -> None:
        """Take a frame."""
        with self._due:
            self._waiting.setdefault(channel, deque()).append((number, pcm))
            self._due.notify()

    def stop(self) -> None:
        """End the calls."""
        if self._thread is None:
            return
        with self._due:
            self._stopping = True
            self._due.notify()
        self._thread.join()
        self._engine.close(self._keys)

    def text(self, channel: int) -> str:
        """Return the newest hypothesis."""
        return self._texts[channel]

    def _run(self) -> None:
        while True:
            with self._due:
                while not (self._waiting or self._stopping):
                    self._due.wait()
                if self._stopping:
                    return
                taken = []
                for channel in list(self._waiting)[: self._max_batch]:
                    frames = self._waiting.pop(channel)
                    taken.append((channel, *frames.popleft()))
                    if frames:
                        self._waiting[channel] = frames
            self._step(taken)
            for channel, number, _ in taken:
                self._answered(channel, number)

    def _step(self, taken: Sequence[tuple[int, int, NDArray[np.int16]]]) -> None:
        from agents.inference.engine import Block

        ready, pieces = [], []
        for channel, _, pcm in taken:
            heard = np.concatenate((self._tails[channel], pcm))
            if len(heard) >= FRAME_SAMPLES + LOOKAHEAD_SAMPLES:
                ready.append(channel)
                pieces.append(heard[: FRAME_SAMPLES + LOOKAHEAD_SAMPLES].tobytes())
                heard = heard[FRAME_SAMPLES:]
            self._tails[channel] = heard
        blocks = []
        for channel, features in zip(ready, self._fbank(pieces), strict=True):
            blocks.append(Block(key=self._keys[channel], chunk=self._chunks[channel], hops=_HOPS, features=features.tobytes()))
            self._chunks[channel] += 1
        if blocks:
            for hypothesis in self._engine.step(blocks):
                self._texts[int(hypothesis.key.session_id)] = hypothesis.text


class SherpaRecogniser:
    """sherpa-onnx with the same weights: streams one at a time, on several threads.

    Args:
        recogniser: a ``sherpa_onnx.OnlineRecognizer``.
        workers: threads that decode.
    """

    def __init__(self, recogniser: object, workers: int) -> None:
        self._recogniser: Any = recogniser
        self._workers = workers
        self._threads: list[threading.Thread] = []

    def start(self, channels: int, answered: Callable[[int, int], None]) -> None:
        """Create a stream for each channel."""
        self._streams = [self._recogniser.create_stream() for _ in range(channels)]
        self._frames = [_Frames(deque()) for _ in range(channels)]
        self._ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._answered = answered
        self._stopping = False
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(self._workers)]
        for thread in self._threads:
            thread.start()

    def put(self, channel: int, number: int, pcm: NDArray[np.int16]) -> None:
        """Take a frame."""
        frames = self._frames[channel]
        with self._lock:
            frames.waiting.append((number, pcm))
            if not frames.busy:
                frames.busy = True
                self._ready.put(channel)

    def stop(self) -> None:
        """End the streams."""
        self._stopping = True
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def text(self, channel: int) -> str:
        """Return the stream's text."""
        return str(self._recogniser.get_result(self._streams[channel]))

    def _run(self) -> None:
        recogniser = self._recogniser
        while (channel := self._ready.get()) is not None and not self._stopping:
            frames, stream = self._frames[channel], self._streams[channel]
            number, pcm = frames.waiting[0]
            stream.accept_waveform(SAMPLE_RATE_HZ, pcm.astype(np.float32) / _FULL_SCALE)
            while recogniser.is_ready(stream):
                recogniser.decode_stream(stream)
            recogniser.get_result(stream)
            with self._lock:
                frames.waiting.popleft()
                if frames.waiting:
                    self._ready.put(channel)
                else:
                    frames.busy = False
            self._answered(channel, number)


def speech_tracks(channels: int, seconds: float, seed: int = 0) -> list[NDArray[np.int16]]:
    """Return speech without long pauses for each channel, int16 at 16 kHz: bundled recordings, drawn for each channel."""
    from ops.demo.calls import clips, read_clip

    length = round(seconds * SAMPLE_RATE_HZ)
    tracks = []
    for channel in range(channels):
        rng = np.random.default_rng((seed, channel))
        track = np.zeros(0, np.int16)
        while len(track) < length:
            track = np.concatenate((track, read_clip(clips()[rng.integers(len(clips()))].file)))
        tracks.append(track[:length])
    return tracks


def play(recogniser: Recogniser, tracks: Sequence[NDArray[np.int16]], seed: int = 0) -> Load:
    """Play tracks to a recogniser in real time."""
    frames = min(map(len, tracks)) // FRAME_SAMPLES
    phases_s = np.random.default_rng(seed).permutation(len(tracks)) / len(tracks) * _FRAME_S
    due_s = np.add.outer(phases_s, _FRAME_S * np.arange(1, frames + 1))
    answered_s = np.full(due_s.shape, np.nan)
    order = np.stack(np.unravel_index(np.argsort(due_s, axis=None, kind="stable"), due_s.shape), 1)
    left = threading.Semaphore(0)

    def answered(channel: int, number: int) -> None:
        answered_s[channel, number] = time.perf_counter()
        left.release()

    recogniser.start(len(tracks), answered)
    try:
        with _cpu_share() as cpu:
            began_s = time.perf_counter() + _FRAME_S
            finished = _feed(recogniser, tracks, order, due_s + began_s, answered_s)
            finished = finished and all(left.acquire(timeout=_HOPELESS_S) for _ in range(due_s.size))
    finally:
        recogniser.stop()
    late_ms = 1_000 * (answered_s - due_s - began_s)[:, _WARM_FRAMES:]
    return Load(latency_of(late_ms[~np.isnan(late_ms)]), cpu(), finished)


def _feed(
    recogniser: Recogniser,
    tracks: Sequence[NDArray[np.int16]],
    order: NDArray[np.int64],
    due_s: NDArray[np.float64],
    answered_s: NDArray[np.float64],
) -> bool:
    """Put each frame when it is due; return False as soon as the recogniser has fallen behind for good."""
    behind = int(_HOPELESS_S / _FRAME_S)
    for channel, number in order.tolist():
        if number >= behind and np.isnan(answered_s[channel, number - behind]):
            return False
        wait_s = due_s[channel, number] - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        recogniser.put(channel, number, tracks[channel][number * FRAME_SAMPLES : (number + 1) * FRAME_SAMPLES])
    return True


@contextmanager
def _cpu_share() -> Iterator[Callable[[], float]]:
    """Yield what tells, afterwards, how many cores this process used."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    share = 0.0
    yield lambda: share
    share = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
