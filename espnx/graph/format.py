"""A graph as it lies on storage, parsed and never believed. The written specification is
docs/graph-format.md.

A directory holds::

    nodes.bin      pages of nodes
    rows.bin       for each row of the input the number of its node, uint32
    codes.bin      where codes are not inline: of each node, by number; paged, or plain where they
                   stay in memory
    codebook.bin   centroids, float32 [256, dim]
    disk_codebook.bin  the same, of the codes that nodes hold in place of vectors, where they do
    entries.bin    entry points: numbers, uint32, and then their codes
    MANIFEST.json  sizes, checksums and the rest; written last

One that has a graph for each cluster also holds::

    clusters.bin   of each cluster how many nodes and entry points it has, and where its pages are
    centroids.bin  of the clusters, float32

and its rows.bin has places of 64 bits. Its pages lie in one or more files of that name, which the
manifest lists: each version adds one with the clusters that it has changed. They may lie in several
directories, in each of which `home_of` is a folder for them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from .. import errors
from ..checks import check_whole
from ..ops.distances import DIM_MAX
from ..storage import NativeEngine
from ..storage.files import Region, crc32c, read_region
from ..storage.manifest import NAME, read_manifest
from ..storage.parse import Fields, check_file_size
from ..storage.replacing import versioned
from .codes.codebook import Codebook, codebook_bytes, unpack_codebook
from .codes.coding import VectorCoding
from .layout import (
    CODE_PAGE_BYTES,
    HEADER,
    MAX_DEGREE_MAX,
    NODE_FORMATS,
    PAGE_BYTES_MAX,
    PAGE_UNIT_BYTES,
    PageLayout,
)
from .parts import TABLE, Clusters, PageFile, Parts, home_of, lost_directory

#: Of a directory with one graph, and of one with a graph for each cluster.
MAGIC, VERSION, CLUSTERS_VERSION = "espnx-graph", 1, 2
NODES, ROWS, CODES, CODEBOOK, ENTRIES = (
    "nodes.bin",
    "rows.bin",
    "codes.bin",
    "codebook.bin",
    "entries.bin",
)
DISK_CODEBOOK = "disk_codebook.bin"
CENTROIDS, CLUSTERS = "centroids.bin", "clusters.bin"
#: Of changes that are in no page yet.
CHANGES = "changes.log"
#: By which neighbours are near. Cosine is the squared distance of vectors of length 1, halved.
METRICS = ("l2", "ip", "cosine")
#: Vectors of a graph are numbered by 32 bits, and one number is nobody's; rows of the input of
#: several by 48.
N_MAX, ROWS_MAX = 2**32 - 2, 2**48
N_ENTRIES_MAX = 65536
#: In which the pages of clusters may lie, and how many files of them there may be in all.
DIRECTORIES_MAX, PAGE_FILES_MAX = 64, 1024
#: Vectors added or deleted since recall was measured, as a share of those that there are.
STALE_SHARE = 0.1
CLUSTERS_MAX = 65536
_REBUILD = "restore the graph from a copy, or build it again"
_CURVE_POINTS_MAX = 64


@dataclass(frozen=True)
class RecallPoint:
    """What searches with a list of that size were measured to find, at build.

    Attributes:
        list_size: L.
        recall: recall@10 of queries like the graph's vectors that are none of them: of some of
            these, each kept from its own search.
        pages: read, the mean of a search.
        probe_ratio: where there is a graph for each cluster: clusters that are no farther than the
            nearest by this share (of the squared distance) are searched; else None.
        clusters: that are, the mean.
    """

    list_size: int
    recall: float
    pages: float
    probe_ratio: float | None = None
    clusters: float | None = None

    def manifest(self) -> dict[str, Any]:
        """What is known of it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class FilteredRecall:
    """What searches with filters that allow that share of the rows were measured to find, at build.

    Attributes:
        share: of all rows.
        near: where allowed rows are any, so that they lie around a query as all do: by the length
            of the list.
        far: where they are those nearest to some vector, and queries are not among them: by the
            length of the list of walks that find that out. Recall is that of the hardest of a few
            such regions.
    """

    share: float
    near: Sequence[RecallPoint]
    far: Sequence[RecallPoint]


