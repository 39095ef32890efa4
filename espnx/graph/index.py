"""An open graph: nearest neighbours, with what they cost."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from .. import errors
from ..checks import check_path, check_whole
from ..device.interface import FilePath
from ..forks import check_own
from ..ops._native import load_extension
from ..storage import FaultRule, NativeEngine
from ..suggestions import suggests_keywords
from .filters import FilterReader, NodeFilter, RowFilter, filter_of, row_mask
from .format import (
    CODES,
    NODES,
    GraphFacts,
    GraphSections,
    RecallPoint,
    read_codes,
    read_graph,
    summary_of,
)
from .native import native_view
from .neighbours import Neighbours, nearest_of, shown
from .search.asked import WalkRequest, checked_queries
from .search.effort import Effort, effort_of, filtered_probing, list_size_for
from .search.probing import Probing, choose_clusters, distances_to_clusters, ratios_of
from .search.reading import RowReader
from .search.under_way import GraphSearch

THREADS_MAX = 256
_MEASURING_S = 3600.0  # for searches of a build


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
        self._reader = RowReader(self.facts, engine)
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
        return summary_of(self.facts, self._native.path)

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
        return list_size_for(self.facts, recall)

    @suggests_keywords
    def search(
        self,
        queries: Any,
        k: int = 10,
        *,
        list_size: int | None = None,
        recall: float | None = None,
        nprobe: int | str | None = None,
        beam_width: int | None = None,
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
            nprobe: where there is a graph for each cluster: clusters that are searched for a query,
                the nearest; None or ``auto``: for each query those that are not much farther than
                its nearest, as far as was measured at build to find what `recall` says.
            beam_width: pages of a query that are under way at a time, W. None: 1 where many queries
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
            nprobe=nprobe,
            beam_width=beam_width,
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
        nprobe: int | str | None = None,
        beam_width: int | None = None,
        stop_beyond: float | None = None,
        include: Any = None,
        exclude: Any = None,
        deadline_s: float = 30.0,
    ) -> GraphSearch:
        """Begins a search, which goes on by itself: what it has found so far can be asked for.
        Arguments and errors: see `search`."""
        walk = WalkRequest.of(
            self.facts, queries, k, list_size, recall, nprobe, beam_width, stop_beyond, deadline_s
        )
        self.check_open()
        allowed = filter_of(include, exclude, len(self))
        if allowed is None:
            return self._walk(walk, max(walk.k, walk.list_size))
        walk = replace(walk, probing=filtered_probing(self.facts, walk.probing))
        nodes, is_read = self._filters.nodes_of(allowed, walk.deadline_s)
        costs = nodes.costs if is_read else {}
        effort = (
            Effort(walk.list_size, walk.list_size, walk.list_size, walk.list_size)
            if walk.is_named
            else effort_of(self.facts, nodes, walk.recall)
        )
        if effort is None or effort.is_dearer_than_all(
            len(walk.native), nodes.n_pages, allowed.count
        ):
            return GraphSearch(self.facts, walk.k, self._measure_all(walk, nodes, costs))
        seeds, is_read = self._filters.seeds_of(nodes, walk.deadline_s)
        costs |= seeds.costs if is_read else {}
        return self._walk(
            walk,
            max(walk.k, effort.list_size),
            max(walk.k, effort.far_list_size),
            nodes.native(seeds),
            counts=nodes.counts,
            **costs,
        )

    def walk_without(
        self,
        rows: np.ndarray,
        queries: Any,
        k: int,
        lists: tuple[int, int],
        allowed: RowFilter | None = None,
        probing: Probing | None = None,
    ) -> tuple[Neighbours, int]:
        """(what walks find from which a row of the graph is kept, int64 [q], one for each query:
        neither found nor gone by, as if the graph had not been built of it; and pages that
        measuring all allowed rows would read), for whoever measures walks."""
        nodes = None if allowed is None else self._filters.nodes_of(allowed, _MEASURING_S)[0]
        filtered = (
            None if nodes is None else nodes.native(self._filters.seeds_of(nodes, _MEASURING_S)[0])
        )
        walk = self._measuring(queries, k, probing)
        with NativeEngine(self._requested) as engine:
            absent = torch.from_numpy(self._reader.nodes_of(engine, rows, _MEASURING_S).ravel())
        counts = None if nodes is None else nodes.counts
        lists = max(k, lists[0]), max(k, lists[1])
        found = self._walk(walk, *lists, filtered, absent, counts=counts).finish()
        return found, self.facts.parts.n_pages if nodes is None else nodes.n_pages

    def walk(self, queries: Any, k: int, list_size: int, probing: Probing) -> Neighbours:
        """What walks find through the clusters that `probing` says, for whoever measures them."""
        return self._walk(self._measuring(queries, k, probing), list_size).finish()

    def probe_ratios(self, queries: Any) -> list[float]:
        """Ratios of a `Probing` that are worth measuring, see `ratios_of`; there is a graph for
        each cluster."""
        return ratios_of(self._distances_to_clusters(checked_queries(self.facts, queries)[1]))

    def _measuring(self, queries: Any, k: int, probing: Probing | None) -> WalkRequest:
        native, wide = checked_queries(self.facts, queries)
        return WalkRequest(native, wide, k, 1, float("inf"), _MEASURING_S, probing=probing)

    def _distances_to_clusters(self, wide: torch.Tensor) -> np.ndarray:
        clusters = self.facts.clusters
        if clusters is None:
            raise errors.InvalidInputError(
                "clusters of a graph", got="one graph of all vectors", fix="build(clusters=N)"
            )
        return distances_to_clusters(wide, clusters.centroids, self.facts.metric)

    def _walk(
        self,
        walk: WalkRequest,
        list_size: int,
        far_list_size: int | None = None,
        filtered: dict[str, Any] | None = None,
        absent: torch.Tensor | None = None,
        counts: np.ndarray | None = None,
        **costs: int,
    ) -> GraphSearch:
        """`counts`: of each graph, nodes that a filter allows; None: there is none."""
        parts = None
        if walk.probing is not None:
            parts = choose_clusters(
                self._distances_to_clusters(walk.wide),
                walk.probing,
                counts,
                walk.k * self.facts.copies,
            )
        return GraphSearch(
            self.facts,
            walk.k,
            self._native.start(
                queries=walk.native,
                queries_f32=walk.wide,
                k=walk.k,
                list_size=list_size,
                far_list_size=far_list_size or list_size,
                beam_width=walk.beam_width,
                stop_beyond=walk.stop_beyond,
                filter=filtered,
                absent=absent,
                parts=None if parts is None else tuple(map(torch.from_numpy, parts)),
                deadline_s=walk.deadline_s,
            ),
            clusters=None if parts is None else np.diff(parts[1]),
            **costs,
        )

    def _measure_all(
        self, walk: WalkRequest, nodes: NodeFilter, costs: dict[str, Any]
    ) -> Neighbours:
        """Reads all rows that may be found, each once, and measures them."""
        begun, q, k = time.monotonic(), len(walk.wide), walk.k
        far, ids = nearest_of(
            self.facts.metric, walk.wide, k, self._filters.blocks(nodes, walk.deadline_s)
        )
        ids = np.pad(ids, ((0, 0), (0, k - ids.shape[1])), constant_values=-1)
        far = np.pad(far, ((0, 0), (0, k - far.shape[1])), constant_values=np.inf)
        none, whole = np.zeros(q, np.int64), np.full(q, nodes.rows.count, np.int64)
        seconds = np.full(q, time.monotonic() - begun, np.float32)
        return Neighbours(
            ids,
            shown(self.facts.metric, far),
            none,
            none,
            whole,
            none,
            seconds,
            self.facts.layout.page_bytes,
            shared_pages=nodes.n_pages,
            shared_requests=nodes.n_runs,
            **costs,
        )

    def vectors(self, ids: Any, *, deadline_s: float = 30.0) -> np.ndarray:
        """Vectors as they are stored, [m, dim], of rows of the input, int64 [m]: float32 of
        bfloat16, and what codes stand for where nodes have such. Raises as `search`."""
        rows = np.atleast_1d(np.asarray(ids))
        if rows.dtype == bool:
            raise errors.InvalidInputError("rows to read", got="a mask", expected="numbers of rows")
        row_mask(rows, len(self), "read")
        self.check_open()
        return self._reader.vectors(rows.astype(np.int64), deadline_s)

    def verify(self) -> int:
        """Reads and checks every page: how many there are. Raises ChecksumError, FormatError,
        ReadError for the first that is damaged."""
        self.check_open()
        return self._reader.verify()

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
