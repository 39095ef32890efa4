"""Tensors in one file on SSD, written and read by slices: what `espnx.integrations.flexgen.disk`
keeps FlexGen's cache in.

A tensor lies as it is, in blocks of whole rows (of its first dimension), each with a checksum. The
block that was changed last stays in memory, so that rows that are appended one by one are written
once.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ... import errors
from ...device.rows.extents import Extents
from ...device.rows.ssd import block_sums
from ...storage import NativeEngine, Plan
from ...storage.files import BLOCK_BYTES, aligned_empty, make_given_directory, write_error

_BLOCK_BYTES = 256 << 10
#: Bytes of one transfer; two of them are in memory (a single block may be larger).
_PIECE_BYTES = 8 << 20

Index = Sequence[slice] | None


@dataclass(eq=False)
class StoredArray:
    """A tensor in a `TensorFile`. What was never written is zero.

    Attributes:
        place: bytes into the file.
        block_rows: rows of one block, which fills whole pages.
        sums: uint32 [blocks].
        is_written: bool [blocks].
        block, memory: the block that is in memory and its bytes; -1 and None where none is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    place: int
    block_rows: int
    sums: np.ndarray
    is_written: np.ndarray
    block: int = -1
    memory: torch.Tensor | None = None

    @property
    def block_bytes(self) -> int:
        return self.block_rows * row_bytes(self.shape, self.dtype)

    @property
    def size_bytes(self) -> int:
        return len(self.sums) * self.block_bytes

    def rows_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Bytes of whole blocks as rows."""
        return memory.view(self.dtype).view(-1, *self.shape[1:])

    def ranges(self, index: Index) -> list[tuple[int, int]]:
        """(begin, end) in each dimension. Raises InvalidInputError for anything but slices without
        a step, and for a scalar."""
        slices = tuple(index or ())
        if (
            not self.shape
            or len(slices) > len(self.shape)
            or any(not isinstance(s, slice) or s.step not in (None, 1) for s in slices)
        ):
            raise errors.InvalidInputError(
                "index of a tensor on disk",
                got=index,
                expected=f"slices of {self.shape}, without steps",
            )
        found = [s.indices(n)[:2] for s, n in zip(slices, self.shape, strict=False)]
        return [(begin, max(begin, end)) for begin, end in found] + [
            (0, n) for n in self.shape[len(slices) :]
        ]


@dataclass
class _Staging:
    """Two buffers that take turns, and the transfer that each is busy with."""

    buffers: list[torch.Tensor | None] = field(default_factory=lambda: [None, None])
    futures: list[Any] = field(default_factory=lambda: [None, None])
    turn: int = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """The next buffer's first bytes. Raises what its last transfer raised."""
        self.turn ^= 1
        self.wait(self.turn)
        buffer = self.buffers[self.turn]
        if buffer is None or buffer.numel() < size_bytes:
            buffer = self.buffers[self.turn] = aligned_empty(size_bytes)
        return buffer[:size_bytes]

    def wait(self, turn: int) -> None:
        future, self.futures[turn] = self.futures[turn], None
        if future is not None:
            future.wait()

    @contextlib.contextmanager
    def transfer(self) -> Iterator[None]:
        """What begins inside is over at the end; after a failure the device may still hold the
        buffers, and others take their place."""
        try:
            yield
            self.wait(self.turn ^ 1)
            self.wait(self.turn)
        except BaseException:
            for future in self.futures:
                if future is not None:
                    future.cancel()
            self.buffers, self.futures = [None, None], [None, None]
            raise