@dataclass(frozen=True)
class GraphShare:
    """Which share of a collection of vectors a graph is of, where several graphs are searched
    together.

    Attributes:
        collection: 32 hexadecimal digits, the same in all graphs of it, and in those of no other.
        number: from 0, in the order of the vectors.
        count: of the collection's graphs.
    """

    collection: str
    number: int
    count: int

    def __post_init__(self) -> None:
        check_whole("graphs of a collection", self.count, 1)
        check_whole("number of a graph in its collection", self.number, 0, self.count - 1)
        if (
            not isinstance(self.collection, str)
            or re.fullmatch("[0-9a-f]{32}", self.collection) is None
        ):
            raise errors.InvalidInputError(
                "id of a collection of graphs",
                got=repr(self.collection),
                expected="32 hexadecimal digits",
                fix="secrets.token_hex(16)",
            )


@dataclass(frozen=True, eq=False)
class GraphFacts:
    """What a graph's manifest says, and what stays in memory while it is open.

    Attributes:
        where: its directory, or the file whose sections it is.
        regions: where each of its files lies.
        layout: of its pages.
        metric: of `METRICS`.
        salt: in every page, so that no page of another graph is taken for one of this.
        codebook: of the codes.
        entries: int64 [m]: node numbers at which searches begin.
        entry_codes: uint8 [m, code_bytes].
        sums: CRC32C by file, of those that are read whole.
        options: of the build, as they were given.
        recall: measured at build; may be empty.
        disk_codebook: of the codes that nodes hold in place of vectors, where they do.
        recall_ceiling: recall@10 of a search that measures all of these codes, as measured at
            build.
        generation: of its files, where it has a directory: how many graphs that one has held.
        filtered: of searches with filters, the largest share first; may be empty.
        share: of a collection, where other graphs are of the rest of it.
        clusters: where each of these has a graph: entry points are numbered in their own graph.
        id_end: of a graph that has been changed: above its largest id; some below it have no node.
            None: each id below `PageLayout.n` has one.
        unmeasured: vectors that were added or deleted since recall was measured.
        pins: descriptors of its files, by path, that are kept open while it is: a merge may remove
            the files' names meanwhile.
        directories: in which its pages lie, as `PageFile.directory` numbers them; none: beside the
            other files.
        lost: files of pages, by number, that could not be read when it was opened, by somebody who
            wants what is in the others.
        border: of clusters with replicas, see `espnx.graph.global_index.division.border_of`.
        built_recall: of a graph of clusters that has been changed: what was measured at build.
    """

    where: str
    regions: Mapping[str, Region]
    layout: PageLayout
    metric: str
    salt: int
    codebook: Codebook
    entries: np.ndarray
    entry_codes: np.ndarray
    sums: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    recall: Sequence[RecallPoint] = ()
    disk_codebook: Codebook | None = None
    recall_ceiling: float | None = None
    generation: int = 1
    filtered: Sequence[FilteredRecall] = ()
    share: GraphShare | None = None
    clusters: Clusters | None = None
    id_end: int | None = None
    unmeasured: int = 0
    pins: Mapping[str, int] = field(default_factory=dict)
    directories: Sequence[str] = ()
    lost: frozenset[int] = frozenset()
    border: float | None = None
    built_recall: Sequence[RecallPoint] = ()

    @cached_property
    def page_files(self) -> list[Region]:
        """The files of pages, as `Parts.files` numbers them; of a lost one without a path."""
        if self.clusters is None:
            return [self.regions[NODES]]
        made = page_files(
            self.where, self.directories, self.salt, self.layout, self.clusters.page_files
        )
        return [
            replace(each, path="") if number in self.lost else each
            for number, each in enumerate(made)
        ]

    @cached_property
    def lost_directories(self) -> frozenset[int]:
        """Which of the directories have a file of pages that is lost."""
        files = () if self.clusters is None else self.clusters.page_files
        return frozenset(files[each].directory for each in self.lost)

    def in_directory(self, number: int) -> np.ndarray:
        """bool [graphs]: whose pages are in that one of several directories."""
        files = () if self.clusters is None else self.clusters.page_files
        there = np.array([each.directory == number for each in files], bool)
        found: np.ndarray = there[self.parts.files]
        return found

    @property
    def unused_bytes(self) -> int:
        """What the files of pages hold of clusters that were written anew since, elsewhere."""
        if self.clusters is None:
            return 0
        pages = sum(each.pages for each in self.clusters.page_files)
        return (pages - self.parts.n_pages) * self.layout.page_bytes

    @cached_property
    def is_there(self) -> np.ndarray:
        """bool [graphs]: whether its pages can be read."""
        return ~np.isin(self.parts.files, list(self.lost))

    @cached_property
    def lost_share(self) -> float:
        """Nodes in directories that are lost, as a share of all."""
        nodes = self.parts.nodes
        return float(nodes[~self.is_there].sum() / max(1, nodes.sum()))

    def place_of_page(self, page: int) -> tuple[str, int]:
        """(the file; the byte at which it begins there) of a page of nodes."""
        file, inside = self.parts.in_files(np.array([page]))
        region = self.page_files[int(file[0])]
        return region.path, region.offset_bytes + int(inside[0]) * self.layout.page_bytes

    def check_there(self, pages: np.ndarray) -> None:
        """Raises FileMissingError where one of some pages, int64 [m], is in a directory that is
        lost."""
        if self.lost and (gone := ~self.is_there[self.parts.of_pages(pages)]).any():
            file = int(self.parts.in_files(pages[gone][:1])[0][0])
            files = () if self.clusters is None else self.clusters.page_files
            raise lost_directory(self.directories[files[file].directory])

    @property
    def n_rows(self) -> int:
        """Entries of the file of rows: ids are below it."""
        return self.layout.n if self.id_end is None else self.id_end

    @property
    def is_stale(self) -> bool:
        """Whether so many vectors were changed since recall was measured that it says too little of
        those that there are."""
        return self.unmeasured > STALE_SHARE * self.layout.n

    @property
    def has_gaps(self) -> bool:
        """Whether some ids have no node."""
        return self.n_rows != self.layout.n

    @cached_property
    def parts(self) -> Parts:
        """Graphs that the pages are of."""
        return parts_of(self.layout, len(self.entries), self.clusters, self.salt)

    @property
    def copies(self) -> int:
        """Nodes that a row may have."""
        return 1 if self.clusters is None else self.clusters.copies

    @property
    def place_bytes(self) -> int:
        """Size of a row's entry in the file of rows: the places of its nodes."""
        return place_bytes(self.clusters)

    @property
    def version(self) -> int:
        """Version of the format that its manifest names."""
        return VERSION if self.clusters is None else CLUSTERS_VERSION

    @property
    def coding(self) -> VectorCoding:
        """The coding of vectors in nodes."""
        return VectorCoding(self.layout.format, self.disk_codebook)

    @property
    def memory_bytes(self) -> int:
        """Bytes that stay in memory, codes among them where they do."""
        codes = self.layout.codes_bytes if self.layout.codes_in == "memory" else 0
        books = sum(
            book.size_bytes for book in (self.codebook, self.disk_codebook) if book is not None
        )
        centroids = 0 if self.clusters is None else self.clusters.centroids.nbytes
        return int(books + self.entries.nbytes + self.entry_codes.nbytes + codes + centroids)

    @property
    def file_sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return file_sizes(self.layout, len(self.entries), self.rotated, self.clusters, self.id_end)

    @property
    def rotated(self) -> list[str]:
        """Files of codebooks with a rotation in them."""
        return rotated_files(self.codebook, self.disk_codebook)

    def path(self, name: str) -> str:
        """The path of one of its files, or of that which it lies in; of pages in several
        directories, the first of these files."""
        if name == NODES:
            return next(each.path for each in self.page_files if each.path)
        return self.regions[name].path

    def open_path(self, name: str) -> str:
        """The same for whoever opens it, see `pinned`."""
        return self.pinned(self.path(name))

    def pinned(self, path: str) -> str:
        """A path for whoever opens one of its files now: of one whose name has been removed, by the
        descriptor that is kept open."""
        pin = self.pins.get(path)
        if pin is None:
            return path
        try:
            is_there = os.path.samestat(os.stat(path), os.fstat(pin))
        except OSError:
            is_there = False
        return path if is_there else f"/proc/self/fd/{pin}"

    def begin_bytes(self, name: str) -> int:
        """The byte at which it begins there."""
        return self.regions[name].offset_bytes

    def manifest(self) -> dict[str, Any]:
        """The facts as `write_manifest` takes them."""
        layout = asdict(self.layout)
        if self.disk_codebook is None:
            del layout["disk_pq_bytes"]
        else:
            layout |= {
                "disk_parts": self.disk_codebook.begin.tolist(),
                "recall_ceiling": self.recall_ceiling,
            }
        if self.share is not None:
            layout["share"] = asdict(self.share)
        if self.clusters is not None:
            layout["n_clusters"] = len(self.clusters.nodes)
            if self.clusters.copies > 1:
                layout["copies"] = self.clusters.copies
            layout["page_files"] = [asdict(each) for each in self.clusters.page_files]
            if self.directories:
                layout["directories"] = list(self.directories)
            if self.border is not None:
                layout["border"] = self.border
            if self.built_recall:
                layout["built_recall"] = [each.manifest() for each in self.built_recall]
        if self.id_end is not None:
            layout |= {"id_end": self.id_end, "unmeasured": self.unmeasured}
        return {
            **layout,
            "generation": self.generation,
            "metric": self.metric,
            "salt": f"{self.salt:016x}",
            "parts": self.codebook.begin.tolist(),
            "rotated": self.rotated,
            "n_entries": len(self.entries),
            "sums": dict(self.sums),
            "options": dict(self.options),
            "recall": [each.manifest() for each in self.recall],
            "filtered": [
                {
                    "share": each.share,
                    "near": [point.manifest() for point in each.near],
                    "far": [point.manifest() for point in each.far],
                }
                for each in self.filtered
            ],
        }


