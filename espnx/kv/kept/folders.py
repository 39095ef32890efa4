"""The folders of a kept cache, one in each of its directories: locked together, marked as belonging
together, removed together."""

from __future__ import annotations

import contextlib
import errno as codes
import os
import re
import time
import uuid
import weakref
from collections.abc import Sequence

from ... import errors
from ...storage import ownership
from ...storage.files import make_given_directory, write_error
from ...storage.lock import DirectoryLock
from ...storage.manifest import NAME as MANIFEST
from ...storage.parse import check_plain_file
from ..striping import Storage, directories_of
from .format import FIX, STATE_FILES, STATE_NAME
from .state import ROWS_NAME

LOCK, USED = "LOCK", "LAST_USED"
# "1 of 3 <id>": which folder of one cache this is; the first of them has it before the others, and
# loses it last
_PART = "PART"
_MANIFESTS = re.compile(r"MANIFEST\.json(\.new)?")
_FILES = re.compile(rf"{re.escape(ROWS_NAME)}|{USED}|{STATE_FILES.pattern}")
_MARKS = re.compile(rf"{_PART}|{LOCK}|{re.escape(ownership.MARK)}(\.new)?")
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
#: Names of closed caches in whose files a write that was given up may still land.
_HELD = set["KeptName"]()
_LOCK_ATTEMPTS, _LOCK_PAUSE_S = 50, 0.02  # whoever lists caches holds each lock for a moment


def check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAMES.fullmatch(name):
        raise errors.InvalidInputError(
            "name of a cache",
            got=repr(name),
            expected="letters, digits, dots, dashes and underscores",
        )


def is_kept(directory: str) -> bool:
    """Is it the first folder of a kept cache? Folders of other stores have manifests, too."""
    if (
        not _NAMES.fullmatch(os.path.basename(directory))
        or os.path.islink(directory)
        or not os.path.isdir(directory)
    ):
        return False  # a link would lead to somebody else's
    try:
        names = os.listdir(directory)
    except FileNotFoundError:  # somebody has removed it since
        return False
    return _words(_part(directory))[0] == 1 and any(
        name == ROWS_NAME or STATE_NAME.fullmatch(name) for name in names
    )


def folders_of(roots: Sequence[str], name: str) -> tuple[list[str], int]:
    """(those of one cache that lie in these directories, how many it has there). Folders that a
    copy shares with the original do not count: they are not this cache's to change."""
    first = os.path.join(roots[0], name)
    _, count, known = _words(_part(first))
    others = [
        other
        for other in (os.path.join(root, name) for root in roots[1:])
        if known and _words(_part(other))[2] == known
    ]
    own = [other for other in others if _is_own(other, known, first)]
    return [first, *own], count - (len(others) - len(own))


def _is_own(directory: str, known: str, first: str) -> bool:
    """Whether a later folder is that of this cache, and not of another that this one was copied
    from. Of a cache that was copied with all its folders each is a copy, and nobody else's."""
    return ownership.belongs_to(directory, known, first) or ownership.is_copy(directory)


def _part(directory: str) -> str:
    with (
        contextlib.suppress(OSError),
        open(os.path.join(directory, _PART), encoding="utf-8", errors="replace") as file,
    ):
        return file.read().strip()
    return ""


def _words(part: str) -> tuple[int, int, str]:
    """(which folder, of how many, of what); (1, 1, "") of a folder without a mark."""
    found = re.fullmatch(r"(\d+) of (\d+) (\w+)", part)
    return (int(found[1]), int(found[2]), found[3]) if found else (1, 1, "")


def lock(directory: str, stack: contextlib.ExitStack) -> None:
    """Locks a folder for as long as the stack is entered. Raises StoreBusyError;
    StoreNotFoundError: somebody has removed it since."""
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            stack.enter_context(DirectoryLock(directory))
            return
        except errors.WriteError as error:
            if error.errno in (codes.EROFS, codes.EACCES, codes.EPERM):
                raise errors.WriteError(
                    "a kept cache is continued, verified and removed under a lock in its folder",
                    path=directory,
                    errno=error.errno,
                    fix="copy it to a directory that you may write to, and open the copy",
                ) from error
            if error.errno != codes.ENOENT:
                raise
            raise errors.StoreNotFoundError(
                "the kept cache was just removed", path=directory, fix="try again"
            ) from error
        except errors.StoreBusyError as error:
            if attempt == _LOCK_ATTEMPTS - 1:
                raise errors.StoreBusyError(
                    "the kept cache is open",
                    path=directory,
                    got=error.got,
                    fix="close it there, or choose another name",
                ) from error
            time.sleep(_LOCK_PAUSE_S)


def _make_and_lock(directory: str, stack: contextlib.ExitStack) -> None:
    if os.path.islink(directory):
        raise errors.FormatError(
            "the folder of a kept cache is a link",
            path=directory,
            fix="remove the link, or choose another name",
        )
    make_given_directory(os.path.dirname(directory))
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        except OSError as error:
            # it was there, and was removed before it was looked at
            if isinstance(error, FileExistsError) and attempt < _LOCK_ATTEMPTS - 1:
                continue
            raise write_error(
                "cannot create the folder of a kept cache", directory, error
            ) from error
        try:
            lock(directory, stack)
            return
        except errors.StoreNotFoundError:
            # somebody removed the cache of that name meanwhile: this is a new one
            if attempt == _LOCK_ATTEMPTS - 1:
                raise


