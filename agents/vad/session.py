"""One session in the VAD: what each of its inputs means, and what follows from it.

The work on an input has three parts, so that detectors can work on all sessions at once: :meth:`Session.plan` takes the audio,
:class:`agents.vad.detectors.Detectors` decides the hops that became decidable, and :meth:`Session.follow` says what follows. All that
goes onto the flow is a function of the sequence of inputs; how they are spread over steps does not matter.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from agents.vad.decode import bytes_per_sample, decode
from agents.vad.detectors import Detectors, Listener
from agents.vad.front import RATES_HZ, SETTLE_SAMPLES, Front
from agents.vad.segmenter import Cancelled, Closed, CutReason, Event, Opened, Rules, Segmenter, Standing
from agents.vad.traditional import HOP_SAMPLES
from schemas.records import (
    SAMPLE_RATE_HZ,
    AudioFrame,
    Coverage,
    FlowRecord,
    FrameMark,
    FrameSpan,
    Gap,
    Heartbeat,
    SegmentCancelled,
    SegmentEnd,
    SegmentStart,
    SessionEnd,
    SessionRecord,
    SessionStart,
    SpeechChunk,
    Timeout,
)
from streams.core import Input, SessionKey, SessionState
from streams.errors import UserError
from streams.settings import Settings

__all__ = ["CHUNK_HOPS", "LONGEST_FILLED_GAP_SAMPLES", "LOOKAHEAD_SAMPLES", "Session", "SnapshotError"]

_log = logging.getLogger(__name__)

#: A chunk is for 20 hops, 200 ms.
CHUNK_HOPS: Final = 20
_CHUNK_SAMPLES: Final = CHUNK_HOPS * HOP_SAMPLES
#: Its audio reaches this much further: the last hop's window of 25 ms, less the hop.
LOOKAHEAD_SAMPLES: Final = 400 - HOP_SAMPLES
#: Longer gaps end the segment; after them all begins anew, instead of working through silence.
LONGEST_FILLED_GAP_SAMPLES: Final = 20 * SAMPLE_RATE_HZ

_US_PER_MS: Final = 1_000

# What a snapshot holds, before the detectors' states as float32: version, flags; expected sample, where the audio began, last capture
# in us, last append in ms, last offset; segment, next chunk; the segment's start, first and last speech, floor, cut; the listener's next
# hop, next window and probability; lengths of the two states.
_SNAPSHOT_VERSION: Final = 1
_SNAPSHOT: Final = struct.Struct("<BB5q2i5q2qf2H")
_STARTED, _HAS_AUDIO, _OPEN, _REST = 1, 2, 4, 8


class SnapshotError(UserError, ValueError):
    """A snapshot cannot be taken over; the message says why."""


@dataclass(slots=True)
class _Step:
    """What one input brought: followed once the hops up to ``hops_to`` are decided."""

    cause: Input
    #: Records to go before and after what the detectors bring about.
    before: list[SessionRecord] = field(default_factory=list)
    after: list[SessionRecord] = field(default_factory=list)
    #: The original audio reaches to this sample, decisions to this hop.
    original_to: int = 0
    hops_to: int = 0
    #: Why the audio ends with it, at ``original_to``.
    ending: CutReason | None = None
    #: The frame to be answered.
    frame: FrameSpan | None = None


@dataclass(frozen=True, slots=True)
class _Kept:
    """A frame that a restart could read from."""

    offset: int
    start_sample: int


class Session:
    """One session.

    Args:
        key: the session.
        settings: the configuration.
        detectors: those of all sessions.
    """

    def __init__(self, key: SessionKey, settings: Settings, detectors: Detectors) -> None:
        self.key: Final = key
        #: Whether its SessionStart was seen, and whether its end was.
        self.started = False
        self.over = False
        #: It moved to another worker: nothing is to be said of it any more.
        self.dropped = False
        #: Inputs to work on.
        self.inbox: Final[deque[Input]] = deque()

        self._settings = settings
        self._detectors = detectors
        self._denoise = settings.vad_denoise and settings.vad != "off"
        self._rules = Rules.of(settings)
        self._segmenter = Segmenter(self._rules)
        self._front: Front | None = None
        self._listener = detectors.start(0)
        self._loaded: SessionState | None = None

        self._expected = 0
        self._front_start = 0
        self._last_captured_us = 0
        self._last_appended_ms = 0
        self._last_offset = -1
        self._next_chunk = 0
        self._kept: deque[_Kept] = deque()
        self._had_audio = False

        self._steps: list[_Step] = []
        self._first_hop = 0

    # What the core does with it, in this order, until the inbox is empty.

    def plan(self) -> None:
        """Take inputs, up to one that ends the audio, so that the detectors can hear them."""
        self._steps = []
        while self.inbox and not (self._steps and self._steps[-1].ending):
            cause = self.inbox[0]
            if cause.warm:
                self._warm(cause)
            else:
                self._settle_in()
                step = self._meaning(cause)
                self._measure(step)
                self._steps.append(step)
                if step.ending == "gap":
                    continue  # the frame itself comes next, after what it ended
                self._last_offset = cause.offset
                if not isinstance(cause.record, Timeout):
                    self._last_appended_ms = cause.appended_ms
            self.inbox.popleft()
        self._first_hop = self._listener.next_hop

    def _measure(self, step: _Step) -> None:
        """Note how far the audio reaches now."""
        if self._front is not None:
            step.original_to = self._front.original.end
            decidable = self._detectors.decidable_hops(self._front.heard.end)
            step.hops_to = -(-step.original_to // HOP_SAMPLES) if step.ending else decidable

    @property
    def hearing(self) -> tuple[Listener, Front] | None:
        """Its listener and front for the detectors, if it has anything to be heard."""
        return (self._listener, self._front) if self._front is not None and self._steps else None

    def follow(self, decisions: NDArray[np.bool_] | None, said: dict[Input, list[SessionRecord]]) -> None:
        """Say what follows from the planned inputs.

        Args:
            decisions: those of the hops that the detectors have decided since :meth:`plan`, if there are any.
            said: the records that follow from each input, to be added to.
        """
        stamped_us = time.time_ns() // _US_PER_MS
        decisions = np.zeros(0, np.bool_) if decisions is None else decisions
        taken = 0
        for step in self._steps:
            records = said.setdefault(step.cause, [])
            to = max(taken, step.hops_to - self._first_hop)
            self._follow(step, self._first_hop + taken, decisions[taken:to], records)
            taken = to
            stamps = msgspec.structs.replace(step.cause.record.stamps, vad_us=stamped_us)
            records[:] = (msgspec.structs.replace(record, stamps=stamps) for record in records)
        self._steps = []
        self._forget()

    def snapshot(self) -> SessionState:
        """Return its state after the inputs so far."""
        if self._loaded is not None:
            return self._loaded
        standing, listener = self._segmenter.standing, self._listener
        flags = _STARTED * self.started | _HAS_AUDIO * (self._front is not None) | _OPEN * standing.open | _REST * standing.rest
        head = _SNAPSHOT.pack(
            _SNAPSHOT_VERSION,
            flags,
            *(self._expected, self._front_start, self._last_captured_us, self._last_appended_ms, self._last_offset),
            *(standing.segment, self._next_chunk),
            *(standing.start, standing.first_speech, standing.last_speech, standing.floor, standing.cut),
            *(listener.next_hop, listener.next_window, float(listener.probability)),
            *(len(listener.neural), len(listener.traditional)),
        )
        states = np.concatenate([listener.neural, listener.traditional]).astype("<f4").tobytes()
        next_offset = self._last_offset + 1
        read_from = self._kept[0].offset if self._kept else next_offset
        return SessionState(read_from_offset=read_from, from_offset=next_offset, state=head + (states if self._front else b""))

    def restore(self, loaded: SessionState) -> None:
        """Take over a state; the warm inputs that rebuild the audio follow.

        Raises:
            SnapshotError: it was written by another version, or is damaged.
        """
        state = loaded.state
        if not state or state[0] != _SNAPSHOT_VERSION:
            version = state[0] if state else "none"
            raise SnapshotError(
                f"The VAD's snapshot of session {self.key.session_id} has version {version}, and this program reads {_SNAPSHOT_VERSION}",
                "Run the version that wrote it until its sessions have ended.",
            )
        try:
            self._unpack(state)
        except (struct.error, ValueError) as damage:
            raise SnapshotError(f"The VAD's snapshot of session {self.key.session_id} is damaged: {damage}") from damage
        self._loaded = loaded

    def _unpack(self, state: bytes) -> None:
        _, flags, *fields = _SNAPSHOT.unpack_from(state)
        self._expected, self._front_start, self._last_captured_us, self._last_appended_ms, self._last_offset = fields[:5]
        segment, self._next_chunk, start, first_speech, last_speech, floor, cut = fields[5:12]
        next_hop, next_window, probability, neural_size, traditional_size = fields[12:]
        self.started = bool(flags & _STARTED)
        self._segmenter.standing = Standing(segment, bool(flags & _OPEN), start, first_speech, last_speech, bool(flags & _REST), floor, cut)
        self._had_audio = bool(flags & _HAS_AUDIO)
        states = np.frombuffer(state, "<f4", offset=_SNAPSHOT.size).astype(np.float32)
        if len(states) != neural_size + traditional_size:
            raise ValueError(f"it holds {len(states)} values of detectors instead of {neural_size + traditional_size}")
        listener = Listener(next_hop, next_window, np.float32(probability), states[:neural_size], states[neural_size:])
        self._listener = self._detectors.adopt(listener)
        if self._listener is not listener:
            _log.warning("Session %s goes on with other detectors than before: ASR_VAD has changed.", self.key.session_id)

    # Planning: what an input means.

    def _warm(self, cause: Input) -> None:
        """Rebuild the audio before the snapshot; nothing follows."""
        frame = cause.record
        if not isinstance(frame, AudioFrame) or not self._had_audio:
            return
        expected = self._front.end_sample if self._front else max(frame.position_samples, self._front_start)
        start, samples = _new_audio(frame, expected)
        if not len(samples):
            return
        if self._front is None:
            self._front = self._new_front(start)
        elif start > self._front.end_sample:
            self._front.silence(start - self._front.end_sample)
        self._push(cause, start, samples, frame.sample_rate_hz)

    def _settle_in(self) -> None:
        """Check, after a restart, that the warm inputs have brought back all the audio that is needed."""
        if self._loaded is None:
            return
        self._loaded = None
        if not self._had_audio:
            return
        needed = max(self._front_start, min(self._needed()))
        front = self._front
        if front and front.end_sample == self._expected and front.base_sample <= needed:
            return
        _log.warning(
            "Session %s: the audio before sample %d is gone from the log; silence stands for it.", self.key.session_id, self._expected
        )
        start = min(needed, self._expected)
        self._front = self._new_front(start)
        self._front.silence(self._expected - start)

    def _meaning(self, cause: Input) -> _Step:
        record = cause.record
        step = _Step(cause)
        if isinstance(record, AudioFrame):
            self._take_frame(record, step)
        elif not self.started or self.over:
            self._take_first(record, step)
        elif isinstance(record, Heartbeat):
            if self._is_idle(record):
                self._finish("timeout", step)
            step.after.append(record)
        elif isinstance(record, SessionEnd):
            self._finish("session_end", step)
            if record.position_samples > self._expected:
                step.after.append(self._gap(cause, record.position_samples))
            step.after.append(record)
            self.over = True
        elif isinstance(record, Timeout):
            if cause.appended_ms - self._last_appended_ms >= self._settings.session_lost_ms:
                self._finish("timeout", step)
                step.after.append(SessionEnd(**_identity(cause), position_samples=self._expected, reason="timeout"))
                self.over = True
        elif not isinstance(record, (SessionStart, Gap)):  # a start again says nothing; a gap shows in the next frame's position
            step.after.append(record)
        return step

    def _take_first(self, record: FlowRecord, step: _Step) -> None:
        """Take a record other than a frame outside the session's life: only a start means anything."""
        if isinstance(record, SessionStart) and not self.over:
            self.started = True
            self._expected = record.position_samples
            step.after.append(record)

    def _take_frame(self, frame: AudioFrame, step: _Step) -> None:
        step.frame = _span(frame)
        if not self.started or self.over:
            _log.warning("Session %s: audio outside the session's life is left out.", self.key.session_id)
            return
        if frame.sample_rate_hz not in RATES_HZ:
            _log.warning("Session %s: audio at %d Hz is left out; 8000 and 16000 are taken.", self.key.session_id, frame.sample_rate_hz)
            return
        start, samples = _new_audio(frame, self._expected)
        if not len(samples):
            return
        missing = start - self._expected
        if missing > LONGEST_FILLED_GAP_SAMPLES and self._front is not None:
            self._finish("gap", step)
            step.frame = None
            return
        if missing:
            step.before.append(self._gap(step.cause, start))
        if self._front is None:
            self._start_audio(start)
        elif missing:
            self._front.silence(missing)
        self._last_captured_us = frame.stamps.captured_us
        self._expected = self._push(step.cause, start, samples, frame.sample_rate_hz)

    def _push(self, cause: Input, start: int, samples: NDArray[np.float32], sample_rate_hz: int) -> int:
        """Give the front new audio, remember where it came from, and return where it ends."""
        front = self._front
        assert front is not None  # noqa: S101 - for the type checker
        if not self._kept or cause.record.position_samples == start:
            self._kept.append(_Kept(cause.offset, start))
        front.push(samples, sample_rate_hz)
        return front.end_sample

    def _new_front(self, start: int) -> Front:
        return Front(start, denoise=self._denoise, lookback_samples=self._detectors.lookback_samples)

    def _start_audio(self, start: int) -> None:
        self._front = self._new_front(start)
        self._front_start = start
        self._listener = self._detectors.start(self._front.base_sample)
        self._segmenter.restart(start)

    def _finish(self, reason: CutReason, step: _Step) -> None:
        """End the audio: all that was heard is decided, as if silence followed."""
        step.ending = reason
        if self._front is not None:
            self._front.finish(self._detectors.needed_samples(self._expected))

    def _is_idle(self, heartbeat: Heartbeat) -> bool:
        """Return whether the recorder lives but has sent no audio for long, by its own clock."""
        silent_us = heartbeat.stamps.captured_us - self._last_captured_us
        return self._front is not None and self._last_captured_us > 0 and silent_us >= self._settings.session_idle_ms * _US_PER_MS

    # Following: what comes of it.

    def _follow(self, step: _Step, first_hop: int, decisions: NDArray[np.bool_], said: list[SessionRecord]) -> None:
        said.extend(step.before)
        if self._front is not None:
            said.extend(self._segments(step, first_hop, decisions))
        if step.ending:
            self._front = None
            self._kept.clear()
        said.extend(step.after)
        if step.frame is not None:
            self._answer(step.cause, step.frame, said)

    def _segments(self, step: _Step, first_hop: int, decisions: NDArray[np.bool_]) -> Iterator[SessionRecord]:
        events = self._segmenter.advance(first_hop, decisions)
        if step.ending:
            events += self._segmenter.finish(step.original_to, step.ending)
        identity = _identity(step.cause)
        for event in events:
            yield from self._records(event, identity)
        standing = self._segmenter.standing
        if standing.open:
            to = min(step.original_to, self._segmenter.certain_end)
            yield from self._chunks(standing.segment, standing.start, to, identity, last=False)

    def _records(self, event: Event, identity: dict[str, Any]) -> Iterator[SessionRecord]:
        match event:
            case Opened(segment, start):
                self._next_chunk = 0
                yield SegmentStart(**identity, position_samples=start, segment=segment)
            case Closed(segment, start, end, reason):
                yield from self._chunks(segment, start, end, identity, last=True)
                yield SegmentEnd(**identity, position_samples=end, segment=segment, start_sample=start, reason=reason)
            case Cancelled(segment, start, speech_end, end):
                yield from self._chunks(segment, start, end, identity, last=False)
                yield SegmentCancelled(**identity, position_samples=speech_end, segment=segment, start_sample=start)

    def _chunks(self, segment: int, start: int, to: int, identity: dict[str, Any], *, last: bool) -> Iterator[SpeechChunk]:
        """Yield the chunks that are due: whole ones that lie before a sample with their lookahead, and if it is the end, what is left."""
        assert self._front is not None  # noqa: S101 - for the type checker
        while True:
            begin = start + self._next_chunk * _CHUNK_SAMPLES
            whole = begin + _CHUNK_SAMPLES + LOOKAHEAD_SAMPLES
            if begin >= to or (whole > to and not last):
                return
            pcm = self._front.original[begin : min(whole, to)]
            hops = min(CHUNK_HOPS, -(-(to - begin) // HOP_SAMPLES))
            yield SpeechChunk(
                **identity, position_samples=begin, segment=segment, chunk=self._next_chunk, hops=hops, pcm=pcm.astype("<i2").tobytes()
            )
            self._next_chunk += 1

    def _answer(self, cause: Input, frame: FrameSpan, said: list[SessionRecord]) -> None:
        """See that a frame is answered once: by the decoder if it brought it anything, or lies in a segment; else here, as silence."""
        for place in range(len(said) - 1, -1, -1):
            record = said[place]
            if isinstance(record, (SpeechChunk, SegmentEnd, SegmentCancelled)):
                said[place] = msgspec.structs.replace(record, frames=(frame,))
                return
        identity = _identity(cause)
        if self._segmenter.standing.open:
            said.append(FrameMark(**identity, position_samples=frame.start_sample, frames=(frame,)))
        else:
            end = frame.end_sample
            said.append(Coverage(**identity, position_samples=frame.start_sample, end_sample=end, decoded_to_sample=end, stage="vad"))

    def _gap(self, cause: Input, resumed_at: int) -> Gap:
        """Return the gap between what was expected and a sample, from which it goes on."""
        gap = Gap(**_identity(cause), position_samples=self._expected, missing_samples=resumed_at - self._expected)
        self._expected = resumed_at
        return gap

    # What is kept.

    def _needed(self) -> tuple[int, int]:
        """Return the first sample still needed of the original audio, and of what is heard."""
        standing = self._segmenter.standing
        hop = self._listener.next_hop
        original = self._segmenter.earliest_start(hop)
        if standing.open:
            original = min(original, standing.start + self._next_chunk * _CHUNK_SAMPLES)
        return original, self._detectors.needed_from_sample(self._listener)

    def _forget(self) -> None:
        if self._front is None or self._loaded is not None:
            return
        original, heard = self._needed()
        self._front.forget(original, heard)
        settled = min(original, heard) - SETTLE_SAMPLES
        while len(self._kept) > 1 and self._kept[1].start_sample <= settled:
            self._kept.popleft()


def _identity(cause: Input) -> dict[str, Any]:
    """Return the fields that every record about an input has from it."""
    record = cause.record
    return {"channel_id": record.channel_id, "session_id": record.session_id, "conversation_id": record.conversation_id}


def _span(frame: AudioFrame) -> FrameSpan:
    """Return where a frame lies, for its answer."""
    wire_samples = len(frame.payload) // bytes_per_sample(frame.encoding)
    samples = wire_samples * SAMPLE_RATE_HZ // frame.sample_rate_hz if frame.sample_rate_hz > 0 else 0
    return FrameSpan(
        start_sample=frame.position_samples,
        end_sample=frame.position_samples + samples,
        captured_us=frame.stamps.captured_us,
        enqueued_us=frame.stamps.enqueued_us,
    )


def _new_audio(frame: AudioFrame, expected: int) -> tuple[int, NDArray[np.float32]]:
    """Return where the part of a frame starts that was not heard before, and its samples at the frame's rate.

    Less than one sample on the wire between two frames is no gap.
    """
    if frame.sample_rate_hz not in RATES_HZ:
        return expected, np.zeros(0, np.float32)
    samples = decode(frame.payload, frame.encoding)
    step = SAMPLE_RATE_HZ // frame.sample_rate_hz
    repeated = max(0, (expected - frame.position_samples) // step)
    start = frame.position_samples + repeated * step
    return (expected if abs(start - expected) < step else start), samples[repeated:]
