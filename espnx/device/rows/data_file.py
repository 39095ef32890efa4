"""The file that a device keeps rows in, and the engine that has it open."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Collection

from ... import errors
from ...storage import NativeEngine
from ...storage.files import make_given_directory
from .writes import PutWrite, wait_over

#: Closing a file whose engine is the caller's waits for so long for what is in flight to it, where
#: it stays.
CLOSE_S = 5.0


class DataFile:
    """An open file for rows, of mode 0600.

    Args:
        directory: on the disk.
        name: None: the file loses the one it gets (`unname`), and its space returns when the
            process ends, however it ends.
        engine: a storage engine; a name opens one of its own.
        pool_bytes: of an engine of its own.

    Attributes:
        engine: as given, or its own.
        handle: of the file.
        stays: it has a name of its own.

    Raises:
        WriteError: the directory cannot be written.
        PathUnavailableError: the engine cannot be had here.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str | None,
        engine: NativeEngine | str,
        pool_bytes: int,
    ):
        self.stays, self._owns_engine = name is not None, isinstance(engine, str)
        self.engine = (
            NativeEngine(engine, pool_bytes=pool_bytes) if isinstance(engine, str) else engine
        )
        self._path = _path(directory, name)
        try:
            _create(self._path)
            self.handle = self.engine.open(self._path, "r+")
        except BaseException:
            self.unname()
            if self._owns_engine:
                self.engine.close()
            raise

    def unname(self) -> None:
        """Takes its name away, unless it stays: nothing opens it by that any more."""
        if not self.stays:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def close(self, writes: Collection[PutWrite] = ()) -> None:
        """Ends what is in flight to the file, these writes, and closes it; an engine of its own,
        too. Waits for them for a while where the engine is the caller's and the file stays."""
        if self._owns_engine:
            self.engine.close()
            return
        if self.stays:
            wait_over(writes, CLOSE_S)
        with contextlib.suppress(errors.EngineClosedError):  # which closed its files
            self.engine.close_file(self.handle)


def check_place(
    directory: str | os.PathLike[str],
    *,
    engine: NativeEngine | str = "auto",
    name: str | None = None,
) -> None:
    """Raises what opening a `DataFile` would raise of the directory and of the path, and leaves
    nothing there but the directory."""
    path = _path(directory, name)
    is_new = not os.path.exists(path)
    _create(path)
    if is_new:
        with contextlib.suppress(OSError):
            os.unlink(path)
    if isinstance(engine, str) and engine != "auto":  # which can be had everywhere
        NativeEngine(engine, pool_bytes=0).close()


def _path(directory: str | os.PathLike[str], name: str | None) -> str:
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