def page_files(
    where: str, directories: Sequence[str], salt: int, layout: PageLayout, files: Sequence[PageFile]
) -> list[Region]:
    """The files of pages of clusters. `where`: the graph's directory."""
    folders = [home_of(each, salt) for each in directories] or [where]
    return [
        Region(
            os.path.join(folders[each.directory], versioned(NODES, each.generation)),
            0,
            each.pages * layout.page_bytes,
        )
        for each in files
    ]


def rotated_files(codebook: Codebook, disk_codebook: Codebook | None) -> list[str]:
    """Files of those of a graph's codebooks that have a rotation in them."""
    books = {CODEBOOK: codebook, DISK_CODEBOOK: disk_codebook}
    return [name for name, book in books.items() if book is not None and book.rotation is not None]


def parts_of(layout: PageLayout, n_entries: int, clusters: Clusters | None, salt: int) -> Parts:
    """Graphs that pages are of. `salt`: of the pages, where there is one graph."""
    per_page = layout.nodes_per_page
    if clusters is not None:
        return Parts(
            clusters.nodes,
            clusters.n_entries,
            per_page,
            clusters.files,
            clusters.file_pages,
            clusters.salts,
        )
    first = np.zeros(1, np.int64)
    salts = np.array([salt], np.uint64)
    return Parts(np.array([layout.n]), np.array([n_entries]), per_page, first, first, salts)


