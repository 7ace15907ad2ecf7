"""``asr hotwords``: phrases that recognition is to favour, pushed while calls are live."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from streams.errors import UserError
from streams.output import JsonOption, write_json

if TYPE_CHECKING:
    from confluent_kafka import Consumer

    from schemas.records import Hotword, Record
    from streams.control import PushedList
    from streams.settings import Settings

__all__ = ["hotwords", "read_phrases"]

#: What each token of a phrase adds to the score where the list does not say; WeNet's.
_BOOST: Final = 3.0
_DEFAULT_NAME: Final = "default"
_STANDARD_INPUT: Final = Path("-")
#: The engine that makes use of hotwords.
_ENGINE: Final = "conformer"
#: Workers write their status every second: by now all have done so.
_ALL_HEARD_S: Final = 2.5
_POLL_S: Final = 0.1
_LARGEST_BOOST: Final = 100.0
_US_PER_MS: Final = 1_000

hotwords = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Phrases that recognition is to favour, pushed while calls are live."
)

_Name = Annotated[str, typer.Option("--name", help="Which list; all lists are in force together.")]


@hotwords.command()
def push(
    file: Annotated[Path, typer.Argument(help="UTF-8 text, a phrase on each line, or phrase, tab, boost; - is standard input.")],
    name: _Name = _DEFAULT_NAME,
    boost: Annotated[
        float, typer.Option(min=-_LARGEST_BOOST, max=_LARGEST_BOOST, help="What each token of a phrase adds to the score (natural log).")
    ] = _BOOST,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Wait so many seconds until all workers use it, and say when; 0: do not wait.")
    ] = 10.0,
    json_file: JsonOption = None,
) -> None:
    """Put a list into force in place of the one of the same name.

    Calls that run use it from their next partial, and from the next end of a segment in their finals. Exit code 1: it was pushed, but not
    all workers use it yet.
    """
    from streams.pushing import push_hotwords
    from streams.registry import codec_for
    from streams.settings import load_settings

    phrases = read_phrases(file, boost)
    if not phrases:
        raise UserError(f"There is no phrase in {file}", "asr hotwords clear takes a list out of force.")
    settings = load_settings()
    codec = codec_for(settings.schema_registry_url)
    watch = _Watch(settings) if wait_s else None
    pushed = push_hotwords(settings, codec, name, phrases)
    result: dict[str, Any] = {"name": name, "version": pushed.version, "phrases": pushed.phrases}
    if watch is not None:
        result |= watch.follow(pushed, wait_s)
    _tell(result, json_file, waited=watch is not None)


@hotwords.command("list")
def list_(json_file: JsonOption = None) -> None:
    """Show the lists that are in force."""
    from streams.pushing import read_hotwords
    from streams.registry import codec_for
    from streams.settings import load_settings

    settings = load_settings()
    book = read_hotwords(settings, codec_for(settings.schema_registry_url))
    lists = [pushed for _, pushed in sorted(book.in_force.items()) if pushed.version]
    if json_file is not None:
        fields = [{"name": each.name, "version": each.version, "phrases": each.phrases, "pushed_us": each.pushed_us} for each in lists]
        write_json(json_file, {"version": book.version, "lists": fields})
        return
    if not lists:
        Console().print("No hotwords are in force.")
        return
    table = Table("list", "version", "phrases", "pushed")
    for each in lists:
        pushed_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.pushed_us / 1e6))
        table.add_row(each.name, each.version, f"{each.phrases:,}", pushed_at)
    Console().print(table)


@hotwords.command()
def clear(name: _Name = _DEFAULT_NAME, json_file: JsonOption = None) -> None:
    """Take a list out of force."""
    from streams.pushing import push_hotwords, read_hotwords
    from streams.registry import codec_for
    from streams.settings import load_settings

    settings = load_settings()
    codec = codec_for(settings.schema_registry_url)
    in_force = read_hotwords(settings, codec).in_force
    if name not in in_force or not in_force[name].version:
        known = ", ".join(sorted(other for other, pushed in in_force.items() if pushed.version))
        raise UserError(f"No list {name!r} is in force", f"In force: {known}." if known else "")
    push_hotwords(settings, codec, name, ())
    if json_file is not None:
        write_json(json_file, {"name": name, "version": ""})
    else:
        Console().print(f"The list {name} is out of force.", highlight=False)


def read_phrases(file: Path, boost: float = _BOOST) -> tuple[Hotword, ...]:
    """Read a list: a phrase on each line, with a boost of its own behind a tab; empty lines and those that begin with # do not count.

    Raises:
        UserError: the file cannot be read, or a line is not like that; the message names it.
    """
    from schemas.records import Hotword

    try:
        text = sys.stdin.buffer.read() if file == _STANDARD_INPUT else file.read_bytes()
        lines = text.decode("utf-8-sig").splitlines()
    except OSError as refused:
        raise UserError(f"{file} cannot be read ({refused.strerror})") from refused
    except UnicodeDecodeError as wrong:
        line = text[: wrong.start].count(b"\n") + 1
        raise UserError(f"{file}, line {line}: it is no UTF-8", "Save it as UTF-8.") from wrong
    phrases = []
    for number, line in enumerate(lines, 1):
        phrase, tab, own = line.partition("\t")
        phrase = phrase.strip()
        if not phrase or phrase.startswith("#"):
            continue
        try:
            value = float(own) if tab else boost
        except ValueError:
            value = math.nan
        if not abs(value) <= _LARGEST_BOOST:
            raise UserError(f"{file}, line {number}: {own!r} is no boost", f"It is a number up to {_LARGEST_BOOST:g}, behind a tab.")
        phrases.append(Hotword(phrase=phrase, boost=value))
    return tuple(phrases)


class _Watch:
    """Sees when the workers use a list. Made before the push, so that nothing is missed."""

    def __init__(self, settings: Settings) -> None:
        from streams.kafka import plain_consumer
        from streams.registry import codec_for
        from streams.topics import REJECTED, WORKERS

        self._codec = codec_for(settings.schema_registry_url)
        self._consumer: Consumer = plain_consumer(settings, [WORKERS, REJECTED], "end")

    def follow(self, pushed: PushedList, wait_s: float) -> dict[str, Any]:
        """Return how many workers use it, when the last of them did, and what they could not use of it."""
        from schemas.records import Rejected, WorkerStatus

        workers: set[str] = set()
        using_us: dict[str, int] = {}
        left_out = ""
        started_s = time.monotonic()
        while (waited_s := time.monotonic() - started_s) < wait_s:
            record = self._next()
            if isinstance(record, Rejected) and record.key == pushed.name.encode() and pushed.version in record.reason:
                left_out = record.reason.partition(": ")[2]
            if isinstance(record, WorkerStatus) and record.engine == _ENGINE and record.at_us > pushed.pushed_us:
                workers.add(record.worker_id)
                if pushed.version in record.hotword_version:
                    using_us.setdefault(record.worker_id, record.at_us)
            if waited_s > _ALL_HEARD_S and len(using_us) == len(workers):
                break
        self._consumer.close()
        in_force_ms = (max(using_us.values()) - pushed.pushed_us) // _US_PER_MS if using_us else None
        return {"workers": len(workers), "using": len(using_us), "in_force_ms": in_force_ms, "left_out": left_out}

    def _next(self) -> Record | None:
        from schemas.codec import DecodeError

        message = self._consumer.poll(_POLL_S)
        value = None if message is None or message.error() is not None else message.value()
        try:
            return None if value is None else self._codec.decode(value)
        except DecodeError:
            return None


def _tell(result: dict[str, Any], json_file: Path | None, *, waited: bool) -> None:
    """Say what became of a push; exit with 1 if not all workers use the list."""
    if json_file is not None:
        write_json(json_file, result)
    else:
        console = Console()
        console.print(f"{result['phrases']:,} phrases pushed as list {result['name']}, version {result['version']}.", highlight=False)
        if waited:
            if not result["workers"]:
                console.print("No worker runs whose engine uses hotwords (ASR_ENGINE=conformer).", highlight=False)
            else:
                when = f", the last of them after {result['in_force_ms'] / 1_000:.1f} s" if result["using"] else ""
                console.print(f"In force in {result['using']} of {result['workers']} workers{when}.", highlight=False)
            if result["left_out"]:
                console.print(result["left_out"], style="yellow", markup=False, highlight=False)
    if waited and result["using"] < result["workers"]:
        raise typer.Exit(1)
