"""An open graph: nearest neighbours, with what they cost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from .. import errors
from ..checks import check_finite, check_path, check_whole, plain
from ..device.interface import FilePath
from ..forks import check_own
from ..ops._native import load_extension
from ..sizes import format_size
from ..storage import FaultRule, NativeEngine, Plan
from ..suggestions import suggests_keywords
from .filters import FilterReader, NodeFilter, RowFilter, row_mask
from .format import (
    CODES,
    NODES,
    ROWS,
    GraphFacts,
    GraphSections,
    RecallPoint,
    parse_pages,
    read_codes,
    read_graph,
)
from .native import native_view
from .neighbours import Neighbours, measure, nearest
from .options import SQUARES_MAX
from .vectors import as_array

LIST_SIZE_MAX = 1 << 20
THREADS_MAX = 256
_RECALL = 0.95
_UNMEASURED = 320  # candidates of a walk where the build measured no list
_ALONE_BEAMWIDTH = 4
_DISTANCES_AT_ONCE = 1 << 22
# That cost about as much as reading a page, summing it, and estimating how far its neighbours are.
_DISTANCES_PER_PAGE = 256
# A filter of so much of a share is taken for one of it.
_ALIKE = 0.8
_NEAR_OF_FAR = 4
#: Of the pages that measuring all reads, as many as one of a walk is worth: walks need room to go
#: astray, up to as many pages. Where they seek a region, hundreds of reads wait for one another;
#: all its pages, which are asked for together, come sooner, and nothing is missed.
WALK_PAGES, REGION_PAGES = 2, 8
_MEASURING_S = 3600.0  # for searches of a build
_REBUILD = "restore the graph from a copy, or build it again"


@dataclass(frozen=True, eq=False)
class _Walk:
    """What is asked of walks, checked: queries as `GraphIndex._queries` gives them, and options of
    `GraphIndex.search`."""

    native: torch.Tensor
    wide: torch.Tensor
    k: int
    beamwidth: int
    stop_beyond: float
    deadline_s: float


@dataclass(frozen=True)
class _Effort:
    """Of walks with a filter.

    Attributes:
        list_size: candidates that they keep. far_list_size: those of one around which others are
            allowed than elsewhere.
        pages, far_pages: that a query reads near what is allowed, and far from it.
        worth_pages: of those that measuring all would read, as many as a walk's are worth.
    """

    list_size: int
    far_list_size: int
    pages: float
    far_pages: float
    worth_pages: int = WALK_PAGES

    def is_dearer_than_all(self, n_queries: int, all_pages: int, count: int) -> bool:
        """Than measuring all allowed rows for all queries at a time."""
        measuring = n_queries * count / _DISTANCES_PER_PAGE
        return (
            all_pages <= self.worth_pages * self.far_pages
            or all_pages + measuring <= n_queries * self.pages
        )


def lists_of_region(near: int, far: int) -> tuple[int, int]:
    """Candidates that walks keep near what a region allows, and far from it, where random filters
    want `near`. At its edge a walk may take itself for one among allowed rows: both lists grow."""
    return max(near, far // _NEAR_OF_FAR), max(near, far)


class GraphSearch:
    """A search under way in the threads of a graph; see `GraphIndex.start`. One thread at a time
    may ask it. Ends when nobody holds it."""

    def __init__(self, index: GraphIndex, k: int, search: Any, **shared: int):
        self._index, self._k, self._search, self._shared = index, k, search, shared

    def partial(self, pages: int) -> tuple[np.ndarray, np.ndarray]:
        """What each walk has found after so many pages, or at its end if it comes sooner; walks go
        on meanwhile.

        Returns:
            ids and distances as `Neighbours` has them.

        Raises as `GraphIndex.search`.
        """
        if isinstance(self._search, Neighbours):
            return self._search.ids, self._search.distances
        self._check_wanted()
        rows, far = self._search.partial(pages)
        return rows.numpy().reshape(-1, self._k), self._index.shown(
            far.numpy().reshape(-1, self._k)
        )

    def finish(self) -> Neighbours:
        """Waits for the end of all walks. Raises as `GraphIndex.search`."""
        if isinstance(self._search, Neighbours):
            return self._search
        self._check_wanted()
        rows, far, pages, code_pages, measured, estimated, seconds = self._search.finish()
        self._search = Neighbours(
            rows.numpy().reshape(-1, self._k),
            self._index.shown(far.numpy().reshape(-1, self._k)),
            pages.numpy(),
            code_pages.numpy(),
            measured.numpy(),
            estimated.numpy(),
            seconds.numpy(),
            self._index.facts.layout.page_bytes,
            **self._shared,
        )
        return self._search

    def _check_wanted(self) -> None:
        if self._search is None:
            raise errors.TransferCancelledError("the walks are not needed")

    def cancel(self) -> None:
        """Ends the walks, unless they have ended: whoever asks raises TransferCancelledError."""
        if not isinstance(self._search, Neighbours):
            self._search = None


def beam_width_of(n_queries: int) -> int:
    """Pages of each query that are under way at a time, unless a search says how many."""
    return 1 if n_queries >= 2 * _ALONE_BEAMWIDTH else _ALONE_BEAMWIDTH


class GraphIndex:
    """A graph that `espnx.graph.build` has made, open for searches.

    In memory are codebook and entry points, and the codes where the graph was built so; pages are
    read as walks come to them, by threads of its own, each with many queries under way on one
    queue. Every method may be called from any thread.

    Attributes:
        facts: what its manifest says.
        walks: queries that are under way at a time, of all threads.

    Args:
        path: the graph's directory; or the sections of another file that it lies in.
        threads: that read and compute.
        walks: queries of a thread that are under way at a time.
        code_cache_bytes: of a thread, where codes are paged: pages of codes that it keeps
            (Knowhere's pq_read_page_cache_size).
        engine: path of the reads: ``auto``, ``uring``, ``posix`` or ``memory``.
        direct: whether reads go past the page cache; None: where the file system lets them.
        rules, fault_seed: injected faults (tests).

    Raises:
        StoreNotFoundError, FormatError, ChecksumError, TruncatedFileError, FileMissingError: no
            graph, or a damaged one.
        PathUnavailableError: the named path cannot be had here.
    """

    @suggests_keywords
    def __init__(
        self,
        path: str | os.PathLike[str] | GraphSections,
        *,
        threads: int = 2,
        walks: int = 32,
        engine: str = "auto",
        code_cache_bytes: int = 5 << 20,
        direct: bool | None = None,
        rules: Sequence[FaultRule] = (),
        fault_seed: int = 0,
    ):
        check_whole("threads of a graph", threads, 1, THREADS_MAX)
        check_whole("walks of a thread", walks, 1, 1024)
        check_whole("code_cache_bytes", code_cache_bytes, 0, 1 << 40)
        if not isinstance(path, GraphSections):
            path = check_path("directory of a graph", path)
        with NativeEngine(
            engine if engine in ("memory", "posix") else "posix", threads=1, pool_bytes=0
        ) as own:
            self.facts: GraphFacts = read_graph(own, path)
            codes = read_codes(own, self.facts) if self.facts.layout.codes_in == "memory" else None
        self._requested, self._process = engine, os.getpid()
        self.walks = threads * walks
        native = load_extension()
        self._native = native.GraphSearcher(
            native_view(self.facts, codes),
            native.GraphSearchOptions(
                path=engine,
                direct=direct,
                threads=threads,
                walks=walks,
                code_cache_bytes=code_cache_bytes,
                rules=[asdict(rule) for rule in rules],
                seed=fault_seed,
            ),
        )
        self._filters = FilterReader(self.facts, engine)
        self._is_open = True

    def __len__(self) -> int:
        return self.facts.layout.n

    def __repr__(self) -> str:
        layout = self.facts.layout
        return (
            f"<GraphIndex: {layout.n:,} vectors of {layout.dim} dimensions, {self.facts.metric}, "
            f"{self.facts.where}>"
        )

    def summary(self) -> str:
        """What it is, and what searches with it cost, in a few lines."""
        layout, facts = self.facts.layout, self.facts
        effective, reason, is_direct = self._native.path
        where = {
            "inline": "beside their nodes",
            "paged": "in pages of their own",
            "memory": "in memory",
        }[layout.codes_in]
        if layout.codes_in != "inline" and layout.inline_pq:
            where += f", and those of {layout.inline_pq} neighbours beside each node"
        rotated = " of rotated vectors" if facts.codebook.rotation is not None else ""
        held = f"codes of {layout.disk_pq_bytes} bytes" if layout.format == "pq" else layout.format
        what = (
            f"{layout.n:,} vectors of {layout.dim} dimensions as {held}, {facts.metric}; "
            f"{layout.max_degree} neighbours"
        )
        sizes = (
            f"{format_size(sum(facts.file_sizes.values()))} on storage, "
            f"{format_size(facts.memory_bytes)} in memory"
        )
        lines = [
            f"{what}, codes of {layout.code_bytes} bytes{rotated} {where}",
            f"{sizes}; {layout.nodes_per_page} nodes to a page of {format_size(layout.page_bytes)}",
            (
                "reads by "
                f"{effective}{'' if is_direct else ' (buffered)'}{f' ({reason})' if reason else ''}"
            ),
        ]
        if facts.recall_ceiling is not None:
            lines.append(
                "recall@10 of a search that measures all codes in place of vectors: "
                f"{facts.recall_ceiling:.3f}"
            )
        lines += [
            f"list of {each.list_size}: recall@10 {each.recall:.3f}, {each.pages:.1f} pages a query"
            for each in facts.recall
        ]
        return "\n".join(lines)

    def path_report(self) -> Sequence[FilePath]:
        """See `espnx.device.interface.Device`: of the files that walks read."""
        effective, reason, is_direct = self._native.path
        names = [NODES, *([CODES] if self.facts.layout.paged_codes else [])]
        said = f"{effective}{'' if is_direct else ' (buffered)'}"
        paths = dict.fromkeys(self.facts.path(name) for name in names)
        return [FilePath(path, said, reason) for path in paths]

    def list_size_for(self, recall: float) -> RecallPoint:
        """The smallest list that was measured at build to find that share of the ten nearest.

        Raises InvalidInputError for a share that no list was measured to find.
        """
        if not isinstance(recall, int | float) or not 0 < recall <= 1:
            raise errors.InvalidInputError("recall", got=recall, expected="above 0, at most 1")
        if not self.facts.recall and len(self) > _UNMEASURED:
            raise errors.InvalidInputError(
                "recall",
                got=recall,
                expected=(
                    "a list_size: no list was measured, as the build was interrupted right after "
                    "the graph was whole"
                ),
            )
        if not self.facts.recall:  # too few vectors to measure anything
            return RecallPoint(max(10, len(self)), 1.0, float(self.facts.layout.n_pages))
        found = next((each for each in self.facts.recall if each.recall >= recall), None)
        if found is None:
            last = self.facts.recall[-1]
            raise errors.InvalidInputError(
                "recall",
                got=recall,
                expected=(
                    f"at most {last.recall:.4f}, what a list of {last.list_size} was measured to "
                    "find"
                ),
                fix=(
                    f"list_size above {last.list_size}; or build with more pq_bytes, or "
                    "vector_dtype float32"
                ),
            )
        return found

    def _default_list_size(self) -> int:
        reached = [each for each in self.facts.recall if each.recall >= _RECALL]
        found = [*reached, *self.facts.recall[-1:]]
        return found[0].list_size if found else max(10, min(len(self), _UNMEASURED))

    @suggests_keywords
    def search(
        self,
        queries: Any,
        k: int = 10,
        *,
        list_size: int | None = None,
        recall: float | None = None,
        beamwidth: int | None = None,
        stop_beyond: float | None = None,
        include: Any = None,
        exclude: Any = None,
        deadline_s: float = 30.0,
    ) -> Neighbours:
        """The k nearest vectors of each query.

        Args:
            queries: [q, dim] or [dim], array or tensor; whole numbers for graphs of such, else what
                float32 holds.
            k: results of each, 1 or more.
            list_size: candidates that a walk keeps, L, k or more: a longer list finds more, and
                reads more.
            recall: instead of it: the smallest list that was measured, at build, to find that share
                of the ten nearest of new queries like the graph's vectors. Neither: 0.95, or the
                longest list that was measured.
            beamwidth: pages of a query that are under way at a time, W. None: 1 where many queries
                keep the queue full, and the result depends on nothing that time decides; 4 for so
                few that it would be idle.
            stop_beyond: ends a walk when its nearest candidate is farther than its k-th result by
                this share (of the squared distance), whatever is left in its list; None: never.
            include, exclude: rows that alone may be found, or may not: bool [n], or numbers in any
                collection. A few are measured one by one; of many the walk passes the others by.
            deadline_s: of each query, from when it is begun: a batch of any size may take longer.

        Raises:
            InvalidInputError: shapes, dtypes, values that are not finite, numbers out of range.
            ReadError, ChecksumError, TruncatedFileError, DeadlineExceededError, EngineClosedError:
                no result is returned, and the graph can be searched again.
        """
        return self.start(
            queries,
            k,
            list_size=list_size,
            recall=recall,
            beamwidth=beamwidth,
            stop_beyond=stop_beyond,
            include=include,
            exclude=exclude,
            deadline_s=deadline_s,
        ).finish()

    def start(
        self,
        queries: Any,
        k: int = 10,
        *,
        list_size: int | None = None,
        recall: float | None = None,
        beamwidth: int | None = None,
        stop_beyond: float | None = None,
        include: Any = None,
        exclude: Any = None,
        deadline_s: float = 30.0,
    ) -> GraphSearch:
        """Begins a search, which goes on by itself: what it has found so far can be asked for.
        Arguments and errors: see `search`."""
        native, wide = self._queries(queries)
        k, list_size, beamwidth = plain(k), plain(list_size), plain(beamwidth)
        recall, stop_beyond, deadline_s = plain(recall), plain(stop_beyond), plain(deadline_s)
        check_whole("k, neighbours wanted", k, 1, LIST_SIZE_MAX)
        if list_size is not None and recall is not None:
            raise errors.InvalidInputError(
                "list_size and recall", got=f"{list_size} and {recall}", expected="one of them"
            )
        if list_size is not None:
            check_whole("list_size, candidates of a walk", list_size, k, LIST_SIZE_MAX)
        if beamwidth is None:
            beamwidth = beam_width_of(len(native))
        check_whole("beamwidth", beamwidth, 1, 64)
        check_finite("stop_beyond", 0.0 if stop_beyond is None else stop_beyond)
        check_finite("deadline_s", deadline_s)
        if (stop_beyond is not None and stop_beyond < 0) or deadline_s <= 0:
            raise errors.InvalidInputError(
                "stop_beyond and deadline_s",
                got=f"{stop_beyond} and {deadline_s}",
                expected="0 or more; above 0",
            )
        usual = list_size or (
            self._default_list_size() if recall is None else self.list_size_for(recall).list_size
        )
        self.check_open()
        allowed = self._allowed(include, exclude)
        walk = _Walk(
            native,
            wide,
            k,
            beamwidth,
            float("inf") if stop_beyond is None else float(stop_beyond),
            float(deadline_s),
        )
        if allowed is None:
            return self._walk(walk, max(k, usual))
        nodes, is_read = self._filters.nodes_of(allowed, deadline_s)
        costs = (
            {"filter_bytes": nodes.read_bytes, "filter_requests": nodes.read_requests}
            if is_read
            else {}
        )
        effort = (
            self._effort(nodes, recall)
            if list_size is None
            else _Effort(list_size, list_size, list_size, list_size)
        )
        if effort is None or effort.is_dearer_than_all(len(native), nodes.n_pages, allowed.count):
            return GraphSearch(self, k, self._measure_all(walk, nodes, costs))
        seeds, is_read = self._filters.seeds_of(nodes, deadline_s)
        if is_read:
            costs |= {"shared_pages": seeds.n_pages, "shared_requests": seeds.n_runs}
        return self._walk(
            walk,
            max(k, effort.list_size),
            max(k, effort.far_list_size),
            nodes.native(seeds),
            **costs,
        )

    def walk_without(
        self,
        rows: np.ndarray,
        queries: Any,
        k: int,
        lists: tuple[int, int],
        allowed: RowFilter | None = None,
    ) -> tuple[Neighbours, int]:
        """(what walks find from which a row of the graph is kept, int64 [q], one for each query:
        neither found nor gone by, as if the graph had not been built of it; and pages that
        measuring all allowed rows would read), for whoever measures walks."""
        nodes = None if allowed is None else self._filters.nodes_of(allowed, _MEASURING_S)[0]
        filtered = (
            None if nodes is None else nodes.native(self._filters.seeds_of(nodes, _MEASURING_S)[0])
        )
        walk = _Walk(*self._queries(queries), k, 1, float("inf"), _MEASURING_S)
        with NativeEngine(self._requested) as engine:
            absent = torch.from_numpy(self._nodes_of(engine, rows, _MEASURING_S))
        found = self._walk(walk, max(k, lists[0]), max(k, lists[1]), filtered, absent).finish()
        return found, self.facts.layout.n_pages if nodes is None else nodes.n_pages

    def _walk(
        self,
        walk: _Walk,
        list_size: int,
        far_list_size: int | None = None,
        filtered: dict[str, Any] | None = None,
        absent: torch.Tensor | None = None,
        **costs: int,
    ) -> GraphSearch:
        return GraphSearch(
            self,
            walk.k,
            self._native.start(
                queries=walk.native,
                queries_f32=walk.wide,
                k=walk.k,
                list_size=list_size,
                far_list_size=far_list_size or list_size,
                beam=walk.beamwidth,
                stop_beyond=walk.stop_beyond,
                filter=filtered,
                absent=absent,
                deadline_s=walk.deadline_s,
            ),
            **costs,
        )

    def _effort(self, nodes: NodeFilter, recall: float | None) -> _Effort | None:
        """Of walks that were measured to find that share where so many rows are allowed; None:
        there are none."""
        wanted, share = _RECALL if recall is None else recall, nodes.rows.count / max(1, len(self))
        at = next(
            (i for i, each in enumerate(self.facts.filtered) if _ALIKE * each.share <= share), None
        )
        if at is None:
            return None
        measured = self.facts.filtered[at]
        near = next((each for each in measured.near if each.recall >= wanted), None)
        if near is None:
            return None
        if nodes.is_scattered:  # few queries, if any, seem far from what is allowed
            return _Effort(
                near.list_size,
                max([near.list_size, *(each.list_size for each in measured.far)]),
                near.pages,
                near.pages,
            )
        # Regions of more rows may be harder than those of fewer: a part of one cluster is found
        # more easily than pieces of several.
        around = self.facts.filtered[max(0, at - 1) : at + 1]
        far = [
            next((point for point in each.far if point.recall >= wanted), None) for each in around
        ]
        reached = [each for each in far if each is not None]
        if len(reached) < len(far):
            return None
        length = max(each.list_size for each in reached)
        return _Effort(
            *lists_of_region(near.list_size, length),
            near.pages,
            max(each.pages for each in reached),
            REGION_PAGES,
        )

    def shown(self, far: np.ndarray) -> np.ndarray:
        """Distances as `Neighbours` has them: of vectors of length 1 half the squared distance is
        one minus the cosine."""
        return far / 2 if self.facts.metric == "cosine" else far

    def _queries(self, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries as the distance kernels take them, int8 as uint8, and as float32."""
        layout = self.facts.layout
        values = as_array(given)
        if values.ndim == 1:
            values = values[None]
        if values.ndim != 2 or values.shape[1] != layout.dim or values.dtype.kind not in "iuf":
            raise errors.InvalidInputError(
                "queries",
                got=f"{values.dtype} {list(values.shape)}",
                expected=f"numbers [q, {layout.dim}]",
            )
        whole = {"uint8": np.uint8, "int8": np.int8}.get(layout.format)
        if whole is not None:
            exact = values.astype(whole)
            if not np.array_equal(exact, values):
                raise errors.InvalidInputError(
                    "queries",
                    got=str(values.dtype),
                    expected=f"values that {layout.format} holds, as the graph's",
                )
            wide = exact.astype(np.float32)
            return torch.from_numpy(np.ascontiguousarray(exact).view(np.uint8)), torch.from_numpy(
                wide
            )
        wide = np.ascontiguousarray(values, dtype=np.float32)
        if not np.isfinite(wide).all():
            raise errors.InvalidInputError(
                "queries", got="values that are not finite", expected="numbers that float32 holds"
            )
        if self.facts.metric == "cosine":
            length = np.linalg.norm(wide.astype(np.float64), axis=1, keepdims=True)
            if not length.all():
                raise errors.InvalidInputError(
                    f"query {int(np.argmin(length))}",
                    got="length 0",
                    expected="a vector that has a direction",
                )
            wide = np.ascontiguousarray(wide / length, dtype=np.float32)
        squares = np.square(wide.astype(np.float64)).sum(axis=1)
        if squares.size and squares.max() > SQUARES_MAX:
            raise errors.InvalidInputError(
                f"query {int(np.argmax(squares))}",
                got=f"length {np.sqrt(squares.max()):.3g}",
                expected=f"at most {np.sqrt(SQUARES_MAX):.3g}",
                fix="scale it, as the graph's vectors: distances overflow float32",
            )
        tensor = torch.from_numpy(wide)
        return tensor, tensor

    def _allowed(self, include: Any, exclude: Any) -> RowFilter | None:
        """None: all."""
        if include is None and exclude is None:
            return None
        if isinstance(include, RowFilter) and exclude is None:
            return include
        allowed = np.ones(len(self), bool) if include is None else self._mask(include, "include")
        return RowFilter.of(
            allowed if exclude is None else allowed & ~self._mask(exclude, "exclude")
        )

    def _mask(self, rows: Any, name: str) -> np.ndarray:
        return row_mask(rows, len(self), name)

    def _measure_all(self, walk: _Walk, nodes: NodeFilter, costs: dict[str, int]) -> Neighbours:
        """Of all rows that may be found, each read once."""
        begun, q, k = time.monotonic(), len(walk.wide), walk.k
        far, ids = self._nearest_of(walk.wide, k, self._filters.blocks(nodes, walk.deadline_s))
        ids = np.pad(ids, ((0, 0), (0, k - ids.shape[1])), constant_values=-1)
        far = np.pad(far, ((0, 0), (0, k - far.shape[1])), constant_values=np.inf)
        none, whole = np.zeros(q, np.int64), np.full(q, nodes.rows.count, np.int64)
        seconds = np.full(q, time.monotonic() - begun, np.float32)
        page_bytes = self.facts.layout.page_bytes
        return Neighbours(
            ids,
            self.shown(far),
            none,
            none,
            whole,
            none,
            seconds,
            page_bytes,
            shared_pages=nodes.n_pages,
            shared_requests=nodes.n_runs,
            **costs,
        )

    def _nearest_of(
        self, queries: torch.Tensor, k: int, blocks: Iterable[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(distances float32, rows int64), [q, at most k]: the nearest of some rows and their
        vectors, the nearest first, ties by row."""
        best = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        for rows, vectors in blocks:
            best = self._nearer(queries, k, best, rows, np.ascontiguousarray(vectors))
        return best

    def _nearer(
        self,
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
            measured = measure(queries[part], vectors, self.facts.metric)
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

    def vectors(self, ids: Any, *, deadline_s: float = 30.0) -> np.ndarray:
        """Vectors as they are stored, [m, dim], of rows of the input, int64 [m]: float32 of
        bfloat16, and what codes stand for where nodes have such. Raises as `search`."""
        rows = np.atleast_1d(np.asarray(ids))
        if rows.dtype == bool:
            raise errors.InvalidInputError("rows to read", got="a mask", expected="numbers of rows")
        self._mask(rows, "read")
        self.check_open()
        return self._read_vectors(rows.astype(np.int64), deadline_s)[0]

    def _read_vectors(self, rows: np.ndarray, deadline_s: float) -> tuple[np.ndarray, int]:
        """(the vectors of these rows, pages that were read)"""
        layout = self.facts.layout
        found = np.empty((len(rows), layout.dim), layout.row_dtype)
        if not len(rows):
            return found, 0
        with NativeEngine(self._requested) as engine:
            nodes = self._nodes_of(engine, rows, deadline_s)
            pages, which = np.unique(nodes // layout.nodes_per_page, return_inverse=True)
            file = engine.open(self.facts.path(NODES))
            for first in range(0, len(pages), 4096):
                part = pages[first : first + 4096]
                begin = self.facts.begin_bytes(NODES) + part * layout.page_bytes
                plan = Plan.of(file, begin.tolist(), [layout.page_bytes] * len(part))
                future = engine.read(plan, deadline_s=deadline_s)
                future.wait()
                read = parse_pages(self.facts, part, future.memory, future.position_bytes.numpy())
                wanted = np.flatnonzero((which >= first) & (which < first + len(part)))
                here = read[which[wanted] - first, nodes[wanted] % layout.nodes_per_page]
                if (wrong := np.flatnonzero(here["row"] != rows[wanted])).size:
                    got = f"the node of row {here['row'][wrong[0]]}"
                    raise errors.FormatError(
                        f"row {rows[wanted[wrong[0]]]} of a graph",
                        path=self.facts.path(ROWS),
                        got=got,
                        fix=_REBUILD,
                    )
                found[wanted] = self.facts.coding.decode(here["vector"])
        return found, len(pages)

    def _nodes_of(self, engine: NativeEngine, rows: np.ndarray, deadline_s: float) -> np.ndarray:
        """int64 [m]: numbers of the nodes of some rows, at least one."""
        places = engine.open(self.facts.path(ROWS))
        plan = Plan.of(places, (self.facts.begin_bytes(ROWS) + 4 * rows).tolist(), [4] * len(rows))
        future = engine.read(plan, gap_bytes=4096, deadline_s=deadline_s)
        future.wait()
        at = future.position_bytes.numpy()[:, None] + np.arange(4)
        nodes: np.ndarray = future.memory.numpy()[at].view("<u4").ravel().astype(np.int64)
        if nodes.max() >= self.facts.layout.n:
            raise errors.FormatError(
                "a row's node",
                path=self.facts.path(ROWS),
                got=int(nodes.max()),
                expected=f"below {self.facts.layout.n}",
                fix=_REBUILD,
            )
        return nodes

    def exact(
        self, queries: Any, k: int, blocks: Iterable[tuple[np.ndarray, np.ndarray]]
    ) -> np.ndarray:
        """int64 [q, k]: what is nearest, by a search of all: what recall is measured against.

        Args:
            blocks: of all vectors, as they are stored: rows, int64 [m], and vectors, [m, dim].
        """
        _, wide = self._queries(queries)
        return self._nearest_of(wide, k, blocks)[1]

    def nearer(
        self,
        queries: Any,
        k: int,
        best: tuple[np.ndarray, np.ndarray],
        rows: np.ndarray,
        vectors: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """`exact` block by block: the (distances, rows) that are nearest, [q, at most k], of what
        it gave before and of these."""
        return self._nearer(self._queries(queries)[1], k, best, rows, vectors)

    def verify(self) -> int:
        """Reads and checks every page: how many there are. Raises ChecksumError, FormatError,
        ReadError for the first that is damaged."""
        self.check_open()
        layout = self.facts.layout
        reached = np.zeros(layout.n, bool)
        with NativeEngine(self._requested) as engine:
            file = engine.open(self.facts.path(NODES))
            rows_file = engine.open(self.facts.path(ROWS))
            for first in range(0, layout.n_pages, 1024):
                part = np.arange(first, min(first + 1024, layout.n_pages))
                at_bytes = self.facts.begin_bytes(NODES) + first * layout.page_bytes
                future = engine.read(Plan.of(file, [at_bytes], [len(part) * layout.page_bytes]))
                future.wait()
                begin = future.position_bytes.numpy()[0] + np.arange(len(part)) * layout.page_bytes
                nodes = parse_pages(self.facts, part, future.memory, begin).reshape(-1)[
                    : layout.n - first * layout.nodes_per_page
                ]
                reached[nodes["row"]] = True
                self._verify_rows(engine, rows_file, nodes, first * layout.nodes_per_page)
            if layout.paged_codes:
                read_codes(engine, self.facts)
        if not reached.all():
            raise errors.FormatError(
                "rows of a graph",
                path=self.facts.path(NODES),
                got=f"no node of row {int(np.argmin(reached))}",
                fix=_REBUILD,
            )
        return layout.n_pages

    def _verify_rows(
        self, engine: NativeEngine, rows_file: Any, nodes: np.ndarray, first: int
    ) -> None:
        if not len(nodes):
            return
        begin = self.facts.begin_bytes(ROWS) + 4 * nodes["row"].astype(np.int64)
        future = engine.read(
            Plan.of(rows_file, begin.tolist(), [4] * len(nodes)), gap_bytes=1 << 16
        )
        future.wait()
        at = future.position_bytes.numpy()[:, None] + np.arange(4)
        numbers = future.memory.numpy()[at].view("<u4").ravel()
        wrong = np.flatnonzero(numbers != np.arange(first, first + len(nodes)))
        if wrong.size:
            raise errors.FormatError(
                f"node of row {nodes['row'][wrong[0]]}",
                path=self.facts.path(ROWS),
                got=int(numbers[wrong[0]]),
                expected=first + int(wrong[0]),
                fix=_REBUILD,
            )

    def check_open(self) -> None:
        """Raises EngineClosedError after `close`, InvalidInputError in a child of the process that
        opened it."""
        if not self._is_open:
            raise errors.EngineClosedError("the graph is closed", fix="open it again")
        check_own(self._process, "the graph")

    def close(self) -> None:
        """Ends searches that are under way. A second call does nothing."""
        if self._is_open and os.getpid() == self._process:
            self._is_open = False
            self._native.close()

    def __enter__(self) -> GraphIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
