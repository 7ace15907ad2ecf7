"""The vad agent: binds :class:`agents.vad.core.VadCore` to its topics; it reads what recorders sent, finds speech, answers silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agents.vad.core import VadCore
from streams import topics
from streams.stage import Route

if TYPE_CHECKING:
    from streams.application import StreamsApp

__all__ = ["ROUTE", "register"]

ROUTE = Route("vad", topics.AUDIO, topics.SPEECH)


def register(app: StreamsApp) -> None:
    """Add the stage and its agent to a worker's app."""
    stage, source = app.add_stage(ROUTE, VadCore)

    @app.agent(source, name="vad")
    async def vad(stream: Any) -> None:
        """Find speech in what recorders send; answer silence."""
        async for event in stream.events():
            await stage.accept(event)
