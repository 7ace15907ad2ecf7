"""What commands print for programs, ``--json FILE``, and how wide their tables are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from streams.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["JsonOption", "table_console", "write_json"]

#: A table in a file need not be folded.
_PIPED_WIDTH: Final = 200

_STANDARD_OUTPUT: Final = Path("-")

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it as JSON to FILE; - is standard output.")]


def write_json(target: Path, content: Any) -> None:
    """Write what a command found as JSON.

    Args:
        target: a file, replaced if it exists; ``-`` is standard output.
        content: made of dicts, lists, strings, numbers.

    Raises:
        UserError: the file cannot be written.
    """
    text = json.dumps(content, ensure_ascii=False, indent=2)
    if target == _STANDARD_OUTPUT:
        typer.echo(text)
        return
    try:
        target.write_text(text + "\n", encoding="utf-8")
    except OSError as refused:
        raise UserError(f"{target} cannot be written ({refused.strerror})", "Choose another file for --json.") from refused


def table_console(*, highlight: bool = True) -> Console:
    """Return a console for wide tables on standard output.

    Args:
        highlight: colour numbers and the like in plain text.
    """
    from rich.console import Console

    console = Console(highlight=highlight)
    return console if console.is_terminal else Console(highlight=highlight, width=_PIPED_WIDTH)
