"""How a process that a worker started for itself lives: exactly as long as the worker."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

__all__ = ["live_as_long_as"]

_PR_SET_PDEATHSIG: Final = 1


def live_as_long_as(parent: int) -> None:
    """Die with the parent, and only with it: it ends this process when its work is done, on SIGTERM and Ctrl-C too.

    Linux counts the thread that started this process as its parent.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it was asked for
        os._exit(1)
