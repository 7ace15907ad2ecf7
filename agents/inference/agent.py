"""The inference agent: binds :class:`agents.inference.core.InferenceCore` to its topics; it turns features into text."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from agents.inference.core import InferenceCore
from streams import topics
from streams.stage import Route

if TYPE_CHECKING:
    from streams.application import StreamsApp

__all__ = ["ROUTE", "register"]

ROUTE = Route("inference", topics.FEATURES, None)


def register(app: StreamsApp) -> None:
    """Add the stage and its agent to a worker's app."""
    stage, source = app.add_stage(ROUTE, partial(InferenceCore, control=app.control))

    @app.agent(source, name="inference")
    async def inference(stream: Any) -> None:
        """Turn features into text."""
        async for event in stream.events():
            await stage.accept(event)
