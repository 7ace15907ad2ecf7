"""The inference stage: feature blocks into coverage, partials, finals, and the life of each session.

Two things are kept apart for each session. Its :class:`Facts` follow from its inputs alone, as they come; what the engine says comes later,
out of step. A record that goes with an input shows the facts as of that input, so a replay writes the same. And a restart begins where a
segment begins: at the oldest one whose final is not out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import msgspec

from agents.inference import metrics
from agents.inference.batcher import Batcher
from agents.inference.engine import MOST_UTTERANCES, Block, Engine, FinalText, Finish, Hypothesis, Opening, SegmentKey
from agents.inference.hotwords import Compiler, CompilerProcess, LiveHotwords
from agents.inference.process import EngineProcess, cuts_utterances, engine_spec, hotword_model, second_pass_settings
from agents.inference.refining import SecondPass
from schemas.records import (
    SAMPLE_RATE_HZ,
    AudioFlag,
    Coverage,
    FeatureBlock,
    FlowRecord,
    FrameMark,
    FrameSpan,
    Gap,
    Heartbeat,
    LogEvent,
    Partial,
    SegmentCancelled,
    SegmentEnd,
    SegmentStart,
    Session,
    SessionEnd,
    SessionRecord,
    SessionStart,
    Stamps,
    Transcript,
    VersionChange,
)
from streams.control import Control
from streams.core import Core, Emitter, Input, Report, SessionKey, SessionState
from streams.errors import UserError
from streams.registry import codec_for
from streams.settings import Settings

__all__ = ["Facts", "InferenceCore"]

_R = TypeVar("_R", bound=SessionRecord)

_HOP_SAMPLES: Final = SAMPLE_RATE_HZ // 100
#: A block is 200 ms; endpoint rules end utterances at the end of one.
_BLOCK_SAMPLES: Final = 20 * _HOP_SAMPLES
_STATE_VERSION: Final = 1
#: A log event is to be about 200 bytes: half of them text.
_LOG_TEXT_CHARS: Final = 100
#: What a session says of itself is kept in every snapshot, of which all sessions of a partition share 4 KB.
_SOURCE_BYTES: Final = 96
_NAME_BYTES: Final = 32
_ENGINE_FAILED: Final = "engine_failed"
_MODEL_CHANGED: Final = "model_changed"
#: Enough of a digest to tell models apart.
_DIGEST_CHARS: Final = 16


class Facts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What is known of a session from its inputs, up to one of them.

    ``heard_us`` is the recorder's clock when audio last came; the rest as in :class:`schemas.records.Session`.
    """

    started_us: int = 0
    party: str = ""
    language: str = ""
    direction: str = "unknown"
    source: str = ""
    state: Literal["open", "idle", "closed"] = "open"
    reason: str = ""
    position_samples: int = 0
    heard_us: int = 0
    covered_to_sample: int = 0
    decoded_to_sample: int = 0
    segments: int = 0
    finals: int = 0
    cancelled: int = 0
    gaps: int = 0
    gap_samples: int = 0
    model_digest: str = ""
    hotword_version: str = ""


class _Saved(msgspec.Struct, frozen=True, array_like=True):
    """A session in a snapshot; all but ``facts`` is what the finals so far added up to, as in :class:`_Session`."""

    version: int
    facts: Facts
    words: int
    flags: tuple[str, ...]
    further: int = 0


@dataclass(slots=True, eq=False)
class _Answer:
    """Frames to be covered once the decoder has taken everything before them."""

    cause: Input
    frames: tuple[FrameSpan, ...]
    decoded_to_sample: int
    segment: _Segment | None = None
    taken: bool = True
    #: Whether the input is done with it, once no partial can follow either.
    settles: bool = True


