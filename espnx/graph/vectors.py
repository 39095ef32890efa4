"""Vectors from arrays and files, block by block: what a graph is built from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import errors
from ..checks import check_path
from ..suggestions import suggests_keywords

#: What `read_vectors` knows by a file's ending.
SUFFIXES = (".npy", ".fvecs", ".bvecs", ".fbin", ".u8bin", ".i8bin", ".parquet")
_BLOCK_BYTES = 4 << 20
_BIN_TYPES = {".fbin": np.float32, ".u8bin": np.uint8, ".i8bin": np.int8}
_VECS_TYPES = {".fvecs": np.float32, ".bvecs": np.uint8}


@dataclass(frozen=True)
class Vectors:
    """Vectors to build from.

    Attributes:
        n, dim: how many, and values of each.
        dtype: of the values as they come: uint8, int8, float16 or float32.
        blocks: begins anew each time it is called: arrays [m, dim], in order.
        name: for messages.
        path: of the file, where they come from one.
        column: of a file that has several, the one that they are.
    """

    n: int
    dim: int
    dtype: np.dtype
    blocks: Callable[[], Iterator[np.ndarray]]
    name: str
    path: Path | None = None
    column: str | None = None


@suggests_keywords
def read_vectors(source: Any, *, column: str | None = None) -> Vectors:
    """Vectors of a source, of which only a block at a time is read into memory.

    Args:
        source: an array or tensor [n, dim]; a file that ends in ``.npy``, ``.fvecs``, ``.bvecs``,
            ``.fbin``, ``.u8bin``, ``.i8bin`` or ``.parquet``; or an iterable of arrays [m, dim],
            which is gathered in memory.
        column: of a Parquet file, lists of one length; None: the only one of that kind.

    Raises:
        InvalidInputError: no such source, shape or dtype.
        FileMissingError, FormatError, TruncatedFileError: the file is not there, or is not what its
            ending says.
        MissingDependencyError: pyarrow, for Parquet, is not installed.
    """
    if isinstance(source, torch.Tensor | np.ndarray):
        return _of_array(as_array(source), "vectors")
    if isinstance(source, str | os.PathLike):
        return _of_file(Path(check_path("file of vectors", source)), column)
    try:
        blocks = [np.atleast_2d(as_array(each)) for each in source]
    except TypeError:
        raise errors.InvalidInputError(
            "vectors",
            got=type(source).__name__,
            expected=f"an array [n, dim], an iterable of such, or a file ({', '.join(SUFFIXES)})",
        ) from None
    if not blocks or len({each.shape[1:] for each in blocks}) != 1:
        raise errors.InvalidInputError(
            "blocks of vectors",
            got=f"{[list(each.shape) for each in blocks[:4]]}",
            expected="arrays [m, dim]",
        )
    return _of_array(np.concatenate(blocks), "vectors")


def as_array(given: Any) -> np.ndarray:
    """NumPy's view of an array or tensor, on any device; bfloat16, which NumPy lacks, as float32.
    Raises InvalidInputError for masked values."""
    if np.ma.is_masked(given):
        raise errors.InvalidInputError(
            "an array",
            got="a masked array with masked values",
            expected="numbers in every place",
            fix="fill it",
        )
    if not isinstance(given, torch.Tensor):
        return np.asarray(given)
    held = given.detach().cpu()
    found: np.ndarray = (held.float() if held.dtype == torch.bfloat16 else held).numpy()
    return found


def _of_array(array: np.ndarray, name: str) -> Vectors:
    if array.ndim != 2 or array.shape[1] == 0:
        raise errors.InvalidInputError(
            f"shape of {name}", got=list(array.shape), expected="[n, dim], dim 1 or more"
        )
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype not in (
        np.dtype(np.uint8),
        np.dtype(np.int8),
        np.dtype(np.float16),
        np.dtype(np.float32),
    ):
        raise errors.InvalidInputError(
            f"dtype of {name}", got=str(array.dtype), expected="uint8, int8, float16 or float32"
        )
    rows = max(1, _BLOCK_BYTES // max(1, array.shape[1] * array.itemsize))

    def blocks() -> Iterator[np.ndarray]:
        for first in range(0, len(array), rows):
            yield array[first : first + rows]

    return Vectors(len(array), array.shape[1], array.dtype, blocks, name)


def _of_table(path: Path, table: np.memmap, field: str | None = None) -> Vectors:
    """A table in a file, whose blocks are read, not mapped: mapped pages that were looked at would
    count as this process's memory."""
    known = _of_array(table[:0] if field is None else table[field][:0], str(path))
    row_bytes = table.dtype.itemsize * (table.shape[1] if field is None else 1)
    rows = max(1, _BLOCK_BYTES // max(1, row_bytes))

    def blocks() -> Iterator[np.ndarray]:
        with path.open("rb") as file:
            file.seek(table.offset)
            for first in range(0, len(table), rows):
                count = min(rows, len(table) - first)
                block = np.fromfile(
                    file, table.dtype, count * row_bytes // table.dtype.itemsize
                ).reshape(-1, *table.shape[1:])
                if len(block) < count:
                    raise errors.TruncatedFileError(
                        "file of vectors",
                        path=path,
                        got=f"{first + len(block)} vectors",
                        expected=len(table),
                    )
                yield block if field is not None else block.astype(known.dtype, copy=False)

    return Vectors(len(table), known.dim, known.dtype, blocks, str(path), path)


def _of_file(path: Path, column: str | None) -> Vectors:
    if not path.is_file():
        raise errors.FileMissingError("a file of vectors is missing", path=path)
    suffix = path.suffix.lower()
    if suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.ndim == 2 and array.size and array.flags.c_contiguous:
                return _of_table(path, array)
            return replace(_of_array(array, str(path)), path=path)
        except (ValueError, EOFError) as error:
            if isinstance(error, errors.EspnxError):
                raise
            raise errors.FormatError(
                "not a .npy file of numbers", path=path, got=str(error)
            ) from error
    if suffix in _VECS_TYPES:
        return _of_vecs(path, np.dtype(_VECS_TYPES[suffix]))
    if suffix in _BIN_TYPES:
        return _of_bin(path, np.dtype(_BIN_TYPES[suffix]))
    if suffix == ".parquet":
        return _of_parquet(path, column)
    raise errors.InvalidInputError(
        "ending of a file of vectors", got=suffix or str(path), expected=", ".join(SUFFIXES)
    )


def _of_bin(path: Path, dtype: np.dtype) -> Vectors:
    """big-ann-benchmarks' files: n and dim as uint32, then the values."""
    size_bytes = path.stat().st_size
    if size_bytes < 8:
        raise errors.TruncatedFileError(
            "file of vectors", path=path, got=f"{size_bytes} bytes", expected="8 or more"
        )
    n, dim = (int(each) for each in np.fromfile(path, "<u4", 2))
    if dim == 0 or size_bytes != 8 + n * dim * dtype.itemsize:
        raise errors.FormatError(
            "file of vectors",
            path=path,
            got=f"{size_bytes} bytes",
            expected=f"{8 + n * dim * dtype.itemsize}, of {n} vectors of {dim} values",
        )
    if n == 0:
        return _of_array(np.empty((0, dim), dtype), str(path))
    return _of_table(path, np.memmap(path, dtype.newbyteorder("<"), "r", offset=8, shape=(n, dim)))


def _of_vecs(path: Path, dtype: np.dtype) -> Vectors:
    """TEXMEX's files: before each vector its dimension as int32."""
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        raise errors.FormatError(
            "file of vectors",
            path=path,
            got="0 bytes",
            expected="vectors: its dimension is not known",
        )
    dim = int(np.fromfile(path, "<i4", 1)[0]) if size_bytes >= 4 else 0
    entry = 4 + dim * dtype.itemsize
    if dim < 1 or size_bytes % entry:
        raise errors.FormatError(
            "file of vectors",
            path=path,
            got=f"{size_bytes} bytes, dimension {dim}",
            expected="entries of one dimension, 1 or more",
        )
    table = np.memmap(
        path, np.dtype([("dim", "<i4"), ("values", dtype.newbyteorder("<"), (dim,))]), "r"
    )
    whole = _of_table(path, table, "values")

    def blocks() -> Iterator[np.ndarray]:
        first = 0
        for part in whole.blocks():
            wrong = np.flatnonzero(part["dim"] != dim)
            if wrong.size:
                raise errors.FormatError(
                    f"vector {first + int(wrong[0])} of a file",
                    path=path,
                    got=f"dimension {part['dim'][wrong[0]]}",
                    expected=dim,
                )
            first += len(part)
            yield part["values"]

    return replace(whole, blocks=blocks)


def _of_parquet(path: Path, column: str | None) -> Vectors:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise errors.MissingDependencyError(
            "Parquet files need pyarrow", got=str(error), fix="pip install 'espnx[arrow]'"
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise errors.FormatError(
            "not a Parquet file", path=path, got=str(error).splitlines()[0]
        ) from error
    lists = [
        field.name
        for field in file.schema_arrow
        if arrow.types.is_list(field.type) or arrow.types.is_fixed_size_list(field.type)
    ]
    if column is None and len(lists) != 1:
        raise errors.InvalidInputError(
            f"column of vectors in {path}",
            got=lists,
            expected="one column of lists, or its name",
            fix="column=",
        )
    name = lists[0] if column is None else column
    if name not in lists:
        raise errors.InvalidInputError(
            f"column of vectors in {path}", got=name, expected=f"one of {lists}"
        )
    n = file.metadata.num_rows

    def blocks() -> Iterator[np.ndarray]:
        for batch in file.iter_batches(batch_size=8192, columns=[name]):
            values = batch.column(0)
            if values.null_count:
                raise errors.FormatError(
                    f"column {name}",
                    path=path,
                    got="empty entries",
                    expected="a vector in every row",
                )
            inner = values.flatten()
            if inner.null_count:
                raise errors.FormatError(
                    f"column {name}",
                    path=path,
                    got="a value that is missing",
                    expected="a number in every place",
                )
            flat = inner.to_numpy(zero_copy_only=False)
            if flat.size % max(1, len(values)) or len({len(each) for each in values}) > 1:
                raise errors.FormatError(
                    f"column {name}",
                    path=path,
                    got="lists of several lengths",
                    expected="one length",
                )
            yield flat.reshape(len(values), -1)

    if n == 0:
        raise errors.FormatError(
            f"column {name}",
            path=path,
            got="0 rows",
            expected="vectors: their dimension is not known",
        )
    first = next(blocks())
    known = _of_array(first, str(path))

    def checked() -> Iterator[np.ndarray]:
        for block in blocks():
            if block.shape[1] != known.dim:
                raise errors.FormatError(
                    f"column {name}",
                    path=path,
                    got=f"a vector of {block.shape[1]} values",
                    expected=known.dim,
                )
            yield block.astype(known.dtype, copy=False)

    return Vectors(n, known.dim, known.dtype, checked, str(path), path, name)
