"""Candidates from posting lists that devices scan: a query is a command for each part of the store
that has a list of it, and the best of all parts are among the best of each.

What is found is what `LexicalSearch` finds by an engine, to the bit. A device gives its best when
all lists are read: nothing is known before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....device.interface import DeviceStats
from ....device.postings import SCAN_REPLY
from ....device.several import stats_of, top
from ....postings.bm25 import BM25
from ....postings.devices.commands import scan_commands
from ....postings.search.plan import Collection, QueryPlan
from ..interface import Candidates, StageReads

_QUERIES_AHEAD = 4  # whose lists are read at once


@dataclass(frozen=True, eq=False)
class ScannedPart:
    """Attributes: lists: a part of a device (`espnx.device.postings.PostingsDevice`), open.
    is_on_device: whether a device that somebody has named reads them."""

    lists: Any
    is_on_device: bool


class ScannedSearch:
    """See `StageSearch`.

    Args:
        parts: of each segment of the collection, its lists.
        queries: terms of each. k: records wanted of each; 0: none.
        allowed: bits of the records of each segment, or None: all may be found.
    """

    def __init__(
        self,
        parts: Sequence[ScannedPart],
        collection: Collection,
        queries: Sequence[Any],
        k: int,
        allowed: Sequence[np.ndarray] | None,
        deadline_s: float,
    ):
        self._parts, self._collection, self._k, self._deadline_s = parts, collection, k, deadline_s
        self._filters = [None] * len(parts) if allowed is None else list(allowed)
        self._waiting = deque(queries) if k else deque[Any]()
        self._found = [] if k else [_NOTHING for _ in queries]
        self._under_way = deque[_QueryScans]()
        self.reads = StageReads()
        self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self._under_way) < _QUERIES_AHEAD:
            plan = QueryPlan(self._collection, [self._waiting.popleft()], BM25(), None)
            self._under_way.append(_QueryScans(self._parts, plan))
            self._under_way[-1].ask(self._k, self._filters, self._deadline_s)

    def advance(self, share: float) -> list[Candidates]:
        """See the module: all of it."""
        return self.complete()

    def complete(self) -> list[Candidates]:
        try:
            while self._under_way:
                self._found.append(self._result(self._under_way[0]))
                self.reads += self._under_way.popleft().reads
                self._begin()
        except BaseException:
            for scans in self._under_way:
                scans.cancel()
            raise
        return self._found

    def _result(self, scans: _QueryScans) -> Candidates:
        for _ in range(len(self._parts) + 1):
            found, others = scans.finish()
            if not len(others):
                break
            # of another term with the same hash: the totals change, too
            scans.plan.leave_out(others)
            scans.ask(self._k, self._filters, self._deadline_s)
        best = found[top(-found["score"], found["number"], self._k)]
        return best["number"].astype(np.int64), best["score"].astype(np.float32)


class _QueryScans:
    """The scans of one query, under way.

    Attributes:
        plan: of it alone.
        reads: of finished ones.
    """

    def __init__(self, parts: Sequence[ScannedPart], plan: QueryPlan):
        self._parts, self.plan, self.reads = parts, plan, StageReads()

    def ask(self, k: int, filters: Sequence[np.ndarray | None], deadline_s: float) -> None:
        self._asked = scan_commands(self.plan, k, filters)
        commands, self._tickets = self._asked.commands(0, deadline_s), dict[int, Any]()
        try:
            for number, command in commands.items():
                self._tickets[number] = command.ask(self._parts[number].lists)
        except BaseException:
            self.cancel()
            raise

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """(`SCAN_REPLY` of all parts, with the numbers of the store; places in the plan of lists of
        other terms)."""
        replies, others = [np.empty(0, SCAN_REPLY)], [np.empty(0, np.int64)]
        segments = self.plan.collection.segments
        for number, ticket in self._tickets.items():
            reply = ticket.finish().copy()
            reply["number"] += segments[number].first_number
            replies.append(reply)
            others.append(self._asked.rows(0, number)[ticket.other_terms])
        on_devices = (
            ticket for number, ticket in self._tickets.items() if self._parts[number].is_on_device
        )
        every, named = stats_of(self._tickets.values()), stats_of(on_devices)
        self.reads += _reads(every, named)
        return np.concatenate(replies), np.concatenate(others)

    def cancel(self) -> None:
        for ticket in self._tickets.values():
            ticket.cancel()


def _reads(every: DeviceStats, named: DeviceStats) -> StageReads:
    return StageReads(every.read_requests, every.bytes_asked, every.bytes_moved, named.bytes_moved)


_NOTHING: Candidates = (np.empty(0, np.int64), np.empty(0, np.float32))
