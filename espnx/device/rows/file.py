"""What all devices share that keep rows in a file: how rows become segments of it, and which reads
a ticket needs."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ... import errors
from ...ops.attention import Queries, RowsInMemory
from ...storage import NativeEngine, Plan
from ...storage.engine import FileHandle
from ..command import Part
from ..interface import (
    READ_AHEAD_BYTES,
    Capabilities,
    DeviceStats,
    FilePath,
    Segment,
    SegmentView,
    Show,
)
from ..row_layout import RowLayout
from ..sums import SumsMemory
from .data_file import DataFile
from .space import FileSegment, FileSpace, WritesBehind, file_segment
from .writes import Write, Writing, wait_over

#: What a ticket reads of a segment: csrc/device/row_plan.hpp's RowSegment, with the checksums as
#: numbers: they are those of array `sums` of the arrays that come along, from `first_sum` on.
SEGMENT_READ = np.dtype(
    [
        (name, np.int64)
        for name in (
            "file",
            "offset_bytes",
            "sequence",
            "first_head",
            "head_step",
            "n_heads",
            "n_blocks",
            "n_rows",
            "first_position",
            "sums",
            "first_sum",
        )
    ]
)
#: Starts a write by the first argument; its plan; whether it is of rows that the device has
#: already.
Starts = Callable[[Callable[[], Writing], Plan, bool], Writing]
#: One read. Requests of 1 MiB have more memory segments than many drives take; 960 KiB is as fast
#: and is not split.
UNIT_BYTES = 960 << 10


class RowFileDevice(Part, ABC):
    """A device but for its reads and its attention, which subclasses bring: see `SsdRowDevice` and
    `GpuRowDevice`.

    Args:
        directory: on the disk. Its data file has mode 0600.
        engine: a storage engine; a name opens one of its own.
        name: of the data file; None: the file has no name, and its space returns when the process
            ends, however it ends.
        reserve_bytes: reserved at once, so that a full disk shows now and not in an hour.
        read_ahead_bytes: of rows that are read before they are asked for.
        write_behind_bytes: of rows whose write nobody has waited for.
        deadline_s: of each transfer.
        starts: starts every write, which it is given (see `Starts`); None: that is all there is to
            it.

    Attributes:
        compute: in whose memory rows are computed on.
        capabilities: see `Capabilities`.
        read_ahead_bytes: as given.
        space: of the data file.
        may_land: the device is closed, and something may still be written to a data file that
            stays: until the process ends nobody may have it.

    Raises:
        WriteError: the directory cannot be written.
        DiskFullError: there is less room than `reserve_bytes`.
    """

    compute: torch.device
    capabilities: Capabilities
    _path: FilePath
    _stream: Any  # push, visit, front, clear, stats

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        engine: NativeEngine | str = "auto",
        name: str | None = None,
        reserve_bytes: int = 0,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        write_behind_bytes: int = 8 << 20,
        deadline_s: float = 30.0,
        starts: Starts | None = None,
    ):
        self.directory = os.fspath(directory)
        self._data = DataFile(directory, name, engine, read_ahead_bytes + (8 << 20))
        self.engine, self._file = self._data.engine, self._data.handle
        self._deadline_s, self.read_ahead_bytes = deadline_s, read_ahead_bytes
        self._closed, self.may_land = False, False
        try:
            try:
                self._begin_reads(self._file)
            finally:
                self._data.unname()
            self.space = FileSpace(self.engine, self._file, reserve_bytes)
        except BaseException:
            self._end_reads()
            self._data.close()
            raise
        self._writes = WritesBehind(self.space, self._file, write_behind_bytes)
        self._starts, self._sums = starts, SumsMemory()

    # --- what subclasses bring ---

    @abstractmethod
    def _begin_reads(self, file: FileHandle) -> None:
        """Makes `_stream` and `_path`. The file still has its name."""

    def _end_reads(self) -> None:
        """Closes what `_begin_reads` opened; it may not have been called."""

    @abstractmethod
    def _begin_write(
        self,
        layout: RowLayout,
        k: torch.Tensor,
        v: torch.Tensor | None,
        sums: np.ndarray,
        plan: Plan,
    ) -> Writing:
        """Starts writing blocks. Their checksums come into `sums`, uint32 [sequences, heads,
        blocks], by the end of the write."""

    @abstractmethod
    def push(self, layout: RowLayout, table: np.ndarray, sums: list[np.ndarray]) -> int:
        """Puts reads in line. `table`: an array of `SEGMENT_READ`."""

    @abstractmethod
    def attend(
        self, ticket: int, queries: Queries, tail: RowsInMemory | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RowDevice`."""

    # --- the file ---

    def path_report(self) -> Sequence[FilePath]:
        """See `Device`."""
        return (self._path,)

    def memory(self, size_bytes: int) -> torch.Tensor:
        """See `RowDevice`: of the engine's own, which rows of one size come back to."""
        return self.engine.memory(size_bytes)

    # --- rows come and go ---

    def put(
        self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, heads: range
    ) -> list[FileSegment]:
        """See `RowDevice`."""
        self.check_open()
        n_sequences, n_heads, n_rows, d = k.shape
        v_shape = k.shape if v is None else v.shape
        if (n_heads, d) != (len(heads), layout.d) or v_shape != (*k.shape[:3], layout.dv):
            raise errors.InvalidInputError(
                "rows to put",
                got=f"K {tuple(k.shape)}, V {tuple(v_shape)}",
                expected=f"[sequences, {len(heads)}, n, {layout.d}] and [..., {layout.dv}]",
            )
        blocks = layout.blocks(n_rows)
        each_bytes = len(heads) * blocks * layout.block_bytes
        total_bytes = n_sequences * each_bytes
        if not total_bytes:
            return [
                FileSegment(layout, heads, n_rows, 0, np.empty((len(heads), 0), np.uint32))
                for _ in range(n_sequences)
            ]
        each = len(heads) * blocks
        every_sum, first = self._sums.take(n_sequences * each)
        sums = every_sum[first : first + n_sequences * each].reshape(
            n_sequences, len(heads), blocks
        )
        place, shared = self._writes.begin(
            total_bytes, n_sequences, lambda plan: self._begin_write(layout, k, v, sums, plan)
        )
        return self._writes.add(
            [
                FileSegment(
                    layout,
                    heads,
                    n_rows,
                    place + i * each_bytes,
                    every_sum,
                    first + i * each,
                    shared,
                )
                for i in range(n_sequences)
            ]
        )

    def join(self, segments: Sequence[Segment]) -> FileSegment:
        """See `RowDevice`. Reads them, checks them, and starts writing them one after another."""
        self.check_open()
        parts = [self.written(segment) for segment in segments]
        layout, heads = parts[0].layout, parts[0].heads
        sizes = np.array([segment.size_bytes for segment in parts])
        size_bytes = int(sizes.sum())
        read, memory = (
            self.engine.memory(size_bytes),
            self.engine.memory(size_bytes).view(len(heads), -1, layout.block_bytes),
        )
        plan = Plan.of(
            self._file,
            [segment.place for segment in parts],
            sizes.tolist(),
            (np.cumsum(sizes) - sizes).tolist(),
        )
        self.engine.read(plan, read, deadline_s=self._deadline_s).wait()
        every_sum, first = self._sums.take(size_bytes // layout.block_bytes)
        sums = every_sum[first : first + size_bytes // layout.block_bytes].reshape(len(heads), -1)
        begin = 0
        for segment, size, at in zip(
            parts, sizes.tolist(), (np.cumsum(sizes) - sizes).tolist(), strict=True
        ):
            blocks, end = read[at : at + size], begin + segment.n_blocks
            segment.check(blocks, self.space.path)
            memory[:, begin:end] = blocks.view(len(heads), -1, layout.block_bytes)
            sums[:, begin:end] = segment.sums
            begin = end
        place, writing = self._writes.begin(
            size_bytes, 1, lambda plan: self._write(plan, memory.view(-1), is_copy=True)
        )
        n_rows = sum(segment.n_rows for segment in parts)
        (found,) = self._writes.add(
            [FileSegment(layout, heads, n_rows, place, every_sum, first, writing)]
        )
        return found

    def _write(self, plan: Plan, memory: torch.Tensor, *, is_copy: bool = False) -> Writing:
        """Starts writing blocks of host memory. `is_copy`: of rows that the device has already."""

        def start() -> Writing:
            return Write(self.engine, plan, memory, self._deadline_s)

        return start() if self._starts is None else self._starts(start, plan, is_copy)

    def written(self, segment: Segment) -> FileSegment:
        """A segment of this device, once its rows are in the file. Raises what its write raised."""
        mine = file_segment(segment)
        self._writes.wait(mine)
        return mine

    def is_written(self, segment: Segment) -> bool:
        """See `RowDevice`."""
        return self._writes.is_written(file_segment(segment))

    def release(self, segment: Segment) -> None:
        """See `RowDevice`."""
        self._writes.release(file_segment(segment))

    # --- reads ---

    def ahead(self, layout: RowLayout, views: Sequence[SegmentView]) -> int:
        """See `RowDevice`."""
        self.check_open()
        return self.push(layout, *self.table(views))

    def table(self, views: Sequence[SegmentView]) -> tuple[np.ndarray, list[np.ndarray]]:
        """What `push` is given. The checksums are not copied: every ticket that waits in line would
        hold those of what it reads."""
        pieces = dict[int, tuple[int, np.ndarray]]()
        table = np.empty(len(views), SEGMENT_READ)
        for row, view in enumerate(views):
            segment = view.segment
            if not isinstance(segment, FileSegment) or segment.writing is not None:
                segment = self.written(segment)
            heads = segment.heads
            piece, _ = pieces.setdefault(id(segment.every_sum), (len(pieces), segment.every_sum))
            table[row] = (
                self._file.number,
                segment.place,
                view.sequence,
                heads.start,
                heads.step,
                len(heads),
                segment.n_blocks,
                view.n_rows,
                view.first_position,
                piece,
                segment.first_sum,
            )
        return table, [sums for _, sums in pieces.values()]

    @abstractmethod
    def visit(self, ticket: int, show: Show) -> None:
        """See `RowDevice`."""

    def front(self) -> int:
        """See `RowDevice`."""
        return int(self._stream.front())

    def forget(self) -> None:
        """See `RowDevice`."""
        self._stream.clear()

    # --- the end ---

    def flush(self) -> None:
        """See `RowDevice`."""
        self.check_open()
        self._writes.settle(0)

    def sync(self) -> None:
        """See `RowDevice`."""
        self.flush()
        self.space.sync()

    def stats(self) -> DeviceStats:
        """See `RowDevice`."""
        stream = self._stream.stats()
        return DeviceStats(
            bytes_asked=stream["bytes_asked"],
            bytes_moved=stream["bytes_moved"],
            bytes_written=self._writes.bytes_begun,
            read_requests=stream["read_requests"],
            write_requests=self._writes.count,
            waiting_s=stream["waiting_s"],
            computing_s=stream["computing_s"],
            ahead_bytes=stream.get("ahead_bytes", 0),
            stored_bytes=self.space.used_bytes,
            buffer_bytes=self.engine.mapped_bytes,
        )

    def check_open(self) -> None:
        if self._closed:
            raise errors.EngineClosedError("the device is closed")

    def close(self) -> None:
        """See `RowDevice`."""
        if self._closed:
            return
        self._closed = True
        self.forget()
        writes = self._writes.cancel()
        self._end_reads()
        try:
            self._data.close(writes)
        finally:
            self.may_land = self._data.stays and not wait_over(writes, 0.0)
