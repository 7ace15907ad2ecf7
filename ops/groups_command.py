"""``asr groups``: move live calls between one worker for all stages and a worker for each."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from streams.output import JsonOption, write_json

if TYPE_CHECKING:
    from streams.groups import Layout

__all__ = ["groups"]

groups = typer.Typer(no_args_is_help=True, add_completion=False, help="Move live calls from one way of running the stages to the other.")


@groups.callback()
def _groups() -> None:
    """Keep ``move`` a subcommand of its own, also while it is the only one."""


@groups.command()
def move(
    to: Annotated[str, typer.Argument(metavar="all|stages", help="all: one group for all stages; stages: a group for each.")],
    json_file: JsonOption = None,
) -> None:
    """Let another set of workers go on with the calls that are live, with nothing lost and nothing done twice.

    All stages in one worker (faust -A streams worker) keep their state in one consumer group; a stage that runs alone (ASR_STAGE=vad and so
    on) has a group of its own. To go from one to the other: move, start the new workers, then stop the old ones. While both run, readers
    heed the new ones only.
    """
    from streams.errors import UserError
    from streams.groups import move_groups
    from streams.settings import load_settings

    if to not in ("all", "stages"):
        raise UserError(f"{to!r} is no way to run the stages", "Say all or stages.")
    layout: Layout = "all" if to == "all" else "stages"
    report = move_groups(load_settings(), layout)
    if json_file is not None:
        write_json(json_file, [asdict(each) for each in report])
        return
    for each in report:
        typer.echo(f"{each.stage}: {each.partitions} partitions, {each.sessions} open sessions, from {each.source} to {each.target}")
    typer.echo("Now start the workers of the new groups, and stop the old ones.")
