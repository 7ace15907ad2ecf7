"""From what an engine says to what a person would write."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

__all__ = ["readable"]

#: Where Chinese is written in traditional characters. Models write either, whoever speaks.
_TRADITIONAL: Final = frozenset({"hant", "tw", "hk", "mo"})


def readable(raw_text: str, language: str) -> str:
    """Return a final's text as a person would write it.

    Args:
        raw_text: as the engine gave it.
        language: its language, BCP 47: Chinese is written in simplified characters unless the tag says otherwise; empty when unknown.
    """
    text = " ".join(raw_text.split())
    first, *rest = language.lower().replace("_", "-").split("-")
    if first == "zh" and not _TRADITIONAL.intersection(rest):
        return str(_to_simplified().convert(text))
    return text


@cache
def _to_simplified() -> Any:
    from opencc import OpenCC

    return OpenCC("t2s")
