"""Which calls are known, and which of them are meant."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from connectors.results import to_ms
from schemas.codec import Codec, DecodeError
from schemas.records import Session
from streams.errors import UserError
from streams.kafka import read_to_end
from streams.settings import Settings
from streams.topics import SESSIONS

__all__ = ["Call", "Wanted", "find", "moment_us"]

_US_PER_S: Final = 1_000_000
_AGO: Final = re.compile(r"(\d+)\s*(s|min|h|d)")
_UNITS_S: Final = {"s": 1, "min": 60, "h": 3_600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class Call:
    """One channel of a call, as its newest session record says, and where its records are."""

    session: Session
    partition: int

    @property
    def session_id(self) -> str:
        """The session."""
        return self.session.session_id

    @property
    def ends_us(self) -> int:
        """When its audio ends, Unix time."""
        return self.session.started_us + to_ms(max(self.session.position_samples, self.session.covered_to_sample)) * 1_000

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.session.state == "closed"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which calls are meant: all conditions hold together; what is empty asks for nothing.

    Attributes:
        sessions: their ids.
        channels: their channels.
        from_us: calls that reach beyond this Unix time.
        to_us: calls that began before it.
    """

    sessions: Collection[str] = ()
    channels: Collection[str] = ()
    from_us: int | None = None
    to_us: int | None = None

    def includes(self, call: Call) -> bool:
        """Return whether a call is meant."""
        session = call.session
        return (
            (not self.sessions or session.session_id in self.sessions)
            and (not self.channels or session.channel_id in self.channels)
            and (self.from_us is None or call.ends_us >= self.from_us)
            and (self.to_us is None or session.started_us < self.to_us)
        )


def find(settings: Settings, codec: Codec, wanted: Wanted) -> list[Call]:
    """Return the calls that are meant, the oldest first.

    Args:
        settings: the system that recorded them.
        codec: reads its records.
        wanted: which are meant.

    Raises:
        UserError: there is none; the message says what there is.
    """
    newest: dict[str, Call] = {}
    for message in read_to_end(settings, [SESSIONS]):
        try:
            record = codec.decode(message.value())
        except DecodeError:
            continue
        if isinstance(record, Session):
            known = newest.get(record.session_id)
            if known is None or _rank(record) >= _rank(known.session):
                newest[record.session_id] = Call(record, int(message.partition() or 0))
    calls = sorted((call for call in newest.values() if wanted.includes(call)), key=lambda call: call.session.started_us)
    if not calls:
        raise UserError(
            f"None of the {len(newest)} calls that {SESSIONS.full_name(settings)} knows is meant",
            f"The newest began {_clock(max(call.session.started_us for call in newest.values()))}." if newest else "",
        )
    return calls


def _rank(session: Session) -> tuple[bool, int, int, int]:
    return session.state == "closed", session.epoch, session.position_samples, session.covered_to_sample


def moment_us(text: str, *, now: Callable[[], float] = time.time) -> int:
    """Return a moment that a person wrote, as Unix time in µs.

    Args:
        text: a date and time as in ISO 8601 (local unless it names a zone), a time of today, or how long ago: ``30min``, ``2h``, ``1d``.
        now: the clock.

    Raises:
        UserError: it is none of these.

    Examples:
        >>> moment_us("2h", now=lambda: 10_000.0)
        2800000000
    """
    if ago := _AGO.fullmatch(text.strip()):
        return round((now() - timedelta(seconds=int(ago[1]) * _UNITS_S[ago[2]]).total_seconds()) * _US_PER_S)
    today = datetime.fromtimestamp(now()).astimezone().date().isoformat()
    for candidate in (text, f"{today}T{text}"):
        try:
            return round(datetime.fromisoformat(candidate).astimezone().timestamp() * _US_PER_S)
        except ValueError:
            continue
    raise UserError(f"{text!r} is no time", "Write 2026-11-30T14:00, 14:00, or how long ago: 30min, 2h, 1d.")


def _clock(us: int) -> str:
    return datetime.fromtimestamp(us / _US_PER_S).astimezone().isoformat(sep=" ", timespec="seconds")