@dataclass(slots=True, eq=False)
class _Segment:
    """A segment that the engine knows."""

    key: SegmentKey
    session: _Session
    start_sample: int
    from_offset: int
    before: Facts
    ended: bool = False
    waiting: deque[_Answer] = field(default_factory=deque)
    #: Stamps and end of each block taken, for partials.
    taken: list[tuple[int, Stamps]] = field(default_factory=list)
    #: The newest block taken: not done before the next one is, for a partial may still follow from it.
    latest: Input | None = None
    text: str = ""
    #: All of it, for the second pass; nothing where there is none.
    blocks: list[Block] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Outcome:
    """What an input leads to once everything before it is out: a final, a cancellation, the end of the session."""

    cause: Input
    kind: Literal["final", "cancelled", "end"]
    facts: Facts
    segment: int = 0
    start_sample: int = 0
    end_sample: int = 0
    hotword_version: str = ""
    from_offset: int = 0
    before: Facts | None = None
    final: FinalText | None = None
    key: SegmentKey | None = None
    blocks: list[Block] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return self.kind != "final" or self.final is not None


@dataclass(slots=True, eq=False)
class _Session:
    facts: Facts
    next_offset: int
    words: int = 0
    flags: tuple[str, ...] = ()
    #: Finals beyond one of each segment: endpoint rules may make several.
    further: int = 0
    segment: _Segment | None = None
    answers: deque[_Answer] = field(default_factory=deque)
    outcomes: deque[_Outcome] = field(default_factory=deque)


