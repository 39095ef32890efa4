"""Many things asked of a device at once, and taken as they come: done by this machine, handed out when the device would have them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ... import errors
from ..around import D, DeviceAround
from ..crew import Clock
from ..interface import Capabilities, DeviceStats
from .topology import Topology, Transfer

#: Things come in groups of so many bytes: large enough for flash, small enough that they come as they are ready.
GROUP_BYTES = 1 << 20
PAGE_BYTES = 4096


class Ticket(Protocol):
    """What does the real work: `espnx.device.interface.RecordTicket`, `espnx.device.vectors.interface.DistanceTicket`."""

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]: ...

    def finish(self) -> np.ndarray: ...

    def cancel(self) -> None: ...

    @property
    def stats(self) -> DeviceStats: ...


@dataclass(frozen=True)
class Group:
    """Places `begin` to `end` of a request, and when they are there."""

    begin: int
    end: int
    transfer: Transfer


def groups_of(sizes: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive places whose sizes add up to `GROUP_BYTES`, the last of each beyond it."""
    if not len(sizes):
        return []
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // GROUP_BYTES, append=-1)) + 1
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))


def page_reads(
    file: np.ndarray, offset_bytes: np.ndarray, size_bytes: np.ndarray, gap_bytes: int = 0
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """What flash reads for some places in files: bool [m], which of them begin a read of their own; int64 [m], the bytes that each adds.

    Flash reads whole pages, each once, and a request counts once, whatever its size: places in the pages of one before them in their file,
    or right behind (or less than the gap), come with it. Nothing is read for places of no bytes.
    """
    begin = offset_bytes // PAGE_BYTES * PAGE_BYTES
    end = np.where(size_bytes > 0, -(-(offset_bytes + size_bytes) // PAGE_BYTES) * PAGE_BYTES, begin)
    order = np.lexsort((begin, file))
    order = order[end[order] > begin[order]]
    begin, end, file = begin[order], end[order], file[order]
    starts, added = np.ones(len(order), dtype=bool), end - begin
    for same in np.unique(file):
        (rows,) = np.nonzero(file == same)
        reached, rows = np.maximum.accumulate(end[rows])[:-1], rows[1:]
        starts[rows] = begin[rows] > reached + gap_bytes
        added[rows] = np.where(starts[rows], added[rows], np.maximum(end[rows] - reached, 0))
    begins, moved_bytes = np.zeros(len(size_bytes), dtype=bool), np.zeros(len(size_bytes), dtype=np.int64)
    begins[order], moved_bytes[order] = starts, added
    return begins, moved_bytes


class PacedDevice(DeviceAround[D]):
    """An emulated device around one that does the work: what both say of their files is the same, and so are the reads in `stats`; what
    passed the links is the topology's to say.

    Args:
        inner: does the work; closed with this one.
        topology: in whose time.
    """

    capabilities = Capabilities()

    def __init__(self, inner: D, topology: Topology):
        super().__init__(inner)
        self._topology = topology

    @property
    def clock(self) -> Clock | None:
        """See `Topology.clock`."""
        return self._topology.clock

    @property
    def topologies(self) -> Sequence[Topology]:
        """See `topologies_of`."""
        return [self._topology]


class PacedTicket:
    """Hands out what the real ticket has, group by group, in the order in which it was asked for.

    Args:
        inner: the real work.
        count: of what was asked for.
        groups: in order.
        deadline_s: wall seconds of each group.
        hold: waits for a completion that a fault holds up.
    """

    def __init__(self, inner: Ticket, count: int, groups: Sequence[Group], topology: Topology, deadline_s: float, hold: Callable[[], None]):
        self._hold: Callable[[], None] | None = hold
        self._real, self._groups, self._topology, self._deadline_s = inner, deque(groups), topology, deadline_s
        self._is_done = np.zeros(count, dtype=bool)
        self._has_ended = False  # the real work
        self._finished_at = time.perf_counter()

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """See `RecordTicket`."""
        asked_s, until = self._topology.now(), None if timeout_s is None else time.monotonic() + timeout_s
        found, count = list[np.ndarray](), 0
        try:
            if self._hold is not None:
                hold, self._hold = self._hold, None
                hold()
            while self._groups and count < max(at_least, 1):
                group = self._groups[0]
                if not self._do(group, until) or not self._arrive(group, asked_s, until):
                    break
                self._groups.popleft()
                self._finished_at = time.perf_counter()
                found.append(np.arange(group.begin, group.end))
                count += group.end - group.begin
            if not self._groups and not self._has_ended:
                self._has_ended = self._real.next(1, None if until is None else max(until - time.monotonic(), 0.0))[1]
        except BaseException:
            self.cancel()
            raise
        return np.concatenate([np.empty(0, np.int64), *found]), not self._groups and self._has_ended

    def _do(self, group: Group, until: float | None) -> bool:
        """Whether this machine has done the whole group by then."""
        while not self._is_done[group.begin : group.end].all():
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s < 0:
                return False
            items, self._has_ended = self._real.next(1, left_s)
            self._is_done[items] = True
        return True

    def _arrive(self, group: Group, asked_s: float, until: float | None) -> bool:
        """Whether the device has it on the host by then."""
        if until is None:
            self._topology.wait(group.transfer, asked_s=asked_s, deadline_s=self._deadline_s)
            return True
        if self._topology.done(group.transfer):
            return True
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        try:
            self._topology.wait(group.transfer, asked_s=asked_s, deadline_s=left_s)
        except errors.DeadlineExceededError:
            return False
        return True

    def finish(self) -> np.ndarray:
        """See `RecordTicket`."""
        while not self.next(2**62)[1]:
            pass
        return self._real.finish()

    def cancel(self) -> None:
        """See `RecordTicket`."""
        self._real.cancel()
        for group in self._groups:
            self._topology.cancel(group.transfer)

    @property
    def stats(self) -> DeviceStats:
        """See `RecordTicket`."""
        return self._real.stats
