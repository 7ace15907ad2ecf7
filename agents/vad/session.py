"""One session in the VAD: what each of its inputs means, and what follows from it.

The work on an input has three parts, so that detectors can work on all sessions at once: :meth:`Session.plan` takes the audio,
:class:`agents.vad.detectors.Detectors` decides the hops that became decidable, and :meth:`Session.follow` says what follows. All that
goes onto the flow is a function of the sequence of inputs; how they are spread over steps does not matter.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from agents.vad.decode import bytes_per_sample, decode
from agents.vad.detectors import Channel, Detectors, Thresholds
from agents.vad.front import RATES_HZ, SETTLE_SAMPLES, Front, Track
from agents.vad.inspection import BLOCK_SAMPLES, Inspector
from agents.vad.segmenter import Cancelled, Closed, CutReason, Event, Opened, Rules, Segmenter
from agents.vad.snapshot import Memory, pack, unpack
from agents.vad.spectrum import HOP_SAMPLES
from schemas.records import (
    SAMPLE_RATE_HZ,
    AudioFlag,
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
    VersionChange,
)
from streams.core import Input, SessionKey, SessionState
from streams.settings import Settings

__all__ = ["CHUNK_HOPS", "LONGEST_FILLED_GAP_SAMPLES", "LOOKAHEAD_SAMPLES", "Session"]

_log = logging.getLogger(__name__)

#: A chunk is for 20 hops, 200 ms.
CHUNK_HOPS: Final = 20
_CHUNK_SAMPLES: Final = CHUNK_HOPS * HOP_SAMPLES
#: Its audio reaches this much further: the last hop's window of 25 ms, less the hop.
LOOKAHEAD_SAMPLES: Final = 400 - HOP_SAMPLES
#: Longer gaps end the segment; after them all begins anew, instead of working through silence.
LONGEST_FILLED_GAP_SAMPLES: Final = 20 * SAMPLE_RATE_HZ

_US_PER_MS: Final = 1_000

_Audio = Track[np.int16]


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
    #: What is in force from here on.
    change: VersionChange | None = None


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
        #: Whether its end was seen.
        self.over = False
        #: It moved to another worker: nothing is to be said of it any more.
        self.dropped = False
        #: Inputs to work on.
        self.inbox: Final[deque[Input]] = deque()

        self._settings = settings
        self._detectors = detectors
        self._thresholds = Thresholds.of(settings)
        self._segmenter = Segmenter(Rules.of(settings))
        self._channel_id: str | None = None
        self._inspector = Inspector()
        self._memory = Memory()
        self._complaints: set[str] = set()

        # The audio, where the detectors are with it, and the frames from which a restart could read it; none between audio.
        self._front: Front | None = None
        self._listener = detectors.start(0)
        self._kept: deque[_Kept] = deque()
        # A state that was taken over, until the first input after its warm ones; and whether there was audio in it.
        self._loaded: SessionState | None = None
        self._had_audio = False

        self._steps: list[_Step] = []
        self._first_hop = 0

    @property
    def started(self) -> bool:
        """Whether its SessionStart was seen."""
        return self._memory.started

    # What the core does with it, in this order, until the inbox is empty.

    def plan(self) -> None:
        """Take inputs, up to one that ends the audio, so that the detectors can hear them."""
        self._steps = []
        while self.inbox and not (self._steps and self._steps[-1].ending):
            cause = self.inbox[0]
            self._heed(cause.record.channel_id)
            if cause.warm:
                self._warm(cause)
            else:
                self._settle_in()
                step = self._meaning(cause)
                self._measure(step)
                self._steps.append(step)
                if step.ending == "gap":
                    continue  # the frame itself comes next, after what it ended
                self._memory.last_offset = cause.offset
                if not isinstance(cause.record, (Timeout, VersionChange)):  # those are not the recorder's
                    self._memory.last_appended_ms = cause.appended_ms
            self.inbox.popleft()
        self._first_hop = self._listener.next_hop

    def _heed(self, channel_id: str) -> None:
        """Put what is configured for the channel into force."""
        if channel_id != self._channel_id:
            self._channel_id = channel_id
            self._settings = self._settings.for_channel(channel_id)
            self._thresholds = Thresholds.of(self._settings)
            self._segmenter.rules = Rules.of(self._settings)

    def _measure(self, step: _Step) -> None:
        """Note how far the audio reaches now."""
        if self._front is not None:
            step.original_to = self._front.original.end
            decidable = self._detectors.decidable_hops(self._front.heard.end)
            step.hops_to = -(-step.original_to // HOP_SAMPLES) if step.ending else decidable

    @property
    def hearing(self) -> Channel | None:
        """What the detectors need of it, if it has anything to be heard."""
        if self._front is None or not self._steps:
            return None
        return Channel(self._listener, self._front.heard, self._thresholds)

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
        self._memory.standing = self._segmenter.standing
        self._memory.notes = self._inspector.notes
        next_offset = self._memory.last_offset + 1
        return SessionState(
            read_from_offset=self._kept[0].offset if self._kept else next_offset,
            from_offset=next_offset,
            state=pack(self._memory, self._listener if self._front is not None else None),
        )

    def restore(self, loaded: SessionState) -> None:
        """Take over a state; the warm inputs that rebuild the audio follow.

        Raises:
            SnapshotError: it was written by another version, or is damaged.
        """
        self._memory, listener = unpack(loaded.state)
        self._segmenter.standing = self._memory.standing
        self._inspector.notes = self._memory.notes
        self._loaded = loaded
        self._had_audio = listener is not None
        if listener is not None:
            self._listener = self._detectors.adopt(listener)
            if self._listener is not listener:
                self._complain("it goes on with other detectors than before: ASR_VAD has changed")

    # Planning: what an input means.

    def _warm(self, cause: Input) -> None:
        """Rebuild the audio before the snapshot; nothing follows."""
        frame = cause.record
        if not isinstance(frame, AudioFrame) or not self._had_audio:
            return
        expected = self._front.end_sample if self._front else max(frame.position_samples, self._memory.audio_start)
        start, samples = _new_audio(frame, expected)
        if not len(samples):
            return
        self._front = self._front or self._new_front(start)
        self._front.silence(start - self._front.end_sample)
        self._push(self._front, cause, start, samples)

    def _settle_in(self) -> None:
        """Check, after a restart, that the warm inputs have brought back all the audio that is needed."""
        if self._loaded is None:
            return
        self._loaded = None
        if not self._had_audio:
            return
        needed = max(self._memory.audio_start, min(self._needed()))
        front = self._front
        if front and front.end_sample == self._memory.expected and front.base_sample <= needed:
            return
        self._complain(f"the audio before sample {self._memory.expected} is gone from the log; silence stands for it")
        start = min(needed, self._memory.expected)
        self._front = self._new_front(start)
        self._front.silence(self._memory.expected - start)

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
            if record.position_samples > self._memory.expected:
                step.after.append(self._gap(cause, record.position_samples))
            step.after.append(record)
            self.over = True
        elif isinstance(record, Timeout):
            if cause.appended_ms - self._memory.last_appended_ms >= self._settings.session_lost_ms:
                self._finish("timeout", step)
                step.after.append(SessionEnd(**_identity(cause), position_samples=self._memory.expected, reason="timeout"))
                self.over = True
        elif isinstance(record, VersionChange):
            step.change = record
            step.after.append(record)
        elif not isinstance(record, (SessionStart, Gap)):  # a start again says nothing; a gap shows in the next frame's position
            step.after.append(record)
        return step

    def _take_first(self, record: FlowRecord, step: _Step) -> None:
        """Take a record other than a frame outside the session's life: only a start means anything."""
        if isinstance(record, SessionStart) and not self.over:
            self._memory.started = True
            self._memory.expected = record.position_samples
            step.after.append(record)

    def _take_frame(self, frame: AudioFrame, step: _Step) -> None:
        step.frame = _span(frame)
        if not self.started or self.over:
            self._complain("audio before its start or after its end is left out")
            return
        if frame.sample_rate_hz not in RATES_HZ:
            self._complain(f"audio at {frame.sample_rate_hz} Hz is left out; 8000 and 16000 are taken")
            return
        start, samples = _new_audio(frame, self._memory.expected)
        if not len(samples):
            return
        missing = start - self._memory.expected
        if missing > LONGEST_FILLED_GAP_SAMPLES and self._front is not None:
            self._finish("gap", step)
            step.frame = None
            return
        if missing:
            step.before.append(self._gap(step.cause, start))
        front = self._front or self._start_audio(start)
        front.silence(start - front.end_sample)
        self._push(front, step.cause, start, samples)
        self._memory.last_captured_us = frame.stamps.captured_us
        self._memory.expected = front.end_sample
        self._inspect(frame, front, step)

    def _inspect(self, frame: AudioFrame, front: Front, step: _Step) -> None:
        """See whether the audio is what the frame declares."""
        at = self._inspector.due(front.original.end)
        if at is None or at - BLOCK_SAMPLES < front.original.start:
            return
        block = front.original[at - BLOCK_SAMPLES : at]
        captured_us = frame.stamps.captured_us
        for flag, detail in self._inspector.inspect(at, block, frame.encoding, frame.sample_rate_hz, captured_us, front.end_sample):
            self._complain(f"{flag}: {detail}")
            step.after.append(AudioFlag(**_identity(step.cause), position_samples=at, flag=flag, detail=detail))

    def _push(self, front: Front, cause: Input, start: int, samples: NDArray[np.float32]) -> None:
        """Give a front the new part of a frame, and remember that a restart could read from there."""
        frame = cause.record
        assert isinstance(frame, AudioFrame)  # noqa: S101 - for the type checker
        if not self._kept or frame.position_samples == start:
            self._kept.append(_Kept(cause.offset, start))
        front.push(samples, frame.sample_rate_hz)

    def _new_front(self, start: int) -> Front:
        denoise = self._settings.vad_denoise and self._settings.vad != "off"
        return Front(start, denoise=denoise, lookback_samples=self._detectors.lookback_samples)

    def _start_audio(self, start: int) -> Front:
        self._front = self._new_front(start)
        self._memory.audio_start = start
        self._listener = self._detectors.start(self._front.base_sample)
        self._segmenter.restart(start)
        return self._front

    def _finish(self, reason: CutReason, step: _Step) -> None:
        """End the audio: all that was heard is decided, as if silence followed."""
        step.ending = reason
        if self._front is not None:
            self._front.finish(self._detectors.needed_samples(self._memory.expected))

    def _is_idle(self, heartbeat: Heartbeat) -> bool:
        """Return whether the recorder lives but has sent no audio for long, by its own clock."""
        silent_us = heartbeat.stamps.captured_us - self._memory.last_captured_us
        return self._front is not None and self._memory.last_captured_us > 0 and silent_us >= self._settings.session_idle_ms * _US_PER_MS

    # Following: what comes of it.

    def _follow(self, step: _Step, first_hop: int, decisions: NDArray[np.bool_], said: list[SessionRecord]) -> None:
        said.extend(step.before)
        if self._front is not None:
            said.extend(self._segments(step, first_hop, decisions, self._front.original))
        if step.ending:
            self._front = None
            self._kept.clear()
        said.extend(step.after)
        if step.change is not None:
            self._memory.put_in_force(step.change)
        if step.frame is not None:
            self._answer(step.cause, step.frame, said)

    def _segments(self, step: _Step, first_hop: int, decisions: NDArray[np.bool_], audio: _Audio) -> Iterator[SessionRecord]:
        events = self._segmenter.advance(first_hop, decisions)
        if step.ending:
            events += self._segmenter.finish(step.original_to, step.ending)
        identity = _identity(step.cause)
        for event in events:
            yield from self._records(event, audio, identity)
        standing = self._segmenter.standing
        if standing.open:
            to = min(step.original_to, self._segmenter.certain_end)
            yield from self._chunks(standing.segment, standing.start, to, audio, identity, last=False)

    def _records(self, event: Event, audio: _Audio, identity: dict[str, Any]) -> Iterator[SessionRecord]:
        match event:
            case Opened(segment, start):
                self._memory.next_chunk = 0
                model_digest = self._memory.model_digest
                yield SegmentStart(**identity, position_samples=start, segment=segment, model_digest=model_digest)
            case Closed(segment, start, end, reason):
                yield from self._chunks(segment, start, end, audio, identity, last=True)
                version = self._memory.hotword_version
                yield SegmentEnd(
                    **identity, position_samples=end, segment=segment, start_sample=start, reason=reason, hotword_version=version
                )
            case Cancelled(segment, start, speech_end, end):
                yield from self._chunks(segment, start, end, audio, identity, last=False)
                yield SegmentCancelled(**identity, position_samples=speech_end, segment=segment, start_sample=start)

    def _chunks(self, segment: int, start: int, to: int, audio: _Audio, identity: dict[str, Any], *, last: bool) -> Iterator[SpeechChunk]:
        """Yield the chunks that are due: whole ones that lie before a sample with their lookahead, and if it is the end, what is left."""
        while True:
            begin = start + self._memory.next_chunk * _CHUNK_SAMPLES
            whole = begin + _CHUNK_SAMPLES + LOOKAHEAD_SAMPLES
            if begin >= to or (whole > to and not last):
                return
            pcm = audio[begin : min(whole, to)].astype("<i2").tobytes()
            hops = min(CHUNK_HOPS, -(-(to - begin) // HOP_SAMPLES))
            number = self._memory.next_chunk
            yield SpeechChunk(**identity, position_samples=begin, segment=segment, chunk=number, hops=hops, pcm=pcm)
            self._memory.next_chunk += 1

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
        gap = Gap(**_identity(cause), position_samples=self._memory.expected, missing_samples=resumed_at - self._memory.expected)
        self._memory.expected = resumed_at
        return gap

    def _complain(self, what: str) -> None:
        """Log something odd, once."""
        if what not in self._complaints:
            self._complaints.add(what)
            _log.warning("Session %s: %s.", self.key.session_id, what)

    # What is kept.

    def _needed(self) -> tuple[int, int]:
        """Return the first sample still needed of the original audio, and of what is heard."""
        standing = self._segmenter.standing
        hop = self._listener.next_hop
        original = self._segmenter.earliest_start(hop)
        if standing.open:
            original = min(original, standing.start + self._memory.next_chunk * _CHUNK_SAMPLES)
        return original, self._detectors.needed_from_sample(self._listener)

    def _forget(self) -> None:
        if self._front is None or self._loaded is not None:
            return
        original, heard = self._needed()
        original = min(original, self._front.original.end - BLOCK_SAMPLES)
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
