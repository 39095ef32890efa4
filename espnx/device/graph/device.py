"""The plain SSD as a device for a graph: walks on threads of this machine's own, each over reads of
one deep queue."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future as WalkFuture
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from ... import errors
from ...checks import check_whole
from ...forks import check_own
from ...ops.distances.checks import check_metric, check_query
from ...storage import Future, NativeEngine, Plan
from ..command import Part
from ..interface import Capabilities, DeviceStats, FilePath
from ..vectors.interface import Graph, Round, SearchCommand, WalkStats
from .rounds import WalkSource

LENGTH_MAX = 1 << 20
NODES_MAX = 2**32 - 1


class SsdGraphDevice(Part):
    """See `espnx.device.vectors.interface.GraphDevice`.

    Args:
        graph: walked over; its files are opened and closed here.
        engine: of the reads, which stays the caller's; a name opens one of its own.
        walks: that are under way at a time; further ones wait.

    Raises what opening the graph's files does, InvalidInputError (also of a graph of more than 2^32
    - 1 nodes), PathUnavailableError.
    """

    compute = torch.device("cpu")
    capabilities = Capabilities()

    def __init__(self, graph: Graph, *, engine: NativeEngine | str = "auto", walks: int = 16):
        check_whole("walks at a time", walks, 1, 1024)
        check_metric(graph.metric)
        check_whole("nodes of a graph", graph.n_nodes, 0, NODES_MAX)
        self.graph = graph
        self._owns_engine = isinstance(engine, str)
        self.engine = NativeEngine(engine) if isinstance(engine, str) else engine
        try:
            self._files = list(graph.open(self.engine))
        except BaseException:
            if self._owns_engine:
                self.engine.close()
            raise
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(walks, thread_name_prefix="espnx-walk")
        self._live: weakref.WeakSet[SsdSearchTicket] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards what follows, and _live
        self._walked = WalkStats()
        self._closed = False

    def command(
        self, query: torch.Tensor, list_size: int, k: int, *, beam_width: int = 4
    ) -> SearchCommand:
        """See `GraphDevice`."""
        self._check(query, list_size, k, beam_width)
        return SearchCommand(query, list_size, k, beam_width=beam_width)

    def search(
        self,
        query: torch.Tensor,
        list_size: int,
        k: int,
        *,
        beam_width: int = 4,
        deadline_s: float = 30.0,
        watch: Callable[[Round], None] | None = None,
    ) -> SsdSearchTicket:
        """See `GraphDevice`. `watch` gets every round once it has been measured, in the walk's
        thread."""
        self._check(query, list_size, k, beam_width)
        self.check_process()
        with self._lock:
            if self._closed:
                raise errors.EngineClosedError("the device is closed", fix="open it again")
            ticket = SsdSearchTicket(self, query.clone(), list_size, beam_width, deadline_s, watch)
            self._live.add(ticket)
            ticket.begin(self._pool, k)
        return ticket

    def _check(self, query: torch.Tensor, list_size: int, k: int, beam_width: int) -> None:
        check_query(query, self.graph.format, self.graph.dim)
        if query.dim() != 1 or query.device.type != "cpu":
            got = f"{list(query.shape)} on {query.device}"
            raise errors.InvalidInputError(
                "query against a graph", got=got, expected="one query, [dim], on the CPU"
            )
        check_whole("k, nodes wanted", k, 1)
        check_whole("list_size, candidates of a walk", list_size, k, LENGTH_MAX)
        check_whole("beam_width of a walk", beam_width, 1, LENGTH_MAX)

    def check_process(self) -> None:
        """Raises InvalidInputError in a child after fork(), which has none of the threads that
        walk."""
        check_own(self._process, "the graph")

    def walked(self, stats: WalkStats) -> None:
        """Counts a walk that has ended."""
        with self._lock:
            self._walked = self._walked + stats

    def walk_stats(self) -> WalkStats:
        """Totals of all walks that have ended."""
        return self._walked

    def path_report(self) -> Sequence[FilePath]:
        """See `Device`."""
        return [
            FilePath(each.path, each.effective, self.engine.fallback_reason) for each in self._files
        ]

    def stats(self) -> DeviceStats:
        """See `Device`; of walks that have ended."""
        return device_stats(self._walked, sum(each.size_bytes for each in self._files))

    def forget(self) -> None:
        """See `Device`."""
        with self._lock:
            live = list(self._live)
        for ticket in live:
            ticket.cancel()

    def close(self) -> None:
        """See `Device`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._process:
            return  # the threads are the parent's
        self.forget()
        self._pool.shutdown()
        for file in self._files:
            self.engine.close_file(file)
        if self._owns_engine:
            self.engine.close()

    def __enter__(self) -> SsdGraphDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SsdSearchTicket:
    """See `espnx.device.vectors.interface.SearchTicket`."""

    def __init__(
        self,
        device: SsdGraphDevice,
        query: torch.Tensor,
        list_size: int,
        beam_width: int,
        deadline_s: float,
        watch: Callable[[Round], None] | None,
    ):
        self._device, self._deadline_s, self._watch = device, deadline_s, watch
        self._query, self._list_size, self._beam_width = query, list_size, beam_width
        self._cancelled = threading.Event()
        self._read: Future | None = None
        self._walk: WalkSource | None = None
        self._found: WalkFuture[tuple[np.ndarray, np.ndarray]]

    def begin(self, pool: ThreadPoolExecutor, k: int) -> None:
        """Puts the walk in line."""
        self._found = pool.submit(self._run, k)

    def _run(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        self._check()
        walk = WalkSource(
            self._device.graph, self._start_read, self._query, check=self._check, watch=self._watch
        )
        self._walk = walk
        try:
            return walk.run(self._list_size, k, self._beam_width)
        finally:
            self._read = None
            self._device.walked(walk.stats)

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise errors.TransferCancelledError("the walk is not needed")

    def _start_read(self, plan: Plan) -> Future:
        future = self._device.engine.read(plan, deadline_s=self._deadline_s)
        self._read = future
        if self._cancelled.is_set():  # between the check and here
            future.cancel()
        return future

    def finish(self, timeout_s: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """See `SearchTicket`."""
        self._device.check_process()
        begun = time.monotonic()
        try:
            return self._found.result(timeout_s)
        except errors.EspnxError:  # a deadline of the reads is a TimeoutError, too
            raise
        except TimeoutError:
            waited_s = time.monotonic() - begun
            raise errors.DeadlineExceededError(
                "a walk over a graph", got=f"none after {waited_s:.3g} s", expected="an end"
            ) from None

    def cancel(self) -> None:
        """See `Ticket`."""
        self._cancelled.set()
        if (read := self._read) is not None:
            read.cancel()

    @property
    def walk(self) -> WalkStats:
        """See `SearchTicket`."""
        return WalkStats() if self._walk is None else self._walk.stats

    @property
    def rounds(self) -> Sequence[Round]:
        """See `SearchTicket`."""
        return () if self._walk is None else tuple(self._walk.rounds)

    @property
    def stats(self) -> DeviceStats:
        """See `Ticket`."""
        return device_stats(self.walk)


def device_stats(walk: WalkStats, stored_bytes: int = 0) -> DeviceStats:
    """A walk in the words of devices."""
    return DeviceStats(
        bytes_asked=walk.bytes_asked,
        bytes_moved=walk.bytes_moved,
        read_requests=walk.read_requests,
        stored_bytes=stored_bytes,
    )
