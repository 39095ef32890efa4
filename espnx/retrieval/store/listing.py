"""The indexes of a directory, told by their manifests: their records and first stages are not
opened."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ... import errors
from ...storage import NativeEngine
from ...storage.manifest import NAME as MANIFEST_NAME
from ...storage.replacing import magic_of
from .manifest import BUILDING, MAGIC, read_store_manifest


@dataclass(frozen=True)
class Entry:
    """An index.

    Attributes:
        state: ``published``, ``unfinished`` (a build was interrupted, or is under way, and nothing
            is published) or ``damaged``; the figures of the last two are 0.
        documents, tokens: that are stored; deleted ones no more.
        encoder: name of the one it was built with, None where documents brought their vectors.
        format: of its records.
        size_bytes: of its files, wherever they lie.
    """

    path: str
    state: str
    documents: int = 0
    tokens: int = 0
    encoder: str | None = None
    format: str | None = None
    size_bytes: int = 0
    generation: int = 0


def entries(directory: str | os.PathLike[str]) -> list[Entry]:
    """The directory itself where it is an index, and those right below it, by name. Raises
    StoreNotFoundError: there is none."""
    where = os.fspath(directory)
    try:
        names = sorted(os.listdir(where))
    except OSError as error:
        raise errors.StoreNotFoundError(
            "no directory of indexes", path=where, errno=error.errno
        ) from error
    with NativeEngine(pool_bytes=1 << 20) as engine:
        found = [
            _entry(engine, path) for path in (where, *(os.path.join(where, name) for name in names))
        ]
    return [each for each in found if each is not None]


def _entry(engine: NativeEngine, path: str) -> Entry | None:
    """None: it is no index."""
    try:
        if magic_of(os.path.join(path, MANIFEST_NAME)) != MAGIC:
            return None
        manifest = read_store_manifest(engine, path)
    except (FileNotFoundError, NotADirectoryError):
        return Entry(path, "unfinished") if os.path.isdir(os.path.join(path, BUILDING)) else None
    except errors.FormatError:
        return Entry(path, "damaged")
    return Entry(
        path,
        "published",
        manifest.count,
        manifest.tokens,
        manifest.encoder.name,
        manifest.schema.format,
        sum(part.data_bytes for part in manifest.parts),
        manifest.generation,
    )
