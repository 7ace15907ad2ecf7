"""Whether something grows: a slope through noisy samples, and how much of it is allowed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["Growth", "after_warm_up", "slope", "trend"]

#: Samples that a slope is worth being drawn through.
_MIN_SAMPLES: Final = 5


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """How something changed with the calls, warm-up left out.

    Attributes:
        name: what.
        unit: of its values.
        first: its value at the beginning, by the slope.
        last: at the end.
        most: the largest value.
        per_call: the slope: how much it grows with each call.
        bound_per_call: how much it may; None: it is not judged.
        samples: how many values that is from.
    """

    name: str
    unit: str
    first: float
    last: float
    most: float
    per_call: float
    bound_per_call: float | None
    samples: int

    @property
    def is_flat(self) -> bool:
        """Whether it grows no more than it may."""
        return self.bound_per_call is None or self.per_call <= self.bound_per_call


def slope(calls: Sequence[float] | NDArray[np.float64], values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Return slope and intercept of the line through samples by Theil and Sen: the median of all slopes between two of them.

    A third of the samples can be anything (a garbage collection, a sweep) without moving it.

    Raises:
        ValueError: there are fewer than two different places.
    """
    x, y = np.asarray(calls, np.float64), np.asarray(values, np.float64)
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] != x[first]
    if not apart.any():
        raise ValueError("a slope needs samples at two places")
    first, second = first[apart], second[apart]
    steep = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    return steep, float(np.median(y - steep * x))


def trend(name: str, unit: str, calls: Sequence[float], values: Sequence[float], bound_per_call: float | None) -> Growth | None:
    """Return how something grew; None where there are too few samples to tell."""
    if len(values) < _MIN_SAMPLES or len(set(calls)) < _MIN_SAMPLES:
        return None
    steep, start = slope(calls, values)
    return Growth(
        name=name,
        unit=unit,
        first=start + steep * calls[0],
        last=start + steep * calls[-1],
        most=max(values),
        per_call=steep,
        bound_per_call=bound_per_call,
        samples=len(values),
    )


def after_warm_up(at_s: Sequence[float], *, share: float, least_s: float) -> int:
    """Return the first sample that counts: after a share of the time, and at least so many seconds if that leaves half of it.

    Args:
        at_s: when each sample was taken, from the beginning.
        share: of the whole time.
        least_s: what is known to fill for so long.
    """
    if not at_s:
        return 0
    whole_s = at_s[-1] - at_s[0]
    from_s = at_s[0] + max(share * whole_s, min(least_s, whole_s / 2))
    return next((number for number, moment in enumerate(at_s) if moment >= from_s), len(at_s))
