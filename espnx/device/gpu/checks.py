"""Checksums of stored rows that have arrived in a device's memory: computed and compared there, and
looked at by the host together, however many tickets they are of.

A file of its own: `stream` brings rows, this says whether they are right.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ... import errors
from ...ops.crc32c.api import crc32c_inside
from ...streams import on, streams_of
from .plan import RowReads
from .staging import Tables, host_memory

#: Blocks whose checksums may be on the device before the host looks: 16 bytes each there, and 8 in
#: the host's memory. They stand for gigabytes of rows, whose reading takes longer than the wait.
BLOCKS_MAX = 1 << 20


@dataclass
class TicketSums:
    """The checksums of a ticket's rows.

    Attributes:
        rows: its reads.
        place, size: int64 [blocks of the longest group] on the device: where blocks lie in a
            group's memory, and how long they are.
        wanted: int64 [blocks of the ticket]: what the checksums should be.
        found: what they are, of the groups so far; in the end of all of them.
        is_bad: bool, whether they differ anywhere, once all have come.
        first_block: the first of the ticket's blocks that are meant.
    """

    rows: RowReads
    place: torch.Tensor
    size: torch.Tensor
    wanted: torch.Tensor
    found: list[torch.Tensor] = field(default_factory=list)
    is_bad: torch.Tensor | None = None
    first_block: int = 0

    @property
    def n_blocks(self) -> int:
        return len(self.wanted)

    def split(self, group: range) -> TicketSums:
        """Those of the group that was added last alone, which are taken out."""
        wanted = self.wanted[group.start : group.stop]
        return replace(self, wanted=wanted, found=[self.found.pop()], first_block=group.start)


class Checks:
    """Checksums have a stream of their own on the device: whoever waits for them does not wait for
    what is computed.

    Args:
        path: of the data file, for errors.
        device: that rows arrive on.

    Attributes:
        stream: that they are computed on; None on a CPU.
    """

    def __init__(self, path: str, device: torch.device):
        self._path, self._device, self._streams = path, device, streams_of(device)
        self.stream = None if self._streams is None else self._streams.new(device)
        self._answer, self._tables = host_memory(1, device), Tables(device)
        self._waiting: list[TicketSums] = []

    @property
    def waiting_blocks(self) -> int:
        """Blocks whose checksums the host has not looked at."""
        return sum(each.n_blocks for each in self._waiting)

    def begin(self, rows: RowReads) -> TicketSums:
        """The rows of a ticket begin to come. Its table is copied to the device in one piece."""
        n, size_bytes = rows.offset_bytes.size, rows.layout.block_bytes
        longest = min(n, rows.group_blocks)
        table = np.empty(2 * longest + n, dtype=np.int64)
        table[:longest] = np.arange(longest) * size_bytes
        table[longest : 2 * longest] = size_bytes
        table[2 * longest :] = rows.sums
        with on(self.stream):
            there = self._tables.put(table).to(self._device, non_blocking=True)
        return TicketSums(rows, there[:longest], there[longest : 2 * longest], there[2 * longest :])

    def add(self, sums: TicketSums, group: range, memory: torch.Tensor) -> None:
        """A group has arrived in `memory`, for what is queued on `stream`."""
        n = len(group)
        with on(self.stream):
            sums.found.append(
                crc32c_inside(
                    memory,
                    sums.place[:n],
                    sums.size[:n],
                    has_whole_words=memory.data_ptr() % 4 == 0,
                )
            )

    def end(self, sums: TicketSums) -> None:
        """All groups of the ticket were added: they wait to be looked at."""
        if not sums.found:
            return
        with on(self.stream):
            found = sums.found[0] if len(sums.found) == 1 else torch.cat(sums.found)
            sums.found, sums.is_bad = [found], (found != sums.wanted).any()
        self._waiting.append(sums)

    def look(self) -> None:
        """Waits until everything that ended is compared. Raises ChecksumError; nothing waits any
        more then either."""
        waiting, self._waiting = self._waiting, []
        flags = [each.is_bad for each in waiting if each.is_bad is not None]
        if not flags:
            return
        with on(self.stream):
            if not self._holds(torch.stack(flags).any()):
                return
            for each in waiting:
                self._compare(each)

    def forget(self) -> None:
        """Nobody wants to know any more."""
        self._waiting = []

    def _holds(self, flag: torch.Tensor) -> bool:
        if self._streams is None or self.stream is None:
            return bool(flag)
        self._answer.copy_(flag.view(torch.uint8).view(1), non_blocking=True)
        self._streams.event_behind(self.stream).synchronize()
        return bool(self._answer[0])

    def _compare(self, sums: TicketSums) -> None:
        found, wanted = sums.found[0].cpu(), sums.wanted.cpu()
        bad = (found != wanted).nonzero().flatten()
        if bad.numel():
            i = int(bad[0])
            raise errors.ChecksumError(
                "stored rows are damaged",
                path=self._path,
                offset_bytes=int(sums.rows.offset_bytes[sums.first_block + i]),
                size_bytes=sums.rows.layout.block_bytes,
                got=f"CRC32C {int(found[i])}",
                expected=f"CRC32C {int(wanted[i])}",
            )
