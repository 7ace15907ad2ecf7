"""What a stage decides by the clock: that a session has gone silent, that other hotwords are in force. It decides by writing a record.

A decision by the clock comes out otherwise in every replay. So it is an input: a :class:`Timeout` or a :class:`VersionChange` goes onto the
topic that the audio comes from, in the session's own partition, and acts only when it is read there, for every reader alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from schemas.records import FlowRecord, Timeout, VersionChange
from streams.control import Control
from streams.settings import Settings
from streams.tenure import Standing, Tenure

__all__ = ["LOOK_S", "Proposals"]

#: How often to look: a push is to be in force within 2 s, of which compiling takes the most.
LOOK_S: Final = 0.1
#: Sessions are lost after many seconds.
_SILENCE_LOOK_S: Final = 1.0
#: A worker's status goes out every second: when nothing was acknowledged for so long, no broker takes anything.
_BROKERS_AWAY_S: Final = 3.0
#: A change that was written and not read after this long is written again.
_VERSION_REPEAT_S: Final = 5.0


class Proposals:
    """See the module.

    Args:
        settings: after how much silence a session is lost.
        send: writes a record for a session of a tenure to where its audio comes from.
        acknowledged_s: tells when the brokers last took a record (monotonic clock).
        control: what is pushed while calls are live; unset: nothing is.
    """

    def __init__(
        self,
        settings: Settings,
        send: Callable[[Tenure, FlowRecord], None],
        acknowledged_s: Callable[[], float],
        control: Control | None = None,
    ) -> None:
        self._lost_s = settings.session_lost_ms / 1_000
        self._send = send
        self._acknowledged_s = acknowledged_s
        self._control = control
        self._brokers_away = False
        self._silence_due_s = 0.0

    def look(self, tenures: Collection[Tenure], now_s: float) -> None:
        """Write what is due.

        Args:
            tenures: the partitions that are ours.
            now_s: the monotonic clock.
        """
        self.announce_versions(tenures, now_s)
        if now_s >= self._silence_due_s:
            self._silence_due_s = now_s + _SILENCE_LOOK_S
            self.propose_timeouts(tenures, now_s)

    def propose_timeouts(self, tenures: Collection[Tenure], now_s: float) -> None:
        """Propose to end the sessions that nothing was heard of for too long, though the brokers were there all the while."""
        if now_s - self._acknowledged_s() >= _BROKERS_AWAY_S:
            self._brokers_away = True
            return
        if self._brokers_away:
            # Recorders send now what they kept, so silence begins anew. To be frozen for a while is the same.
            self._brokers_away = False
            for tenure in tenures:
                for standing in tenure.sessions.values():
                    standing.seen_s = now_s
        for tenure in tenures:
            for standing in tenure.silent_since(now_s - self._lost_s):
                silent_ms = round((now_s - standing.seen_s) * 1_000)
                standing.seen_s = now_s
                self._send(tenure, Timeout(**_place(tenure, standing), silent_ms=silent_ms))

    def announce_versions(self, tenures: Collection[Tenure], now_s: float) -> None:
        """Write a change for each session that names other hotwords than are in force."""
        control = self._control
        if control is None or not (control.hotwords_to_announce or control.ever_pushed):
            return
        version = control.hotwords_to_announce
        for tenure in tenures:
            for standing in tenure.sessions.values():
                proposed, proposed_s = standing.proposed
                on_its_way = proposed == version and now_s < proposed_s + _VERSION_REPEAT_S
                if standing.hotword_version == version or on_its_way or standing.latest is None:
                    continue
                standing.proposed = version, now_s
                names = control.hotwords.names
                self._send(tenure, VersionChange(**_place(tenure, standing), kind="hotwords", name=names, version=version))


def _place(tenure: Tenure, standing: Standing) -> dict[str, Any]:
    """Return the fields that a record has from its session, where that stands now."""
    latest = standing.latest
    assert latest is not None  # noqa: S101 nothing is proposed for a session that nothing was heard of
    return {
        "channel_id": latest.channel_id,
        "session_id": latest.session_id,
        "conversation_id": latest.conversation_id,
        "epoch": tenure.epoch,
        "position_samples": latest.position_samples,
    }
