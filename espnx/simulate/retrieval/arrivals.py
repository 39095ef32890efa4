"""Queries that arrive at random: how long they wait, and the highest rate at which no queue
grows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import InvalidInputError
from ..queues import Part, Step, walk

QUERIES, SEED = 20_000, 5
#: A queue grows if the last quarter's queries wait, for each second of arrivals since the first
#: quarter, so many seconds longer: half of what an excess of 2 % makes.
_GROWTH = 0.01
_TRIALS = 20


@dataclass(frozen=True)
class Waits:
    """Attributes:
    per_s: queries that arrive.
    mean_s, median_s, p99_s: from a query's arrival to its answer.
    growth: seconds by which a query waits longer for each second of arrivals.
    """

    per_s: float
    mean_s: float
    median_s: float
    p99_s: float
    growth: float

    @property
    def grows(self) -> bool:
        return self.growth > _GROWTH


def arrive(serial_s: float, per_s: float, *, n: int = QUERIES, seed: int = SEED) -> Waits:
    """Queries one after another through a service that takes so long for each, at Poisson arrivals.

    Raises InvalidInputError: no such time or rate.
    """
    for name, value in (("the time of a query", serial_s), ("a rate of arrivals", per_s)):
        if not 0 < value < np.inf:
            raise InvalidInputError(name, got=value, expected="above 0")
    at_s = np.cumsum(np.random.default_rng(seed).exponential(1 / per_s, n))
    done = walk([Part(latency_s=serial_s)], [(Step(0),)], np.zeros(n), np.arange(n), at_s=at_s)
    took_s = done.ended_s - at_s
    quarter = n // 4
    later_s = took_s[-quarter:].mean() - took_s[:quarter].mean()
    growth = later_s / (at_s[-quarter:].mean() - at_s[:quarter].mean())
    middle_s, late_s = np.percentile(took_s, [50, 99])
    return Waits(per_s, float(took_s.mean()), float(middle_s), float(late_s), float(growth))


def highest_rate_per_s(serial_s: float) -> float:
    """The highest rate of Poisson arrivals at which no queue grows, by trying."""
    low, high = 0.0, 2 / serial_s
    for _ in range(_TRIALS):
        middle = (low + high) / 2
        if arrive(serial_s, middle).grows:
            high = middle
        else:
            low = middle
    return low
