"""What a search of a graph has found, and the same by measuring every vector."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ..ops.distances import distances
from .layout import CODE_PAGE_BYTES

_DISTANCES_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class Neighbours:
    """What a search of q queries found.

    Attributes:
        ids: int64 [q, k]: rows of the input that the graph was built from, the nearest first, ties
            by row; -1 where there are fewer.
        distances: float32 [q, k]: ``l2``: squared; ``ip``: the inner product, negated; ``cosine``:
            one minus the cosine. Infinity where there is no vector.
        pages: int64 [q]: of nodes that were read.
        code_pages: int64 [q]: of codes that were read, 4096 bytes each, where codes are paged.
        measured: int64 [q]: vectors whose distance was measured.
        estimated: int64 [q]: codes whose distance was.
        seconds: float32 [q]: from the query's turn to its end; with many under way, others' work is
            in it.
        page_bytes: of a page of nodes.
        shared_pages: of nodes that were read once for all queries: where all that a filter allows
            were measured, or for its entry points.
        filter_bytes: of the file of rows that were read for a filter, unless it is one of the last
            that the graph was searched with.
        shared_requests, filter_requests: in which those were read: pages side by side in one.
        clusters: int64 [q]: that were searched, where each has a graph; else None.
        lost_share: of the vectors' nodes, those that no search looked at, as their directory is
            lost (`espnx.graph.open(partial=True)`).
    """

    ids: np.ndarray
    distances: np.ndarray
    pages: np.ndarray
    code_pages: np.ndarray
    measured: np.ndarray
    estimated: np.ndarray
    seconds: np.ndarray
    page_bytes: int
    shared_pages: int = 0
    filter_bytes: int = 0
    shared_requests: int = 0
    filter_requests: int = 0
    clusters: np.ndarray | None = None
    lost_share: float = 0.0

    @property
    def bytes_read(self) -> np.ndarray:
        """int64 [q]: for each query alone."""
        return self.pages * self.page_bytes + self.code_pages * CODE_PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes that the whole search has read."""
        return int(self.bytes_read.sum()) + self.shared_pages * self.page_bytes + self.filter_bytes

    def __repr__(self) -> str:
        q, k = self.ids.shape
        shared = f", {self.shared_pages} for all" if self.shared_pages else ""
        lost = f", {self.lost_share:.1%} not looked at" if self.lost_share else ""
        return (
            f"<Neighbours: {q} queries, k {k}, {self.pages.mean() if q else 0:.1f} pages a "
            f"query{shared}{lost}>"
        )


def nearest(far: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest of each row, [q, at most k], ties by id: only those that may be among them are
    sorted."""
    if far.shape[1] > k:
        limit = np.partition(far, k - 1, axis=1)[:, k - 1]
        chosen = [np.flatnonzero(row <= most) for row, most in zip(far, limit, strict=True)]
    else:
        chosen = [np.arange(far.shape[1])] * len(far)
    order = [
        these[np.lexsort((ids_of[these], row[these]))[:k]]
        for row, ids_of, these in zip(far, ids, chosen, strict=True)
    ]
    places = np.array(order, np.int64).reshape(len(far), min(k, far.shape[1]))
    return np.take_along_axis(far, places, axis=1), np.take_along_axis(ids, places, axis=1)


def measure(queries: torch.Tensor, vectors: np.ndarray, metric: str) -> np.ndarray:
    """float32 [q, m]: distances to all of the vectors, [m, dim]."""
    formats = {"uint8": "uint8", "int8": "int8", "float16": "fp16", "float32": "fp32"}
    name = formats[vectors.dtype.name]
    memory = torch.from_numpy(vectors.reshape(-1).view(np.uint8))
    offset = torch.arange(len(vectors)) * (vectors.shape[1] * vectors.itemsize)
    own = (
        queries.to(torch.uint8 if name == "uint8" else torch.int8)
        if name in ("uint8", "int8")
        else queries
    )
    return distances(own, memory, offset, name, "ip" if metric == "ip" else "l2").numpy()


def shown(metric: str, far: np.ndarray) -> np.ndarray:
    """Distances as `Neighbours` has them: of vectors of length 1 half the squared distance is one
    minus the cosine."""
    return far / 2 if metric == "cosine" else far


def nearest_of(
    metric: str, queries: torch.Tensor, k: int, blocks: Iterable[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """(distances float32, rows int64), [q, at most k]: the nearest of some rows and their
    vectors, the nearest first, ties by row."""
    best = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    for rows, vectors in blocks:
        best = nearer(metric, queries, k, best, rows, np.ascontiguousarray(vectors))
    return best


def nearer(
    metric: str,
    queries: torch.Tensor,
    k: int,
    best: tuple[np.ndarray, np.ndarray],
    rows: np.ndarray,
    vectors: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest of those that were the nearest so far, and of some more rows."""
    if not len(rows) or not len(queries):
        return best
    at_once, parts = max(1, _DISTANCES_AT_ONCE // len(rows)), []
    for first in range(0, len(queries), at_once):
        part = slice(first, first + at_once)
        measured = measure(queries[part], vectors, metric)
        far = np.concatenate([best[0][part], measured], axis=1)
        parts.append(
            nearest(
                far,
                np.concatenate([best[1][part], np.broadcast_to(rows, measured.shape)], axis=1),
                k,
            )
        )
    far, ids = (np.concatenate(each) for each in zip(*parts, strict=True))
    return far, ids
