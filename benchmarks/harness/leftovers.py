"""What benchmarks leave in a directory to be used again: how large it is, and how it goes away. A
file of its own: it alone removes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from espnx.device.clusters.layout import DATA_NAME, TABLE_NAME
from espnx.retrieval.store.places import remove_building, remove_generation
from espnx.retrieval.versions.generations import names_in
from espnx.storage.lock import LOCK_NAME
from espnx.storage.manifest import NAME as MANIFEST_NAME

from .registry import Case

#: Folders that hold a store beside these are a corpus of the retrieval benchmark.
STORE, NOTES = "store", ("queries.safetensors", "CORPUS.json")


def found(directory: Path, cases: Mapping[str, Case]) -> list[Path]:
    """The leftovers of all cases, ascending."""
    return sorted({path for case in cases.values() for path in case.leaves(directory)})


def size_bytes(path: Path) -> int:
    """Bytes on disk, of a file or of all files of a folder."""
    return sum(file.stat().st_blocks * 512 for file in _files(path))


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    yield from (file for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def remove(path: Path) -> bool:
    """Removes what a case has named; somebody's own files that lie in it stay, and it with them.
    Returns whether it is gone."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return True
    _remove_store(path / STORE if (path / STORE).is_dir() else path)
    for name in (*NOTES, DATA_NAME, TABLE_NAME):
        (path / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()
    return not path.exists()


def _remove_store(path: Path) -> None:
    # first: what a crash leaves is no store any more
    (path / MANIFEST_NAME).unlink(missing_ok=True)
    for name in names_in(str(path)):
        remove_generation(str(path / name))
    remove_building(str(path))
    (path / LOCK_NAME).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()
