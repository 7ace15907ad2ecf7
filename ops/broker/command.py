"""``asr broker``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

__all__ = ["broker"]

_DEFAULT_PORT: Final = 9092
_LOOK_EVERY_S: Final = 0.5


def broker(
    nodes: Annotated[int, typer.Option(help="1, or 3: each record on three brokers, and two of them acknowledge it.")] = 1,
    port: Annotated[int, typer.Option(min=0, max=65_533, help="Port of the first node, the others follow; 0: free ones.")] = _DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="The address that it listens on, and that clients connect to.")] = "127.0.0.1",
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Where it keeps its data; they survive restarts.  [default: ASR_DATA_DIR/kafka-NODES]", show_default=False),
    ] = None,
    heap_mb: Annotated[int, typer.Option(min=128, help="Memory of each node's Java heap, in MiB.")] = 512,
) -> None:
    """Run a real Apache Kafka on this machine until Ctrl-C: no Docker, no Java to install.

    The first start fetches Kafka (54 MB); later ones need no network. It is set up for takeovers within seconds, as
    ops/broker/server.properties explains.
    """
    # Not for --help.
    from ops.broker import EmbeddedBroker
    from ops.broker.runtime import KAFKA_VERSION
    from streams.settings import load_settings

    settings = load_settings()
    console = Console(stderr=True)
    status = console.status("Starting Kafka")
    server = EmbeddedBroker(
        data_dir or settings.data_dir / f"kafka-{nodes}",
        nodes=nodes,
        host=host,
        port=port,
        cache_dir=settings.cache_dir,
        heap_mb=heap_mb,
        on_progress=status.update if console.is_terminal else console.print,
    )
    try:
        with status:
            server.start()
        console.print(
            f"[green]Kafka {KAFKA_VERSION} is ready[/green] at {server.bootstrap_servers}, data in {server.data_dir}.", soft_wrap=True
        )
        wanted = {
            "ASR_BOOTSTRAP_SERVERS": (server.bootstrap_servers, settings.bootstrap_servers),
            "ASR_REPLICATION_FACTOR": (str(nodes), str(settings.replication_factor)),
        }
        exports = [f"{name}={value}" for name, (value, configured) in wanted.items() if value != configured]
        if exports:
            console.print(f"Tell the other commands: export {' '.join(exports)}", soft_wrap=True, highlight=False)
        console.print("Ctrl-C stops it.")
        while True:
            server.check()
            time.sleep(_LOOK_EVERY_S)
    finally:
        with console.status("Stopping Kafka"):
            server.stop()