def remove_files(folders: Sequence[str], *, marks: bool = True) -> None:
    """Removes what a kept cache consists of, the manifest first: what a crash leaves is no cache
    any more. Folders that are empty then go.

    Args:
        marks: also the lock files, and what says that the folders belong together.
    """
    _remove(folders[0], _MANIFESTS)
    for directory in reversed(folders):
        _remove(directory, _FILES)
        if marks:
            _remove(directory, _MARKS)
            with contextlib.suppress(OSError):  # somebody's own files lie in it
                os.rmdir(directory)


def _remove(directory: str, names: re.Pattern[str]) -> None:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            ownership.remove_files(fd, names)
        finally:
            os.close(fd)
    except OSError as error:
        raise write_error("cannot remove the files of a kept cache", directory, error) from error


def _check_plain(directory: str) -> None:
    """Raises FormatError for a link in place of a file: what is written there would go
    elsewhere."""
    for name in os.listdir(directory):
        if any(names.fullmatch(name) for names in (_MANIFESTS, _FILES, _MARKS)):
            check_plain_file(os.path.join(directory, name))


class KeptName:
    """A kept cache's folders, locked for this process until `unlock`, or, after `hold`, for as long
    as it lives.

    Raises:
        InvalidInputError: the name is no plain file name.
        StoreBusyError: somebody has the cache, or another that shares a folder with it, open.
        ForeignFileError: the directories are not those of this cache, or in another order.
    """

    def __init__(self, storage: Storage, name: str):
        check_name(name)
        self.roots = directories_of(storage)
        self.directories = [os.path.join(root, name) for root in self.roots]
        if len({os.path.realpath(directory) for directory in self.directories}) < len(
            self.directories
        ):
            raise errors.InvalidInputError(
                "directories of a kept cache", got=self.roots, expected="each of them once"
            )
        with contextlib.ExitStack() as stack:
            locked = list[str]()
            try:
                for directory in self.directories:
                    _make_and_lock(directory, stack)
                    locked.append(directory)
                for directory in self.directories:
                    _check_plain(directory)
                self._mark()
                if not self.exists:  # what a process left that was killed before it saved anything
                    remove_files(self.directories, marks=False)
            except BaseException:
                for directory in locked:
                    # nothing was ever kept there
                    if all(_MARKS.fullmatch(entry) for entry in os.listdir(directory)):
                        remove_files([directory])
                raise
            # Whoever drops a cache without closing it does not keep its name.
            self.unlock = weakref.finalize(self, stack.pop_all().close)

    def _mark(self) -> None:
        """Says in each folder which of how many it is: a manifest names places in all of them, by
        number."""
        count, parts = len(self.directories), [_part(directory) for directory in self.directories]
        known = _words(parts[0])[2] or uuid.uuid4().hex
        expected = [
            f"{number} of {count} {known}" if count > 1 else "" for number in range(1, count + 1)
        ]
        for number, (directory, part) in enumerate(zip(self.directories, parts, strict=True)):
            is_other = bool(part) and part != expected[number]
            if is_other or (
                count > 1 and not part and os.path.exists(os.path.join(directory, MANIFEST))
            ):
                raise errors.ForeignFileError(
                    "the folder is of a cache with other directories, or in another order",
                    path=directory,
                    got=part or "1 of 1",
                    expected=expected[number] or "1 of 1",
                    fix="name the directories as when the cache was made, or choose another name",
                )
        first = self.directories[0]
        for directory, part in zip(self.directories[1:], parts[1:], strict=True):
            if part and not _is_own(directory, known, first):
                raise errors.ForeignFileError(
                    "the folder is of another cache, which this one is a copy of",
                    path=directory,
                    expected=f"a folder that is marked as that of {first}",
                    fix=FIX,
                )
            if not ownership.is_up_to_date(directory, first):
                ownership.set_mark(directory, known, first)
        for directory, part, mark in zip(self.directories, parts, expected, strict=True):
            if mark and not part:
                path = os.path.join(directory, _PART)
                try:
                    with open(path, "w", encoding="utf-8") as file:
                        file.write(f"{mark}\n")
                except OSError as error:
                    raise write_error(
                        "cannot mark a folder of a kept cache", path, error
                    ) from error

    @property
    def exists(self) -> bool:
        """Something was saved."""
        return os.path.exists(os.path.join(self.directories[0], MANIFEST))

    def touch(self) -> None:
        """It was used now."""
        path = os.path.join(self.directories[0], USED)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))  # empty: needs no room
            os.utime(path)
        except OSError as error:
            raise write_error("cannot note that a kept cache was used", path, error) from error

    def hold(self) -> None:
        """Stays locked until the process ends, whoever drops it."""
        self.unlock.atexit = False
        _HELD.add(self)

    def abandon(self) -> None:
        """Unlocks; if nothing was saved, nothing stays."""
        if not self.exists:
            remove_files(self.directories)
        self.unlock()
