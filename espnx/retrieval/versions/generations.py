"""Generations of a store: every version writes files under new names; the manifest says which are
live; what nothing names is removed.

STORE/MANIFEST.json      names the live generation
STORE/gen-000002/        its files
DIR/espnx-ID/            its data segments on another SSD, see places.py
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from ...storage.files import make_directory
from ...storage.manifest import NAME as MANIFEST_NAME
from ..store.manifest import Manifest
from ..store.places import (
    GENERATION,
    data_paths,
    leave,
    make_home,
    remove_building,
    remove_generation,
    tidy,
)


def name(generation: int) -> str:
    return f"gen-{generation:06d}"


def following(path: str, generation: int) -> int:
    """The generation after this one whose directory is not there yet: what lies in another's would
    become part of the new one."""
    return max([generation, *(int(entry[4:]) for entry in names_in(path))]) + 1


def names_in(path: str) -> list[str]:
    """The generation directories that lie in a store's."""
    return [entry for entry in os.listdir(path) if GENERATION.fullmatch(entry)]


def remove_others(path: str, keep: set[str]) -> None:
    """Removes the generations that lie in a store's directory, all but some."""
    for entry in names_in(path):
        if entry not in keep:
            remove_generation(os.path.join(path, entry))


def manifest_file(path: str) -> int:
    """Which file is the manifest (0: none): another one after every publication. Asked without an
    engine, which may be what fails."""
    try:
        return os.stat(os.path.join(path, MANIFEST_NAME)).st_ino
    except OSError:
        return 0


def data_directories(
    root: str, directories: Sequence[str], store_id: str, generation: int
) -> list[str]:
    """Makes the directories of a generation's segments; returns them as paths that the manifest can
    hold."""
    if not directories:
        return [name(generation)]
    result = []
    for directory in directories:
        target = os.path.join(make_home(root, directory, store_id), name(generation))
        make_directory(target)
        result.append(target)
    return result


def discard_part(path: str, file: str) -> None:
    """Removes a part that was written and is not needed after all. `file`: its path as a manifest
    would have it."""
    remove_generation(os.path.dirname(os.path.join(path, file)))


def directories_of(manifest: Manifest) -> set[str]:
    """The generation directories that a manifest refers to."""
    deleted = manifest.deleted
    return {part.directory for part in manifest.parts} | (
        {os.path.dirname(deleted.path)} if deleted else set()
    )


def clean(path: str, live: Manifest, replaced: Manifest | None = None) -> None:
    """Removes what no manifest refers to: changes that ended, failed or crashed, parts that were
    compacted away. Readers that have such files open keep them until they close."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(path, f"{MANIFEST_NAME}.new"))
    remove_building(path)
    remove_others(path, directories_of(live))
    tidy(path, live.store_id, live.directories, data_paths(live))
    if replaced is not None and replaced.store_id != live.store_id:
        leave(path, replaced.store_id, replaced.directories)
