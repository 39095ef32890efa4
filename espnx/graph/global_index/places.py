"""Graphs whose clusters lie in several directories, one for each SSD: where they may, and how such
a graph is removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from ... import errors
from ...checks import check_given_directory
from ...storage import NativeEngine
from ...storage.files import write_error
from ...storage.lock import LOCK_NAME, DirectoryLock
from ...storage.manifest import NAME
from ..format import DIRECTORIES_MAX
from ..pages.directory import read_graph_manifest
from ..pages.homes import homes_in, remove_homes
from ..write import forget_graph


def check_directories(path: str, directories: Sequence[str | os.PathLike[str]] | None) -> list[str]:
    """Absolute paths of the directories that pages of a graph go to. Raises InvalidInputError for
    ones that cannot be: too many, one twice, the graph's own."""
    if directories is None:
        return []
    if isinstance(directories, str | bytes | os.PathLike):
        raise errors.InvalidInputError(
            "directories of clusters",
            got=repr(directories),
            expected="a list of directories",
            fix=f"pass [{directories!r}]",
        )
    found = [os.path.abspath(each) for each in directories]
    for each in found:
        check_given_directory(each)
    real = [os.path.realpath(each) for each in found]
    if len(found) > DIRECTORIES_MAX or len(set(real)) < len(real):
        raise errors.InvalidInputError(
            "directories of clusters",
            got=", ".join(found[:4]),
            expected=f"up to {DIRECTORIES_MAX}, each once",
        )
    if os.path.realpath(path) in real:
        raise errors.InvalidInputError(
            "directories of clusters", got=os.fspath(path), expected="others than the graph's own"
        )
    return found


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a graph: its files, its pages in other directories, and its directory, unless that
    has something else in it.

    Raises:
        StoreNotFoundError: there is no graph.
        StoreBusyError: somebody writes to it.
        WriteError: something cannot be removed.
    """
    where = os.fspath(path)
    with NativeEngine("posix", threads=1, pool_bytes=0) as engine:
        homes = homes_in(read_graph_manifest(engine, where))
    with DirectoryLock(where):
        try:
            os.unlink(os.path.join(where, NAME))
            forget_graph(where)
        except OSError as error:
            raise write_error("cannot remove a graph", where, error) from error
        remove_homes(homes)
        with contextlib.suppress(OSError):  # unless something else is there
            os.unlink(os.path.join(where, LOCK_NAME))
            os.rmdir(where)
