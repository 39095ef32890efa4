"""Gives a copy of a store data of its own: what lies in another store's homes is copied, and
nothing there is touched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

from .... import errors
from ....checks import check_path
from ....storage import NativeEngine, ownership
from ....storage.files import StreamWriter, file_sums, make_directory, read_windows
from ....storage.lock import DirectoryLock
from ....storage.manifest import write_manifest
from ....storage.native import given_engine
from ....suggestions import suggests_keywords
from ...store.manifest import MAGIC, Manifest, read_store_manifest
from ...store.part import PartEntry
from ...store.part_file import VERSION
from ...store.places import check_paths, data_paths, make_home, own_home, shared_homes, tidy
from ...store.store import EmbeddingStore
from ...versions import generations
from ..options import BuildOptions
from ..reports import DetachReport


@suggests_keywords
def detach(
    path: str | os.PathLike[str],
    *,
    directories: Sequence[str | os.PathLike[str]] = (),
    adopt: bool = False,
    engine: NativeEngine | None = None,
) -> DetachReport:
    """Makes a store that shares data with another one (a copy of it) independent: every data file
    outside of its own directory is read, checked and copied.

    Args:
        directories: where the copies go, one for each SSD; empty: into the store's directory.
        adopt: copies nothing. The data directories are this store's from now on: for one that was
            moved to another file system, or restored from a backup, and whose original is gone. A
            store that still uses them loses them with the next change of this one.

    Raises:
        StoreNotFoundError, StoreBusyError; ChecksumError, ...: the data are damaged; DiskFullError,
        WriteError: the store stays as it is.
    """
    where = check_path("path of a store", path)
    into = list(BuildOptions.given(directories=directories).directories)
    with given_engine(engine) as owned:
        # before a lock would be made in a directory that is no store
        read_store_manifest(owned, where)
        if adopt and into:
            raise errors.InvalidInputError(
                "adopt", got=f"directories={into}", expected="one of the two"
            )
        with DirectoryLock(where):
            manifest = read_store_manifest(owned, where)
            check_paths(manifest, where)
            return _adopt(where, manifest) if adopt else _copy(owned, where, manifest, into)


def _adopt(where: str, manifest: Manifest) -> DetachReport:
    shared = shared_homes(where, manifest)
    for home in shared:
        if not os.path.isdir(home) or os.path.islink(home):
            raise errors.FormatError("data directory of the store missing", path=home)
    for home in shared:
        ownership.set_mark(home, manifest.store_id, where)
    for directory in manifest.directories:
        make_home(where, directory, manifest.store_id)
    return DetachReport(where, list(manifest.directories), 0, 0, adopted=True)


def _copy(engine: NativeEngine, where: str, manifest: Manifest, into: list[str]) -> DetachReport:
    with EmbeddingStore(where, engine) as store:
        store.verify()
    made, size_bytes, live = list[str](), 0, generations.manifest_file(where)
    parts = list[PartEntry]()
    try:
        for part in manifest.parts:
            targets = generations.data_directories(where, into, manifest.store_id, part.generation)
            moved = dict[str, str]()
            for number, source in enumerate(
                sorted({path for path in part.files if os.path.isabs(path)})
            ):
                target = os.path.join(targets[number % len(targets)], os.path.basename(source))
                if source != target:
                    made.append(os.path.join(where, target))
                    size_bytes += _copy_file(engine, source, made[-1])
                    moved[source] = target
            parts.append(part.moved(moved))
        generation = generations.following(where, manifest.generation)
        changed = replace(
            manifest, directories=tuple(into), generation=generation, parts=tuple(parts)
        )
        for directory in {os.path.dirname(file) for file in made}:
            engine.sync_directory(directory)
        if (changed.parts, changed.directories) != (manifest.parts, manifest.directories):
            write_manifest(engine, where, MAGIC, VERSION, changed.fields())
    except BaseException:
        for file in made if generations.manifest_file(where) == live else ():
            with contextlib.suppress(OSError):
                os.unlink(file)
        raise
    generations.clean(where, changed)
    tidy(
        where,
        manifest.store_id,
        [each for each in manifest.directories if own_home(where, each, manifest.store_id)],
        data_paths(changed),
    )
    return DetachReport(where, into, len(made), size_bytes, adopted=False)


def _copy_file(engine: NativeEngine, source: str, target: str) -> int:
    make_directory(os.path.dirname(target))
    with StreamWriter(engine, target) as writer:
        for window in read_windows(engine, source):
            writer.write(window)
        writer.sync()
    found, _ = file_sums(engine, target)
    if found != writer.crc32c:
        raise errors.ChecksumError(
            "file is not what was written",
            path=target,
            got=f"CRC32C {found:08x}",
            expected=f"{writer.crc32c:08x}",
        )
    return writer.size_bytes
