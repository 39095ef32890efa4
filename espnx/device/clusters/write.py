"""Writes a file of clusters from vectors and the clusters that they belong to."""

from __future__ import annotations

import os

import numpy as np
import torch

from ... import errors
from ...ops.distances.checks import check_dim
from ...storage import NativeEngine
from ...storage.files import StreamWriter, crc32c, names_in, write_file
from ...storage.manifest import NAME, write_manifest
from ...storage.native import given_engine
from ...storage.replacing import StoreKind, VersionedFiles, versioned, writing_to
from ..vectors.interface import PAGE_BYTES
from .layout import (
    CLUSTER_BYTES_MAX,
    CLUSTERS_MAX,
    DATA_NAME,
    FORMATS,
    MAGIC,
    PAGES_MAX,
    TABLE,
    TABLE_NAME,
    VERSION,
    entry_dtype,
    pages_of,
)

_FILES = VersionedFiles((DATA_NAME, TABLE_NAME))
KIND = StoreKind(
    MAGIC,
    VERSION,
    "clusters",
    lambda path: [
        name for name in names_in(path) if not _FILES.is_own(name) and name != f"{NAME}.new"
    ],
)


def write_clusters(
    directory: str | os.PathLike[str],
    ids: np.ndarray | torch.Tensor,
    vectors: np.ndarray | torch.Tensor,
    assignment: np.ndarray | torch.Tensor,
    *,
    n_clusters: int | None = None,
    replace: bool = False,
    engine: NativeEngine | None = None,
) -> None:
    """Writes clusters of vectors; the directory is a whole file of clusters when this returns, or
    none.

    Args:
        directory: a new one, or an empty one.
        ids: whole numbers [n] that int32 holds.
        vectors: [n, dim] of uint8, int8, float16 or float32; a `numpy.memmap` is read cluster by
            cluster.
        assignment: [n]: the cluster of each vector, from 0; or [n, r]: up to r of them, -1 where
            there are fewer. Within a cluster, vectors keep their order.
        n_clusters: with empty ones at the end; None: up to the largest that is named.
        replace: clusters that are there, which stay as they are until the new ones are whole.
        engine: of the writes; None: one of its own.

    Raises:
        InvalidInputError: shapes and dtypes; ids that int32 does not hold; a cluster of more than
            64 MiB; a directory with clusters in it that are not to be replaced, or with something
            else.
        WriteError, DiskFullError, StoreBusyError: the directory cannot be written, is full, or
            somebody else writes there.
    """
    number, rows = _number(ids, "ids"), _array(vectors)
    format = _format(rows)  # noqa: A001
    clusters, members = _members(_number(assignment, "assignment"), len(rows))
    entry = entry_dtype(format, rows.shape[1])
    if len(number) != len(rows) or number.ndim != 1:
        raise errors.InvalidInputError(
            "ids of vectors", got=list(number.shape), expected=f"[{len(rows)}], one for each vector"
        )
    if number.size and not -(2**31) <= int(number.min()) <= int(number.max()) < 2**31:
        raise errors.InvalidInputError(
            "ids of vectors",
            got=f"{number.min()} to {number.max()}",
            expected="numbers that int32 holds",
        )
    counts = _counts(clusters, n_clusters, entry.itemsize)
    with (
        given_engine(engine) as own,
        writing_to(directory, KIND, replace=replace) as is_replacement,
    ):
        generation = _FILES.begin(own, directory, KIND, is_replacement=is_replacement)
        data_path, table_path = (
            os.path.join(directory, versioned(name, generation)) for name in (DATA_NAME, TABLE_NAME)
        )
        table = np.zeros(len(counts), TABLE)
        table["n_vectors"] = counts
        data_bytes = _write_entries(own, data_path, entry, number, rows, members, table)
        _, table_crc32c = write_file(own, table_path, table.tobytes())
        facts = {
            "generation": generation,
            "format": format,
            "dim": rows.shape[1],
            "n_clusters": len(counts),
            "n_vectors": len(members),
            "data_bytes": data_bytes,
            "table_crc32c": table_crc32c,
        }
        write_manifest(own, directory, MAGIC, VERSION, facts)
        _FILES.keep(directory, generation)


