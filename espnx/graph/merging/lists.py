"""Neighbours of nodes while changes are merged into a graph: StreamingMerge of FreshDiskANN
(section 5.3). Which number a node gets, and in which page it lies, somebody else decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...ops._native import load_extension
from ...storage import NativeEngine
from ..edges import build_edges, robust_prune
from ..format import GraphFacts
from ..native import native_view
from ..options import GraphOptions, measured_rows
from ..pages.checked import read_codes
from ..search.asked import checked_queries
from ..write import Progress
from .nodes import BLOCK_BYTES, DEADLINE_S, MergedNodes

_QUERIES_AT_ONCE = 1024
_LINKS_MOST = 256  # to a node, of additions, at a time: the rest is of one that all are near to
_PRUNED_BYTES = 64 << 20
_LINKED_AT_ONCE = 256  # additions whose links are looked at together
_REPAIRED_AT_ONCE = 1024  # nodes
_CANDIDATES_MOST = 750  # of a node that gets those of deleted neighbours


def searcher_of(engine: NativeEngine, facts: GraphFacts) -> Any:
    """A searcher of a graph's pages, by distance."""
    native = load_extension()
    codes = read_codes(engine, facts) if facts.layout.codes_in == "memory" else None
    return native.GraphSearcher(
        native_view(replace(facts, metric="l2") if facts.metric == "ip" else facts, codes),
        native.GraphSearchOptions(
            path="posix", direct=None, threads=2, walks=32, code_cache_bytes=5 << 20,
            rules=[], seed=0,
        ),
    )  # fmt: skip


