"""Where a store's files may lie: in its own directory, and, where it declares other directories, in
a home of its own inside each.

STORE/gen-000002/                a generation's files
STORE/building/                  the spool and the state of a build under way
DIR/espnx-ID/OWNER.json          the mark of a home: which store's it is, see storage/ownership.py
DIR/espnx-ID/gen-000002/         a generation's data segments

A copy of a store names the homes of the original. They are not the copy's: it reads them, and
changes nothing before it has its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Collection, Sequence
from typing import NoReturn

from ... import errors
from ...storage import ownership
from ...storage.files import make_directory, make_given_directory
from ...storage.manifest import NAME as MANIFEST_NAME
from .manifest import BUILDING as BUILDING
from .manifest import Manifest

GENERATION = re.compile(r"gen-([0-9]{6,15})")  # a directory; what has any other name is not ours
#: The files that may lie in `BUILDING`.
STATE, ORDER, TRAINED, TEXTS = "STATE.json", "order.i64", "trained.safetensors", "texts.sqlite"
RECORDS, VECTORS, N_TOKENS, DIGESTS = "records.bin", "vectors.f32", "n_tokens.u16", "documents.b16"
#: What the second pass writes of a first stage: the order of the records, and its sections.
ARRANGED = re.compile(rf"{re.escape(ORDER)}|stage-[a-z0-9_]{{1,16}}(\.[a-z0-9_]{{1,16}})?\.bin")
_SPOOLED = (
    STATE,
    f"{STATE}.new",
    RECORDS,
    VECTORS,
    N_TOKENS,
    TEXTS,
    f"{TEXTS}-journal",
    DIGESTS,
    TRAINED,
)
#: What a first stage sorts and cannot hold; left behind where it was killed.
_SCRATCH = r"spool-[0-9a-f]{8}-f?[0-9]+\.tmp"
BUILDING_FILES = re.compile(
    "|".join(
        [
            *map(re.escape, (*_SPOOLED, ownership.MARK, f"{ownership.MARK}.new")),
            ARRANGED.pattern,
            _SCRATCH,
        ]
    )
)
_FILES = re.compile(rf"(segment|coarse)-[0-9]{{5,}}\.bin|part\.bin|deleted\.bin|{_SCRATCH}")
_MARKS = re.compile(re.escape(ownership.MARK) + r"(\.new)?")
DETACH = "give it data of its own: `espnx index detach`"
REBUILD = "restore the store from a copy, or build it again"


def remove_generation(directory: str) -> None:
    """Removes a generation's files and its directory, as far as they can be; what else lies in it
    stays."""
    with contextlib.suppress(OSError):
        ownership.remove_directory(directory, _FILES)


def remove_building(path: str) -> None:
    """Removes what is left of a build under way, as far as it can be; what else lies there
    stays."""
    with contextlib.suppress(OSError):
        ownership.remove_directory(os.path.join(path, BUILDING), BUILDING_FILES)


# --- homes ---


def _homes_in(directory: str, store_id: str) -> list[str]:
    """Paths of homes in a directory, of this store and of copies of it, ascending."""
    name = re.compile(rf"espnx-{store_id[:12]}(\.[0-9]+)?")
    try:
        return [
            os.path.join(os.path.abspath(directory), entry)
            for entry in sorted(os.listdir(directory))
            if name.fullmatch(entry)
        ]
    except OSError:
        return []


def own_home(root: str, directory: str, store_id: str) -> str | None:
    """The home of the store in `root` inside a directory, if there is one."""
    return next(
        (
            home
            for home in _homes_in(directory, store_id)
            if ownership.belongs_to(home, store_id, root)
        ),
        None,
    )


def make_home(root: str, directory: str, store_id: str) -> str:
    """Makes what `own_home` names, if it is not there. Raises WriteError, DiskFullError;
    InvalidInputError where nothing is above it."""
    home = own_home(root, directory, store_id)
    if home is None:
        make_given_directory(directory)
        first = os.path.join(os.path.abspath(directory), f"espnx-{store_id[:12]}")
        names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(2)))
        home = next(path for path in names if not os.path.lexists(path))
        make_directory(home)
    if not ownership.is_up_to_date(home, root):
        ownership.set_mark(home, store_id, root)
    return home


def data_paths(manifest: Manifest) -> set[str]:
    """Directories on other devices that a manifest refers to."""
    return {
        os.path.dirname(path)
        for part in manifest.parts
        for path in part.files
        if os.path.isabs(path)
    }


def check_paths(manifest: Manifest, root: str) -> None:
    """Raises FormatError for a path that leaves the store's own directory, or the homes in those it
    declares."""

    def refuse(what: str, got: str, expected: str) -> NoReturn:
        raise errors.FormatError(
            what,
            path=os.path.join(root, MANIFEST_NAME),
            got=repr(got),
            expected=expected,
            fix=REBUILD,
        )

    declared = set(manifest.directories)
    for directory in declared:
        if os.path.abspath(directory) != directory:
            refuse("field directories", directory, "absolute paths")
    home = re.compile(rf"espnx-{manifest.store_id[:12]}(\.[0-9]+)?")
    inside = "a data file inside the store, or inside a home of it in a directory that it declares"
    for number, part in enumerate(manifest.parts):
        if GENERATION.fullmatch(part.directory) is None:
            refuse(f"field parts[{number}].directory", part.directory, "gen- and a number")
        for path in part.files:
            if not _is_own(path, declared, home):
                refuse(f"field parts[{number}]: path", path, inside)
    if manifest.deleted is not None and not _is_own(manifest.deleted.path, set(), home):
        refuse("field deleted.path", manifest.deleted.path, inside)


def _is_own(path: str, declared: set[str], home: re.Pattern[str]) -> bool:
    outer, file = os.path.split(path)
    directory, generation = os.path.split(outer)
    is_plain = GENERATION.fullmatch(generation) is not None and _FILES.fullmatch(file) is not None
    if directory:
        parent, base = os.path.split(directory)
        is_plain = is_plain and parent in declared and home.fullmatch(base) is not None
    return is_plain and os.path.normpath(path) == path


def shared_homes(root: str, manifest: Manifest) -> list[str]:
    """Homes that hold data of this store and are another's, ascending."""
    homes = {os.path.dirname(path) for path in data_paths(manifest)}
    return sorted(home for home in homes if not ownership.belongs_to(home, manifest.store_id, root))


