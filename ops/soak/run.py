"""The calls of a soak: short ones on a few lines, one after the other, faster than real time, while hotwords change."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType  # type: ignore[attr-defined]

from connectors.recorder.media import MemorySource
from connectors.recorder.recorder import Playback, Recorder
from connectors.results import Received, ResultsConsumer
from ops.demo.calls import callers, read_clip
from ops.soak.vitals import Latencies
from schemas.records import SAMPLE_RATE_HZ, Coverage, Hotword, Session, SessionRecord, Transcript
from streams.errors import UserError
from streams.kafka import asked
from streams.pushing import push_hotwords
from streams.registry import codec_for
from streams.settings import Settings
from streams.topics import COVERAGE, SESSIONS, TOPICS, TRANSCRIPTS

if TYPE_CHECKING:
    from ops.processes import System

__all__ = ["CALL_S", "Soak", "Tally", "hurry_compaction", "soak_settings"]

#: A call: quiet, speech, quiet. Enough for one segment and its final.
CALL_S: Final = 1.6
_SPEECH_S: Final = 1.1
_QUIET_S: Final = 0.2
_CLIPS: Final = 8
#: Calls that may be unfinished, for each line, before new ones wait: the workers set the pace where they are slower than the lines.
_BACKLOG_PER_LINE: Final = 5
_TICK_S: Final = 0.01
#: After the calls: as long as something still comes, it is waited for.
_QUIET_AFTER_S: Final = 20.0
_VISIT_S: Final = 0.5
_HOTWORDS_EVERY_S: Final = 10.0
_HOTWORDS: Final = 200
_CAUGHT_UP_S: Final = 60.0
#: A call that is not over after this long never will be.
_LOST_AFTER_S: Final = 120.0
#: What is kept in the soak; minutes stand for the weeks of a real system.
_RESULTS_MS: Final = 60_000
_AUDIO_MS: Final = 120_000
_HURRY: Final = {
    "segment.ms": "15000",
    "max.compaction.lag.ms": "15000",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "1000",
}


def soak_settings(settings: Settings, lines: int, engine: str, name: str) -> dict[str, Any]:
    """Return what the soak's own system has different: a namespace, a partition for each line, and short memories."""
    return {
        "namespace": f"{settings.namespace}.{name}",
        "partitions": lines,
        "engine": engine,
        "audio_retention_ms": _AUDIO_MS,
        "results_retention_ms": _RESULTS_MS,
        "gateway_history_ms": _RESULTS_MS,
        "gateway_port": 0,
        "metrics_port": 0,
    }


def hurry_compaction(settings: Settings) -> None:
    """Have the brokers clean the topics within seconds, where a real system has hours: what must leave is to be seen leaving."""
    resources = []
    for topic in TOPICS:
        wanted = dict(_HURRY) if "compact" in topic.cleanup else {"segment.ms": "15000"}
        if "delete" in topic.cleanup:
            wanted["retention.ms"] = str(_AUDIO_MS)
        entries = [ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in wanted.items()]
        resources.append(ConfigResource(ResourceType.TOPIC, topic.full_name(settings), incremental_configs=entries))

    def alter(client: Any) -> None:
        for answer in client.incremental_alter_configs(resources).values():
            answer.result()

    asked(settings, "clean its topics sooner", alter)


@dataclass(slots=True)
class _Expected:
    """A call that is not over. Answers and finals may come again after a takeover: by place and by number they are told apart."""

    clip: int
    begun_s: float = field(default_factory=time.monotonic)
    frames_sent: int = -1
    answered: set[int] = field(default_factory=set)
    finals: set[int] = field(default_factory=set)
    closed: Session | None = None

    @property
    def is_settled(self) -> bool:
        closed = self.closed
        return closed is not None and len(self.answered) == self.frames_sent and len(self.finals) == closed.finals


