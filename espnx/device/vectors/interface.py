"""What every device offers for vectors, and all that its users see of it: `ClusterDevice` measures
the vectors of clusters, `GraphDevice` walks over a graph of them.

The smaller a distance, the nearer, with every metric. Threads: every call may come from any thread
at any time.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import torch

from ...ops.distances.checks import query_dtype
from ...storage import Engine, FileHandle, Plan
from ...storage.parse import Fields
from ..command import Command
from ..interface import Device, DeviceStats

#: The opcode of `DistanceCommand`: of those that NVMe leaves to vendors (80h to FFh), one whose
#: lowest bits say that data goes both ways.
DIST_CALC = 0x83
#: The opcode of `SearchCommand`: the next one of that kind.
GRAPH_SEARCH = 0x87
#: Of a cluster's address in `DistanceCommand.cdw10`; a page of flash has as many, or more.
PAGE_BYTES = 4096
#: An entry of a reply: 8 bytes.
REPLY = np.dtype([("distance", np.float32), ("id", np.int32)])
#: An entry of what a walk finds: 12 bytes.
WALK_REPLY = np.dtype([("distance", np.float32), ("id", np.int64)])


@dataclass(frozen=True)
class DistanceCommand:
    """Asks a device for the distances of a query to all vectors of one cluster: algorithm 2 of
    in-storage distance calculation.

    The query lies in the data buffer when the command is sent, and the reply when it is done: for
    each vector an entry of `REPLY`.

    Attributes:
        cdw10: the cluster's address: pages of 4096 bytes before it in the file of clusters (a drive
            adds the file's first block). cdw11: bytes of that page before it.
        payload: the query's bytes.
        n_vectors: of the cluster.
        entry_bytes: of a vector and its id on the device.
        metric: ``l2`` or ``ip``.
        opcode: `DIST_CALC`.
        page_bytes: of a page of the device's flash.
    """

    cdw10: int
    payload: bytes
    n_vectors: int
    entry_bytes: int
    metric: str
    opcode: int = DIST_CALC
    _: KW_ONLY
    cdw11: int = 0
    page_bytes: int = PAGE_BYTES

    @property
    def data_len(self) -> int:
        """Bytes of the reply, which come to the host."""
        return self.n_vectors * REPLY.itemsize

    @property
    def flash_bytes(self) -> int:
        """Bytes that the device reads of its own flash: whole pages, which commands of one request
        may share."""
        begin = self.cdw10 * PAGE_BYTES + self.cdw11
        end = begin + self.n_vectors * self.entry_bytes
        return (-(-end // self.page_bytes) - begin // self.page_bytes) * self.page_bytes


@dataclass(frozen=True, eq=False)
class SearchCommand(Command):
    """Asks a device to walk over its graph: one command a query, whatever the walk reads. The query
    lies in the data buffer when the command is sent, and `WALK_REPLY` [k] when it is done.

    Attributes:
        query, list_size, k, beam_width, deadline_s: of `GraphDevice.search`.
        opcode: `GRAPH_SEARCH`.
    """

    verb: ClassVar[str] = "search"
    comes_in_steps: ClassVar[bool] = True
    opcode: ClassVar[int] = GRAPH_SEARCH
    query: torch.Tensor
    list_size: int
    k: int
    _: KW_ONLY
    beam_width: int = 4
    deadline_s: float = 30.0

    @property
    def payload(self) -> bytes:
        """The query's bytes."""
        return self.query.contiguous().numpy().tobytes()

    @property
    def data_len(self) -> int:
        """Bytes of the reply, which come to the host."""
        return self.k * WALK_REPLY.itemsize

    def values(self, found: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """See `Command`."""
        return found[1]

    def begin_line(self, stored: Graph, memo: dict[Any, Any]) -> dict[str, Any]:
        """See `Command`."""
        return {"L": self.list_size, "k": self.k, "beam": self.beam_width}

    def end_line(
        self, line: dict[str, Any], ticket: SearchTicket | None, found: Any, memo: dict[Any, Any]
    ) -> None:
        """See `Command`."""
        if ticket is not None:
            rounds = ticket.rounds
            line |= {
                "bytes": sum(each.bytes_moved for each in rounds),
                "rounds": [each.nodes.tolist() for each in rounds],
            }
            line["round_bytes"] = [each.bytes_moved for each in rounds]
            line["round_requests"] = [each.read_requests for each in rounds]
            line["payload"] = base64.b64encode(self.payload).decode()

    @classmethod
    def of_line(cls, said: Fields, stored: Graph, memo: dict[Any, Any]) -> SearchCommand:
        """See `Command`. Of a line without its query nobody knows which way it went."""
        query = query_said(said, stored.format, stored.dim)
        list_size, k, beam_width = (said.whole(name, 1, 1 << 20) for name in ("L", "k", "beam"))
        return cls(query, list_size, k, beam_width=beam_width)


def query_said(said: Fields, format: str, dim: int) -> torch.Tensor:  # noqa: A002
    """The query of a line of a trace. Raises FormatError."""
    dtype = query_dtype(format)
    try:
        data = bytearray(base64.b64decode(said.text("payload", most=1 << 24), validate=True))
    except ValueError as error:
        said.refuse("payload", "a query, in base64", str(error))
    if len(data) != dim * dtype.itemsize:
        said.refuse(
            "payload", f"a query of {dim * dtype.itemsize} bytes, in base64", f"{len(data)} bytes"
        )
    return torch.frombuffer(data, dtype=dtype)


class Ticket(Protocol):
    """Something that a device was asked for. Errors are raised from the calls that wait, in the
    caller's thread: what reading raises, ChecksumError, FormatError, DeadlineExceededError,
    TransferCancelledError. Nothing that is wrong is handed out."""

    def cancel(self) -> None:
        """Whoever waits, or will, gets TransferCancelledError, unless all is done."""

    @property
    def stats(self) -> DeviceStats:
        """What this request moved and took."""


class DistanceTicket(Ticket, Protocol):
    """Clusters whose distances were asked for."""

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """Waits until at least so many more clusters are measured (or all, or the timeout): their
        places among those asked for, int64 [m], in the order in which they were measured, and
        whether that was all."""

    def reply(self, item: int) -> np.ndarray:
        """`REPLY` [n vectors] of the cluster at that place, in the cluster's order; `next` has
        named it."""

    def finish(self) -> np.ndarray:
        """Waits for all: `REPLY` [vectors], cluster after cluster as asked for."""


class Clusters(Protocol):
    """Public facts of a file of clusters.

    Attributes:
        format: of its vectors, a key of `espnx.ops.distances.VECTOR_FORMATS`.
        dim: values of a vector.
        n_vectors: int64 [clusters], of each.
        page_bytes: of a page of flash.
    """

    @property
    def page_bytes(self) -> int: ...

    @property
    def format(self) -> str: ...

    @property
    def dim(self) -> int: ...

    @property
    def n_vectors(self) -> np.ndarray: ...

    def new_pages(self, clusters: np.ndarray) -> np.ndarray:
        """int64 [m]: pages of flash that each of these clusters lies on and none before it does:
        what a request of them reads."""


class ClusterDevice(Device, Protocol):
    """A place for clusters of vectors that measures how far they are from a query."""

    @property
    def clusters(self) -> Clusters: ...

    def commands(
        self, query: torch.Tensor, clusters: Sequence[int] | np.ndarray, *, metric: str = "l2"
    ) -> list[DistanceCommand]:
        """What `distances` of the same arguments asks the device for, one command a cluster that is
        not empty; none is sent."""

    def distances(
        self,
        query: torch.Tensor,
        clusters: Sequence[int] | np.ndarray,
        *,
        metric: str = "l2",
        deadline_s: float = 30.0,
    ) -> DistanceTicket:
        """Starts measuring all vectors of some clusters.

        Args:
            query: [dim], on the CPU; of the vectors' dtype where those are whole numbers, else
                float32.
            clusters: numbers; one may be named twice.
            metric: ``l2``: the sum of squared differences; ``ip``: the inner product, negated.
            deadline_s: of each read.

        Raises InvalidInputError, and what reading raises.
        """


@dataclass(frozen=True)
class WalkStats:
    """What a walk over a graph took.

    Attributes:
        hops: rounds of reads, each of which waited for the one before.
        nodes: that were read.
        read_requests: that were sent, after merging.
        bytes_asked: of nodes.
        bytes_moved: across the device's queue, alignment included.
        distances: measured to vectors.
        estimates: distances to codes of vectors.
    """

    hops: int = 0
    nodes: int = 0
    read_requests: int = 0
    bytes_asked: int = 0
    bytes_moved: int = 0
    distances: int = 0
    estimates: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )


