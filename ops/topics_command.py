"""``asr topics``: what every topic is, and whether the cluster has it so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from streams.output import JsonOption, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from streams.settings import Settings
    from streams.topics import Topic

__all__ = ["topics"]

_EXIT_DRIFT: Final = 1
_UNITS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"), (1, "ms"))

topics = typer.Typer(no_args_is_help=True, add_completion=False, help="Create, verify and explain the topics, all from one table.")


@topics.command()
def create(json_file: JsonOption = None) -> None:
    """Make the topics that are missing; those that exist are not changed.

    What exists with another partition count or cleanup is an error, for nothing would work with it.
    """
    from streams.settings import load_settings
    from streams.topic_admin import ensure_topics
    from streams.topics import TOPICS

    settings = load_settings()
    created = ensure_topics(settings)
    existing = sorted({topic.full_name(settings) for topic in TOPICS}.difference(created))
    if json_file is not None:
        write_json(json_file, {"created": created, "existing": existing})
        return
    console = Console()
    for name in created:
        console.print(f"[green]created[/green]  {name}")
    console.print(f"{len(created)} created, {len(existing)} existed at {settings.bootstrap_servers}.", highlight=False)


@topics.command()
def verify(json_file: JsonOption = None) -> None:
    """Compare the topics on the cluster with the table; exit with 1 if they differ. Nothing is changed."""
    from streams.settings import load_settings
    from streams.topic_admin import find_drift
    from streams.topics import TOPICS

    settings = load_settings()
    drifts = find_drift(settings)
    if json_file is not None:
        found = [
            {"topic": drift.topic, "what": drift.what, "expected": drift.expected, "actual": drift.actual, "breaking": drift.is_breaking}
            for drift in drifts
        ]
        write_json(json_file, {"topics": len(TOPICS), "drift": found})
    elif drifts:
        table = Table("topic", "what", "expected", "actual", "breaks the system", title=f"Differences at {settings.bootstrap_servers}")
        for drift in drifts:
            table.add_row(drift.topic, drift.what, drift.expected, drift.actual, "[red]yes[/red]" if drift.is_breaking else "no")
        Console().print(table)
    else:
        Console().print(f"[green]All {len(TOPICS)} topics are as they must be[/green] at {settings.bootstrap_servers}.", highlight=False)
    if drifts:
        raise typer.Exit(_EXIT_DRIFT)


@topics.command()
def explain(
    channels: Annotated[int, typer.Option(min=1, help="For the largest size: channels that speak all the time, in 16 kHz PCM.")] = 50,
    json_file: JsonOption = None,
) -> None:
    """Show every topic: what is on it, under which key, and how long. Needs no Kafka."""
    from streams.settings import load_settings
    from streams.topics import TOPICS

    settings = load_settings()
    if json_file is not None:
        write_json(json_file, [_described(topic, settings, channels) for topic in TOPICS])
    else:
        Console().print(_contents(TOPICS, settings), _storage(TOPICS, settings, channels))


def _described(topic: Topic, settings: Settings, channels: int) -> dict[str, object]:
    return {
        "name": topic.full_name(settings),
        "key": topic.key,
        "holds": topic.holds,
        "partitions": topic.partition_count(settings),
        "cleanup": topic.cleanup,
        "retention_ms": topic.kept_ms(settings),
        "max_bytes": topic.size_bytes(settings, channels),
        "config": topic.topic_config(settings),
    }


def _contents(topics: Iterable[Topic], settings: Settings) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("topic", no_wrap=True)
    table.add_column("key", no_wrap=True)
    table.add_column("holds", ratio=1)
    for topic in topics:
        table.add_row(topic.full_name(settings), topic.key, topic.holds)
    return table


def _storage(topics: Iterable[Topic], settings: Settings, channels: int) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"size: at most, for {channels} channels that never pause, for each of {settings.replication_factor} copies",
    )
    table.add_column("topic", no_wrap=True)
    table.add_column("partitions", justify="right")
    table.add_column("cleanup", no_wrap=True)
    table.add_column("kept", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for topic in topics:
        size_bytes = topic.size_bytes(settings, channels)
        table.add_row(
            topic.full_name(settings),
            str(topic.partition_count(settings)),
            topic.cleanup,
            _duration(topic.kept_ms(settings)),
            "small" if size_bytes is None else _size(size_bytes),
        )
    return table


def _duration(ms: int | None) -> str:
    """Return a time for people, in the largest unit that divides it."""
    if ms is None:
        return "newest per key"
    size_ms, unit = next(entry for entry in _UNITS if ms % entry[0] == 0)
    return f"{ms // size_ms} {unit}"


def _size(count: int) -> str:
    """Return a number of bytes for people: 138240000000 is ``138 GB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1_000:
            return f"{value:.3g} {unit}"
        value /= 1_000
    return f"{value:.3g} TB"
