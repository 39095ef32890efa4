"""Finds the lists of queries by their heads: in an HNSW in memory, or in a graph on storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .. import errors
from ..device.clusters.layout import REBUILD
from ..device.interface import FilePath
from ..graph.hnsw.links import Links
from ..graph.index import GraphIndex
from ..graph.neighbours import Neighbours
from ..ops.quantise import load_faiss
from .closure import EF_CONSTRUCTION
from .facts import StoredLists

#: Of a walk through the graph of heads: candidates for each list wanted.
_LIST_SIZE_FACTOR = 1.5
_LEAST_LIST_SIZE = 32


@dataclass(frozen=True, eq=False)
class FoundLists:
    """The lists of q queries, the nearest head's first.

    Attributes:
        far: float32 [q, m]: squared distances of heads. lists: int64 [q, m]; -1 where there are no
            more.
        pages: int64 [q]: that were read for it, 4096 bytes each. rounds: int64 [q].
    """

    far: np.ndarray
    lists: np.ndarray
    pages: np.ndarray
    rounds: np.ndarray


class HeadFinder(Protocol):
    """Finds lists by their heads."""

    def find(self, queries: np.ndarray, count: int, deadline_s: float) -> FoundLists:
        """Looks for the nearest lists of float32 [q, head_dim].

        Args:
            count: of them; where that is all there are, all are found.
        """

    def verify(self) -> None:
        """Reads and checks what is on storage. Raises as `ClusterIndex.verify`."""

    def path_report(self) -> list[FilePath]:
        """See `espnx.device.interface.Device`."""

    def close(self) -> None: ...


class MemoryHeads:
    """Heads in memory.

    Args:
        heads: float32 [lists, dim]. links: of their HNSW. threads: of a search.
    """

    def __init__(self, heads: np.ndarray, links: Links, threads: int):
        self._faiss, self._threads, self._count = load_faiss(), threads, len(heads)
        self._index = _index_of(self._faiss, heads, links)

    def find(self, queries: np.ndarray, count: int, deadline_s: float) -> FoundLists:
        """See `HeadFinder`."""
        count = min(count, self._count)
        none = np.zeros(len(queries), np.int64)
        if not count or not len(queries):
            shape = len(queries), 0
            return FoundLists(
                np.empty(shape, np.float32), np.empty(shape, np.int64), none, none.copy()
            )
        # of this thread's regions alone: OpenMP keeps it for each
        before = self._faiss.omp_get_max_threads()
        self._faiss.omp_set_num_threads(self._threads)
        try:
            if 4 * count >= self._count:  # an HNSW would visit nearly all, and may miss some
                far, lists = self._index.storage.search(queries, count)
            else:
                options = self._faiss.SearchParametersHNSW(efSearch=max(2 * count, EF_CONSTRUCTION))
                far, lists = self._index.search(queries, count, params=options)
        finally:
            self._faiss.omp_set_num_threads(before)
        return FoundLists(far, lists, none, none.copy())

    def verify(self) -> None:
        """See `HeadFinder`: they were checked when they were read."""

    def path_report(self) -> list[FilePath]:
        """See `HeadFinder`."""
        return []

    def close(self) -> None:
        """See `HeadFinder`."""


def _index_of(faiss: Any, heads: np.ndarray, links: Links) -> Any:
    """FAISS's HNSW of links that were read."""
    index = faiss.IndexHNSWFlat(heads.shape[1], links.m)
    index.storage.add(np.ascontiguousarray(heads))
    index.ntotal = len(heads)
    above = links.layers.astype(np.int64) - 1
    first = np.concatenate([[0], np.cumsum(2 * links.m + above * links.m)])
    neighbours = np.empty(int(first[-1]), np.int32)
    wide = np.arange(2 * links.m)
    neighbours[first[:-1, None] + wide] = links.lowest
    owner = np.repeat(np.arange(len(above)), above)
    height = np.arange(len(owner)) - np.repeat(np.cumsum(above) - above, above)
    begin = first[owner] + 2 * links.m + height * links.m
    neighbours[begin[:, None] + np.arange(links.m)] = links.upper
    hnsw = index.hnsw
    faiss.copy_array_to_vector(links.layers.astype(np.int32), hnsw.levels)
    faiss.copy_array_to_vector(first.astype(np.uint64), hnsw.offsets)
    faiss.copy_array_to_vector(neighbours, hnsw.neighbors)
    hnsw.entry_point, hnsw.max_level = links.entry, links.n_upper_layers
    return index


class GraphHeads:
    """Heads in a graph on storage, of which an open index keeps a codebook and entry points.

    Args:
        stored: lists whose heads are such. engine, threads: of `GraphIndex`.
    """

    def __init__(self, stored: StoredLists, engine: str, threads: int):
        self._count, self._graph = stored.facts.n_lists, None
        if stored.graph is None:
            return
        self._graph = GraphIndex(stored.graph, engine=engine, threads=threads)
        layout = self._graph.facts.layout
        try:
            check_head_graph(stored, layout.n, layout.dim, self._graph.facts.metric)
        except BaseException:
            self._graph.close()
            raise

    def find(self, queries: np.ndarray, count: int, deadline_s: float) -> FoundLists:
        """See `HeadFinder`. Pages are read one after the other, each a round, where there are many
        queries."""
        count = min(count, self._count)
        if self._graph is None or not len(queries):
            shape, none = (len(queries), 0), np.zeros(len(queries), np.int64)
            return FoundLists(
                np.empty(shape, np.float32), np.empty(shape, np.int64), none, none.copy()
            )
        found = self._graph.search(
            queries, count, list_size=list_size_of(count), beam_width=1, deadline_s=deadline_s
        )
        return lists_of(found, self._count)

    def verify(self) -> None:
        """See `HeadFinder`."""
        if self._graph is not None:
            self._graph.verify()

    def path_report(self) -> list[FilePath]:
        """See `HeadFinder`."""
        return [] if self._graph is None else list(self._graph.path_report())

    @property
    def memory_bytes(self) -> int:
        """What the open graph keeps in memory."""
        return 0 if self._graph is None else int(self._graph.facts.memory_bytes)

    def close(self) -> None:
        """See `HeadFinder`."""
        if self._graph is not None:
            self._graph.close()


def list_size_of(count: int) -> int:
    """Candidates that a walk through a graph of heads keeps for so many lists."""
    return max(_LEAST_LIST_SIZE, int(_LIST_SIZE_FACTOR * count))


def check_head_graph(stored: StoredLists, n: int, dim: int, metric: str) -> None:
    """Raises FormatError for a graph of so many nodes, of so many values, by that metric, which is
    none of the heads of these lists."""
    wanted = stored.facts.n_lists, stored.coding.head_dim
    if (n, dim) != wanted or metric != "l2":
        raise errors.FormatError(
            "graph of heads",
            path=stored.facts.where,
            got=f"{n} nodes of {dim} values, {metric}",
            expected=f"{wanted[0]} of {wanted[1]}, l2",
            fix=REBUILD,
        )


def lists_of(found: Neighbours, count: int) -> FoundLists:
    """What a walk through a graph of `count` heads has found; where it was to find all of them, all
    are there, those that it came by none of behind the others."""
    lists = found.ids
    if lists.shape[1] == count:
        lists = lists.copy()
        for row in lists:
            row[row < 0] = np.setdiff1d(np.arange(count), row[row >= 0])
    pages = found.pages * (found.page_bytes // 4096)
    return FoundLists(found.distances, lists, pages, found.pages)