@dataclass(frozen=True, eq=False)
class Round:
    """Reads of a walk that waited for those of the round before.

    Attributes:
        nodes: int64 [m]: that were asked for, in the order of their numbers.
        bytes_moved: across the device's queue, alignment included.
        distances: measured to vectors that this round brought.
        read_requests: that were sent, after merging.
    """

    nodes: np.ndarray
    bytes_moved: int
    distances: int
    read_requests: int


@dataclass(frozen=True, eq=False)
class Nodes:
    """What the bytes of some nodes say.

    Attributes:
        numbers: int64 [m]: which nodes these are: all that were asked for, and perhaps others that
            came with them in the same page.
        vector_offset_bytes: int64 [m]: where each one's vector begins in the memory that was read.
        neighbours: int64 [sum]: their neighbours, node after node.
        first: int64 [m + 1]: where each one's neighbours begin.
        codes: whatever the graph's estimates need of these bytes, for each of `neighbours`; None:
            nothing.
        ids: int64 [m]: what results call them; None: their numbers.
    """

    numbers: np.ndarray
    vector_offset_bytes: np.ndarray
    neighbours: np.ndarray
    first: np.ndarray
    codes: np.ndarray | None = None
    ids: np.ndarray | None = None


#: Estimates distances to neighbours without reading them: (int64 [n] nodes, their rows of
#: `Nodes.codes`, or None) -> float32 [n].
Estimate = Callable[[np.ndarray, np.ndarray | None], np.ndarray]


