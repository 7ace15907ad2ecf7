"""From what an engine says to what a person would write."""

from __future__ import annotations

__all__ = ["readable"]


def readable(raw_text: str, language: str) -> str:
    """Return a final's text as a person would write it.

    Args:
        raw_text: as the engine gave it.
        language: its language, BCP 47, on which the writing of numbers and dates depends; empty when unknown.
    """
    return " ".join(raw_text.split())
