"""Documents of Parquet and Arrow files, batch by batch, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

from ..errors import InvalidInputError, MissingDependencyError

try:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet
except ImportError as error:
    raise MissingDependencyError(
        "corpora in Parquet and Arrow files need pyarrow",
        got=str(error),
        fix="pip install 'espnx[arrow]'",
    ) from error

_ROWS = 1024


def count_rows(path: str, kind: str) -> int:
    """The rows of a file, from what it says of itself. `kind`: ``parquet`` or ``arrow``."""
    with _opened(path, kind) as file:
        if kind == "parquet":
            return int(file.metadata.num_rows)
        return sum(batch.num_rows for batch in _arrow_batches(file))


def table_rows(path: str, kind: str, wanted: Set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, its fields) of each row; columns that nobody wants are not read. Raises
    InvalidInputError."""
    number = 0
    with _opened(path, kind) as file:
        if kind == "parquet":
            names = [name for name in file.schema_arrow.names if name in wanted]
            batches = file.iter_batches(batch_size=_ROWS, columns=names or None)
        else:
            batches = _arrow_batches(file)
        for batch in batches:
            chosen = batch.select(
                [name for name in batch.schema.names if name in wanted] or batch.schema.names
            )
            for begin in range(0, chosen.num_rows, _ROWS):
                for row in chosen.slice(begin, _ROWS).to_pylist():
                    number += 1
                    yield f"row {number} of {path}", row


@contextmanager
def _opened(path: str, kind: str) -> Iterator[Any]:
    """A `ParquetFile`, or an Arrow file or stream that is mapped into memory."""
    try:
        if kind == "parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                yield file
        else:
            with pyarrow.memory_map(path) as source, _reader(source) as file:
                yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise InvalidInputError(
            f"cannot read corpus {path}",
            got=str(error).splitlines()[0],
            expected=f"a whole {kind} file",
        ) from error


def _reader(source: Any) -> Any:
    try:
        return pyarrow.ipc.open_file(source)
    except pyarrow.ArrowInvalid:  # the format without an index at its end
        source.seek(0)
        return pyarrow.ipc.open_stream(source)


def _arrow_batches(file: Any) -> Iterator[Any]:
    if hasattr(file, "num_record_batches"):
        return (file.get_batch(i) for i in range(file.num_record_batches))
    return iter(file)
