"""Two opinions into one: the neural detector decides where it is sure, the traditional one elsewhere."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["EVEN", "fuse"]

#: The probability of speech above which a neural detector alone calls it speech.
EVEN = 0.5


def fuse(probability: NDArray[np.float32], traditional: NDArray[np.bool_], confidence: float, even: float = EVEN) -> NDArray[np.bool_]:
    """Return whether each hop is speech.

    Args:
        probability: the neural detector's probability of speech; its confidence is that, or that of silence, whichever is larger.
        traditional: the traditional detector's decision.
        confidence: above this the neural detector decides.
        even: what is more probable is speech.

    Returns:
        Booleans, shaped like both inputs.
    """
    sure = np.maximum(probability, 1 - probability) > confidence
    return np.where(sure, probability > even, traditional)
