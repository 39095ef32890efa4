"""A stored graph as a part of a device: queries walk over its pages as `espnx.graph.GraphIndex`
lets them, with filters, many at a time, and what they find is the same to the bit.

`StoredGraph` is the same graph for devices that take one query a command, and go round by round
(RAGX, section 4.3).
"""

from __future__ import annotations

import base64
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from ...device.command import Command, Part
from ...device.cost.walk import walk
from ...device.interface import Capabilities, DeviceStats, FilePath
from ...device.kinds import PartKind, Verb
from ...storage.parse import Fields
from ..filters import RowFilter
from ..format import GraphSections
from ..index import GraphIndex
from ..neighbours import Neighbours
from ..search.asked import beam_width_of
from ..search.under_way import GraphSearch

_PAYLOAD_MAX = 1 << 30  # of queries, and of a filter, in a trace
_ALLOWED = "filter"


@dataclass(frozen=True, eq=False)
class WalkCommand(Command):
    """Asks a device for the nearest rows of some queries.

    Attributes:
        queries, k, list_size, include, deadline_s: of `GraphIndex.search`.
    """

    verb: ClassVar[str] = "walk"
    queries: np.ndarray
    k: int
    _: KW_ONLY
    list_size: int
    include: RowFilter | None = None
    deadline_s: float = 30.0

    @property
    def beam_width(self) -> int:
        """Pages of a query that are under way at a time."""
        return beam_width_of(len(self.queries))

    @property
    def payload_bytes(self) -> int:
        """Bytes of the queries, and of the filter: a bit for each row."""
        allowed = 0 if self.include is None else self.include.bits.numel()
        return int(self.queries.nbytes) + allowed

    def values(self, found: Neighbours | tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """See `Command`; of a partial result, too."""
        return found.distances if isinstance(found, Neighbours) else found[1]

    def begin_line(self, stored: StoredWalks, memo: dict[Any, Any]) -> dict[str, Any]:
        """See `Command`."""
        line = {
            "queries": len(self.queries),
            "k": self.k,
            "list_size": self.list_size,
            "beam": self.beam_width,
            "payload": base64.b64encode(self.queries.astype("<f4").tobytes()).decode(),
        }
        if self.include is not None:
            line[_ALLOWED] = base64.b64encode(self.include.bits.numpy().tobytes()).decode()
        return line

    def end_line(
        self, line: dict[str, Any], ticket: Any, found: Neighbours | None, memo: dict[Any, Any]
    ) -> None:
        """See `Command`."""
        if found is not None:
            line |= {
                "bytes": found.total_bytes,
                "pages": found.pages.tolist(),
                "code_pages": found.code_pages.tolist(),
                "shared_pages": found.shared_pages,
                "filter_bytes": found.filter_bytes,
            }

    @classmethod
    def of_line(cls, said: Fields, stored: StoredWalks, memo: dict[Any, Any]) -> WalkCommand:
        """See `Command`."""
        count = said.whole("queries", 1, 1 << 24)
        data = _decoded(said, "payload", count * stored.dim * 4)
        allowed = None
        if _ALLOWED in said:
            bits = np.frombuffer(_decoded(said, _ALLOWED, -(-stored.n // 8)), np.uint8)
            allowed = RowFilter.of(
                np.unpackbits(bits, count=stored.n, bitorder="little").astype(bool)
            )
        return cls(
            np.frombuffer(data, "<f4").astype(np.float32).reshape(count, stored.dim),
            said.whole("k", 1, 1 << 20),
            list_size=said.whole("list_size", 1, 1 << 20),
            include=allowed,
        )


def _decoded(said: Fields, name: str, size_bytes: int) -> bytes:
    """Raises FormatError."""
    try:
        data = base64.b64decode(said.text(name, most=_PAYLOAD_MAX), validate=True)
    except ValueError as error:
        said.refuse(name, f"{size_bytes} bytes, in base64", str(error))
    if len(data) != size_bytes:
        said.refuse(name, f"{size_bytes} bytes, in base64", f"{len(data)} bytes")
    return data


@dataclass(frozen=True)
class StoredWalks:
    """What costs and traces must know of a graph. See `espnx.device.cost.walk.WalkedGraph`.

    Attributes: n: of its rows. metric: by which it was built.
    """

    n: int
    dim: int
    metric: str
    format: str
    vector_bytes: int
    walks: int


class GraphWalks(Part):
    """A graph on this machine's SSD, whose walks are its cores'. Every call may come from any
    thread at any time.

    Args:
        graph: the directory of one, or its sections in another file.
        threads: that read and compute.
        engine: the path of the reads, by name.

    Attributes:
        index: the graph, open.

    Raises what `GraphIndex` raises.
    """

    compute = torch.device("cpu")
    capabilities = Capabilities()

    def __init__(
        self,
        graph: str | os.PathLike[str] | GraphSections,
        *,
        threads: int = 2,
        engine: str = "auto",
    ):
        self.index = GraphIndex(graph, threads=threads, engine=engine)
        self._stored_bytes = sum(self.index.facts.file_sizes.values())
        self._lock = threading.Lock()  # guards what follows
        self._live: weakref.WeakSet[WalksTicket] = weakref.WeakSet()
        self._done = DeviceStats()

    @property
    def stored(self) -> StoredWalks:
        """What is kept."""
        layout = self.index.facts.layout
        return StoredWalks(
            layout.n,
            layout.dim,
            self.index.facts.metric,
            layout.format,
            layout.vector_bytes,
            self.index.walks,
        )

    def walk(
        self,
        queries: np.ndarray,
        k: int,
        *,
        list_size: int,
        include: RowFilter | None = None,
        deadline_s: float = 30.0,
    ) -> WalksTicket:
        """Starts looking for the nearest rows of each query. Arguments and errors: see
        `GraphIndex.search`."""
        search = self.index.start(
            queries, k, list_size=list_size, include=include, deadline_s=deadline_s
        )
        ticket = WalksTicket(self, search)
        with self._lock:
            self._live.add(ticket)
        return ticket

    def count(self, stats: DeviceStats) -> None:
        """Adds walks that have ended."""
        with self._lock:
            self._done = self._done + stats

    def path_report(self) -> Sequence[FilePath]:
        """See `Device`."""
        return self.index.path_report()

    def stats(self) -> DeviceStats:
        """See `Device`; of walks that have ended."""
        with self._lock:
            return replace(self._done, stored_bytes=self._stored_bytes)

    def forget(self) -> None:
        """See `Device`."""
        with self._lock:
            live = list(self._live)
        for ticket in live:
            ticket.cancel()

    def close(self) -> None:
        """See `Device`."""
        self.index.close()


class WalksTicket:
    """See `espnx.device.vectors.interface.Ticket`, and `GraphSearch`.

    Attributes:
        partial, cancel: of the `GraphSearch`.
        stats: of finished walks; whole pages, but of the file of rows.
    """

    def __init__(self, device: GraphWalks, search: GraphSearch):
        self._device, self._search, self.stats = device, search, DeviceStats()
        self.partial, self.cancel = search.partial, search.cancel
        self._has_ended = False

    def finish(self) -> Neighbours:
        """See `GraphSearch.finish`."""
        found = self._search.finish()
        if not self._has_ended:
            self._has_ended = True
            self.stats = DeviceStats(
                bytes_asked=found.total_bytes,
                bytes_moved=found.total_bytes,
                read_requests=int((found.pages + found.code_pages).sum())
                + found.shared_requests
                + found.filter_requests,
            )
            self._device.count(self.stats)
        return found


#: Graphs whose walks are asked for as commands. A device without the latency of reads cannot say
#: what they take.
WALKS = PartKind(
    "walks",
    "graphs that many queries walk over at a time",
    "open_walks",
    {"walk": Verb(WalkCommand, walk)},
    lambda path, graph, **options: GraphWalks(graph, **options),
    lambda part: part.stored,
    says="open_walks",
    facts=lambda stored: {
        "nodes": stored.n,
        "format": stored.format,
        "dim": stored.dim,
        "metric": stored.metric,
    },
    reads_wait=True,
)
