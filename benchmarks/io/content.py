"""A data file of which every 4 KiB block can be checked: contents and CRC32C follow from a seed,
computed without espnx's own code.

Block i is a random block of a pool with its number and a generation written over its first 16
bytes, so that a block that is stale, or another one than was asked for, never passes. CRC32C is
linear, so the sums of a million blocks follow from those of the pool at once.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from espnx.errors import DiskFullError, InvalidInputError, WriteError

BLOCK_BYTES = 4096
POOL_BLOCKS = 1024
FORMAT = 1
_WORDS = BLOCK_BYTES // 8
_POLYNOMIAL = np.uint32(0x82F63B78)


@functools.cache
def byte_table() -> np.ndarray:
    """uint32 [256]: the CRC32C register after one byte, from a zero register."""
    table: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ (table & 1) * _POLYNOMIAL
    return table


def crc32c_rows(rows: np.ndarray) -> np.ndarray:
    """CRC32C of each row of uint8 [n, bytes], as uint32 [n]; all rows at once, one byte at a
    time."""
    table = byte_table()
    state = np.full(len(rows), 0xFFFFFFFF, dtype=np.uint32)
    for column in np.ascontiguousarray(rows.T):
        state = (state >> 8) ^ table[(state ^ column) & 0xFF]
    return ~state


def _linear_tables(basis: np.ndarray) -> np.ndarray:
    """uint32 [bytes, 256] look-up tables of a linear map, from the images of its input bits (uint32
    [8 * bytes])."""
    tables = np.zeros((len(basis) // 8, 256), dtype=np.uint32)
    values = np.arange(256)
    for bit, image in enumerate(basis):
        tables[bit // 8] ^= np.where(values >> (bit % 8) & 1, image, np.uint32(0)).astype(np.uint32)
    return tables


def _apply(tables: np.ndarray, values: np.ndarray) -> np.ndarray:
    result = np.zeros(values.shape, dtype=np.uint32)
    for byte, table in enumerate(tables):
        result ^= table[(values >> values.dtype.type(8 * byte)).astype(np.int64) & 0xFF]
    return result


@functools.cache
def _shift_tables() -> np.ndarray:
    """Maps a CRC to the one that it contributes when one block follows."""
    state, table = np.uint32(1) << np.arange(32, dtype=np.uint32), byte_table()
    for _ in range(BLOCK_BYTES):
        state = (state >> 8) ^ table[state & 0xFF]
    return _linear_tables(state)


@functools.cache
def _head_tables() -> np.ndarray:
    """Maps the first 16 bytes of a block to what they contribute to its CRC: [2, 8, 256], by
    word."""
    rows = np.zeros((129, BLOCK_BYTES), dtype=np.uint8)
    for bit in range(128):
        rows[bit, bit // 8] = 1 << bit % 8
    crcs = crc32c_rows(rows)
    return _linear_tables(crcs[:128] ^ crcs[128]).reshape(2, 8, 256)


class Content:
    """What a file made from `seed` holds."""

    def __init__(self, seed: int):
        self.seed = seed
        # The raw stream of a bit generator is fixed forever; distributions drawn from it may
        # change with numpy's version.
        pool = (
            np.random.PCG64(seed)
            .random_raw(POOL_BLOCKS * _WORDS)
            .astype("<u8")
            .reshape(POOL_BLOCKS, _WORDS)
        )
        pool[:, :2] = 0
        self._pool = pool
        self._pool_crcs = crc32c_rows(pool.view(np.uint8))

    def blocks(self, numbers: np.ndarray, generation: int = 0) -> np.ndarray:
        """The bytes of blocks int64 [n], as uint8 [n, 4096]."""
        words = self._pool[numbers % POOL_BLOCKS]
        words[:, 0] = numbers
        words[:, 1] = generation
        return words.view(np.uint8)

    def block_crcs(self, numbers: np.ndarray, generation: int = 0) -> np.ndarray:
        """CRC32C of blocks int64 [n], as uint32 [n]."""
        first, second = _head_tables()
        number_part = _apply(first, numbers.astype(np.uint64))
        return (
            self._pool_crcs[numbers % POOL_BLOCKS]
            ^ number_part
            ^ _apply(second, np.array([generation], dtype=np.uint64))
        )

    def item_crcs(
        self, offset_bytes: np.ndarray, item_bytes: int, generation: int = 0
    ) -> np.ndarray:
        """CRC32C of items of `item_bytes` at int64 [n] offsets, all multiples of 4096, as int64
        [n]."""
        crcs = np.zeros(len(offset_bytes), dtype=np.uint32)
        for block in range(item_bytes // BLOCK_BYTES):
            crcs = _apply(_shift_tables(), crcs) ^ self.block_crcs(
                offset_bytes // BLOCK_BYTES + block, generation
            )
        return crcs.astype(np.int64)


@functools.lru_cache(maxsize=2)
def content_of(seed: int) -> Content:
    """The content of a seed; making its pool takes a tenth of a second, so the last ones are
    kept."""
    return Content(seed)


@dataclass(frozen=True)
class Stamp:
    """What must still be true of a data file for its content to be known; kept beside it as
    JSON."""

    format: int
    seed: int
    size_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class DataFile:
    """A data file and what it holds."""

    path: Path
    size_bytes: int
    content: Content

    @property
    def block_count(self) -> int:
        return self.size_bytes // BLOCK_BYTES


def ensure_file(path: Path, size_bytes: int, seed: int, say: Callable[[str], None]) -> DataFile:
    """The data file at `path`, made anew unless the stamp beside it (seed, size, modification time,
    inode) still fits.

    Raises:
        InvalidInputError: the size is not a positive multiple of 4 KiB.
        DiskFullError, WriteError: it cannot be written.
    """
    if size_bytes <= 0 or size_bytes % BLOCK_BYTES:
        raise InvalidInputError(
            "the size of the data file",
            got=size_bytes,
            expected="a positive multiple of 4096 bytes",
        )
    content = content_of(seed)
    if not _is_current(path, size_bytes, seed):
        say(f"writing {path} ({size_bytes / 2**30:.2f} GiB of random data, once)")
        try:
            _create(path, size_bytes, content)
        except OSError as error:
            if isinstance(error, WriteError):
                raise
            raise WriteError(
                "cannot make the data file",
                path=path,
                errno=error.errno,
                fix="name another directory with --path",
            ) from error
    return DataFile(path, size_bytes, content)


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".stamp.json")


def _stamp_of(path: Path, seed: int) -> Stamp:
    status = path.stat()
    return Stamp(FORMAT, seed, status.st_size, status.st_mtime_ns, status.st_ino)


def _is_current(path: Path, size_bytes: int, seed: int) -> bool:
    try:
        stored = json.loads(_stamp_path(path).read_text())
        found = _stamp_of(path, seed)
    except (OSError, ValueError):
        return False
    return stored == asdict(found) and found.size_bytes == size_bytes


def _create(path: Path, size_bytes: int, content: Content) -> None:
    _stamp_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    status = os.statvfs(path.parent)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < size_bytes:
        raise DiskFullError(
            "cannot make the data file",
            needed_bytes=size_bytes,
            free_bytes=free_bytes,
            path=path,
            fix="a smaller --size, or another --path",
        )
    with open(path, "xb") as file:
        for chunk in _chunks(size_bytes, content):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    # Last, so that a file whose writing was interrupted has no stamp; half a stamp is no JSON, and
    # the file is made again.
    _stamp_path(path).write_text(json.dumps(asdict(_stamp_of(path, content.seed))) + "\n")


def _chunks(size_bytes: int, content: Content) -> Iterator[memoryview]:
    blocks = size_bytes // BLOCK_BYTES
    for first in range(0, blocks, POOL_BLOCKS):
        numbers = np.arange(first, min(first + POOL_BLOCKS, blocks))
        yield content.blocks(numbers).data.cast("B")


def aligned_memory(size_bytes: int) -> np.ndarray:
    """Writable uint8 [size_bytes], page-aligned, on huge pages where there are any, and touched, so
    that no run pays for faults."""
    huge = 2 << 20
    area = mmap.mmap(-1, size_bytes + huge)
    begin = -np.frombuffer(area, dtype=np.uint8).ctypes.data % huge
    area.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(area, dtype=np.uint8)[begin : begin + size_bytes]
    memory[:] = 0xA5
    return memory
