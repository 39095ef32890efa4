"""The lists of one part, open: which of them a query reads, and the device that measures them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .... import errors
from ....clusters.coding import Asked
from ....clusters.facts import ClusterFacts, StoredLists, read_lists
from ....clusters.finding import MemoryHeads, check_head_graph, list_size_of, lists_of
from ....clusters.index import check_device
from ....device.kinds import CLUSTERS
from ....device.vectors.interface import DistanceTicket
from ....graph.devices.walks import WALKS
from ....graph.format import CODEBOOK, ENTRIES, section_of
from ....storage import NativeEngine
from ....storage.files import Region
from ..devices import StageDevices
from ..flat import rows_allowed
from ..interface import Allowed, StageReads, StoredEntries
from .entries import FIX, sections_of, stored_rows

#: Of a graph of heads, sections that stay in memory while it is open.
_KEPT = tuple(map(section_of, (CODEBOOK, ENTRIES)))


class ClusterPart:
    """A part with lists, whose rows are its records. Closes what it opens.

    Args:
        part: of a store.
        dim: of the vectors that it has to have.
        engine: of the reads; stays the caller's.
        threads: that find heads, and measure lists.
        device: opens parts of devices.

    Attributes:
        facts: of the lists.
        coding: of their vectors, and of queries as devices take them.
        is_on_device: whether a device that somebody has named measures them.

    Raises FormatError, and as `ClusterIndex`.
    """

    def __init__(
        self,
        part: StoredEntries,
        dim: int,
        engine: NativeEngine,
        *,
        threads: int = 1,
        device: StageDevices | None = None,
    ):
        device = device or StageDevices()
        self._sections = sections_of(part)
        stored = read_lists(engine, self._sections)
        self.facts: ClusterFacts = stored.facts
        self.first_number, self.count = part.first_number, part.count
        found = (self.facts.n, self.facts.dim, self.facts.metric)
        if found != (part.count, dim, "ip"):
            raise errors.FormatError(
                "lists that do not fit the part",
                path=part.path,
                got=f"{found[0]} vectors of {found[1]}, {found[2]}",
                expected=f"{part.count} of {dim}, ip",
                fix=FIX,
            )
        self._file, self.coding = stored.file, stored.coding
        self._masks: WeakKeyDictionary[Allowed, np.ndarray] = WeakKeyDictionary()
        self._masking = threading.Lock()
        self._heads = _heads_of(stored, part.path, threads, device)
        try:
            self.is_on_device = device.of(CLUSTERS, part.path) is not None
            self.clusters = device.open(
                CLUSTERS, part.path, self._sections, engine=engine, threads=threads - 1
            )
            try:
                check_device(self._file, self.clusters, self.facts.where)
            except BaseException:
                self.clusters.close()
                raise
        except BaseException:
            self._heads.source.close()
            raise

    @property
    def n_lists(self) -> int:
        """How many there are."""
        return self.facts.n_lists

    @property
    def memory_bytes(self) -> int:
        """What it keeps in memory; the table of lists twice, once for the device."""
        return self.facts.memory_bytes + self._file.memory_bytes + self._heads.memory_bytes

    def find(
        self, wide: np.ndarray, count: int, deadline_s: float
    ) -> tuple[np.ndarray, StageReads, int]:
        """(the nearest lists of each query, int64 [q, m], -1 where there are no more; what that has
        read; rounds of reads that waited for one another).

        Args:
            wide: float32 [q, head_dim], of what `coding` makes of queries.
        """
        return self._heads.find(wide, min(count, self.n_lists), deadline_s)

    def start(self, query: torch.Tensor, lists: np.ndarray, deadline_s: float) -> DistanceTicket:
        """One request for the distances of a query to all vectors of some lists."""
        found: DistanceTicket = self.clusters.distances(
            query, lists, metric=self.coding.device_metric, deadline_s=deadline_s
        )
        return found

    def n_vectors(self, lists: np.ndarray) -> np.ndarray:
        """int64 [m]: of each of some lists."""
        found: np.ndarray = self._file.n_vectors[lists]
        return found

    def pages_of(self, lists: np.ndarray) -> int:
        """Pages that some lists lie on, each counted once."""
        return int(self._file.new_pages(lists).sum())

    def mask(self, allowed: Allowed) -> np.ndarray:
        """bool [count]: which rows may be found. Of what is alive there is one `Allowed` for as
        long as a version is open."""
        with self._masking:
            found = self._masks.get(allowed)
            if found is None:
                rows = rows_allowed(allowed, self.first_number, self.count)
                found = self._masks[allowed] = rows.mask(self.count)
            return found

    def scored(self, engine: NativeEngine, asked: Asked) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(rows, similarities float32 [q, m] of each query to them), as the device measures, over
        all lists: every one is read."""
        native = asked.native.numpy().astype(np.float32)
        for rows, vectors in stored_rows(engine, self._stored(engine)):
            products = native @ vectors.astype(np.float32).T
            yield rows, products * asked.worth[:, None] - asked.shift[:, None]

    def all_vectors(self, engine: NativeEngine) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(rows, what is stored of their vectors stands for, float32 [m, dim]), over all lists."""
        for rows, vectors in stored_rows(engine, self._stored(engine)):
            yield rows, self.coding.restored(vectors)

    def _stored(self, engine: NativeEngine) -> StoredLists:
        return read_lists(engine, self._sections)

    def close(self) -> None:
        self._heads.source.close()
        self.clusters.close()


class _HeadsInMemory:
    """Finds lists by heads in memory. Attributes: source: of them, closed by whoever made this."""

    memory_bytes = 0  # counted with the lists

    def __init__(self, finder: MemoryHeads):
        self.source = finder

    def find(
        self, wide: np.ndarray, count: int, deadline_s: float
    ) -> tuple[np.ndarray, StageReads, int]:
        """See `ClusterPart.find`."""
        return self.source.find(wide, count, deadline_s).lists, StageReads(), 0


class _HeadsInGraph:
    """Finds lists by walks through a graph of heads.

    Args:
        walks: a `espnx.graph.devices.walks.GraphWalks`, or what stands in front of one.
        is_on_device: whether a device that somebody has named reads it.
    """

    def __init__(self, walks: Any, count: int, memory_bytes: int, *, is_on_device: bool):
        self.source, self._count, self.memory_bytes = walks, count, memory_bytes
        self._is_on_device = is_on_device

    def find(
        self, wide: np.ndarray, count: int, deadline_s: float
    ) -> tuple[np.ndarray, StageReads, int]:
        """See `ClusterPart.find`."""
        if not count or not len(wide):
            return np.empty((len(wide), 0), np.int64), StageReads(), 0
        ticket = self.source.walk(wide, count, list_size=list_size_of(count), deadline_s=deadline_s)
        found = ticket.finish()
        moved_bytes = found.total_bytes
        reads = StageReads(
            int((found.pages + found.code_pages).sum()) + found.shared_pages,
            moved_bytes,
            moved_bytes,
            moved_bytes if self._is_on_device else 0,
        )
        return lists_of(found, self._count).lists, reads, int(found.pages.max(initial=0))


def _heads_of(
    stored: StoredLists, path: str, threads: int, device: StageDevices
) -> _HeadsInMemory | _HeadsInGraph:
    if stored.graph is None:
        if stored.heads is None or stored.links is None:
            raise errors.FormatError("lists of a part", path=path, got="no heads", fix=FIX)
        return _HeadsInMemory(MemoryHeads(stored.heads, stored.links, threads))
    walks = device.open(WALKS, path, stored.graph, threads=threads)
    try:
        check_head_graph(stored, walks.stored.n, walks.stored.dim, walks.stored.metric)
    except BaseException:
        walks.close()
        raise
    is_on_device = device.of(WALKS, path) is not None
    held = _graph_bytes(stored.graph.regions)
    return _HeadsInGraph(walks, stored.facts.n_lists, held, is_on_device=is_on_device)


def _graph_bytes(regions: Mapping[str, Region]) -> int:
    """What an open graph keeps: its codebook, entry points and their codes."""
    return sum(regions[name].size_bytes for name in _KEPT if name in regions)