def place_bytes(clusters: Clusters | None) -> int:
    """Size of a row's entry in the file of rows: 4, or 8 for each copy."""
    return 4 if clusters is None else 8 * clusters.copies


def file_sizes(
    layout: PageLayout,
    n_entries: int,
    rotated: Collection[str],
    clusters: Clusters | None = None,
    id_end: int | None = None,
) -> dict[str, int]:
    """Bytes of each file of a graph. `rotated`: of `rotated_files`."""
    of_clusters = (
        {}
        if clusters is None
        else {
            CLUSTERS: TABLE.itemsize * len(clusters.nodes),
            CENTROIDS: 4 * len(clusters.nodes) * layout.dim,
        }
    )
    codes = {} if layout.codes_in == "inline" else {CODES: layout.codes_bytes}
    names = [CODEBOOK, DISK_CODEBOOK] if layout.format == "pq" else [CODEBOOK]
    books = {name: codebook_bytes(layout.dim, is_rotated=name in rotated) for name in names}
    n_pages = layout.n_pages
    if clusters is not None:
        n_pages = sum(each.pages for each in clusters.page_files)
    return {
        NODES: n_pages * layout.page_bytes,
        ROWS: place_bytes(clusters) * (layout.n if id_end is None else id_end),
        **books,
        ENTRIES: n_entries * (4 + layout.code_bytes),
        **codes,
        **of_clusters,
    }


