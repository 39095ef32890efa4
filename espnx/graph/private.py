"""A graph for each of several directories, each of its own share of the vectors: what one of them reads, no other waits for (RAGX's private
graphs, section 4.3). The k nearest of all are among the k nearest of each, so merging them loses nothing that a graph has found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

from .. import errors
from .build import GraphReport, build
from .index import GraphIndex, Neighbours, row_mask
from .vectors import read_vectors


def build_private(vectors: Any, paths: Sequence[str | os.PathLike[str]], **options: Any) -> list[GraphReport]:
    """Builds a graph in each directory, the first of the first share of the vectors, and so on; shares differ by one at most.

    Args:
        vectors: see `espnx.graph.vectors.read_vectors`.
        paths: directories, as `espnx.graph.build` wants them.
        options: of `espnx.graph.build`.

    Raises what `espnx.graph.build` raises. Graphs that were built before the failure stay.
    """
    if not paths:
        raise errors.InvalidInputError("directories of private graphs", got="none", expected="one or more")
    source = read_vectors(vectors, column=options.pop("column", None))
    whole = np.concatenate([np.empty((0, source.dim), source.dtype), *source.blocks()])
    shares = np.array_split(whole, len(paths))
    return [build(share, path, **options) for share, path in zip(shares, paths, strict=True)]


class PrivateGraphs:
    """The graphs of `build_private`, open together. See `GraphIndex`; rows are those of the whole input.

    Args:
        paths: in the order in which they were built.
        options: of `GraphIndex`.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], **options: Any):
        if not paths:
            raise errors.InvalidInputError("directories of private graphs", got="none", expected="one or more")
        with ExitStack() as opened:
            self.graphs = [opened.enter_context(GraphIndex(path, **options)) for path in paths]
            kinds = {(each.facts.layout.dim, each.facts.layout.format, each.facts.metric) for each in self.graphs}
            if len(kinds) > 1:
                raise errors.InvalidInputError(
                    "private graphs", got=sorted(map(str, kinds)), expected="of one dimension, format and metric"
                )
            self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(each) for each in self.graphs])])
            self._pool = opened.enter_context(ThreadPoolExecutor(len(self.graphs), thread_name_prefix="espnx-graph"))
            self._opened = opened.pop_all()

    def __len__(self) -> int:
        return int(self._first[-1])

    def search(self, queries: Any, k: int = 10, *, include: Any = None, exclude: Any = None, **options: Any) -> Neighbours:
        """The k nearest vectors of each query, of all graphs; what a query took is the sum over them.

        Args:
            queries, k: see `GraphIndex.search`.
            include, exclude: rows of the whole input, see `GraphIndex.search`. A graph with few of them measures those.
            options: of it: each graph has a list of its own, as long as a single graph's would be.

        Raises what `GraphIndex.search` raises.
        """
        for graph in self.graphs:
            graph.check_open()  # after a fork the threads of the pool are the parent's, and would be waited for
        shares = self._shares(include, "include"), self._shares(exclude, "exclude")
        found = list(
            self._pool.map(
                lambda graph, included, excluded: graph.search(queries, k, include=included, exclude=excluded, **options),
                self.graphs, *shares,
            )
        )  # fmt: skip
        ids = np.concatenate(
            [np.where(each.ids < 0, -1, each.ids + first) for each, first in zip(found, self._first, strict=False)], axis=1
        )
        far = np.concatenate([each.distances for each in found], axis=1)
        order = np.lexsort((np.where(ids < 0, np.iinfo(np.int64).max, ids), far), axis=1)[:, :k]
        total = {name: sum(getattr(each, name) for each in found) for name in ("pages", "code_pages", "measured", "estimated")}
        return Neighbours(
            np.take_along_axis(ids, order, axis=1), np.take_along_axis(far, order, axis=1), **total,
            seconds=np.max([each.seconds for each in found], axis=0), page_bytes=found[0].page_bytes,
        )  # fmt: skip

    def _shares(self, rows: Any, name: str) -> list[np.ndarray | None]:
        """Each graph's part of some rows of the whole input, bool [its vectors]."""
        if rows is None:
            return [None] * len(self.graphs)
        return [*np.split(row_mask(rows, len(self), name), self._first[1:-1])]

    def close(self) -> None:
        """Closes all of them."""
        self._opened.close()

    def __enter__(self) -> PrivateGraphs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
