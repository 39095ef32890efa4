"""What becomes of the clusters of a graph when changes are merged into it: each stays, changes, is
built anew, is divided, or is no more."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ...ops.centroids import fit_means
from ...storage import NativeEngine
from ..bounded.budget import member_bytes
from ..bounded.partition import NOBODY
from ..bounded.work import read_array
from ..codes.codebook import Codebook
from ..format import CLUSTERS_MAX, N_MAX
from ..global_index.cluster import BuiltCluster, build_cluster
from ..global_index.division import guests_of, homes_of
from ..global_index.rows import Members
from ..layout import rows_of
from ..options import GraphOptions
from ..pages.checked import open_pages, read_pages
from ..parts import Clusters, most_entries
from ..search.version import GraphVersion
from ..updates.pending import Pending
from ..write import pages_of
from .cluster import ClusterMerge, cluster_facts
from .coding import codebook_for
from .nodes import BLOCK_BYTES, DEADLINE_S, PartChanges

# A cluster of which so large a share was changed, or that has so few vectors, is built anew: that
# takes no longer then than changing its graph.
_REBUILT_SHARE, _REBUILT_MOST = 0.25, 256
_SAMPLE_ROWS = 65_536
_PIECE = "piece"


@dataclass(eq=False)
class Piece:
    """A cluster as it will be.

    Attributes:
        centroid: float32 [dim]. n: vectors. salt: of its pages. directory: that these are in.
        old: the cluster before, where pages stay as they are.
        make: its pages; what follows is known once they were made. None: they stay as they are.
        entries, entry_codes: nodes at which searches begin.
        members: where its vectors begin in the files of members.
        file, file_page: where its pages are.
    """

    centroid: np.ndarray
    n: int
    salt: int
    directory: int
    old: int = -1
    make: Callable[[Piece], Iterator[np.ndarray]] | None = None
    entries: np.ndarray | None = None
    entry_codes: np.ndarray | None = None
    members: int = 0
    file: int = 0
    file_page: int = 0


class ClusterPieces:
    """Makes the clusters of the next version.

    Attributes:
        ids, rows: int64 [a] and [a, dim]: additions.
        n: vectors of the next version.

    Args:
        folder: for files meanwhile.
        memory_bytes: of a merge's vectors and codes.
    """

    def __init__(
        self,
        engine: NativeEngine,
        pages: GraphVersion,
        pending: Pending,
        old: Clusters,
        folder: Path,
        memory_bytes: int,
    ):
        facts = pages.facts
        self._engine, self._facts, self._pending, self._old = engine, facts, pending, old
        self._parts, self._layout = facts.parts, facts.layout
        self._folder, self._memory_bytes = folder, memory_bytes
        self._files = open_pages(engine, facts)
        options = dict(facts.options)
        known = {name: options[name] for name in GraphOptions.__annotations__ if name in options}
        self._options = replace(
            GraphOptions(**known),
            metric=facts.metric,
            max_degree=facts.layout.max_degree,
            threads=torch.get_num_threads(),
            device="cpu",
        )
        self._max_points = max(1, min(N_MAX, int(options.get("max_points", N_MAX))))
        self.ids, self.rows = pending.living()
        self._dead = self._dead_nodes(pages)
        self._added = self._assigned()
        self.n = self._layout.n - len(pending.dead) + len(self.ids)
        self._n_members, self._n_clusters = 0, len(old.nodes)
        #: Pages of each directory.
        self._filled = np.array(
            [
                self._parts.pages[facts.in_directory(each)].sum()
                for each in range(max(1, len(facts.directories)))
            ]
        )

    def make(self, book: Codebook) -> list[Piece]:
        """All clusters, at least one; what `Piece.make` does comes later."""
        found = [
            piece for cluster in range(len(self._old.nodes)) for piece in self._of(cluster, book)
        ]
        if not found:  # one stays, for additions that come
            empty = Piece(self._old.centroids[0], 0, secrets.randbits(64), 0, make=_no_pages)
            empty.entries = np.empty(0, np.uint32)
            empty.entry_codes = np.empty((0, self._layout.code_bytes), np.uint8)
            found = [empty]
        return found

    def book(self) -> Codebook:
        """The graph's codebook, or another one where that says too little of what was added: then
        every cluster is written anew."""
        parts = self._parts
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(parts.nodes)])
        dead = np.concatenate([first[i] + each for i, each in enumerate(self._dead)])
        behind = dead - np.arange(len(dead))

        def read(numbers: np.ndarray) -> np.ndarray:
            number = numbers + np.searchsorted(behind, numbers, side="right")
            part = np.searchsorted(first, number, side="right") - 1
            place = number - first[part]
            pages = parts.first_page[part] + place // parts.nodes_per_page
            rows = np.empty((len(numbers), self._layout.dim), np.float32)
            at_once = max(1, BLOCK_BYTES // self._layout.page_bytes)
            for begin in range(0, len(numbers), at_once):
                here = slice(begin, begin + at_once)
                wanted, which = np.unique(pages[here], return_inverse=True)
                nodes = self._read(wanted)[which, place[here] % parts.nodes_per_page]
                rows[here] = self._facts.coding.decode(nodes["vector"])
            return rows

        n_living = int(first[-1]) - len(dead)
        return codebook_for(self._facts, n_living, read, self.rows, self._memory_bytes // 8)

    def kept(self, cluster: int) -> Iterator[np.ndarray]:
        """A cluster's pages as they are, read and checked."""
        for first, nodes in self._nodes_of(cluster):
            per_page = self._layout.nodes_per_page
            whole = np.zeros(-(-len(nodes) // per_page) * per_page, self._layout.node_dtype)
            whole[: len(nodes)] = nodes
            salt = int(self._old.salts[cluster])
            yield pages_of(whole, self._layout, first // per_page, salt)

    def members_of(self, piece: Piece, first_place: int) -> Members:
        ids, nodes = self._folder / "ids", self._folder / "nodes"
        return Members(
            piece.n,
            first_place,
            lambda first, count: read_array(ids, np.int64, None, piece.members + first, count),
            lambda first, count: read_array(nodes, np.uint32, None, piece.members + first, count),
        )

    def _dead_nodes(self, pages: GraphVersion) -> list[np.ndarray]:
        """int64, growing: of each cluster the nodes that are deleted."""
        parts, dead = self._parts, self._pending.dead
        if not len(dead):
            return [dead] * len(parts.nodes)
        places = pages.reader.nodes_of(self._engine, dead, DEADLINE_S).ravel()
        places = np.sort(places[places >= 0])
        first = parts.first_page * self._layout.nodes_per_page
        begin = np.searchsorted(places, first)
        return [
            places[begin[each] : begin[each + 1]] - first[each] for each in range(len(parts.nodes))
        ]

    def _assigned(self) -> list[np.ndarray]:
        """int64, growing: of each cluster the additions that it gets: those to which it is the
        nearest, and those at its border, as a build divides vectors."""
        centres, border = self._old.centroids, self._facts.border
        count = len(centres)
        home = np.empty(len(self.ids), np.uint32)
        guest = np.full(len(self.ids), NOBODY, np.uint32)
        gone = np.array([len(each) for each in self._dead])
        room = np.full(count, np.iinfo(np.int64).max // 2)
        for part in self._blocks_of_additions():
            home[part] = homes_of(np.asarray(self.rows[part], np.float32), centres, room)
        if border is not None and border >= 0 and count > 1:
            filled = self._old.nodes - gone + np.bincount(home, minlength=count)
            room = np.maximum(self._max_points - filled, 0)
            for part in self._blocks_of_additions():
                wide = np.asarray(self.rows[part], np.float32)
                guest[part] = guests_of(wide, centres, home[part], room, border)
        which = np.tile(np.arange(len(home)), 2)
        cluster = np.concatenate([home, guest]).astype(np.int64)
        order = np.lexsort((which, cluster))
        begin = np.searchsorted(cluster[order], np.arange(count + 1))
        return [which[order[begin[each] : begin[each + 1]]] for each in range(count)]

    def _blocks_of_additions(self) -> Iterator[slice]:
        at_once = max(1, BLOCK_BYTES // (4 * self._layout.dim))
        for first in range(0, len(self.ids), at_once):
            yield slice(first, first + at_once)

    def _read(self, pages: np.ndarray) -> np.ndarray:
        return read_pages(self._engine, self._files, self._facts, pages, DEADLINE_S)

    def _of(self, cluster: int, book: Codebook) -> list[Piece]:
        """What becomes of a cluster."""
        old, dead, added = self._old, self._dead[cluster], self._added[cluster]
        before = int(old.nodes[cluster])
        n = before - len(dead) + len(added)
        file = old.page_files[int(old.files[cluster])]
        piece = Piece(old.centroids[cluster], n, secrets.randbits(64), file.directory, old=cluster)
        if not n:
            return []
        fits = n * member_bytes(self._layout, self._options) <= self._memory_bytes
        n_pieces = max(2, round(2 * n / self._max_points))
        n_pieces = min(n_pieces, CLUSTERS_MAX - self._n_clusters + 1, n)
        if n > self._max_points and fits and n_pieces > 1:
            return self._split(cluster, n_pieces, file.directory, book)
        changed = len(dead) + len(added)
        if not changed and book is self._facts.codebook:
            piece.salt = int(old.salts[cluster])
            return [piece]
        few = n <= _REBUILT_MOST or changed > _REBUILT_SHARE * before
        if not before or (few and fits):
            piece.make = lambda made: self._rebuilt(made, cluster, book)
        else:
            piece.make = lambda made: self._changed(made, cluster, book)
        return [piece]

    def _members(self, cluster: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, growing; vectors as they are stored) of all that a cluster will have; and the sum
        of those that it had, float64 [dim]."""
        parts, layout = self._parts, self._layout
        dead, added = self._dead[cluster], self._added[cluster]
        before = np.zeros(layout.dim)
        n_old = int(parts.nodes[cluster]) - len(dead)
        ids = np.empty(n_old + len(added), np.int64)
        rows = np.empty((len(ids), layout.dim), layout.row_dtype)
        done = 0
        for first, nodes in self._nodes_of(cluster):
            vectors = self._facts.coding.decode(nodes["vector"])
            before += vectors.astype(np.float64).sum(axis=0)
            lives = ~np.isin(first + np.arange(len(nodes)), dead)
            part = slice(done, done + int(np.count_nonzero(lives)))
            ids[part], rows[part] = rows_of(nodes[lives]), vectors[lives]
            done = part.stop
        ids[done:], rows[done:] = self.ids[added], self.rows[added]
        order = np.argsort(ids, kind="stable")
        return ids[order], rows[order], before

    def _nodes_of(self, cluster: int) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the first, nodes) of a cluster's old pages."""
        begin, end = self._parts.first_page[cluster : cluster + 2].tolist()
        per_page, n = self._layout.nodes_per_page, int(self._parts.nodes[cluster])
        at_once = max(1, BLOCK_BYTES // self._layout.page_bytes)
        for page in range(begin, end, at_once):
            nodes = self._read(np.arange(page, min(end, page + at_once))).reshape(-1)
            first = (page - begin) * per_page
            yield first, nodes[: n - first]

    def _split(self, cluster: int, n_pieces: int, directory: int, book: Codebook) -> list[Piece]:
        """Divides a cluster that has too many vectors, as a build divides all; the pieces are
        built, and their pages kept in files."""
        ids, rows, _ = self._members(cluster)
        random = np.random.default_rng(self._pending.stamp)
        chosen = random.choice(len(ids), min(_SAMPLE_ROWS, len(ids)), replace=False)
        centres = fit_means(
            np.asarray(rows[np.sort(chosen)], np.float32), n_pieces, seed=self._options.seed
        )
        room = np.full(n_pieces, max(self._max_points, -(-len(ids) // n_pieces)))
        home = np.concatenate(
            [
                homes_of(np.asarray(rows[first : first + _SAMPLE_ROWS], np.float32), centres, room)
                for first in range(0, len(ids), _SAMPLE_ROWS)
            ]
        )
        made = []
        self._filled[directory] -= self._parts.pages[cluster]
        for number in np.unique(home).tolist():
            here = np.flatnonzero(home == number)
            directory = int(self._filled.argmin())
            self._filled[directory] += -(-len(here) // self._layout.nodes_per_page)
            piece = Piece(centres[number], len(here), secrets.randbits(64), directory)
            built = self._built(piece, ids[here], rows[here], book)
            path = self._folder / f"{_PIECE}{cluster}.{number}"
            with path.open("wb") as file:
                for part in built.pages:
                    file.write(part.data)
            piece.make = lambda _, path=path: _pages_in(path)
            made.append(piece)
        self._n_clusters += len(made) - 1
        return made

    def _built(
        self, piece: Piece, ids: np.ndarray, rows: np.ndarray, book: Codebook
    ) -> BuiltCluster:
        """Builds a cluster's graph in memory; its pages are still to be made."""
        built = build_cluster(
            rows,
            ids,
            self._layout,
            self._options,
            book,
            0.0,
            piece.salt,
            self._options.seed,
            lambda done: None,
        )
        piece.entries, piece.entry_codes = built.entries, built.entry_codes
        self._keep_members(piece, ids, built.node_of)
        return built

    def _keep_members(self, piece: Piece, ids: np.ndarray, nodes: np.ndarray) -> None:
        """Writes down where the vectors of a cluster are: ids, int64 [n], growing, and their
        nodes."""
        piece.members = self._n_members
        self._n_members += len(ids)
        with (self._folder / "ids").open("ab") as file:
            file.write(ids.astype(np.int64).data)
        with (self._folder / "nodes").open("ab") as file:
            file.write(nodes.astype(np.uint32).data)

    def _rebuilt(self, piece: Piece, cluster: int, book: Codebook) -> Iterator[np.ndarray]:
        ids, rows, before = self._members(cluster)
        after = rows.sum(axis=0, dtype=np.float64)
        n_before = int(self._parts.nodes[cluster])
        piece.centroid = _moved(self._old.centroids[cluster], before, n_before, after, len(rows))
        yield from self._built(piece, ids, rows, book).pages

    def _changed(self, piece: Piece, cluster: int, book: Codebook) -> Iterator[np.ndarray]:
        added = self._added[cluster]
        changes = PartChanges(
            self.ids[added], self.rows[added], self._dead[cluster], self._pending.stamp
        )
        merge = ClusterMerge(
            self._engine,
            cluster_facts(self._facts, cluster),
            changes,
            self._folder,
            self._memory_bytes,
            lambda *_: None,
            book,
            most_entries(self._layout.code_bytes),
        )
        try:
            yield from merge.pages(piece.salt)
            piece.entries, piece.entry_codes = merge.entries, merge.entry_codes
            ids = merge.ids_by_node()
            order = np.argsort(ids, kind="stable")
            self._keep_members(piece, ids[order], order)
            piece.centroid = _moved(
                self._old.centroids[cluster], *merge.sums_before(), *merge.sums_after()
            )
        finally:
            merge.close()


def _moved(
    centroid: np.ndarray, before: np.ndarray, n_before: int, after: np.ndarray, n_after: int
) -> np.ndarray:
    """A cluster's centroid once its vectors have others sums, float64 [dim]: it goes with their
    mean, of which it was not the same where there are copies of others' vectors."""
    mean = after / n_after
    if not n_before:
        return mean.astype(np.float32)
    return (centroid + (mean - before / n_before)).astype(np.float32)


def _pages_in(path: Path) -> Iterator[np.ndarray]:
    size = path.stat().st_size
    for first in range(0, size, BLOCK_BYTES):
        yield read_array(path, np.uint8, None, first, min(BLOCK_BYTES, size - first))
    path.unlink()


def _no_pages(_: Piece) -> Iterator[np.ndarray]:
    return iter(())
