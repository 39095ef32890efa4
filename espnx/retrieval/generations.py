"""Generations of a store: every build writes files under new names; the manifest says which are live; what crashed builds left is removed.

STORE/MANIFEST.json      names the live generation
STORE/gen-000002/        its files
STORE/building/          the spool and the state of a build under way
DIR/espnx-ID/            its data segments on another SSD, see places.py
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from .. import errors
from ..storage import NativeEngine, ownership
from ..storage.manifest import NAME as MANIFEST_NAME
from ..storage.stream import make_directory
from .build_state import STATE_NAME, BuildSettings, BuildState, read_state, write_state
from .contents import read_contents
from .places import GENERATION, check_own, check_paths, data_paths, leave, make_home, remove_generation, tidy
from .spool import SPOOLED

BUILDING = "building"
_SPOOLED = {*SPOOLED, ownership.MARK, f"{ownership.MARK}.new"}
_SPOOL_FILES = re.compile("|".join(map(re.escape, sorted(_SPOOLED))))


def name(generation: int) -> str:
    return f"gen-{generation:06d}"


def following(path: str, generation: int) -> int:
    """The generation after this one whose directory is not there yet: what lies in another's would become part of the new one."""
    return max([generation, *(int(entry[4:]) for entry in _directories(path))]) + 1


def _directories(path: str) -> list[str]:
    """The generation directories that lie in a store's."""
    return [entry for entry in os.listdir(path) if GENERATION.fullmatch(entry)]


def _remove_others(path: str, keep: set[str]) -> None:
    for entry in _directories(path):
        if entry not in keep:
            remove_generation(os.path.join(path, entry))


def _remove_building(path: str) -> None:
    with contextlib.suppress(OSError):
        ownership.remove_directory(os.path.join(path, BUILDING), _SPOOL_FILES)


def manifest_file(path: str) -> int:
    """Which file is the manifest (0: none): another one after every publication. Asked without an engine, which may be what fails."""
    try:
        return os.stat(os.path.join(path, MANIFEST_NAME)).st_ino
    except OSError:
        return 0


def published(engine: NativeEngine, path: str, replace: bool) -> dict[str, Any] | None:
    """The manifest of the store that is there, or None. Raises InvalidInputError if there is one and it may not be replaced."""
    try:
        manifest = read_contents(engine, path).fields
        check_paths(manifest, path)
    except errors.StoreNotFoundError:
        others = _others(engine, path)
        if others:
            raise _no_store(path, others) from None
        return None
    except errors.FormatError:
        if not replace:
            raise
        if others := sorted(_foreign(path)):  # the manifest is perhaps a stranger's too
            raise _no_store(path, others) from None
        return None
    if not replace:
        raise errors.InvalidInputError(
            f"there is a store in {path}",
            got=f"{manifest['records']['count']} documents",
            fix="build elsewhere, or replace it (replace=True, --replace)",
        )
    check_own(path, manifest, replacing=True)
    if others := sorted(_foreign(path)):
        raise _no_store(path, others)
    return manifest


def _no_store(path: str, entries: Sequence[str]) -> errors.InvalidInputError:
    return errors.InvalidInputError(f"{path} is not empty and no store", got=", ".join(entries[:3]), fix="give a new or empty directory")


def _others(engine: NativeEngine, path: str) -> list[str]:
    """What lies in a directory without a store that no interrupted build has left there, ascending."""
    entries = set(os.listdir(path)) - {"LOCK"}
    if BUILDING not in entries:
        return sorted(entries)
    others = entries - {BUILDING, f"{MANIFEST_NAME}.new", *_directories(path)}
    try:
        state = read_state(engine, os.path.join(path, BUILDING))
    except errors.StorageError:
        state = None  # damaged: whoever goes on with it is told so
    if state is not None:  # data directories may lie in the store's own
        own = [os.path.abspath(directory) for directory in state.settings.directories]
        others -= {entry for entry in others if any(_is_in(directory, os.path.join(path, entry)) for directory in own)}
    return sorted(others | _foreign(path))


def _foreign(path: str) -> set[str]:
    """What lies in the directory of a build under way, and is none's."""
    building = os.path.join(path, BUILDING)
    if not os.path.lexists(building):
        return set()
    if os.path.islink(building) or not os.path.isdir(building):
        return {BUILDING}
    return {os.path.join(BUILDING, entry) for entry in set(os.listdir(building)) - _SPOOLED}


