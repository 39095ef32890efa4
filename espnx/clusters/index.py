"""Open lists: nearest neighbours, with what they cost."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .. import errors
from ..checks import check_finite, check_path, check_whole, plain
from ..device.clusters.device import SsdClusterDevice
from ..device.clusters.layout import ClusterFile, ClusterSections, ClusterSource
from ..device.clusters.nearest import nearest
from ..device.interface import FilePath
from ..device.near_storage import NearStorageDevice
from ..device.registry import open_device
from ..device.vectors.interface import ClusterDevice, DistanceTicket
from ..forks import check_own
from ..graph.filters import mask_of
from ..graph.neighbours import shown
from ..storage import NativeEngine
from ..suggestions import suggests_keywords
from .coding import Asked
from .facts import ClusterFacts, StoredLists, check_all_there, check_ids, entries_in, read_lists
from .finding import FoundLists, GraphHeads, HeadFinder, MemoryHeads
from .found import ListNeighbours
from .options import HEADS_IN, N_MAX

_IN_FLIGHT_MAX = 4096
_VERIFY_BYTES = 16 << 20


class ClusterIndex:
    """Lists that `espnx.clusters.build` has made, open for searches. Every method may be called
    from any thread.

    Attributes:
        facts: what the directory says.
        device: that measures the lists' vectors, a `ClusterDevice`.

    Args:
        path: the directory, or the sections of another file that hold what its files do.
        device: that keeps the lists and measures their vectors: None, this machine's SSD; a name,
            as of `espnx.device.open` (``smartssd``), opened in that directory; a
            `NearStorageDevice`; or a `ClusterDevice` of these lists, which stays the caller's.
        heads: ``memory`` or ``graph``, as the lists were built with; None: that.
        engine: path of the reads: ``auto``, ``uring``, ``posix`` or ``memory``.
        threads: that measure vectors and search heads; None: as many as torch uses.
        in_flight: queries whose lists are read at a time.

    Raises:
        StoreNotFoundError, FormatError, ChecksumError, TruncatedFileError, FileMissingError: no
            lists, or damaged ones.
        InvalidInputError: heads that the lists were not built with; a device of other clusters.
        MissingDependencyError: FAISS is not installed.
        PathUnavailableError: the named path cannot be had here.
    """

    @suggests_keywords
    def __init__(
        self,
        path: ClusterSource,
        *,
        device: Any = None,
        heads: str | None = None,
        engine: str = "auto",
        threads: int | None = None,
        in_flight: int = 32,
    ):
        source = (
            path if isinstance(path, ClusterSections) else check_path("directory of lists", path)
        )
        threads = torch.get_num_threads() if threads is None else threads
        check_whole("threads of lists", threads, 1, 256)
        check_whole("in_flight, queries at a time", in_flight, 1, _IN_FLIGHT_MAX)
        if heads is not None and heads not in HEADS_IN:
            raise errors.InvalidInputError(
                "heads of lists", got=repr(heads), expected=" or ".join(HEADS_IN)
            )
        self._process, self._in_flight, self._engine_name = os.getpid(), in_flight, engine
        with NativeEngine("posix", threads=1, pool_bytes=0) as own:
            stored = read_lists(own, source)
        # not the heads: their finder has a copy
        self._stored = replace(stored, heads=None, links=None)
        self.facts: ClusterFacts = stored.facts
        self._file, self._coding = stored.file, stored.coding
        if heads not in (None, self.facts.heads):
            raise errors.InvalidInputError(
                f"heads of the lists in {self.facts.where}",
                got=repr(heads),
                expected=repr(self.facts.heads),
                fix=f"build them with heads={heads!r} (--heads {heads})",
            )
        self._finder = _finder_of(stored, engine, threads)
        try:
            self.device, self._owned = _device_of(device, source, engine, threads)
            try:
                check_device(self._file, self.device, self.facts.where)
            except BaseException:
                self._close_owned()
                raise
        except BaseException:
            self._finder.close()
            raise
        self._is_open = True

    def __len__(self) -> int:
        return self.facts.n

    def __repr__(self) -> str:
        facts = self.facts
        return (
            f"<ClusterIndex: {facts.n:,} vectors of {facts.dim} dimensions in {facts.n_lists:,} "
            f"lists, {facts.metric}, {facts.where}>"
        )

    def summary(self) -> str:
        """What it is, in a few lines."""
        return self.facts.summary()

    @property
    def memory_bytes(self) -> int:
        """What it keeps in memory, whatever it searches."""
        more = self._finder.memory_bytes if isinstance(self._finder, GraphHeads) else 0
        return self.facts.memory_bytes + more

    def path_report(self) -> Sequence[FilePath]:
        """See `espnx.device.interface.Device`."""
        return [*self.device.path_report(), *self._finder.path_report()]

    @suggests_keywords
    def search(
        self,
        queries: Any,
        k: int = 10,
        *,
        n_lists: int = 32,
        max_dist_ratio: float | None = None,
        include: Any = None,
        exclude: Any = None,
        deadline_s: float = 30.0,
    ) -> ListNeighbours:
        """The k nearest vectors of each query among those of its nearest lists. All lists of a
        query are one request.

        Args:
            queries: [q, dim] or [dim], array or tensor; whole numbers for lists of such, else what
                float32 holds.
            k: results of each, 1 or more.
            n_lists: that are read for a query (nprobe), at most: those of the nearest heads.
            max_dist_ratio: 1 or more: of these only lists whose head is at most so many times as
                far from the query as the nearest head, by squared distance (query-aware pruning,
                SPANN section 3.3, SPTAG's MaxDistRatio). A query that is a head itself reads that
                list alone. None: all.
            include, exclude: rows that alone may be found, or may not: bool [n], or numbers in any
                collection. More lists are read, twice as many each time, until a query has k.
            deadline_s: of each read.

        Raises:
            InvalidInputError: shapes, dtypes, values that are not finite, numbers out of range.
            ReadError, ChecksumError, TruncatedFileError, DeadlineExceededError, EngineClosedError:
                no result is returned, and the index can be searched again.
        """
        k, n_lists, deadline_s = plain(k), plain(n_lists), plain(deadline_s)
        ratio = plain(max_dist_ratio)
        check_whole("k, neighbours wanted", k, 1, N_MAX)
        check_whole("n_lists, lists of a query", n_lists, 1, N_MAX)
        check_finite("deadline_s", deadline_s)
        check_finite("max_dist_ratio", 1 if ratio is None else ratio)
        if deadline_s <= 0 or (ratio is not None and ratio < 1):
            raise errors.InvalidInputError(
                "deadline_s and max_dist_ratio",
                got=f"{deadline_s} and {ratio}",
                expected="above 0; 1 or more",
            )
        asked = self._coding.queries(queries)
        allowed = mask_of(include, exclude, self.facts.n)
        self.check_open()
        begun = time.perf_counter()
        found = self._finder.find(asked.wide, n_lists, deadline_s)
        search = _Search(self, asked, k, allowed, deadline_s, begun)
        search.read(_within(found, ratio), range(len(asked.native)))
        short = search.short()
        while allowed is not None and short and n_lists < self.facts.n_lists:
            before, n_lists = n_lists, min(2 * n_lists, self.facts.n_lists)
            more = self._finder.find(asked.wide[short], n_lists, deadline_s)
            fresh = [_new(row, search.asked[at]) for row, at in zip(more.lists, short, strict=True)]
            search.read(fresh, short)
            found.pages[short] += more.pages
            found.rounds[short] += more.rounds
            short = search.short() if n_lists > before else []
        return search.result(found)

    def verify(self) -> int:
        """Reads and checks every list: how many there are. Raises ChecksumError, FormatError,
        ReadError for the first that is damaged."""
        self.check_open()
        self._finder.verify()
        seen = np.zeros(self.facts.n, bool)
        with NativeEngine(self._engine_name, pool_bytes=_VERIFY_BYTES) as engine:
            for _, held in entries_in(engine, self._stored):
                seen[held["id"]] = True
        check_all_there(self.facts, seen)
        return self.facts.n_lists

    def check_open(self) -> None:
        """Raises EngineClosedError after `close`, InvalidInputError in a child of the process that
        opened it."""
        if not self._is_open:
            raise errors.EngineClosedError("the lists are closed", fix="open them again")
        check_own(self._process, "the lists")

    def start_reading(
        self, query: torch.Tensor, lists: np.ndarray, deadline_s: float
    ) -> DistanceTicket:
        """One request for the distances of a query to all vectors of some lists. Raises as
        `ClusterDevice.distances`."""
        metric = self._coding.device_metric
        return self.device.distances(query, lists, metric=metric, deadline_s=deadline_s)

    def pages_of(self, lists: np.ndarray) -> int:
        """Pages of flash that some lists lie on, each counted once."""
        return int(self._file.new_pages(lists).sum())

    @property
    def in_flight(self) -> int:
        """Queries whose lists are read at a time."""
        return self._in_flight

    def close(self) -> None:
        """Ends searches that are under way. A second call does nothing."""
        if self._is_open and os.getpid() == self._process:
            self._is_open = False
            self._finder.close()
            self._close_owned()

    def _close_owned(self) -> None:
        for each in self._owned:
            each.close()

    def __enter__(self) -> ClusterIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_device(file: ClusterFile, device: ClusterDevice, where: str) -> None:
    """Raises InvalidInputError for a device of other clusters than the lists in `where` are."""
    held = device.clusters
    if (held.format, held.dim) != (file.format, file.dim) or not np.array_equal(
        np.asarray(held.n_vectors), file.n_vectors
    ):
        raise errors.InvalidInputError(
            f"device of the lists in {where}",
            got=f"{len(held.n_vectors)} clusters of {held.dim} values of {held.format}",
            expected=f"these {file.n_clusters} of {file.dim} values of {file.format}",
            fix="open it on the same lists",
        )


def _finder_of(stored: StoredLists, engine: str, threads: int) -> HeadFinder:
    if stored.heads is None or stored.links is None:
        return GraphHeads(stored, engine, threads)
    return MemoryHeads(stored.heads, stored.links, threads)


def _device_of(
    given: Any, source: ClusterSource, engine: str, threads: int
) -> tuple[ClusterDevice, Sequence[Any]]:
    """(the device; what is to be closed with the index, in order)"""
    if given is None:
        own = SsdClusterDevice(source, engine=engine, threads=threads - 1)
        return own, [own]
    if isinstance(given, str):
        home = os.path.dirname(source.where) if isinstance(source, ClusterSections) else source
        whole = open_device(given, home)
        try:
            part = whole.open_clusters(source, engine=engine, threads=threads - 1)
        except BaseException:
            whole.close()
            raise
        return part, [part, whole]
    if isinstance(given, NearStorageDevice):
        part = given.open_clusters(source, engine=engine, threads=threads - 1)
        return part, [part]
    if not hasattr(given, "distances") or not hasattr(given, "clusters"):
        raise errors.InvalidInputError(
            "device of lists",
            got=repr(given),
            expected="None, the name of a device, an open device, or its clusters",
        )
    return given, []


def _within(found: FoundLists, ratio: float | None) -> list[np.ndarray]:
    """The lists of each query that are near enough."""
    held = found.lists >= 0
    if ratio is not None and found.far.shape[1]:
        held &= found.far <= np.float32(ratio) * np.maximum(found.far[:, :1], 0)
        held[:, 0] = found.lists[:, 0] >= 0
    return [row[chosen] for row, chosen in zip(found.lists, held, strict=True)]


def _new(lists: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Those lists that were not asked for yet."""
    held = lists[lists >= 0]
    return held[~np.isin(held, asked)]


@dataclass
class _Costs:
    """What a query has taken so far."""

    pages: int = 0
    requests: int = 0
    bytes_moved: int = 0
    measured: int = 0
    rounds: int = 0
    seconds: float = 0.0


class _Search:
    """One search: what its queries have asked for, found and cost so far.

    Attributes:
        asked: of each query the lists, int64.
    """

    def __init__(
        self,
        index: ClusterIndex,
        queries: Asked,
        k: int,
        allowed: np.ndarray | None,
        deadline_s: float,
        begun: float,
    ):
        self._index, self._queries, self._k = index, queries, k
        self._allowed, self._deadline_s = allowed, deadline_s
        self._begun = begun
        self.asked = [np.empty(0, np.int64)] * len(queries.native)
        self._best = [(np.empty(0, np.int32), np.empty(0, np.float32))] * len(queries.native)
        self._costs = [_Costs() for _ in range(len(queries.native))]

    def read(self, lists: Sequence[np.ndarray], places: Sequence[int]) -> None:
        """Reads lists of some queries, each query's in one request, several queries at a time."""
        under_way: deque[tuple[int, DistanceTicket, float]] = deque()
        try:
            for at, wanted in zip(places, lists, strict=True):
                if not len(wanted):
                    continue
                if len(under_way) == self._index.in_flight:
                    self._finish(*under_way.popleft())
                begun = time.perf_counter()
                ticket = self._index.start_reading(
                    self._queries.native[at], wanted, self._deadline_s
                )
                under_way.append((at, ticket, begun))
                self.asked[at] = np.concatenate([self.asked[at], wanted])
                self._costs[at].rounds += 1
            while under_way:
                self._finish(*under_way.popleft())
        except BaseException:
            for _, ticket, _ in under_way:
                ticket.cancel()
            raise

    def _finish(self, at: int, ticket: DistanceTicket, begun: float) -> None:
        replies = ticket.finish()
        stats, costs = ticket.stats, self._costs[at]
        costs.requests += stats.read_requests
        costs.bytes_moved += stats.bytes_moved
        costs.measured += len(replies)
        costs.seconds += time.perf_counter() - begun
        check_ids(self._index.facts, "vectors of lists", replies["id"])
        if self._allowed is not None:
            replies = replies[self._allowed[replies["id"]]]
        ids, far = self._best[at]
        if len(ids):
            before = np.empty(len(ids), replies.dtype)
            before["id"], before["distance"] = ids, far
            replies = np.concatenate([before, replies])
        self._best[at] = nearest(replies, self._k)

    def short(self) -> list[int]:
        """Queries that have fewer results than are wanted."""
        return [at for at, (ids, _) in enumerate(self._best) if len(ids) < self._k]

    def result(self, found: FoundLists) -> ListNeighbours:
        """What was found. `found`: what the lists were found by."""
        asked, facts = self._queries, self._index.facts
        q = len(asked.native)
        ids = np.full((q, self._k), -1, np.int64)
        far = np.full((q, self._k), np.inf, np.float32)
        for at, (own, distances) in enumerate(self._best):
            ids[at, : len(own)] = own
            far[at, : len(own)] = distances * asked.worth[at] + asked.shift[at]

        def of_each(name: str, dtype: type) -> np.ndarray:
            return np.array([getattr(each, name) for each in self._costs], dtype)

        return ListNeighbours(
            ids,
            shown(facts.metric, far),
            of_each("pages", np.int64) + [self._index.pages_of(each) for each in self.asked],
            np.zeros(q, np.int64),
            of_each("measured", np.int64),
            np.zeros(q, np.int64),
            of_each("seconds", np.float32),
            facts.page_bytes,
            lists=np.array([len(each) for each in self.asked], np.int64),
            requests=of_each("requests", np.int64),
            bytes_moved=of_each("bytes_moved", np.int64),
            rounds=of_each("rounds", np.int64) + found.rounds,
            head_pages=found.pages,
        )
