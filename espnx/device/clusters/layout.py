"""A file of clusters as it lies on storage, parsed and never believed.

A directory holds three files (the written specification is docs/device-verbs.md)::

    clusters.bin    cluster after cluster: for each vector an int32 id and its raw values,
                    zeros up to the next page of 4096 bytes
    clusters.table  for each cluster its number of vectors and the CRC32C of its entries,
                    uint32 each
    MANIFEST.json   format, dimension, counts, sizes and the table's checksum; written last

Where a cluster begins follows from the sizes of those before it, so nothing in the files can place
two clusters on one another.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from ... import errors
from ...ops.distances import DIM_MAX, VECTOR_FORMATS, vector_bytes
from ...storage import NativeEngine
from ...storage.files import crc32c, read_file
from ...storage.manifest import read_manifest
from ...storage.parse import Fields, check_file_size
from ...storage.replacing import versioned
from ..vectors.interface import PAGE_BYTES

MAGIC, VERSION = "espnx-clusters", 1
DATA_NAME, TABLE_NAME = "clusters.bin", "clusters.table"
#: Of one cluster: it is read in one piece.
CLUSTER_BYTES_MAX = 64 << 20
#: A cluster's address is a number of 32 bits.
PAGES_MAX = 2**32
CLUSTERS_MAX = 2**31
ID_BYTES = 4
#: Formats of vectors, and their names in NumPy, which has no bfloat16.
FORMATS = {
    name: str(dtype).removeprefix("torch.")
    for name, dtype in VECTOR_FORMATS.items()
    if name != "bf16"
}
TABLE = np.dtype([("n_vectors", "<u4"), ("crc32c", "<u4")])
_REBUILD = "restore the directory from a copy, or write the clusters again"


def entry_bytes(format: str, dim: int) -> int:  # noqa: A002
    """Bytes of a vector and its id."""
    return ID_BYTES + vector_bytes(format, dim)


def pages_of(n_vectors: np.ndarray, entry: int) -> np.ndarray:
    """int64: whole pages that clusters of so many vectors take."""
    return -(-n_vectors.astype(np.int64) * entry // PAGE_BYTES)


@dataclass(frozen=True, eq=False)
class ClusterFile:
    """A file of clusters that was found whole. Its entries are checked when they are read.

    Attributes:
        path: of the entries.
        format: of the vectors, a key of `FORMATS`.
        dim: values of a vector.
        n_vectors: int64 [clusters], of each.
        crc32c: uint32 [clusters], of each one's entries.
        first_page: int64 [clusters + 1]: where each begins; the last is the end.
    """

    path: str
    format: str
    dim: int
    n_vectors: np.ndarray
    crc32c: np.ndarray
    first_page: np.ndarray

    @property
    def n_clusters(self) -> int:
        return len(self.n_vectors)

    @property
    def entry_bytes(self) -> int:
        """Bytes of a vector and its id."""
        return entry_bytes(self.format, self.dim)

    @property
    def size_bytes(self) -> int:
        """Bytes of the file of entries."""
        return int(self.first_page[-1]) * PAGE_BYTES

    @property
    def memory_bytes(self) -> int:
        """Bytes that stay in host memory."""
        return int(self.n_vectors.nbytes + self.crc32c.nbytes + self.first_page.nbytes)

    @property
    def entry_dtype(self) -> np.dtype:
        """The layout of the entries: fields ``id`` and ``vector``."""
        return entry_dtype(self.format, self.dim)

    def offset_bytes(self, clusters: np.ndarray) -> np.ndarray:
        """int64: where those clusters begin in the file."""
        return self.first_page[clusters] * PAGE_BYTES

    def size_bytes_of(self, clusters: np.ndarray) -> np.ndarray:
        """int64: of their entries."""
        return self.n_vectors[clusters] * self.entry_bytes

    def check_clusters(self, clusters: object) -> np.ndarray:
        """Numbers of clusters as int64 [m]. Raises InvalidInputError for what is none, or not
        there."""
        found = np.asarray(clusters)
        if found.size == 0:
            found = found.astype(np.int64)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise errors.InvalidInputError(
                "clusters",
                got=f"{found.dtype} {list(found.shape)}",
                expected="numbers of clusters, int64 [m]",
            )
        outside = (found < 0) | (found >= self.n_clusters)
        if outside.any():
            raise errors.InvalidInputError(
                "number of a cluster",
                got=int(found[outside][0]),
                expected=f"0 to {self.n_clusters - 1}" if self.n_clusters else "none",
            )
        return np.ascontiguousarray(found, dtype=np.int64)


def entry_dtype(format: str, dim: int) -> np.dtype:  # noqa: A002
    """The layout of an entry, without holes: ``id`` int32 and ``vector`` [dim]."""
    return np.dtype([("id", "<i4"), ("vector", FORMATS[format], (dim,))])


def read_clusters(engine: NativeEngine, directory: str | os.PathLike[str]) -> ClusterFile:
    """What a directory of clusters says of itself.

    Raises:
        StoreNotFoundError: nothing was written there.
        FormatError, ChecksumError, TruncatedFileError, FileMissingError: damaged, or of another
            kind or version.
    """
    fields = Fields(
        read_manifest(engine, directory, MAGIC, VERSION),
        os.path.join(directory, "MANIFEST.json"),
        fix=_REBUILD,
    )
    format = fields.choice("format", FORMATS)  # noqa: A001
    dim = fields.whole("dim", 1, DIM_MAX)
    n_clusters = fields.whole("n_clusters", 0, CLUSTERS_MAX)
    generation = fields.whole("generation", 1)
    table_path = os.path.join(directory, versioned(TABLE_NAME, generation))
    table = _read_table(engine, table_path, n_clusters, fields.whole("table_crc32c", 0, 2**32 - 1))
    n_vectors = table["n_vectors"].astype(np.int64)
    entry = entry_bytes(format, dim)
    too_long = np.flatnonzero(n_vectors > CLUSTER_BYTES_MAX // entry)
    if too_long.size:
        raise errors.FormatError(
            f"cluster {too_long[0]} of a table",
            path=table_path,
            got=f"{n_vectors[too_long[0]]} vectors",
            expected=f"at most {CLUSTER_BYTES_MAX // entry}",
            fix=_REBUILD,
        )
    if int(n_vectors.sum()) != fields.whole("n_vectors"):
        fields.refuse("n_vectors", f"{int(n_vectors.sum())}, as the table has")
    first_page = np.concatenate([np.zeros(1, np.int64), np.cumsum(pages_of(n_vectors, entry))])
    if fields.whole("data_bytes", 0, PAGES_MAX * PAGE_BYTES) != first_page[-1] * PAGE_BYTES:
        fields.refuse("data_bytes", f"{first_page[-1] * PAGE_BYTES}, as the table has")
    data_path = os.path.join(directory, versioned(DATA_NAME, generation))
    found = ClusterFile(data_path, format, dim, n_vectors, table["crc32c"].copy(), first_page)
    check_file_size(found.path, found.size_bytes, "file of clusters", _REBUILD)
    return found


def _read_table(engine: NativeEngine, path: str, n_clusters: int, expected_crc: int) -> np.ndarray:
    check_file_size(path, n_clusters * TABLE.itemsize, "file of clusters", _REBUILD)
    data = read_file(engine, path)
    if crc32c(data) != expected_crc:
        raise errors.ChecksumError(
            "table of clusters",
            path=path,
            got=f"CRC32C {crc32c(data):08x}",
            expected=f"{expected_crc:08x}",
            fix=_REBUILD,
        )
    return np.frombuffer(data, TABLE)