def _is_in(path: str, directory: str) -> bool:
    return os.path.commonpath([path, os.path.abspath(directory)]) == os.path.abspath(directory)


def begin(
    engine: NativeEngine, path: str, settings: BuildSettings, live: dict[str, Any] | None, restart: bool, store_id: str | None = None
) -> tuple[BuildState, str | None]:
    """The state of the build to run, new or resumed, and why an interrupted one is not gone on with, or not with all of it. What no
    build or store refers to is removed."""
    building = os.path.join(path, BUILDING)
    state = None if restart else read_state(engine, building)
    if state is not None and live is not None and state.generation <= live["generation"]:
        state = None  # that build was published; only its end, tidying up, was missed
    changed = None
    if state is not None and not ownership.belongs_to(building, state.store_id, path):
        changed, state = "it was begun in another directory", None
    if state is not None and state.settings != settings:
        changed = "other settings: " + ", ".join(settings.differences(state.settings))
        if state.settings.spooled == settings.spooled:
            back_to_spool(engine, path, state, live)
            state.settings = settings
        else:
            state = None
    if state is None:
        discard(engine, path, live)
        state = BuildState(settings, store_id or uuid.uuid4().hex, following(path, live["generation"] if live else 0))
    _remove_others(path, {*(directories_of(live) if live else ()), name(state.generation)})
    for directory in (building, os.path.join(path, name(state.generation))):
        make_directory(directory)
    if not ownership.is_up_to_date(building, path):
        ownership.set_mark(building, state.store_id, path)
    write_state(engine, building, state)
    return state, changed


def back_to_spool(engine: NativeEngine, path: str, state: BuildState, live: Mapping[str, Any] | None) -> None:
    """Removes what a build has written beside its spool. The state goes first: no build may go on with files that are gone."""
    state.back_to_spool()
    write_state(engine, os.path.join(path, BUILDING), state)
    _remove_written(path, state, live)


def _remove_written(path: str, state: BuildState, live: Mapping[str, Any] | None) -> None:
    remove_generation(os.path.join(path, name(state.generation)))
    if live is not None and state.store_id == live["store_id"]:
        tidy(path, state.store_id, state.settings.directories, data_paths(live))
    else:
        leave(path, state.store_id, state.settings.directories)


def discard(engine: NativeEngine, path: str, live: Mapping[str, Any] | None) -> None:
    """Removes an interrupted build. Its directory goes last: it is what tells the next build that the rest is no stranger's."""
    building, keep = os.path.join(path, BUILDING), directories_of(live) if live else set()
    try:
        state = read_state(engine, building)
    except errors.StorageError:
        state = None  # damaged: nobody goes on with it, and its data on other devices cannot be found
    if state is not None and name(state.generation) not in keep:
        try:
            state.back_to_spool()
            write_state(engine, building, state)
        except errors.StorageError:  # on a full disk, say; then the state itself has to go
            os.unlink(os.path.join(building, STATE_NAME))
        _remove_written(path, state, live)
    _remove_others(path, keep)
    _remove_building(path)


def data_directories(root: str, directories: Sequence[str], store_id: str, generation: int) -> list[str]:
    """Where a generation's segments go: made, as paths that the manifest can hold."""
    if not directories:
        return [name(generation)]
    result = []
    for directory in directories:
        target = os.path.join(make_home(root, directory, store_id), name(generation))
        make_directory(target)
        result.append(target)
    return result


def discard_part(path: str, file: str) -> None:
    """Removes a part that was written and is not needed after all. `file`: its path as a manifest would have it."""
    remove_generation(os.path.dirname(os.path.join(path, file)))


def directories_of(manifest: Mapping[str, Any]) -> set[str]:
    """The generation directories that a manifest refers to."""
    deleted = manifest.get("deleted")
    return {part["directory"] for part in manifest["parts"]} | ({os.path.dirname(deleted["path"])} if deleted else set())


def clean(path: str, live: Mapping[str, Any], replaced: Mapping[str, Any] | None = None) -> None:
    """Removes what no manifest refers to: changes that ended, failed or crashed, parts that were compacted away. Readers that have such
    files open keep them until they close."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(path, f"{MANIFEST_NAME}.new"))
    _remove_building(path)
    _remove_others(path, directories_of(live))
    tidy(path, live["store_id"], live["directories"], data_paths(live))
    if replaced is not None and replaced["store_id"] != live["store_id"]:
        leave(path, replaced["store_id"], replaced["directories"])
