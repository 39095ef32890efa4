"""Which clusters a query's walk goes through."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..neighbours import measure

_DISTANCES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Probing:
    """How many clusters are searched for a query: the nearest ones by their centroids.

    Attributes:
        count: so many, and more where these hold fewer rows than are asked for; None: as `margin`
            says.
        margin: those whose squared distance is larger than the nearest one's by no more; by inner
            product, whose product is less by no more than so many times the query's length. More of
            them for a query between clusters than for one inside of one.
    """

    count: int | None = None
    margin: float = float("inf")


def distances_to_clusters(queries: torch.Tensor, centroids: np.ndarray, metric: str) -> np.ndarray:
    """float32 [q, clusters] of queries float32 [q, dim]: as `Neighbours` has them, by cosine twice
    as large."""
    at_once = max(1, _DISTANCES_AT_ONCE // len(centroids))
    parts = [measure(each, centroids, metric) for each in queries.split(at_once)]
    return np.concatenate(parts) if parts else np.empty((0, len(centroids)), np.float32)


def units_of(queries: torch.Tensor, metric: str) -> np.ndarray:
    """float64 [q, 1]: what a margin is a multiple of. Above 0.

    The squared distance to a centroid, less that to the nearest one, says how far a query is from
    the border between the two: twice that times the distance of the centroids. It is no share of
    the distance to the nearest one, which of a query far from all of them would let more through,
    nor of how far centroids are apart, which others, far away, can change. By inner product it
    grows with the query.
    """
    if metric != "ip":
        return np.ones((len(queries), 1))
    length = queries.double().norm(dim=1, keepdim=True).numpy()
    return np.maximum(length, np.finfo(np.float32).tiny)


def choose_clusters(
    far: np.ndarray, units: np.ndarray, probing: Probing, counts: np.ndarray, least: int
) -> tuple[np.ndarray, np.ndarray]:
    """The clusters to search for each query.

    Args:
        far: float32 [q, clusters], of `distances_to_clusters`. units: of `units_of`.
        counts: int64 [clusters]: nodes of each that may be found: clusters without any are passed
            by.
        least: such nodes that the chosen clusters have together, where there are so many.

    Returns:
        Their numbers, int64, the nearest first, of one query after the other; and where each
        query's begin, int64 [q + 1].
    """
    possible = np.flatnonzero(counts)
    order = possible[np.argsort(far[:, possible], axis=1, kind="stable")]
    if not order.size:
        return np.empty(0, np.int64), np.zeros(len(far) + 1, np.int64)
    if probing.count is not None:
        wanted = np.full(len(far), probing.count)
    else:
        near = np.take_along_axis(far, order, axis=1).astype(np.float64)
        limit = near[:, :1] + units * probing.margin
        wanted = (near <= limit).sum(axis=1)
    # each of these clusters has a node or more
    reached = np.cumsum(counts[order[:, : max(1, least)]], axis=1) >= least
    needed = np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, reached.shape[1])
    wanted = np.clip(np.maximum(wanted, needed), 1, order.shape[1])
    chosen = np.arange(order.shape[1]) < wanted[:, None]
    return order[chosen], np.concatenate([np.zeros(1, np.int64), np.cumsum(wanted)])


def margins_of(far: np.ndarray, units: np.ndarray) -> list[float]:
    """Margins of a `Probing`, of which each lets half of some queries go through about half as many
    clusters again as the one before: 1, 2, 3, 4, 6, 8, 12, and so on to all; and the one that lets
    every query go through all. Args as of `choose_clusters`."""
    near = np.sort(far.astype(np.float64), axis=1)
    margins = (near - near[:, :1]) / units
    usual = np.median(margins, axis=0)
    n = far.shape[1]
    doubled = [each << i for i in range(n.bit_length()) for each in (1, 3)]
    found = {float(usual[count - 1]) for count in (*doubled, n) if count <= n}
    return sorted(found | {float(margins.max()) * (1 + 1e-9)})