class TensorFile:
    """Tensors on SSD. `allocate` and `free` may come from any thread; reads and writes from one at
    a time.

    Args:
        directory: on the SSD. The file has no name there and mode 0600: its space returns when the
            process ends, however it ends.
        engine: ``auto``, ``uring``, ``posix``, or an engine, which stays the caller's.
        reserve_bytes: reserved at once, so that a full disk shows now.
        deadline_s: of each transfer.

    Raises:
        WriteError: the directory cannot be written. DiskFullError: there is less room than
            `reserve_bytes`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        engine: NativeEngine | str = "auto",
        reserve_bytes: int = 0,
        deadline_s: float = 30.0,
    ):
        self._owns_engine = isinstance(engine, str)
        self._engine = NativeEngine(engine, pool_bytes=0) if isinstance(engine, str) else engine
        self._deadline_s, self._lock, self._staging, self.is_closed = (
            deadline_s,
            threading.Lock(),
            _Staging(),
            False,
        )
        self.bytes_written = self.bytes_asked = 0
        path = os.path.join(directory, f".espnx-{uuid.uuid4().hex}")
        try:
            make_given_directory(directory)
            try:
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            except OSError as error:
                raise write_error("cannot create the file for tensors", path, error) from error
            try:
                self._file = self._engine.open(path, "r+")
            finally:
                os.unlink(path)
            self.effective_path = self._file.effective
            self._extents = Extents(self._engine, self._file, reserve_bytes)
        except BaseException:
            if self._owns_engine:
                self._engine.close()
            raise

    @property
    def stored_bytes(self) -> int:
        return self._extents.used_bytes

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> StoredArray:
        """A tensor of zeros; its space is reserved. Raises DiskFullError."""
        self._check_open()
        sizes = tuple(int(n) for n in shape)
        each = row_bytes(sizes, dtype)
        page_rows = BLOCK_BYTES // math.gcd(each, BLOCK_BYTES) if each else 1
        rows = sizes[0] if sizes else 0
        block_rows = page_rows * max(
            1, min(_BLOCK_BYTES // (each * page_rows) if each else 1, -(-rows // page_rows))
        )
        blocks = -(-rows // block_rows) if each else 0
        size_bytes = blocks * block_rows * each
        with self._lock:
            place = self._extents.take(size_bytes) if size_bytes else 0
        return StoredArray(
            sizes, dtype, place, block_rows, np.zeros(blocks, np.uint32), np.zeros(blocks, np.bool_)
        )

    def free(self, array: StoredArray) -> None:
        """The space is used again."""
        array.memory, array.block = None, -1
        if array.size_bytes and not self.is_closed:
            with self._lock:
                self._extents.give_back(array.place, array.size_bytes)

    def write(self, array: StoredArray, index: Index, source: torch.Tensor) -> None:
        """``array[index] = source``. Raises WriteError, DiskFullError, DeadlineExceededError, and
        what `read` raises."""
        (first, last), *inner = self._ranges(array, index, source)
        is_whole = all(part == (0, n) for part, n in zip(inner, array.shape[1:], strict=True))
        size, rows = array.block_rows, array.shape[0]
        at_once = max(1, _PIECE_BYTES // max(array.block_bytes, 1))
        at = first if source.numel() else last
        with self._staging.transfer():
            while at < last:
                block = at // size
                # Blocks of which nothing stays go to disk as they are, the last one of a tensor
                # too.
                count = min(
                    at_once, len(array.sums) - block if last == rows else last // size - block
                )
                if is_whole and at % size == 0 and count > 0:
                    end = min((block + count) * size, last)
                    memory = self._staging.take(count * array.block_bytes)
                    array.rows_of(memory)[: end - at].copy_(source[at - first : end - first])
                    memory[(end - at) * row_bytes(array.shape, array.dtype) :].zero_()
                    if block <= array.block < block + count:
                        array.block, array.memory = -1, None
                    self._staging.futures[self._staging.turn] = self._begin_write(
                        array, block, memory
                    )
                else:
                    end = min((block + 1) * size, last)
                    place = (
                        slice(at - block * size, end - block * size),
                        *(slice(*part) for part in inner),
                    )
                    array.rows_of(self._edit(array, block))[place].copy_(
                        source[at - first : end - first]
                    )
                at = end

    def read(self, array: StoredArray, index: Index, target: torch.Tensor) -> None:
        """``target[...] = array[index]``. Raises ReadError, ChecksumError, DeadlineExceededError;
        `target` is undefined then."""
        (first, last), *inner = self._ranges(array, index, target)
        if not target.numel():
            return
        size = array.block_rows
        at_once = max(1, _PIECE_BYTES // array.block_bytes)
        end_block = -(-last // size)
        pieces = [
            range(b, min(b + at_once, end_block)) for b in range(first // size, end_block, at_once)
        ]
        with self._staging.transfer():
            coming = self._begin_read(array, pieces[0])
            for number, blocks in enumerate(pieces):
                memory, turn = coming, self._staging.turn
                if number + 1 < len(pieces):
                    coming = self._begin_read(array, pieces[number + 1])
                self._staging.wait(turn)
                self._fill(array, blocks, memory)
                begin, end = max(first, blocks.start * size), min(last, blocks.stop * size)
                place = (
                    slice(begin - blocks.start * size, end - blocks.start * size),
                    *(slice(*part) for part in inner),
                )
                target[begin - first : end - first].copy_(array.rows_of(memory)[place])

    def flush(self, array: StoredArray) -> None:
        """Writes the block that is in memory, and keeps it there where that fails."""
        if array.memory is not None:
            self._begin_write(array, array.block, array.memory).wait()
            array.block, array.memory = -1, None

    def _ranges(
        self, array: StoredArray, index: Index, other: torch.Tensor
    ) -> list[tuple[int, int]]:
        self._check_open()
        ranges = array.ranges(index)
        shape = tuple(end - begin for begin, end in ranges)
        if tuple(other.shape) != shape:
            raise errors.InvalidInputError(
                "a copy to or from disk", got=tuple(other.shape), expected=shape
            )
        return ranges

    def _edit(self, array: StoredArray, block: int) -> torch.Tensor:
        """The bytes of a block, to be changed."""
        if array.memory is None or array.block != block:
            self.flush(array)
            memory = aligned_empty(array.block_bytes).zero_()
            if array.is_written[block]:
                self._submit_read(array, np.array([block]), memory, np.zeros(1, np.int64)).wait()
            array.block, array.memory = block, memory
        return array.memory

    def _begin_write(self, array: StoredArray, block: int, memory: torch.Tensor) -> Any:
        end = block + memory.numel() // array.block_bytes
        plan = Plan.of(self._file, [array.place + block * array.block_bytes], [memory.numel()], [0])
        # The new checksums count from here on: what a failed write leaves behind is never taken for
        # rows.
        array.sums[block:end] = block_sums(memory, array.block_bytes).numpy().astype(np.uint32)
        array.is_written[block:end] = True
        self.bytes_written += memory.numel()
        return self._engine.write(plan, memory, deadline_s=self._deadline_s)

    def _begin_read(self, array: StoredArray, blocks: range) -> torch.Tensor:
        memory = self._staging.take(len(blocks) * array.block_bytes)
        wanted = np.flatnonzero(array.is_written[blocks.start : blocks.stop]) + blocks.start
        wanted = wanted[wanted != array.block]
        if len(wanted):
            future = self._submit_read(
                array, wanted, memory, (wanted - blocks.start) * array.block_bytes
            )
            self._staging.futures[self._staging.turn] = future
        return memory

    def _submit_read(
        self, array: StoredArray, blocks: np.ndarray, memory: torch.Tensor, positions: np.ndarray
    ) -> Any:
        each = array.block_bytes
        offsets = torch.from_numpy(array.place + blocks.astype(np.int64) * each)
        sums = torch.from_numpy(array.sums[blocks].astype(np.int64))
        plan = Plan.of(
            self._file, offsets, torch.full_like(offsets, each), torch.from_numpy(positions), sums
        )
        self.bytes_asked += each * len(blocks)
        return self._engine.read(plan, memory, deadline_s=self._deadline_s)

    def _fill(self, array: StoredArray, blocks: range, memory: torch.Tensor) -> None:
        """Blocks that are not on disk: the one in memory, and zeros for those that were never
        written."""
        parts = memory.view(len(blocks), array.block_bytes)
        for block in np.flatnonzero(~array.is_written[blocks.start : blocks.stop]):
            parts[int(block)].zero_()
        if array.memory is not None and array.block in blocks:
            parts[array.block - blocks.start].copy_(array.memory)

    def _check_open(self) -> None:
        if self.is_closed:
            raise errors.EngineClosedError("the file for tensors is closed")

    def close(self) -> None:
        with self._lock:
            is_first, self.is_closed = not self.is_closed, True
        if is_first:
            end: Callable[[], None] = (
                self._engine.close
                if self._owns_engine
                else lambda: self._engine.close_file(self._file)
            )
            end()


def row_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape[1:]) * dtype.itemsize
