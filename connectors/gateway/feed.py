"""What each connected client is still to be sent: nothing final is ever left out, and nothing is kept without bound.

Two kinds of messages: *lasting* ones (finals, second passes, cancellations, departures) have a cursor and reach every client, in order;
*passing* ones (partials, session states, latencies) are replaced by a newer one of the same thing while a client has not taken them. No
sockets here; one event loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import msgspec

from connectors.gateway.messages import (
    CancelledMessage,
    FinalMessage,
    GoneMessage,
    LatencyMessage,
    Message,
    PartialMessage,
    RefinedMessage,
    SessionMessage,
)
from connectors.results import Filter

__all__ = ["LASTING_LIMIT", "Feed", "Subscriber", "encode"]

#: Lasting messages kept for clients that come back, and for each slow one: at 50 channels with a final every 5 s, 400 s of them (~1 MB).
LASTING_LIMIT: Final = 4_000


class Subscriber:
    """One client's share, taken as fast as the client reads.

    Args:
        wanted: the sessions that it wants.
        limit: how many lasting messages may wait.

    Attributes:
        overflowed: set once more than that waited; the client must be disconnected and begin anew.
        replaced: passing messages that were replaced before the client took them.
    """

    def __init__(self, wanted: Filter, limit: int = LASTING_LIMIT) -> None:
        self.wanted = wanted
        self.overflowed = asyncio.Event()
        self.replaced = 0
        self._limit = limit
        self._sessions: dict[Hashable, str] = {}
        self._lasting: deque[str] = deque()
        self._passing: dict[Hashable, str] = {}
        self._due = asyncio.Event()

    def add_session(self, session_id: str, text: str) -> None:
        """Add a session's state, to be sent ahead of what is said in it."""
        self._replace(self._sessions, session_id, text)

    def add_lasting(self, text: str) -> None:
        """Add a message that must be sent."""
        if len(self._lasting) >= self._limit:
            self.overflowed.set()
            return
        self._lasting.append(text)
        self._due.set()

    def add_passing(self, thing: Hashable, text: str) -> None:
        """Add a message that a newer one about the same thing may replace."""
        self._replace(self._passing, thing, text)

    def drop_passing(self, thing: Hashable) -> None:
        """Leave out what waits about a thing: it is settled."""
        self._passing.pop(thing, None)

    async def take(self) -> list[str]:
        """Return all that is due, in the order in which to send it; wait until there is something."""
        await self._due.wait()
        texts = [*self._sessions.values(), *self._lasting, *self._passing.values()]
        self._sessions.clear()
        self._lasting.clear()
        self._passing.clear()
        self._due.clear()
        return texts

    def _replace(self, waiting: dict[Hashable, str], thing: Hashable, text: str) -> None:
        self.replaced += thing in waiting
        waiting[thing] = text
        self._due.set()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A lasting message that was published."""

    number: int
    owner: tuple[str, str, str]
    text: str


class Feed:
    """Publishes messages to subscribers, and keeps the newest lasting ones for those who come back.

    Args:
        limit: how many lasting messages are kept, and may wait for each subscriber.

    Attributes:
        subscribers: who listens now.
    """

    def __init__(self, limit: int = LASTING_LIMIT) -> None:
        self.subscribers: set[Subscriber] = set()
        self.limit = limit
        # Cursors of another run of the gateway must not be taken for ours.
        self._run = secrets.token_hex(4)
        self._published = 0
        self._kept: deque[_Kept] = deque(maxlen=limit)

    @property
    def cursor(self) -> str:
        """The place of the newest lasting message."""
        return f"{self._run}-{self._published}"

    def subscribe(self, subscriber: Subscriber) -> None:
        """Give a subscriber everything that is published from now on."""
        self.subscribers.add(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop publishing to a subscriber."""
        self.subscribers.discard(subscriber)

    def missed(self, after: str, wanted: Filter) -> list[str] | None:
        """Return the lasting messages since a cursor, or None if they are not all kept (or the cursor is none of ours)."""
        run, _, number_text = after.rpartition("-")
        if run != self._run or not number_text.isdecimal():
            return None
        number = int(number_text)
        oldest = self._kept[0].number if self._kept else self._published + 1
        if not oldest - 1 <= number <= self._published:
            return None
        return [kept.text for kept in self._kept if kept.number > number and wanted.wants(*kept.owner)]

    def publish_session(self, message: SessionMessage) -> None:
        """Publish a session's state."""
        session = message.session
        text = cache(lambda: encode(message))
        for subscriber in self._listeners(session.session_id, session.channel_id, session.conversation_id):
            subscriber.add_session(session.session_id, text())

    def publish_partial(self, message: PartialMessage) -> None:
        """Publish the text of an open segment."""
        text = cache(lambda: encode(message))
        for subscriber in self._listeners(message.session_id, message.channel_id, message.conversation_id):
            subscriber.add_passing((message.session_id, message.partial.segment), text())

    def publish_lasting(self, message: FinalMessage | RefinedMessage | CancelledMessage | GoneMessage) -> None:
        """Publish a message that must arrive; the feed sets its cursor."""
        self._published += 1
        text = encode(msgspec.structs.replace(message, cursor=self.cursor))
        owner = message.session_id, message.channel_id, message.conversation_id
        self._kept.append(_Kept(self._published, owner, text))
        for subscriber in self._listeners(*owner):
            match message:
                case FinalMessage():
                    subscriber.drop_passing((message.session_id, message.segment.segment))
                case CancelledMessage():
                    subscriber.drop_passing((message.session_id, message.segment))
            subscriber.add_lasting(text)

    def publish_latency(self, make: Callable[[Filter], LatencyMessage]) -> None:
        """Publish latencies: each subscriber's of the sessions that it wants."""
        everything = cache(lambda: encode(make(Filter())))
        for subscriber in self.subscribers:
            text = everything() if subscriber.wanted.is_open else encode(make(subscriber.wanted))
            subscriber.add_passing("latency", text)

    def _listeners(self, session_id: str, channel_id: str, conversation_id: str) -> Iterator[Subscriber]:
        return (one for one in self.subscribers if one.wanted.wants(session_id, channel_id, conversation_id))


def encode(message: Message) -> str:
    """Return a message as it goes over the wire."""
    return msgspec.json.encode(message).decode()
