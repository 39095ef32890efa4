"""Where a build may write: one function decides for every kind of store, so that no build takes the
place of what is none of its kind.

A build that replaces a store writes files of other names beside the store's, then its manifest over
the store's, in one rename, and only then removes the store's files, by name: killed anywhere, it
leaves the one or the other whole. Nothing else in the directory is touched.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .. import errors
from .files import make_given_directory, write_error
from .lock import LOCK_NAME, DirectoryLock
from .manifest import NAME, read_manifest
from .native import NativeEngine
from .parse import check_plain_file

# Of a manifest whose rest may be damaged: `write_manifest` writes this field first.
_MAGIC = re.compile(rb'\s*\{\s*"magic":\s*("[\x20-\x7e]{1,64}?")')
_HEAD_BYTES = 256


@dataclass(frozen=True)
class StoreKind:
    """A kind of store.

    Attributes:
        magic, version: of its manifests.
        what: it is, for messages, such as ``a graph``.
        foreign: what lies in a directory without a manifest that no interrupted build of this kind
            has left there.
        add: how to add to one, for messages.
    """

    magic: str
    version: int
    what: str
    foreign: Callable[[str], Collection[str]]
    add: str = ""


def check_target(directory: str | os.PathLike[str], kind: StoreKind, *, replace: bool) -> bool:
    """Whether a store of this kind is in a directory that a build is to write to, and will be
    replaced. False: there is none, and nothing else but, perhaps, what an interrupted build of this
    kind has left. A store of this kind whose manifest is damaged is one, too.

    Raises:
        InvalidInputError: anything else is there, whatever `replace` says; a store of this kind,
            and `replace` is not set.
        ReadError: nobody may look.
    """
    where = os.fspath(directory)
    try:
        magic = magic_of(os.path.join(where, NAME))
    except FileNotFoundError:
        if foreign := sorted(set(kind.foreign(where)) - {LOCK_NAME}):
            raise errors.InvalidInputError(
                f"{where} is not empty and no store",
                got=", ".join(foreign[:3]),
                expected="an empty directory, or what an interrupted build has left",
                fix="name a new or empty directory",
            ) from None
        return False
    except OSError as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.ReadError(
            "cannot read a manifest", path=os.path.join(where, NAME), errno=error.errno
        ) from error
    if magic != kind.magic:
        raise errors.InvalidInputError(
            f"{where} holds something else than {kind.what}",
            got=f"a {NAME} of {repr(magic) if magic else 'unknown kind'}",
            expected=f"a new or empty directory, or one of {kind.magic!r} to replace",
            fix="name another directory, or remove this one yourself",
        )
    if not replace:
        raise errors.InvalidInputError(
            f"{where} already holds {kind.what}",
            expected="a new or empty directory",
            fix=(
                f"build elsewhere, {f'add to it ({kind.add}), ' if kind.add else ''}or replace it "
                "(replace=True, --replace)"
            ),
        )
    return True


@contextmanager
def writing_to(
    directory: str | os.PathLike[str], kind: StoreKind, *, replace: bool
) -> Iterator[bool]:
    """A directory that this process alone writes to, made if need be: as `check_target`, asked
    before anything is written, the lock too.

    Raises as `check_target` and `make_given_directory`; StoreBusyError, WriteError, DiskFullError.
    """
    make_given_directory(directory)
    check_target(directory, kind, replace=replace)
    with DirectoryLock(directory):
        yield check_target(directory, kind, replace=replace)


def magic_of(path: str) -> str | None:
    """The magic of a manifest; None where what is there does not begin as one. Raises OSError."""
    try:
        check_plain_file(path)
    except errors.FormatError:
        return None
    with open(path, "rb") as file:
        found = _MAGIC.match(file.read(_HEAD_BYTES))
    try:
        return None if found is None else str(json.loads(found[1]))
    except ValueError:
        return None


class VersionedFiles:
    """Files of fixed names of which a directory holds one version, and meanwhile another: the first
    is called ``nodes.bin``, the second ``nodes.v2.bin``. Which one is in force stands in the
    manifest, as ``generation``.

    Args:
        names: of the first version, each with a dot in it.
    """

    def __init__(self, names: Iterable[str]):
        ends = [map(re.escape, name.rpartition(".")[::2]) for name in names]
        self._pattern = re.compile(
            "|".join(rf"{stem}(?:\.v([1-9][0-9]{{0,14}}))?\.{end}(\.new)?" for stem, end in ends)
        )

    def is_own(self, name: str) -> bool:
        """Whether a file of any version is called so, or one that is being written: with ``.new``
        behind its name."""
        return self._pattern.fullmatch(name) is not None

    def is_unfinished(self, name: str) -> bool:
        """Whether a file that is being written is called so."""
        return name.endswith(".new") and self.is_own(name)

    def begin(
        self,
        engine: NativeEngine,
        directory: str | os.PathLike[str],
        kind: StoreKind,
        *,
        is_replacement: bool,
    ) -> int:
        """The version to write: one that no file is of, once what interrupted builds have left is
        removed. Where a manifest is damaged, no file is: nobody knows which are in force. Raises
        WriteError, DiskFullError."""
        if not is_replacement:
            self.keep(directory, None)
            return 1
        try:
            self.keep(
                directory,
                int(read_manifest(engine, directory, kind.magic, kind.version)["generation"]),
            )
        except (errors.FormatError, KeyError, ValueError, TypeError):
            pass
        return 1 + max((self._version(name) for name in os.listdir(directory)), default=0)

    def keep(
        self, directory: str | os.PathLike[str], version: int | None, shared: Collection[str] = ()
    ) -> None:
        """Removes the files of all versions but one. `shared`: names of files of other versions
        that this one has, too. Raises WriteError, DiskFullError."""
        try:
            names = sorted(os.listdir(directory))
        except OSError as error:
            raise write_error("cannot list a directory", os.fspath(directory), error) from error
        for name in names:
            if self._version(name) in (0, version) or name in shared:
                continue
            try:
                os.unlink(os.path.join(directory, name))
            except (FileNotFoundError, IsADirectoryError):
                pass
            except OSError as error:
                raise write_error(
                    "cannot remove a file of another version", os.path.join(directory, name), error
                ) from error

    def _version(self, name: str) -> int:
        """0: of a file that is none of these; -1: of one that is being written."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return 0
        return (
            -1 if name.endswith(".new") else int(next((each for each in found.groups() if each), 1))
        )


def versioned(name: str, version: int) -> str:
    """What a file of a version is called."""
    stem, _, end = name.rpartition(".")
    return name if version == 1 else f"{stem}.v{version}.{end}"
