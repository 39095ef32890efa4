"""Whole files through an engine: a writer that appends in large direct writes, readers that check
what they read.

Used for everything in a store but its random record reads, so that an injected fault, a full disk
or a damaged file meets one code path.
"""

from __future__ import annotations

import contextlib
import errno as codes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from .. import errors
from ..checks import check_given_directory as check_given_directory
from .engine import FileHandle, Future, Plan
from .native import NativeEngine, load_native

BLOCK_BYTES = 4096
WINDOW_BYTES = 4 * 1024 * 1024


def write_error(
    what: str, path: str | os.PathLike[str], error: OSError, fix: str | None = None
) -> errors.WriteError:
    """The typed error of a change to a directory that the operating system refused: DiskFullError
    where there was no room."""
    if error.errno != codes.ENOSPC:
        return errors.WriteError(what, path=path, errno=error.errno, fix=fix)
    inside = os.path.abspath(path)
    while not os.path.isdir(inside):
        inside = os.path.dirname(inside)
    free = load_native().free_bytes(inside)
    return errors.DiskFullError(
        what, needed_bytes=max(free + 1, BLOCK_BYTES), free_bytes=free, path=path
    )


def make_directory(path: str | os.PathLike[str]) -> None:
    """Makes a directory, and those above it, unless it is there. Raises WriteError,
    DiskFullError."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise write_error("cannot create directory", path, error) from error


def make_given_directory(path: str | os.PathLike[str]) -> None:
    """Makes a directory that a caller named, unless it is there. Raises as `check_given_directory`,
    and WriteError, DiskFullError."""
    check_given_directory(path)
    make_directory(path)


def names_in(directory: str | os.PathLike[str]) -> set[str]:
    """What a directory holds. Raises ReadError."""
    try:
        return set(os.listdir(directory))
    except OSError as error:
        raise errors.ReadError(
            "cannot list a directory", path=directory, errno=error.errno
        ) from error


def aligned_empty(size_bytes: int) -> torch.Tensor:
    """An uninitialised uint8 tensor whose memory direct I/O can use (4 KiB aligned)."""
    raw = torch.empty(size_bytes + BLOCK_BYTES, dtype=torch.uint8)
    skip = -raw.data_ptr() % BLOCK_BYTES
    return raw[skip : skip + size_bytes]


def crc32c(data: np.ndarray | bytes | memoryview, seed: int = 0) -> int:
    """CRC32C of bytes; `seed` is the CRC of what came before."""
    view = np.frombuffer(data, dtype=np.uint8)
    if view.size == 0:
        return seed
    # `ctypes.data` takes longer than the sum
    found: int = load_native().crc32c(view.__array_interface__["data"][0], view.size, seed)
    return found


@dataclass(frozen=True)
class Region:
    """Bytes of a file: a whole one, or what lies inside another."""

    path: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class Section:
    """Named bytes of a file that holds several: where they begin, and their checksum."""

    offset_bytes: int
    size_bytes: int
    crc32c: int


class StreamWriter:
    """Appends to a file: two aligned buffers, one filling while the other is being written.

    Args:
        engine: a native engine; stays the caller's.
        path: created, or, with `at_bytes`, continued (what lies after `at_bytes` is cut off).
        buffer_bytes: size of each of the two buffers, a multiple of 4096.
        sums: with this, the CRC32C of every 4 MiB window is kept, for `read_windows`; those of what
            lies before `at_bytes` to continue.

    Attributes:
        size_bytes: bytes appended so far, those before `at_bytes` included.
        crc32c: of the bytes appended by this object.
        sums: CRC32C of each 4 MiB window of the file so far, or None.

    Every method can raise WriteError, DiskFullError and DeadlineExceededError; what `sync` has once
    accepted stays on disk.
    """

    def __init__(
        self,
        engine: NativeEngine,
        path: str | os.PathLike[str],
        *,
        at_bytes: int = 0,
        buffer_bytes: int = WINDOW_BYTES,
        sums: Sequence[int] | None = None,
    ):
        self._engine, self.path = engine, os.fspath(path)
        self._file = engine.open(path, "r+" if at_bytes else "w")
        self._buffers = [aligned_empty(buffer_bytes), aligned_empty(buffer_bytes)]
        self._views = [buffer.numpy() for buffer in self._buffers]
        self._pending: list[Future | None] = [None, None]
        self._turn, self._fill = 0, at_bytes % BLOCK_BYTES
        self._flushed_bytes = at_bytes - self._fill  # where the current buffer begins in the file
        self.crc32c = 0
        self.sums = None if sums is None else list(sums)
        if self._fill:
            try:
                self._views[0][: self._fill] = read_range(
                    engine, self._file, self._flushed_bytes, self._fill
                )
            except BaseException:
                engine.close_file(self._file)
                raise

    @property
    def size_bytes(self) -> int:
        return self._flushed_bytes + self._fill

    def write(self, data: np.ndarray | bytes | memoryview) -> int:
        """Appends bytes; returns how many, before they are on disk."""
        view = np.frombuffer(data, dtype=np.uint8)
        self.crc32c = crc32c(view, self.crc32c)
        if self.sums is not None:
            self._add_to_sums(self.sums, view)
        done = 0
        while done < view.size:
            target = self._views[self._turn]
            count = min(view.size - done, target.size - self._fill)
            target[self._fill : self._fill + count] = view[done : done + count]
            self._fill += count
            done += count
            if self._fill == target.size:
                self._start_write(self._fill)
                self._flushed_bytes += self._fill
                self._fill = 0
                self._turn ^= 1
                self._wait(self._turn)
        return view.size

    def _add_to_sums(self, sums: list[int], view: np.ndarray) -> None:
        at, done = self.size_bytes, 0
        while done < view.size:
            inside = (at + done) % WINDOW_BYTES
            part = view[done : done + WINDOW_BYTES - inside]
            if inside == 0:
                sums.append(0)
            sums[-1] = crc32c(part, sums[-1])
            done += part.size

    def pad(self, alignment_bytes: int) -> None:
        """Appends zeros up to a multiple of `alignment_bytes`."""
        self.write(bytes(-self.size_bytes % alignment_bytes))

    def sync(self) -> None:
        """Brings everything appended so far to the device. The file then has exactly `size_bytes`
        bytes."""
        used = -(-self._fill // BLOCK_BYTES) * BLOCK_BYTES
        if used:
            self._views[self._turn][self._fill : used] = 0
            self._start_write(used)
        self._wait(0)
        self._wait(1)
        self._engine.truncate(self._file, self.size_bytes)
        self._engine.sync(self._file)
        whole = self._fill // BLOCK_BYTES * BLOCK_BYTES
        if whole:  # the unfinished block is written again with what follows
            view = self._views[self._turn]
            self._flushed_bytes += whole
            self._fill -= whole
            view[: self._fill] = view[whole : whole + self._fill].copy()

    def _start_write(self, size_bytes: int) -> None:
        plan = Plan.of(self._file, [self._flushed_bytes], [size_bytes], [0])
        self._pending[self._turn] = self._engine.write(plan, self._buffers[self._turn])

    def _wait(self, turn: int) -> None:
        future, self._pending[turn] = self._pending[turn], None
        if future is not None:
            future.wait()

    def close(self) -> None:
        """Waits for what is being written and closes the file. Call `sync` before it to keep
        everything."""
        try:
            self._wait(0)
        finally:
            try:
                self._wait(1)
            finally:
                self._engine.close_file(self._file)

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            return self.close()
        try:  # the first error is the one to tell
            self.close()
        except errors.EspnxError:
            pass


def read_range(
    engine: NativeEngine, file: FileHandle, offset_bytes: int, size_bytes: int
) -> np.ndarray:
    """Bytes [offset, offset + size) of an open file, as a uint8 array of their own."""
    if size_bytes == 0:
        return np.empty(0, dtype=np.uint8)
    future = engine.read(Plan.of(file, [offset_bytes], [size_bytes]))
    memory = future.wait()
    begin = int(future.position_bytes[0])
    return memory.numpy()[begin : begin + size_bytes].copy()


def read_region(engine: NativeEngine, region: Region) -> np.ndarray:
    """Reads as `read_range` does, from a file that is opened for it. Raises TruncatedFileError
    where it ends before."""
    file = engine.open(region.path)
    try:
        return read_range(engine, file, region.offset_bytes, region.size_bytes)
    finally:
        engine.close_file(file)


def read_windows(
    engine: NativeEngine, path: str | os.PathLike[str], *, sums: Sequence[int] | None = None
) -> Iterator[np.ndarray]:
    """A file in order, in windows of 4 MiB, reading one window ahead. Each array is valid until the
    next one.

    `sums`: the CRC32C of each window, checked before it is handed out. Raises ChecksumError, or
    TruncatedFileError for another length.
    """
    file = engine.open(path)
    try:
        starts = range(0, file.size_bytes, WINDOW_BYTES)
        if sums is not None and len(sums) != len(starts):
            raise errors.TruncatedFileError(
                "file has another size than was written",
                path=path,
                got=f"{file.size_bytes} bytes",
                expected=f"{len(sums)} windows of {WINDOW_BYTES} bytes",
            )
        sizes = [min(WINDOW_BYTES, file.size_bytes - start) for start in starts]
        ahead: list[Future] = []
        for number in range(len(starts) + 1):
            if number < len(starts):
                plan = Plan.of(
                    file,
                    [starts[number]],
                    [sizes[number]],
                    crc32c=None if sums is None else [sums[number]],
                )
                ahead.append(engine.read(plan))
            if number:
                future = ahead.pop(0)
                at = int(future.position_bytes[0])
                yield future.wait().numpy()[at : at + sizes[number - 1]]
    finally:
        engine.close_file(file)


def regroup(windows: Iterator[np.ndarray], size_bytes: int) -> Iterator[np.ndarray]:
    """The same bytes in arrays of `size_bytes` (the last one shorter), each of its own."""
    parts: list[np.ndarray] = []
    have = 0
    for window in windows:
        done = 0
        while done < window.size:
            part = window[done : done + size_bytes - have].copy()
            parts.append(part)
            have, done = have + part.size, done + part.size
            if have == size_bytes:
                yield np.concatenate(parts)
                parts, have = [], 0
    if have:
        yield np.concatenate(parts)


def read_file(
    engine: NativeEngine, path: str | os.PathLike[str], *, sums: Sequence[int] | None = None
) -> bytes:
    """A whole small file. `sums`: as of `read_windows`."""
    return b"".join(window.tobytes() for window in read_windows(engine, path, sums=sums))


def file_sums(engine: NativeEngine, path: str | os.PathLike[str]) -> tuple[int, list[int]]:
    """CRC32C of a whole file and of each of its windows (what `read_windows` checks), in bounded
    memory."""
    total, sums = 0, []
    for window in read_windows(engine, path):
        total = crc32c(window, total)
        sums.append(crc32c(window))
    return total, sums


def write_file(
    engine: NativeEngine, path: str | os.PathLike[str], data: bytes | np.ndarray
) -> tuple[int, int]:
    """Writes a whole file and flushes it. Returns its size and CRC32C."""
    with StreamWriter(
        engine,
        path,
        buffer_bytes=min(
            WINDOW_BYTES, max(BLOCK_BYTES, -(-len(data) // BLOCK_BYTES) * BLOCK_BYTES)
        ),
    ) as writer:
        writer.write(data)
        writer.sync()
        return writer.size_bytes, writer.crc32c


def replace_file(engine: NativeEngine, path: str | os.PathLike[str], data: bytes) -> None:
    """Puts a file in place atomically: after a crash there is the old one or the new one, whole.

    The new one is read back first, so that a device that lost or bent it does not take the old one
    away.
    """
    target = os.fspath(path)
    temporary = target + ".new"
    # of a process that was killed; a link, which others may have put there, is not followed
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    _, written = write_file(engine, temporary, data)
    found, _ = file_sums(engine, temporary)
    if found != written:
        raise errors.ChecksumError(
            "file is not what was written",
            path=temporary,
            got=f"CRC32C {found:08x}",
            expected=f"{written:08x}",
        )
    engine.rename(temporary, target)
    engine.sync_directory(os.path.dirname(target) or ".")
