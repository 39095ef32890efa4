"""What is asked: clusters of several sizes, by threads that each wait for their answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .specs.kinds import ClusterSpec
from .specs.load import load, presets

KIB = 1024


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
    clusters_per_query: int | None = None

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
    return Workload("stress", title, {cluster_bytes: 1.0}, True)


def load_workload(name: str) -> Workload:
    """A preset, or what a file says. Raises as `espnx.simulate.specs.load.load` does."""
    spec = load(ClusterSpec, name)
    return Workload(
        spec.name,
        spec.title,
        {kib * KIB: share.number for kib, share in spec.clusters.items()},
        spec.order == "consecutive",
        None if spec.per_query is None else int(spec.per_query.value),
    )


WORKLOADS = {name: load_workload(name) for name in presets(ClusterSpec)}
