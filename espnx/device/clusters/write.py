"""Writes a file of clusters from vectors and the clusters that they belong to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...ops.distances.checks import check_dim
from ...storage import NativeEngine
from ...storage.files import StreamWriter, crc32c, names_in, write_error, write_file
from ...storage.manifest import NAME, read_manifest, write_manifest
from ...storage.native import given_engine
from ...storage.replacing import StoreKind, VersionedFiles, versioned, writing_to
from ..vectors.interface import PAGE_BYTES
from .layout import (
    CLUSTER_BYTES_MAX,
    CLUSTERS_MAX,
    DATA_NAME,
    FORMATS,
    INDEX_FIELD,
    INDEX_NAMES,
    MAGIC,
    PAGES_MAX,
    TABLE,
    TABLE_NAME,
    VERSION,
    check_page_bytes,
    entry_dtype,
    misplaced,
)

_FILES = VersionedFiles((DATA_NAME, TABLE_NAME, *INDEX_NAMES))
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
    page_bytes: int = PAGE_BYTES,
    offset_bytes: np.ndarray | None = None,
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
        page_bytes: of a page of flash, 4096 to 65536, a power of two.
        offset_bytes: int64 [n_clusters]: where each begins in the file, a multiple of 4; several
            may share a page, and none touches more than its size asks for. None: one after the
            other, each at the beginning of a page.
        replace: clusters that are there, which stay as they are until the new ones are whole.
        engine: of the writes; None: one of its own.

    Raises:
        InvalidInputError: shapes and dtypes; ids that int32 does not hold; a cluster of more than
            64 MiB; places where no cluster may lie; a directory with clusters in it that are not to
            be replaced, or with something else.
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
    check_page_bytes(page_bytes)
    begin = _places(offset_bytes, counts * entry.itemsize, page_bytes)
    first = np.cumsum(counts) - counts

    def entries_of(cluster: int) -> np.ndarray:
        chosen = members[first[cluster] : first[cluster] + counts[cluster]]
        entries = np.empty(len(chosen), entry)
        entries["id"], entries["vector"] = number[chosen], rows[chosen]
        return entries.view(np.uint8)

    with writing_clusters(directory, replace=replace, engine=engine) as store:
        table = np.zeros(len(counts), TABLE)
        table["offset_bytes"], table["n_vectors"] = begin, counts
        data_bytes = store.write(table, page_bytes, entries_of)
        store.publish(format, rows.shape[1], page_bytes, table, data_bytes)


@dataclass(frozen=True)
class ClusterStore:
    """A directory of clusters that is being written: nothing is there before `publish`.

    Attributes:
        engine: of the writes. generation: of the files.
    """

    engine: NativeEngine
    directory: str
    generation: int

    def path(self, name: str) -> str:
        """Names `DATA_NAME`, `TABLE_NAME` or one of `INDEX_NAMES` as files of this generation."""
        return os.path.join(self.directory, versioned(name, self.generation))

    def remove(self, name: str) -> None:
        """Removes a file of this generation, if it is there. Raises WriteError, DiskFullError."""
        try:
            os.unlink(self.path(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise write_error("cannot remove a work file", self.path(name), error) from error

    def write(
        self, table: np.ndarray, page_bytes: int, entries_of: Callable[[int], np.ndarray]
    ) -> int:
        """Writes the file of entries.

        Args:
            table: `TABLE` [clusters]: the checksums are filled in.
            entries_of: the bytes of a cluster that is not empty; asked in the order of places.

        Returns the file's size. Raises WriteError, DiskFullError.
        """
        with StreamWriter(self.engine, self.path(DATA_NAME)) as writer:
            for piece in data_pieces(table, page_bytes, entries_of):
                writer.write(piece)
            writer.sync()
            return writer.size_bytes

    def publish(
        self,
        format: str,  # noqa: A002
        dim: int,
        page_bytes: int,
        table: np.ndarray,
        data_bytes: int,
        index: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes the table, and the manifest that makes all of it a store.

        Args:
            index: facts of an index over the clusters, whose files have been written.

        Raises WriteError, DiskFullError.
        """
        write_file(self.engine, self.path(TABLE_NAME), table.tobytes())
        facts = manifest_of(format, dim, page_bytes, table, data_bytes, index)
        facts["generation"] = self.generation
        write_manifest(self.engine, self.directory, MAGIC, VERSION, facts)
        _FILES.keep(self.directory, self.generation)