def in_directory(
    directory: str,
    generation: int,
    layout: PageLayout,
    n_entries: int,
    codebook: Codebook,
    disk_codebook: Codebook | None,
    clusters: Clusters | None = None,
    id_end: int | None = None,
) -> dict[str, Region]:
    """The places of the files of a graph that has a directory of its own; the pages of clusters
    have theirs in `page_files`."""
    rotated = rotated_files(codebook, disk_codebook)
    sizes = file_sizes(layout, n_entries, rotated, clusters, id_end)
    if clusters is not None:
        del sizes[NODES]
    return _whole_files(directory, generation, sizes)


def _whole_files(directory: str, generation: int, sizes: Mapping[str, int]) -> dict[str, Region]:
    return {
        name: Region(os.path.join(directory, versioned(name, generation)), 0, size)
        for name, size in sizes.items()
    }


@dataclass(frozen=True)
class GraphSections:
    """A graph inside another file, as sections that are named like its files without their endings.

    Attributes:
        where: for messages. manifest: what its manifest says. regions: of the sections; pages begin
            at multiples of 4096 bytes.
    """

    where: str
    manifest: Mapping[str, Any]
    regions: Mapping[str, Region]


def section_of(file: str) -> str:
    """The section that holds what one of a graph's files does."""
    return file.removesuffix(".bin")


def read_graph(
    engine: NativeEngine, source: str | os.PathLike[str] | GraphSections, *, partial: bool = False
) -> GraphFacts:
    """What a directory, or what lies inside another file, says of its graph. Its pages are checked
    when they are read.

    Args:
        partial: whether some of several directories of pages may be lost, and not all.

    Raises:
        StoreNotFoundError: no graph was published there.
        FormatError, ChecksumError, TruncatedFileError, FileMissingError: damaged, or of another
            kind or version.
    """
    if isinstance(source, GraphSections):
        where, fields = source.where, Fields(source.manifest, source.where, fix=_REBUILD)
    else:
        where = os.fspath(source)
        fields = Fields(read_graph_manifest(engine, where), os.path.join(where, NAME), fix=_REBUILD)
    n_clusters = fields.whole("n_clusters", 0, CLUSTERS_MAX) if "n_clusters" in fields else None
    if n_clusters is not None and isinstance(source, GraphSections):
        fields.refuse("n_clusters", "none: sections hold one graph", n_clusters)
    layout = _read_layout(fields, N_MAX if n_clusters is None else ROWS_MAX)
    id_end = _read_id_end(fields, layout, n_clusters)
    sums = fields.inner("sums")
    holds_codes = layout.format == "pq"
    names = [
        CODEBOOK,
        ENTRIES,
        *([CODES] if layout.codes_in == "memory" else []),
        *([DISK_CODEBOOK] if holds_codes else []),
        *([] if n_clusters is None else [CLUSTERS, CENTROIDS]),
    ]
    expected = {name: sums.whole(name, 0, 2**32 - 1) for name in names}
    most = N_ENTRIES_MAX if n_clusters is None else N_ENTRIES_MAX * n_clusters
    n_entries = fields.whole("n_entries", min(1, layout.n), most)
    parts = _read_parts(fields, "parts", layout.code_bytes, layout.dim)
    disk_parts = (
        _read_parts(fields, "disk_parts", layout.disk_pq_bytes, layout.dim) if holds_codes else None
    )
    ceiling = fields.real("recall_ceiling") if holds_codes and "recall_ceiling" in fields else None
    generation = fields.whole("generation", 1)
    clusters = (
        None
        if n_clusters is None
        else _read_clusters(engine, where, generation, fields, layout, n_entries, expected)
    )
    rotated = _read_rotated(fields, has_disk_codebook=holds_codes)
    sizes = file_sizes(layout, n_entries, rotated, clusters, id_end)
    salt = int(fields.hexadecimal("salt", 16), 16)
    directories: list[str] = []
    made: list[Region] = []
    if clusters is not None:
        directories = _read_directories(fields, clusters)
        del sizes[NODES]
        made = page_files(where, directories, salt, layout, clusters.page_files)
    regions = _located(source, where, generation, sizes)

    def codebook(name: str, begin: np.ndarray) -> Codebook:
        # torch takes no memory that is read-only
        values = np.frombuffer(read_whole(engine, regions, name, expected), "<f4").copy()
        return unpack_codebook(begin, values, layout.dim)

    data = read_whole(engine, regions, ENTRIES, expected)
    entries = np.frombuffer(data, "<u4", n_entries).astype(np.int64)
    of_part = parts_of(layout, n_entries, clusters, salt)
    if (entries >= np.repeat(of_part.nodes, of_part.n_entries)).any():
        raise errors.FormatError(
            "entry point of a graph",
            path=regions[ENTRIES].path,
            got=int(entries.max()),
            fix=_REBUILD,
        )
    return GraphFacts(
        where,
        regions,
        layout,
        fields.choice("metric", METRICS),
        salt,
        codebook(CODEBOOK, parts),
        entries,
        np.frombuffer(data, np.uint8, offset=4 * n_entries).reshape(n_entries, layout.code_bytes),
        expected,
        fields.inner("options").values(),
        _read_recall(fields, "recall"),
        None if disk_parts is None else codebook(DISK_CODEBOOK, disk_parts),
        ceiling,
        generation,
        _read_filtered(fields),
        _read_share(fields),
        clusters,
        id_end,
        fields.whole("unmeasured", 0) if "unmeasured" in fields else 0,
        directories=directories,
        lost=frozenset() if clusters is None else _lost(directories, clusters, made, partial),
        border=fields.real("border") if "border" in fields else None,
        built_recall=_read_recall(fields, "built_recall") if "built_recall" in fields else (),
    )


