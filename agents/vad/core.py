"""The VAD as a stage's core: audio of all sessions in, segments of speech and answers for silence out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from agents.vad.detectors import Detectors, NeuralDetector, SpectralDetector
from agents.vad.session import Session
from schemas.records import SessionRecord
from streams.core import Emitter, Input, SessionKey, SessionState
from streams.settings import Settings

__all__ = ["VadCore"]

_T = TypeVar("_T")


class VadCore:
    """Implements :class:`streams.core.Core`. The numeric work of a step is done on one thread of its own, over all sessions at once.

    Args:
        settings: the configuration.
        emitter: where what follows goes.
        neural: the trained detector to use; unset: the configured one.
    """

    def __init__(self, settings: Settings, emitter: Emitter, neural: NeuralDetector | SpectralDetector | None = None) -> None:
        self._settings: Final = settings
        self._emitter: Final = emitter
        self._detectors: Final = Detectors(settings, neural)
        self._sessions: Final[dict[SessionKey, Session]] = {}
        self._executor: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vad")

    async def start(self) -> None:
        """Load the detectors' models and run them once."""
        await self._in_thread(self._detectors.warm_up)

    async def stop(self) -> None:
        """End the thread, after the step in progress."""
        await asyncio.to_thread(self._executor.shutdown)

    def load(self, key: SessionKey, state: SessionState) -> None:
        """Take over a session; its warm inputs follow.

        Raises:
            SnapshotError: the state was written by another version, or is damaged.
        """
        self.drop(key)
        session = self._new_session(key)
        session.restore(state)
        self._sessions[key] = session

    def drop(self, key: SessionKey) -> None:
        """Forget a session, also in the middle of a step."""
        session = self._sessions.pop(key, None)
        if session is not None:
            session.dropped = True

    async def step(self, inputs: Sequence[Input]) -> None:
        """Take everything that is ready now and emit what follows."""
        sessions: dict[SessionKey, Session] = {}
        for item in inputs:
            session = sessions.get(item.key) or self._sessions.get(item.key) or self._new_session(item.key)
            self._sessions[item.key] = sessions[item.key] = session
            session.inbox.append(item)
        said = await self._in_thread(self._work, list(sessions.values()))
        for item in inputs:
            if item.warm or sessions[item.key].dropped:
                continue
            if records := said.get(item):
                self._emitter.emit(item, records)
            self._emitter.done(item)
        for key, session in sessions.items():
            if (session.over or not session.started) and not session.dropped:
                self.drop(key)

    def snapshot(self, key: SessionKey) -> SessionState | None:
        """Return a session's state after the steps so far, or None if it is over."""
        session = self._sessions.get(key)
        return session.snapshot() if session is not None else None

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    def _new_session(self, key: SessionKey) -> Session:
        return Session(key, self._settings, self._detectors)

    def _work(self, sessions: Sequence[Session]) -> dict[Input, list[SessionRecord]]:
        """Return what follows from each input in the sessions' inboxes. A session that begins anew in between takes another round."""
        said: dict[Input, list[SessionRecord]] = {}
        busy = list(sessions)
        while busy:
            for session in busy:
                session.plan()
            heard = [(session, session.hearing) for session in busy if session.hearing is not None]
            decisions = self._detectors.decide([channel for _, channel in heard])
            decided = {session.key: mine for (session, _), mine in zip(heard, decisions, strict=True)}
            for session in busy:
                session.follow(decided.get(session.key), said)
            busy = [session for session in busy if session.inbox]
        return said
