"""A graph for each of several directories, each of its own share of the vectors: what one of them
reads, no other waits for (RAGX's private graphs, section 4.3). The k nearest of all are among the k
nearest of each, so merging them loses nothing that a graph has found."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from .. import errors
from ..device.several import top
from ..storage.files import make_given_directory
from ..storage.replacing import check_target
from .build import GraphReport, build
from .filters import row_mask
from .format import GraphShare
from .index import GraphIndex
from .neighbours import Neighbours
from .search.under_way import GraphSearch
from .vectors import read_vectors
from .write import KIND


def build_private(
    vectors: Any, paths: Sequence[str | os.PathLike[str]], *, replace: bool = False, **options: Any
) -> list[GraphReport]:
    """Builds a graph in each directory, the first of the first share of the vectors, and so on;
    shares differ by one at most.

    Args:
        vectors: see `espnx.graph.vectors.read_vectors`.
        paths: directories, as `espnx.graph.build` wants them.
        replace: graphs that are there, each when the new one in its directory is whole. Where that
            is interrupted between two, those that are there are of two builds, and are not opened
            together; build again.
        options: of `espnx.graph.build`.

    Raises what `espnx.graph.build` raises; of a directory that cannot be used, before anything is
    built. Graphs that were built before another failure stay.
    """
    if not paths:
        raise errors.InvalidInputError(
            "directories of private graphs", got="none", expected="one or more"
        )
    for path in paths:
        make_given_directory(path)
        check_target(path, KIND, replace=replace)
    source = read_vectors(vectors, column=options.pop("column", None))
    whole = np.concatenate([np.empty((0, source.dim), source.dtype), *source.blocks()])
    shares = np.array_split(whole, len(paths))
    collection = secrets.token_hex(16)
    return [
        build(
            vectors,
            path,
            replace=replace,
            share=GraphShare(collection, number, len(paths)),
            **options,
        )
        for number, (vectors, path) in enumerate(zip(shares, paths, strict=True))
    ]


class PrivateGraphs:
    """The graphs of `build_private`, open together. See `GraphIndex`; rows are those of the whole
    input.

    Args:
        paths: of all of them, in any order.
        options: of `GraphIndex`.

    Raises InvalidInputError for graphs that are not all of one collection; what `GraphIndex`
    raises.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], **options: Any):
        if not paths:
            raise errors.InvalidInputError(
                "directories of private graphs", got="none", expected="one or more"
            )
        with ExitStack() as opened:
            self.graphs = _in_order(
                [opened.enter_context(GraphIndex(path, **options)) for path in paths]
            )
            kinds = {
                (each.facts.layout.dim, each.facts.layout.format, each.facts.metric)
                for each in self.graphs
            }
            if len(kinds) > 1:
                raise errors.InvalidInputError(
                    "private graphs",
                    got=sorted(map(str, kinds)),
                    expected="of one dimension, format and metric",
                )
            self._first = np.concatenate(
                [np.zeros(1, np.int64), np.cumsum([len(each) for each in self.graphs])]
            )
            self._opened = opened.pop_all()

    def __len__(self) -> int:
        return int(self._first[-1])

    def search(
        self, queries: Any, k: int = 10, *, include: Any = None, exclude: Any = None, **options: Any
    ) -> Neighbours:
        """The k nearest vectors of each query, of all graphs; what a query took is the sum over
        them.

        Args:
            queries, k: see `GraphIndex.search`.
            include, exclude: rows of the whole input, see `GraphIndex.search`. A graph with few of
                them measures those.
            options: of it: each graph has a list of its own, as long as a single graph's would be.

        Raises what `GraphIndex.search` raises.
        """
        for graph in self.graphs:
            graph.check_open()
        found = self._found(
            queries,
            k,
            self._shares(include, "include"),
            self._shares(exclude, "exclude"),
            **options,
        )
        ids = np.concatenate(
            [
                np.where(each.ids < 0, -1, each.ids + first)
                for each, first in zip(found, self._first, strict=False)
            ],
            axis=1,
        )
        far = np.concatenate([each.distances for each in found], axis=1)
        order = top(far, ids, k)
        total = {
            name: sum(getattr(each, name) for each in found)
            for name in (
                "pages",
                "code_pages",
                "measured",
                "estimated",
                "shared_pages",
                "filter_bytes",
                "shared_requests",
                "filter_requests",
            )
        }
        return Neighbours(
            np.take_along_axis(ids, order, axis=1),
            np.take_along_axis(far, order, axis=1),
            **total,
            seconds=np.max([each.seconds for each in found], axis=0),
            page_bytes=found[0].page_bytes,
        )

    def _found(
        self,
        queries: Any,
        k: int,
        included: Sequence[np.ndarray | None],
        excluded: Sequence[np.ndarray | None],
        **options: Any,
    ) -> list[Neighbours]:
        """What each graph has found. Walks are all under way together, in threads of the graphs.
        Begun and waited for in the caller's thread, where Ctrl-C comes: what a filter needs is read
        for one graph after the other."""
        searches = list[GraphSearch]()
        try:
            for graph, some, others in zip(self.graphs, included, excluded, strict=True):
                searches.append(graph.start(queries, k, include=some, exclude=others, **options))
            return [search.finish() for search in searches]
        except BaseException:
            for search in searches:
                search.cancel()
            raise

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


def _in_order(graphs: Sequence[GraphIndex]) -> list[GraphIndex]:
    """The graphs by the number of their shares. Raises InvalidInputError unless they are all those
    of one collection, each once."""
    found: dict[str, list[tuple[int, int, GraphIndex]]] = {}
    for graph in graphs:
        share = graph.facts.share
        if share is None:
            raise errors.InvalidInputError(
                f"private graphs: {graph.facts.where}",
                got="a graph of its own",
                expected="one of build_private",
                fix="build them together (espnx.graph.build_private), or each with its share=",
            )
        found.setdefault(share.collection, []).append((share.number, share.count, graph))
    if len(found) > 1:
        got = "; ".join(
            ", ".join(sorted(graph.facts.where for _, _, graph in each)) for each in found.values()
        )
        raise errors.InvalidInputError(
            "private graphs",
            got=f"those of {len(found)} builds: {got}",
            expected="all of one build",
            fix=(
                "where a build that replaces is under way, wait for its end; where it was "
                "interrupted, build again (replace=True)"
            ),
        )
    (those,) = found.values()
    numbers, counts = sorted(number for number, _, _ in those), {count for _, count, _ in those}
    if counts != {len(numbers)} or numbers != list(range(len(numbers))):
        raise errors.InvalidInputError(
            "private graphs",
            got=f"{numbers} of {max(counts)}",
            expected="each once",
            fix="name the directories of all of them",
        )
    return [graph for _, _, graph in sorted(those, key=lambda each: each[0])]