def _write_entries(
    engine: NativeEngine,
    path: str,
    entry: np.dtype,
    number: np.ndarray,
    rows: np.ndarray,
    members: np.ndarray,
    table: np.ndarray,
) -> int:
    """Fills in the table's checksums. Returns the file's size."""
    begin = 0
    with StreamWriter(engine, path) as writer:
        for cluster, count in enumerate(table["n_vectors"].tolist()):
            chosen = members[begin : begin + count]
            begin += count
            entries = np.empty(count, entry)
            entries["id"], entries["vector"] = number[chosen], rows[chosen]
            data = entries.view(np.uint8)
            table["crc32c"][cluster] = crc32c(data)
            writer.write(data)
            writer.pad(PAGE_BYTES)
        writer.sync()
        return writer.size_bytes


def _array(values: np.ndarray | torch.Tensor) -> np.ndarray:
    return (
        values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asanyarray(values)
    )


def _number(values: np.ndarray | torch.Tensor, name: str) -> np.ndarray:
    found = _array(values)
    if found.dtype.kind not in "iu" and found.size:
        raise errors.InvalidInputError(
            f"{name} of vectors", got=str(found.dtype), expected="whole numbers"
        )
    return found


def _format(rows: np.ndarray) -> str:
    formats = {dtype: name for name, dtype in FORMATS.items()}
    if rows.ndim != 2 or rows.dtype.name not in formats:
        raise errors.InvalidInputError(
            "vectors of clusters",
            got=f"{rows.dtype} {list(rows.shape)}",
            expected=f"[n, dim] of {', '.join(formats)}",
        )
    check_dim(rows.shape[1])
    return formats[rows.dtype.name]


def _members(assignment: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(the clusters, ordered; which vector is meant by each), both int64 [entries]."""
    if assignment.ndim not in (1, 2) or len(assignment) != n:
        raise errors.InvalidInputError(
            "assignment of vectors", got=list(assignment.shape), expected=f"[{n}] or [{n}, r]"
        )
    if (
        assignment.size
        and not (-1 if assignment.ndim == 2 else 0)
        <= int(assignment.min())
        <= int(assignment.max())
        < CLUSTERS_MAX
    ):
        raise errors.InvalidInputError(
            "assignment of vectors",
            got=f"{assignment.min()} to {assignment.max()}",
            expected=f"0 to {CLUSTERS_MAX - 1}, and -1 for none where a vector may have several",
        )
    named = (assignment if assignment.ndim == 2 else assignment[:, None]).astype(np.int64)
    vector, place = np.nonzero(named >= 0)
    order = np.argsort(named[vector, place], kind="stable")
    return named[vector, place][order], vector[order]


def _counts(clusters: np.ndarray, n_clusters: int | None, entry: int) -> np.ndarray:
    """int64 [clusters]: vectors of each. Raises InvalidInputError for what no file can hold."""
    least = int(clusters[-1]) + 1 if clusters.size else 0
    total = least if n_clusters is None else n_clusters
    if not least <= total <= CLUSTERS_MAX:
        raise errors.InvalidInputError(
            "n_clusters", got=total, expected=f"{least} to {CLUSTERS_MAX}"
        )
    counts = np.bincount(clusters, minlength=total)
    if counts.size and counts.max() * entry > CLUSTER_BYTES_MAX:
        raise errors.InvalidInputError(
            f"cluster {counts.argmax()}",
            got=f"{counts.max()} vectors of {entry} bytes",
            expected=f"at most {CLUSTER_BYTES_MAX} bytes",
            fix="make more clusters",
        )
    if int(pages_of(counts, entry).sum()) > PAGES_MAX:
        raise errors.InvalidInputError(
            "clusters",
            got=f"{int(pages_of(counts, entry).sum())} pages",
            expected=f"at most {PAGES_MAX}",
        )
    return counts