class Graph(Protocol):
    """A graph of vectors on storage, as a device that walks over it needs to know it. Every call
    may come from any thread."""

    @property
    def n_nodes(self) -> int:
        """They are numbered from 0."""

    @property
    def format(self) -> str:
        """The format of the vectors in the nodes, a key of `espnx.ops.distances.VECTOR_FORMATS`."""

    @property
    def dim(self) -> int:
        """Values of a vector."""

    @property
    def metric(self) -> str:
        """The metric by which the graph was built: ``l2`` or ``ip``."""

    def open(self, engine: Engine) -> Sequence[FileHandle]:
        """Opens its files, which plans name from then on. The device closes them."""

    def entry_points(self, query: torch.Tensor) -> np.ndarray:
        """int64 [m]: the nodes at which a walk begins; none where there are no nodes."""

    def plan(self, nodes: np.ndarray) -> Plan:
        """The places of the bytes of each node, item for item, with their checksums where there are
        some; several may lie in one page."""

    def parse(self, nodes: np.ndarray, memory: torch.Tensor, position_bytes: np.ndarray) -> Nodes:
        """What was read: the bytes of ``nodes[i]`` begin at ``position_bytes[i]`` of the uint8
        memory. Raises FormatError, ChecksumError, StaleDataError for bytes that are no such
        node."""

    def estimator(self, query: torch.Tensor) -> Estimate | None:
        """How far nodes are, by codes in memory or beside the neighbours' numbers. None: there are
        none, and a node's vector is read before it is known how far it is."""


@runtime_checkable
class LayeredGraph(Graph, Protocol):
    """A graph with layers above, each of fewer nodes (HNSW, arXiv 1603.09320, algorithm 5). A walk
    begins in the highest at the entry point that is nearest, goes to the nearest neighbour as long
    as one is nearer, and down; where it comes out of the lowest, the walk over `Graph`'s own
    neighbours begins. Vectors of nodes above are read like any other; their neighbours there are
    known without reading."""

    @property
    def n_upper_layers(self) -> int:
        """Layers above; they are numbered from 1, the lowest."""

    def upper_neighbours(self, layer: int, node: int) -> np.ndarray:
        """int64 [m]: of a node that has that layer."""


class SearchTicket(Ticket, Protocol):
    """A walk over a graph."""

    def finish(self, timeout_s: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Waits for its end: (ids int64 [m], distances float32 [m]), m = k or the fewer that were
        found; the nearest first, ties by id. Raises DeadlineExceededError after the timeout, and
        what `Ticket` says."""

    @property
    def walk(self) -> WalkStats:
        """What the walk took; of a finished one."""

    @property
    def rounds(self) -> Sequence[Round]:
        """What it read, round after round: the trace of a walk, `walk.hops` of them; of a finished
        one."""


class GraphDevice(Device, Protocol):
    """A place for a graph of vectors that walks over it by itself: one command a query."""

    @property
    def graph(self) -> Graph: ...

    def command(
        self, query: torch.Tensor, list_size: int, k: int, *, beam_width: int = 4
    ) -> SearchCommand:
        """What `search` of the same arguments asks the device for; it is not sent."""

    def search(
        self,
        query: torch.Tensor,
        list_size: int,
        k: int,
        *,
        beam_width: int = 4,
        deadline_s: float = 30.0,
        watch: Callable[[Round], None] | None = None,
    ) -> SearchTicket:
        """Starts looking for the k nearest nodes.

        Args:
            query: [dim], on the CPU; of the vectors' dtype where those are whole numbers, else
                float32.
            list_size: candidates that are kept, k or more, DiskANN's L: a longer list finds more,
                and reads more.
            k: results wanted.
            beam_width: candidates that are expanded in one hop, DiskANN's W. The result depends on
                it, and on nothing that time decides.
            deadline_s: of each read.
            watch: gets every round once it has been measured, in any thread.

        Raises InvalidInputError.
        """
