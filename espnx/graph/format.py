"""A graph as it lies on storage; `espnx.graph.pages.directory` reads it. The written specification
is docs/graph-format.md.

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
from ..storage.files import Region
from ..storage.replacing import versioned
from .codes.codebook import Codebook, codebook_bytes
from .codes.coding import VectorCoding
from .layout import PageLayout
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


@dataclass(frozen=True)
class RecallPoint:
    """What searches with a list of that size were measured to find, at build.

    Attributes:
        list_size: L.
        recall: recall@10 of queries like the graph's vectors that are none of them: of some of
            these, each kept from its own search.
        pages: read, the mean of a search.
        probe_margin: where there is a graph for each cluster: the `margin` of the `Probing` that
            says which are searched; else None.
        clusters: that are, the mean.
    """

    list_size: int
    recall: float
    pages: float
    probe_margin: float | None = None
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

    @cached_property
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
    return whole_files(directory, generation, sizes)


def whole_files(directory: str, generation: int, sizes: Mapping[str, int]) -> dict[str, Region]:
    """The places of files that a directory has, of a generation."""
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
