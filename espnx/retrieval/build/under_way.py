"""A build under way in a store's directory: begun, continued, given up; beside the version that
is published, which stays as it is.

What of an interrupted build is continued, the corpus of this call says. The spool has a digest of
every document as it was given: id, text, and whatever vectors it brought. While the corpus streams
by, each document is compared with the one in its place. All that come before the first other one
are in the spool already, proven equal, and need no encoding; from there on the spool is cut off and
written anew. A corpus that ends early cuts it off too. So the store that is published is always
that of this corpus, whatever the interrupted build had seen, and a corpus need only be iterated
once.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator

from ... import errors
from ...storage import NativeEngine, ownership
from ...storage.files import make_directory
from ...storage.lock import LOCK_NAME
from ...storage.manifest import NAME as MANIFEST_NAME
from ...storage.replacing import StoreKind, check_target
from ..store.manifest import MAGIC, Manifest, read_store_manifest
from ..store.part_file import VERSION
from ..store.places import (
    BUILDING,
    BUILDING_FILES,
    STATE,
    check_own,
    check_paths,
    data_paths,
    leave,
    remove_building,
    remove_generation,
    tidy,
)
from ..versions.generations import directories_of, following, name, names_in, remove_others
from .documents import Document, digest
from .state import BuildSettings, BuildState, read_state, write_state


def published(engine: NativeEngine, path: str, replace: bool) -> Manifest | None:
    """The manifest of the store that is there, or None: there is none, or a damaged one of an
    index, which is to be replaced. Raises as `check_target`; SharedDataError."""
    try:
        if not check_target(path, KIND, replace=replace):
            return None
        manifest = read_store_manifest(engine, path)
        check_paths(manifest, path)
        check_own(path, manifest, replacing=True)
    except errors.FormatError:
        manifest = None
    if foreign := sorted(_foreign(path)):
        raise errors.InvalidInputError(
            f"{path} is not empty and no store",
            got=", ".join(foreign[:3]),
            fix="give a new or empty directory",
        )
    return manifest


def others(path: str) -> set[str]:
    """What lies in a directory without a store that no interrupted build has left there."""
    entries = set(os.listdir(path)) - {LOCK_NAME}
    if BUILDING not in entries:
        return entries
    found = entries - {BUILDING, f"{MANIFEST_NAME}.new", *names_in(path)}
    try:
        with NativeEngine("posix", threads=1, pool_bytes=0) as engine:
            state = read_state(engine, os.path.join(path, BUILDING))
    except errors.StorageError:
        state = None  # damaged: whoever continues with it is told so
    if state is not None:  # data directories may lie in the store's own
        own = [os.path.abspath(directory) for directory in state.settings.directories]
        found -= {
            entry
            for entry in found
            if any(_is_in(directory, os.path.join(path, entry)) for directory in own)
        }
    return found | _foreign(path)


KIND = StoreKind(MAGIC, VERSION, "a store", others, add="espnx.add, espnx index add")


def _foreign(path: str) -> set[str]:
    """What lies in the directory of a build under way, and is none's."""
    building = os.path.join(path, BUILDING)
    if not os.path.lexists(building):
        return set()
    if os.path.islink(building) or not os.path.isdir(building):
        return {BUILDING}
    return {
        os.path.join(BUILDING, entry)
        for entry in os.listdir(building)
        if BUILDING_FILES.fullmatch(entry) is None
    }


def _is_in(path: str, directory: str) -> bool:
    return os.path.commonpath([path, os.path.abspath(directory)]) == os.path.abspath(directory)


def begin(
    engine: NativeEngine,
    path: str,
    settings: BuildSettings,
    live: Manifest | None,
    restart: bool,
    store_id: str | None = None,
) -> tuple[BuildState, str | None]:
    """The state of the build to run, new or resumed, and why an interrupted one is not
    continued, or not all of it. What no build or store refers to is removed."""
    building = os.path.join(path, BUILDING)
    state = None if restart else read_state(engine, building)
    if state is not None and live is not None and state.generation <= live.generation:
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
        state = BuildState(
            settings, store_id or uuid.uuid4().hex, following(path, live.generation if live else 0)
        )
    remove_others(path, {*_kept(path, live), name(state.generation)})
    for directory in (building, os.path.join(path, name(state.generation))):
        make_directory(directory)
    if not ownership.is_up_to_date(building, path):
        ownership.set_mark(building, state.store_id, path)
    write_state(engine, building, state)
    return state, changed


def _kept(path: str, live: Manifest | None) -> set[str]:
    """The generation directories that stay while a build is under way: those of the store that is
    there. Where its manifest could not be read, all of them until the new store is published: a
    device that was wrong once may be right again."""
    if live is not None:
        return directories_of(live)
    return set(names_in(path)) if os.path.lexists(os.path.join(path, MANIFEST_NAME)) else set()


def back_to_spool(
    engine: NativeEngine, path: str, state: BuildState, live: Manifest | None
) -> None:
    """Removes what a build has written beside its spool. The state goes first: no build may go on
    with files that are gone."""
    state.back_to_spool()
    write_state(engine, os.path.join(path, BUILDING), state)
    _remove_written(path, state, live)


def _remove_written(path: str, state: BuildState, live: Manifest | None) -> None:
    remove_generation(os.path.join(path, name(state.generation)))
    if live is not None and state.store_id == live.store_id:
        tidy(path, state.store_id, state.settings.directories, data_paths(live))
    else:
        leave(path, state.store_id, state.settings.directories)


def discard(engine: NativeEngine, path: str, live: Manifest | None) -> None:
    """Removes an interrupted build. Its directory goes last: it is what tells the next build that
    the rest is no stranger's."""
    building, keep = os.path.join(path, BUILDING), _kept(path, live)
    try:
        state = read_state(engine, building)
    except errors.StorageError:
        # damaged: nobody continues with it, and its data on other devices cannot be found
        state = None
    if state is not None and (live is None or name(state.generation) not in keep):
        keep -= {name(state.generation)}
        try:
            state.back_to_spool()
            write_state(engine, building, state)
        except errors.StorageError:  # on a full disk, say; then the state itself has to go
            os.unlink(os.path.join(building, STATE))
        _remove_written(path, state, live)
    remove_others(path, keep)
    remove_building(path)


def confirm(
    stream: Iterator[list[Document]], known: Iterator[bytes], progress: Callable[[int], None]
) -> tuple[int, list[Document]]:
    """(how many of the spooled documents the corpus begins with, the batch's documents from the
    first other one on).

    `known`: digests of the spooled ones. What comes after the documents returned is left in
    `stream`; none are returned where it has ended.
    """
    same = 0
    for batch in stream:
        for i, document in enumerate(batch):
            if digest(document) != next(known, None):
                return same, batch[i:]
            same += 1
        progress(same)
    return same, []