class InferenceCore(Core):
    """See the module.

    Args:
        settings: which engine to run, and how.
        emitter: takes what follows from the inputs.
        engine: one that was started; unset: the settings' engine, in a process of its own, is started by :meth:`start`.
        control: what is pushed while calls are live; unset: nothing is.
        compiler: compiles hotwords; unset: one for the settings' model, in a process of its own, if the engine makes use of any.
        second: the engine of the second pass, started; unset: the settings' one, if they name any.
    """

    def __init__(
        self,
        settings: Settings,
        emitter: Emitter,
        engine: Engine | None = None,
        *,
        control: Control | None = None,
        compiler: Compiler | None = None,
        second: Engine | None = None,
    ) -> None:
        self._settings = settings
        self._emitter = emitter
        self._engine = engine
        self._control = control
        self._compiler = compiler
        self._hotwords: LiveHotwords | None = None
        self._second_engine = second
        self._second: SecondPass | None = None
        #: Finals that are out, while their second pass is not.
        self._refining: dict[SegmentKey, _Outcome] = {}
        self._batcher: Batcher | None = None
        self._failure: BaseException | None = None
        self._sessions: dict[SessionKey, _Session] = {}
        self._segments: dict[SegmentKey, tuple[_Segment, _Outcome | None]] = {}
        self._openings = itertools.count()
        #: How far apart the numbers of segments are, so that each utterance of one has a number, and a key, of its own.
        self._numbers_each = MOST_UTTERANCES if cuts_utterances(settings) else 1
        self._restarts_seen = 0

    @property
    def engine(self) -> Engine:
        """The engine; it has a name and a model."""
        if self._engine is None:
            raise RuntimeError("the inference stage was not started")
        return self._engine

    # ------------------------------------------------------------------ the stage's side

    async def start(self) -> None:
        """Start the engine and wait until its model is loaded.

        Raises:
            ModelError: the model cannot be had.
            EngineError: the engine cannot be loaded.
        """
        if self._engine is None:
            self._engine = await asyncio.to_thread(self._start_engine, self._settings)
        self._batcher = Batcher(self._engine, self)
        self._batcher.start()
        if self._second_engine is None and self._settings.final_engine:
            self._second_engine = await asyncio.to_thread(self._start_engine, second_pass_settings(self._settings))
        if self._second_engine is not None:
            self._second = SecondPass(self._second_engine, self._refined)
            self._second.start()
        compiler = self._compiler or self._make_compiler()
        if self._control is not None and compiler is not None:
            self._hotwords = LiveHotwords(self._control, compiler, self._batcher.learn, self._ask_final)
            await self._hotwords.start()

    async def stop(self) -> None:
        """End the engine."""
        if self._hotwords is not None:
            await self._hotwords.stop()
        if self._second is not None:
            await asyncio.to_thread(self._second.stop)
        if self._batcher is not None:
            await asyncio.to_thread(self._batcher.stop)

    def load(self, key: SessionKey, state: SessionState) -> None:
        """Take over a session at the beginning of a segment, or between two.

        Raises:
            UserError: another release wrote the state.
        """
        version, *_ = msgspec.msgpack.decode(state.state)
        if version != _STATE_VERSION:
            raise UserError(
                f"the state of session {key.session_id} has version {version}, and this release reads version {_STATE_VERSION}",
                "Run the release that wrote it until its sessions are over.",
            )
        saved = msgspec.msgpack.decode(state.state, type=_Saved)
        self._sessions[key] = _Session(saved.facts, state.from_offset, saved.words, saved.flags, saved.further)

    def drop(self, key: SessionKey) -> None:
        """Forget a session; results that still come find nobody."""
        session = self._sessions.pop(key, None)
        refining = [known for known, outcome in self._refining.items() if outcome.cause.key == key]
        for segment_key in refining:
            del self._refining[segment_key]
        if self._second is not None:
            self._second.drop(refining)
        if session is not None:
            for segment_key in [known for known, (segment, _) in self._segments.items() if segment.session is session]:
                del self._segments[segment_key]
                self._to_engine.close(segment_key)

    async def step(self, inputs: Sequence[Input]) -> None:
        """Take inputs, and hand their blocks to the batcher; waits only if far too much is waiting already.

        Raises:
            EngineError: the engine is gone for good.
        """
        if self._failure is not None:
            raise self._failure
        for each in inputs:
            if not each.warm:
                self._take(each)
        await self._to_engine.room()

    def snapshot(self, key: SessionKey) -> SessionState | None:
        """Return the state before the oldest segment whose final is not out, or else after the last input."""
        session = self._sessions.get(key)
        if session is None:
            return None
        offset, facts = session.next_offset, session.facts
        if session.segment is not None:
            offset, facts = session.segment.from_offset, session.segment.before
        if session.outcomes:
            oldest = session.outcomes[0]  # a final that is not out: nothing else stays at the head
            offset, facts = oldest.from_offset, oldest.before or facts
        saved = _Saved(_STATE_VERSION, facts, session.words, session.flags, session.further)
        return SessionState(offset, offset, msgspec.msgpack.encode(saved))

    def _start_engine(self, settings: Settings) -> Engine:
        process = EngineProcess(engine_spec(settings), timeout_ms=settings.engine_timeout_ms)
        process.start()
        return process

    def _make_compiler(self) -> Compiler | None:
        model = hotword_model(self._settings)
        return None if model is None else CompilerProcess(model, self._settings.cache_dir, codec_for(self._settings.schema_registry_url))

    def _ask_final(self, request: Finish) -> None:
        if request.key in self._segments:  # else its session left, while the final waited for its hotwords
            self._to_engine.finish(request)

    @property
    def report(self) -> Report:
        """What the engine decides with, and how it keeps up."""
        if self._batcher is None:
            return Report()
        return Report(
            self.engine.model_digest,
            self._hotwords.in_force if self._hotwords else "",
            self._batcher.channels,
            round(1_000 * self._batcher.behind_s),
        )

    @property
    def _to_engine(self) -> Batcher:
        if self._batcher is None:
            raise RuntimeError("the inference stage was not started")
        return self._batcher

    # ------------------------------------------------------------------ inputs

    def _take(self, cause: Input) -> None:
        record = cause.record
        session = self._sessions.get(cause.key)
        if session is None:
            session = self._sessions[cause.key] = _Session(Facts(), cause.offset)
        session.next_offset = cause.offset + 1
        match record:
            case SessionStart():
                self._start_session(session, cause, record)
            case SegmentStart():
                self._end_segment_unasked(session)
                self._start_segment(session, cause, record.segment, record.position_samples, record.model_digest)
                self._emitter.done(cause)
            case FeatureBlock():
                self._take_block(session, cause, record)
            case FrameMark():
                self._learn(session, record, frames=record.frames)
                self._answer(session, _Answer(cause, record.frames, session.facts.decoded_to_sample))
            case SegmentEnd():
                self._end_segment(session, cause, record)
            case SegmentCancelled():
                self._cancel_segment(session, cause, record)
            case SessionEnd():
                self._end_session(session, cause, record)
            case Gap():
                facts = session.facts
                self._learn(session, record, gaps=facts.gaps + 1, gap_samples=facts.gap_samples + record.missing_samples)
                self._emitter.emit(cause, (self._log(record, record.position_samples, "gap", f"{record.missing_samples} samples missing"),))
                self._emitter.done(cause)
            case AudioFlag():
                self._learn(session, record)
                session.flags = tuple(sorted({*session.flags, record.flag}))
                log = self._log(record, record.position_samples, record.flag, record.detail)
                self._emitter.emit(cause, (self._session(session, record, session.facts), log))
                self._emitter.done(cause)
            case VersionChange():
                changes: dict[str, Any] = {"model_digest" if record.kind == "model" else "hotword_version": record.version}
                self._learn(session, record, **changes)
                self._emitter.done(cause)
            case Heartbeat():
                self._hear(session, cause, record)
            case _:
                self._emitter.done(cause)

    def _start_session(self, session: _Session, cause: Input, record: SessionStart) -> None:
        started_us = record.stamps.captured_us
        session.facts = Facts(
            started_us=started_us,
            heard_us=started_us,
            party=_short(record.party, _NAME_BYTES),
            language=_short(record.language or self._settings.language, _NAME_BYTES),
            direction=record.direction,
            source=_short(record.source, _SOURCE_BYTES),
            model_digest=self.engine.model_digest,
        )
        log = self._log(record, record.position_samples, "session_start", session.facts.source)
        self._emitter.emit(cause, (self._session(session, record, session.facts), log))
        self._emitter.done(cause)

    def _hear(self, session: _Session, cause: Input, record: Heartbeat) -> None:
        """Take a heartbeat: the recorder lives, and has audio or not."""
        facts = session.facts
        state = facts.state
        if record.position_samples > facts.position_samples:
            state = "open"
        elif record.stamps.captured_us - facts.heard_us >= 1_000 * self._settings.session_idle_ms:
            state = "idle"
        self._learn(session, record, state=state)
        if state != facts.state:
            self._emitter.emit(cause, (self._session(session, record, session.facts),))
        self._emitter.done(cause)

    def _start_segment(self, session: _Session, cause: Input, number: int, start_sample: int, model_digest: str) -> _Segment:
        before = session.facts
        key = SegmentKey(cause.key.session_id, number, next(self._openings))
        segment = session.segment = _Segment(key, session, start_sample, cause.offset, before)
        self._segments[key] = segment, None
        self._mark_change_of_model(session, cause, start_sample, model_digest or before.model_digest)
        self._learn(session, cause.record, state="open", model_digest=self.engine.model_digest)
        self._to_engine.open(Opening(key=key, start_sample=start_sample, language=before.language, model_digest=model_digest))
        return segment

    def _mark_change_of_model(self, session: _Session, cause: Input, start_sample: int, expected: str) -> None:
        """Say so where a segment is decoded with another model than it names, or than the session's segments before it."""
        digest = self.engine.model_digest
        if expected and not digest.startswith(expected):
            session.flags = tuple(sorted({*session.flags, _MODEL_CHANGED}))
            told = f"{expected[:_DIGEST_CHARS]} -> {digest[:_DIGEST_CHARS]}"
            self._emitter.emit(cause, (self._log(cause.record, start_sample, _MODEL_CHANGED, told),))

    def _take_block(self, session: _Session, cause: Input, record: FeatureBlock) -> None:
        segment = session.segment
        if segment is None or segment.key.segment != record.segment:
            # Its start is gone for good; what is left of it is worth decoding.
            self._end_segment_unasked(session)
            segment = self._start_segment(session, cause, record.segment, record.position_samples, "")
        end_sample = record.position_samples + record.hops * _HOP_SAMPLES
        self._learn(session, record, end_sample, frames=record.frames, decoded_to_sample=end_sample)
        answer = _Answer(cause, record.frames, end_sample, segment, taken=False)
        segment.waiting.append(answer)
        session.answers.append(answer)
        block = Block(key=segment.key, chunk=record.chunk, hops=record.hops, features=record.features, pcm=record.pcm or b"")
        if self._second is not None:
            segment.blocks.append(msgspec.structs.replace(block, features=b"", quiet=True))
            if record.features:  # the first engine takes those
                block = msgspec.structs.replace(block, pcm=b"")
        self._to_engine.put(block)

    def _end_segment(self, session: _Session, cause: Input, record: SegmentEnd) -> None:
        segment = session.segment
        if segment is None or segment.key.segment != record.segment:
            self._end_segment_unasked(session)
            segment = self._start_segment(session, cause, record.segment, record.start_sample, "")
        self._learn(session, record, frames=record.frames, decoded_to_sample=record.position_samples)
        self._answer(session, _Answer(cause, record.frames, record.position_samples, settles=False))
        self._finish(segment, cause, record.position_samples, record.hotword_version)

    def _end_segment_unasked(self, session: _Session) -> None:
        """End a segment whose own end is gone for good: what was heard of it is a final too, and follows from its last block."""
        segment = session.segment
        if segment is None:
            return
        if segment.waiting:
            last = segment.waiting[-1]
            last.settles = False
            self._finish(segment, last.cause, last.decoded_to_sample, session.facts.hotword_version)
        elif segment.latest is not None:
            last_cause, segment.latest = segment.latest, None
            self._finish(segment, last_cause, segment.taken[-1][0], session.facts.hotword_version)
        else:
            self._forget(segment)

    def _finish(self, segment: _Segment, cause: Input, end_sample: int, hotword_version: str) -> None:
        session = segment.session
        facts = session.facts
        self._learn(
            session,
            cause.record,
            segments=facts.segments + 1,
            finals=facts.finals + 1,
            hotword_version=hotword_version or facts.hotword_version,
        )
        outcome = _Outcome(
            cause,
            "final",
            session.facts,
            segment=segment.key.segment * self._numbers_each,
            start_sample=segment.start_sample,
            end_sample=end_sample,
            hotword_version=hotword_version,
            from_offset=segment.from_offset,
            before=segment.before,
            key=segment.key,
            blocks=segment.blocks,
        )
        session.outcomes.append(outcome)
        self._segments[segment.key] = segment, outcome
        self._close(segment)
        request = Finish(key=segment.key, end_sample=end_sample, hotword_version=hotword_version)
        (self._hotwords.finish if self._hotwords else self._ask_final)(request)

    def _cancel_segment(self, session: _Session, cause: Input, record: SegmentCancelled) -> None:
        segment = session.segment
        if segment is not None and segment.key.segment == record.segment:
            for answer in segment.waiting:
                answer.taken = True  # nobody needs to hear it any more
            self._forget(segment)
        facts = session.facts
        self._learn(
            session,
            record,
            frames=record.frames,
            decoded_to_sample=record.position_samples,
            segments=facts.segments + 1,
            cancelled=facts.cancelled + 1,
        )
        self._answer(session, _Answer(cause, record.frames, record.position_samples, settles=False))
        session.outcomes.append(
            _Outcome(
                cause,
                "cancelled",
                session.facts,
                segment=record.segment * self._numbers_each,
                start_sample=record.start_sample,
                end_sample=max(record.start_sample, record.position_samples),
            )
        )
        self._bring_out(cause.key, session)

    def _end_session(self, session: _Session, cause: Input, record: SessionEnd) -> None:
        self._end_segment_unasked(session)
        facts = session.facts
        length = record.position_samples
        self._learn(session, record, state="closed", reason=record.reason, covered_to_sample=max(length, facts.covered_to_sample))
        session.outcomes.append(_Outcome(cause, "end", session.facts))
        self._bring_out(cause.key, session)

    def _forget(self, segment: _Segment) -> None:
        """Nothing more follows from a segment."""
        self._close(segment)
        del self._segments[segment.key]
        self._to_engine.close(segment.key)

    def _close(self, segment: _Segment) -> None:
        """No more blocks come, and no partials go."""
        segment.ended = True
        segment.session.segment = None
        if segment.latest is not None:
            self._emitter.done(segment.latest)
            segment.latest = None

    def _learn(
        self, session: _Session, record: FlowRecord, position: int | None = None, *, frames: tuple[FrameSpan, ...] = (), **changes: Any
    ) -> None:
        """Add what an input tells to the facts; positions never go back."""
        facts = session.facts
        position = record.position_samples if position is None else position
        if position > facts.position_samples:
            changes["position_samples"] = position
            changes["heard_us"] = max(facts.heard_us, record.stamps.captured_us)
        if "decoded_to_sample" in changes:
            changes["decoded_to_sample"] = max(facts.decoded_to_sample, changes["decoded_to_sample"])
        if frames:
            changes["covered_to_sample"] = max(facts.covered_to_sample, *(frame.end_sample for frame in frames))
        if changes:
            session.facts = msgspec.structs.replace(facts, **changes)

    # ------------------------------------------------------------------ the engine's side

    def stepped(self, blocks: Sequence[Block], hypotheses: Sequence[Hypothesis]) -> None:
        """Answer the frames of blocks that the decoder has taken; show what it understood."""
        if blocks:
            metrics.STEP_BLOCKS.observe(len(blocks))
        sessions = set()
        for block in blocks:
            segment, _ = self._segments.get(block.key, (None, None))
            if segment is not None:
                segment.waiting.popleft().taken = True
                sessions.add(segment.session)
        for session in sessions:
            self._answer(session)
        for hypothesis in hypotheses:
            segment, _ = self._segments.get(hypothesis.key, (None, None))
            if segment is not None:
                self._show(segment, hypothesis)

    def finished(self, finals: Sequence[FinalText]) -> None:
        """Bring out finals, each in its turn."""
        for final in finals:
            segment, outcome = self._segments.pop(final.key, (None, None))
            if segment is not None and outcome is not None:
                outcome.final = final
                self._bring_out(outcome.cause.key, segment.session)
        if isinstance(self._engine, EngineProcess):
            metrics.ENGINE_RESTARTS.inc(self._engine.restarts - self._restarts_seen)
            self._restarts_seen = self._engine.restarts

    def broke(self, failure: BaseException) -> None:
        """Keep the engine's last failure for the next step, which ends the stage."""
        self._failure = failure

    def _answer(self, session: _Session, last: _Answer | None = None) -> None:
        """Cover frames in order, as far as the decoder has come."""
        answers = session.answers
        if last is not None:
            answers.append(last)
        while answers and answers[0].taken:
            answer = answers.popleft()
            cause, segment = answer.cause, answer.segment
            if answer.frames:
                self._emitter.emit(cause, [self._coverage(cause.record, frame, answer.decoded_to_sample) for frame in answer.frames])
            finished: Input | None = cause
            if segment is not None:
                segment.taken.append((answer.decoded_to_sample, cause.record.stamps))
                if not segment.ended:
                    # A partial may still follow from it; from the one before it none does.
                    finished, segment.latest = segment.latest, cause
            if finished is not None and answer.settles:
                self._emitter.done(finished)

    def _show(self, segment: _Segment, hypothesis: Hypothesis) -> None:
        if segment.latest is None or hypothesis.text == segment.text:
            return
        segment.text = hypothesis.text
        stamps = next((stamps for end_sample, stamps in segment.taken if end_sample >= hypothesis.end_sample), segment.taken[-1][1])
        partial = self._record(
            Partial,
            segment.latest.record,
            segment.start_sample,
            stamps,
            segment=segment.key.segment * self._numbers_each,
            text=hypothesis.text,
            stable_text=hypothesis.stable_text,
            end_sample=hypothesis.end_sample,
        )
        self._emitter.emit(segment.latest, (partial,))

    def _bring_out(self, key: SessionKey, session: _Session) -> None:
        """Emit outcomes in order, as far as their finals are there."""
        while session.outcomes and session.outcomes[0].ready:
            outcome = session.outcomes.popleft()
            cause = outcome.cause
            if outcome.kind == "end":
                log = self._log(cause.record, cause.record.position_samples, "session_end", outcome.facts.reason)
                self._emitter.emit(cause, (self._session(session, cause.record, outcome.facts), log))
                self._sessions.pop(key, None)
            elif outcome.final is None:
                log = self._log(cause.record, outcome.start_sample, "cancelled")
                self._emitter.emit(cause, (self._cancelled(outcome), log))
            else:
                utterances = _utterances(outcome, outcome.final)
                self._emit_final(session, outcome, outcome.final, utterances)
                begun = [self._begins_second_pass(each) for each, _ in utterances]
                if any(begun):
                    continue  # it is done when they are
            self._emitter.done(cause)

    def _emit_final(self, session: _Session, outcome: _Outcome, final: FinalText, utterances: Sequence[tuple[_Outcome, FinalText]]) -> None:
        record = outcome.cause.record
        session.words += len(final.words)
        session.further += len(utterances) - 1
        event = "final"
        if final.error:
            metrics.FAILED_SEGMENTS.inc()
            session.flags = tuple(sorted({*session.flags, _ENGINE_FAILED}))
            event = "failed"
        finals = [self._final(each, said) for each, said in utterances]
        logs = [self._log(record, each.start_sample, event, said.error or said.text, said.confidence) for each, said in utterances]
        self._emitter.emit(outcome.cause, (*finals, self._session(session, record, outcome.facts), *logs))

    # ------------------------------------------------------------------ the second pass

    def _begins_second_pass(self, outcome: _Outcome) -> bool:
        if self._second is None or outcome.key is None or not outcome.blocks:
            return False
        key, blocks = outcome.key, outcome.blocks
        outcome.blocks = []
        self._refining[key] = outcome
        opening = Opening(key=key, start_sample=outcome.start_sample, language=outcome.facts.language)
        if self._second.take(opening, blocks, Finish(key=key, end_sample=outcome.end_sample)):
            return True
        del self._refining[key]
        return False

    def _refined(self, key: SegmentKey, refined: FinalText | None) -> None:
        """Bring out what the second pass found."""
        outcome = self._refining.pop(key, None)
        if outcome is None or self._second is None:
            return
        if refined is not None:
            final = self._final(outcome, refined)
            fields = {"engine": self._second.engine.name, "model_digest": self._second.engine.model_digest, "hotword_version": ""}
            self._emitter.emit(outcome.cause, (msgspec.structs.replace(final, kind="refined", **fields),))
        if not any(other.cause is outcome.cause for other in self._refining.values()):
            self._emitter.done(outcome.cause)

    # ------------------------------------------------------------------ records

    def _record(self, kind: type[_R], of: SessionRecord, position: int, stamps: Stamps, /, **fields: Any) -> _R:
        return kind(
            channel_id=of.channel_id,
            session_id=of.session_id,
            conversation_id=of.conversation_id,
            position_samples=position,
            stamps=msgspec.structs.replace(stamps, inference_us=_now_us()),
            **fields,
        )

    def _coverage(self, of: SessionRecord, frame: FrameSpan, decoded_to_sample: int) -> Coverage:
        stamps = msgspec.structs.replace(of.stamps, captured_us=frame.captured_us, enqueued_us=frame.enqueued_us)
        return self._record(
            Coverage,
            of,
            frame.start_sample,
            stamps,
            end_sample=frame.end_sample,
            decoded_to_sample=decoded_to_sample,
            stage="inference",
        )

    def _final(self, outcome: _Outcome, final: FinalText) -> Transcript:
        record = outcome.cause.record
        return self._record(
            Transcript,
            record,
            outcome.start_sample,
            record.stamps,
            segment=outcome.segment,
            kind="final",
            end_sample=outcome.end_sample,
            text=final.text,
            raw_text=final.raw_text,
            words=final.words,
            confidence=final.confidence,
            language=final.language or outcome.facts.language,
            engine=self.engine.name,
            model_digest=self.engine.model_digest,
            hotword_version=outcome.hotword_version,
            covered_to_sample=outcome.facts.covered_to_sample,
        )

    def _cancelled(self, outcome: _Outcome) -> Transcript:
        record = outcome.cause.record
        return self._record(
            Transcript,
            record,
            outcome.start_sample,
            record.stamps,
            segment=outcome.segment,
            kind="cancelled",
            end_sample=outcome.end_sample,
            text="",
            raw_text="",
            confidence=0.0,
            engine=self.engine.name,
            model_digest=self.engine.model_digest,
            covered_to_sample=outcome.facts.covered_to_sample,
        )

    def _session(self, session: _Session, of: SessionRecord, facts: Facts) -> Session:
        return self._record(
            Session,
            of,
            facts.position_samples,
            of.stamps,
            state=facts.state,
            reason=facts.reason,
            started_us=facts.started_us,
            party=facts.party,
            language=facts.language,
            direction=facts.direction,
            source=facts.source,
            covered_to_sample=facts.covered_to_sample,
            decoded_to_sample=facts.decoded_to_sample,
            segments=facts.segments,
            finals=facts.finals + session.further,
            cancelled=facts.cancelled,
            words=session.words,
            gaps=facts.gaps,
            gap_samples=facts.gap_samples,
            model_digest=facts.model_digest,
            hotword_version=facts.hotword_version,
            flags=session.flags,
        )

    def _log(self, of: SessionRecord, position: int, event: str, text: str = "", confidence: float = 0.0) -> LogEvent:
        told = text if len(text) <= _LOG_TEXT_CHARS else text[: _LOG_TEXT_CHARS - 1] + "…"
        return self._record(LogEvent, of, position, of.stamps, at_us=_now_us(), event=event, text=told, confidence=confidence)


