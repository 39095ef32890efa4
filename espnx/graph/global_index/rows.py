"""The file of rows of a graph of clusters: where the nodes of each row are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..parts import NO_COPY

_ROWS_AT_ONCE = 1 << 18


@dataclass(frozen=True, eq=False)
class Members:
    """The vectors of a cluster, in files.

    Attributes:
        count: of them. first_place: of the cluster's nodes, see `espnx.graph.parts.Parts`.
        rows: reads `count` rows from one of them on, int64 [m], growing. nodes: likewise theirs,
            uint32 [m].
    """

    count: int
    first_place: int
    rows: Callable[[int, int], np.ndarray]
    nodes: Callable[[int, int], np.ndarray]


def row_places(
    n: int,
    copies: int,
    clusters: Sequence[Members],
    known: Callable[[int, int], np.ndarray] | None = None,
) -> Iterator[np.ndarray]:
    """Yields the places of the nodes of rows, uint64 [m, copies], some rows at a time.

    Args:
        n: rows. copies: nodes that one may have.
        clusters: whose places are told.
        known: of rows, from a number up to another, places in other clusters, uint64 [m, any];
            `NO_COPY` where there is none.
    """
    done = np.zeros(len(clusters), np.int64)
    for first in range(0, n, _ROWS_AT_ONCE):
        end = min(n, first + _ROWS_AT_ONCE)
        places = np.full((end - first, copies), NO_COPY, np.uint64)
        n_found = np.zeros(end - first, np.int64)
        if known is not None:
            for column in known(first, end).T:
                here = np.flatnonzero(column != NO_COPY)
                places[here, n_found[here]] = column[here]
                n_found[here] += 1
        for i, cluster in enumerate(clusters):
            left = int(cluster.count - done[i])
            rows = cluster.rows(int(done[i]), min(left, end - first))
            rows = rows[: np.searchsorted(rows, end)]
            nodes = cluster.nodes(int(done[i]), len(rows))
            here = rows - first
            places[here, n_found[here]] = nodes.astype(np.uint64) + np.uint64(cluster.first_place)
            n_found[here] += 1
            done[i] += len(rows)
        yield places
