"""Every failure espnx can raise, one class each.

A message always says what was attempted, what was got, what was expected and what to do about it.
The same facts are attributes, so that a caller can act on them without parsing text. Classes also
derive from the built-in exception a Python programmer would expect (``ValueError``, ``OSError``,
``TimeoutError``), so existing ``except`` clauses keep working.
"""

from __future__ import annotations

import errno as codes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_TOO_MANY_FILES_FIX = (
    "raise the limit of open files (`ulimit -n`), close what is not needed, or lower the number of "
    "a store's files (`espnx index compact`; of posting lists `espnx postings compact`)"
)
_TOO_MANY_TO_COMPACT_FIX = (
    "raise the limit of open files (`ulimit -n`), close what is not needed, and compact again"
)


class EspnxError(Exception):
    """Base of everything espnx raises on purpose.

    Args:
        what: what was being done, and to what.
        got: what was found instead.
        expected: what would have been right.
        fix: what the reader can do about it.
    """

    def __init__(
        self, what: str, *, got: object = None, expected: object = None, fix: str | None = None
    ):
        self.what, self.got, self.expected, self.fix = what, got, expected, fix
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.what]
        if self.got is not None:
            parts.append(f"got {self.got}")
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        return "; ".join(parts) + (f". Fix: {self.fix}" if self.fix else "")


class InvalidInputError(EspnxError, ValueError):
    """An argument has the wrong shape, dtype, range or content."""


class StateError(EspnxError, RuntimeError):
    """A call that the object does not take now: a step before it is missing, another call is under
    way, or it is closed."""


class MissingDependencyError(EspnxError, ImportError):
    """An optional package, library or compiled part is not installed."""


class PathUnavailableError(EspnxError):
    """A data path that the caller named (``uring``, ``gds``, ...) cannot be had here. ``auto``
    would have fallen back, and said so."""


class OutOfMemoryError(EspnxError, MemoryError):
    """Memory of the host or of a GPU is used up.

    Attributes:
        needed_bytes: of one piece, or None where that is not known.
        free_bytes: how many were free at the time, or None.
    """

    def __init__(
        self,
        what: str,
        *,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
        fix: str | None = None,
    ):
        super().__init__(
            what,
            got=None if free_bytes is None else f"{free_bytes} bytes free",
            expected=None if needed_bytes is None else f"{needed_bytes} bytes in one piece",
            fix=fix or "drop results in use, shorten the read-ahead, or use a smaller batch",
        )
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class TimesNotValidError(EspnxError):
    """Too much of an emulated run's time was this machine's, and not the emulated devices'. Its
    results are right; its times say nothing of the devices.

    Attributes:
        stretch_to_use: wall seconds of a virtual second with which they would; infinite where no
            device was waited for.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
        stretch_to_use: float,
    ):
        super().__init__(what, got=got, expected=expected, fix=fix)
        self.stretch_to_use = stretch_to_use


class EngineClosedError(EspnxError):
    """The storage engine was closed before or during the call."""


class StorageError(EspnxError, OSError):
    """Something went wrong with bytes on storage. Names the place.

    Attributes:
        path: the file.
        offset_bytes: where in the file the failing request began, or None.
        size_bytes: how long the failing request was, or None.
        errno: the operating system's error number, or None.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str | os.PathLike[str] | None = None,
        offset_bytes: int | None = None,
        size_bytes: int | None = None,
        errno: int | None = None,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
    ):
        if path is not None:
            what += f" in {os.fspath(path)}"
        if offset_bytes is not None:
            what += f" at offset {offset_bytes}"
        if size_bytes is not None:
            what += f", {size_bytes} bytes"
        if errno and got is None:
            got = os.strerror(errno)
        if errno in (codes.EMFILE, codes.ENFILE):  # whatever was attempted
            fix = _TOO_MANY_FILES_FIX
        EspnxError.__init__(self, what, got=got, expected=expected, fix=fix)
        self.path = None if path is None else os.fspath(path)
        self.offset_bytes, self.size_bytes, self.errno = offset_bytes, size_bytes, errno

    __str__ = Exception.__str__  # OSError would print only errno and strerror


@contextmanager
def while_compacting() -> Iterator[None]:
    """Keeps an error because of too many open files from advising to compact the store, which is
    under way."""
    try:
        yield
    except StorageError as error:
        if error.errno in (codes.EMFILE, codes.ENFILE):
            error.fix = _TOO_MANY_TO_COMPACT_FIX
            error.args = (error._message(),)
        raise


class ReadError(StorageError):
    """The device or the file system failed a read (EIO and its relatives)."""


class WriteError(StorageError):
    """The device or the file system failed a write, a flush or a change of a directory."""


class ShortReadError(ReadError):
    """Fewer bytes came than the file holds, again and again, until the retries were used up."""


class TruncatedFileError(StorageError):
    """A file ends before the bytes that were asked for."""


class DiskFullError(WriteError):
    """No space left.

    Attributes:
        needed_bytes: how many bytes the operation still needs.
        free_bytes: how many were free in that file system at the time.
    """

    def __init__(
        self,
        what: str,
        *,
        needed_bytes: int,
        free_bytes: int,
        path: str | os.PathLike[str] | None = None,
        fix: str | None = None,
    ):
        super().__init__(
            what,
            path=path,
            errno=codes.ENOSPC,
            got=f"{free_bytes} bytes free",
            expected=f"at least {needed_bytes} bytes free",
            fix=fix
            or "free space in that file system (or choose another directory) and run the same "
            "command again",
        )
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class DeadlineExceededError(StorageError, TimeoutError):
    """An I/O did not complete in time. Its buffer is quarantined: kept alive and counted until the
    device lets go of it."""


class TransferCancelledError(StorageError):
    """A read or a write that its caller, or somebody on the caller's behalf, has called off. The
    engine is usable; nothing is wrong."""


class DeviceFailedError(StorageError):
    """A near-storage device has died, or its reply is what cannot be. Names the device; what lies
    on others is intact."""


class ChecksumError(StorageError):
    """Bytes were read whole, but are not the bytes that were written."""


class StaleDataError(ChecksumError):
    """A valid record arrived, but it is another one than the one asked for."""


class FormatError(StorageError):
    """A file is damaged, or is not of this format, version or byte order."""


class ForeignFileError(FormatError):
    """A file is well-formed but belongs to another store."""


class FileMissingError(StorageError, FileNotFoundError):
    """There is no file of that name."""


class SharedDataError(StorageError):
    """The data of a store are not its own: it is a copy that names another store's data
    directories. It can be read, and not changed."""


class StoreNotFoundError(FileMissingError):
    """There is no published store in that directory."""


class StoreBusyError(StorageError):
    """Another process is writing this store."""


class NotConformingError(EspnxError):
    """A near-storage device does not do what every one of them must (`espnx device verify`)."""
