"""Walks over a graph on an emulated device: done by this machine, in the device's time.

A walk's rounds wait for one another, so their times add up: each takes the latency of a read, what it asked for is read, and its distances
are measured. A device whose accelerator walks by itself (RAGX, section 4.3) takes the query and gives the k nearest back; of any other the
bytes of every round pass its link, and the host measures and chooses. Results are those of the plain device either way, to the bit.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import numpy as np
import torch

from ... import errors
from ...ops.distances import vector_bytes
from ..graph.device import SsdGraphDevice, SsdSearchTicket
from ..interface import DeviceStats
from ..vectors.interface import WALK_REPLY, Graph, Round, SearchCommand, WalkStats
from .faults import DeviceFault, Guard
from .paced import PacedDevice
from .topology import Topology, Transfer


class EmulatedGraphDevice(PacedDevice[SsdGraphDevice]):
    """See `espnx.device.vectors.interface.GraphDevice`.

    Args:
        inner: does the work; closed with this one.
        topology, number: which device of it.
        walks: its accelerator walks over graphs.
        guard: what goes wrong on it.
    """

    def __init__(self, inner: SsdGraphDevice, topology: Topology, number: int, *, walks: bool, guard: Guard | None = None):
        super().__init__(inner, topology)
        self._number, self._walks = number, walks
        self._guard = guard or Guard(topology, number, "")

    @property
    def graph(self) -> Graph:
        """See `GraphDevice`."""
        return self._inner.graph

    def command(self, query: torch.Tensor, L: int, k: int, *, beam: int = 4) -> SearchCommand:
        """See `GraphDevice`."""
        return self._inner.command(query, L, k, beam=beam)

    def search(self, query: torch.Tensor, L: int, k: int, *, beam: int = 4, deadline_s: float = 30.0) -> EmulatedSearchTicket:
        """See `GraphDevice`. `deadline_s` is of the real reads, and in virtual seconds of the device's."""
        fault = self._guard.begin("search")
        pacing = _WalkPacing(self._topology, self._number, query, self.graph, walks=self._walks)
        inner = self._inner.search(query, L, k, beam=beam, deadline_s=deadline_s, watch=pacing.pass_round)
        if self._topology.stretch == 0:
            # Only waiting moves this clock: with the walk done before anybody waits, virtual times do not depend on this machine's.
            with contextlib.suppress(errors.EspnxError):  # `finish` raises it
                inner.finish()
        return EmulatedSearchTicket(inner, pacing, self._guard, fault, deadline_s * max(self._topology.stretch, 1.0))


class _WalkPacing:
    """What a walk costs one device of a topology; rounds come from the walk's thread."""

    def __init__(self, topology: Topology, device: int, query: torch.Tensor, graph: Graph, *, walks: bool):
        self.topology, self._device, self._walks = topology, device, walks
        self._flop, self._vector_bytes = 3.0 * graph.dim, vector_bytes(graph.format, graph.dim)  # a difference, its square, a sum
        self.asked_s, self._member = topology.now(), topology.member
        self._lock = threading.Lock()  # guards the last one
        self._last = topology.transfer(device, "host_to_device", query.nbytes if walks else 0)

    def pass_round(self, done: Round) -> None:
        """A round, behind the one before."""
        topology, device = self.topology, self._device
        with self._lock, topology.asking_for(self._member):
            route = "flash_read" if self._walks else "flash_to_host"
            self._last = topology.transfer(device, route, done.bytes_moved, after=self._last, requests=done.read_requests)
            if not self._walks:
                return
            measured_bytes = done.distances * self._vector_bytes
            self._last = topology.compute(device, self._flop * done.distances, measured_bytes, after=self._last)

    def reply(self, found: int) -> Transfer:
        """The last of all: so many entries to the host, where the device has chosen them."""
        with self._lock:
            if self._walks:
                self._last = self.topology.transfer(self._device, "device_to_host", found * WALK_REPLY.itemsize, after=self._last)
            return self._last

    def cancel(self) -> None:
        with self._lock:
            self.topology.cancel(self._last)


class EmulatedSearchTicket:
    """See `espnx.device.vectors.interface.SearchTicket`."""

    def __init__(self, inner: SsdSearchTicket, pacing: _WalkPacing, guard: Guard, fault: DeviceFault | None, deadline_s: float):
        self._inner, self._pacing, self._guard, self._fault, self._deadline_s = inner, pacing, guard, fault, deadline_s
        self._reply: Transfer | None = None

    def finish(self, timeout_s: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """See `SearchTicket`. The timeout is of the walk, and then of the device's time, in wall seconds."""
        ids, far = self._inner.finish(timeout_s)
        fault, self._fault = self._fault, None
        limit_s = self._deadline_s if timeout_s is None else timeout_s
        self._guard.wait(fault, "search", limit_s)
        if self._reply is None:
            self._reply = self._pacing.reply(len(ids))
        self._pacing.topology.wait(self._reply, asked_s=self._pacing.asked_s, deadline_s=limit_s)
        return ids, self._guard.reply(fault, "search", far, is_finite=_is_number)

    def cancel(self) -> None:
        """See `Ticket`."""
        self._inner.cancel()
        self._pacing.cancel()

    @property
    def walk(self) -> WalkStats:
        """See `SearchTicket`."""
        return self._inner.walk

    @property
    def rounds(self) -> Sequence[Round]:
        """See `SearchTicket`."""
        return self._inner.rounds

    @property
    def stats(self) -> DeviceStats:
        """See `Ticket`. Of the real reads."""
        return self._inner.stats


def _is_number(distances: np.ndarray) -> np.ndarray:
    """Distances of fp16 and fp32 may be infinite; of vectors that are numbers none is NaN."""
    found: np.ndarray = ~np.isnan(distances)
    return found
