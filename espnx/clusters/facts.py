"""What a directory of lists says of itself, parsed and never believed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from ..device.clusters.layout import REBUILD, ClusterFile, read_clusters
from ..graph.format import METRICS, GraphSections
from ..graph.hnsw.links import M_MAX, Links, links_bytes, parse_links
from ..sizes import format_size
from ..storage import NativeEngine
from ..storage.files import Region, crc32c, read_file
from ..storage.manifest import NAME, open_current
from ..storage.parse import Fields, check_file_size
from ..storage.replacing import versioned
from .coding import ListCoding
from .options import HEADS_IN, N_MAX, PACKINGS, REPLICAS_MAX

HEADS_NAME, LINKS_NAME, GRAPH_NAME = "heads.bin", "heads.links", "heads.graph"


@dataclass(frozen=True)
class ClusterFacts:
    """Attributes:
    where: the directory.
    n, dim, format, metric: of the vectors.
    is_rounded: whether `format` has their values as steps (scalar quantisation).
    n_lists: heads, and lists. entries: vectors in all lists, copies included.
    list_vectors: of the smallest, the middle and the largest list.
    list_bytes: of a list, at most. replicas: lists of a vector, at most.
    page_bytes, pages: of the file of lists. used_bytes: of its entries.
    packing: that it was written with.
    heads: ``memory`` or ``graph``.
    folder_bytes: of all files. memory_bytes: that an open index keeps.
    """

    where: str
    n: int
    dim: int
    format: str
    metric: str
    is_rounded: bool
    n_lists: int
    entries: int
    list_vectors: tuple[int, int, int]
    list_bytes: int
    replicas: int
    page_bytes: int
    pages: int
    used_bytes: int
    packing: str
    heads: str
    folder_bytes: int
    memory_bytes: int

    @property
    def copies(self) -> float:
        """Lists that a vector is in, mean."""
        return self.entries / self.n if self.n else 0.0

    def summary(self) -> str:
        """Four lines."""
        least, middle, most = self.list_vectors
        full = self.used_bytes / (self.pages * self.page_bytes) if self.pages else 0.0
        rounded = ", rounded" if self.is_rounded else ""
        return (
            f"{self.n:,} vectors of {self.dim} dimensions, {self.metric}, as "
            f"{self.format}{rounded}\n"
            f"{self.n_lists:,} lists of {least} to {most} vectors (half have {middle} or fewer), "
            f"each vector in {self.copies:.2f}\n"
            f"{self.pages:,} pages of {format_size(self.page_bytes)}, {full:.0%} used, packed by "
            f"{self.packing}\n"
            f"{format_size(self.folder_bytes)} on storage, {format_size(self.memory_bytes)} in "
            f"memory; heads in {'memory' if self.heads == 'memory' else 'a graph on storage'}"
        )


@dataclass(frozen=True, eq=False)
class StoredLists:
    """A directory of lists that was found whole; lists are checked when they are read.

    Attributes:
        heads: float32 [lists, head_dim]; None where a graph has them.
        links: of their HNSW; None where a graph has them.
        graph: of the heads; None where they are in memory.
    """

    facts: ClusterFacts
    file: ClusterFile
    coding: ListCoding
    heads: np.ndarray | None
    links: Links | None
    graph: GraphSections | None


def info(path: str | os.PathLike[str]) -> ClusterFacts:
    """What a directory of lists is, without reading a list. Raises as `ClusterIndex`."""
    with NativeEngine("posix", threads=1, pool_bytes=0) as engine:
        return read_lists(engine, path).facts


def read_lists(engine: NativeEngine, directory: str | os.PathLike[str]) -> StoredLists:
    """What a directory of lists says of itself.

    Raises:
        StoreNotFoundError: nothing was written there.
        FormatError, ChecksumError, TruncatedFileError, FileMissingError: damaged, of another kind
            or version, or clusters without heads.
    """
    return open_current(directory, lambda: _read(engine, os.fspath(directory)))


def _read(engine: NativeEngine, where: str) -> StoredLists:
    file = read_clusters(engine, where)
    said = file.index
    if said is None:
        raise errors.FormatError(
            "clusters without heads",
            path=os.path.join(where, NAME),
            fix="build lists with `espnx clusters build`; `espnx.device.clusters` opens these",
        )
    kind = said.choice("heads", HEADS_IN)
    n = said.whole("n", 0, N_MAX)
    coding, heads = _read_heads(engine, where, file, said, kind)
    links = graph = None
    names = [HEADS_NAME]
    if kind == "memory":
        links = _read_links(engine, where, file, said.inner("links"))
        names.append(LINKS_NAME)
    elif file.n_clusters:
        graph = _sections(where, file, said.inner("graph"))
        names.append(GRAPH_NAME)
    paths = [os.path.join(where, versioned(name, file.generation)) for name in names]
    folder_bytes = file.size_bytes + 16 * file.n_clusters
    folder_bytes += sum(os.path.getsize(each) for each in [*paths, os.path.join(where, NAME)])
    in_memory = file.memory_bytes
    if links is not None and heads is not None:
        in_memory += heads.nbytes + links.memory_bytes
    elif coding.centre is not None:
        in_memory += coding.centre.nbytes
    counts = file.n_vectors
    facts = ClusterFacts(
        where,
        n,
        file.dim,
        file.format,
        coding.metric,
        bool(coding.step),
        file.n_clusters,
        int(counts.sum()),
        (int(counts.min()), int(np.median(counts)), int(counts.max()))
        if len(counts)
        else (0, 0, 0),
        said.whole("list_bytes", file.entry_bytes),
        said.whole("replicas", 1, REPLICAS_MAX),
        file.page_bytes,
        -(-file.size_bytes // file.page_bytes),
        int(counts.sum()) * file.entry_bytes,
        said.choice("packing", PACKINGS),
        kind,
        folder_bytes,
        in_memory,
    )
    _check_counts(facts, file, said)
    return StoredLists(facts, file, coding, heads, links, graph)


def _check_counts(facts: ClusterFacts, file: ClusterFile, said: Fields) -> None:
    if not facts.n <= facts.entries <= facts.n * facts.replicas:
        said.refuse("n", f"{facts.entries} entries of lists, 1 to {facts.replicas} each", facts.n)
    if facts.n_lists and facts.list_vectors[0] == 0:
        empty = int(np.argmin(file.n_vectors))
        said.refuse("n", "lists with vectors", f"list {empty} without")


def _read_heads(
    engine: NativeEngine, where: str, file: ClusterFile, said: Fields, kind: str
) -> tuple[ListCoding, np.ndarray | None]:
    metric = said.choice("metric", METRICS)
    step, most_squares = said.real("step"), said.real("most_squares")
    if step < 0 or (step > 0 and file.format != "int8"):
        said.refuse("step", "0, or more where vectors are int8", step)
    if most_squares < 0:
        said.refuse("most_squares", "0 or more", most_squares)
    head_dim = file.dim + (metric == "ip")
    n_heads = file.n_clusters if kind == "memory" else 0
    has_centre = step > 0
    path = os.path.join(where, versioned(HEADS_NAME, file.generation))
    data = _checked_file(
        engine, path, 4 * (n_heads * head_dim + has_centre * file.dim), said.whole("heads_crc32c")
    )
    values = np.frombuffer(data, "<f4")
    if not np.isfinite(values).all():
        raise errors.FormatError(
            "heads of lists", path=path, got="values that are not finite", fix=REBUILD
        )
    centre = values[n_heads * head_dim :] if has_centre else None
    coding = ListCoding(file.format, file.dim, metric, most_squares, step, centre)
    heads = values[: n_heads * head_dim].reshape(n_heads, head_dim)
    return coding, heads if kind == "memory" else None


def _read_links(engine: NativeEngine, where: str, file: ClusterFile, said: Fields) -> Links:
    n = file.n_clusters
    m = said.whole("m", 2, M_MAX)
    n_upper, entry = said.whole("n_upper", 0, 64 * max(1, n)), said.whole("entry", -1, n - 1)
    path = os.path.join(where, versioned(LINKS_NAME, file.generation))
    data = _checked_file(engine, path, links_bytes(n, m, n_upper), said.whole("crc32c"))
    links = parse_links(data, n, m, n_upper, entry)
    links.check(path)
    return links


def _checked_file(engine: NativeEngine, path: str, size_bytes: int, expected: int) -> bytes:
    check_file_size(path, size_bytes, "file of heads", REBUILD)
    data = read_file(engine, path)
    if crc32c(data) != expected:
        raise errors.ChecksumError(
            "heads of lists",
            path=path,
            got=f"CRC32C {crc32c(data):08x}",
            expected=f"{expected:08x}",
            fix=REBUILD,
        )
    return data


def _sections(where: str, file: ClusterFile, said: Fields) -> GraphSections:
    path = os.path.join(where, versioned(GRAPH_NAME, file.generation))
    size_bytes = said.whole("size_bytes", 0, 2**53)
    check_file_size(path, size_bytes, "graph of heads", REBUILD)
    places = said.inner("regions")
    regions: dict[str, Region] = {}
    for name in places:
        begin, size = places.wholes(name, 0, size_bytes, count=2)
        if begin + size > size_bytes:
            places.refuse(name, f"a section in {size_bytes} bytes", f"{begin} + {size}")
        regions[name] = Region(path, begin, size)
    manifest: dict[str, Any] = said.inner("manifest").values()
    return GraphSections(path, manifest, regions)
