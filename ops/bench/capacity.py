"""The most channels that something carries."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["most_channels"]


def most_channels(holds: Callable[[int], bool], first: int, most: int, resolution: float = 0.05) -> int:
    """Return the most channels for which ``holds`` is true, if it is true up to some number and false from there on.

    Args:
        holds: tries a number of channels; dear, so it is asked as seldom as possible, never twice for the same number.
        first: where to begin.
        most: where to stop asking for more.
        resolution: how close to come, as a share of the answer.

    Returns:
        The largest number that held; 0 if one channel did not.

    >>> most_channels(lambda channels: channels <= 37, 10, 500, 0.0)
    37
    """
    good, bad, ask = 0, most + 1, min(first, most)
    while bad - good > max(1, round(good * resolution)):
        if holds(ask):
            good = ask
            ask = min(2 * good, most) if bad > most else (good + bad) // 2
        else:
            bad = ask
            ask = (good + bad) // 2
    return good