class Links:
    """Additions by the nodes that they lead to.

    Attributes: lists: int64 [a, degree], of additions by name, -1 behind the last.
    """

    def __init__(self, lists: np.ndarray, n_old: int):
        self.lists = lists
        addition, place = np.nonzero(lists >= 0)
        ends = lists[addition, place]
        order = np.argsort(ends, kind="stable")
        self._n_old, names = n_old, n_old + len(lists)
        self._name = np.dtype(np.uint32 if names <= 1 << 32 else np.int64)
        self._ends = ends[order].astype(self._name)
        self._starts = addition[order].astype(np.uint32)

    def to(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Additions that lead to each of some nodes: (int64 [m + 1]: where those of each begin;
        their names)."""
        nodes = nodes.astype(self._name)  # of one type, or all ends are copied
        low = np.searchsorted(self._ends, nodes)
        counts = np.searchsorted(self._ends, nodes, side="right") - low
        counts = np.minimum(counts, _LINKS_MOST)
        begin = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        offsets = np.arange(begin[-1]) - np.repeat(begin[:-1], counts)
        found = self._starts[np.repeat(low, counts) + offsets].astype(np.int64)
        return begin, self._n_old + found


class MergedLists:
    """Neighbours [m, max_degree] of nodes, all by name, -1 behind the last.

    Args:
        searcher: makes one of the old pages, by distance, by which edges are.
        nodes_of: old nodes of ids, int64 [m], growing.
    """

    def __init__(
        self,
        nodes: MergedNodes,
        searcher: Callable[[], Any],
        nodes_of: Callable[[np.ndarray], np.ndarray],
        progress: Progress,
    ):
        self._nodes, self._layout, self._dead = nodes, nodes.layout, nodes.changes.dead
        self._ids, self._rows = nodes.changes.ids, nodes.changes.rows
        self._searcher, self._nodes_of, self._progress = searcher, nodes_of, progress
        self._alpha = float(nodes.facts.options.get("alpha", 1.2))
        self._list_size = int(nodes.facts.options.get("list_size", 100))

    def additions(self) -> np.ndarray:
        """Neighbours of additions: of what walks over the old pages find, and of one another."""
        count, layout = len(self._ids), self._layout
        if not count:
            return np.empty((0, layout.max_degree), np.int64)
        names = self._nodes.n + np.arange(count)
        pool = np.concatenate([self._found_in_pages(), self._near_additions()], axis=1)
        targets = self._nodes.measured(self._rows)
        lists = self._pruned(names, targets, pool)
        begin, links = Links(lists, self._nodes.n).to(names)
        linked = np.flatnonzero(np.diff(begin))
        for first in range(0, len(linked), _LINKED_AT_ONCE):
            some = linked[first : first + _LINKED_AT_ONCE]
            kept, more = lists[some], _padded(begin, links, some)
            more[(more[:, :, None] == kept[:, None]).any(axis=2)] = -1
            pool = np.concatenate([kept, more], axis=1)
            lists[some] = self._fitted(names[some], targets[some], pool)
        return lists

    def repaired(self, first: int, nodes: np.ndarray, added: Links) -> np.ndarray:
        """int64 [m, degree]: lists of successive old nodes without what is deleted and with what
        was added; those of deleted ones are any."""
        lists, degree = lists_of(nodes), self._layout.max_degree
        names = first + np.arange(len(nodes))
        is_dead = np.isin(lists, self._dead) & (lists >= 0)
        kept = np.where(is_dead, -1, lists)
        begin, links = added.to(names)
        n_dead = np.minimum(is_dead.sum(axis=1), max(1, _CANDIDATES_MOST // degree - 1))
        n_dead[np.isin(names, self._dead)] = 0
        targets = self._nodes.measured(self._nodes.facts.coding.decode(nodes["vector"]))
        linked = np.flatnonzero((n_dead == 0) & (np.diff(begin) > 0))
        bereft = np.flatnonzero(n_dead)
        for start in range(0, len(linked), _REPAIRED_AT_ONCE):
            some = linked[start : start + _REPAIRED_AT_ONCE]
            pool = np.concatenate([kept[some], _padded(begin, links, some)], axis=1)
            kept[some] = self._fitted(names[some], targets[some], pool)
        for start in range(0, len(bereft), _REPAIRED_AT_ONCE):
            some = bereft[start : start + _REPAIRED_AT_ONCE]
            theirs = self._inherited(lists[some], is_dead[some], n_dead[some])
            pool = np.concatenate([kept[some], _padded(begin, links, some), theirs], axis=1)
            kept[some] = self._pruned(names[some], targets[some], pool)
        return kept

    @cached_property
    def _dead_lists(self) -> np.ndarray:
        """int64 [d, degree]: living neighbours of deleted nodes."""
        found = np.empty((len(self._dead), self._layout.max_degree), np.int64)
        at_once = max(1, BLOCK_BYTES // self._layout.page_bytes)
        for first in range(0, len(self._dead), at_once):
            part = slice(first, first + at_once)
            near = lists_of(self._nodes.at(self._dead[part]))
            found[part] = np.where(np.isin(near, self._dead), -1, near)
        return found

    def _inherited(self, lists: np.ndarray, is_dead: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """int64 [m, p]: neighbours of so many deleted neighbours, of the first, of each list."""
        which = np.argsort(~is_dead, axis=1, kind="stable")[:, : counts.max()]
        lost = np.take_along_axis(lists, which, axis=1)
        theirs = self._dead_lists[np.searchsorted(self._dead, lost).clip(max=len(self._dead) - 1)]
        theirs[np.arange(lost.shape[1]) >= counts[:, None]] = -1
        return theirs.reshape(len(lists), -1)

    def _fitted(self, names: np.ndarray, targets: np.ndarray, pool: np.ndarray) -> np.ndarray:
        """Neighbours as `_pruned` chooses them; where a list has room for the whole pool, all of
        it, in its order."""
        degree = self._layout.max_degree
        order = np.argsort(pool < 0, axis=1, kind="stable")[:, :degree]
        fitted = np.take_along_axis(pool, order, axis=1)
        more = np.flatnonzero((pool >= 0).sum(axis=1) > degree)
        fitted[more] = self._pruned(names[more], targets[more], pool[more])
        return fitted

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
                targets[part], candidates, self._nodes.points(known), found.shape[1], self._alpha
            )
            found[part] = np.where(chosen < 0, -1, np.append(known, -1)[chosen])
        return found

    def _found_in_pages(self) -> np.ndarray:
        """int64 [a, k]: living old nodes near each addition, -1 behind the last."""
        living, count = self._nodes.n - len(self._dead), len(self._ids)
        if living < 1:
            return np.full((count, 0), -1)
        wanted = self._list_size * 5 // 4
        k = min(self._nodes.n, math.ceil(wanted * self._nodes.n / living))
        facts, searcher = self._nodes.facts, self._searcher()
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
        layout, facts = self._layout, self._nodes.facts
        rows, name = measured_rows(self._rows, facts.metric, layout.row_format, self._nodes.longest)
        options = GraphOptions(
            max_degree=layout.max_degree, list_size=self._list_size, alpha=self._alpha,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        graph = build_edges(np.ascontiguousarray(rows), name, options, 0, lambda *_: None)
        near, counts = (each.numpy() for each in graph.edges())
        there = np.arange(layout.max_degree) < counts[:, None]
        return np.where(there, near.astype(np.int64) + self._nodes.n, -1)


def lists_of(nodes: np.ndarray) -> np.ndarray:
    """int64 [m, degree]: neighbours of nodes, -1 behind the last."""
    near = nodes["neighbours"].astype(np.int64)
    return np.where(np.arange(near.shape[1]) < nodes["n_neighbours"][:, None], near, -1)


def _padded(begin: np.ndarray, values: np.ndarray, some: np.ndarray) -> np.ndarray:
    """int64 [m, p]: values[begin[i] : begin[i + 1]] of some i, -1 behind the last."""
    counts = begin[some + 1] - begin[some]
    places = np.arange(counts.max(initial=0))
    at = np.where(places < counts[:, None], begin[some, None] + places, len(values))
    return np.append(values, -1)[at]
