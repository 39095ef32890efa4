"""What a batch of queries asks of each device of a split collection: the plan of one index, cut by
device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...device.postings import LIST, WEIGHT, Rule, ScanCommand, ScanLists, Weights
from ...device.postings.command import DIGEST, UNIT_BYTES
from ..format import SplitFacts
from ..search.plan import QueryPlan
from ..stored.layout import COUNT
from .parts import PartLists


@dataclass(frozen=True, eq=False)
class SplitCommands:
    """Commands of a batch of queries.

    Attributes:
        n_queries: of the batch.
        constants: float32 [q]: what every record gets.
        k: of the commands: 0 where devices give every posting's part of a score.
    """

    n_queries: int
    constants: np.ndarray
    k: int
    _rows: np.ndarray
    _begin: np.ndarray  # of each query and part, among the rows
    _lists: np.ndarray
    _weights: np.ndarray
    _names: list[bytes]
    _rule: Rule
    _filters: list[np.ndarray | None]

    def rows(self, query: int, part: int) -> np.ndarray:
        """int64: places of its lists among the plan's."""
        at = query * len(self._filters) + part
        return np.arange(self._begin[at], self._begin[at + 1])

    def order(self, query: int, part: int) -> np.ndarray:
        """int64: where each of its lists comes among the query's terms."""
        found: np.ndarray = self._rows[self.rows(query, part), 11]
        return found

    def commands(self, query: int) -> dict[int, ScanCommand]:
        """A command for each part that has a list of the query."""
        found = {}
        for part, allowed in enumerate(self._filters):
            rows = self.rows(query, part)
            if not len(rows):
                continue
            names = b"".join(self._names[i] for i in self._rows[rows, 9].tolist())
            constant = float(self.constants[query]) if self.k else 0.0
            weights = Weights(self._weights[rows], constant, self._rule)
            found[part] = ScanCommand(
                ScanLists(self._lists[rows], names), weights, self.k, allowed=allowed
            )
        return found


def split_commands(
    plan: QueryPlan,
    parts: Sequence[PartLists],
    k: int,
    split: SplitFacts,
    allowed: np.ndarray | None,
) -> SplitCommands:
    """What a plan over the segments of all parts asks of each.

    Args:
        allowed: bool [records of the collection], or None. Of terms, the host applies it: no device
            knows which records are found.
    """
    rows = plan.rows()
    names = [plan.name(i) for i in range(int(rows[:, 9].max(initial=-1)) + 1)]
    sizes = np.array([len(name) for name in names], np.int64)
    lists, weights = np.zeros(len(rows), LIST), np.zeros(len(rows), WEIGHT)
    for name, column in (("offset", 2), ("size", 3), ("first_layer", 4)):
        lists[name] = rows[:, column] // UNIT_BYTES
    lists["term"] = rows[:, 1]
    lists["name"] = sizes[rows[:, 9]] | rows[:, 6] * DIGEST
    weights["weight"], weights["absent"] = rows[:, 7].view(np.float64), rows[:, 8].view(np.float64)
    filters: list[np.ndarray | None] = [None] * len(parts)
    for part, held in enumerate(parts):
        here = rows[:, 0] == part
        lists["postings"][here] = held.segment.dictionary.df[rows[here, 1]]
        if allowed is not None and split.placement == "passages":
            filters[part] = np.packbits(allowed[part :: len(parts)], bitorder="little")
    n_queries = plan.n_queries
    begin = np.searchsorted(
        rows[:, 10] * len(parts) + rows[:, 0], np.arange(n_queries * len(parts) + 1)
    )
    collection, bm25 = plan.collection, plan.bm25
    rule = (
        Rule(bm25.number, bm25.k1, bm25.b, bm25.delta, collection.average_length)
        if collection.kind == COUNT
        else Rule()
    )
    return SplitCommands(
        n_queries,
        plan.constants(),
        k if split.placement == "passages" else 0,
        rows,
        begin,
        lists,
        weights,
        names,
        rule,
        filters,
    )
