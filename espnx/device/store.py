"""What all devices share that keep rows in a file: the file, its space, rows on their way into it, which reads a ticket needs."""

from __future__ import annotations

import contextlib
import os
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .. import errors
from ..ops.crc32c import crc32c_ranges
from ..storage import NativeEngine, Plan
from ..storage.engine import FileHandle
from .extents import Extents
from .interface import DeviceStats, Queries, Segment, Tail, Use
from .layout import RowLayout
from .sums import SumsMemory
from .writes import PutWrite, Write, Writing

#: One read. Requests of 1 MiB have more memory segments than many drives take; 960 KiB is as fast and is not split.
UNIT_BYTES = 960 << 10


class RowStore(ABC):
    """A device but for its reads and its attention, which subclasses bring: see `SsdDevice` and `GpuDevice`.

    Args:
        directory: on the disk. Its data file has mode 0600.
        engine: a storage engine; a name opens one of its own.
        name: of the data file; None: the file has no name, and its space returns when the process ends, however it ends.
        reserve_bytes: reserved at once, so that a full disk shows now and not in an hour.
        read_ahead_bytes: of rows that are read before they are asked for.
        write_behind_bytes: of rows whose write nobody has waited for.
        deadline_s: of each transfer.

    Attributes:
        device: whose memory rows are computed on in.
        effective_path: that the bytes of reads take.
        fallback_reason: why it is not what ``auto`` tried first; empty if it is.

    Raises:
        WriteError: the directory cannot be written.
        DiskFullError: there is less room than `reserve_bytes`.
    """

    device: torch.device
    effective_path: str
    fallback_reason: str = ""
    _stream: Any  # push, visit, front, clear, stats

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        engine: NativeEngine | str = "auto",
        name: str | None = None,
        reserve_bytes: int = 0,
        read_ahead_bytes: int = 64 << 20,
        write_behind_bytes: int = 8 << 20,
        deadline_s: float = 30.0,
    ):
        self.directory = os.fspath(directory)
        self._owns_engine = isinstance(engine, str)
        self.engine = NativeEngine(engine, pool_bytes=read_ahead_bytes + (8 << 20)) if isinstance(engine, str) else engine
        self._deadline_s, self._write_behind_bytes, self._read_ahead_bytes = deadline_s, write_behind_bytes, read_ahead_bytes
        self._closed = False
        try:
            self._file = self._open(name)
            try:
                self.extents = Extents(self.engine, self._file, reserve_bytes)
            except BaseException:
                self.engine.close_file(self._file)
                raise
        except BaseException:
            self._end_reads()
            if self._owns_engine:
                self.engine.close()
            raise
        self._writing: deque[tuple[Segment, int]] = deque()
        self._writing_bytes = 0
        self._counts = DeviceStats()
        self._pinned: dict[int, int] = {}
        self._sums = SumsMemory()

    # --- what subclasses bring ---

    @abstractmethod
    def _begin_reads(self, file: FileHandle) -> None:
        """Makes `_stream` and `effective_path`. The file still has its name."""

    def _end_reads(self) -> None:  # noqa: B027 - nothing, unless something was opened
        """Closes what `_begin_reads` opened; it may not have been called."""

    @abstractmethod
    def _begin_write(self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, sums: np.ndarray, plan: Plan) -> Writing:
        """Starts writing blocks. Their checksums come into `sums`, uint32 [sequences, heads, blocks], by the end of the write."""

    @abstractmethod
    def _push(self, layout: RowLayout, table: np.ndarray, sums: list[np.ndarray]) -> int:
        """Puts reads in line. `table` int64 [n, 11]: file, offset, sequence, first head, step of heads, heads, blocks of a head, rows,
        first position, which of `sums` holds the checksums, and from where on."""

    @abstractmethod
    def attend(self, ticket: int, queries: Queries, tail: Tail | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Device`. Ticket -1: over the rows in memory alone."""

    # --- the file ---

    def _open(self, name: str | None) -> FileHandle:
        path = os.path.join(self.directory, name or f".espnx-{uuid.uuid4().hex}")
        try:
            os.makedirs(self.directory, exist_ok=True)
            # Rows can be turned back into the text they came from: nobody else may read them.
            fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                os.fchmod(fd, 0o600)  # it may have been there
            finally:
                os.close(fd)
        except OSError as error:
            raise errors.WriteError("cannot create the file for rows", path=path, errno=error.errno) from error
        try:
            file = self.engine.open(path, "r+")
            try:
                self._begin_reads(file)
            except BaseException:
                self.engine.close_file(file)
                raise
            return file
        finally:
            if name is None:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    @property
    def path(self) -> str:
        return self._file.path

    # --- rows come and go ---

    def put(self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, heads: range) -> list[Segment]:
        """See `Device`."""
        self._check_open()
        n_sequences, n_heads, n_rows, d = k.shape
        v_shape = k.shape if v is None else v.shape
        if (n_heads, d) != (len(heads), layout.d) or v_shape != (*k.shape[:3], layout.dv):
            raise errors.InvalidInputError(
                "rows to put", got=f"K {tuple(k.shape)}, V {tuple(v_shape)}",
                expected=f"[sequences, {len(heads)}, n, {layout.d}] and [..., {layout.dv}]",
            )  # fmt: skip
        blocks = layout.blocks(n_rows)
        each_bytes = len(heads) * blocks * layout.block_bytes
        total_bytes = n_sequences * each_bytes
        if not total_bytes:
            return [Segment(layout, heads, n_rows, 0, np.empty((len(heads), 0), np.uint32)) for _ in range(n_sequences)]
        self._settle(self._write_behind_bytes - total_bytes)
        offset = self.extents.take(total_bytes)
        try:
            plan = Plan.of(self._file, [offset], [total_bytes], [0])
            each = len(heads) * blocks
            every_sum, first = self._sums.take(n_sequences * each)
            sums = every_sum[first : first + n_sequences * each].reshape(n_sequences, len(heads), blocks)
            writing = self._begin_write(layout, k, v, sums, plan)
        except BaseException:
            self.extents.give_back(offset, total_bytes)
            raise
        shared = PutWrite(writing, n_sequences)
        found = [Segment(layout, heads, n_rows, offset + i * each_bytes, every_sum, first + i * each, shared) for i in range(n_sequences)]
        self._writing.extend((segment, each_bytes) for segment in found)
        self._writing_bytes += total_bytes
        self._counts.bytes_written += total_bytes
        self._counts.write_requests += 1
        return found

    def join(self, segments: Sequence[Segment]) -> Segment:
        """A new segment with the rows of several of the same heads, which stay as they are. All but the last must be whole blocks. Reads
        them, checks them, and starts writing them one after another.

        Raises what reads raise, ChecksumError, and as `put`; nothing is kept then.
        """
        self._check_open()
        for segment in segments:
            self._wait(segment)
        layout, heads = segments[0].layout, segments[0].heads
        sizes = np.array([segment.size_bytes for segment in segments])
        size_bytes = int(sizes.sum())
        read, memory = self.engine.memory(size_bytes), self.engine.memory(size_bytes).view(len(heads), -1, layout.block_bytes)
        plan = Plan.of(self._file, [segment.place for segment in segments], sizes.tolist(), (np.cumsum(sizes) - sizes).tolist())
        self.engine.read(plan, read, deadline_s=self._deadline_s).wait()
        every_sum, first = self._sums.take(size_bytes // layout.block_bytes)
        sums = every_sum[first : first + size_bytes // layout.block_bytes].reshape(len(heads), -1)
        begin = 0
        for segment, size, at in zip(segments, sizes.tolist(), (np.cumsum(sizes) - sizes).tolist(), strict=True):
            blocks, end = read[at : at + size], begin + segment.n_blocks
            self._check_blocks(segment, blocks)
            memory[:, begin:end] = blocks.view(len(heads), -1, layout.block_bytes)
            sums[:, begin:end] = segment.sums
            begin = end
        self._settle(self._write_behind_bytes - size_bytes)
        place = self.extents.take(size_bytes)
        try:
            writing = Write(self.engine, Plan.of(self._file, [place], [size_bytes], [0]), memory.view(-1), self._deadline_s)
        except BaseException:
            self.extents.give_back(place, size_bytes)
            raise
        n_rows = sum(segment.n_rows for segment in segments)
        found = Segment(layout, heads, n_rows, place, every_sum, first, PutWrite(writing, 1))
        self._writing.append((found, size_bytes))
        self._writing_bytes += size_bytes
        self._counts.bytes_written += size_bytes
        self._counts.write_requests += 1
        return found

    def _check_blocks(self, segment: Segment, blocks: torch.Tensor) -> None:
        """Raises ChecksumError unless a segment's blocks are those that were written."""
        size_bytes, wanted = segment.layout.block_bytes, segment.sums.reshape(-1)
        offsets = torch.arange(0, blocks.numel(), size_bytes)
        found = crc32c_ranges(blocks, offsets, torch.full_like(offsets, size_bytes)).numpy()
        for i in np.flatnonzero(found != wanted)[:1].tolist():
            raise errors.ChecksumError(
                "stored rows are damaged", path=self.path, offset_bytes=segment.place + i * size_bytes, size_bytes=size_bytes,
                got=f"CRC32C {found[i]}", expected=f"CRC32C {wanted[i]}",
            )  # fmt: skip

    def _settle(self, keep_bytes: int) -> None:
        """Waits for writes until at most `keep_bytes` are under way."""
        while self._writing and (self._writing_bytes > max(keep_bytes, 0) or self._writing[0][0].writing is None):
            segment, size_bytes = self._writing[0]
            self._wait(segment)  # raises what the write raised; the segment stays in line, and its rows are written again
            self._writing.popleft()
            self._writing_bytes -= size_bytes

    def _wait(self, segment: Segment) -> None:
        """Until the segment's rows are in the file. Raises what its write raised."""
        if segment.writing is not None:
            segment.writing.wait()
            self._give_back(segment.writing.settle())
            segment.writing = None

    def _give_back(self, places: Sequence[tuple[int, int]]) -> None:
        for place, size_bytes in places:
            if place not in self._pinned:
                self.extents.give_back(place, size_bytes)

    def is_written(self, segment: Segment) -> bool:
        """True once reads may ask for the segment. Raises what its write raised."""
        if segment.writing is not None and segment.writing.done():
            self._wait(segment)
        return segment.writing is None

    def release(self, segment: Segment) -> None:
        """See `Device`."""
        if segment.size_bytes:
            place = segment.place, segment.size_bytes
            self._give_back([place] if segment.writing is None else segment.writing.leave(place))
            segment.writing = None

    def pin(self, places: dict[int, int]) -> None:
        """From now on these places (with their sizes), which segments hold, are not used again when the segments go; those pinned before
        are, unless they are among them."""
        for place, size_bytes in self._pinned.items():
            if place not in places:
                self.extents.give_back(place, size_bytes)
        self._pinned = dict(places)

    @property
    def pinned(self) -> dict[int, int]:
        """What `pin` was given last."""
        return dict(self._pinned)

    # --- reads ---

    def ahead(self, layout: RowLayout, uses: Sequence[Use]) -> int:
        """See `Device`."""
        self._check_open()
        for use in uses:
            self._wait(use.segment)
        return self._push(layout, *self._table(uses))

    def _table(self, uses: Sequence[Use]) -> tuple[np.ndarray, list[np.ndarray]]:
        """What `_push` is given. The checksums are not copied: every ticket that waits in line would hold those of what it reads."""
        number, pieces, table = self._file.number, dict[int, tuple[int, np.ndarray]](), np.empty((len(uses), 11), np.int64)
        for row, use in zip(table, uses, strict=True):
            segment, heads = use.segment, use.segment.heads
            piece, _ = pieces.setdefault(id(segment.every_sum), (len(pieces), segment.every_sum))
            row[:] = (
                number, segment.place, use.sequence, heads.start, heads.step, len(heads), segment.n_blocks, use.n_rows,
                use.first_position, piece, segment.first_sum,
            )  # fmt: skip
        return table, [sums for _, sums in pieces.values()]

    def visit(self, ticket: int, see: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """See `Device`."""
        self._check_open()
        self._stream.visit(ticket, see)

    def front(self) -> int:
        """The ticket whose rows come next, or -1."""
        return int(self._stream.front())

    def forget(self) -> None:
        """See `Device`."""
        self._stream.clear()

    # --- the end ---

    def flush(self) -> None:
        """See `Device`."""
        self._check_open()
        self._settle(0)

    def sync(self) -> None:
        """What was put survives a power cut from here on."""
        self.flush()
        self.extents.shrink()
        self.engine.sync(self._file)

    def stats(self) -> DeviceStats:
        """See `Device`."""
        stream = self._stream.stats()
        counts = self._counts
        return DeviceStats(
            bytes_written=counts.bytes_written,
            write_requests=counts.write_requests,
            bytes_asked=stream["bytes_asked"],
            bytes_moved=stream["bytes_moved"],
            waiting_s=stream["waiting_s"],
            computing_s=stream["computing_s"],
            stored_bytes=self.extents.used_bytes,
            buffer_bytes=self.engine.mapped_bytes,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise errors.EngineClosedError("the device is closed")

    def close(self) -> None:
        """See `Device`."""
        if self._closed:
            return
        self._closed = True
        self.forget()
        for segment, _ in self._writing:
            if segment.writing is not None:
                segment.writing.cancel()
                segment.writing = None  # it has the data file open, and with it its space
        self._writing.clear()
        self._end_reads()
        if self._owns_engine:
            self.engine.close()
        else:
            with contextlib.suppress(errors.EngineClosedError):  # which closed its files
                self.engine.close_file(self._file)
