"""The work folder of a build: what is finished, found again by the next attempt at the same build."""

from __future__ import annotations

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


class WorkFolder:
    """Steps of a build, each a folder that is renamed into place when it is whole.

    Args:
        directory: of what is built.
        job: what the result depends on. What another job has left is removed.
    """

    def __init__(self, directory: str, job: Mapping[str, Any]):
        self._root = Path(directory) / WORK
        text = json.dumps(job, sort_keys=True)
        with self.writing():
            if not self._is_of(text):
                shutil.rmtree(self._root, ignore_errors=True)
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
        """Of a finished step."""
        return self._root / step / name

    @contextmanager
    def step(self, name: str) -> Iterator[Path]:
        """A folder to write a step into, which is finished when the block ends without an error. Raises WriteError, DiskFullError."""
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
            raise write_error("cannot write the work folder of a build", self._root, error) from error

    def drop(self, step: str, *names: str) -> None:
        """Removes files of a finished step that nothing needs any more."""
        for name in names:
            self.file(step, name).unlink(missing_ok=True)

    def remove_step(self, step: str) -> None:
        """Removes a finished step, which is not finished any more whatever happens meanwhile. Raises WriteError."""
        gone = self._root / f"{step}.new"
        with self.writing():
            shutil.rmtree(gone, ignore_errors=True)
            os.replace(self._root / step, gone)
            shutil.rmtree(gone, ignore_errors=True)

    def remove(self) -> None:
        """Removes all of it."""
        shutil.rmtree(self._root, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
