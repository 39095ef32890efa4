"""What is asked: clusters of several sizes, by threads that each wait for their answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidInputError
from .system import meant

KIB = 1024
#: Clusters that a query compares: what SPTAG's configurations of such an index give
#: SearchInternalResultNum.
CLUSTERS_PER_QUERY = 64


@dataclass(frozen=True)
class Workload:
    """Attributes:
    name: of it.
    title: in words.
    shares: of commands, by the bytes of their cluster; whatever they add up to is 1.
    in_order: whether a thread asks for one page after another, from a place of its own; else
        anywhere, all dies alike.
    clusters_per_query: None: no queries.
    """

    name: str
    title: str
    shares: Mapping[int, float]
    in_order: bool = False
    clusters_per_query: int | None = CLUSTERS_PER_QUERY

    def clusters(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """int64 [n]: sizes of clusters."""
        shares = np.array(list(self.shares.values()))
        return rng.choice(list(self.shares), n, p=shares / shares.sum())

    def dies(self, n_threads: int, each: int, n_dies: int, rng: np.random.Generator) -> np.ndarray:
        """int64 [n_threads, each]: on which their pages lie."""
        if not self.in_order:
            return rng.integers(0, n_dies, (n_threads, each))
        return (rng.integers(0, n_dies, (n_threads, 1)) + np.arange(each)) % n_dies


def stress(cluster_bytes: int = 16 * KIB) -> Workload:
    """Consecutive addresses from independent places, each cluster at a page's beginning."""
    title = f"consecutive clusters of {cluster_bytes // KIB} KiB"
    return Workload("stress", title, {cluster_bytes: 1.0}, True, None)


def _mix(name: str, title: str, *percent: float) -> Workload:
    sizes = range(4 * KIB, 16 * KIB + 1, 4 * KIB)
    return Workload(name, title, dict(zip(sizes, percent, strict=True)))


WORKLOADS = {
    each.name: each
    for each in (
        _mix("sift", "SIFT100M in clusters of 4, 8, 12, 16 KiB", 38.83, 48.09, 11.02, 2.06),
        _mix("spacev", "SPACEV100M in clusters of 4, 8, 12, 16 KiB", 33.75, 31.03, 31.24, 3.98),
        stress(),
    )
}


def load_workload(name: str) -> Workload:
    """Raises InvalidInputError for a name that is none of `WORKLOADS`."""
    if name not in WORKLOADS:
        raise InvalidInputError(
            "a workload", got=name, expected=", ".join(WORKLOADS), fix=meant(name, WORKLOADS)
        )
    return WORKLOADS[name]