def _utterances(outcome: _Outcome, final: FinalText) -> list[tuple[_Outcome, FinalText]]:
    """Return the utterances of a segment, each as a segment of its own; the segment itself where no endpoint rules cut it."""
    if not final.utterances or outcome.key is None:
        return [(outcome, final)]
    found = []
    for number, said in enumerate(final.utterances, outcome.segment):
        key = outcome.key._replace(segment=number)
        first, last = ((sample - outcome.start_sample) / _BLOCK_SAMPLES for sample in (said.start_sample, said.end_sample))
        blocks = outcome.blocks[int(first) : math.ceil(last)]
        part = dataclasses.replace(
            outcome,
            segment=number,
            start_sample=said.start_sample,
            end_sample=said.end_sample,
            key=key,
            blocks=[msgspec.structs.replace(block, key=key, chunk=chunk) for chunk, block in enumerate(blocks)],
        )
        fields = {"text": said.text, "raw_text": said.raw_text, "words": said.words, "confidence": said.confidence}
        found.append((part, msgspec.structs.replace(final, key=key, utterances=(), **fields)))
    return found


def _now_us() -> int:
    return time.time_ns() // 1_000


def _short(text: str, most_bytes: int) -> str:
    """Return as much of a text as fits into so many bytes of UTF-8."""
    return text.encode()[:most_bytes].decode(errors="ignore")
