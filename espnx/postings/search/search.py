"""Searches over segments of postings: one plan a query, all queries of a batch in one call of the
compiled part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
import torch

from ...checks import check_finite, check_whole, plain
from ...storage import NativeEngine
from ...storage.documents.ids import DocumentId
from ...storage.native import load_native
from ..bm25 import BM25
from ..stored.segment import Segment
from .plan import Collection, QueryPlan, QueryTerms, TermWeight

K_MAX = 1 << 24
#: (id, text or None) of numbers of records.
LookUp = Callable[[list[int]], Sequence[tuple[DocumentId, str | None]]]


@dataclass(frozen=True)
class PostingsHit:
    """A record that was found.

    Attributes:
        id: as it was built with; its number, where postings have no ids.
        score: of the query.
        number: of the record.
        text: None where texts are not kept.
    """

    id: DocumentId
    score: float
    number: int
    text: str | None = None


@dataclass(frozen=True, eq=False)
class Found(Sequence[list[PostingsHit]]):
    """What a search of q queries found. As a sequence: of each query its hits, best first.

    Attributes:
        numbers: int64 [q, k]: records, best first, of equal scores the lower number first; -1 where
            no more have a term of the query. k is what was asked for, at most the number of
            records.
        scores: float32 [q, k]; minus infinity there.
        requests, bytes_asked, bytes_moved: int64 [q]: of the reads; moved: what crossed the queue,
            whole blocks.
        look_up: from numbers of records to their ids and texts; None: there are neither. Hits are
            looked up when they are asked for, as long as the postings are open.
    """

    numbers: np.ndarray
    scores: np.ndarray
    requests: np.ndarray
    bytes_asked: np.ndarray
    bytes_moved: np.ndarray
    look_up: LookUp | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, query: int) -> list[PostingsHit]: ...
    @overload
    def __getitem__(self, query: slice) -> list[list[PostingsHit]]: ...

    def __getitem__(self, query: int | slice) -> list[PostingsHit] | list[list[PostingsHit]]:
        """The hits of a query. Raises IndexError, and what looking ids and texts up raises."""
        if isinstance(query, slice):
            return [self[place] for place in range(*query.indices(len(self)))]
        there = self.numbers[query] >= 0
        numbers, scores = self.numbers[query][there].tolist(), self.scores[query][there].tolist()
        rows = (
            [(number, None) for number in numbers]
            if self.look_up is None
            else self.look_up(numbers)
        )
        return [
            PostingsHit(row[0], score, number, row[1])
            for row, score, number in zip(rows, scores, numbers, strict=True)
        ]

    def __repr__(self) -> str:
        q, k = self.numbers.shape
        mean = self.requests.mean() if q else 0
        return f"<Found: {q} queries, k {k}, {mean:.1f} requests a query>"


class PostingsSearch:
    """Searches of a collection of segments. Every method may be called from any thread.

    Args:
        engine: of the segments' reads.
        collection: segments, or a `Collection` of them.
    """

    def __init__(self, engine: NativeEngine, collection: Collection | Sequence[Segment]):
        self.engine = engine
        self.collection = (
            collection if isinstance(collection, Collection) else Collection(collection)
        )

    def __len__(self) -> int:
        return self.collection.n_records

    def search(
        self,
        queries: Sequence[QueryTerms],
        k: int = 10,
        *,
        bm25: BM25 | None = None,
        allowed: Sequence[np.ndarray | None] | None = None,
        threads: int | None = None,
        deadline_s: float = 30.0,
    ) -> Found:
        """The k best records of each query.

        Args:
            queries: terms of each: a sequence, in which one that comes twice counts twice, or a
                mapping to weights. Scores are summed in float32 in their order. Of BM25, weights
                multiply; unknown terms are left out.
            k: 1 or more; at most as many as there are records are given.
            bm25: how counts become scores; None: `BM25()`. Not of impacts.
            allowed: for each segment uint8 [ceil(n / 8)]: bit i % 8 of byte i / 8 says whether
                record i may be found; None: all may.
            threads: at most so many scan; None: as many as torch uses, one for a query alone.
            deadline_s: of each query's reads.

        Raises:
            InvalidInputError: of arguments.
            ChecksumError: a list is damaged. ReadError, TruncatedFileError, DeadlineExceededError,
                ...: of reads. No result is given then.
        """
        plan = QueryPlan(self.collection, queries, bm25 or BM25(), allowed)
        return self.run(plan, k, threads=threads, deadline_s=deadline_s)

    def run(
        self,
        plan: QueryPlan,
        k: int,
        *,
        threads: int | None,
        deadline_s: float,
        heaviest: int | None = None,
        whole: int = 0,
    ) -> Found:
        """What `search` does with a plan. `heaviest`, `whole`: see `QueryPlan.request`."""
        k, deadline_s, threads = self.k_of(k), plain(deadline_s), plain(threads)
        check_finite("deadline_s", deadline_s)
        if threads is not None:
            check_whole("threads", threads, 1, 1024)
        own = max(1, min(torch.get_num_threads(), plan.n_queries))
        common = {"k": max(1, k), "threads": threads or own, "deadline_s": float(deadline_s)}
        for _ in range(len(self.collection.segments) + 1):
            found = load_native().search_postings(
                self.engine.native, plan.request(common, heaviest, whole)
            )
            if not found[3].numel():
                break
            # of another term with the same hash: the totals change, too
            plan.leave_out(found[3].numpy())
        costs = found[2].numpy()
        return Found(
            found[0].numpy()[:, :k], found[1].numpy()[:, :k], costs[:, 0], costs[:, 1], costs[:, 2]
        )

    def k_of(self, k: int) -> int:
        """How many records a query can be given that asks for `k`. Raises InvalidInputError."""
        check_whole("k", k := plain(k), 1, K_MAX)
        return min(k, len(self))

    def begin(
        self,
        query: QueryTerms,
        k: int,
        *,
        bm25: BM25 | None = None,
        allowed: Sequence[np.ndarray | None] | None = None,
        deadline_s: float = 30.0,
    ) -> PostingsState:
        """Starts the reads of one query, whose result is asked for later. Arguments and errors are
        `search`'s."""
        return PostingsState(
            self, query, max(1, self.k_of(k)), bm25 or BM25(), allowed, plain(deadline_s)
        )

    def weigh(self, terms: Sequence[bytes], bm25: BM25) -> list[TermWeight | None]:
        """What each term counts; None for one that no record has."""
        plan = QueryPlan(self.collection, [], bm25, None)
        plan.look_up(list(terms))
        return [plan.weight_of(i) for i in range(len(terms))]


