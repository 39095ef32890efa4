"""Stored rows on their way into a torch device's memory: reads that run ahead up to a window of
bytes, over tickets, and are checked there.

What csrc/device/row_stream.hpp does for host memory, in groups of reads, so that each group is one
launch of every kernel.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import errors
from ...storage.files import BLOCK_BYTES
from ...streams import on
from ..interface import Show
from .checks import BLOCKS_MAX, Checks, TicketSums
from .plan import RowReads
from .readers import Arrival, Reader

#: Read, checked and computed on together, where the window allows several of them: kernels are
#: launched once for it. 16 reads.
GROUP_BYTES = 15 << 20
_GROUPS_IN_WINDOW = 4
#: Of pinned memory that a group goes through on its way, with a block for alignment a power of two.
SLOT_BYTES = (16 << 20) - BLOCK_BYTES


def group_bytes(window_bytes: int) -> int:
    """Bytes of a group of reads of a stream with such a window."""
    return min(GROUP_BYTES, window_bytes // _GROUPS_IN_WINDOW)


@dataclass
class _Reading:
    """A ticket with its reads: `arrivals` of the groups that were submitted and not yet consumed,
    and how many reads each took."""

    number: int
    rows: RowReads
    groups: deque[range]
    arrivals: deque[tuple[range, Arrival, int]] = field(default_factory=deque)
    is_forgotten: bool = False


class TensorStream:
    """`clear`, `front` and `stats` may be called by any thread at any time; the other calls by one
    thread at a time.

    Args:
        reader: of the data file.
        path: its name, for errors.
        window_bytes: that may be in flight; a group is, whatever the window.
        device: that rows arrive on.
    """

    def __init__(self, reader: Reader, path: str, window_bytes: int, device: torch.device):
        if window_bytes < 1:
            raise errors.InvalidInputError(
                "read_ahead_bytes", got=window_bytes, expected="at least 1"
            )
        self._reader, self._path, self._window_bytes = reader, path, window_bytes
        self._checks = Checks(path, device)
        self._lock = threading.RLock()  # of what follows, and of the readings in line
        self._line: deque[_Reading] = deque()
        self._ahead_bytes = self._next = 0
        self._bytes_asked = self._bytes_moved = self._read_requests = 0
        self._waiting_s = self._computing_s = 0.0

    def push(self, rows: RowReads) -> int:
        """Puts the reads of a layer at the end of the line."""
        reading = _Reading(self._next, rows, deque(rows.groups()))
        with self._lock:
            self._next += 1
            self._line.append(reading)
            try:
                self._pump()
            except BaseException:
                self.clear()
                raise
        return reading.number

    def front(self) -> int:
        """The ticket whose rows come next, or -1."""
        with self._lock:
            return self._line[0].number if self._line else -1

    def clear(self) -> None:
        """Forgets everything that was pushed. What another thread consumes ends with
        TransferCancelledError, unless it has all of it."""
        with self._lock:
            line, self._line, self._ahead_bytes = self._line, deque(), 0
            for reading in line:
                reading.is_forgotten = True
            arrivals = [arrival for reading in line for _, arrival, _ in reading.arrivals]
        for arrival in arrivals:
            arrival.cancel()

    def stats(self) -> dict[str, Any]:
        """Bytes of rows that were consumed, in how many reads, and seconds."""
        return {
            "bytes_asked": self._bytes_asked,
            "bytes_moved": self._bytes_moved,
            "read_requests": self._read_requests,
            "waiting_s": self._waiting_s,
            "computing_s": self._computing_s,
        }

    def attend(
        self,
        ticket: int,
        arrived: Callable[[RowReads, range, torch.Tensor], None],
        *,
        checks_later: bool = False,
    ) -> None:
        """Shows the groups of the ticket at the front, as they arrive. What is made of them counts
        only when this has returned, or with `checks_later` when `check` has: by then all of them
        are checked.

        Raises ReadError, ChecksumError, DeadlineExceededError; every ticket is invalid then.
        """
        sums: list[TicketSums] = []

        def look(rows: RowReads, group: range, memory: torch.Tensor, arrival: Arrival) -> None:
            if not sums:
                sums.append(self._checks.begin(rows))
            self._checks.add(sums[0], group, memory)
            arrived(rows, group, arrival.wait())

        def end() -> None:
            for each in sums:
                self._checks.end(each)
            if not checks_later or self._checks.waiting_blocks > BLOCKS_MAX:
                self._checks.look()

        self._consume(ticket, look, end)

    def check(self) -> None:
        """Waits for the checksums of what `attend` has shown. Raises ChecksumError; every ticket is
        invalid then."""
        try:
            self._checks.look()
        except errors.ChecksumError:
            self.clear()
            raise

    def forget_checks(self) -> None:
        """What `attend` has shown counts for nothing: nobody wants to know whether it was right."""
        self._checks.forget()

    def visit(self, ticket: int, show: Show, *, checks_later: bool = False) -> None:
        """See `RowDevice.visit`: a group at a time. With `checks_later` what is shown is checked as
        `attend` says, and not before it is shown."""
        if checks_later:
            self.attend(
                ticket,
                lambda rows, group, memory: show(memory, rows.pieces(group)),
                checks_later=True,
            )
            return
        sums: list[TicketSums] = []

        def look(rows: RowReads, group: range, memory: torch.Tensor, arrival: Arrival) -> None:
            if not sums:
                sums.append(self._checks.begin(rows))
            self._checks.add(sums[0], group, memory)
            self._checks.end(sums[0].split(group))
            self._checks.look()
            show(arrival.wait(), rows.pieces(group))

        self._consume(ticket, look, lambda: None)

    def _consume(
        self,
        ticket: int,
        look: Callable[[RowReads, range, torch.Tensor, Arrival], None],
        end: Callable[[], None],
    ) -> None:
        with self._lock:
            front = self.front()
            if front != ticket:
                raise errors.InvalidInputError(
                    "rows are consumed in the order in which they were asked for",
                    got=ticket,
                    expected=front,
                )
            reading = self._line[0]
        begun, waited_s = time.perf_counter(), 0.0
        try:
            while reading.arrivals:
                group, arrival, n_reads = reading.arrivals[0]
                waiting = time.perf_counter()
                with on(self._checks.stream):
                    memory = arrival.wait()
                waited_s += time.perf_counter() - waiting
                look(reading.rows, group, memory, arrival)
                del memory
                with self._lock:
                    reading.arrivals.popleft()
                    if reading.is_forgotten and (reading.arrivals or reading.groups):
                        raise errors.TransferCancelledError(
                            "the rows that were asked for are not needed", path=self._path
                        )
                    self._bytes_moved += arrival.bytes_moved
                    self._read_requests += n_reads
                    size_bytes = len(group) * reading.rows.layout.block_bytes
                    self._bytes_asked += size_bytes
                    del arrival  # its memory serves the next read
                    if not reading.is_forgotten:
                        self._ahead_bytes -= size_bytes
                        self._pump()
            end()
        except BaseException:
            with self._lock:
                # also what came after: whoever catches this plans anew. Unless another thread
                # cleared, and perhaps pushed since
                if not reading.is_forgotten:
                    self.clear()
            raise
        with self._lock:
            if not reading.is_forgotten:
                self._line.popleft()
        self._waiting_s += waited_s
        self._computing_s += time.perf_counter() - begun - waited_s

    def _pump(self) -> None:
        """Submits reads, in the order of the line, while there is room. The line's front always has
        one under way, if it has any left. What has arrived goes on."""
        for reading in self._line:
            for _, arrival, _ in reading.arrivals:
                arrival.advance()
        for reading in self._line:
            while reading.groups:
                group = reading.groups[0]
                size_bytes = len(group) * reading.rows.layout.block_bytes
                if self._ahead_bytes > 0 and self._ahead_bytes + size_bytes > self._window_bytes:
                    return
                offset_bytes, sizes = reading.rows.requests(group)
                arrival = self._reader.read(offset_bytes, sizes)
                reading.arrivals.append((reading.groups.popleft(), arrival, len(sizes)))
                self._ahead_bytes += size_bytes
