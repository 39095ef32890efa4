"""Folders of a graph in the directories that its pages lie in, each named after its salt."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ... import errors
from ...storage import NativeEngine
from ...storage.files import make_given_directory, write_error
from ..format import NODES
from ..parts import home_of
from .directory import read_graph_manifest

_FILE = NODES.partition(".")[0]


def homes_in(manifest: Mapping[str, Any]) -> set[str]:
    """Folders of a graph in other directories than its own, as its manifest names them."""
    try:
        salt = int(manifest["salt"], 16)
        return {home_of(each, salt) for each in manifest.get("directories", ())}
    except (KeyError, TypeError, ValueError):
        return set()


def make_homes(directories: Sequence[str], salt: int) -> None:
    """Makes a graph's folder in each directory. Raises WriteError, DiskFullError, as
    `make_given_directory`."""
    for each in directories:
        make_given_directory(each)
        make_given_directory(home_of(each, salt))


def sync_homes(homes: Iterable[str]) -> None:
    """Brings the names of files in these folders to the device. Raises WriteError."""
    for home in homes:
        try:
            folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some file systems have nothing to flush
                raise write_error("cannot flush a directory of pages", home, error) from error


def keep_pages(homes: Iterable[str], paths: Collection[str]) -> None:
    """Removes all files of pages in folders of a graph beside these; what cannot be removed stays
    until a later version."""
    for home in homes:
        with contextlib.suppress(OSError):
            for name in os.listdir(home):
                path = os.path.join(home, name)
                if name.partition(".")[0] == _FILE and path not in paths:
                    os.unlink(path)


def homes_of(engine: NativeEngine, path: str) -> set[str]:
    """Folders of a graph in other directories; none where its manifest cannot be read."""
    try:
        return homes_in(read_graph_manifest(engine, path))
    except errors.EspnxError:
        return set()


def remove_homes(homes: set[str]) -> None:
    """Removes folders of graphs, with nothing in them but pages; what cannot be removed stays."""
    for home in homes:
        with contextlib.suppress(OSError):
            for name in os.listdir(home):
                if name.partition(".")[0] == _FILE:
                    os.unlink(os.path.join(home, name))
            os.rmdir(home)
