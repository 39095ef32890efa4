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
    """Both ends for the mean of independent values, float [n], by their standard error and
    Student's distribution (1908), which holds for few; given paired differences that is the paired
    interval. One value: itself."""
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return mean, mean
    half = student(n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def student(degrees: int) -> float:
    """How many standard errors hold 95 % of Student's distribution, found by halving."""
    low, high = _Z, 13.0  # of one degree it is 12.7
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 0.95 else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """The share of Student's distribution from -t to t, a sum of as many terms as half of its
    degrees (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    term = total = math.cos(angle) if degrees % 2 else 1.0
    for at in range(2 + degrees % 2, degrees - 1, 2):
        term *= (at - 1) / at * math.cos(angle) ** 2
        total += term
    if degrees % 2 == 0:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))
