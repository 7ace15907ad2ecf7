"""``asr gateway``: serve transcripts and the live page."""

from __future__ import annotations

from typing import Annotated

import typer

from streams.settings import Settings, load_settings

__all__ = ["gateway"]


def gateway(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's. [ASR_GATEWAY_HOST]", show_default=False)
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Port to listen on; 0 for any free one. [ASR_GATEWAY_PORT]", show_default=False)
    ] = None,
) -> None:
    """Serve transcripts to browsers: the live page, a WebSocket, and HTTP for sessions.

    [bold]/[/bold] is the live page ([bold]/?channel=7[/bold] shows one channel), [bold]/ws[/bold] pushes a snapshot and then what happens
    as JSON, [bold]/api/sessions[/bold] and [bold]/api/conversations/ID[/bold] answer with texts and word times, [bold]/healthz[/bold] and
    [bold]/metrics[/bold] are for operation. It listens on this machine alone unless told otherwise, and asks nobody who they are.

    Ctrl-C stops it.
    """
    import asyncio

    wishes = {"gateway_host": host, "gateway_port": port}
    settings = load_settings(**{name: wish for name, wish in wishes.items() if wish is not None})
    asyncio.run(_serve_until_stopped(settings))


async def _serve_until_stopped(settings: Settings) -> None:
    import asyncio
    import contextlib
    import signal

    from rich.console import Console

    from connectors.gateway.server import serve

    serving = asyncio.current_task()
    assert serving is not None  # noqa: S101 a coroutine that runs is run by a task
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, serving.cancel)
    console = Console()
    with contextlib.suppress(asyncio.CancelledError):
        async with serve(settings) as (_, page):
            console.print(f"Live captions on [bold]{page}[/bold]  [dim](Ctrl-C stops)[/dim]", soft_wrap=True)
            await asyncio.Event().wait()
