"""One read of many items into device memory: what the I/O thread of the `gds` engine works through,
and the future the caller waits on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ... import errors
from ..engine import Plan
from ..native import load_native
from .arena import Lease
from .file import OpenFile
from .memory import DeviceMemory
from .piece import Failure, Piece

_NOBODY = 2**63  # items that nobody waits for
_LOOK_LIMIT_S = 1.0  # how long after a deadline the I/O thread may take to see what came before it


@dataclass(frozen=True)
class Layout:
    """The places of a plan's items, from the same planner as the native engine's. numpy int64
    arrays.

    Attributes:
        file, offset_bytes, expected_bytes, place_bytes: per extent; `expected_bytes` is cut at the
            end of the file, so that a short read is always a fault.
        first, last: per extent, a range of `order`.
        order: item numbers, grouped by extent.
        position_bytes: per item, in memory; -1 for empty ones.
    """

    file: np.ndarray
    offset_bytes: np.ndarray
    expected_bytes: np.ndarray
    place_bytes: np.ndarray
    first: np.ndarray
    last: np.ndarray
    order: np.ndarray
    position_bytes: torch.Tensor
    memory_bytes: int


def lay_out(plan: Plan, files: list[OpenFile | None], gap_bytes: int, limit_bytes: int) -> Layout:
    """Widens, merges and places the items of a plan that `check` has passed."""
    native = load_native()
    numbers = [f for f in files if f is not None]
    sizes, alignments = (
        torch.zeros(len(files), dtype=torch.int64),
        torch.ones(len(files), dtype=torch.int64),
    )
    for f in numbers:
        sizes[f.number], alignments[f.number] = f.size_bytes, f.alignment_bytes
    file, offset, _, expected, place, position, order, first, last, memory_bytes = native.pack_plan(
        sizes, alignments, plan.file, plan.offset_bytes, plan.size_bytes, gap_bytes, limit_bytes
    )
    return Layout(
        file=file.numpy(),
        offset_bytes=offset.numpy(),
        expected_bytes=expected.numpy(),
        place_bytes=place.numpy(),
        first=first.numpy(),
        last=last.numpy(),
        order=order.numpy(),
        position_bytes=position,
        memory_bytes=int(memory_bytes),
    )


def with_own_numbers(plan: Plan, first_file: int) -> Plan:
    """The plan with places in the engine's list of files instead of numbers, which begin at
    `first_file`. Raises InvalidInputError."""
    n = len(plan)
    for name in ("file", "offset_bytes", "size_bytes", "out_offset_bytes", "crc32c"):
        column = getattr(plan, name)
        if column is None and name in ("out_offset_bytes", "crc32c"):
            continue
        if (
            column.dtype != torch.int64
            or column.dim() != 1
            or column.numel() != n
            or column.device.type != "cpu"
        ):
            raise errors.InvalidInputError(
                f"{name} of the plan",
                got=f"{column.dtype} {list(column.shape)} on {column.device}",
                expected=f"int64 [{n}] on the CPU",
            )
    return replace(plan, file=plan.file - first_file)


def check(plan: Plan, files: list[OpenFile | None], first_file: int) -> None:
    """Everything the planner cannot name well: files of others, closed files, items behind the end
    of theirs. Raises InvalidInputError, TruncatedFileError."""
    known = np.array([f is not None for f in files] + [False])
    number, offset, size = plan.file.numpy(), plan.offset_bytes.numpy(), plan.size_bytes.numpy()
    unknown = np.flatnonzero(
        (number < 0) | (number >= len(files)) | ~known[np.clip(number, 0, len(files))]
    )
    if unknown.size:
        i = int(unknown[0])
        raise errors.InvalidInputError(
            f"descriptor {i} of the plan",
            got=f"file {int(number[i]) + first_file}",
            expected="a file that is open in this engine",
        )
    bad = np.flatnonzero((offset < 0) | (size < 0) | (offset > 2**62 - size))
    if bad.size:
        i = int(bad[0])
        raise errors.InvalidInputError(
            f"descriptor {i} of the plan",
            got=f"offset {offset[i]}, size {size[i]}",
            expected="0 or more, below 2**62",
        )
    ends = np.array([0 if f is None else f.size_bytes for f in files] + [0])
    beyond = np.flatnonzero(offset + size > ends[number])
    for i in map(int, beyond):
        found = files[int(number[i])]
        if found is None or offset[i] + size[i] <= found.refresh_size():
            continue
        raise errors.TruncatedFileError(
            "read past the end of the file",
            path=found.path,
            offset_bytes=int(offset[i]),
            size_bytes=int(size[i]),
            got=f"a file of {found.size_bytes} bytes",
            expected=f"at least {offset[i] + size[i]}",
        )


class Transfer:
    """The state of one read. The I/O thread takes pieces and reports them; callers wait. `lock`
    guards what both touch."""

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        files: list[OpenFile | None],
        lease: Lease,
        *,
        batch_bytes: int,
        large_bytes: int,
        priority: int,
        deadline_s: float,
    ):
        self.plan, self.layout, self.priority, self.deadline_s = plan, layout, priority, deadline_s
        # The lease itself only until the last piece is back: then the slice is the caller's, and
        # free as soon as he drops it.
        self._lease: Lease | None = lease
        self.base, self.begin_bytes, self.held_bytes, self.streams = (
            lease.base,
            lease.begin_bytes,
            lease.size_bytes,
            lease.streams,
        )
        self.deadline = time.monotonic() + min(deadline_s, 1e9)
        self._files = files
        self.changed = threading.Condition()
        self.failure: Failure | None = None
        self.in_flight = self.moved_bytes = self.requests = 0
        self.asked_bytes = int(plan.size_bytes.sum())
        self._cut(batch_bytes, large_bytes)
        self.empty_items = np.flatnonzero(plan.size_bytes.numpy() == 0)
        self._ready: list[np.ndarray] = []
        self._ready_items = 0
        self._wanted = _NOBODY
        self._handed_out = 0
        self.on_fail: Callable[[], None] = lambda: None
        self.looked_at: Callable[[], float] = time.monotonic
        self.trouble = ""  # why it takes so long, if cuFile says

    def _cut(self, batch_bytes: int, large_bytes: int) -> None:
        """Extents of at most `batch_bytes` are one entry of a batch each; longer ones are cut into
        pieces of `large_bytes` of their own."""
        expected = self.layout.expected_bytes
        pieces = np.where(expected <= batch_bytes, 1, -(-expected // large_bytes))
        self.open_pieces = pieces.copy()
        self.extent = np.repeat(np.arange(expected.size), pieces)
        begin = (
            np.concatenate([np.arange(count) for count in pieces])
            if pieces.size
            else np.zeros(0, dtype=np.int64)
        )
        done = begin * large_bytes
        self.offset_bytes = self.layout.offset_bytes[self.extent] + done
        self.place_bytes = self.begin_bytes + self.layout.place_bytes[self.extent] + done
        left = expected[self.extent] - done
        single = pieces[self.extent] == 1
        self.left_bytes = np.where(single, left, np.minimum(left, large_bytes))
        self.is_large = expected[self.extent] > batch_bytes
        handles = np.array(
            [0 if f is None else f.handle for f in self._files] + [0], dtype=np.int64
        )
        self.handle = (
            handles[self.layout.file[self.extent]] if pieces.size else np.zeros(0, dtype=np.int64)
        )
        self.idle_retries = np.zeros(self.extent.size, dtype=np.int64)
        self.small: deque[int] = deque(np.flatnonzero(~self.is_large).tolist())
        self.large: deque[int] = deque(np.flatnonzero(self.is_large).tolist())

    def file_of(self, piece: int) -> OpenFile:
        found = self._files[int(self.layout.file[self.extent[piece]])]
        if found is None:
            raise errors.InvalidInputError("a piece of a file that was never open", got=piece)
        return found

    def used_files(self) -> list[OpenFile]:
        return [
            found
            for number in np.unique(self.layout.file)
            if (found := self._files[int(number)]) is not None
        ]

    def over(self) -> bool:
        """Whether nothing is left to start or to come back. Lets go of the memory if so."""
        if self.in_flight > 0 or self.small or self.large:
            return False
        self._lease = None
        return True

    def take(self, waiting: deque[int], most: int) -> list[int]:
        """Up to `most` pieces to start now; none after a failure. They are in flight from here
        on."""
        with self.changed:
            pieces = [waiting.popleft() for _ in range(min(most, len(waiting)))]
            self.in_flight += len(pieces)
            self.requests += len(pieces)
        return pieces

    def put_back(self, waiting: deque[int], pieces: list[int]) -> None:
        """Pieces that could not be started."""
        with self.changed:
            self.requests -= len(pieces)
            if self.failure is None:
                waiting.extendleft(reversed(pieces))

    def piece(self, number: int) -> Piece:
        """What is left of one, as it stands."""
        return Piece(
            self.file_of(number),
            int(self.offset_bytes[number]),
            int(self.left_bytes[number]),
            int(self.idle_retries[number]),
        )

    def submit_again(self, number: int, piece: Piece) -> None:
        """What is left of a piece waits to be read."""
        self.place_bytes[number] += piece.offset_bytes - self.offset_bytes[number]
        self.offset_bytes[number] = piece.offset_bytes
        self.left_bytes[number] = piece.expected_bytes
        self.idle_retries[number] = piece.idle_retries
        with self.changed:
            if self.failure is None:
                (self.large if self.is_large[number] else self.small).appendleft(number)

    def landed(self, pieces: np.ndarray) -> None:
        """These pieces are whole. By the I/O thread."""
        extents = self.extent[pieces]
        with self.changed:
            np.subtract.at(self.open_pieces, extents, 1)
            done = np.unique(extents[self.open_pieces[extents] == 0])
            self._ready.append(done)
            self._ready_items += int((self.layout.last[done] - self.layout.first[done]).sum())
            self.over()
            # Waking a thread that finds too little costs both it and this one a turn of the
            # interpreter's lock.
            if self._there() >= self._wanted or self._there() + self._handed_out == len(self.plan):
                self._wanted = _NOBODY
                self.changed.notify_all()

    def fail(self, failure: Failure) -> None:
        """Ends the transfer unless it has ended. What is with the device keeps its memory until it
        completes."""
        with self.changed:
            if self.failure is not None or self._handed_out == len(self.plan):
                return
            self.failure = failure
            self.small.clear()
            self.large.clear()
            self.changed.notify_all()
        self.on_fail()

    def finished(self) -> bool:
        with self.changed:
            return self.failure is not None or self._there() + self._handed_out == len(self.plan)

    def _there(self) -> int:
        return self._ready_items + self.empty_items.size

    def take_ready(self, at_least: int, until: float) -> tuple[np.ndarray, bool]:
        """Items that arrived: waits for `at_least` of them, the end, or `until`. Raises the
        failure, or the deadline's."""
        until = min(until, self.deadline)
        overdue = False
        with self.changed:
            while (
                self.failure is None
                and self._there() < at_least
                and self._there() + self._handed_out < len(self.plan)
            ):
                now = time.monotonic()
                if now >= until:
                    overdue = self._is_overdue(now)
                    if overdue or now < self.deadline:
                        break
                self._wanted = min(self._wanted, at_least)
                self.changed.wait(min(max(until - now, 0.001), 1.0))
            if self.failure is None and not overdue:
                items = np.concatenate([self.empty_items, *map(self._items_of, self._ready)])
                self._ready, self._ready_items, self.empty_items = [], 0, self.empty_items[:0]
                self._handed_out += items.size
                return items, self._handed_out == len(self.plan)
        if overdue:
            self.expire()
        if self.failure is None:
            raise errors.EngineClosedError("the transfer ended while it was waited for")
        raise self.failure()

    def _is_overdue(self, now: float) -> bool:
        """What came in time counts, even if nobody has looked: while a kernel is compiled, the I/O
        thread may miss its turn for seconds."""
        return now >= self.deadline and (
            self.looked_at() >= self.deadline or now >= self.deadline + _LOOK_LIMIT_S
        )

    def expire(self) -> None:
        """Ends the transfer at its deadline."""
        self.fail(self._deadline_failure())

    def _items_of(self, extents: np.ndarray) -> np.ndarray:
        """The items of these extents: their ranges of `Layout.order`, one after another."""
        first, count = (
            self.layout.first[extents],
            self.layout.last[extents] - self.layout.first[extents],
        )
        begin = np.cumsum(count) - count
        return self.layout.order[np.repeat(first - begin, count) + np.arange(count.sum())]

    def take_back(self, count: int) -> None:
        """Items that were handed out by `take_ready` and then found bad: the transfer is not over,
        so that it can fail."""
        with self.changed:
            self._handed_out -= count

    def _deadline_failure(self) -> Failure:
        open_extents, all_count, deadline_s = (
            np.flatnonzero(self.open_pieces),
            self.open_pieces.size,
            self.deadline_s,
        )
        first = int(open_extents[0]) if open_extents.size else 0
        path = self.file_of(int(np.searchsorted(self.extent, first))).path
        offset, size = int(self.layout.offset_bytes[first]), int(self.layout.expected_bytes[first])
        trouble = f" ({self.trouble})" if self.trouble else ""
        return lambda: errors.DeadlineExceededError(
            "read did not complete in time",
            path=path,
            offset_bytes=offset,
            size_bytes=size,
            got=f"{open_extents.size} of {all_count} requests outstanding{trouble}",
            expected=f"completion within {deadline_s} s",
            fix="check the device (dmesg, smartctl), then try again; the engine is still usable",
        )


