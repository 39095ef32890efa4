"""Candidates from posting lists: a query's lists are read from its start on, and what the first of
them say is known before the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .... import errors
from ....postings.deletions import removed_terms
from ....postings.search.plan import Collection
from ....postings.search.search import K_MAX, PostingsSearch, PostingsState
from ....postings.stored.segment import Segment
from ....storage import NativeEngine
from ...encoder import Encoded
from ..interface import CANDIDATES, Allowed, Candidates, StageReads
from .scans import ScannedPart, ScannedSearch

#: From the text of a query to its terms: as often as they come, or each with a weight.
Words = Callable[[str], Sequence[str] | Mapping[int, float]]
# queries of a search whose lists are read at once; more are searched together, in one call
_STATES_MAX = 4
_FOUND_BYTES = 12


class LoadedLexical:
    """See `LoadedStage`. An effort means nothing to it: lists are read whole.

    Args:
        engine: of the reads; closed with this, as the segments are.
        words: of a query.
        kind: of the stage, for messages.
        deleted: bitmap of deleted records, or None: they count no more in the totals of BM25.
        scanned: of each segment, its lists on a device; closed with this. Empty: the engine reads
            the lists.
    """

    auto_effort = 1
    default_candidates = CANDIDATES
    needs_vectors = False
    finds_equals = True
    hit_rates: Mapping[float, float] = {}

    def __init__(
        self,
        engine: NativeEngine,
        segments: Sequence[Segment],
        words: Words,
        kind: str,
        deleted: np.ndarray | None = None,
        scanned: Sequence[ScannedPart] = (),
    ):
        self._scanned = scanned
        self.engine, self.segments, self._words, self._kind = engine, list(segments), words, kind
        self._search = PostingsSearch(engine, _collection(engine, self.segments, deleted))
        self._filters: WeakKeyDictionary[Allowed, list[np.ndarray]] = WeakKeyDictionary()
        self._filtering = threading.Lock()

    def prepare(self, query: Encoded, text: str | None = None) -> Any:
        """Raises InvalidInputError for a query that is given as vectors."""
        if text is None:
            raise errors.InvalidInputError(
                f"a query of {self._kind}",
                got="vectors",
                expected="its text",
                fix='first_stage="ivf", or give the text',
            )
        return self._words(text)

    def start(
        self,
        queries: Sequence[Any],
        candidates: int,
        effort: int | None = None,
        allowed: Allowed | None = None,
        at_least: int = 0,
        deadline_s: float = 30.0,
    ) -> LexicalSearch | ScannedSearch:
        candidates = min(candidates, K_MAX, sum(map(len, self.segments)))
        bits = None if allowed is None else self._filter(allowed)
        if self._scanned:
            k = self._search.k_of(candidates) if candidates else 0
            return ScannedSearch(
                self._scanned, self._search.collection, queries, k, bits, deadline_s
            )
        return LexicalSearch(self._search, list(queries), candidates, bits, deadline_s)

    def _filter(self, allowed: Allowed) -> list[np.ndarray]:
        """The bits of each segment. Parts begin at multiples of 64 records, so at whole bytes."""
        with self._filtering:
            found = self._filters.get(allowed)
            if found is None:
                found = self._filters[allowed] = [
                    _bits(allowed, segment) for segment in self.segments
                ]
            return found

    def search_bytes(
        self, candidates: int, effort: int | None, allowed: Allowed | None, at_least: int
    ) -> int:
        return _FOUND_BYTES * candidates + (1 << 20)  # windows of accumulators, and lists that wait

    def close(self) -> None:
        for part in self._scanned:
            part.lists.close()
        for segment in self.segments if not self._scanned else ():
            segment.close()
        self.engine.close()


class LexicalSearch:
    """See `StageSearch`."""

    def __init__(
        self,
        search: PostingsSearch,
        queries: list[Any],
        candidates: int,
        allowed: list[np.ndarray] | None,
        deadline_s: float,
    ):
        self._search, self._queries, self._candidates = search, queries, candidates
        self._options: dict[str, Any] = {"allowed": allowed, "deadline_s": deadline_s}
        self._states: list[PostingsState] = []
        self.reads = StageReads()
        if candidates and len(queries) <= _STATES_MAX:
            self._begin()

    def _begin(self) -> None:
        self._states = [
            self._search.begin(query, self._candidates, **self._options) for query in self._queries
        ]

    def advance(self, share: float) -> list[Candidates]:
        if not self._states and self._candidates:
            self._begin()
        return [state.partial(share) for state in self._states] or [_NOTHING for _ in self._queries]

    def complete(self) -> list[Candidates]:
        if not self._candidates or not self._queries:
            return [_NOTHING for _ in self._queries]
        if self._states:
            found = [state.complete() for state in self._states]
            self.reads = StageReads(
                *np.sum([state.costs for state in self._states], axis=0).tolist()
            )
            return found
        batch = self._search.search(self._queries, self._candidates, **self._options)
        self.reads = StageReads(
            int(batch.requests.sum()), int(batch.bytes_asked.sum()), int(batch.bytes_moved.sum())
        )
        return [
            (numbers[numbers >= 0], scores[numbers >= 0])
            for numbers, scores in zip(batch.numbers, batch.scores, strict=True)
        ]


_NOTHING: Candidates = (np.empty(0, np.int64), np.empty(0, np.float32))


def _collection(
    engine: NativeEngine, segments: list[Segment], deleted: np.ndarray | None
) -> Collection:
    """The segments, with what deleted records take from the totals: their terms are read out of the
    lists once."""
    if deleted is None or not segments or segments[0].lengths is None:
        return Collection(segments)
    deleted = np.flatnonzero(np.unpackbits(deleted, bitorder="little"))
    none = np.zeros(0, np.int64)
    count = sum_lengths = 0
    terms = []
    for segment in segments:
        here = (
            deleted[
                (deleted >= segment.first_number) & (deleted < segment.first_number + len(segment))
            ]
            - segment.first_number
        )
        count += len(here)
        if segment.lengths is not None:
            sum_lengths += int(segment.length_table[segment.lengths.codes[here]].sum())
        terms.append(removed_terms(engine, segment, here, (none, none)))
    return Collection(segments, (count, sum_lengths), terms)


def _bits(allowed: Allowed, segment: Segment) -> np.ndarray:
    size = -(-len(segment) // 8)
    found = np.zeros(size, np.uint8)
    held = allowed.bitmap[segment.first_number >> 3 :][:size]
    found[: len(held)] = held
    return found
