"""One run of the demo: start, play, listen, show, measure."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from connectors.recorder.recorder import Recorder
from connectors.results import Received, Results, ResultsConsumer
from ops.demo.player import Played, Player
from ops.demo.view import ChannelView, channel_table, final_line, lost_lines, summary_lines
from ops.measure import Measurement, Report, word_errors
from ops.processes import System
from schemas.records import Transcript
from streams.errors import UserError
from streams.settings import Settings
from streams.topics import COVERAGE, PARTIALS, SESSIONS, TRANSCRIPTS

__all__ = ["Listener", "run_demo"]

#: How often the table is drawn, and whatever else there is to do is looked at.
_TICK_S: Final = 0.25
#: After the calls: as long as something still comes, it is waited for; 15 s outlast a restart of the engine.
_QUIET_S: Final = 15.0
_CAUGHT_UP_TIMEOUT_S: Final = 30.0
#: More finals than come between two ticks.
_LINES: Final = 1_000


class Listener:
    """Reads all results in a thread, into a measurement and into views of the sessions. Attributes belong to whoever holds :attr:`lock`.

    Attributes:
        lock: held while records are taken.
        measured: the measurement.
        results: the views.
        lines: the newest finals as lines, for whoever prints them.
        heard_at_s: when the last record came, on the monotonic clock.
    """

    def __init__(self, settings: Settings) -> None:
        self.lock = threading.Lock()
        self.measured = Measurement()
        self.results = Results()
        self.lines: deque[str] = deque(maxlen=_LINES)
        self.heard_at_s = time.monotonic()
        self._caught_up = threading.Event()
        self._failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._consumer = ResultsConsumer(
            settings,
            self._take,
            caught_up=self._caught_up.set,
            failed=self._failures.put,
            since_ms=dict.fromkeys((COVERAGE, PARTIALS, TRANSCRIPTS, SESSIONS), 0),
        )

    def start(self) -> None:
        """Begin to read; what comes from now on is taken as it comes.

        Raises:
            UserError: the topics cannot be read.
        """
        self._consumer.start()
        if not self._caught_up.wait(_CAUGHT_UP_TIMEOUT_S):
            self.check()
            raise UserError("Kafka does not answer readers", "See whether the broker is overloaded.")

    def check(self) -> None:
        """Raise what stopped the reading, if anything did."""
        with contextlib.suppress(queue.Empty):
            raise self._failures.get_nowait()

    def stop(self) -> None:
        """Stop reading."""
        self._consumer.stop()

    def _take(self, received: Sequence[Received]) -> None:
        with self.lock:
            self.heard_at_s = time.monotonic()
            for record, arrived_us in received:
                self.measured.take(record, arrived_us)
                change = self.results.apply(record, arrived_us)
                if change is not None and change.kind == "final" and isinstance(change.record, Transcript) and change.record.text:
                    self.lines.append(final_line(change.session, change.record))


class _Run:
    """What is being played and shown."""

    def __init__(self, system: System, listener: Listener, console: Console, *, quiet: bool) -> None:
        self._system = system
        self._listener = listener
        self._console = console
        self._quiet = quiet
        self._channels: dict[str, list[Played]] = {}
        self._open: list[Played] = []

    def announce(self, played: Played) -> None:
        """Take note of a session that is about to begin."""
        with self._listener.lock:
            self._listener.measured.expect(played.session_id, played.channel_id, played.party.words)
        self._open.append(played)

    def play(self, player: Player, title: str) -> None:
        """Play until the calls are over, or until Ctrl-C."""
        try:
            with self._view(title) as draw:
                player.start()
                while not player.is_over:
                    self._tick()
                    player.play_due()
                    draw()
                self._wait_for_words(draw)
        except KeyboardInterrupt:
            self._console.print("Hanging up; Ctrl-C again to leave at once.")
            player.stop()
            while not player.is_over:
                self._tick()
            self._wait_for_words(lambda: None)

    def _tick(self) -> None:
        time.sleep(_TICK_S)
        self._system.check()
        self._listener.check()
        now_us = time.time_ns() // 1_000
        with self._listener.lock:
            for played in self._open:
                if played.playback.started_us <= now_us:
                    self._show(played)
            for played in self._open:
                if played.playback.done():
                    self._settle(played)
        self._open = [played for played in self._open if not played.playback.done()]

    def _show(self, played: Played) -> None:
        """Show a session on its channel; the one before it may still be finished, those before that are forgotten."""
        shown = self._channels.setdefault(played.channel_id, [])
        if played not in shown:
            shown.append(played)
            for old in shown[:-2]:
                self._listener.results.forget(old.session_id)
            del shown[:-2]

    def _settle(self, played: Played) -> None:
        """Tell the measurement what the recorder has sent of a call that is over."""
        report = played.playback.report()
        for failure in report.failures:
            self._console.print(f"Channel {played.channel_id}: {failure}", style="red", markup=False)
        if not report.frames_sent:
            self._listener.measured.forget(played.session_id)
        for span in report.spans:
            self._listener.measured.sent(played.session_id, span.start_sample, span.end_sample)

    def _wait_for_words(self, draw: Any) -> None:
        """Wait until all sessions are closed and all frames answered, as long as anything comes."""
        self._listener.heard_at_s = time.monotonic()
        while True:
            self._tick()
            draw()
            with self._listener.lock:
                waiting = self._listener.measured.unsettled()
                quiet_s = time.monotonic() - self._listener.heard_at_s
            if not waiting:
                return
            if quiet_s > _QUIET_S:
                workers = self._system.workers
                if workers is not None:
                    workers.listen(_TICK_S)
                who = workers.describe() if workers is not None else ""
                self._console.print(
                    f"Nothing came for {_QUIET_S:.0f} s, and {len(waiting)} sessions are not finished. {who}. "
                    f"The logs are in {self._system.folder}",
                    style="red",
                    markup=False,
                )
                self._system.keep_logs = True
                return

    @contextlib.contextmanager
    def _view(self, title: str) -> Iterator[Any]:
        """Yield what shows the newest state: a live table in a terminal, else a line for each final."""
        if self._quiet:
            yield lambda: None
        elif self._console.is_terminal:
            with Live(console=self._console, auto_refresh=False, transient=True) as live:
                yield lambda: live.update(self._table(title), refresh=True)
        else:
            yield self._print_finals

    def _table(self, title: str) -> Any:
        with self._listener.lock:
            sessions = self._listener.results.sessions
            newest = [shown[-1] for shown in self._channels.values()]
            views = [ChannelView(played.channel_id, played.party.name, sessions.get(played.session_id)) for played in newest]
            return channel_table(views, time.time_ns() // 1_000, title)

    def _print_finals(self) -> None:
        while self._listener.lines:
            self._console.print(self._listener.lines.popleft(), markup=False)


def run_demo(
    settings: Settings,
    overrides: Mapping[str, Any],
    console: Console,
    *,
    channels: int,
    seconds: float | None,
    headless: bool,
    seed: int,
    engine_wished: str | None = None,
    during_play: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Report:
    """Run the demo and return what was measured, after printing its summary.

    Args:
        settings: the configuration.
        overrides: what in it differs from the environment.
        console: where to show it.
        channels: how many channels to play.
        seconds: how long; None: until Ctrl-C.
        headless: without the page and the live table.
        seed: which calls.
        engine_wished: the engine that somebody asked for by name; workers that run already must have it.
        during_play: what is entered while the calls play.
    """
    if not headless and "gateway_port" not in settings.model_fields_set and _is_taken(settings.gateway_host, settings.gateway_port):
        overrides = {**overrides, "gateway_port": 0}
    with contextlib.ExitStack() as stack:
        with console.status("Starting") as status:
            system = stack.enter_context(
                System(settings, "demo", overrides=overrides, gateway=not headless, on_progress=lambda what: status.update(what))
            )
            if engine_wished is not None:
                system.require_engine(engine_wished)
            listener = Listener(system.settings)
            listener.start()
            stack.callback(listener.stop)
            recorder = stack.enter_context(Recorder(system.settings))
            run = _Run(system, listener, console, quiet=headless)
            player = Player(recorder, channels, seconds, seed, run.announce)
            # What is imported and computed once must not fall into the first words.
            word_errors(["one"], ["two"])
        how_long = f"for {seconds:g} s" if seconds is not None else "until Ctrl-C"
        title = f"{channels} channels, {how_long}"
        if not headless:
            title += f"; live page: {system.gateway_url}"
        console.print(f"Playing {title}", markup=False)
        with during_play():
            run.play(player, title)
        with listener.lock:
            report = listener.measured.report()
            lost = listener.measured.lost()
        system.keep_logs |= bool(lost)
    for line in summary_lines(report):
        console.print(line, markup=False)
    for line in lost_lines(lost):
        console.print(line, style="red", markup=False)
    if lost:
        console.print(f"The logs are in {system.folder}", markup=False)
    return report


def _is_taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
