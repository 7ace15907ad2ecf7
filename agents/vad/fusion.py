"""Two opinions into one: the neural detector decides where it is sure, the traditional one elsewhere.

But speech begins only where the neural detector is *very* sure of it. What neither can tell apart for certain, such as music, would
else be speech again and again for a moment; within speech, where both only have to say whether it goes on, doubt is no reason to stop.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["EVEN", "LONG_AGO", "confirm", "fuse"]

#: The probability of speech above which a neural detector alone calls it speech.
EVEN = 0.5

#: Hops since the last speech, where there was none for long: longer than any closing.
LONG_AGO: Final = 60_000


def fuse(
    probability: NDArray[np.float32],
    traditional: NDArray[np.bool_],
    confidence: float | NDArray[np.float32],
    even: float | NDArray[np.float32] = EVEN,
) -> NDArray[np.bool_]:
    """Return whether each hop is speech.

    Args:
        probability: the neural detector's probability of speech; its confidence is that, or that of silence, whichever is larger.
        traditional: the traditional detector's decision.
        confidence: above this the neural detector decides; one for all hops, or one for each.
        even: what is more probable is speech; likewise.

    Returns:
        Booleans, shaped like both inputs.
    """
    sure = np.maximum(probability, 1 - probability) > confidence
    return np.where(sure, probability > even, traditional)


def confirm(
    speech: NDArray[np.bool_], certain: NDArray[np.bool_], closing_hops: int, since: int, confirmed: bool
) -> tuple[NDArray[np.bool_], int, bool]:
    """Leave out speech that nobody is certain of: of each stretch, pauses shorter than the closing joined, what comes before certainty.

    Args:
        speech: the decision about each hop.
        certain: whether it alone is enough for speech to begin.
        closing_hops: a pause of so many hops ends a stretch.
        since: hops of silence before these, ``LONG_AGO`` at most.
        confirmed: whether the stretch at hand has been certain somewhere.

    Returns:
        The decisions that remain, and ``since`` and ``confirmed`` for the hops that follow.
    """
    # Most of the time nothing changes: the whole step is silence, or speech that is certain already.
    if not speech.any():
        return speech, min(since + len(speech), LONG_AGO), confirmed
    if confirmed and since < closing_hops and speech.all():
        return speech, 0, True
    hops = np.arange(len(speech))
    last_speech = np.maximum.accumulate(np.where(speech, hops, -1 - since))
    before = np.concatenate([[-1 - since], last_speech[:-1]])
    begins = speech & (hops - before > closing_hops)
    stretch = np.maximum.accumulate(np.where(begins, hops, -1))
    certainty = np.maximum.accumulate(np.where(speech & certain, hops, -1 if confirmed else -2))
    known = certainty >= stretch
    return speech & known, min(int(hops[-1] - last_speech[-1]), LONG_AGO), bool(known[-1])