def data_pieces(
    table: np.ndarray, page_bytes: int, entries_of: Callable[[int], np.ndarray]
) -> Iterator[np.ndarray]:
    """The file of entries, uint8, piece after piece. Arguments: see `ClusterStore.write`."""
    held = np.flatnonzero(table["n_vectors"])
    end = 0
    for cluster in held[np.argsort(table["offset_bytes"][held], kind="stable")].tolist():
        begin, data = int(table["offset_bytes"][cluster]), entries_of(cluster)
        table["crc32c"][cluster] = crc32c(data)
        if begin > end:
            yield np.zeros(begin - end, np.uint8)
        yield data
        end = begin + len(data)
    if end % page_bytes:
        yield np.zeros(-end % page_bytes, np.uint8)


def manifest_of(
    format: str,  # noqa: A002
    dim: int,
    page_bytes: int,
    table: np.ndarray,
    data_bytes: int,
    index: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a manifest says of clusters whose table is complete. Arguments: see
    `ClusterStore.publish`."""
    facts: dict[str, Any] = {
        "format": format,
        "dim": dim,
        "page_bytes": page_bytes,
        "n_clusters": len(table),
        "n_vectors": int(table["n_vectors"].sum(dtype=np.int64)),
        "data_bytes": data_bytes,
        "table_crc32c": crc32c(table.tobytes()),
    }
    if index is not None:
        facts[INDEX_FIELD] = dict(index)
    return facts


@contextmanager
def writing_clusters(
    directory: str | os.PathLike[str], *, replace: bool, engine: NativeEngine | None = None
) -> Iterator[ClusterStore]:
    """A directory that this process alone writes clusters to. After an error nothing is left of
    what was written. Raises as `write_clusters`."""
    with (
        given_engine(engine) as own,
        writing_to(directory, KIND, replace=replace) as is_replacement,
    ):
        generation = _FILES.begin(own, directory, KIND, is_replacement=is_replacement)
        try:
            yield ClusterStore(own, os.fspath(directory), generation)
        except BaseException:
            with suppress(errors.EspnxError, OSError):
                _tidy(own, directory, generation, is_replacement=is_replacement)
            raise


def _tidy(
    engine: NativeEngine,
    directory: str | os.PathLike[str],
    generation: int,
    *,
    is_replacement: bool,
) -> None:
    """Removes what a write that failed has left, unless its manifest is in force."""
    try:
        published = int(read_manifest(engine, directory, MAGIC, VERSION)["generation"])
    except errors.StoreNotFoundError:
        published = 0
    if published != generation and (published or not is_replacement):
        _FILES.keep(directory, published or None)


def _places(given: np.ndarray | None, size_bytes: np.ndarray, page_bytes: int) -> np.ndarray:
    """int64 [clusters]: where each begins. Raises InvalidInputError for places of another file."""
    pages = -(-size_bytes // page_bytes)
    if given is None:
        begin = np.asarray((np.cumsum(pages) - pages) * page_bytes)
        begin[size_bytes == 0] = 0
    else:
        begin = np.asarray(given)
        if begin.shape != size_bytes.shape or begin.dtype.kind not in "iu":
            raise errors.InvalidInputError(
                "offset_bytes of clusters",
                got=f"{begin.dtype} {list(begin.shape)}",
                expected=f"whole numbers [{len(size_bytes)}]",
            )
        begin = begin.astype(np.int64)
    end_bytes = int((begin + size_bytes).max(initial=0))
    if end_bytes > PAGES_MAX * PAGE_BYTES - page_bytes:
        raise errors.InvalidInputError(
            "clusters",
            got=f"{end_bytes} bytes",
            expected=f"at most {PAGES_MAX} pages of {PAGE_BYTES} bytes",
        )
    if wrong := misplaced(begin, size_bytes, page_bytes, end_bytes):
        raise errors.InvalidInputError(f"cluster {wrong[0]}", got=wrong[1], expected=wrong[2])
    return begin


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
    return counts
