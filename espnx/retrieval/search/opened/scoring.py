"""Scores of the records of one tier for the queries of one batch, asked for bit by bit while the
first stage goes on.

A record that several queries want is read once. What was asked for before is not asked for again,
whatever the first stage says later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....device.interface import DeviceStats, Pairs, RecordQuery, RecordTicket
from ...store.tier import Tier
from .hot_records import HotRecords


@dataclass(frozen=True)
class QueryVectors(RecordQuery):
    """A query as a search needs it: what records are scored with (tokens projected), and `prepared`
    for the first stage, which alone knows what it is.

    Coarse records have no CLS vector: `similarity_weight` is what the first stage's similarity
    counts beside their MaxSim (that of CLS; 0 where its similarity is another).
    """

    prepared: Any
    similarity_weight: float = 0.0


@dataclass
class _Request:
    """One request under way: its records, and which queries want them, those that came later in
    parts of their own."""

    ticket: RecordTicket
    numbers: np.ndarray
    pairs: list[Pairs]
    is_urgent: bool


class TierScoring:
    """See the module. `ask` as often as wanted, then `finish` once; `cancel` instead of it after a
    failure.

    Args:
        tier: whose records are scored.
        queries: of the batch.
        gap_bytes, deadline_s: of the reads.
        hot: records in memory that need no read.

    Attributes:
        stats: what the requests have cost.
        n_hot: records that were in memory.
        finished_at: when the last record was scored, by `time.perf_counter`.
    """

    def __init__(
        self,
        tier: Tier,
        queries: Sequence[QueryVectors],
        *,
        gap_bytes: int,
        deadline_s: float,
        hot: HotRecords | None = None,
    ):
        self._tier, self._queries, self._hot = tier, queries, hot
        self._gap_bytes, self._deadline_s = gap_bytes, deadline_s
        self._asked = [np.empty(0, dtype=np.int64) for _ in queries]
        self._known: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in queries]
        self._hot_known: list[tuple[int, np.ndarray, Callable[[], np.ndarray]]] = []
        self._requests: list[_Request] = []
        self.stats, self.n_hot, self.finished_at = DeviceStats(), 0, 0.0

    def ask(self, wanted: Sequence[np.ndarray], *, is_urgent: bool = False) -> list[int]:
        """Starts what is needed to score `wanted[q]` (record numbers) for every query q. Returns
        how many of them were new, per query.

        `is_urgent`: ahead of everything asked before, for `finish` comes next.
        """
        new = [
            _without(np.sort(numbers), asked)
            for numbers, asked in zip(wanted, self._asked, strict=True)
        ]
        count = [len(numbers) for numbers in new]
        if not any(count):
            return count
        self._asked = [
            np.sort(np.concatenate(both)) if len(both[0]) else both[1]
            for both in zip(self._asked, new, strict=True)
        ]
        if self._hot is not None:
            new = [self._score_hot(self._hot, q, numbers) for q, numbers in enumerate(new)]
        if len(new) == 1:
            if len(new[0]):
                self._request(new[0], None, is_urgent)
            return count
        number, query = self._join_requests(
            np.concatenate(new), np.repeat(np.arange(len(new)), [len(numbers) for numbers in new])
        )
        if len(number):
            numbers, item = np.unique(number, return_inverse=True)
            order = np.argsort(item, kind="stable")
            self._request(numbers, Pairs(item[order], query[order]), is_urgent)
        return count

    def _score_hot(self, hot: HotRecords, q: int, numbers: np.ndarray) -> np.ndarray:
        """Scores what lies in memory; returns the rest."""
        if not len(numbers):
            return numbers
        found, scores = hot.score(numbers, self._queries[q])
        self._hot_known.append((q, numbers[found], scores))
        self.n_hot += int(found.sum())
        return numbers[~found]

    def _join_requests(
        self, number: np.ndarray, query: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Leaves what requests under way will bring anyway to them; returns the rest."""
        for request in self._requests:
            at = np.searchsorted(request.numbers, number)
            at[at == len(request.numbers)] = 0
            comes = request.numbers[at] == number
            if comes.any():
                order = np.argsort(at[comes], kind="stable")
                more = Pairs(at[comes][order], query[comes][order])
                request.ticket.add(more)
                request.pairs.append(more)
                number, query = number[~comes], query[~comes]
        return number, query

    def _request(self, numbers: np.ndarray, pairs: Pairs | None, is_urgent: bool) -> None:
        ticket = self._tier.maxsim(
            numbers,
            self._queries,
            pairs,
            gap_bytes=self._gap_bytes,
            is_urgent=is_urgent,
            deadline_s=self._deadline_s,
        )
        self._requests.append(
            _Request(ticket, numbers, [] if pairs is None else [pairs], is_urgent)
        )

    def finish(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Waits. For each query: the numbers it asked for, ascending, and their scores. Raises what
        a read or a check raised."""
        self._requests.sort(key=lambda request: request.is_urgent)
        while self._requests:
            self._finish_request(self._requests[-1])
            self._requests.pop()
        # on a GPU they are there with what was asked of it later
        for q, numbers, scores in reversed(self._hot_known):
            self._known[q].append((numbers, scores()))
        self._hot_known = []
        return [self._of_query(q) for q in range(len(self._queries))]

    def _finish_request(self, request: _Request) -> None:
        ticket = request.ticket
        scores, at = ticket.finish(), 0
        if len(self._queries) == 1:
            self._known[0].append((request.numbers, scores))
        for pairs in request.pairs:
            self._note(request.numbers, pairs, scores[at : at + len(pairs)])
            at += len(pairs)
        self.stats += ticket.stats
        self.finished_at = max(self.finished_at, ticket.finished_at)
        if self._hot is not None:
            self._hot.admit(request.numbers, *ticket.records)

    def _note(self, numbers: np.ndarray, pairs: Pairs, scores: np.ndarray) -> None:
        order = np.argsort(pairs.query, kind="stable")
        borders = np.searchsorted(pairs.query[order], np.arange(len(self._queries) + 1))
        for q in range(len(self._queries)):
            part = order[borders[q] : borders[q + 1]]
            if len(part):
                self._known[q].append((numbers[pairs.item[part]], scores[part]))

    def _of_query(self, q: int) -> tuple[np.ndarray, np.ndarray]:
        if not self._known[q]:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        if len(self._known[q]) == 1:
            numbers, scores = self._known[q][0]
        else:
            numbers, scores = (np.concatenate(parts) for parts in zip(*self._known[q], strict=True))
        order = np.argsort(numbers)
        return numbers[order], scores[order]

    def cancel(self) -> None:
        """Ends the requests under way. Their errors are not the ones to tell."""
        for request in self._requests:
            request.ticket.cancel()
        self._requests = []


def _without(numbers: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Those of `numbers` that are not in `known`; both ascending. Faster than NumPy's setdiff1d,
    which sorts."""
    if not len(known) or not len(numbers):
        return numbers
    at = np.searchsorted(known, numbers)
    at[at == len(known)] = 0
    return numbers[known[at] != numbers]
