"""An instant engine that dies, hangs, fails or babbles where it is told to: at a step or final of sessions, or at hotwords, so named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agents.inference.engine import Block, FinalText, Finish, Hypothesis
from agents.inference.instant import InstantEngine

HANG_S = 3_600
#: Half of a surrogate pair: no UTF-8.
UNSENDABLE = "\ud800"


class MisbehavingEngine(InstantEngine):
    """Misbehaves at sessions whose id begins with ``die``, ``hang``, ``fail``, ``curse`` or ``exit``, at the stage that follows:
    ``die-step-1``, and at hotwords of such versions: ``die-learn``; the finals of those that begin with ``babble`` cannot be encoded.

    Args:
        once_in: where given, it misbehaves only as long as there is no file of the session's name in this folder, and leaves one.
        at_block: the block at which a step misbehaves.
        finals_lanes: as of an engine.
    """

    name = "misbehaving"

    def __init__(self, once_in: str = "", at_block: int = 2, finals_lanes: int = 1) -> None:
        super().__init__()
        self._once_in = once_in
        self._at_block = at_block
        self.finals_lanes = finals_lanes

    def step(self, blocks: Sequence[Block]) -> Sequence[Hypothesis]:
        for block in blocks:
            if block.chunk == self._at_block:
                self._misbehave(block.key.session_id, "step")
        return super().step(blocks)

    def finish(self, requests: Sequence[Finish]) -> Sequence[FinalText]:
        for request in requests:
            self._misbehave(request.key.session_id, "final")
        finals = super().finish(requests)
        return [msgspec.structs.replace(each, text=UNSENDABLE) if each.key.session_id.startswith("babble") else each for each in finals]

    def hotwords(self, version: str, folder: str, *, in_force: bool = True) -> None:
        self._misbehave(version, "learn")
        super().hotwords(version, folder, in_force=in_force)

    def _misbehave(self, name: str, when: str) -> None:
        how, _, rest = name.partition("-")
        if not rest.startswith(when):
            return
        if self._once_in:
            mark = Path(self._once_in) / name
            if mark.exists():
                return
            mark.touch()
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "hang":
            time.sleep(HANG_S)
        elif how == "fail":
            raise ValueError("no such sound")
        elif how == "curse":
            raise ValueError(f"no such file: {UNSENDABLE}")
        elif how == "exit":
            raise SystemExit(3)


def refuse() -> MisbehavingEngine:
    """Fail to load."""
    raise FileNotFoundError("there is no model in /models/of-nobody")


def vanish() -> MisbehavingEngine:
    """End while it is loaded."""
    os._exit(7)


__all__ = ["MisbehavingEngine", "refuse", "vanish"]
