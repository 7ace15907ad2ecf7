"""The features agent: binds :class:`agents.features.core.FeaturesCore` to its topics; it turns speech into features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agents.features.core import FeaturesCore
from streams import topics
from streams.stage import Route

if TYPE_CHECKING:
    from streams.application import StreamsApp

__all__ = ["ROUTE", "register"]

ROUTE = Route("features", topics.SPEECH, topics.FEATURES)


def register(app: StreamsApp) -> None:
    """Add the stage and its agent to a worker's app."""
    stage, source = app.add_stage(ROUTE, FeaturesCore)

    @app.agent(source, name="features")
    async def features(stream: Any) -> None:
        """Turn speech into features."""
        async for event in stream.events():
            await stage.accept(event)
