"""What all devices share that keep rows in a file: the file, its space, rows on their way into it,
which reads a ticket needs."""

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

from ... import errors
from ...ops.attention import Queries, RowsInMemory
from ...ops.crc32c import crc32c_ranges
from ...storage import NativeEngine, Plan
from ...storage.engine import FileHandle
from ...storage.files import make_given_directory
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
from .space import FileSegment, FileSpace, file_segment
from .writes import PutWrite, Write, Writing, wait_over

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
#: Closing a device whose engine is the caller's waits for so long for what is in flight to a file
#: that stays.
CLOSE_S = 5.0
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
        self._owns_engine = isinstance(engine, str)
        self.engine = (
            NativeEngine(engine, pool_bytes=read_ahead_bytes + (8 << 20))
            if isinstance(engine, str)
            else engine
        )
        self._deadline_s, self._write_behind_bytes, self.read_ahead_bytes = (
            deadline_s,
            write_behind_bytes,
            read_ahead_bytes,
        )
        self._closed, self._starts, self._stays = False, starts, name is not None
        self.may_land = False
        try:
            self._file = self._open(name)
            try:
                self.space = FileSpace(self.engine, self._file, reserve_bytes)
            except BaseException:
                self.engine.close_file(self._file)
                raise
        except BaseException:
            self._end_reads()
            if self._owns_engine:
                self.engine.close()
            raise
        self._writing: deque[tuple[FileSegment, int]] = deque()
        self._late = list[PutWrite]()  # failed, of nobody, and still in flight
        self._writing_bytes = self._bytes_written = self._write_requests = 0
        self._sums = SumsMemory()

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

    @classmethod
    def check(
        cls,
        directory: str | os.PathLike[str],
        *,
        engine: NativeEngine | str = "auto",
        name: str | None = None,
    ) -> None:
        """Raises what opening would raise of the directory and of the path, and leaves nothing
        there but the directory."""
        path = _data_path(directory, name)
        is_new = not os.path.exists(path)
        _create(path)
        if is_new:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if isinstance(engine, str) and engine != "auto":  # which can be had everywhere
            NativeEngine(engine, pool_bytes=0).close()

    def _open(self, name: str | None) -> FileHandle:
        path = _data_path(self.directory, name)
        _create(path)
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
        self._settle(self._write_behind_bytes - total_bytes)
        offset = self.space.extents.take(total_bytes)
        try:
            plan = Plan.of(self._file, [offset], [total_bytes], [0])
            each = len(heads) * blocks
            every_sum, first = self._sums.take(n_sequences * each)
            sums = every_sum[first : first + n_sequences * each].reshape(
                n_sequences, len(heads), blocks
            )
            writing = self._begin_write(layout, k, v, sums, plan)
        except BaseException:
            self.space.give_back(offset, total_bytes)
            raise
        shared = PutWrite(writing, n_sequences)
        found = [
            FileSegment(
                layout, heads, n_rows, offset + i * each_bytes, every_sum, first + i * each, shared
            )
            for i in range(n_sequences)
        ]
        self._writing.extend((segment, each_bytes) for segment in found)
        self._writing_bytes += total_bytes
        self._bytes_written += total_bytes
        self._write_requests += 1
        return found

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
            self._check_blocks(segment, blocks)
            memory[:, begin:end] = blocks.view(len(heads), -1, layout.block_bytes)
            sums[:, begin:end] = segment.sums
            begin = end
        self._settle(self._write_behind_bytes - size_bytes)
        place = self.space.extents.take(size_bytes)
        try:
            writing = self._write(
                Plan.of(self._file, [place], [size_bytes], [0]), memory.view(-1), is_copy=True
            )
        except BaseException:
            self.space.give_back(place, size_bytes)
            raise
        n_rows = sum(segment.n_rows for segment in parts)
        found = FileSegment(layout, heads, n_rows, place, every_sum, first, PutWrite(writing, 1))
        self._writing.append((found, size_bytes))
        self._writing_bytes += size_bytes
        self._bytes_written += size_bytes
        self._write_requests += 1
        return found

    def _write(self, plan: Plan, memory: torch.Tensor, *, is_copy: bool = False) -> Writing:
        """Starts writing blocks of host memory. `is_copy`: of rows that the device has already."""

        def start() -> Writing:
            return Write(self.engine, plan, memory, self._deadline_s)

        return start() if self._starts is None else self._starts(start, plan, is_copy)

    def _check_blocks(self, segment: FileSegment, blocks: torch.Tensor) -> None:
        """Raises ChecksumError unless a segment's blocks are those that were written."""
        size_bytes, wanted = segment.layout.block_bytes, segment.sums.reshape(-1)
        offsets = torch.arange(0, blocks.numel(), size_bytes)
        found = crc32c_ranges(blocks, offsets, torch.full_like(offsets, size_bytes)).numpy()
        for i in np.flatnonzero(found != wanted)[:1].tolist():
            raise errors.ChecksumError(
                "stored rows are damaged",
                path=self.space.path,
                offset_bytes=segment.place + i * size_bytes,
                size_bytes=size_bytes,
                got=f"CRC32C {found[i]}",
                expected=f"CRC32C {wanted[i]}",
            )

    def _settle(self, keep_bytes: int) -> None:
        """Waits for writes until at most `keep_bytes` are under way."""
        self._free_late()
        while self._writing and (
            self._writing_bytes > max(keep_bytes, 0) or self._writing[0][0].writing is None
        ):
            segment, size_bytes = self._writing[0]
            # raises what the write raised; the segment stays in line, and its rows are written
            # again
            self._wait(segment)
            self._writing.popleft()
            self._writing_bytes -= size_bytes

    def _wait(self, segment: FileSegment) -> None:
        """Waits until the segment's rows are in the file. Raises what its write raised."""
        if segment.writing is not None:
            segment.writing.wait()
            self._give_back(segment.writing.settle())
            segment.writing = None

    def written(self, segment: Segment) -> FileSegment:
        """A segment of this device, once its rows are in the file. Raises what its write raised."""
        mine = file_segment(segment)
        self._wait(mine)
        return mine

    def _give_back(self, places: Sequence[tuple[int, int]]) -> None:
        for place, size_bytes in places:
            self.space.give_back(place, size_bytes)

    def _free_late(self) -> None:
        """Gives back the places where nothing can land any more."""
        for each in self._late:
            self._give_back(each.free())
        self._late = [each for each in self._late if each.is_late]

    def is_written(self, segment: Segment) -> bool:
        """See `RowDevice`."""
        mine = file_segment(segment)
        if mine.writing is not None and mine.writing.done():
            self._wait(mine)
        return mine.writing is None

    def release(self, segment: Segment) -> None:
        """See `RowDevice`."""
        mine = file_segment(segment)
        if mine.size_bytes and not mine.is_lent:
            place, writing = (mine.place, mine.size_bytes), mine.writing
            self._give_back([place] if writing is None else writing.leave(place))
            if writing is not None and writing.is_late:
                self._late.append(writing)
            mine.writing = None

    # --- reads ---

    def ahead(self, layout: RowLayout, views: Sequence[SegmentView]) -> int:
        """See `RowDevice`."""
        self.check_open()
        return self.push(layout, *self.table(views))

    def table(self, views: Sequence[SegmentView]) -> tuple[np.ndarray, list[np.ndarray]]:
        """What `push` is given. The checksums are not copied: every ticket that waits in line would
        hold those of what it reads."""
        number, pieces, table = (
            self._file.number,
            dict[int, tuple[int, np.ndarray]](),
            np.empty(len(views), SEGMENT_READ),
        )
        for row, view in enumerate(views):
            segment = view.segment
            if not isinstance(segment, FileSegment) or segment.writing is not None:
                segment = self.written(segment)
            heads = segment.heads
            piece, _ = pieces.setdefault(id(segment.every_sum), (len(pieces), segment.every_sum))
            table[row] = (
                number,
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
        self._settle(0)

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
            bytes_written=self._bytes_written,
            read_requests=stream["read_requests"],
            write_requests=self._write_requests,
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
        under_way = {id(each): each for each in self._late}
        for each in self._late:
            each.cancel()
        for segment, _ in self._writing:
            if segment.writing is not None:
                segment.writing.cancel()
                under_way[id(segment.writing)] = segment.writing
                segment.writing = None  # it has the data file open, and with it its space
        self._writing.clear()
        self._late.clear()
        self._end_reads()
        try:
            if self._owns_engine:
                self.engine.close()
            else:
                if self._stays:
                    wait_over(under_way.values(), CLOSE_S)
                with contextlib.suppress(errors.EngineClosedError):  # which closed its files
                    self.engine.close_file(self._file)
        finally:
            self.may_land = self._stays and not wait_over(under_way.values(), 0.0)


def _data_path(directory: str | os.PathLike[str], name: str | None) -> str:
    return os.path.join(os.fspath(directory), name or f".espnx-{uuid.uuid4().hex}")


def _create(path: str) -> None:
    """Makes an empty file, and its directory, where there is none. Raises WriteError;
    InvalidInputError where no directory is above it."""
    make_given_directory(os.path.dirname(path))
    try:
        # Rows can be turned back into the text they came from: nobody else may read them.
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.fchmod(fd, 0o600)  # it may have been there
        finally:
            os.close(fd)
    except OSError as error:
        raise errors.WriteError(
            "cannot create the file for rows", path=path, errno=error.errno
        ) from error
