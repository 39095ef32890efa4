"""The plain SSD as a device: rows in one file, a deep queue, attention on this machine's cores as rows arrive."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .. import errors
from ..ops.crc32c import crc32c_ranges
from ..storage import NativeEngine, Plan
from ..storage.engine import FileHandle
from ..storage.native import load_native
from ..storage.stream import aligned_empty
from .extents import Extents
from .interface import DeviceStats, Queries, Segment, Tail, Use
from .layout import RowLayout

#: One read. Requests of 1 MiB have more memory segments than many drives take; 960 KiB is as fast and is not split.
UNIT_BYTES = 960 << 10


class SsdDevice:
    """See `espnx.device.interface.Device`.

    Args:
        directory: on the disk. Its data file has mode 0600.
        engine: a storage engine; None opens one of its own.
        name: of the data file; None: the file has no name, and its space returns when the process ends, however it ends.
        reserve_bytes: reserved at once, so that a full disk shows now and not in an hour.
        read_ahead_bytes: of rows that are read before they are asked for.
        write_behind_bytes: of rows whose write nobody has waited for.
        threads: that compute; None: as many as PyTorch uses.
        deadline_s: of each transfer.

    Raises:
        WriteError: the directory cannot be written.
        DiskFullError: there is less room than `reserve_bytes`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        engine: NativeEngine | str = "auto",
        name: str | None = None,
        reserve_bytes: int = 0,
        read_ahead_bytes: int = 64 << 20,
        write_behind_bytes: int = 64 << 20,
        threads: int | None = None,
        deadline_s: float = 30.0,
    ):
        self.directory = os.fspath(directory)
        self._owns_engine = isinstance(engine, str)
        self.engine = NativeEngine(engine, pool_bytes=read_ahead_bytes + (8 << 20)) if isinstance(engine, str) else engine
        self._threads, self._deadline_s, self._write_behind_bytes = threads or 0, deadline_s, write_behind_bytes
        self._closed = False
        try:
            self._file = self._open(name)
            self.extents = Extents(self.engine, self._file, reserve_bytes)
            self._stream = load_native().RowStream(self.engine.native, read_ahead_bytes, deadline_s)
        except BaseException:
            if self._owns_engine:
                self.engine.close()
            raise
        self.effective_path = self._file.effective
        self._writing: deque[tuple[Segment, int]] = deque()
        self._writing_bytes = 0
        self._counts = DeviceStats()
        self._pinned: dict[int, int] = {}

    def _open(self, name: str | None) -> FileHandle:
        path = os.path.join(self.directory, name or f".espnx-{uuid.uuid4().hex}")
        try:
            os.makedirs(self.directory, exist_ok=True)
            # Rows can be turned back into the text they came from: nobody else may read them.
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        except OSError as error:
            raise errors.WriteError("cannot create the file for rows", path=path, errno=error.errno) from error
        try:
            return self.engine.open(path, "r+")
        finally:
            if name is None:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    @property
    def path(self) -> str:
        return self._file.path

    def put(self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, heads: range) -> list[Segment]:
        self._check_open()
        n_sequences, _, n_rows, _ = k.shape
        blocks = layout.blocks(n_rows)
        each_bytes = len(heads) * blocks * layout.block_bytes
        total_bytes = n_sequences * each_bytes
        if not total_bytes:
            return [Segment(layout, heads, n_rows, 0, np.empty((len(heads), 0), np.uint32)) for _ in range(n_sequences)]
        self._settle(self._write_behind_bytes - total_bytes)
        offset = self.extents.take(total_bytes)
        try:
            memory = aligned_empty(total_bytes)
            layout.pack(k, v, memory.view(n_sequences, len(heads), blocks, layout.block_bytes))
            sums = _sums(memory, layout.block_bytes).reshape(n_sequences, len(heads), blocks)
            plan = Plan.of(self._file, [offset], [total_bytes], [0])
            writing = _Write(self.engine, plan, memory, self._deadline_s)
        except BaseException:
            self.extents.give_back(offset, total_bytes)
            raise
        found = [Segment(layout, heads, n_rows, offset + i * each_bytes, sums[i], writing) for i in range(n_sequences)]
        self._writing.extend((segment, each_bytes) for segment in found)
        self._writing_bytes += total_bytes
        self._counts.bytes_written += total_bytes
        self._counts.write_requests += 1
        return found

    def _settle(self, keep_bytes: int) -> None:
        """Waits for writes until at most `keep_bytes` are under way."""
        while self._writing and (self._writing_bytes > max(keep_bytes, 0) or self._writing[0][0].writing is None):
            segment, size_bytes = self._writing[0]
            if segment.writing is not None:
                segment.writing.wait()  # raises what the write raised; the segment stays in line, and its rows are written again
            self._writing.popleft()
            self._writing_bytes -= size_bytes
            segment.writing = None

    def is_written(self, segment: Segment) -> bool:
        """True once reads may ask for the segment. Raises what its write raised."""
        if segment.writing is not None and segment.writing.done():
            segment.writing.wait()
            segment.writing = None
        return segment.writing is None

    def release(self, segment: Segment) -> None:
        if segment.size_bytes:
            is_over = segment.writing is None or segment.writing.end()
            segment.writing = None
            if segment.place not in self._pinned and is_over:
                self.extents.give_back(segment.place, segment.size_bytes)

    def pin(self, places: dict[int, int]) -> None:
        """From now on these places (with their sizes), which segments hold, are not used again when the segments go; those pinned before
        are, unless they are among them."""
        for place, size_bytes in self._pinned.items():
            if place not in places:
                self.extents.give_back(place, size_bytes)
        self._pinned = dict(places)

    def ahead(self, layout: RowLayout, uses: Sequence[Use]) -> int:
        self._check_open()
        for use in uses:
            if use.segment.writing is not None:
                use.segment.writing.wait()
                use.segment.writing = None
        table, sums = self._table(uses)
        return int(self._stream.push(layout.geometry(), table, sums, UNIT_BYTES))

    def _table(self, uses: Sequence[Use]) -> tuple[torch.Tensor, torch.Tensor]:
        """(the rows of csrc/device/row_plan.hpp's segments, the checksums that they number)."""
        number, first_sums, parts, rows = self._file.number, dict[int, int](), list[np.ndarray](), list[tuple[int, ...]]()
        count = 0
        for use in uses:
            segment = use.segment
            if id(segment) not in first_sums:
                first_sums[id(segment)] = count
                parts.append(segment.sums.reshape(-1))
                count += segment.sums.size
            heads = segment.heads
            rows.append(
                (number, segment.place, use.sequence, heads.start, heads.step, len(heads), segment.n_blocks, use.n_rows,
                 use.first_position, first_sums[id(segment)])
            )  # fmt: skip
        sums = np.concatenate(parts) if parts else np.empty(0, np.uint32)
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 10), torch.from_numpy(sums)

    def attend(self, ticket: int, queries: Queries, tail: Tail | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_open()
        return attend_rows(self._stream, ticket, queries, tail, self._threads)

    def visit(self, ticket: int, see: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._check_open()
        self._stream.visit(ticket, see)

    def front(self) -> int:
        """The ticket whose rows come next, or -1."""
        return int(self._stream.front())

    def forget(self) -> None:
        self._stream.clear()

    def flush(self) -> None:
        self._check_open()
        self._settle(0)

    def sync(self) -> None:
        """What was put survives a power cut from here on."""
        self.flush()
        self.extents.shrink()
        self.engine.sync(self._file)

    def stats(self) -> DeviceStats:
        stream = self._stream.stats()
        counts = self._counts
        return DeviceStats(
            bytes_written=counts.bytes_written,
            write_requests=counts.write_requests,
            bytes_read=stream["bytes_read"],
            bytes_moved=stream["bytes_moved"],
            waiting_s=stream["waiting_s"],
            computing_s=stream["computing_s"],
            stored_bytes=self.extents.used_bytes,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise errors.EngineClosedError("the device is closed")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.forget()
        for segment, _ in self._writing:
            if segment.writing is not None:
                segment.writing.cancel()
                segment.writing = None  # it has the data file open, and with it its space
        self._writing.clear()
        if self._owns_engine:
            self.engine.close()
        else:
            self.engine.close_file(self._file)


class _Write:
    """Rows under way to a device. Where that fails, whoever waits is told once, and they are written again from the same memory: they may
    be nowhere else."""

    def __init__(self, engine: NativeEngine, plan: Plan, memory: torch.Tensor, deadline_s: float):
        self._engine, self._plan, self._memory, self._deadline_s = engine, plan, memory, deadline_s
        self._future = engine.write(plan, memory, deadline_s=deadline_s)

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Raises what the write raised."""
        try:
            self._future.wait()
        except errors.StorageError:
            self._future = self._engine.write(self._plan, self._memory, deadline_s=self._deadline_s)
            raise

    def end(self) -> bool:
        """Waits, whatever comes of it. False where the device may still write to the place: nothing else may be put there."""
        try:
            self._future.wait()
        except errors.DeadlineExceededError:
            return False
        except errors.EspnxError:
            return True
        return True

    def cancel(self) -> None:
        self._future.cancel()


def attend_rows(stream: Any, ticket: int, queries: Queries, tail: Tail | None, threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over stored rows (`ticket` of a compiled stream; -1: none) and over those in memory."""
    k, v, skip, n_rows, first = (tail.k, tail.v, tail.skip, tail.n_rows, tail.first_position) if tail else (None, None, 0, 0, 0)
    o, lse = load_native().attend_rows(
        stream, ticket, queries.q, queries.dv, k, v, skip, n_rows, first, queries.last_position, queries.first_visible, queries.visible,
        threads,
    )  # fmt: skip
    return o, lse


def _sums(memory: torch.Tensor, block_bytes: int) -> np.ndarray:
    """uint32: the CRC32C of each block."""
    offsets = torch.arange(0, memory.numel(), block_bytes)
    return crc32c_ranges(memory, offsets, torch.full_like(offsets, block_bytes)).numpy().astype(np.uint32)