@dataclass(slots=True)
class Tally:
    """What came of the calls.

    Attributes:
        begun: calls that began.
        over: calls that are closed, with all their frames answered and all their finals out.
        frames_sent: frames of calls that were sent whole.
        frames_lost: frames that the broker did not take.
        frames_answered: frames that were answered.
        finals: finals.
        finals_different: finals that differ from those of an earlier call with the same audio.
        hotwords_pushed: lists of hotwords that were pushed.
        visits: times that somebody looked at the live page and left.
        failures: what went wrong.
    """

    begun: int = 0
    over: int = 0
    frames_sent: int = 0
    frames_lost: int = 0
    frames_answered: int = 0
    finals: int = 0
    finals_different: int = 0
    hotwords_pushed: int = 0
    visits: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class _Visitor:
    """Somebody who looks at the live page for a moment, hangs up without a word, and comes back, again and again."""

    def __init__(self, url: str) -> None:
        self.visits = 0
        self._url = f"{url}ws"
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._visit()), name="visitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    async def _visit(self) -> None:
        import aiohttp

        while not self._over.is_set():
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with aiohttp.ClientSession() as session, session.ws_connect(self._url) as socket:
                    await socket.receive(timeout=_VISIT_S)
                    self.visits += 1
                    await asyncio.sleep(_VISIT_S)
                    if (connection := socket.get_extra_info("socket")) is not None and self.visits % 2:
                        connection.shutdown(2)  # every other time without a goodbye