def _read_directories(fields: Fields, clusters: Clusters) -> list[str]:
    """The directories of pages, if these do not lie beside the other files."""
    directories: list[str] = []
    if "directories" in fields:
        directories = fields.texts("directories", count=DIRECTORIES_MAX)
        if not directories or not all(map(os.path.isabs, directories)):
            fields.refuse("directories", "absolute paths", directories)
    named = max(each.directory for each in clusters.page_files)
    if named >= max(1, len(directories)):
        fields.refuse("page_files", f"a directory of a cluster below {len(directories)}", named)
    return directories


def _lost(
    directories: Sequence[str], clusters: Clusters, files: Sequence[Region], partial: bool
) -> frozenset[int]:
    """Which files of pages are not there. Raises FileMissingError for the first of these unless
    `partial` is set and others are there, and they lie in several directories; and for a file of
    another size."""
    lost = set[int]()
    for number, region in enumerate(files):
        try:
            check_file_size(region.path, region.size_bytes, "file of a graph", _REBUILD)
        except (errors.FileMissingError, errors.ReadError) as error:
            lost.add(number)
            if not directories:
                raise
            if not partial or len(lost) == len(files):
                where = directories[clusters.page_files[number].directory]
                raise lost_directory(where) from error
    return frozenset(lost)


def read_graph_manifest(engine: NativeEngine, where: str) -> dict[str, Any]:
    """Reads the manifest of a directory, of either version. Raises as `read_graph`."""
    built_by = "espnx graph build"
    try:
        return read_manifest(engine, where, MAGIC, VERSION, built_by=built_by)
    except errors.FormatError as error:
        if error.got != CLUSTERS_VERSION:
            raise
    fields = read_manifest(engine, where, MAGIC, CLUSTERS_VERSION, built_by=built_by)
    if not isinstance(fields.get("n_clusters"), int):
        raise errors.FormatError(
            "field n_clusters",
            path=os.path.join(where, NAME),
            got=fields.get("n_clusters"),
            expected="a whole number",
            fix=_REBUILD,
        )
    return fields


