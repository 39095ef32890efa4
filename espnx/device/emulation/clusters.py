"""Clusters of vectors on an emulated device: measured by this machine, in the device's time.

A device with processing elements takes a query with each command and gives distances and ids back (in-storage distance calculation,
chapter 3); of any other the clusters pass its link, and the host measures. Distances are those of the plain device either way, to the bit.
How an element is set up, synchronously or not, costs what the spec's bandwidths say: bubbles between commands are a time model's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..vectors.interface import ClusterDevice, Clusters, DistanceCommand, DistanceTicket
from .faults import Guard
from .paced import Group, PacedDevice, PacedTicket, groups_of
from .topology import Topology, Transfer


class EmulatedClusterDevice(PacedDevice[ClusterDevice]):
    """See `espnx.device.vectors.interface.ClusterDevice`.

    Args:
        inner: does the work; closed with this one.
        topology, number: which device of it.
        computes: its accelerator measures distances.
        guard: what goes wrong on it.
    """

    def __init__(self, inner: ClusterDevice, topology: Topology, number: int, *, computes: bool, guard: Guard | None = None):
        super().__init__(inner, topology)
        self._number, self._computes = number, computes
        self._guard = guard or Guard(topology, number, "")

    @property
    def clusters(self) -> Clusters:
        """See `ClusterDevice`."""
        return self._inner.clusters

    def commands(self, query: torch.Tensor, clusters: Sequence[int] | np.ndarray, *, metric: str = "l2") -> list[DistanceCommand]:
        """See `ClusterDevice`."""
        return self._inner.commands(query, clusters, metric=metric)

    def distances(
        self, query: torch.Tensor, clusters: Sequence[int] | np.ndarray, *, metric: str = "l2", deadline_s: float = 30.0
    ) -> DistanceTicket:
        """See `ClusterDevice`. `deadline_s` is of the real reads, and in virtual seconds of the device's."""
        fault = self._guard.begin("distances")
        inner = self._inner.distances(query, clusters, metric=metric, deadline_s=deadline_s)
        wanted = np.asarray(clusters, dtype=np.int64)
        commands = dict(zip(self._with_vectors(wanted), self._inner.commands(query, clusters, metric=metric), strict=True))
        flash = np.array([commands[i].flash_bytes if i in commands else 0 for i in range(len(wanted))], np.int64)
        reply = np.array([commands[i].data_len if i in commands else 0 for i in range(len(wanted))], np.int64)
        flop = 3.0 * query.numel() * np.asarray(self.clusters.n_vectors)[wanted]  # a difference, its square, a sum
        groups = [
            Group(begin, end, self._ask(query.nbytes, flash[begin:end], reply[begin:end], float(flop[begin:end].sum())))
            for begin, end in groups_of(flash)
        ]
        wall_s = deadline_s * max(self._topology.stretch, 1.0)
        hold = partial(self._guard.wait, fault, "distances", wall_s)
        look = partial(self._guard.reply, fault, "distances", is_finite=_is_number)
        return _PacedDistances(inner, len(wanted), groups, self._topology, wall_s, hold, look)

    def _with_vectors(self, wanted: np.ndarray) -> list[int]:
        """Places of clusters that are not empty: of the others there is no command."""
        return np.flatnonzero(np.asarray(self.clusters.n_vectors)[wanted]).tolist()

    def _ask(self, query_bytes: int, flash: np.ndarray, reply: np.ndarray, flop: float) -> Transfer:
        size_bytes, device, topology = int(flash.sum()), self._number, self._topology
        commands = int(np.count_nonzero(flash))
        if not self._computes:
            return topology.transfer(device, "flash_to_host", size_bytes, requests=commands)
        asked = topology.transfer(device, "host_to_device", query_bytes * commands)
        read = topology.transfer(device, "flash_read", size_bytes, requests=commands, after=asked)
        measured = topology.compute(device, flop, size_bytes, after=read)
        return topology.transfer(device, "device_to_host", int(reply.sum()), after=measured)


class _PacedDistances(PacedTicket):
    """See `espnx.device.vectors.interface.DistanceTicket`."""

    def __init__(self, inner: DistanceTicket, *paced: Any):
        super().__init__(inner, *paced[:-1])
        self._inner, self._look = inner, paced[-1]

    def reply(self, item: int) -> np.ndarray:
        """See `DistanceTicket`."""
        return self._looked_at(self._inner.reply(item))

    def finish(self) -> np.ndarray:
        """See `DistanceTicket`."""
        return self._looked_at(super().finish())

    def _looked_at(self, replies: np.ndarray) -> np.ndarray:
        self._look(replies["distance"])
        return replies


def _is_number(distances: np.ndarray) -> np.ndarray:
    """Distances of fp16 and fp32 may be infinite; of vectors that are numbers none is NaN."""
    return ~np.isnan(distances)