class PostingsState:
    """One query whose lists are being read. `partial` and `complete` may be called in any order, by
    one thread at a time.

    Lists are read in the order in which they are summed; a partial result is of the first of them
    alone.
    """

    def __init__(
        self,
        search: PostingsSearch,
        query: QueryTerms,
        k: int,
        bm25: BM25,
        allowed: Sequence[np.ndarray | None] | None,
        deadline_s: float,
    ):
        self._search, self._k, self._deadline_s = search, k, deadline_s
        self._plan = QueryPlan(search.collection, [query], bm25, allowed)
        self._begin()

    def _begin(self) -> None:
        common = {"k": self._k, "threads": 1, "deadline_s": float(self._deadline_s)}
        self._request = self._plan.request(common)  # the compiled part looks into its tensors
        self._ticket = load_native().PostingsTicket(self._search.engine.native, self._request)

    @property
    def n_lists(self) -> int:
        """How many lists the query reads."""
        return len(self._request["lists"])

    @property
    def list_bytes(self) -> np.ndarray:
        """int64 [lists]: of each, in the order in which they are summed."""
        return self._request["lists"][:, 3].numpy()

    def partial(self, share: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
        """(numbers int64, scores float32) of the best by the first lists alone: as many as make up
        this share of the bytes, one at least.

        Waits for those. Scores are sums of what was looked at, not bounds. Raises as
        `PostingsSearch.search`.
        """
        sizes = self.list_bytes
        enough = np.searchsorted(np.cumsum(sizes), share * sizes.sum(), side="left") + 1
        return self._result(int(min(enough, len(sizes))))

    def complete(self) -> tuple[np.ndarray, np.ndarray]:
        """(numbers int64 [at most k], scores float32), best first. Raises as
        `PostingsSearch.search`."""
        return self._result(self.n_lists)

    def _result(self, n_lists: int) -> tuple[np.ndarray, np.ndarray]:
        for _ in range(len(self._search.collection.segments) + 1):
            numbers, scores, costs, others = self._ticket.result(n_lists)
            if not others.numel():
                break
            self._plan.leave_out(others.numpy())
            self._begin()
            n_lists = min(n_lists, self.n_lists)
        self.costs = costs.numpy()[0]
        found = numbers.numpy()[0] >= 0
        return numbers.numpy()[0][found], scores.numpy()[0][found]
