"""Posting lists on an emulated device: scanned by this machine, in the device's time.

A device that scans takes a command and gives the best records back, or every posting's part of a score; of any other the lists pass its
link, and the host scans. Results are those of the plain device either way, to the bit.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ..interface import DeviceStats
from ..postings import PostingLists, PostingsDevice, ScanCommand, ScanLists, ScanTicket, Weights
from .faults import DeviceFault, Guard
from .paced import PacedDevice
from .topology import Topology, Transfer


class EmulatedPostingsDevice(PacedDevice[PostingsDevice]):
    """See `espnx.device.postings.interface.PostingsDevice`.

    Args:
        inner: does the work; closed with this one.
        topology, number: which device of it.
        computes: its accelerator scans.
        guard: what goes wrong on it.
    """

    def __init__(self, inner: PostingsDevice, topology: Topology, number: int, *, computes: bool, guard: Guard | None = None):
        super().__init__(inner, topology)
        self._number, self._computes = number, computes
        self._guard = guard or Guard(topology, number, "")

    @property
    def lists(self) -> PostingLists:
        """See `PostingsDevice`."""
        return self._inner.lists

    def scan(
        self, lists: ScanLists, weights: Weights, k: int, *, allowed: np.ndarray | None = None, deadline_s: float = 30.0
    ) -> ScanTicket:
        """See `PostingsDevice`. `deadline_s` is of the real reads, and in virtual seconds of the device's."""
        fault = self._guard.begin("scan")
        inner = self._inner.scan(lists, weights, k, allowed=allowed, deadline_s=deadline_s)
        return _PacedScan(inner, self._ask(inner.command), self._topology, self._guard, fault, deadline_s)

    def _ask(self, command: ScanCommand) -> Transfer:
        device, topology, flash_bytes, lists = self._number, self._topology, command.flash_bytes, len(command.lists.places)
        if not self._computes:
            return topology.transfer(device, "flash_to_host", flash_bytes, requests=lists)
        asked = topology.transfer(device, "host_to_device", command.payload_bytes)
        read = topology.transfer(device, "flash_read", flash_bytes, requests=lists, after=asked)
        scored = topology.compute(device, command.flop, command.lists.size_bytes, after=read)
        return topology.transfer(device, "device_to_host", command.data_len, after=scored)


class _PacedScan:
    """See `espnx.device.postings.interface.ScanTicket`."""

    def __init__(
        self, inner: ScanTicket, transfer: Transfer, topology: Topology, guard: Guard, fault: DeviceFault | None, deadline_s: float
    ):
        self._inner, self._transfer, self._topology = inner, transfer, topology
        self._deadline_s = deadline_s * max(topology.stretch, 1.0)
        self._hold = partial(guard.wait, fault, "scan", self._deadline_s)
        self._look = partial(guard.reply, fault, "scan", is_finite=_is_number)

    def finish(self) -> np.ndarray:
        """See `ScanTicket`."""
        asked_s = self._topology.now()
        try:
            self._hold()
            found = self._inner.finish()
            self._topology.wait(self._transfer, asked_s=asked_s, deadline_s=self._deadline_s)
            self._look(found["score"])
        except BaseException:
            self.cancel()
            raise
        return found

    @property
    def command(self) -> ScanCommand:
        """See `ScanTicket`."""
        return self._inner.command

    @property
    def other_terms(self) -> np.ndarray:
        """See `ScanTicket`."""
        return self._inner.other_terms

    def cancel(self) -> None:
        """See `Ticket`."""
        self._inner.cancel()
        self._topology.cancel(self._transfer)

    @property
    def stats(self) -> DeviceStats:
        """See `Ticket`."""
        return self._inner.stats


def _is_number(scores: np.ndarray) -> np.ndarray:
    """Sums of large weights may be infinite; none is NaN."""
    return ~np.isnan(scores)
