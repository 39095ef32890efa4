"""Who uses which extent of a library: locks of bytes of one file, one byte an extent.

The kernel lets go of them when a process ends, however it ends. So nothing that was killed keeps an
extent from being evicted, and an extent that nobody is writing any more is known to be half
written. The locks belong to an open file (`F_OFD_SETLK`), not to a process: two libraries in one
process are as strange to one another as two processes.
"""

from __future__ import annotations

import errno as codes
import fcntl
import os
import struct
import weakref
from collections import Counter
from collections.abc import Collection

from ...storage.files import write_error

_FLOCK = "@hhqqi0q"  # type, whence, begin, length, process


class Pins:
    """The extents that this open library uses or writes. Not for several threads at once.

    Args:
        path: of the file; made where it is missing. Raises WriteError.
    """

    def __init__(self, path: str):
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise write_error("cannot open the locks of a library", path, error) from error
        # a library that is dropped without being closed does not keep its locks
        self._end = weakref.finalize(self, os.close, self._fd)
        self._used, self._written = Counter[int](), set[int]()

    def use(self, number: int) -> bool:
        """Pins an extent, as often as it is asked; False where somebody else writes or removes
        it."""
        if not self._used[number] and not self._lock(number, fcntl.F_RDLCK):
            return False
        self._used[number] += 1
        return True

    def leave(self, number: int) -> None:
        """The end of one `use`."""
        self._used[number] -= 1
        if self._used[number] <= 0:
            del self._used[number]
            self._lock(number, fcntl.F_UNLCK)

    def take(self, number: int) -> bool:
        """Has an extent alone, to write or to remove it; False where somebody uses it, this library
        included."""
        if self._used[number] or number in self._written:
            return False
        if not self._lock(number, fcntl.F_WRLCK):
            return False
        self._written.add(number)
        return True

    def drop(self, number: int) -> None:
        """The end of `take`."""
        self._written.discard(number)
        self._lock(number, fcntl.F_UNLCK)

    def share(self, number: int) -> None:
        """What was taken is written: from here on it is used."""
        self._written.discard(number)
        self._lock(number, fcntl.F_RDLCK)
        self._used[number] += 1

    def _lock(self, number: int, kind: int) -> bool:
        try:
            fcntl.fcntl(
                self._fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, number, 1, 0)
            )
        except OSError as error:
            if error.errno in (codes.EAGAIN, codes.EACCES):
                return False
            raise
        return True

    @property
    def is_closed(self) -> bool:
        return self._fd < 0

    def keep_only(self, numbers: Collection[int]) -> None:
        """Leaves and drops everything but extents that were taken."""
        for number in {*self._used, *self._written}.difference(numbers):
            self._lock(number, fcntl.F_UNLCK)
        self._used.clear()
        self._written.intersection_update(numbers)

    def close(self) -> None:
        """Leaves and drops everything."""
        if self._fd >= 0:
            self._end()
            self._fd = -1
