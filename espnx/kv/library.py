"""The kept caches of a directory: their names, locks, sizes; which go when there are too many bytes of them."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import errors
from ..storage import NativeEngine
from ..storage.lock import DirectoryLock
from ..storage.manifest import NAME as MANIFEST
from ..storage.manifest import read_manifest
from .cache import SsdCache
from .kept import MAGIC, VERSION, load

_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_USED = "LAST_USED"

Storage = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class KeptName:
    """A kept cache's folders, one in each directory, locked for this process until `unlock`.

    Raises InvalidInputError for a name that is no plain file name, StoreBusyError where another process has the cache open.
    """

    def __init__(self, storage: Storage, name: str):
        if not _NAMES.fullmatch(name):
            raise errors.InvalidInputError("name of a cache", got=repr(name), expected="letters, digits, dots, dashes and underscores")
        roots = [storage] if isinstance(storage, (str, os.PathLike)) else list(storage)
        self.directories = [os.path.join(os.fspath(root), name) for root in roots]
        for directory in self.directories:
            try:
                os.makedirs(directory, mode=0o700, exist_ok=True)
            except OSError as error:
                raise errors.WriteError("cannot create the folder of a kept cache", path=directory, errno=error.errno) from error
        self._lock = DirectoryLock(self.directories[0])
        self._lock.__enter__()

    @property
    def exists(self) -> bool:
        """Something was saved."""
        return os.path.exists(os.path.join(self.directories[0], MANIFEST))

    def touch(self) -> None:
        """It was used now."""
        with open(os.path.join(self.directories[0], _USED), "w", encoding="utf-8") as file:
            file.write(f"{time.time():.3f}\n")

    def unlock(self) -> None:
        self._lock.__exit__(None, None, None)


@dataclass(frozen=True)
class Entry:
    """A kept cache. Attributes: sizes in bytes on disk; tokens of each sequence; last_used_s: seconds since 1970; is_open: by a process."""

    name: str
    model: str
    sequences: int
    tokens: int
    size_bytes: int
    last_used_s: float
    is_open: bool


def entries(storage: Storage) -> list[Entry]:
    """The kept caches of a directory (or several that share them), the least recently used first. A damaged one has model ``damaged``."""
    roots = [os.fspath(root) for root in ([storage] if isinstance(storage, (str, os.PathLike)) else storage)]
    found = []
    with NativeEngine(pool_bytes=1 << 20) as engine:
        for name in sorted(os.listdir(roots[0])):
            directory = os.path.join(roots[0], name)
            if not _NAMES.fullmatch(name) or not os.path.exists(os.path.join(directory, MANIFEST)):
                continue
            size_bytes = sum(_size(os.path.join(root, name)) for root in roots)
            try:
                fields = read_manifest(engine, directory, MAGIC, VERSION)
                layers = fields["layers"]
                shape = (fields["fingerprint"].get("model", ""), max((layer["count"] for layer in layers), default=0))
                sequences = max((layer["sequences"] for layer in layers), default=0)
            except errors.FormatError:
                shape, sequences = ("damaged", 0), 0
            found.append(Entry(name, shape[0], sequences, shape[1], size_bytes, _last_used(directory), _is_open(directory)))
    return sorted(found, key=lambda entry: entry.last_used_s)


def remove(storage: Storage, name: str) -> None:
    """Removes a kept cache. Raises StoreNotFoundError, StoreBusyError."""
    roots = [os.fspath(root) for root in ([storage] if isinstance(storage, (str, os.PathLike)) else storage)]
    if not _NAMES.fullmatch(name) or not os.path.exists(os.path.join(roots[0], name, MANIFEST)):
        raise errors.StoreNotFoundError("no kept cache of that name", path=os.path.join(roots[0], name), fix="see `espnx cache ls`")
    with DirectoryLock(os.path.join(roots[0], name)):
        os.unlink(os.path.join(roots[0], name, MANIFEST))  # first: what is left of it is no cache any more
        for root in roots:
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def evict(storage: Storage, limit_bytes: int) -> list[str]:
    """Removes the least recently used caches that no process has open, until the rest takes at most `limit_bytes`. Returns their names."""
    every = entries(storage)
    total, gone = sum(entry.size_bytes for entry in every), list[str]()
    for entry in every:
        if total <= limit_bytes:
            break
        if not entry.is_open:
            try:
                remove(storage, entry.name)
            except errors.StoreBusyError:
                continue
            total -= entry.size_bytes
            gone.append(entry.name)
    return gone


def verify(storage: Storage, name: str) -> int:
    """Reads a kept cache whole and checks every block. Returns the bytes read.

    Raises StoreNotFoundError, StoreBusyError, ChecksumError, FormatError, TruncatedFileError.
    """
    kept = KeptName(storage, name)
    try:
        with NativeEngine(pool_bytes=1 << 20) as engine:
            fields = read_manifest(engine, kept.directories[0], MAGIC, VERSION)
        names = ["rows.bin"] * len(kept.directories)
        cache = SsdCache(kept.directories, fields["n_layers"], names=names)
        try:
            load(cache, kept.directories[0])
            seen = 0

            def see(memory: torch.Tensor, pieces: torch.Tensor) -> None:
                nonlocal seen
                seen += memory.numel()

            for rows in cache.every:
                cache.spread.visit(cache.spread.ahead(rows.layout, rows.uses(rows.stored)), see)
            return seen
        finally:
            cache.close()
    finally:
        kept.unlock()


def _size(directory: str) -> int:
    """Bytes that the files of a directory take on disk."""
    if not os.path.isdir(directory):
        return 0
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False))


def _last_used(directory: str) -> float:
    try:
        return os.path.getmtime(os.path.join(directory, _USED))
    except OSError:
        return 0.0


def _is_open(directory: str) -> bool:
    try:
        with DirectoryLock(directory):
            return False
    except errors.StoreBusyError:
        return True
