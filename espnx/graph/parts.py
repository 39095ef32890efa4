"""Which graphs the pages of a directory hold, one after the other. A directory of one graph has one
part."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .. import errors

#: In place of the place of a copy that a row does not have; and of the node of an id that has none.
NO_COPY, NO_NODE = 2**64 - 1, 2**32 - 1
#: Of the table of clusters.
TABLE = np.dtype(
    [
        ("salt", "<u8"),
        ("first_page", "<u8"),
        ("nodes", "<u4"),
        ("entries", "<u4"),
        ("file", "<u4"),
        ("zero", "<u4"),
    ]
)
#: Memory that a cluster may take in an open graph, beside its centroid: of its entry points the
#: numbers and codes, twice, once for walks, and its places in tables.
CLUSTER_BYTES = 4096
_FIXED_BYTES, _ENTRY_BYTES = 128, 12


@dataclass(frozen=True, eq=False)
class Parts:
    """Graphs that lie in files of pages.

    A node's place is its number in its own graph, behind the places of all pages before that:
    places of a graph's last page that have no node stay empty.

    Attributes:
        nodes: int64 [parts]: of each graph.
        n_entries: int64 [parts]: entry points of each.
        nodes_per_page: of all pages.
        files: int64 [parts]: the file that each is in. file_pages: int64 [parts]: the page at which
            it begins there. Pages are numbered as if the graphs lay one after the other.
        salts: uint64 [parts]: of the pages of each.
    """

    nodes: np.ndarray
    n_entries: np.ndarray
    nodes_per_page: int
    files: np.ndarray
    file_pages: np.ndarray
    salts: np.ndarray

    @cached_property
    def pages(self) -> np.ndarray:
        """int64 [parts]: of each graph."""
        found: np.ndarray = -(-self.nodes // self.nodes_per_page)
        return found

    @cached_property
    def first_page(self) -> np.ndarray:
        """int64 [parts + 1]: where each begins; the last: how many pages there are."""
        return _sums(self.pages)

    def in_files(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the file, and the page in it) of some pages, int64 [m]."""
        part = self.of_pages(pages)
        return self.files[part], pages - self.first_page[part] + self.file_pages[part]

    def pages_of_files(self, n_files: int) -> np.ndarray:
        """int64 [n_files]: pages of these graphs in each file."""
        return np.bincount(self.files, self.pages, n_files).astype(np.int64)

    @cached_property
    def entries_begin(self) -> np.ndarray:
        """int64 [parts + 1]."""
        return _sums(self.n_entries)

    @property
    def n_pages(self) -> int:
        return int(self.first_page[-1])

    @property
    def n_places(self) -> int:
        """How many nodes all pages have room for."""
        return self.n_pages * self.nodes_per_page

    @property
    def end_place(self) -> int:
        """The place after that of the last node."""
        return int(self.first_page[-2]) * self.nodes_per_page + int(self.nodes[-1])

    def of_pages(self, pages: np.ndarray) -> np.ndarray:
        """int64 [m]: the part that each page is of."""
        return np.searchsorted(self.first_page, pages, side="right") - 1

    def is_node(self, places: np.ndarray) -> np.ndarray:
        """bool, of the shape of `places`: whether there is a node."""
        part = self.of_pages(places // self.nodes_per_page)
        found: np.ndarray = places - self.first_page[part] * self.nodes_per_page < self.nodes[part]
        return found

    def places_of(self, entries: np.ndarray) -> np.ndarray:
        """int64 [m]: of the entry points of all parts, numbered in their own."""
        part = np.repeat(np.arange(len(self.nodes)), self.n_entries)
        return entries + self.first_page[part] * self.nodes_per_page

    def by_part(self, pages: np.ndarray) -> np.ndarray:
        """Sums of what there is of each page, int64 [pages], over those of each part."""
        total = np.concatenate([np.zeros(1, np.int64), np.cumsum(pages, dtype=np.int64)])
        return np.diff(total[self.first_page])


@dataclass(frozen=True)
class PageFile:
    """A file of pages of clusters.

    Attributes:
        directory: of several, the one that it lies in; 0: of none.
        generation: of the version that wrote it, and that its name has.
        pages: that it has, those of graphs among them that no later version needs.
    """

    directory: int
    generation: int
    pages: int


@dataclass(frozen=True, eq=False)
class Clusters:
    """The centroids, and how large the graph of each cluster is, and where.

    Attributes:
        centroids: float32 [clusters, dim]. nodes, n_entries: see `Parts`; a cluster has one node or
            more, unless it is the only one.
        copies: clusters that a row may be in.
        files, file_pages, salts: see `Parts`.
        page_files: these files.
    """

    centroids: np.ndarray
    nodes: np.ndarray
    n_entries: np.ndarray
    copies: int
    files: np.ndarray
    file_pages: np.ndarray
    salts: np.ndarray
    page_files: Sequence[PageFile]

    @cached_property
    def spread(self) -> float:
        """The mean squared distance of the centroids from their mean."""
        apart = self.centroids - self.centroids.mean(axis=0, dtype=np.float64).astype(np.float32)
        return float(np.square(apart).sum(axis=1, dtype=np.float64).mean())

    def table(self) -> np.ndarray:
        """`TABLE` [clusters]."""
        table = np.zeros(len(self.nodes), TABLE)
        table["nodes"], table["entries"] = self.nodes, self.n_entries
        table["file"], table["first_page"] = self.files, self.file_pages
        table["salt"] = self.salts
        return table


def pages_in_files(pages: np.ndarray, files: np.ndarray) -> np.ndarray:
    """int64 [parts]: the page at which each graph begins in its file, where those of a file lie one
    after the other in their order. Args: as of `Parts`."""
    found = np.empty_like(pages)
    for file in np.unique(files).tolist():
        inside = files == file
        found[inside] = _sums(pages[inside])[:-1]
    return found


def home_of(directory: str, salt: int) -> str:
    """The folder of a graph in one of several directories that its pages lie in."""
    return os.path.join(directory, f"graph-{salt:016x}")


def lost_directory(directory: str) -> errors.FileMissingError:
    """What is said of clusters whose directory is lost."""
    return errors.FileMissingError(
        "a directory of a graph's clusters",
        path=directory,
        got="no pages of this graph",
        fix="mount it, or search what is in the others: open(partial=True), --partial",
    )


def most_entries(code_bytes: int) -> int:
    """Entry points that a cluster may have."""
    return max(1, (CLUSTER_BYTES - _FIXED_BYTES) // (_ENTRY_BYTES + 2 * code_bytes))


def balanced(pages: np.ndarray, n_files: int) -> np.ndarray:
    """int64 [clusters]: a file for each, so that all have about as many pages: the largest first,
    each into the one that has the fewest."""
    files, filled = np.zeros(len(pages), np.int64), np.zeros(n_files, np.int64)
    for cluster in np.argsort(-pages, kind="stable").tolist():
        files[cluster] = filled.argmin()
        filled[files[cluster]] += pages[cluster]
    return files


def _sums(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