class GdsFuture:
    """See `espnx.storage.engine.Future`.

    Items are on the device when `next` hands them out; copies into the caller's tensor are queued
    on the caller's current stream.
    """

    def __init__(
        self,
        transfer: Transfer,
        device_memory: DeviceMemory,
        memory: torch.Tensor,
        out: torch.Tensor | None,
    ):
        self._transfer, self._device_memory, self._buffer, self._out = (
            transfer,
            device_memory,
            memory,
            out,
        )
        self._finished = False

    @property
    def memory(self) -> torch.Tensor:
        return self._buffer if self._out is None else self._out

    @property
    def position_bytes(self) -> torch.Tensor:
        out_offset = self._transfer.plan.out_offset_bytes
        if out_offset is None:
            return self._transfer.layout.position_bytes
        return torch.where(self._transfer.plan.size_bytes > 0, out_offset, -1)

    @property
    def bytes_asked(self) -> int:
        return self._transfer.asked_bytes

    @property
    def bytes_moved(self) -> int:
        return self._transfer.moved_bytes

    @property
    def request_count(self) -> int:
        return self._transfer.requests

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[torch.Tensor, bool]:
        until = time.monotonic() + (1e9 if timeout_s is None else timeout_s)
        items, self._finished = self._transfer.take_ready(at_least, until)
        if items.size:
            self._transfer.streams.add(self._device_memory.stream())
            self._check(items)
            self._copy_out(items)
        return torch.from_numpy(items), self._finished

    def __iter__(self) -> Iterator[torch.Tensor]:
        while not self._finished:
            items, _ = self.next()
            if items.numel():
                yield items

    def wait(self) -> torch.Tensor:
        """Also for another stream than the one that items were handed out on: the memory is not
        used again before what is queued there has run."""
        while not self._finished:
            self.next(at_least=2**62)
        self._transfer.streams.add(self._device_memory.stream())
        return self.memory

    def done(self) -> bool:
        return self._finished or self._transfer.finished()

    def cancel(self) -> None:
        self._transfer.fail(lambda: errors.TransferCancelledError("the transfer was cancelled"))

    def _check(self, items: np.ndarray) -> None:
        wanted = self._transfer.plan.crc32c
        if wanted is None:
            return
        numbers = torch.from_numpy(items)
        sizes = self._transfer.plan.size_bytes[numbers]
        position = self._transfer.layout.position_bytes[numbers].clamp(min=0)
        found = _crc32c(self._buffer, position, sizes)
        bad = torch.nonzero((found != wanted[numbers]) & (sizes > 0)).flatten()
        if bad.numel() == 0:
            return
        item = int(numbers[bad[0]])
        plan = self._transfer.plan
        path = next(f.path for f in self._transfer.used_files() if f.number == int(plan.file[item]))
        got, expected = f"CRC32C {int(found[bad[0]]):08x}", f"CRC32C {int(wanted[item]):08x}"
        self._finished = False
        self._transfer.take_back(1)
        self._transfer.fail(
            lambda: errors.ChecksumError(
                "bytes read are not the bytes written",
                path=path,
                offset_bytes=int(plan.offset_bytes[item]),
                size_bytes=int(plan.size_bytes[item]),
                got=got,
                expected=expected,
            )
        )
        self._transfer.take_ready(1, 0.0)

    def _copy_out(self, items: np.ndarray) -> None:
        out_offset = self._transfer.plan.out_offset_bytes
        if self._out is None or out_offset is None:
            return
        items = items[self._transfer.plan.size_bytes.numpy()[items] > 0]
        source = self._transfer.layout.position_bytes.numpy()[items]
        target, size = out_offset.numpy()[items], self._transfer.plan.size_bytes.numpy()[items]
        # One copy per run that is contiguous on both sides.
        breaks = (
            np.flatnonzero(
                (source[1:] != source[:-1] + size[:-1]) | (target[1:] != target[:-1] + size[:-1])
            )
            + 1
        )
        for run in np.split(np.arange(items.size), breaks):
            if run.size:
                begin, length = int(run[0]), int(size[run].sum())
                arrived = self._buffer[source[begin] : source[begin] + length]
                self._out[target[begin] : target[begin] + length].copy_(arrived, non_blocking=True)


def _crc32c(
    memory: torch.Tensor, position_bytes: torch.Tensor, size_bytes: torch.Tensor
) -> torch.Tensor:
    """CRC32C of ranges, int64 [n] on the CPU: on the device where espnx.ops has registered its
    kernel, else from a copy of the ranges."""
    if memory.device.type != "cpu" and hasattr(torch.ops.espnx, "crc32c"):
        return torch.ops.espnx.crc32c(
            memory, position_bytes.to(memory.device), size_bytes.to(memory.device)
        ).cpu()
    spans = [
        memory[p : p + s] for p, s in zip(position_bytes.tolist(), size_bytes.tolist(), strict=True)
    ]
    joined = torch.cat(spans).cpu()
    return load_native().crc32c_ranges(joined, size_bytes.cumsum(0) - size_bytes, size_bytes, 0)
