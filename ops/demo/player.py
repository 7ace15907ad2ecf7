"""Plays calls on lines: one call after the other, the parties of a dialogue at the same moment on channels of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from connectors.recorder.framing import WireFormat
from connectors.recorder.media import MemorySource
from connectors.recorder.recorder import Playback, Recorder
from ops.demo.calls import Call, Party, assemble, call_seconds, line_sizes

__all__ = ["Played", "Player"]

#: Before the first sample is captured there is time to put the first calls on all lines.
_LEAD_US: Final = 300_000
#: The next call is put together this long before the last one ends.
_AHEAD_US: Final = 3_000_000
_US_PER_S: Final = 1_000_000


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
    next_call: Call | None = None
    next_seconds: float = 0.0
    playing: list[Played] = field(default_factory=list)

    def prepare(self) -> None:
        seconds = next(self.lengths_s, 0.0)
        self.next_seconds = seconds
        self.next_call = assemble(len(self.channel_ids), seconds, telephone=self.telephone, rng=self.rng) if seconds else None


class Player:
    """All lines of the demo. Call :meth:`play_due` about twice a second.

    Args:
        recorder: plays them.
        channels: how many channels to fill.
        seconds: how long; None: until stopped.
        seed: the same one gives the same calls.
    """

    def __init__(self, recorder: Recorder, channels: int, seconds: float | None, seed: int = 0) -> None:
        self._recorder = recorder
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

    def start(self) -> list[Played]:
        """Begin the first call of each line, all at the same moment."""
        now_us = time.time_ns() // 1_000 + _LEAD_US
        for line in self._lines:
            line.starts_us = now_us
        return self.play_due()

    def play_due(self) -> list[Played]:
        """Put the calls on their lines that begin soon; return what is new."""
        now_us = time.time_ns() // 1_000
        return [played for line in self._lines if line.starts_us < now_us + _AHEAD_US for played in self._play(line)]

    def stop(self) -> None:
        """Hang up everywhere."""
        for line in self._lines:
            line.next_call = None
            for played in line.playing:
                played.playback.stop()

    @property
    def is_over(self) -> bool:
        """Whether all calls have ended and all that was sent is delivered."""
        return all(line.next_call is None and all(played.playback.done() for played in line.playing) for line in self._lines)

    def _play(self, line: _Line) -> list[Played]:
        call = line.next_call
        if call is None:
            return []
        conversation_id = ""
        line.playing = [played for played in line.playing if not played.playback.done()]
        new = []
        for channel_id, party in zip(line.channel_ids, call.parties, strict=True):
            playback = self._recorder.play(
                MemorySource(party.payload(), f"bundled recordings of {party.voice}", WireFormat(party.encoding, party.sample_rate_hz)),
                channel_id,
                conversation_id=conversation_id,
                party=party.name,
                language="en",
                direction="inbound",
                start_us=line.starts_us,
            )
            conversation_id = playback.info.conversation_id
            new.append(Played(party, playback))
        line.playing += new
        line.starts_us += round(line.next_seconds * _US_PER_S)
        line.prepare()
        return new