class Soak:
    """Plays the calls. Everything that it remembers of a call goes when the call is over: it is one of those that must not grow.

    Args:
        system: the system, entered.
        lines: calls at the same time.
        speed: how much faster than real time.
    """

    def __init__(self, system: System, *, lines: int, speed: float) -> None:
        self.tally = Tally()
        self._system = system
        self._lines = lines
        self._lock = threading.Lock()
        self._open: dict[str, _Expected] = {}
        self._first: dict[tuple[int, int], tuple[object, ...]] = {}
        self._latencies_ms: list[float] = []
        self._heard_s = time.monotonic()
        self._failures: list[Exception] = []
        self._caught_up = threading.Event()
        self._sources = _sources()
        self._recorder = Recorder(system.settings, speed=speed, keep_spans=False)
        self._reader = ResultsConsumer(
            system.settings,
            self._take,
            caught_up=self._caught_up.set,
            failed=self._failures.append,
            since_ms=dict.fromkeys((SESSIONS, TRANSCRIPTS, COVERAGE), 0),
        )
        self._visitor = _Visitor(system.gateway_url)
        self._hotwords_s = 0.0
        self._random = np.random.default_rng(0)

    def __enter__(self) -> Soak:
        self._reader.start()
        if not self._caught_up.wait(_CAUGHT_UP_S):
            raise UserError("Kafka does not answer readers", "See whether the broker is overloaded.")
        self._recorder.start()
        self._visitor.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._visitor.stop()
        try:
            self._recorder.close()
        finally:
            self._reader.stop()

    def progress(self) -> tuple[int, int]:
        """Return how many calls are over, and how many are not."""
        return self.tally.over, len(self._open)

    def latencies(self) -> Latencies:
        """Return how late the frames since the last call of this were."""
        with self._lock:
            values, self._latencies_ms = self._latencies_ms, []
        if not values:
            return Latencies()
        p50, p95, most = (round(float(value), 1) for value in np.percentile(values, (50, 95, 100)))
        return Latencies(frames=len(values), p50_ms=p50, p95_ms=p95, max_ms=most)

    def play(self, calls: int, show: Callable[[Tally], None] = lambda _tally: None) -> None:
        """Play so many calls, and wait until they are over, as long as anything comes.

        Raises:
            UserError: a process of the system ended.
        """
        playing: dict[int, tuple[Playback, int]] = {}
        tally = self.tally
        while tally.begun < calls or playing:
            for line in range(self._lines):
                current = playing.get(line)
                if current is not None and current[0].done():
                    self._settle(current[0])
                    del playing[line]
                if line not in playing and tally.begun < calls and len(self._open) < self._lines * _BACKLOG_PER_LINE:
                    playing[line] = self._begin(line)
            self._push_hotwords()
            self._look(show)
            self._give_up(_LOST_AFTER_S)
        while self._open and time.monotonic() - self._heard_s < _QUIET_AFTER_S:
            self._look(show)
        tally.visits = self._visitor.visits
        self._give_up(0.0)

    def _give_up(self, after_s: float) -> None:
        """Take note of calls that began so long ago and are not over: others must not wait for them for ever."""
        before_s = time.monotonic() - after_s
        with self._lock:
            for session_id, expected in list(self._open.items()):
                if expected.begun_s < before_s:
                    self.tally.failures[_unsettled(expected)] += 1
                    del self._open[session_id]

    def _look(self, show: Callable[[Tally], None]) -> None:
        time.sleep(_TICK_S)
        self._system.check()
        if self._failures:
            raise self._failures[0]
        show(self.tally)

    def _begin(self, line: int) -> tuple[Playback, int]:
        clip = self.tally.begun % len(self._sources)
        with self._lock:
            playback = self._recorder.play(MemorySource(self._sources[clip], f"clip {clip}"), str(line))
            self._open[playback.info.session_id] = _Expected(clip)
        self.tally.begun += 1
        return playback, clip

    def _settle(self, playback: Playback) -> None:
        """Take note of what was sent of a call."""
        report = playback.report()
        self.tally.frames_sent += report.frames_sent
        self.tally.frames_lost += report.frames_lost
        self.tally.failures.update(report.failures)
        with self._lock:
            expected = self._open.get(report.session_id)
            if expected is not None:
                expected.frames_sent = report.frames_sent
                self._close(report.session_id, expected)

    def _push_hotwords(self) -> None:
        """Put another list into force: phrases that nobody says, in another number each time."""
        now_s = time.monotonic()
        if now_s < self._hotwords_s:
            return
        self._hotwords_s = now_s + _HOTWORDS_EVERY_S
        letters = self._random.choice(list("bdfgklmnprst"), (self._random.integers(1, _HOTWORDS), 4))
        phrases = [Hotword(phrase=word, boost=2.0) for word in sorted({"".join(row) for row in letters})]
        settings = self._system.settings
        push_hotwords(settings, codec_for(settings.schema_registry_url), "soak", phrases)
        self.tally.hotwords_pushed += 1

    # ------------------------------------------------------------------ what comes back

    def _take(self, received: Sequence[Received]) -> None:
        with self._lock:
            self._heard_s = time.monotonic()
            for record, arrived_us in received:
                expected = self._open.get(record.session_id)
                if expected is not None:
                    self._count(record, expected, arrived_us)
                    self._close(record.session_id, expected)

    def _count(self, record: SessionRecord, expected: _Expected, arrived_us: int) -> None:
        match record:
            case Coverage() if record.position_samples not in expected.answered:
                expected.answered.add(record.position_samples)
                self.tally.frames_answered += 1
                self._latencies_ms.append((arrived_us - record.stamps.captured_us) / 1_000)
            case Transcript(kind="final"):
                self.tally.finals += record.segment not in expected.finals
                expected.finals.add(record.segment)
                said = record.position_samples, record.end_sample, record.text
                if self._first.setdefault((expected.clip, record.segment), said) != said:
                    self.tally.finals_different += 1
            case Session(state="closed"):
                expected.closed = record
            case _:
                pass

    def _close(self, session_id: str, expected: _Expected) -> None:
        if expected.is_settled:
            del self._open[session_id]
            self.tally.over += 1


def _sources() -> list[np.ndarray[Any, np.dtype[np.int16]]]:
    """Return the audio of the calls: the beginnings of bundled recordings between two silences."""
    quiet = np.zeros(round(_QUIET_S * SAMPLE_RATE_HZ), np.int16)
    tail = np.zeros(round((CALL_S - _SPEECH_S - _QUIET_S) * SAMPLE_RATE_HZ), np.int16)
    return [np.concatenate([quiet, read_clip(clip.file)[: round(_SPEECH_S * SAMPLE_RATE_HZ)], tail]) for clip in callers()[:_CLIPS]]


def _unsettled(expected: _Expected) -> str:
    if expected.closed is None:
        return "a call was never closed"
    if len(expected.answered) != expected.frames_sent:
        return "a call's frames were not all answered"
    return "a call's finals did not all come"
