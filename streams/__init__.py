"""The streaming application: settings, topics, the runtime of the stages, and the Faust app.

``streams.app`` is what ``faust -A streams worker`` runs. It is built, from ``ASR_*``, when it is first asked for: importing this package
has no effect.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.application import StreamsApp

__all__ = ["app"]


@cache
def _app() -> StreamsApp:
    from streams.application import create_app
    from streams.settings import load_settings

    return create_app(load_settings())


def __getattr__(name: str) -> Any:
    if name == "app":
        return _app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