def _read_clusters(
    engine: NativeEngine,
    where: str,
    generation: int,
    fields: Fields,
    layout: PageLayout,
    n_entries: int,
    sums: Mapping[str, int],
) -> Clusters:
    count = fields.whole("n_clusters", min(1, layout.n), CLUSTERS_MAX)
    sizes = {CLUSTERS: TABLE.itemsize * count, CENTROIDS: 4 * count * layout.dim}
    regions = _whole_files(where, generation, sizes)
    for region in regions.values():
        check_file_size(region.path, region.size_bytes, "file of a graph", _REBUILD)
    table = np.frombuffer(read_whole(engine, regions, CLUSTERS, sums), TABLE)
    page_files = _read_page_files(fields, generation)
    centroids = np.frombuffer(read_whole(engine, regions, CENTROIDS, sums), "<f4")
    nodes, entries = (table[name].astype(np.int64) for name in ("nodes", "entries"))
    is_right = (nodes > 0) & (nodes <= N_MAX) & (entries > 0) & (entries <= nodes)
    if count == 1 and not layout.n:  # all that it had was deleted
        is_right = (nodes == 0) & (entries == 0)
    copies = fields.whole("copies", 2, count) if "copies" in fields else 1
    has_all = layout.n <= nodes.sum() <= layout.n * copies
    if not is_right.all() or not has_all or entries.sum() != n_entries:
        raise errors.FormatError(
            "table of clusters",
            path=regions[CLUSTERS].path,
            got=f"{nodes.sum()} nodes, {entries.sum()} entry points",
            expected=f"{layout.n} rows, up to {copies} nodes of each, and {n_entries}",
            fix=_REBUILD,
        )
    if not np.isfinite(centroids).all():
        raise errors.FormatError(
            "centroids of a graph",
            path=regions[CENTROIDS].path,
            got="values that are not finite",
            fix=_REBUILD,
        )
    if layout.codes_in != "inline":
        fields.refuse("inline_pq", f"{layout.max_degree}, as with every graph of clusters")
    files, first = (table[name].astype(np.int64) for name in ("file", "first_page"))
    pages = -(-nodes // layout.nodes_per_page)
    _check_places(regions[CLUSTERS].path, page_files, files, first, pages)
    return Clusters(
        centroids.reshape(count, layout.dim).copy(),
        nodes,
        entries,
        copies,
        files,
        first,
        table["salt"].astype(np.uint64),
        page_files,
    )


def _read_page_files(fields: Fields, generation: int) -> list[PageFile]:
    found = [
        PageFile(
            each.whole("directory", 0, DIRECTORIES_MAX - 1),
            each.whole("generation", 1, generation),
            each.whole("pages", 0, ROWS_MAX),
        )
        for each in fields.each("page_files", count=PAGE_FILES_MAX)
    ]
    if not found or len({(each.directory, each.generation) for each in found}) < len(found):
        fields.refuse("page_files", "one or more, each once")
    return found


def _check_places(
    path: str,
    page_files: Sequence[PageFile],
    files: np.ndarray,
    first: np.ndarray,
    pages: np.ndarray,
) -> None:
    """Raises FormatError for clusters that lie outside of their files, or on one another."""
    sizes = np.array([each.pages for each in page_files])
    room = sizes[np.minimum(files, len(sizes) - 1)]
    is_right = (files < len(sizes)) & (first >= 0) & (first <= room) & (pages <= room - first)
    order = np.lexsort((pages, first, files))
    ends = (first + pages)[order]
    is_same = files[order][1:] == files[order][:-1]
    if not is_right.all() or (is_same & (first[order][1:] < ends[:-1])).any():
        raise errors.FormatError(
            "places of clusters",
            path=path,
            got="pages outside of their file, or of two clusters",
            expected=f"those of {len(sizes)} files, each of one",
            fix=_REBUILD,
        )


def _read_rotated(fields: Fields, *, has_disk_codebook: bool) -> list[str]:
    rotated = fields.texts("rotated", count=2)
    among = [CODEBOOK, DISK_CODEBOOK] if has_disk_codebook else [CODEBOOK]
    if rotated != [name for name in among if name in rotated]:
        fields.refuse("rotated", f"of {', '.join(among)}, each once", rotated)
    return rotated


def _read_parts(fields: Fields, name: str, count: int, dim: int) -> np.ndarray:
    """The begins of the parts of a code of `count` bytes."""
    parts = np.array(fields.wholes(name, 0, dim, count=count + 1), np.int64)
    if len(parts) != count + 1 or parts[0] != 0 or parts[-1] != dim or (np.diff(parts) < 1).any():
        fields.refuse(name, f"{count + 1} growing numbers from 0 to {dim}")
    return parts


def _located(
    source: str | os.PathLike[str] | GraphSections,
    where: str,
    generation: int,
    sizes: Mapping[str, int],
) -> dict[str, Region]:
    """The region of each file, of the size that it must have: checked before memory is taken for
    anything."""
    if not isinstance(source, GraphSections):
        regions = _whole_files(where, generation, sizes)
        for region in regions.values():
            check_file_size(region.path, region.size_bytes, "file of a graph", _REBUILD)
        return regions
    regions = {
        name: source.regions[section_of(name)]
        for name in sizes
        if section_of(name) in source.regions
    }
    for name, size_bytes in sizes.items():
        found = regions[name].size_bytes if name in regions else None
        if found != size_bytes:
            raise errors.FormatError(
                f"section {section_of(name)} of a graph",
                path=where,
                got="none" if found is None else f"{found} bytes",
                expected=f"{size_bytes} bytes",
                fix=_REBUILD,
            )
    return regions


def _read_layout(fields: Fields, n_max: int) -> PageLayout:
    max_degree, dim = fields.whole("max_degree", 1, MAX_DEGREE_MAX), fields.whole("dim", 1, DIM_MAX)
    format = fields.choice("format", NODE_FORMATS)  # noqa: A001
    layout = PageLayout(
        fields.whole("n", 0, n_max),
        dim,
        format,
        max_degree,
        fields.whole("code_bytes", 1, DIM_MAX),
        fields.whole("inline_pq", 0, max_degree),
        fields.flag("paged_codes"),
        fields.whole("page_bytes", PAGE_UNIT_BYTES, PAGE_BYTES_MAX),
        fields.whole("disk_pq_bytes", 1, dim) if format == "pq" else 0,
    )
    if layout.codes_in == "inline" and layout.paged_codes:
        fields.refuse("paged_codes", "false where all codes are inline")
    if layout.paged_codes and layout.code_bytes > CODE_PAGE_BYTES - HEADER.itemsize:
        fields.refuse(
            "code_bytes", f"at most {CODE_PAGE_BYTES - HEADER.itemsize}, what a page holds"
        )
    if layout.page_bytes % PAGE_UNIT_BYTES or layout.nodes_per_page < 1:
        fields.refuse("page_bytes", "a multiple of 4096 that holds a node")
    return layout


def _read_id_end(fields: Fields, layout: PageLayout, n_clusters: int | None) -> int | None:
    if "id_end" not in fields:
        return None
    return fields.whole("id_end", layout.n, N_MAX if n_clusters is None else ROWS_MAX)


def _read_share(fields: Fields) -> GraphShare | None:
    if "share" not in fields:
        return None
    share = fields.inner("share")
    count = share.whole("count", 1)
    return GraphShare(
        share.hexadecimal("collection", 32), share.whole("number", most=count - 1), count
    )


def _read_recall(fields: Fields, name: str) -> list[RecallPoint]:
    return [
        RecallPoint(
            each.whole("list_size", 1),
            each.real("recall"),
            each.real("pages"),
            each.real("probe_ratio") if "probe_ratio" in each else None,
            each.real("clusters") if "clusters" in each else None,
        )
        for each in fields.each(name, count=_CURVE_POINTS_MAX)
    ]


def _read_filtered(fields: Fields) -> list[FilteredRecall]:
    found = [
        FilteredRecall(each.real("share"), _read_recall(each, "near"), _read_recall(each, "far"))
        for each in fields.each("filtered", count=_CURVE_POINTS_MAX)
    ]
    shares = [each.share for each in found]
    if shares != sorted(shares, reverse=True) or not all(0 < share <= 1 for share in shares):
        fields.refuse("filtered", "shares above 0, at most 1, the largest first", shares)
    return found


def read_whole(
    engine: NativeEngine, regions: Mapping[str, Region], name: str, sums: Mapping[str, int]
) -> bytes:
    """One of a graph's files that are read whole. Raises ChecksumError, and as a read."""
    data = read_region(engine, regions[name]).tobytes()
    if crc32c(data) != sums[name]:
        raise errors.ChecksumError(
            "file of a graph",
            path=regions[name].path,
            offset_bytes=regions[name].offset_bytes,
            got=f"CRC32C {crc32c(data):08x}",
            expected=f"{sums[name]:08x}",
            fix=_REBUILD,
        )
    return data
