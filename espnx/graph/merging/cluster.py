"""The merge of one cluster of a graph, as of a graph of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from ...storage.files import Region
from ..format import NODES, GraphFacts
from .part import PartMerge


def cluster_facts(facts: GraphFacts, cluster: int) -> GraphFacts:
    """A cluster's graph by itself: its pages, and nothing else of the directory."""
    parts, layout = facts.parts, facts.layout
    begin, end = parts.entries_begin[cluster : cluster + 2].tolist()
    file = facts.page_files[int(parts.files[cluster])]
    return replace(
        facts,
        regions={
            NODES: Region(
                file.path,
                file.offset_bytes + int(parts.file_pages[cluster]) * layout.page_bytes,
                int(parts.pages[cluster]) * layout.page_bytes,
            )
        },
        layout=replace(layout, n=int(parts.nodes[cluster])),
        salt=int(parts.salts[cluster]),
        entries=facts.entries[begin:end],
        entry_codes=facts.entry_codes[begin:end],
        clusters=None,
        id_end=facts.n_rows,
        directories=(),
        pins={},
    )


class ClusterMerge(PartMerge):
    """See `PartMerge`.

    Attributes:
        entries, entry_codes: uint32 [m] and uint8 [m, code_bytes]: nodes at which searches begin,
            once `pages` has ended.
    """

    entries: np.ndarray
    entry_codes: np.ndarray

    def pages(self, salt: int) -> Iterator[np.ndarray]:
        """uint8: all pages of the cluster as it is then, some at a time, once."""
        self._sum = np.zeros(self._layout.dim)
        self._dead_sum = np.zeros(self._layout.dim)
        self._numbers, edges, entries = self.run()
        self.entries = entries.astype(np.uint32)
        self.entry_codes = self._codes_of(self._numbers, entries)
        layout = replace(self._layout, n=self._numbers.n_new)
        yield from self._node_pages(self._numbers, edges, replace(self._facts, layout=layout), salt)

    def ids_by_node(self) -> np.ndarray:
        """int64 [n]."""
        names = self._numbers.names_of(np.arange(self._numbers.n_new))
        is_new = names >= self._n
        ids = np.empty(len(names), np.int64)
        ids[~is_new] = self._nodes.old_ids[names[~is_new]]
        ids[is_new] = self._changes.ids[names[is_new] - self._n]
        return ids

    def sums_before(self) -> tuple[np.ndarray, int]:
        """(the sum of all vectors, float64 [dim]; how many) before the merge."""
        return self._sum, self._n

    def sums_after(self) -> tuple[np.ndarray, int]:
        """The same after it."""
        added = self._changes.rows.astype(np.float64).sum(axis=0)
        return self._sum - self._dead_sum + added, self._numbers.n_new

    @property
    def _keeps_ids(self) -> bool:
        return True

    def _look_at(self, first: int, rows: np.ndarray) -> None:
        wide = rows.astype(np.float64)
        is_dead = np.isin(first + np.arange(len(rows)), self._changes.dead)
        self._sum += wide.sum(axis=0)
        self._dead_sum += wide[is_dead].sum(axis=0)

    @cached_property
    def _by_id(self) -> np.ndarray:
        return np.argsort(self._nodes.old_ids, kind="stable")

    def _nodes_of(self, ids: np.ndarray) -> np.ndarray:
        order = self._by_id
        found: np.ndarray = order[np.searchsorted(self._nodes.old_ids, ids, sorter=order)]
        return found
