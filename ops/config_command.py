"""``asr config``: every setting, its value, and where that comes from."""

from __future__ import annotations

import re
from typing import Any, Final

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from streams.output import JsonOption, write_json

__all__ = ["config"]

_URL_PASSWORD: Final = re.compile(r"(://[^/@:]*:)[^/@]*@")


def config(json_file: JsonOption = None) -> None:
    """Show every setting with its value and its source: an ASR_* variable, the file .env, or the default. Secrets stay hidden."""
    from streams.settings import load_settings

    entries = _described(load_settings())
    if json_file is not None:
        write_json(json_file, entries)
        return
    table = Table(box=box.SIMPLE_HEAD, leading=1)
    table.add_column("setting", ratio=3)
    table.add_column("value", overflow="fold", ratio=2)
    table.add_column("source", no_wrap=True)
    for entry in entries:
        is_set = entry["source"] != "default"
        table.add_row(
            Group(Text(entry["variable"], style="bold"), Text(entry["description"], style="dim")),
            Text(_shown(entry["value"]), style="bold cyan" if is_set else ""),
            Text(entry["source"], style="cyan" if is_set else "dim"),
        )
    Console().print(table)


def _described(settings: Any) -> list[dict[str, Any]]:
    """Return each setting as ``variable``, ``value`` (secrets as stars), ``source`` and ``description``."""
    from streams.settings import setting_sources

    sources = setting_sources()
    return [
        {
            "variable": f"ASR_{name.upper()}",
            "value": _without_password(value),
            "source": sources.get(name, "default"),
            "description": type(settings).model_fields[name].description,
        }
        for name, value in settings.model_dump(mode="json").items()
    ]


def _without_password(value: Any) -> Any:
    """Hide the password that a URL may carry."""
    return _URL_PASSWORD.sub(r"\1**********@", value) if isinstance(value, str) else value


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
