"""What TinyVAD hears of a hop: the power in 35 bands.

Up to 1 kHz every bin is a band of its own, so that the harmonics of a voice show; further up, bands widen as hearing does. A telephone
line at 8 kHz leaves the last four silent.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from agents.vad.spectrum import BIN_HZ

__all__ = ["BANDS", "band_powers"]

_EDGES_HZ: Final = (
    *range(100, 1_000, 50),
    *(1_000, 1_100, 1_200, 1_350, 1_500, 1_700, 1_900, 2_150, 2_400, 2_700, 3_050, 3_400, 3_800, 4_000),
    *(4_800, 5_600, 6_400, 8_000),
)
_EDGES: Final = np.array([round(edge / BIN_HZ) for edge in _EDGES_HZ])
BANDS: Final = len(_EDGES) - 1


def band_powers(power: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the power in each band, float32, hops x ``BANDS``, of spectra, hops x bins."""
    powers: NDArray[np.float32] = np.add.reduceat(power[:, : _EDGES[-1]], _EDGES[:-1], axis=1)
    return powers