def claim(root: str, manifest: Manifest) -> None:
    """`check_own` before a change; then marks say where the store is now."""
    check_own(root, manifest)
    for directory in manifest.directories:
        make_home(root, directory, manifest.store_id)


def check_own(root: str, manifest: Manifest, *, replacing: bool = False) -> None:
    """Raises SharedDataError unless every directory that a store declares has a home of this store,
    and all its data lie there.

    replacing: nothing new goes to those directories, so it is enough that no data that are there
    are another's.
    """
    foreign = shared_homes(root, manifest)
    if replacing:
        foreign = [home for home in foreign if os.path.lexists(home)]
    else:
        foreign += [
            directory
            for directory in manifest.directories
            if own_home(root, directory, manifest.store_id) is None
        ]
    if foreign:
        mark = ownership.read_mark(foreign[0])
        raise errors.SharedDataError(
            "a store that shares the data of another",
            path=root,
            got=f"{foreign[0]}, marked as {mark.owner.path if mark else 'nobody'}'s",
            expected="data directories that are marked as this store's",
            fix=DETACH,
        )


def tidy(root: str, store_id: str, directories: Sequence[str], used: Collection[str]) -> None:
    """Removes the generations that lie in a store's own homes and are not used."""
    for directory in directories:
        home = own_home(root, directory, store_id)
        for entry in _generations_in(home) if home else ():
            if entry not in used:
                remove_generation(entry)


def leave(root: str, store_id: str, directories: Sequence[str]) -> None:
    """Removes all that a store which is gone made in its homes, and those."""
    tidy(root, store_id, directories, ())
    for directory in directories:
        home = own_home(root, directory, store_id)
        if home is not None and not _generations_in(home):
            with contextlib.suppress(OSError):
                ownership.remove_directory(home, _MARKS)


def _generations_in(home: str) -> list[str]:
    try:
        return [
            os.path.join(home, entry)
            for entry in sorted(os.listdir(home))
            if GENERATION.fullmatch(entry)
        ]
    except OSError:
        return []
