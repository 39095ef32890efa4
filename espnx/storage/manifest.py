"""MANIFEST.json: the file that makes a directory a store. Written last and renamed into place, so a
store is there whole or not at all.

It names everything else (sizes, checksums), and carries a SHA-256 of itself. Limits are checked
before anything is believed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from .. import errors
from .files import read_file, replace_file
from .native import NativeEngine
from .parse import check_plain_file

NAME = "MANIFEST.json"
_LIMIT_BYTES = 16 * 1024 * 1024
_ATTEMPTS = 100  # to open a store that is being replaced all the time
T = TypeVar("T")


def _digest(fields: dict[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def write_manifest(
    engine: NativeEngine,
    directory: str | os.PathLike[str],
    magic: str,
    version: int,
    fields: dict[str, Any],
    *,
    name: str = NAME,
) -> None:
    """Publishes a store: everything it names must be on disk and flushed already. `name`: of a
    manifest that is not in force yet."""
    whole = {"magic": magic, "version": version, "byte_order": sys.byteorder, **fields}
    whole["checksum"] = _digest(whole)
    replace_file(
        engine, os.path.join(directory, name), (json.dumps(whole, indent=1) + "\n").encode()
    )


def read_manifest(
    engine: NativeEngine,
    directory: str | os.PathLike[str],
    magic: str,
    version: int,
    *,
    name: str = NAME,
    built_by: str = "espnx index build",
) -> dict[str, Any]:
    """Reads and checks a manifest. `name`: as of `write_manifest`. `built_by`: the command that
    makes such a store, for whoever has none.

    Raises:
        StoreNotFoundError: there is none (nothing was published here).
        FormatError: damaged, or of another format, version or byte order.
    """
    path = os.path.join(directory, name)
    try:
        size_bytes = check_plain_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise errors.StoreNotFoundError(
            "no published store",
            path=directory,
            expected=f"a {NAME}",
            fix=f"build one with `{built_by}`, or check the path",
        ) from None
    except PermissionError as error:
        raise errors.ReadError("cannot read a manifest", path=path, errno=error.errno) from error
    except (OSError, ValueError) as error:  # a name that is too long, or that no file can have
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.StoreNotFoundError(
            "no published store", path=directory, got=str(error), fix="check the path"
        ) from error
    if size_bytes > _LIMIT_BYTES:
        raise errors.FormatError(
            "manifest too large",
            path=path,
            got=f"{size_bytes} bytes",
            expected=f"at most {_LIMIT_BYTES}",
        )
    damaged = "restore the store from a copy, or build it again"
    try:
        fields = json.loads(read_file(engine, path))
    except errors.FileMissingError as error:  # it was there a moment ago
        raise errors.StoreNotFoundError(
            "the store was just removed", path=directory, fix="check the path"
        ) from error
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        raise errors.FormatError(
            "damaged manifest", path=path, got=str(error), expected="JSON", fix=damaged
        ) from error
    if not isinstance(fields, dict) or fields.get("magic") != magic:
        got = fields.get("magic") if isinstance(fields, dict) else type(fields).__name__
        raise errors.FormatError(
            "not a manifest of this kind", path=path, got=repr(got), expected=repr(magic)
        )
    if fields.get("version") != version:
        raise errors.FormatError(
            "store of another version",
            path=path,
            got=fields.get("version"),
            expected=version,
            fix="open it with the espnx that wrote it, or build it again",
        )
    if fields.get("byte_order") != sys.byteorder:
        raise errors.FormatError(
            "store of another byte order",
            path=path,
            got=fields.get("byte_order"),
            expected=sys.byteorder,
        )
    checksum = fields.pop("checksum", None)
    if checksum != _digest(fields):
        raise errors.FormatError(
            "damaged manifest",
            path=path,
            got=f"checksum {checksum}",
            expected=_digest(fields),
            fix=damaged,
        )
    return fields


def open_current(path: str | os.PathLike[str], open_it: Callable[[], T]) -> T:
    """What `open_it` opens of a store; again whenever a new version was published (and the old
    one's files removed) meanwhile."""
    for _ in range(_ATTEMPTS):
        before = _manifest_identity(path)
        try:
            return open_it()
        except errors.StorageError:
            if _manifest_identity(path) == before:
                raise
    return open_it()


def _manifest_identity(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    """Another one after every publication."""
    try:
        found = os.stat(os.path.join(path, NAME))
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
