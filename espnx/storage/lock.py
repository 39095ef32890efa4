"""One writer per store: an advisory lock that dies with its process."""

from __future__ import annotations

import fcntl
import os
import stat
from types import TracebackType

from .. import errors
from .files import write_error

LOCK_NAME = "LOCK"


class DirectoryLock:
    """Holds `directory`/LOCK exclusively for as long as it is entered.

    Raises:
        StoreBusyError: another process holds it; says which.
        FormatError: LOCK is a link, a pipe, a directory.
        WriteError, DiskFullError: the directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._path = os.path.join(directory, LOCK_NAME)
        self._fd = -1

    def __enter__(self) -> DirectoryLock:
        self._lock()
        # whoever removed the directory's content took the lock file with it, before our lock of it
        while not self._is_there():
            os.close(self._fd)
            self._lock()
        try:
            os.truncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(self._fd)
            raise write_error("cannot write lock file", self._path, error) from error
        return self

    def _lock(self) -> None:
        try:
            is_plain = stat.S_ISREG(os.lstat(self._path).st_mode)
        except OSError:  # nothing is there, or what was is being removed: opening tells
            is_plain = True
        if not is_plain:
            raise errors.FormatError(
                "the lock file is not a plain file",
                path=self._path,
                fix="remove it: it is made again",
            )
        try:
            self._fd = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise write_error(
                "cannot create lock file",
                self._path,
                error,
                fix="choose a directory you may write to",
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 64, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise errors.StoreBusyError(
                "the store is being written",
                path=self._path,
                got=f"a lock held by process {holder or 'unknown'}",
                fix="wait until that process is done",
            ) from error

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except OSError:
            return False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)
