"""What a build finds in its work folder: whether the input is that of the attempt before, and the
arrays that were written."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from ... import errors
from ..vectors import Vectors


def identity(source: Vectors) -> str:
    """What tells one input from another: of a file its path, size, time and column; else a digest
    of the values."""
    if source.path is not None:
        facts = source.path.stat()
        column = "" if source.column is None else f", column {source.column}"
        return f"{source.path.resolve()}, {facts.st_size} bytes, {facts.st_mtime_ns} ns{column}"
    digest = hashlib.sha256()
    for block in source.blocks():
        digest.update(np.ascontiguousarray(block).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def read_array(
    path: Path,
    dtype: np.dtype | type | str,
    width: int | None = None,
    first: int = 0,
    count: int = -1,
) -> np.ndarray:
    """Rows [m, width] (or values [m]) of a plain file, `count` from row `first` on; -1: all that
    follow. Raises ReadError."""
    made = np.dtype(dtype)
    row = width or 1
    try:
        with path.open("rb") as file:
            file.seek(first * row * made.itemsize)
            values = np.fromfile(file, made, count * row if count >= 0 else -1)
    except OSError as error:
        raise errors.ReadError(
            "cannot read the work folder of a build", path=path, errno=error.errno
        ) from error
    if values.size % row or count not in (-1, values.size // row):
        raise errors.TruncatedFileError(
            "file of a build that was interrupted",
            path=path,
            got=f"{values.size} numbers",
            expected=f"{max(count, 1)} times {row}",
            fix="remove the directory, and build anew",
        )
    return values if width is None else values.reshape(-1, width)
