"""Space inside one data file: handed out first fit, returned, merged."""

from __future__ import annotations

import bisect
import errno as codes
import os
import resource

from ... import errors
from ...storage import NativeEngine
from ...storage.engine import FileHandle
from ...storage.native import load_native

_GROW_BYTES = 64 << 20
_LARGEST_FILE_BYTES = 2**63 - 1  # that the kernel counts


class Extents:
    """Parts of a file. Not for several threads at once.

    Args:
        engine, file: of the data file.
        reserved_bytes: reserved at once, so that a full disk shows now. Raises DiskFullError with
            bytes needed and free.

    Attributes:
        used_bytes: handed out now.
        size_bytes: of the file.
    """

    def __init__(self, engine: NativeEngine, file: FileHandle, reserved_bytes: int = 0):
        self._engine, self._file = engine, file
        self._free: list[tuple[int, int]] = []  # (offset, size), sorted, never adjacent
        self.used_bytes = self.size_bytes = 0
        self._is_reserved = False
        if reserved_bytes:
            self.reserve(reserved_bytes)

    def take(self, size_bytes: int) -> int:
        """Offset of `size_bytes` that nobody else has. Raises DiskFullError; nothing changes
        then."""
        at = next((i for i, (_, size) in enumerate(self._free) if size >= size_bytes), None)
        if at is None:
            tail = (
                self._free[-1]
                if self._free and sum(self._free[-1]) == self.size_bytes
                else (self.size_bytes, 0)
            )
            need = size_bytes - tail[1]
            try:
                self._grow(max(need, _GROW_BYTES))
            except errors.DiskFullError:
                self._grow(need)
            at = len(self._free) - 1
        offset, size = self._free[at]
        self._free[at : at + 1] = (
            [(offset + size_bytes, size - size_bytes)] if size > size_bytes else []
        )
        self.used_bytes += size_bytes
        return offset

    def give_back(self, offset: int, size_bytes: int) -> None:
        """Returns what `take` gave, or a part of it."""
        self.used_bytes -= size_bytes
        self._add(offset, size_bytes)

    def claim(self, offset: int, size_bytes: int) -> None:
        """Takes a place that is known to be in use (of a file that was kept). Raises FormatError
        where it is taken already."""
        if offset + size_bytes > self.size_bytes:
            self._add(self.size_bytes, offset + size_bytes - self.size_bytes)
            self.size_bytes = offset + size_bytes
        at = bisect.bisect_right(self._free, (offset, 2**63)) - 1
        begin, size = self._free[at] if at >= 0 else (0, 0)
        if not begin <= offset or offset + size_bytes > begin + size:
            raise errors.FormatError(
                "two pieces claim one place",
                path=self._file.path,
                offset_bytes=offset,
                size_bytes=size_bytes,
            )
        parts = [(begin, offset - begin), (offset + size_bytes, begin + size - offset - size_bytes)]
        self._free[at : at + 1] = [part for part in parts if part[1]]
        self.used_bytes += size_bytes

    def shrink(self) -> None:
        """Cuts off what nobody has taken at the end of the file, unless it was reserved."""
        if self._free and sum(self._free[-1]) == self.size_bytes and not self._is_reserved:
            offset, _ = self._free.pop()
            self._engine.truncate(self._file, offset)
            self.size_bytes = offset

    def reserve(self, size_bytes: int) -> None:
        """Makes sure that there is room for `size_bytes` beside what is taken now. Raises
        DiskFullError with bytes needed and free."""
        missing = size_bytes - (self.size_bytes - self.used_bytes)
        if missing > 0:
            self._grow(missing)
        self._is_reserved = True

    def _grow(self, by_bytes: int) -> None:
        if self.size_bytes + by_bytes > _LARGEST_FILE_BYTES:
            raise self._too_large(by_bytes)
        free_bytes = load_native().free_bytes(os.fsencode(os.path.dirname(self._file.path) or "."))
        try:
            if (
                not self._engine.allocate(self._file, self.size_bytes + by_bytes)
                and by_bytes > free_bytes > 0
            ):
                raise errors.DiskFullError(
                    "no room for rows",
                    needed_bytes=by_bytes,
                    free_bytes=free_bytes,
                    path=self._file.path,
                )
        except errors.WriteError as error:
            if error.errno == codes.EFBIG:
                raise self._too_large(by_bytes) from error
            if error.errno != codes.ENOSPC:
                raise
            free_bytes = getattr(error, "free_bytes", free_bytes)
            raise errors.DiskFullError(
                "no room for rows",
                needed_bytes=by_bytes,
                free_bytes=free_bytes,
                path=self._file.path,
            ) from error
        self._add(self.size_bytes, by_bytes)
        self.size_bytes += by_bytes

    def _too_large(self, by_bytes: int) -> errors.DiskFullError:
        """The disk may have room, but not the file: of a process with a limit of file sizes, or in
        a file system with one."""
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        is_own = limit != resource.RLIM_INFINITY and self.size_bytes + by_bytes > limit
        return errors.DiskFullError(
            "no room for rows: the file would be larger than "
            + ("this process may write" if is_own else "the file system takes"),
            needed_bytes=by_bytes,
            free_bytes=max(limit - self.size_bytes, 0) if is_own else 0,
            path=self._file.path,
            fix="raise the limit (`ulimit -f unlimited`)"
            if is_own
            else "name more directories in other file systems: each has a file",
        )

    def _add(self, offset: int, size_bytes: int) -> None:
        at = bisect.bisect_left(self._free, (offset, 0))
        begin, end = offset, offset + size_bytes
        if at < len(self._free) and self._free[at][0] == end:
            end += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == begin:
            begin = self._free.pop(at - 1)[0]
        bisect.insort(self._free, (begin, end - begin))
