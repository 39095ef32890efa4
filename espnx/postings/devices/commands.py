"""What a batch of queries asks of each device: the plan of one index, cut by segment, of which each
lies on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...device.postings import LIST, WEIGHT, Rule, ScanCommand, ScanLists, Weights
from ...device.postings.command import DIGEST, UNIT_BYTES
from ..search.plan import QueryPlan
from ..stored.layout import COUNT


@dataclass(frozen=True, eq=False)
class ScanCommands:
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

    def commands(self, query: int, deadline_s: float) -> dict[int, ScanCommand]:
        """A command for each part that has a list of the query. `deadline_s`: of its reads."""
        found = {}
        for part, allowed in enumerate(self._filters):
            rows = self.rows(query, part)
            if not len(rows):
                continue
            names = b"".join(self._names[i] for i in self._rows[rows, 9].tolist())
            constant = float(self.constants[query]) if self.k else 0.0
            weights = Weights(self._weights[rows], constant, self._rule)
            lists = ScanLists(self._lists[rows], names)
            found[part] = ScanCommand(
                lists, weights, self.k, allowed=allowed, deadline_s=deadline_s
            )
        return found


def scan_commands(plan: QueryPlan, k: int, filters: Sequence[np.ndarray | None]) -> ScanCommands:
    """What a plan over the segments of all parts asks of each.

    Args:
        k: records wanted; 0: every posting's part of the score.
        filters: of each part uint8 [ceil(records / 8)], or None: see `ScanCommand.allowed`.
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
    for part, segment in enumerate(plan.collection.segments):
        here = rows[:, 0] == part
        lists["postings"][here] = segment.dictionary.df[rows[here, 1]]
    n_queries, n_parts = plan.n_queries, len(filters)
    begin = np.searchsorted(rows[:, 10] * n_parts + rows[:, 0], np.arange(n_queries * n_parts + 1))
    collection, bm25 = plan.collection, plan.bm25
    rule = (
        Rule(bm25.number, bm25.k1, bm25.b, bm25.delta, collection.average_length)
        if collection.kind == COUNT
        else Rule()
    )
    return ScanCommands(
        n_queries, plan.constants(), k, rows, begin, lists, weights, names, rule, list(filters)
    )
