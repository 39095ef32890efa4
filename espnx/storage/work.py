"""The work folder of a build: what is finished, found again by the next attempt at the same
build."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import errors
from .files import write_error

#: Of the folder, in the directory of what is built, until that is whole.
WORK = "work"
_JOB = "job.json"


def is_own_work(directory: str | os.PathLike[str]) -> bool:
    """Whether the folder ``work`` of a directory is what a build has left, not a user's own of that
    name: empty, or steps and their job.

    False where there is none, and where nobody may look into it.
    """
    root = Path(directory) / WORK
    try:
        if root.is_symlink():
            return False
        there = {each.name: each.is_dir(follow_symlinks=False) for each in os.scandir(root)}
    except OSError:
        return False
    if not there:
        return True
    names = there.keys() & {_JOB, f"{_JOB}.new"}
    return bool(names) and all(is_folder != (name in names) for name, is_folder in there.items())


def check_work(directory: str | os.PathLike[str]) -> None:
    """Raises InvalidInputError where ``work`` is there and not a build's own: nothing of a user's
    is ever removed."""
    if os.path.lexists(Path(directory) / WORK) and not is_own_work(directory):
        raise errors.InvalidInputError(
            f"directory {os.fspath(directory)}",
            got=f"a {WORK!r} that no build has left",
            expected="an empty directory",
            fix=f"name another directory, or move {WORK!r} away",
        )


def job_of(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The job of the build whose ``work`` is there; empty where none is, or it cannot be read."""
    try:
        found = (
            json.loads((Path(directory) / WORK / _JOB).read_text())
            if is_own_work(directory)
            else {}
        )
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def remove_work(directory: str | os.PathLike[str]) -> None:
    """Removes ``work`` where it is a build's own, and nothing else. What cannot be removed
    stays."""
    if is_own_work(directory):
        with contextlib.suppress(OSError):
            _remove(Path(directory) / WORK)


def _remove(root: Path) -> None:
    """The job last: interrupted anywhere, what is left still says whose it is."""
    for each in root.iterdir():
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
    if not any(each.is_dir() for each in root.iterdir()):
        shutil.rmtree(root, ignore_errors=True)


class WorkFolder:
    """Steps of a build, each a folder that is renamed into place when it is whole.

    Args:
        directory: of what is built.
        job: what the result depends on. What another job has left is removed.

    Raises InvalidInputError for a folder of that name that no build has left; WriteError,
    DiskFullError.
    """

    def __init__(self, directory: str, job: Mapping[str, Any]):
        self._root = Path(directory) / WORK
        text = json.dumps(job, sort_keys=True)
        check_work(directory)
        with self.writing():
            if not self._is_of(text):
                remove_work(directory)
                self._root.mkdir()
                (self._root / f"{_JOB}.new").write_text(text)
                os.replace(self._root / f"{_JOB}.new", self._root / _JOB)
            for left in self._root.glob("*.new"):
                shutil.rmtree(left, ignore_errors=True)

    def _is_of(self, text: str) -> bool:
        try:
            return (self._root / _JOB).read_text() == text
        except (OSError, ValueError):
            return False

    def has(self, step: str) -> bool:
        """Whether a step is finished."""
        return (self._root / step).is_dir()

    def file(self, step: str, name: str) -> Path:
        """A file of a finished step."""
        return self._root / step / name

    @contextmanager
    def step(self, name: str) -> Iterator[Path]:
        """A folder to write a step into, which is finished when the block ends without an error.
        Raises WriteError, DiskFullError."""
        unfinished = self._root / f"{name}.new"
        with self.writing():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            yield unfinished
            for each in unfinished.iterdir():  # on the device, before its name says so
                _sync(each)
            _sync(unfinished)
            os.replace(unfinished, self._root / name)
            _sync(self._root)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes errors of the operating system typed ones."""
        try:
            yield
        except OSError as error:
            if isinstance(error, errors.EspnxError):
                raise
            raise write_error(
                "cannot write the work folder of a build", self._root, error
            ) from error

    def drop(self, step: str, *names: str) -> None:
        """Removes files of a finished step that nothing needs any more."""
        for name in names:
            self.file(step, name).unlink(missing_ok=True)

    def remove_step(self, step: str) -> None:
        """Removes a finished step, which is not finished any more whatever happens meanwhile.
        Raises WriteError."""
        gone = self._root / f"{step}.new"
        with self.writing():
            shutil.rmtree(gone, ignore_errors=True)
            os.replace(self._root / step, gone)
            shutil.rmtree(gone, ignore_errors=True)

    def remove(self) -> None:
        """Removes all of it."""
        remove_work(self._root.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
