"""Python imports this as it starts, where a benchmark has put its folder on PYTHONPATH: see ``ops.bench.sampling``."""

import os
from pathlib import Path

from ops.bench.sampling import ENVIRONMENT, start

if ENVIRONMENT in os.environ:
    start(Path(os.environ[ENVIRONMENT]))
