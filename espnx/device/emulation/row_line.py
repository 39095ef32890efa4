"""The reads of rows that an emulated device has in line: they begin in order, as far as its memory,
or the host's, has room for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from ..cost import rows as cost
from ..cost.rows import HandOver, Heads
from ..cost.work import Leg
from .paced import Pace
from .topology import Topology, Transfer


class PacedReads:
    """The reads of one ticket and what is computed on them, paced.

    Args:
        heads: what is read.
        to_host: whether the rows go to the host, or to the device's memory.
    """

    def __init__(self, heads: Heads, pace: Pace, *, to_host: bool):
        self.heads, self._pace, self._to_host, self.has_begun = heads, pace, to_host, False
        self.size_bytes = sum(each.size_bytes for each in heads.values())
        self._reads: Sequence[Transfer] = ()

    def begin(self) -> None:
        self.has_begun = True
        self._reads = self._pace.add(cost.reads(self.heads, to_host=self._to_host))

    def arrive(self) -> Sequence[Transfer]:
        """What has to end before the rows are on the host."""
        return self._reads if self._to_host else self._pace.add(cost.shown(self.heads))

    def attend(self, hand_over: HandOver) -> list[Transfer]:
        """What has to end before results are on the host, of a device that attends."""
        legs, results = cost.attend(self.heads, hand_over, self._pace.topology.spec.accelerator)
        self._pace.add(legs)
        return [self._pace.legs[number] for number in results]

    def cancel(self) -> None:
        for each in self._reads:
            self._pace.topology.cancel(each)


class RowLine:
    """The line in which reads of rows wait for one device of a topology.

    Args:
        topology, device: which.
        window_bytes: of rows that are read before they are asked for: the device's memory, or the
            host's.
        deadline_s: virtual seconds of each transfer.
    """

    def __init__(self, topology: Topology, device: int, window_bytes: int, deadline_s: float):
        self.topology, self._device, self._window_bytes = topology, device, window_bytes
        self.deadline_s = deadline_s * max(topology.stretch, 1.0)
        self._line, self._lock = deque[PacedReads](), threading.Lock()

    def start(self, leg: Leg) -> Transfer:
        """One that waits for nothing."""
        return Pace(self.topology, self._device).add([leg])[0]

    def read(self, heads: Heads, *, to_host: bool) -> PacedReads:
        """Puts the reads of a ticket in line."""
        found = PacedReads(heads, Pace(self.topology, self._device), to_host=to_host)
        with self._lock:
            self._line.append(found)
            self._begin()
        return found

    def _begin(self) -> None:
        begun_bytes = sum(reads.size_bytes for reads in self._line if reads.has_begun)
        for reads in self._line:
            if reads.has_begun:
                continue
            if begun_bytes and begun_bytes + reads.size_bytes > self._window_bytes:
                return
            begun_bytes += reads.size_bytes
            reads.begin()

    def used(self, reads: PacedReads) -> None:
        """The first in line was computed on, or shown: its room is free."""
        with self._lock:
            if reads in self._line:
                self._line.remove(reads)
                self._begin()

    def cancel(self) -> None:
        """Nothing in line is wanted any more. Whoever waits gets TransferCancelledError. **Any
        thread.**"""
        with self._lock:
            line, self._line = self._line, deque()
        for reads in line:
            reads.cancel()

    def wait(self, transfers: Sequence[Transfer], asked_s: float | None = None) -> None:
        """Waits until all have ended. Raises DeadlineExceededError, TransferCancelledError,
        EngineClosedError."""
        self.topology.wait(transfers, asked_s=asked_s, deadline_s=self.deadline_s)
