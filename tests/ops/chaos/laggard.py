"""A worker whose engine can be told, through files, to be slow or to hold the GIL: run it like ``faust -A streams worker``.

``LAGGARD_DIR/slow``: while it is there, each step of the engine takes 600 ms, in which three more blocks come.
``LAGGARD_DIR/hold``: the engine's process holds its GIL for 3 s, once, and then removes the file.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path

from agents.inference.engine import Block, Hypothesis
from agents.inference.instant import InstantEngine

SLOW_STEP_S = 0.6
HOLD_S = 3


class LaggardEngine(InstantEngine):
    """The instant engine, except for when."""

    def step(self, blocks: Sequence[Block]) -> Sequence[Hypothesis]:
        folder = Path(os.environ["LAGGARD_DIR"])
        if (folder / "hold").exists():
            # PyDLL is ctypes' way to call without letting go of the GIL.
            ctypes.PyDLL(None).sleep(HOLD_S)
            (folder / "hold").unlink(missing_ok=True)
        if (folder / "slow").exists():
            time.sleep(SLOW_STEP_S)
        return super().step(blocks)


if __name__ == "__main__":
    import agents.inference.core
    from agents.inference.frames import EngineSpec
    from streams import app

    agents.inference.core.engine_spec = lambda _settings: EngineSpec(factory="laggard:LaggardEngine")
    app.main()
