"""What a directory of lists says of itself, parsed and never believed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import errors
from ..device.clusters.layout import (
    REBUILD,
    TABLE,
    ClusterFile,
    ClusterSections,
    ClusterSource,
    located,
    read_clusters,
)
from ..graph.format import METRICS, GraphSections
from ..graph.hnsw.links import M_MAX, Links, links_bytes, parse_links
from ..sizes import format_size
from ..storage import NativeEngine, Plan
from ..storage.files import Region, crc32c, read_region
from ..storage.manifest import NAME, open_current
from ..storage.parse import Fields
from .coding import ListCoding
from .options import HEADS_IN, N_MAX, PACKINGS, REPLICAS_MAX

HEADS_NAME, LINKS_NAME, GRAPH_NAME = "heads.bin", "heads.links", "heads.graph"
#: Of lists that are read at a time, where all are.
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class ClusterFacts:
    """Attributes:
    where: the directory, or the file of which they are sections.
    n, dim, format, metric: of the vectors.
    is_rounded: whether `format` has their values as steps (scalar quantisation).
    n_lists: heads, and lists. entries: vectors in all lists, copies included.
    list_vectors: of the smallest, the middle and the largest list.
    list_bytes: of a list, at most. replicas: lists of a vector, at most.
    page_bytes, pages: of the file of lists. used_bytes: of its entries.
    packing: that it was written with.
    heads: ``memory`` or ``graph``.
    folder_bytes: of all files, or sections. memory_bytes: that an open index keeps.
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
    """Lists that were found whole, in a directory or in sections of a file; each is checked when it
    is read.

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


def info(path: ClusterSource) -> ClusterFacts:
    """What a directory of lists is, without reading a list. Raises as `ClusterIndex`."""
    with NativeEngine("posix", threads=1, pool_bytes=0) as engine:
        return read_lists(engine, path).facts


def read_lists(engine: NativeEngine, source: ClusterSource) -> StoredLists:
    """What a directory of lists, or sections of another file, say of themselves.

    Raises:
        StoreNotFoundError: nothing was written there.
        FormatError, ChecksumError, TruncatedFileError, FileMissingError: damaged, of another kind
            or version, or clusters without heads.
    """
    if isinstance(source, ClusterSections):
        return _read(engine, source, source.where)
    return open_current(source, lambda: _read(engine, source, os.fspath(source)))


def entries_in(engine: NativeEngine, stored: StoredLists) -> Iterator[tuple[int, np.ndarray]]:
    """(number, entries) of every list, in the order in which they lie, each checked. Raises
    ChecksumError, FormatError, and as a read."""
    file = stored.file
    opened = engine.open(file.path)
    try:
        order = np.argsort(file.begin_bytes, kind="stable")
        group = np.cumsum(file.size_bytes_of(order)) // _READ_BYTES
        for some in np.split(order, np.flatnonzero(np.diff(group)) + 1) if len(order) else ():
            plan = Plan.of(
                opened,
                torch.from_numpy(file.offset_bytes(some)),
                torch.from_numpy(file.size_bytes_of(some)),
                crc32c=torch.from_numpy(file.crc32c[some].astype(np.int64)),
            )
            future = engine.read(plan)
            memory, places = future.wait().numpy(), future.position_bytes.tolist()
            for number, at in zip(some.tolist(), places, strict=True):
                size_bytes = int(file.n_vectors[number]) * file.entry_bytes
                held = memory[at : at + size_bytes].view(file.entry_dtype)
                check_ids(stored.facts, f"list {number}", held["id"])
                yield number, held
    finally:
        engine.close_file(opened)


def check_ids(facts: ClusterFacts, what: str, ids: np.ndarray) -> None:
    """Raises FormatError for ids, int32 [m], that no vector of these lists has."""
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < facts.n:
        raise errors.FormatError(
            what,
            path=facts.where,
            got=f"vectors {ids.min()} to {ids.max()}",
            expected=f"0 to {facts.n - 1}",
            fix=REBUILD,
        )


def check_all_there(facts: ClusterFacts, seen: np.ndarray) -> None:
    """Raises FormatError for a vector that no list has. `seen`: bool [n]."""
    if not seen.all():
        raise errors.FormatError(
            f"vector {int(np.argmin(seen))} of lists",
            path=facts.where,
            got="in none of them",
            expected="in one or more",
            fix=REBUILD,
        )


def _read(engine: NativeEngine, source: ClusterSource, where: str) -> StoredLists:
    file = read_clusters(engine, source)
    said = file.index
    if said is None:
        raise errors.FormatError(
            "clusters without heads",
            path=where if isinstance(source, ClusterSections) else os.path.join(where, NAME),
            fix="build lists with `espnx clusters build`; `espnx.device.clusters` opens these",
        )
    kind = said.choice("heads", HEADS_IN)
    n = said.whole("n", 0, N_MAX)
    places = _Places(source, file.generation)
    coding, heads = _read_heads(engine, places, file, said, kind)
    links = graph = None
    if kind == "memory":
        links = _read_links(engine, places, file, said.inner("links"))
    elif file.n_clusters:
        graph = _sections(places, said.inner("graph"))
    folder_bytes = file.size_bytes + TABLE.itemsize * file.n_clusters + places.size_bytes
    if not isinstance(source, ClusterSections):
        folder_bytes += os.path.getsize(os.path.join(where, NAME))
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


class _Places:
    """The places of the files of heads. Attributes: size_bytes: of those that were asked for."""

    def __init__(self, source: ClusterSource, generation: int):
        self._source, self._generation, self.size_bytes = source, generation, 0

    def of(self, name: str, size_bytes: int, what: str = "file of heads") -> Region:
        """The place of a file of that size. Raises as `located`."""
        found = located(self._source, self._generation, name, size_bytes, what)
        self.size_bytes += size_bytes
        return found


def _check_counts(facts: ClusterFacts, file: ClusterFile, said: Fields) -> None:
    if not facts.n <= facts.entries <= facts.n * facts.replicas:
        said.refuse("n", f"{facts.entries} entries of lists, 1 to {facts.replicas} each", facts.n)
    if facts.n_lists and facts.list_vectors[0] == 0:
        empty = int(np.argmin(file.n_vectors))
        said.refuse("n", "lists with vectors", f"list {empty} without")


def _read_heads(
    engine: NativeEngine, places: _Places, file: ClusterFile, said: Fields, kind: str
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
    place = places.of(HEADS_NAME, 4 * (n_heads * head_dim + has_centre * file.dim))
    values = _checked(engine, place, said.whole("heads_crc32c")).view("<f4")
    if not np.isfinite(values).all():
        raise errors.FormatError(
            "heads of lists", path=place.path, got="values that are not finite", fix=REBUILD
        )
    centre = values[n_heads * head_dim :] if has_centre else None
    coding = ListCoding(file.format, file.dim, metric, most_squares, step, centre)
    heads = values[: n_heads * head_dim].reshape(n_heads, head_dim)
    return coding, heads if kind == "memory" else None


def _read_links(engine: NativeEngine, places: _Places, file: ClusterFile, said: Fields) -> Links:
    n = file.n_clusters
    m = said.whole("m", 2, M_MAX)
    n_upper, entry = said.whole("n_upper", 0, 64 * max(1, n)), said.whole("entry", -1, n - 1)
    place = places.of(LINKS_NAME, links_bytes(n, m, n_upper))
    data = _checked(engine, place, said.whole("crc32c")).tobytes()
    links = parse_links(data, n, m, n_upper, entry)
    links.check(place.path)
    return links


def _checked(engine: NativeEngine, place: Region, expected: int) -> np.ndarray:
    data = read_region(engine, place)
    if crc32c(data) != expected:
        raise errors.ChecksumError(
            "heads of lists",
            path=place.path,
            offset_bytes=place.offset_bytes,
            got=f"CRC32C {crc32c(data):08x}",
            expected=f"{expected:08x}",
            fix=REBUILD,
        )
    return data


def _sections(places: _Places, said: Fields) -> GraphSections:
    size_bytes = said.whole("size_bytes", 0, 2**53)
    file = places.of(GRAPH_NAME, size_bytes, "graph of heads")
    listed = said.inner("regions")
    regions: dict[str, Region] = {}
    for name in listed:
        begin, size = listed.wholes(name, 0, size_bytes, count=2)
        if begin + size > size_bytes:
            listed.refuse(name, f"a section in {size_bytes} bytes", f"{begin} + {size}")
        regions[name] = Region(file.path, file.offset_bytes + begin, size)
    manifest: dict[str, Any] = said.inner("manifest").values()
    return GraphSections(file.path, manifest, regions)
