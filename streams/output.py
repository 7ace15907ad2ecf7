"""What commands print for programs: ``--json FILE``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from streams.errors import UserError

__all__ = ["JsonOption", "write_json"]

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
