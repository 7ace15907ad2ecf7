"""Sources through a whole system as fast as it takes them: what ``asr transcribe`` and ``asr eval`` do with files."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from connectors.recorder.recorder import Playback, Recorder
from connectors.results import Received, Results, ResultsConsumer, SessionView
from streams.errors import UserError
from streams.settings import Settings
from streams.topics import COVERAGE, SESSIONS, TRANSCRIPTS

if TYPE_CHECKING:
    from connectors.recorder.media import Source
    from ops.processes import System

__all__ = ["Passage", "Play"]

_TICK_S: Final = 0.1
_CAUGHT_UP_TIMEOUT_S: Final = 30.0
#: An engine that hangs is killed and restarted within its timeout, and then has to load its model.
_STALL_BEYOND_ENGINE_TIMEOUT_S: Final = 60.0
_MS_PER_S: Final = 1_000


class Play(NamedTuple):
    """A source, and what its session says of itself.

    Attributes:
        source: the audio, one channel.
        name: of its channel; it is made unique.
        conversation_id: joins the channels of a call; empty: a call of its own.
        party: who speaks.
        language: BCP 47 tag; empty: unknown.
    """

    source: Source
    name: str
    conversation_id: str = ""
    party: str = ""
    language: str = ""


class Passage:
    """A recorder that does not wait, and a reader of what comes back: a context manager.

    Args:
        system: the system, entered.

    Attributes:
        audio_ms: how much audio the last sources had.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self._reader = _Reader(system.settings)
        self._recorder = Recorder(system.settings, realtime=False, keep_spans=False)
        self.audio_ms = 0

    def __enter__(self) -> Self:
        try:
            self._reader.start()
            self._recorder.start()
        except BaseException:
            self._reader.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._recorder.close()
        finally:
            self._reader.stop()

    def take(self, plays: Sequence[Play], show: Callable[[Sequence[int]], None] = lambda _done: None) -> list[SessionView]:
        """Take sources through the system, all at once; return their sessions in the same order, closed and with all their finals.

        Args:
            plays: the sources.
            show: told again and again how many samples of each are done.

        Raises:
            UserError: a frame was not taken, or nothing comes any more; the message says who is to blame.
        """
        run = secrets.token_hex(3)
        playbacks = [
            self._recorder.play(
                play.source,
                # Not a number: those are the telephone channels of a running system.
                f"{play.name}-{run}-{number}",
                conversation_id=play.conversation_id,
                party=play.party,
                language=play.language,
                partition=number % self._system.settings.partitions,
            )
            for number, play in enumerate(plays)
        ]
        views = self._follow(playbacks, show)
        self.audio_ms = sum(playback.report().audio_ms for playback in playbacks)
        return views

    def _follow(self, playbacks: Sequence[Playback], show: Callable[[Sequence[int]], None]) -> list[SessionView]:
        ids = [playback.info.session_id for playback in playbacks]
        began_s = time.monotonic()
        stall_s = self._system.settings.engine_timeout_ms / _MS_PER_S + _STALL_BEYOND_ENGINE_TIMEOUT_S
        reader = self._reader
        while True:
            time.sleep(_TICK_S)
            self._system.check()
            reader.check()
            for playback in playbacks:
                if playback.done() and (lost := playback.report()).frames_lost:
                    raise UserError(f"{lost.source}: the broker did not take {lost.frames_lost} frames", "; ".join(lost.failures))
            with reader.lock:
                views = [reader.results.sessions.get(session_id) for session_id in ids]
                finished = [view for view in views if view is not None and _is_finished(view)]
                heard_at_s = max(reader.heard_at_s.get(session_id, began_s) for session_id in ids)
                show([_samples_done(view) for view in views])
            if len(finished) == len(ids):
                return finished
            if time.monotonic() - heard_at_s > stall_s:
                raise UserError(f"Nothing came for {stall_s:.0f} s, and {len(ids) - len(finished)} channels are not finished", self._why())

    def _why(self) -> str:
        workers = self._system.workers
        if workers is None:
            return ""
        workers.listen(1.5)
        return workers.describe()


class _Reader:
    """Reads the results in a thread."""

    def __init__(self, settings: Settings) -> None:
        self.lock = threading.Lock()
        self.results: Results = Results()
        #: When anything came of a session, on the monotonic clock.
        self.heard_at_s: dict[str, float] = {}
        self._caught_up = threading.Event()
        self._failures: list[Exception] = []
        self._consumer = ResultsConsumer(
            settings,
            self._take,
            caught_up=self._caught_up.set,
            failed=self._failures.append,
            since_ms=dict.fromkeys((COVERAGE, TRANSCRIPTS, SESSIONS), 0),
        )

    def start(self) -> None:
        self._consumer.start()
        self._caught_up.wait(_CAUGHT_UP_TIMEOUT_S)
        self.check()

    def check(self) -> None:
        if self._failures:
            raise self._failures[0]

    def stop(self) -> None:
        self._consumer.stop()

    def _take(self, received: Sequence[Received]) -> None:
        now_s = time.monotonic()
        with self.lock:
            for record, arrived_us in received:
                self.results.apply(record, arrived_us)
                self.heard_at_s[record.session_id] = now_s


def _is_finished(view: SessionView) -> bool:
    """Return whether a session is closed and each of its segments has come."""
    record = view.record
    return record is not None and record.state == "closed" and len(view.finals()) >= record.finals


def _samples_done(view: SessionView | None) -> int:
    return 0 if view is None else sum(end - start for start, end in view.frames)
