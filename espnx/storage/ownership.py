"""Whose a data directory is, and the one way in which anything is removed.

A store may keep data in directories outside of its own. A copy of such a store (``cp -r``) names
the same directories, and they are not the copy's. So each of them carries a mark: a file that names
the directory that owns it, by what a copy does not have, its inode. Nothing is written to or
removed from a directory whose mark does not agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass

from .files import write_error
from .parse import Fields, check_plain_file, parse_object

MARK = "OWNER.json"
_MARK_BYTES_MAX = 64 << 10


@dataclass(frozen=True)
class Identity:
    """Which directory it is.

    Attributes:
        path: without links.
        device, inode: numbers of the file system and of the directory in it.
    """

    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, directory: str | os.PathLike[str]) -> Identity:
        found = os.stat(directory)
        return cls(os.path.realpath(directory), found.st_dev, found.st_ino)

    def is_same(self, other: Identity) -> bool:
        """A copy has another inode. One that was renamed has its inode in the same file system; one
        that was not has it in the same place, while file systems may get other numbers whenever the
        machine starts."""
        return self.inode == other.inode and (
            self.path == other.path or self.device == other.device
        )


def set_mark(directory: str, name: str, owner: str) -> None:
    """Says in a directory that it belongs to the directory `owner`. `name`: of what is kept there,
    for who looks at it.

    Raises WriteError, DiskFullError.
    """
    path = os.path.join(directory, MARK)
    fields = {
        "name": name,
        "owner": asdict(Identity.of(owner)),
        "directory": asdict(Identity.of(directory)),
    }
    text = json.dumps(fields, indent=1) + "\n"
    temporary = f"{path}.new"
    try:
        if os.path.lexists(temporary):  # of a process that was killed
            os.unlink(temporary)
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
        try:
            os.write(fd, text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        _flush(directory)
    except OSError as error:
        raise write_error("cannot mark a data directory", path, error) from error


def _flush(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Mark:
    """What a mark says: what is kept in the directory, which directory owns it, and which directory
    it is itself."""

    name: str
    owner: Identity
    directory: Identity


def read_mark(directory: str) -> Mark | None:
    """None where a directory has no mark that can be read."""
    path = os.path.join(directory, MARK)
    try:
        if os.path.islink(directory) or check_plain_file(path) > _MARK_BYTES_MAX:
            return None
        with open(path, "rb") as file:
            fields = parse_object(file.read(), path)
        return Mark(
            fields.text("name"),
            _identity(fields.inner("owner")),
            _identity(fields.inner("directory")),
        )
    except OSError:  # FormatError too
        return None


def _identity(fields: Fields) -> Identity:
    return Identity(
        fields.text("path"), fields.whole("device", most=2**64), fields.whole("inode", most=2**64)
    )


def belongs_to(directory: str, name: str, owner: str) -> bool:
    """Whether a directory's mark says that it holds `name` and is the directory `owner`'s."""
    mark = read_mark(directory)
    return mark is not None and mark.name == name and mark.owner.is_same(Identity.of(owner))


def is_copy(directory: str) -> bool:
    """Whether a marked directory was copied, or moved to another file system, mark and all: it is
    nobody's then."""
    mark = read_mark(directory)
    return mark is not None and not mark.directory.is_same(Identity.of(directory))


def is_up_to_date(directory: str, owner: str) -> bool:
    """Whether a mark says where its owner is now; if not, the owner was renamed, or its file system
    has another number."""
    mark = read_mark(directory)
    return (
        mark is not None
        and mark.owner == Identity.of(owner)
        and mark.directory == Identity.of(directory)
    )


def remove_directory(directory: str, names: re.Pattern[str]) -> None:
    """Removes the files in a directory whose names match, then the directory, where nothing else
    lies in it.

    No link is followed, no other directory entered, no file removed whose name does not match. This
    is the only way in which espnx removes what was written before.

    Raises OSError for what cannot be removed; FileNotFoundError: there is no such directory.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(directory, flags)
    try:
        remove_files(fd, names)
        is_empty = not os.listdir(fd)
    finally:
        os.close(fd)
    if is_empty:
        os.rmdir(directory)


def remove_files(directory_fd: int, names: re.Pattern[str]) -> None:
    """The files of an open directory whose names match; links are removed, not what they lead
    to."""
    for name in os.listdir(directory_fd):
        if names.fullmatch(name) is not None:
            # somebody was faster; a directory is nothing of ours
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=directory_fd)
