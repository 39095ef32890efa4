"""One version of a graph's pages, open for walks: what was read of it when it was opened, and the
threads that read the rest. A merge makes another one."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from ... import errors
from ...ops._native import load_extension
from ...storage import FaultRule, NativeEngine
from ..filters import FilterReader, NodeFilter, RowFilter
from ..format import CODES, ROWS, GraphFacts, GraphSections
from ..native import native_view
from ..neighbours import Neighbours, nearest_of, shown
from ..pages.checked import read_codes
from ..pages.directory import read_graph, read_graph_manifest
from .asked import WalkRequest, checked_queries
from .effort import Effort, effort_of, filtered_probing
from .probing import Probing, choose_clusters, distances_to_clusters, margins_of, units_of
from .reading import RowReader
from .under_way import GraphSearch

THREADS_MAX = 256
_MEASURING_S = 3600.0  # for searches of a build
_GRACE_S = 1.0  # of threads that end, for reads that nobody waits for any more
_TRIES = 8


@dataclass(frozen=True)
class ReadOptions:
    """See `espnx.graph.GraphIndex`. `native`: options of the native searcher."""

    engine: str
    native: dict[str, Any]

    @classmethod
    def of(
        cls,
        engine: str = "auto",
        *,
        threads: int,
        walks: int,
        code_cache_bytes: int = 5 << 20,
        direct: bool | None = None,
        rules: Sequence[FaultRule] = (),
        fault_seed: int = 0,
    ) -> ReadOptions:
        """Arguments: see `espnx.graph.GraphIndex`."""
        return cls(
            engine,
            {
                "path": engine,
                "direct": direct,
                "threads": threads,
                "walks": walks,
                "code_cache_bytes": code_cache_bytes,
                "grace_s": _GRACE_S,
                "rules": [asdict(rule) for rule in rules],
                "seed": fault_seed,
            },
        )


class GraphVersion:
    """Args:
    path: the graph's directory, or sections of another file; or facts of one whose files are
        written, and not its manifest. options: of its reads. partial: whether some of several
        directories may be lost.
    """

    def __init__(
        self, path: str | GraphSections | GraphFacts, options: ReadOptions, *, partial: bool = False
    ):
        engine = options.engine
        with NativeEngine(
            engine if engine in ("memory", "posix") else "posix", threads=1, pool_bytes=0
        ) as own:
            self.facts, codes = _read(own, path, partial=partial)
        for pin in self.facts.pins.values():
            weakref.finalize(self, os.close, pin)
        self._requested = engine
        native = load_extension()
        self.native = native.GraphSearcher(
            native_view(self.facts, codes), native.GraphSearchOptions(**options.native)
        )
        self.filters = FilterReader(self.facts, engine)
        self.reader = RowReader(self.facts, engine)

    def search(self, walk: WalkRequest, allowed: RowFilter | None) -> GraphSearch:
        """Begins a search; `allowed`: rows that have nodes."""
        if allowed is None:
            return self._walk(walk, walk.list_size)
        walk = replace(walk, probing=filtered_probing(self.facts, walk.probing))
        nodes, is_read = self.filters.nodes_of(allowed, walk.deadline_s)
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
        seeds, is_read = self.filters.seeds_of(nodes, walk.deadline_s)
        costs |= seeds.costs if is_read else {}
        return self._walk(
            walk,
            effort.list_size,
            effort.far_list_size,
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
        nodes = None if allowed is None else self.filters.nodes_of(allowed, _MEASURING_S)[0]
        filtered = (
            None if nodes is None else nodes.native(self.filters.seeds_of(nodes, _MEASURING_S)[0])
        )
        walk = self._measuring(queries, k, probing)
        with NativeEngine(self._requested) as engine:
            absent = torch.from_numpy(self.reader.nodes_of(engine, rows, _MEASURING_S).ravel())
        counts = None if nodes is None else nodes.counts
        found = self._walk(walk, *lists, filtered, absent, counts=counts).finish()
        return found, self.facts.parts.n_pages if nodes is None else nodes.n_pages

    def walk(self, queries: Any, k: int, list_size: int, probing: Probing) -> Neighbours:
        """What walks find through the clusters that `probing` says, for whoever measures them."""
        return self._walk(self._measuring(queries, k, probing), list_size).finish()

    def probe_margins(self, queries: Any) -> list[float]:
        """Margins of a `Probing` that are worth measuring, see `margins_of`; there is a graph for
        each cluster."""
        return margins_of(*self._to_clusters(checked_queries(self.facts, queries)[1]))

    def _measuring(self, queries: Any, k: int, probing: Probing | None) -> WalkRequest:
        native, wide = checked_queries(self.facts, queries)
        return WalkRequest(native, wide, k, 1, float("inf"), _MEASURING_S, probing=probing)

    def _to_clusters(self, wide: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """What `choose_clusters` goes by."""
        clusters, metric = self.facts.clusters, self.facts.metric
        if clusters is None:
            raise errors.InvalidInputError(
                "clusters of a graph", got="one graph of all vectors", fix="build(clusters=N)"
            )
        far = distances_to_clusters(wide, clusters.centroids, metric)
        return far, units_of(wide, metric)

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
        parts, least = None, walk.k * self.facts.copies  # nodes among which are k rows
        if walk.probing is not None:
            nodes = self.facts.parts.nodes if counts is None else counts
            nodes = np.where(self.facts.is_there, nodes, 0)
            parts = choose_clusters(*self._to_clusters(walk.wide), walk.probing, nodes, least)
        list_size = max(list_size, least)
        return GraphSearch(
            self.facts,
            walk.k,
            self.native.start(
                queries=walk.native,
                queries_f32=walk.wide,
                k=walk.k,
                list_size=list_size,
                far_list_size=max(far_list_size or 0, list_size),
                beam_width=walk.beam_width,
                stop_beyond=walk.stop_beyond,
                filter=filtered,
                absent=absent,
                parts=None if parts is None else tuple(map(torch.from_numpy, parts)),
                deadline_s=walk.deadline_s,
            ),
            clusters=None if parts is None else np.diff(parts[1]),
            lost_share=self.facts.lost_share,
            **costs,
        )

    def _measure_all(
        self, walk: WalkRequest, nodes: NodeFilter, costs: dict[str, Any]
    ) -> Neighbours:
        """Reads all rows that may be found, each once, and measures them."""
        begun, q, k = time.monotonic(), len(walk.wide), walk.k
        far, ids = nearest_of(
            self.facts.metric, walk.wide, k, self.filters.blocks(nodes, walk.deadline_s)
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
            lost_share=self.facts.lost_share,
            **costs,
        )


def _read(
    engine: NativeEngine, path: str | GraphSections | GraphFacts, *, partial: bool
) -> tuple[GraphFacts, np.ndarray | None]:
    """(facts, with pins; codes where they stay in memory). Files that a merge removes while they
    are read are those of the version before: then the next one is read."""
    for tried in range(_TRIES):
        pins: dict[str, int] = {}
        try:
            facts = (
                path if isinstance(path, GraphFacts) else read_graph(engine, path, partial=partial)
            )
            if not isinstance(path, GraphSections):
                _check_unchanged(engine, facts)
                paged = [facts.path(CODES)] if facts.layout.paged_codes else []
                pages = [each.path for each in facts.page_files if each.path]
                for each in (*pages, facts.path(ROWS), *paged):
                    pins[each] = _pinned(each)
            facts = replace(facts, pins=pins)
            return facts, read_codes(engine, facts) if facts.layout.codes_in == "memory" else None
        except BaseException as error:
            for pin in pins.values():
                os.close(pin)
            is_gone = isinstance(error, errors.FileMissingError)
            is_gone = is_gone and not isinstance(error, errors.StoreNotFoundError)
            if not isinstance(path, str) or not is_gone or tried + 1 == _TRIES:
                raise
    raise errors.StateError("no version of the graph stays", fix="open it again")


def _check_unchanged(engine: NativeEngine, facts: GraphFacts) -> None:
    """Raises FileMissingError where files are missing that a merge has removed, and not lost."""
    if facts.lost and read_graph_manifest(engine, facts.where)["generation"] != facts.generation:
        raise errors.FileMissingError("a file of the graph's version before", path=facts.where)


def _pinned(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise errors.FileMissingError("file of a graph", path=path) from error
    except OSError as error:
        raise errors.ReadError(
            "cannot open a file of a graph", path=path, errno=error.errno
        ) from error
