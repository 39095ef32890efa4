"""An open graph: nearest neighbours, with what they cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from ..checks import check_path, check_whole
from ..device.interface import FilePath
from ..forks import check_own
from ..sizes import format_size
from ..storage import FaultRule, NativeEngine
from ..suggestions import suggests_keywords
from .filters import RowFilter, filter_of, mask_of, row_mask
from .format import CODES, GraphFacts, GraphSections, RecallPoint
from .neighbours import Neighbours
from .pages.directory import read_graph_manifest
from .search.asked import WalkRequest
from .search.effort import list_size_for
from .search.kinds import summary_of
from .search.probing import Probing
from .search.under_way import GraphSearch
from .search.version import THREADS_MAX, GraphVersion, ReadOptions
from .updates.log import read_log
from .updates.pending import Pending, replayed
from .updates.search import search_changed, vectors_of

_TRIES = 8


@dataclass(frozen=True)
class Verified:
    """What was read of a graph, all of it whole.

    Attributes:
        pages: of nodes.
        torn_bytes: at the end of the log, of a change that was not written whole. That is no
            damage: a crash leaves them, or a writer is about to write the rest; nobody was told
            that the change is there, and the next one takes its place.
    """

    pages: int
    torn_bytes: int


class GraphIndex:
    """A graph that `espnx.graph.build` has made, open for searches.

    In memory are codebook and entry points, and the codes where the graph was built so; pages are
    read as walks come to them, by threads of its own, each with many queries under way on one
    queue. Every method may be called from any thread.

    Attributes:
        walks: queries that are under way at a time, of all threads.

    Args:
        path: the graph's directory; or the sections of another file that it lies in.
        threads: that read and compute.
        walks: queries of a thread that are under way at a time.
        code_cache_bytes: of a thread, where codes are paged: pages of codes that it keeps
            (Knowhere's pq_read_page_cache_size).
        engine: path of the reads: ``auto``, ``uring``, ``posix`` or ``memory``.
        direct: whether reads go past the page cache; None: where the file system lets them.
        partial: where the clusters of a graph lie in several directories, of which some are lost:
            to search what is in the others; `Neighbours.lost_share` says how much is not looked at.
            Else a directory that is lost is an error that names it.
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
        partial: bool = False,
        rules: Sequence[FaultRule] = (),
        fault_seed: int = 0,
    ):
        check_whole("threads of a graph", threads, 1, THREADS_MAX)
        check_whole("walks of a thread", walks, 1, 1024)
        check_whole("code_cache_bytes", code_cache_bytes, 0, 1 << 40)
        if not isinstance(path, GraphSections):
            path = check_path("directory of a graph", path)
        self._process, self._path, self._partial = os.getpid(), path, bool(partial)
        self.walks = threads * walks
        self._options = ReadOptions.of(
            engine,
            threads=threads,
            walks=walks,
            code_cache_bytes=code_cache_bytes,
            direct=direct,
            rules=rules,
            fault_seed=fault_seed,
        )
        self._now = self._opened()
        self._is_open = True

    def _opened(self) -> tuple[GraphVersion, Pending]:
        """The pages and the changes beside them, as they are now."""
        for _ in range(_TRIES):
            pages = GraphVersion(self._path, self._options, partial=self._partial)
            if isinstance(self._path, GraphSections):
                return pages, Pending.none(pages.facts)
            log = read_log(pages.facts)
            # a log goes with its pages: of one that is not there, others may have come
            if log.end_bytes or not self._is_merged(pages.facts):
                return pages, replayed(pages.facts, log.changes, log.path)
        raise errors.StateError("the graph is merged again and again", fix="open it again")

    def _is_merged(self, facts: GraphFacts) -> bool:
        """Whether newer pages have been published."""
        with NativeEngine("posix", threads=1, pool_bytes=0) as own:
            return bool(read_graph_manifest(own, facts.where)["generation"] != facts.generation)

    @property
    def facts(self) -> GraphFacts:
        """What its manifest says."""
        return self._now[0].facts

    @property
    def pending(self) -> Pending:
        """Changes that are in no page yet."""
        return self._now[1]

    def reload(self) -> bool:
        """Takes what a writer, in this process or another, has changed since this was opened or
        loaded: searches that begin now see it, those under way do not. Returns whether there was
        anything.

        Raises as opening does; the version before stays.
        """
        self.check_open()
        before = self._now
        if isinstance(self._path, GraphSections):
            return False
        if self._is_merged(before[0].facts):
            self._now = self._opened()
            return True
        log = read_log(before[0].facts)
        pending = replayed(before[0].facts, log.changes, log.path, before[1])
        if self._is_merged(before[0].facts):
            self._now = self._opened()
            return True
        if pending.stamp == before[1].stamp:
            return False
        self._now = before[0], pending
        return True

    def __len__(self) -> int:
        pages, pending = self._now
        return pages.facts.layout.n - len(pending.dead) + pending.n_added

    def __repr__(self) -> str:
        layout = self.facts.layout
        return (
            f"<{type(self).__name__}: {len(self):,} vectors of {layout.dim} dimensions, "
            f"{self.facts.metric}, {self.facts.where}>"
        )

    def summary(self) -> str:
        """What it is, and what searches with it cost, in a few lines."""
        pages, pending = self._now
        text = summary_of(pages.facts, pages.native.path)
        if pending.is_empty:
            return text
        return (
            f"{text}\nnot merged: {pending.n_added:,} vectors added, {len(pending.dead):,} "
            f"deleted, {format_size(pending.size_bytes)} in memory"
        )

    def path_report(self) -> Sequence[FilePath]:
        """See `espnx.device.interface.Device`: of the files that walks read."""
        effective, reason, is_direct = self._now[0].native.path
        facts = self.facts
        found = [each.path for each in facts.page_files if each.path]
        found += [facts.path(CODES)] if facts.layout.paged_codes else []
        said = f"{effective}{'' if is_direct else ' (buffered)'}"
        paths = dict.fromkeys(found)
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
            list_size: candidates that a walk keeps, L, k or more (of a graph with copies of rows
                at borders twice as many, at least): a longer list finds more, and reads more.
            recall: instead of it: the smallest list that was measured, at build, to find that share
                of the ten nearest of new queries like the graph's vectors. Neither: 0.95, or the
                longest list that was measured.
            nprobe: where there is a graph for each cluster: clusters that are searched for a query,
                the nearest, and more where these hold too few rows; None or ``auto``: for each
                query those that are not much farther than its nearest, as far as was measured at
                build to find what `recall` says.
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
        pages, pending = self._now
        walk = WalkRequest.of(
            pages.facts, queries, k, list_size, recall, nprobe, beam_width, stop_beyond, deadline_s
        )
        self.check_open()
        if pending.is_empty and include is None and exclude is None:
            return pages.search(walk, None)
        if pending.is_empty and not pages.facts.has_gaps:
            return pages.search(walk, filter_of(include, exclude, pages.facts.n_rows))
        return search_changed(pages, pending, walk, mask_of(include, exclude, pending.id_end))

    def walk_without(
        self,
        rows: np.ndarray,
        queries: Any,
        k: int,
        lists: tuple[int, int],
        allowed: RowFilter | None = None,
        probing: Probing | None = None,
    ) -> tuple[Neighbours, int]:
        """See `GraphVersion.walk_without`; of the pages alone."""
        return self._now[0].walk_without(rows, queries, k, lists, allowed, probing)

    def walk(self, queries: Any, k: int, list_size: int, probing: Probing) -> Neighbours:
        """See `GraphVersion.walk`."""
        return self._now[0].walk(queries, k, list_size, probing)

    def probe_margins(self, queries: Any) -> list[float]:
        """See `GraphVersion.probe_margins`."""
        return self._now[0].probe_margins(queries)

    def vectors(self, ids: Any, *, deadline_s: float = 30.0) -> np.ndarray:
        """Vectors as they are stored, [m, dim], of rows of the input, int64 [m]: float32 of
        bfloat16, and what codes stand for where nodes have such. Raises as `search`."""
        rows = np.atleast_1d(np.asarray(ids))
        if rows.dtype == bool:
            raise errors.InvalidInputError("rows to read", got="a mask", expected="numbers of rows")
        self.check_open()
        pages, pending = self._now
        row_mask(rows, pending.id_end, "read")
        return vectors_of(pages, pending, rows.astype(np.int64), deadline_s)

    def verify(self) -> Verified:
        """Reads and checks every page, and the log of what is not merged. Raises ChecksumError,
        FormatError, ReadError for the first that is damaged."""
        self.check_open()
        pages = self._now[0]
        is_alone = isinstance(self._path, GraphSections)
        torn_bytes = 0 if is_alone else read_log(pages.facts).torn_bytes
        return Verified(pages.reader.verify(), torn_bytes)

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
            self._now[0].native.close()

    def __enter__(self) -> GraphIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
