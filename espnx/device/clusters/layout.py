"""A file of clusters as it lies on storage, parsed and never believed.

A directory holds three files (the written specification is docs/device-verbs.md)::

    clusters.bin    clusters at the places that the table says: for each vector an int32 id and its
                    raw values; zeros between them
    clusters.table  for each cluster where it begins, uint64, its number of vectors and the CRC32C
                    of its entries, uint32 each
    MANIFEST.json   format, dimension, page size, counts, sizes and the table's checksum; written
                    last

Several clusters may share a page of flash, but none touches more pages than its size asks for: what
fits a page never straddles two. No two clusters overlap.

The same may lie inside another file, as sections (`ClusterSections`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import errors
from ...checks import check_whole
from ...ops.distances import DIM_MAX, VECTOR_FORMATS, vector_bytes
from ...storage import NativeEngine
from ...storage.files import Region, crc32c, read_region
from ...storage.manifest import read_manifest
from ...storage.parse import Fields, check_file_size
from ...storage.replacing import versioned
from ..vectors.interface import PAGE_BYTES

MAGIC, VERSION = "espnx-clusters", 2
DATA_NAME, TABLE_NAME = "clusters.bin", "clusters.table"
#: Files of an index over the clusters, which lie beside them and go with them.
INDEX_NAMES = ("heads.bin", "heads.links", "heads.graph", "closure.work", "lists.work")
#: Where an index's facts stand in the manifest.
INDEX_FIELD = "index"
#: Of one cluster: it is read in one piece.
CLUSTER_BYTES_MAX = 64 << 20
#: A cluster's address is a number of 32 bits, of pages of 4096 bytes.
PAGES_MAX = 2**32
CLUSTERS_MAX = 2**31
ID_BYTES = 4
#: A page of flash: a power of two, from `PAGE_BYTES` to this.
PAGE_BYTES_MAX = 1 << 16
#: Clusters begin at multiples of this: ids are numbers of 4 bytes.
ALIGNMENT_BYTES = 4
#: Formats of vectors, and their names in NumPy, which has no bfloat16.
FORMATS = {
    name: str(dtype).removeprefix("torch.")
    for name, dtype in VECTOR_FORMATS.items()
    if name != "bf16"
}
TABLE = np.dtype([("offset_bytes", "<u8"), ("n_vectors", "<u4"), ("crc32c", "<u4")])
REBUILD = "restore the directory from a copy, or write the clusters again"


@dataclass(frozen=True)
class ClusterSections:
    """Clusters inside another file, as sections that are named like the files of a directory
    (`section_of`).

    Attributes:
        where: for messages. manifest: what their manifest says. regions: of the sections; each
            begins at a multiple of 4096 bytes, so that is what a page of flash may have.
    """

    where: str
    manifest: Mapping[str, Any]
    regions: Mapping[str, Region]


#: A directory of clusters, or sections of another file.
ClusterSource = str | os.PathLike[str] | ClusterSections


def section_of(file: str) -> str:
    """The section that holds what one of the files of a directory does."""
    return file.removesuffix(".bin").replace(".", "_")


def located(
    source: ClusterSource, generation: int, name: str, size_bytes: int, what: str
) -> Region:
    """The place of one of the files, of the size that it must have: checked before memory is taken
    for it.

    Args:
        what: the file is, for messages.

    Raises FileMissingError, TruncatedFileError, FormatError, ReadError.
    """
    if not isinstance(source, ClusterSections):
        path = os.path.join(source, versioned(name, generation))
        check_file_size(path, size_bytes, what, REBUILD)
        return Region(path, 0, size_bytes)
    found = source.regions.get(section_of(name))
    if found is None or found.size_bytes != size_bytes or found.offset_bytes % PAGE_BYTES:
        raise errors.FormatError(
            f"section {section_of(name)}, a {what}",
            path=source.where,
            got="none"
            if found is None
            else f"{found.size_bytes} bytes at byte {found.offset_bytes}",
            expected=f"{size_bytes} bytes at a multiple of {PAGE_BYTES}",
            fix=REBUILD,
        )
    return found


def entry_bytes(format: str, dim: int) -> int:  # noqa: A002
    """Bytes of a vector and its id."""
    return ID_BYTES + vector_bytes(format, dim)


def pages_touched(
    begin_bytes: np.ndarray, size_bytes: np.ndarray, page_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    """(the first page of each, how many it touches), int64; 0 of what is empty."""
    first = begin_bytes // page_bytes
    count = np.where(size_bytes > 0, (begin_bytes + size_bytes - 1) // page_bytes - first + 1, 0)
    return first, count


def check_page_bytes(page_bytes: int) -> None:
    """Raises InvalidInputError for what is no size of a page."""
    check_whole("page_bytes, of a page of flash", page_bytes, PAGE_BYTES, PAGE_BYTES_MAX)
    if page_bytes & (page_bytes - 1):
        raise errors.InvalidInputError(
            "page_bytes, of a page of flash", got=page_bytes, expected="a power of two"
        )


def misplaced(
    begin_bytes: np.ndarray, size_bytes: np.ndarray, page_bytes: int, end_bytes: int
) -> tuple[int, str, str] | None:
    """The first cluster that lies where none may, what is wrong with it, and what would not be;
    None: all are in their places.

    Args:
        begin_bytes, size_bytes: int64 [clusters]. end_bytes: of the file.
    """
    begin_limit = np.where(size_bytes > 0, end_bytes - size_bytes, 0)
    wrong = np.flatnonzero((begin_bytes < 0) | (begin_bytes > begin_limit))
    if wrong.size:
        which = int(wrong[0])
        most = max(0, int(begin_limit[which]))
        return which, f"at byte {begin_bytes[which]}", f"0 to {most}, in the file"
    wrong = np.flatnonzero(begin_bytes % ALIGNMENT_BYTES)
    if wrong.size:
        which = int(wrong[0])
        return which, f"at byte {begin_bytes[which]}", f"a multiple of {ALIGNMENT_BYTES}"
    _, pages = pages_touched(begin_bytes, size_bytes, page_bytes)
    wrong = np.flatnonzero(pages > -(-size_bytes // page_bytes))
    if wrong.size:
        which = int(wrong[0])
        fit = -(-int(size_bytes[which]) // page_bytes)
        return which, f"{size_bytes[which]} bytes on {pages[which]} pages", f"on {fit}"
    held = np.flatnonzero(size_bytes > 0)
    order = held[np.argsort(begin_bytes[held], kind="stable")]
    end = begin_bytes[order] + size_bytes[order]
    wrong = np.flatnonzero(begin_bytes[order][1:] < end[:-1])
    if wrong.size:
        before, which = (int(each) for each in order[wrong[0] : wrong[0] + 2])
        return which, f"at byte {begin_bytes[which]}", f"behind cluster {before}, {end[wrong[0]]}"
    return None


@dataclass(frozen=True, eq=False)
class ClusterFile:
    """A file of clusters that was found whole. Its entries are checked when they are read.

    Attributes:
        path: of the entries.
        format: of the vectors, a key of `FORMATS`.
        dim: values of a vector.
        page_bytes: of a page of flash.
        n_vectors: int64 [clusters], of each.
        crc32c: uint32 [clusters], of each one's entries.
        begin_bytes: int64 [clusters]: where each begins, counted from that of all entries.
        size_bytes: of all entries.
        generation: of its files.
        index: what an index over the clusters has in the manifest; None: there is none.
        first_byte: at which the entries begin in `path`.
    """

    path: str
    format: str
    dim: int
    page_bytes: int
    n_vectors: np.ndarray
    crc32c: np.ndarray
    begin_bytes: np.ndarray
    size_bytes: int
    generation: int
    index: Fields | None = None
    first_byte: int = 0

    @property
    def n_clusters(self) -> int:
        return len(self.n_vectors)

    @property
    def entry_bytes(self) -> int:
        """Bytes of a vector and its id."""
        return entry_bytes(self.format, self.dim)

    @property
    def memory_bytes(self) -> int:
        """Bytes that stay in host memory."""
        return int(self.n_vectors.nbytes + self.crc32c.nbytes + self.begin_bytes.nbytes)

    @property
    def entry_dtype(self) -> np.dtype:
        """The layout of the entries: fields ``id`` and ``vector``."""
        return entry_dtype(self.format, self.dim)

    def offset_bytes(self, clusters: np.ndarray) -> np.ndarray:
        """int64: where those clusters begin in the file."""
        found: np.ndarray = self.begin_bytes[clusters] + self.first_byte
        return found

    def new_pages(self, clusters: np.ndarray) -> np.ndarray:
        """See `Clusters`."""
        first, count = pages_touched(
            self.begin_bytes[clusters], self.size_bytes_of(clusters), self.page_bytes
        )
        owner = np.repeat(np.arange(len(clusters)), count)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        _, firsts = np.unique(first[owner] + within, return_index=True)
        return np.bincount(owner[firsts], minlength=len(clusters))

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


def read_clusters(engine: NativeEngine, source: ClusterSource) -> ClusterFile:
    """What a directory of clusters, or sections of another file, say of themselves.

    Raises:
        StoreNotFoundError: nothing was written there.
        FormatError, ChecksumError, TruncatedFileError, FileMissingError: damaged, or of another
            kind or version.
    """
    if isinstance(source, ClusterSections):
        fields = Fields(source.manifest, source.where, fix=REBUILD)
        generation = 1
    else:
        said = read_manifest(engine, source, MAGIC, VERSION)
        fields = Fields(said, os.path.join(source, "MANIFEST.json"), fix=REBUILD)
        generation = fields.whole("generation", 1)
    format = fields.choice("format", FORMATS)  # noqa: A001
    dim = fields.whole("dim", 1, DIM_MAX)
    page_bytes = fields.whole("page_bytes", PAGE_BYTES, PAGE_BYTES_MAX)
    if page_bytes & (page_bytes - 1):
        fields.refuse("page_bytes", "a power of two")
    if page_bytes > PAGE_BYTES and isinstance(source, ClusterSections):
        fields.refuse("page_bytes", f"{PAGE_BYTES}: sections begin at multiples of it", page_bytes)
    n_clusters = fields.whole("n_clusters", 0, CLUSTERS_MAX)
    size_bytes = n_clusters * TABLE.itemsize
    place = located(source, generation, TABLE_NAME, size_bytes, "file of clusters")
    table = _read_table(engine, place, fields.whole("table_crc32c", 0, 2**32 - 1))
    n_vectors = table["n_vectors"].astype(np.int64)
    entry = entry_bytes(format, dim)
    too_long = np.flatnonzero(n_vectors > CLUSTER_BYTES_MAX // entry)
    if too_long.size:
        raise errors.FormatError(
            f"cluster {too_long[0]} of a table",
            path=place.path,
            got=f"{n_vectors[too_long[0]]} vectors",
            expected=f"at most {CLUSTER_BYTES_MAX // entry}",
            fix=REBUILD,
        )
    if int(n_vectors.sum()) != fields.whole("n_vectors"):
        fields.refuse("n_vectors", f"{int(n_vectors.sum())}, as the table has")
    size_bytes = fields.whole("data_bytes", 0, PAGES_MAX * PAGE_BYTES)
    if size_bytes % PAGE_BYTES:
        fields.refuse("data_bytes", f"a multiple of {PAGE_BYTES}")
    begin_bytes = table["offset_bytes"].astype(np.int64)  # above 2^63: below 0, and refused
    if wrong := misplaced(begin_bytes, n_vectors * entry, page_bytes, size_bytes):
        raise errors.FormatError(
            f"cluster {wrong[0]} of a table",
            path=place.path,
            got=wrong[1],
            expected=wrong[2],
            fix=REBUILD,
        )
    data = located(source, generation, DATA_NAME, size_bytes, "file of clusters")
    return ClusterFile(
        data.path,
        format,
        dim,
        page_bytes,
        n_vectors,
        table["crc32c"].copy(),
        begin_bytes,
        size_bytes,
        generation,
        fields.inner(INDEX_FIELD) if INDEX_FIELD in fields else None,
        data.offset_bytes,
    )


def _read_table(engine: NativeEngine, place: Region, expected_crc: int) -> np.ndarray:
    data = read_region(engine, place)
    if crc32c(data) != expected_crc:
        raise errors.ChecksumError(
            "table of clusters",
            path=place.path,
            offset_bytes=place.offset_bytes,
            got=f"CRC32C {crc32c(data):08x}",
            expected=f"{expected_crc:08x}",
            fix=REBUILD,
        )
    return data.view(TABLE)
