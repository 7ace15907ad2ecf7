"""A recorder that can be killed: ``python -m ops.chaos.player TASK``. It plays known calls, and writes down what it sends as it sends it.

The task is a JSON file, see :class:`Task`. The journal holds a line for each session that begins, each frame handed to Kafka, and each
session that ended; it is all that is left of what a killed player sent. SIGTERM lets the calls in progress end, and then the player.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from connectors.recorder.framing import WireFormat
from connectors.recorder.media import MemorySource
from connectors.recorder.recorder import Playback, Recorder
from schemas.records import SAMPLE_RATE_HZ, Encoding, FrameSpan
from streams.settings import load_settings

__all__ = ["CallFile", "Planned", "Task", "main"]

#: The next call is put on its channel this long before the last one ends.
_AHEAD_US: Final = 500_000
_TICK_S: Final = 0.05
#: What waits for the broker at the end: an outage of the only one, and then some.
_FLUSH_S: Final = 60.0
_US_PER_S: Final = 1_000_000


class CallFile(msgspec.Struct, frozen=True):
    """A call's audio: ``file`` holds it as it goes on the wire."""

    name: str
    file: str
    encoding: Encoding
    sample_rate_hz: int


class Planned(msgspec.Struct, frozen=True):
    """A call to play: all of it, or its first ``samples`` at 16 kHz."""

    call: str
    samples: int | None = None


class Task(msgspec.Struct, frozen=True):
    """What to play.

    Attributes:
        player: name of this process, for the journal.
        run: which run it is, for the journal.
        calls: the audio.
        channels: by channel, the calls to play one after the other.
        again: begin again after the last one, until SIGTERM.
        journal: the file to append to.
    """

    player: str
    run: str
    calls: tuple[CallFile, ...]
    channels: dict[str, tuple[Planned, ...]]
    again: bool
    journal: str


class _Journal:
    """Appends lines, each with one write: a killed process leaves at most a part of the last one."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("ab", buffering=0)
        self._lock = threading.Lock()

    def write(self, **entry: Any) -> None:
        line = json.dumps(entry).encode() + b"\n"
        with self._lock:
            self._file.write(line)


class _Channel:
    """One channel and its calls."""

    def __init__(self, channel_id: str, planned: tuple[Planned, ...], start_us: int) -> None:
        self.channel_id = channel_id
        self.start_us = start_us
        self.playing: list[tuple[str, Playback]] = []
        self._planned = planned
        self._next = 0

    def draw(self, *, again: bool) -> Planned | None:
        """Return the next call, if there is one."""
        if self._next >= len(self._planned) and not again:
            return None
        self._next += 1
        return self._planned[(self._next - 1) % len(self._planned)]


class _Player:
    def __init__(self, task: Task, recorder: Recorder) -> None:
        self._task = task
        self._recorder = recorder
        self._journal = _Journal(Path(task.journal))
        self._calls = {call.name: (call, Path(call.file).read_bytes()) for call in task.calls}
        self._stopping = threading.Event()

    def stop(self, *_signal: Any) -> None:
        """Begin no more calls."""
        self._stopping.set()

    def play(self) -> None:
        start_us = time.time_ns() // 1_000 + _AHEAD_US
        channels = [_Channel(channel_id, planned, start_us) for channel_id, planned in self._task.channels.items()]
        while True:
            for channel in channels:
                self._note_ended(channel)
                if not self._stopping.is_set() and time.time_ns() // 1_000 > channel.start_us - _AHEAD_US:
                    self._begin(channel)
            if not any(channel.playing for channel in channels):
                return
            time.sleep(_TICK_S)

    def _begin(self, channel: _Channel) -> None:
        planned = channel.draw(again=self._task.again)
        if planned is None:
            channel.start_us = sys.maxsize
            return
        call, payload = self._calls[planned.call]
        wire = WireFormat(call.encoding, call.sample_rate_hz)
        if planned.samples is not None:
            payload = payload[: planned.samples * call.sample_rate_hz // SAMPLE_RATE_HZ * wire.bytes_per_sample]
        # A restarted player, or one that was held up, does not send the past.
        start_us = max(channel.start_us, time.time_ns() // 1_000)
        begun = threading.Event()
        session_id = ""

        def sent(span: FrameSpan) -> None:
            begun.wait()
            self._journal.write(
                what="frame", session_id=session_id, start=span.start_sample, end=span.end_sample, captured_us=span.captured_us
            )

        playback = self._recorder.play(
            MemorySource(payload, planned.call, wire), channel.channel_id, language="en", start_us=start_us, on_frame=sent
        )
        session_id = playback.info.session_id
        self._journal.write(
            what="begin",
            session_id=session_id,
            channel_id=channel.channel_id,
            partition=playback.info.partition,
            call=planned.call,
            run=self._task.run,
            player=self._task.player,
            started_us=start_us,
        )
        begun.set()
        channel.playing.append((session_id, playback))
        samples = len(payload) // wire.bytes_per_sample * SAMPLE_RATE_HZ // call.sample_rate_hz
        channel.start_us = start_us + samples * _US_PER_S // SAMPLE_RATE_HZ

    def _note_ended(self, channel: _Channel) -> None:
        for session_id, playback in channel.playing:
            if playback.done():
                report = playback.report()
                self._journal.write(what="end", session_id=session_id, frames_lost=report.frames_lost, failures=report.failures)
        channel.playing = [each for each in channel.playing if not each[1].done()]


def main(arguments: list[str]) -> int:
    """Play what a task says."""
    task = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Task)
    with Recorder(load_settings(), keep_spans=False, spool=True) as recorder:
        player = _Player(task, recorder)
        signal.signal(signal.SIGTERM, player.stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        player.play()
        recorder.close(_FLUSH_S)
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
