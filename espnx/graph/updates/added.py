"""What was added to a graph and is in no page yet, found by a small graph in memory: it grows by
searches, so that none of them takes much more than twice the time of measuring all."""

from __future__ import annotations

import math
import threading

import numpy as np
import torch

from ...ops._native import load_extension
from ..format import GraphFacts
from ..neighbours import Neighbours, shown
from ..search.asked import LIST_SIZE_MAX, WalkRequest

#: Of additions fewer than this all are measured.
INDEXED_MIN = 2048
#: Distances that take as long as inserting a vector: a search pays for the graph, of what it
#: measured one by one, as much again.
_INSERTION = 4096
_DEGREE_MAX, _BUILD_LIST = 32, 64
# Candidates that a walk keeps for a result: one among so many, and so much more among twice as
# many. It finds .99 of the nearest of 5,000 and of 50,000 vectors that overlap, and recall stays
# that of the pages.
_LIST_OF, _LIST_PER_DOUBLING = 1024, 0.5


class AddedIndex:
    """Finds additions of the versions of one graph, of which each has those before it and some
    more. Any thread.

    Of the inner product all are measured: edges are by distance.

    Args:
        facts: of the graph; nodes hold vectors, and no codes in their place.
    """

    def __init__(self, facts: GraphFacts):
        layout = facts.layout
        self._facts = facts
        self._degree = min(layout.max_degree, _DEGREE_MAX)
        self._native = load_extension().AddedGraph(
            dim=layout.dim,
            format=layout.row_format,
            metric="ip" if facts.metric == "ip" else "l2",
            degree=self._degree,
            list_size=_BUILD_LIST,
            alpha=min(15.0, max(1.0, float(facts.options.get("alpha", 1.2)))),
        )
        self._lock = threading.Lock()
        self._n_held = self._paid = 0

    @property
    def n_indexed(self) -> int:
        """Additions that the graph has, the first ones."""
        return self._native.inserted

    @property
    def size_bytes(self) -> int:
        """Memory of its edges."""
        return self._native.size_bytes

    def nearest(
        self,
        rows: np.ndarray,
        ids: np.ndarray,
        may: np.ndarray,
        walk: WalkRequest,
        found: Neighbours | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The nearest of what walks over the pages have found and of additions together.

        Args:
            rows, ids: of the version's additions, [m, dim] and int64 [m].
            may: bool [m]: which of them may be found.
            found: of the pages; None: nothing.

        Returns:
            ids int64 and distances float32 [q, k], as `Neighbours` has them; and of each query how
            many additions were measured, int64 [q].
        """
        self._hold(rows)
        q, k, metric = len(walk.wide), walk.k, self._facts.metric
        known = None
        if found is not None:
            far = found.distances * np.float32(2) if metric == "cosine" else found.distances
            known = (
                torch.from_numpy(np.ascontiguousarray(far, np.float32)),
                torch.from_numpy(np.ascontiguousarray(found.ids)),
            )
        distances, nearest, measured = self._native.search(
            queries=walk.native.contiguous(),
            may=torch.from_numpy(may.view(np.uint8)),
            ids=torch.from_numpy(np.ascontiguousarray(ids)),
            k=k,
            list_size=self._list_size(walk, int(np.count_nonzero(may)), len(may)),
            threads=torch.get_num_threads(),
            known=known,
        )
        far = shown(metric, distances.numpy().reshape(q, k))
        return nearest.numpy().reshape(q, k), far, measured.numpy()

    def _list_size(self, walk: WalkRequest, n_may: int, n: int) -> int:
        """Candidates of a walk; 0: measuring all takes less."""
        if not n_may:
            return 0
        doublings = max(0.0, math.log2(n / _LIST_OF))
        wanted = max(math.ceil(walk.k * (1 + _LIST_PER_DOUBLING * doublings)), walk.list_size)
        wanted = min(LIST_SIZE_MAX, math.ceil(wanted * n / n_may))
        return 0 if wanted * self._degree >= 2 * n_may else wanted

    def grow(self, n: int, n_queries: int) -> None:
        """Inserts what searches of so many queries, of a version of n additions, have paid for."""
        if n < INDEXED_MIN or self._facts.metric == "ip":
            return
        with self._lock:
            done = self._native.inserted
            self._paid = min(self._paid + n_queries * (n - done), _INSERTION * (n - done))
            count = self._paid // _INSERTION
            self._paid -= count * _INSERTION
        if count > 0:
            self._native.insert_to(done + count)

    def _hold(self, rows: np.ndarray) -> None:
        with self._lock:
            if len(rows) <= self._n_held:
                return
            own = np.ascontiguousarray(rows)
            own = own.view(np.uint8) if own.dtype == np.int8 else own
            self._native.hold(torch.from_numpy(own))
            self._n_held = len(rows)
