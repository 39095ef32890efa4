"""How all parts of a collection are replaced as if at once: every directory gets the manifest that
comes next beside the one in force, and only then does each take its place. From the first that has,
the new collection is in force: a directory that has not got so far is read by the manifest that
waits in it. So a build that is killed anywhere leaves the one collection or the other, whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from ... import errors
from ...storage import NativeEngine
from ...storage.files import write_error
from ...storage.manifest import NAME
from ..files import NEXT, remove_others
from ..format import Facts, read_facts, write_facts

# to read manifests of which the first was read before, and the last after, a replacement
_ATTEMPTS = 20


def publish_parts(engine: NativeEngine, directories: Sequence[str], parts: Sequence[Facts]) -> None:
    """Puts a collection into force. Its files must be on disk; those of another that was there are
    removed. Raises WriteError, DiskFullError."""
    for directory, facts in zip(directories, parts, strict=True):
        write_facts(engine, directory, facts, name=NEXT)
    put_in_force(engine, directories)
    for directory, facts in zip(directories, parts, strict=True):
        remove_others(directory, facts)


def put_in_force(engine: NativeEngine, directories: Sequence[str]) -> None:
    """The manifests that wait take their places. Raises WriteError, DiskFullError."""
    for directory in directories:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.replace(os.path.join(directory, NEXT), os.path.join(directory, NAME))
        except OSError as error:
            raise write_error(
                "cannot publish a part of a collection", os.path.join(directory, NAME), error
            ) from error
        engine.sync_directory(directory)


def read_current(engine: NativeEngine, directories: Sequence[str]) -> list[Facts]:
    """What is in force in each directory of a collection. Raises as `read_facts`."""
    found: list[Facts | None] = []
    for _ in range(_ATTEMPTS):
        found = [_facts(engine, directory, NAME) for directory in directories]
        whole = [each for each in found if each is not None]
        if len(whole) == len(found) and len(_collections(whole)) <= 1:
            return whole
        waiting = [_facts(engine, directory, NEXT) for directory in directories]
        for collection in _collections(whole):
            of_it = [
                next((each for each in pair if _is_of(each, collection)), None)
                for pair in zip(found, waiting, strict=True)
            ]
            chosen = [each for each in of_it if each is not None]
            if len(chosen) == len(directories):
                return chosen
    return [
        read_facts(engine, directory) if each is None else each
        for directory, each in zip(directories, found, strict=True)
    ]


def finish_replacement(engine: NativeEngine, directories: Sequence[str]) -> None:
    """Publishes the rest of a build that was killed at it. Raises WriteError, DiskFullError."""
    with contextlib.suppress(errors.FormatError, errors.StoreNotFoundError):
        current, published = (
            read_current(engine, directories),
            [_facts(engine, directory, NAME) for directory in directories],
        )
        if current != published:
            put_in_force(engine, directories)


def check_replaceable(engine: NativeEngine, directories: Sequence[str]) -> None:
    """Raises InvalidInputError unless the postings in these directories are collections of which
    every part is there: of any other, parts elsewhere would be of no use any more."""
    parts: dict[str, set[int]] = {}
    n_parts: dict[str, int] = {}
    known = _readable(engine, directories)
    for directory, facts in known.items():
        if facts.split is None:
            raise errors.InvalidInputError(
                f"directory {directory}",
                got="postings of their own",
                expected="parts of a collection to replace, or nothing",
                fix="name another directory, or remove this one yourself",
            )
        parts.setdefault(facts.split.collection, set()).add(facts.split.part)
        n_parts[facts.split.collection] = facts.split.n_parts
    n_damaged = len(directories) - len(known)
    for collection, found in parts.items():
        if n_parts[collection] - len(found) > n_damaged:
            raise errors.InvalidInputError(
                "parts of a collection to replace",
                got=f"{len(found)} of {n_parts[collection]}",
                expected="all of them",
                fix="name all of its directories, or remove it yourself",
            )


def _readable(engine: NativeEngine, directories: Sequence[str]) -> dict[str, Facts]:
    """What is in force in each directory whose manifest is not damaged."""
    try:
        return dict(zip(directories, read_current(engine, directories), strict=True))
    except errors.FormatError:
        found = dict[str, Facts]()
        for directory in directories:
            with contextlib.suppress(errors.FormatError):
                found[directory] = read_facts(engine, directory)
        return found


def _facts(engine: NativeEngine, directory: str, name: str) -> Facts | None:
    with contextlib.suppress(errors.StoreNotFoundError):
        return read_facts(engine, directory, name=name)
    return None


def _collections(parts: Sequence[Facts]) -> set[str]:
    """The collections that these parts are of; none's is the empty name."""
    return {"" if each.split is None else each.split.collection for each in parts}


def _is_of(facts: Facts | None, collection: str) -> bool:
    return facts is not None and facts.split is not None and facts.split.collection == collection
