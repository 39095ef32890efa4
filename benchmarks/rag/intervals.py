"""Intervals of 95 % for shares and means."""

from __future__ import annotations

import math

import numpy as np

_Z = 1.959963984540054  # of the normal distribution, 95 % on both sides


def share_interval(hits: int, n: int) -> tuple[float, float]:
    """The interval of `hits` of `n` (Wilson 1927), which stays within 0 and 1 and holds for few.
    All of 0 to 1 where n is 0."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = hits / n, _Z**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # the ends are exact where all or none are hits, whatever rounding says
    return (max(0.0, middle - half) if hits else 0.0, min(1.0, middle + half) if hits < n else 1.0)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Both ends for the mean of independent values, float [n], by their standard error; given
    paired differences that is the paired interval. One value: itself."""
    mean = float(values.mean())
    half = _Z * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean - half, mean + half
