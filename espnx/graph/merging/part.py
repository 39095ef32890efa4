"""Writes additions and deletions into the pages of one graph: StreamingMerge of FreshDiskANN
(section 5.3), page by page. Where the new pages go, somebody else decides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ...ops._native import load_extension
from ...storage import NativeEngine
from ..bounded.codes import CodeReader
from ..bounded.merge import EdgesFile
from ..codes.codebook import Codebook
from ..edges import build_edges, robust_prune
from ..format import N_ENTRIES_MAX, N_MAX, GraphFacts
from ..layout import rows_of
from ..native import native_view
from ..options import GraphOptions, measured_rows
from ..pages.checked import open_pages, read_codes, read_pages
from ..search.asked import checked_queries
from ..write import Progress, pages_of
from .coding import codebook_for
from .numbers import Numbers, choose_numbers
from .order import packed_order, reordered

BLOCK_BYTES = 4 << 20
DEADLINE_S = 3600.0
_QUERIES_AT_ONCE = 1024
_LINKS_MOST = 256  # to a node, of additions, at a time: the rest is of one that all are near to
_PRUNED_BYTES = 64 << 20
_LINKED_AT_ONCE = 256  # additions whose links are looked at together
_REPAIRED_AT_ONCE = 1024  # nodes
_CANDIDATES_MOST = 750  # of a node that gets those of deleted neighbours


@dataclass(frozen=True, eq=False)
class PartChanges:
    """Changes of one graph.

    Attributes:
        ids, rows: int64 [a] and [a, dim], as `PageLayout.row_dtype`: of additions.
        dead: int64 [d], growing: nodes that are deleted.
        stamp: of a seed.
    """

    ids: np.ndarray
    rows: np.ndarray
    dead: np.ndarray
    stamp: int


class PartMerge:
    """The merge of one graph, step by step. Nodes are called by a name that does not change: old
    ones by their number, additions by what follows.

    Args:
        facts: of one graph; codes inline, or of all of a directory.
        folder: for files of the merge.
        memory_bytes: of vectors and codes.
        book: of the codes; None: the graph's, or one that is trained where that says too little of
            the additions.
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
        self._n = layout.n
        self._files_of_pages = open_pages(engine, facts)
        self._ids, self._rows, self._dead = changes.ids, changes.rows, changes.dead
        self._stamp, self._entries_most = changes.stamp, entries_most
        names = self._n + len(self._ids)
        whole = names * layout.dim * layout.row_dtype.itemsize
        self._exact = (
            np.empty((names, layout.dim), layout.row_dtype) if 2 * whole <= memory_bytes else None
        )
        self._codes = CodeReader(
            engine, folder / "codes", replace(layout, n=names), memory_bytes // 4
        )
        options = facts.options
        #: Pages are packed anew where they hold several nodes.
        self._packs = layout.nodes_per_page > 1
        self._old_ids = np.empty(
            self._n if self._keeps_ids else 0, np.uint32 if facts.n_rows <= N_MAX else np.int64
        )
        self._memory_bytes = memory_bytes
        self._alpha = float(options.get("alpha", 1.2))
        self._list_size = int(options.get("list_size", 100))
        self._longest: float | None = None
        if book is None:
            living = np.setdiff1d(np.arange(self._n), self._dead, assume_unique=True)
            book = codebook_for(
                facts,
                len(living),
                lambda numbers: self._vectors(living[numbers]),
                self._rows,
                memory_bytes // 8,
            )
        self._book = book

    @property
    def _keeps_ids(self) -> bool:
        """Whether ids of old nodes stay in memory."""
        return self._packs

    def run(self) -> tuple[Numbers, EdgesFile, np.ndarray]:
        """All but the writing of pages: (the nodes' numbers; their neighbours by number; numbers of
        those at which searches begin)"""
        self._read()
        found = self._additions()
        numbers = choose_numbers(self._n, self._dead, len(self._ids))
        edges = self._edges(found, numbers)
        if self._packs:
            numbers, edges = self._packed(numbers, edges)
        return numbers, edges, self._entries(edges, numbers)

    def close(self) -> None:
        """Ends its threads and closes its files."""
        self._codes.close()
        for file in self._files_of_pages:
            if file is not None:
                self._engine.close_file(file)

    def _searcher(self) -> Any:
        """A searcher of the old pages, by distance, by which edges are."""
        native, facts = load_extension(), self._facts
        codes = read_codes(self._engine, facts) if facts.layout.codes_in == "memory" else None
        return native.GraphSearcher(
            native_view(replace(facts, metric="l2") if facts.metric == "ip" else facts, codes),
            native.GraphSearchOptions(
                path="posix", direct=None, threads=2, walks=32, code_cache_bytes=5 << 20,
                rules=[], seed=0,
            ),
        )  # fmt: skip

    def _nodes_of(self, ids: np.ndarray) -> np.ndarray:
        """int64 [m]: old nodes of ids, growing."""
        raise NotImplementedError

    def _blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the first, nodes) of the old pages."""
        layout = self._layout
        at_once = max(1, BLOCK_BYTES // layout.page_bytes)
        for first in range(0, layout.n_pages, at_once):
            part = np.arange(first, min(first + at_once, layout.n_pages))
            nodes = read_pages(self._engine, self._files_of_pages, self._facts, part, DEADLINE_S)
            begin = first * layout.nodes_per_page
            yield begin, nodes.reshape(-1)[: self._n - begin]

    def _read(self) -> None:
        """Codes of all nodes by name, and their vectors where there is room."""
        facts, layout = self._facts, self._layout
        is_kept = layout.codes_in == "memory" and self._book is facts.codebook
        held = read_codes(self._engine, facts) if is_kept else None
        longest = 0.0
        with self._codes.path.open("wb") as file:
            for first, nodes in self._blocks():
                rows = facts.coding.decode(nodes["vector"])
                part = slice(first, first + len(nodes))
                if self._exact is not None:
                    self._exact[part] = rows
                if self._keeps_ids:
                    self._old_ids[part] = rows_of(nodes)
                self._look_at(first, rows)
                longest = max(longest, _longest(rows))
                codes = self._book.encode(rows) if held is None else held[part]
                file.write(np.ascontiguousarray(codes).reshape(-1).data)
                self._progress("read", first + len(nodes), self._n)
            file.write(self._book.encode(self._rows).reshape(-1).data)
        if self._exact is not None:
            self._exact[self._n :] = self._rows
        if facts.metric == "ip":
            self._longest = max(longest, _longest(self._rows))
        self._codes.open()

    def _look_at(self, first: int, rows: np.ndarray) -> None:
        """What somebody wants to know of the vectors of successive old nodes, [m, dim]."""

    def _points(self, names: np.ndarray) -> np.ndarray:
        """float32 [m, dim], one more by inner product: vectors as edges are chosen by."""
        unique, inverse = np.unique(names, return_inverse=True)
        if self._exact is not None:
            rows = self._exact[unique]
        else:
            self._codes.load(unique)
            rows = self._book.decode(self._codes.get(unique))
            is_new = unique >= self._n
            rows[is_new] = self._rows[unique[is_new] - self._n]
        return self._measured(rows)[inverse]

    def _measured(self, rows: np.ndarray) -> np.ndarray:
        layout, metric = self._layout, self._facts.metric
        return np.asarray(
            measured_rows(rows, metric, layout.row_format, self._longest)[0], np.float32
        )

    def _pruned(self, names: np.ndarray, targets: np.ndarray, pool: np.ndarray) -> np.ndarray:
        """int64 [m, degree]: neighbours of nodes with these vectors, of a pool [m, p] by name, in
        which -1 is none."""
        found = np.empty((len(names), self._layout.max_degree), np.int64)
        at_once = max(1, _PRUNED_BYTES // (4 * max(1, pool.shape[1]) * (self._layout.dim + 1)))
        for first in range(0, len(names), at_once):
            part = slice(first, first + at_once)
            there = (pool[part] >= 0) & (pool[part] != names[part, None])
            known, rows = np.unique(pool[part][there], return_inverse=True)
            candidates = np.full(there.shape, -1, np.int64)
            candidates[there] = rows
            chosen = robust_prune(
                targets[part], candidates, self._points(known), found.shape[1], self._alpha
            )
            found[part] = np.where(chosen < 0, -1, np.append(known, -1)[chosen])
        return found

    def _additions(self) -> np.ndarray:
        """Neighbours of additions: of what walks over the old pages find, and of one another."""
        count, layout = len(self._ids), self._layout
        if not count:
            return np.empty((0, layout.max_degree), np.int64)
        names = self._n + np.arange(count)
        pool = np.concatenate([self._found_in_pages(), self._near_additions()], axis=1)
        targets = self._measured(self._rows)
        lists = self._pruned(names, targets, pool)
        begin, links = self._links(lists, names)
        linked = np.flatnonzero(np.diff(begin))
        for first in range(0, len(linked), _LINKED_AT_ONCE):
            some = linked[first : first + _LINKED_AT_ONCE]
            kept, more = lists[some], _padded(begin, links, some)
            more[(more[:, :, None] == kept[:, None]).any(axis=2)] = -1
            pool = np.concatenate([kept, more], axis=1)
            lists[some] = self._fitted(names[some], targets[some], pool)
        return lists

    def _fitted(self, names: np.ndarray, targets: np.ndarray, pool: np.ndarray) -> np.ndarray:
        """Neighbours as `_pruned` chooses them; where a list has room for the whole pool, all of
        it, in its order."""
        degree = self._layout.max_degree
        order = np.argsort(pool < 0, axis=1, kind="stable")[:, :degree]
        fitted = np.take_along_axis(pool, order, axis=1)
        more = np.flatnonzero((pool >= 0).sum(axis=1) > degree)
        fitted[more] = self._pruned(names[more], targets[more], pool[more])
        return fitted

    def _links(self, lists: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Additions that lead to each of some nodes: (int64 [m + 1]: where those of each begin;
        their names)."""
        place, column = np.nonzero(lists >= 0)
        ends, starts = lists[place, column], self._n + place
        order = np.argsort(ends, kind="stable")
        ends, starts = ends[order], starts[order]
        low, high = np.searchsorted(ends, wanted), np.searchsorted(ends, wanted, side="right")
        counts = np.minimum(high - low, _LINKS_MOST)
        begin = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        offsets = np.arange(begin[-1]) - np.repeat(begin[:-1], counts)
        return begin, starts[np.repeat(low, counts) + offsets]

    def _found_in_pages(self) -> np.ndarray:
        """int64 [a, k]: living old nodes near each addition, -1 behind the last."""
        living, count = self._n - len(self._dead), len(self._ids)
        if living < 1:
            return np.full((count, 0), -1)
        wanted = self._list_size * 5 // 4
        k = min(self._n, math.ceil(wanted * self._n / living))
        facts, searcher = self._facts, self._searcher()
        found = np.full((count, k), -1, np.int64)
        for first in range(0, count, _QUERIES_AT_ONCE):
            part = slice(first, min(first + _QUERIES_AT_ONCE, count))
            native_queries, wide = checked_queries(facts, self._rows[part])
            search = searcher.start(
                queries=native_queries, queries_f32=wide, k=k, list_size=k, far_list_size=k,
                beam_width=1, stop_beyond=math.inf, filter=None, absent=None, parts=None,
                deadline_s=DEADLINE_S,
            )  # fmt: skip
            rows = search.finish()[0].numpy().reshape(-1, k)
            unique, inverse = np.unique(rows[rows >= 0], return_inverse=True)
            nodes = self._nodes_of(unique)
            nodes = np.where(np.isin(nodes, self._dead), -1, nodes)
            found[part][rows >= 0] = nodes[inverse]
            self._progress("edges", part.stop, count)
        return found

    def _near_additions(self) -> np.ndarray:
        """int64 [a, degree]: neighbours of each in a graph of the additions alone."""
        layout, facts = self._layout, self._facts
        rows, name = measured_rows(self._rows, facts.metric, layout.row_format, self._longest)
        options = GraphOptions(
            max_degree=layout.max_degree, list_size=self._list_size, alpha=self._alpha,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        graph = build_edges(np.ascontiguousarray(rows), name, options, 0, lambda *_: None)
        near, counts = (each.numpy() for each in graph.edges())
        there = np.arange(layout.max_degree) < counts[:, None]
        return np.where(there, near.astype(np.int64) + self._n, -1)

    def _dead_lists(self) -> np.ndarray:
        """int64 [d, degree]: living neighbours of deleted nodes."""
        layout = self._layout
        found = np.full((len(self._dead), layout.max_degree), -1, np.int64)
        at_once = max(1, BLOCK_BYTES // layout.page_bytes)
        pages, which = np.unique(self._dead // layout.nodes_per_page, return_inverse=True)
        for first in range(0, len(pages), at_once):
            part = pages[first : first + at_once]
            read = read_pages(self._engine, self._files_of_pages, self._facts, part, DEADLINE_S)
            here = np.flatnonzero((which >= first) & (which < first + len(part)))
            nodes = read[which[here] - first, self._dead[here] % layout.nodes_per_page]
            near = _lists_of(nodes)
            found[here] = np.where(np.isin(near, self._dead), -1, near)
        return found

    def _edges(self, found: np.ndarray, numbers: Numbers) -> EdgesFile:
        """Lists of all nodes, by number, in a file."""
        degree = self._layout.max_degree
        counts = np.zeros(numbers.n_new, np.uint16)
        dead_lists = self._dead_lists()
        moved: list[tuple[int, np.ndarray]] = []
        path = self._folder / "edges"
        with path.open("wb") as file:
            for first, nodes in self._blocks():
                lists = self._repaired(first, nodes, found, dead_lists)
                stays = max(0, min(len(nodes), numbers.n_new - first))
                _write_lists(file, first, lists[:stays], numbers, counts)
                for place in range(stays, len(nodes)):
                    if not np.isin(first + place, self._dead):
                        moved.append((first + place, lists[place]))
                self._progress("repair", first + len(nodes), self._n)
            file.truncate(4 * degree * numbers.n_new)
            for addition, list_ in enumerate(found):
                moved.append((self._n + addition, list_))
            for name, list_ in moved:
                number = int(numbers.number_of(np.array([name]))[0])
                _write_lists(file, number, list_[None], numbers, counts)
        return EdgesFile(path, degree, counts)

    def _repaired(
        self, first: int, nodes: np.ndarray, added: np.ndarray, dead_lists: np.ndarray
    ) -> np.ndarray:
        """int64 [m, degree]: lists of successive old nodes without what is deleted and with what
        was added; those of deleted ones are any."""
        lists, degree = _lists_of(nodes), self._layout.max_degree
        names = first + np.arange(len(nodes))
        is_dead = np.isin(lists, self._dead) & (lists >= 0)
        kept = np.where(is_dead, -1, lists)
        begin, links = self._links(added, names)
        n_dead = np.minimum(is_dead.sum(axis=1), max(1, _CANDIDATES_MOST // degree - 1))
        n_dead[np.isin(names, self._dead)] = 0
        targets = self._measured(self._facts.coding.decode(nodes["vector"]))
        linked = np.flatnonzero((n_dead == 0) & (np.diff(begin) > 0))
        bereft = np.flatnonzero(n_dead)
        for start in range(0, len(linked), _REPAIRED_AT_ONCE):
            some = linked[start : start + _REPAIRED_AT_ONCE]
            pool = np.concatenate([kept[some], _padded(begin, links, some)], axis=1)
            kept[some] = self._fitted(names[some], targets[some], pool)
        for start in range(0, len(bereft), _REPAIRED_AT_ONCE):
            some = bereft[start : start + _REPAIRED_AT_ONCE]
            theirs = self._inherited(lists[some], is_dead[some], n_dead[some], dead_lists)
            pool = np.concatenate([kept[some], _padded(begin, links, some), theirs], axis=1)
            kept[some] = self._pruned(names[some], targets[some], pool)
        return kept

    def _inherited(
        self, lists: np.ndarray, is_dead: np.ndarray, counts: np.ndarray, dead_lists: np.ndarray
    ) -> np.ndarray:
        """int64 [m, p]: neighbours of so many deleted neighbours, of the first, of each list."""
        which = np.argsort(~is_dead, axis=1, kind="stable")[:, : counts.max()]
        lost = np.take_along_axis(lists, which, axis=1)
        theirs = dead_lists[np.searchsorted(self._dead, lost).clip(max=len(self._dead) - 1)]
        theirs[np.arange(lost.shape[1]) >= counts[:, None]] = -1
        return theirs.reshape(len(lists), -1)

    def _packed(self, numbers: Numbers, edges: EdgesFile) -> tuple[Numbers, EdgesFile]:
        """The same, once pages hold neighbours again. Pages are written anew in any case: those in
        which additions took the places of what was deleted would hold what is far apart."""
        self._progress("pack", 0, numbers.n_new)
        order = packed_order(
            edges,
            lambda wanted: self._points(numbers.names_of(wanted)),
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
        lives = ~np.isin(self._facts.entries, self._dead)
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
        more = np.random.default_rng(self._stamp).choice(n, wanted, replace=False)
        leads = edges.leading_to(root)
        chosen = np.concatenate([old, more[~np.isin(more, old)]])
        chosen = chosen[leads[chosen] & (chosen != root)][: max(0, wanted - 1)]
        return np.unique(np.append(chosen, root))

    def _codes_of(self, numbers: Numbers, wanted: np.ndarray) -> np.ndarray:
        """uint8 [m, code_bytes], by number."""
        names = numbers.names_of(wanted)
        self._codes.load(np.unique(names))
        return self._codes.get(names)

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
            here["vector"][old], ids = self._held(names[old])
            _name(here, old, ids)
            new_here = np.flatnonzero(names >= self._n)
            added = names[new_here] - self._n
            here["vector"][new_here] = coding.encode(self._rows[added])
            _name(here, new_here, self._ids[added])
            near, there = _read_lists(edges, begin, end - begin)
            here["n_neighbours"] = there.sum(axis=1)
            here["neighbours"] = np.where(there, near, 0)
            if inline := layout.inline_pq:
                wanted = near[:, :inline][there[:, :inline]].astype(np.int64)
                here["codes"][there[:, :inline]] = self._codes_of(numbers, wanted)
            yield pages_of(nodes, layout, first, salt)
            self._progress("pages", end, layout.n)

    def _held(self, names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(what old nodes hold of their vectors; their ids)"""
        if self._packs and self._exact is not None and self._layout.format != "pq":
            return self._facts.coding.encode(self._exact[names]), self._old_ids[names]
        read = self._nodes(names)
        return read["vector"], rows_of(read)

    def _nodes(self, names: np.ndarray) -> np.ndarray:
        """Old nodes [m], of the old pages."""
        layout = self._layout
        pages, which = np.unique(names // layout.nodes_per_page, return_inverse=True)
        if not len(pages):
            return np.empty(0, layout.node_dtype)
        read = read_pages(self._engine, self._files_of_pages, self._facts, pages, DEADLINE_S)
        return read[which, names % layout.nodes_per_page]

    def _vectors(self, names: np.ndarray) -> np.ndarray:
        """float32 [m, dim] of old nodes, growing."""
        rows = np.empty((len(names), self._layout.dim), np.float32)
        at_once = max(1, BLOCK_BYTES // self._layout.page_bytes)
        for first in range(0, len(names), at_once):
            part = slice(first, first + at_once)
            rows[part] = self._facts.coding.decode(self._nodes(names[part])["vector"])
        return rows


def _name(nodes: np.ndarray, which: np.ndarray, ids: np.ndarray) -> None:
    """Writes the ids of some nodes."""
    wide = ids.astype(np.int64)
    nodes["row"][which], nodes["row_high"][which] = wide & 0xFFFFFFFF, wide >> 32


def _padded(begin: np.ndarray, values: np.ndarray, some: np.ndarray) -> np.ndarray:
    """int64 [m, p]: values[begin[i] : begin[i + 1]] of some i, -1 behind the last."""
    counts = begin[some + 1] - begin[some]
    places = np.arange(counts.max(initial=0))
    at = np.where(places < counts[:, None], begin[some, None] + places, len(values))
    return np.append(values, -1)[at]


def _lists_of(nodes: np.ndarray) -> np.ndarray:
    """int64 [m, degree]: neighbours of nodes, -1 behind the last."""
    near = nodes["neighbours"].astype(np.int64)
    return np.where(np.arange(near.shape[1]) < nodes["n_neighbours"][:, None], near, -1)


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


def _longest(rows: np.ndarray) -> float:
    """The largest squared length."""
    return float(np.square(rows.astype(np.float32)).sum(axis=1).max()) if len(rows) else 0.0
