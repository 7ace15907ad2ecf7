"""What a command does not want to hear while it runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quietened"]


@contextmanager
def quietened(level: int, *names: str) -> Iterator[None]:
    """Let loggers say nothing below a level, and leave them as they were: a command may run within another program.

    Args:
        level: the lowest that is still heard, such as ``logging.ERROR``.
        names: the loggers; "" is the root.
    """
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, was in before.items():
            logging.getLogger(name).setLevel(was)
