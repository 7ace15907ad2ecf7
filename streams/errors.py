"""Mistakes and circumstances that a person can put right."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(Exception):
    """Something outside the program is wrong; the command line shows it as one line, without a traceback, and exits with 2.

    Args:
        cause: what is wrong, as a sentence without its full stop.
        remedy: what to do about it, as a whole sentence; may be empty where the cause says it.
    """

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause, remedy)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.cause}. {self.remedy}" if self.remedy else self.cause
