"""Plays calls on lines: one call after the other, the parties of a dialogue at the same moment on channels of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from connectors.recorder.framing import DEFAULT_FRAME_MS, WireFormat
from connectors.recorder.media import MemorySource
from connectors.recorder.recorder import Playback, Recorder
from ops.demo.calls import Party, assemble, call_seconds, line_sizes

__all__ = ["Played", "Player"]

#: Before the first sample is captured there is time to put the first calls on all lines.
_LEAD_US: Final = 300_000
#: The next call is put on its line this long before the last one ends.
_AHEAD_US: Final = 3_000_000
#: It is put together this long before: not all lines' at the same time, for that takes the processor from what is being shown.
_PREPARE_US: Final = 10_000_000
_US_PER_S: Final = 1_000_000
_US_PER_MS: Final = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """One party of a call that is being played, or was."""

    party: Party
    playback: Playback

    @property
    def session_id(self) -> str:
        """Its session."""
        return self.playback.info.session_id

    @property
    def channel_id(self) -> str:
        """Its channel."""
        return self.playback.info.channel_id


@dataclass(slots=True, eq=False)
class _Line:
    """One or two channels that carry calls. The next call is put together before it is due."""

    channel_ids: tuple[str, ...]
    telephone: bool
    lengths_s: Iterator[float]
    rng: np.random.Generator
    starts_us: int = 0
    seconds: float = 0.0
    parties: tuple[tuple[Party, MemorySource], ...] = ()
    is_over: bool = False
    playing: list[Playback] = field(default_factory=list)

    def prepare(self) -> None:
        """Put the next call together, unless there is none."""
        self.seconds = next(self.lengths_s, 0.0)
        if not self.seconds:
            self.is_over = True
            return
        call = assemble(len(self.channel_ids), self.seconds, telephone=self.telephone, rng=self.rng)
        self.parties = tuple((party, _source(party)) for party in call.parties)


def _source(party: Party) -> MemorySource:
    wire = WireFormat(party.encoding, party.sample_rate_hz)
    return MemorySource(party.payload(), f"bundled recordings of {party.voice}", wire)


class Player:
    """All lines of the demo. Call :meth:`play_due` a few times a second.

    Args:
        recorder: plays them.
        channels: how many channels to fill.
        seconds: how long; None: until stopped.
        seed: the same one gives the same calls.
        announce: told of each session before its first sample is captured.
    """

    def __init__(
        self,
        recorder: Recorder,
        channels: int,
        seconds: float | None,
        seed: int = 0,
        announce: Callable[[Played], None] = lambda _played: None,
    ) -> None:
        self._recorder = recorder
        self._announce = announce
        self._lines: list[_Line] = []
        first = 1
        for number, size in enumerate(line_sizes(channels)):
            rng = np.random.default_rng((seed, number))
            channel_ids = tuple(str(channel) for channel in range(first, first + size))
            # Every other pair of lines is a telephone line as the network has it.
            self._lines.append(_Line(channel_ids, number % 4 in {1, 2}, call_seconds(seconds, rng), rng))
            first += size
        for line in self._lines:
            line.prepare()

    def start(self) -> None:
        """Begin the first call of each line: all at once, but no line's frames end at the same moments as another's."""
        starts_us = time.time_ns() // 1_000 + _LEAD_US
        for line in self._lines:
            line.starts_us = starts_us + int(line.rng.integers(_US_PER_MS * DEFAULT_FRAME_MS))
            self._play(line)

    def play_due(self) -> None:
        """Put the calls on their lines that begin soon, and another one together."""
        now_us = time.time_ns() // 1_000
        for line in self._lines:
            if line.parties and line.starts_us < now_us + _AHEAD_US:
                self._play(line)
        unprepared = [line for line in self._lines if not line.parties and not line.is_over and line.starts_us < now_us + _PREPARE_US]
        if unprepared:
            min(unprepared, key=lambda line: line.starts_us).prepare()

    def stop(self) -> None:
        """Hang up everywhere."""
        for line in self._lines:
            line.parties, line.is_over = (), True
            for playback in line.playing:
                playback.stop()

    @property
    def is_over(self) -> bool:
        """Whether all calls have ended and all that was sent is delivered."""
        return all(line.is_over and not line.parties and all(playback.done() for playback in line.playing) for line in self._lines)

    def _play(self, line: _Line) -> None:
        conversation_id = ""
        line.playing = [playback for playback in line.playing if not playback.done()]
        for channel_id, (party, source) in zip(line.channel_ids, line.parties, strict=True):
            playback = self._recorder.play(
                source,
                channel_id,
                conversation_id=conversation_id,
                party=party.name,
                language="en",
                direction="inbound",
                start_us=line.starts_us,
            )
            conversation_id = playback.info.conversation_id
            line.playing.append(playback)
            self._announce(Played(party, playback))
        line.starts_us += round(line.seconds * _US_PER_S)
        line.parties = ()
