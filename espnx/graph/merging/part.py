"""Writes additions and deletions into the pages of one graph, as FreshDiskANN does (section 5.3),
page by page. Where the new pages go, somebody else decides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...storage import NativeEngine
from ..bounded.merge import EdgesFile
from ..codes.codebook import Codebook
from ..format import N_ENTRIES_MAX, GraphFacts
from ..write import Progress, pages_of
from .lists import Links, MergedLists, searcher_of
from .nodes import BLOCK_BYTES, MergedNodes, PartChanges
from .numbers import Numbers, choose_numbers
from .order import packed_order, reordered


class PartMerge:
    """The merge of one graph, step by step.

    Args:
        facts, changes, memory_bytes, book: see `MergedNodes`.
        folder: for files of the merge.
        entries_most: nodes at which searches begin.
    """

    def __init__(
        self,
        engine: NativeEngine,
        facts: GraphFacts,
        changes: PartChanges,
        folder: Path,
        memory_bytes: int,
        progress: Progress,
        book: Codebook | None = None,
        entries_most: int = N_ENTRIES_MAX,
    ):
        self._engine, self._facts = engine, facts
        self._folder, self._progress = folder, progress
        layout = self._layout = facts.layout
        self._n, self._changes = layout.n, changes
        self._entries_most = entries_most
        #: Pages are packed anew where they hold several nodes.
        self._packs = layout.nodes_per_page > 1
        self._memory_bytes = memory_bytes
        self._nodes = MergedNodes(
            engine, facts, changes, folder, memory_bytes, keeps_ids=self._keeps_ids, book=book
        )
        self._lists = MergedLists(self._nodes, self._searcher, self._nodes_of, progress)

    @property
    def _keeps_ids(self) -> bool:
        """Whether ids of old nodes stay in memory."""
        return self._packs

    def _searcher(self) -> Any:
        """A searcher of the old pages, by distance, by which edges are."""
        return searcher_of(self._engine, self._facts)

    def _nodes_of(self, ids: np.ndarray) -> np.ndarray:
        """int64 [m]: old nodes of ids, growing."""
        raise NotImplementedError

    def _look_at(self, first: int, rows: np.ndarray) -> None:
        """What somebody wants to know of the vectors of successive old nodes, [m, dim]."""

    def run(self) -> tuple[Numbers, EdgesFile, np.ndarray]:
        """All but the writing of pages: (the nodes' numbers; their neighbours by number; numbers of
        those at which searches begin)"""
        self._nodes.read(self._look_at, self._progress)
        found = self._lists.additions()
        numbers = choose_numbers(self._n, self._changes.dead, len(self._changes.ids))
        edges = self._edges(found, numbers)
        if self._packs:
            numbers, edges = self._packed(numbers, edges)
        return numbers, edges, self._entries(edges, numbers)

    def close(self) -> None:
        """Ends its threads and closes its files."""
        self._nodes.close()

    def _edges(self, found: np.ndarray, numbers: Numbers) -> EdgesFile:
        """Lists of all nodes, by number, in a file."""
        degree = self._layout.max_degree
        counts, links = np.zeros(numbers.n_new, np.uint16), Links(found, self._n)
        names, moved = [self._n + np.arange(len(found))], [found]  # of lists that follow
        path = self._folder / "edges"
        with path.open("wb") as file:
            for first, nodes in self._nodes.blocks():
                lists = self._lists.repaired(first, nodes, links)
                stays = max(0, min(len(nodes), numbers.n_new - first))
                _write_lists(file, first, lists[:stays], numbers, counts)
                behind = first + np.arange(stays, len(nodes))
                lives = ~np.isin(behind, self._changes.dead)
                names.append(behind[lives])
                moved.append(lists[stays:][lives])
                self._progress("repair", first + len(nodes), self._n)
            file.truncate(4 * degree * numbers.n_new)
            for which, some in zip(names, moved, strict=True):
                for number, list_ in zip(numbers.number_of(which).tolist(), some, strict=True):
                    _write_lists(file, number, list_[None], numbers, counts)
        return EdgesFile(path, degree, counts)

    def _packed(self, numbers: Numbers, edges: EdgesFile) -> tuple[Numbers, EdgesFile]:
        """The same, once pages hold neighbours again. Pages are written anew in any case: those in
        which additions took the places of what was deleted would hold what is far apart."""
        self._progress("pack", 0, numbers.n_new)
        order = packed_order(
            edges,
            lambda wanted: self._nodes.points(numbers.names_of(wanted)),
            self._layout.nodes_per_page,
            self._root(numbers),
            self._memory_bytes // 2,
        )
        packed = reordered(self._engine, edges, numbers, order, self._folder / "packed_edges")
        edges.path.unlink()
        self._progress("pack", numbers.n_new, numbers.n_new)
        return packed

    def _living_entries(self, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of nodes at which searches began and that are still there; which these are)"""
        lives = ~np.isin(self._facts.entries, self._changes.dead)
        return numbers.number_of(self._facts.entries[lives]), lives

    def _root(self, numbers: Numbers) -> int:
        """The node in the middle of those at which searches began, as codes tell."""
        old, lives = self._living_entries(numbers)
        if not len(old):
            return 0
        points = self._facts.codebook.decode(self._facts.entry_codes[lives])
        return int(old[np.argmin(np.square(points - points.mean(axis=0)).sum(axis=1))])

    def _entries(self, edges: EdgesFile, numbers: Numbers) -> np.ndarray:
        """Nodes at which searches begin: as before, and others in the place of those deleted."""
        n = numbers.n_new
        if not n:
            return np.empty(0, np.int64)
        facts = self._facts
        old, root = self._living_entries(numbers)[0], self._root(numbers)
        edges.connect(root)
        wanted = min(int(facts.options.get("num_entry_points", 1000)), self._entries_most, n)
        more = np.random.default_rng(self._changes.stamp).choice(n, wanted, replace=False)
        leads = edges.leading_to(root)
        chosen = np.concatenate([old, more[~np.isin(more, old)]])
        chosen = chosen[leads[chosen] & (chosen != root)][: max(0, wanted - 1)]
        return np.unique(np.append(chosen, root))

    def _codes_of(self, numbers: Numbers, wanted: np.ndarray) -> np.ndarray:
        """uint8 [m, code_bytes], by number."""
        return self._nodes.codes_of(numbers.names_of(wanted))

    def _node_pages(
        self, numbers: Numbers, edges: EdgesFile, new: GraphFacts, salt: int
    ) -> Iterator[np.ndarray]:
        layout, coding = new.layout, self._facts.coding
        at_once = max(1, BLOCK_BYTES // 2 // layout.page_bytes)
        for first in range(0, layout.n_pages, at_once):
            count = min(at_once, layout.n_pages - first)
            begin = first * layout.nodes_per_page
            end = min(begin + count * layout.nodes_per_page, layout.n)
            nodes = np.zeros(count * layout.nodes_per_page, layout.node_dtype)
            here, names = nodes[: end - begin], numbers.names_of(np.arange(begin, end))
            old = np.flatnonzero(names < self._n)
            here["vector"][old], ids = self._nodes.held(names[old])
            _name(here, old, ids)
            new_here = np.flatnonzero(names >= self._n)
            added = names[new_here] - self._n
            here["vector"][new_here] = coding.encode(self._changes.rows[added])
            _name(here, new_here, self._changes.ids[added])
            near, there = _read_lists(edges, begin, end - begin)
            here["n_neighbours"] = there.sum(axis=1)
            here["neighbours"] = np.where(there, near, 0)
            if inline := layout.inline_pq:
                wanted = near[:, :inline][there[:, :inline]].astype(np.int64)
                here["codes"][there[:, :inline]] = self._codes_of(numbers, wanted)
            yield pages_of(nodes, layout, first, salt)
            self._progress("pages", end, layout.n)


def _name(nodes: np.ndarray, which: np.ndarray, ids: np.ndarray) -> None:
    """Writes the ids of some nodes."""
    wide = ids.astype(np.int64)
    nodes["row"][which], nodes["row_high"][which] = wide & 0xFFFFFFFF, wide >> 32


def _write_lists(
    file: BinaryIO, first: int, lists: np.ndarray, numbers: Numbers, counts: np.ndarray
) -> None:
    """Lists by name of successive nodes, by number."""
    degree = lists.shape[1]
    there = lists >= 0
    order = np.argsort(~there, axis=1, kind="stable")
    named = np.take_along_axis(np.where(there, numbers.number_of(lists), 0), order, axis=1)
    counts[first : first + len(lists)] = there.sum(axis=1)
    file.seek(4 * degree * first)
    file.write(named.astype(np.uint32).reshape(-1).data)


def _read_lists(edges: EdgesFile, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(neighbours [m, degree]; bool: which of these there are)"""
    near = edges.rows(first, count)
    return near, np.arange(edges.degree) < edges.counts[first : first + count, None]
