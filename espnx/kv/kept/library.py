"""The kept caches of a directory: their names, locks, sizes; which go when there are too many bytes
of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass

import numpy as np
import torch

from ... import errors
from ...storage import NativeEngine
from ...storage.manifest import NAME as MANIFEST
from ..cache import SsdCache
from ..striping import Storage, directories_of
from .folders import LOCK, USED, KeptName, check_name, folders_of, is_kept, lock, remove_files
from .format import FIX, read_kept
from .state import ROWS_NAME, load


@dataclass(frozen=True)
class Entry:
    """A kept cache.

    Attributes:
        model: class of the model; ``damaged``: it cannot be opened; ``unsaved``: nothing was saved
            yet (or a process was killed before).
        sequences, tokens: tokens of each sequence.
        directories: over how many it is spread.
        size_bytes: on disk, in the directories that were given.
        last_used_s: seconds since 1970.
        is_open: by a process.
    """

    name: str
    model: str
    sequences: int
    tokens: int
    directories: int
    size_bytes: int
    last_used_s: float
    is_open: bool


def entries(storage: Storage) -> list[Entry]:
    """The kept caches of a directory (or several that share them), the least recently used first.
    Raises StoreNotFoundError."""
    roots, found = directories_of(storage), list[Entry]()
    try:
        names = sorted(os.listdir(roots[0]))
    except OSError as error:
        raise errors.StoreNotFoundError(
            "no directory of kept caches", path=roots[0], errno=error.errno
        ) from error
    with NativeEngine(pool_bytes=1 << 20) as engine:
        for name in names:
            if is_kept(os.path.join(roots[0], name)):
                try:
                    found.append(_entry(engine, roots, name))
                except FileNotFoundError:  # somebody has removed it since
                    continue
    return sorted(found, key=lambda entry: entry.last_used_s)


def _entry(engine: NativeEngine, roots: list[str], name: str) -> Entry:
    directory = os.path.join(roots[0], name)
    folders, directories = folders_of(roots, name)
    model, sequences, tokens = "unsaved", 0, 0
    if os.path.exists(os.path.join(directory, MANIFEST)):
        try:
            kept = read_kept(engine, directory)
            model, sequences, tokens = (
                str(kept.fingerprint.get("model", "")),
                kept.sequences,
                kept.tokens,
            )
        except FileNotFoundError:
            raise
        except errors.StorageError:
            model = "damaged"
    return Entry(
        name,
        model,
        sequences,
        tokens,
        directories,
        sum(map(_size, folders)),
        _last_used(directory),
        _is_open(directory),
    )


def remove(storage: Storage, name: str) -> None:
    """Removes a kept cache, or what is left of one; somebody's own files in its folders stay.

    Raises StoreNotFoundError, StoreBusyError, WriteError; InvalidInputError where it has more
    directories than were given.
    """
    check_name(name)
    roots = directories_of(storage)
    directory = os.path.join(roots[0], name)
    if not is_kept(directory):
        raise errors.StoreNotFoundError(
            "no kept cache of that name", path=directory, fix="see `espnx cache ls`"
        )
    with contextlib.ExitStack() as stack:
        folders, count = folders_of(roots, name)
        if count > len(folders):
            raise errors.InvalidInputError(
                f"directories of {name}", got=len(folders), expected=count, fix="name all of them"
            )
        for folder in folders:
            lock(folder, stack)
        is_gone = not is_kept(directory)  # somebody was faster, and only this lock file is left
        remove_files(folders)
    if is_gone:
        raise errors.StoreNotFoundError("the kept cache was just removed", path=directory)


def evict(storage: Storage, limit_bytes: int) -> list[str]:
    """Removes the least recently used caches that no process has open, until the rest takes at most
    `limit_bytes`. Returns their names.

    A cache that is spread over more directories than these counts, and stays.
    """
    every = entries(storage)
    total, gone = sum(entry.size_bytes for entry in every), list[str]()
    for entry in every:
        if total <= limit_bytes:
            break
        if entry.is_open:
            continue
        try:
            remove(storage, entry.name)
        except (errors.StoreBusyError, errors.InvalidInputError):
            continue
        except errors.StoreNotFoundError:  # somebody else was faster
            total -= entry.size_bytes
            continue
        total -= entry.size_bytes
        gone.append(entry.name)
    return gone


def verify(storage: Storage, name: str) -> int:
    """Reads a kept cache whole and checks every block. Returns the bytes read.

    Raises StoreNotFoundError, StoreBusyError, ChecksumError, FormatError, TruncatedFileError; a
    damaged block's layer is named.
    """
    check_name(name)
    directory = os.path.join(directories_of(storage)[0], name)
    if not is_kept(directory):
        raise errors.StoreNotFoundError(
            "no kept cache of that name", path=directory, fix="see `espnx cache ls`"
        )
    kept = KeptName(storage, name)
    try:
        with NativeEngine(pool_bytes=1 << 20) as engine:
            n_layers = read_kept(engine, directory).n_layers
        cache = SsdCache(kept.directories, n_layers, names=[ROWS_NAME] * len(kept.directories))
        try:
            load(cache, directory)
            cache.places.open(torch.device("cpu"))
            return sum(_verify_rows(cache, number) for number in range(len(cache.rows.kv)))
        finally:
            cache.close()
    finally:
        kept.unlock()


def _verify_rows(cache: SsdCache, layer: int) -> int:
    """Bytes read of a layer."""
    seen = 0

    def see(memory: torch.Tensor, pieces: np.ndarray) -> None:
        nonlocal seen
        seen += memory.numel()

    for kind, rows in (("X", cache.rows.x[layer]), ("K and V", cache.rows.kv[layer])):
        if rows is not None:
            try:
                cache.striped.visit(
                    cache.striped.ahead(
                        rows.layout, rows.views(rows.stored, range(rows.sequences))
                    ),
                    see,
                )
            except (errors.ChecksumError, errors.TruncatedFileError, errors.ReadError) as error:
                raise type(error)(
                    f"{kind} of layer {layer}",
                    path=error.path,
                    offset_bytes=error.offset_bytes,
                    size_bytes=error.size_bytes,
                    got=error.got,
                    expected=error.expected,
                    fix=error.fix or FIX,
                ) from error
    return seen


def _size(directory: str) -> int:
    """Bytes that the files of a directory take on disk."""
    total = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as files:
        for entry in files:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def _last_used(directory: str) -> float:
    """When it was saved last; of one that never was, when its data file changed."""
    for name in (USED, ROWS_NAME):
        with contextlib.suppress(OSError):
            return os.path.getmtime(os.path.join(directory, name))
    return 0.0


def _is_open(directory: str) -> bool:
    """Changes nothing, so that a listing can be made by whoever may read."""
    try:
        # a pipe in its place would wait
        fd = os.open(os.path.join(directory, LOCK), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
