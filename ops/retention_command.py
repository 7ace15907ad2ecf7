"""``asr retention``: how long finished calls stay, and letting one go before its time."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from streams.errors import UserError
from streams.output import JsonOption, write_json

__all__ = ["retention"]

_MS_PER_DAY: Final = 86_400_000


def retention(
    sweep_now: Annotated[bool, typer.Option("--sweep", help="Let go now what was kept long enough, on all partitions.")] = False,
    erase: Annotated[
        list[str] | None, typer.Option(metavar="SESSION", help="Let this call go, whatever its age; may be given several times.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Show how many calls are stored, and let finished ones go.

    Finished calls leave asr.transcripts, asr.sessions and asr.log after
    ASR_RESULTS_RETENTION_MS, by tombstones that the workers of the stage
    inference write: each hour, or ten times within the retention if that is
    shorter. This command looks, or does the same at once; doing it twice is
    no harm. Records leave the brokers' disks when they are compacted next,
    within minutes on a busy system.

    Stored audio is not touched: asr.audio goes by ASR_AUDIO_RETENTION_MS.

    The JSON holds kept, left (calls), tombstones and written.
    """
    # Not for --help.
    from rich.console import Console

    from streams.registry import codec_for
    from streams.retention import sweep
    from streams.settings import load_settings

    settings = load_settings()
    write = sweep_now or bool(erase)
    wanted = settings if sweep_now or not erase else settings.model_copy(update={"results_retention_ms": 0})
    swept = sweep(wanted, codec_for(settings.schema_registry_url), erase=frozenset(erase or ()), write=write)
    if erase and swept.left < len(set(erase)):
        raise UserError(
            f"{len(set(erase)) - swept.left} of {len(set(erase))} sessions are not stored, or have left", "The others left now."
        )
    if json_file is not None:
        write_json(json_file, {"kept": swept.kept, "left": swept.left, "tombstones": swept.tombstones, "written": write})
        return
    days = settings.results_retention_ms / _MS_PER_DAY
    console = Console(highlight=False)
    console.print(f"Finished calls are kept {f'for {days:g} days' if days else 'for ever'} (ASR_RESULTS_RETENTION_MS).")
    verb = "left now" if write else "are due to leave"
    console.print(f"Calls: {swept.kept} stay, {swept.left} {verb}, with {swept.tombstones} records.")
