"""The directory that a build writes to: checked before anything is loaded, and
its own while it lasts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ...checks import check_path
from ...storage import NativeEngine
from ...storage.files import check_given_directory, make_directory
from ...storage.lock import LOCK_NAME, DirectoryLock
from ...storage.native import given_engine
from ...storage.replacing import check_target
from ..store.places import BUILDING
from . import under_way


def check_place(path: str | os.PathLike[str], directories: Sequence[str], *, replace: bool) -> None:
    """What can be told of where a build is to write before a model is loaded. Raises
    InvalidInputError, ReadError."""
    where = check_path("path of a store", path)
    for directory in (where, *directories):
        check_given_directory(directory)
    if os.path.isdir(where):
        check_target(where, under_way.KIND, replace=replace)


@contextmanager
def locked(
    path: str | os.PathLike[str], engine: NativeEngine | None, directories: Sequence[str] = ()
) -> Iterator[tuple[str, NativeEngine]]:
    """A directory that this process alone writes to, made if need be, and an engine. A call that
    fails and has nothing to continue leaves nothing, neither there nor in the directories of
    data."""
    where = check_path("path of a store", path)
    for directory in (where, *directories):
        check_given_directory(directory)
    made = [directory for directory in (where, *directories) if not os.path.lexists(directory)]
    with given_engine(engine) as owned:
        make_directory(where)
        had_lock = os.path.lexists(os.path.join(where, LOCK_NAME))
        with DirectoryLock(where):
            try:
                yield where, owned
            except BaseException:
                if not had_lock:
                    with suppress(OSError):
                        # which the next call continues
                        if not os.path.lexists(os.path.join(where, BUILDING)):
                            os.unlink(os.path.join(where, LOCK_NAME))
                for directory in reversed(made):
                    with suppress(OSError):  # it holds what the next call continues
                        os.rmdir(directory)
                raise
