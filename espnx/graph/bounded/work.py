"""The work folder of a build: what is finished, found again by the next attempt at the same build."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ... import errors
from ...storage.files import write_error
from ..vectors import Vectors
from ..write import WORK

_JOB = "job.json"


class WorkFolder:
    """Steps of a build, each a folder that is renamed into place when it is whole.

    Args:
        directory: of the graph.
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

    def remove(self) -> None:
        """Removes all of it."""
        shutil.rmtree(self._root, ignore_errors=True)


def identity(source: Vectors) -> str:
    """What tells one input from another: of a file its path, size and time; else a digest of the values."""
    if source.path is not None:
        facts = source.path.stat()
        return f"{source.path.resolve()}, {facts.st_size} bytes, {facts.st_mtime_ns} ns"
    digest = hashlib.sha256()
    for block in source.blocks():
        digest.update(np.ascontiguousarray(block).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def read_array(path: Path, dtype: np.dtype | type | str, width: int | None = None, first: int = 0, count: int = -1) -> np.ndarray:
    """Rows [m, width] (or values [m]) of a plain file, `count` from row `first` on; -1: all that follow. Raises ReadError."""
    made = np.dtype(dtype)
    row = width or 1
    try:
        with path.open("rb") as file:
            file.seek(first * row * made.itemsize)
            values = np.fromfile(file, made, count * row if count >= 0 else -1)
    except OSError as error:
        raise errors.ReadError("cannot read the work folder of a build", path=path, errno=error.errno) from error
    if values.size % row or count not in (-1, values.size // row):
        raise errors.TruncatedFileError(
            "file of a build that was interrupted", path=path, got=f"{values.size} numbers", expected=f"{max(count, 1)} times {row}",
            fix="remove the directory, and build anew",
        )  # fmt: skip
    return values if width is None else values.reshape(-1, width)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
