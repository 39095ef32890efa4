"""Candidates from the graphs of a store's parts: walks over all of them at once, and small parts
looked at in memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ....graph.devices.walks import WalksTicket
from ....graph.filters import RowFilter
from ....graph.search.asked import LIST_SIZE_MAX
from ...encoder import Encoded
from ..flat import FlatPart, rows_allowed
from ..interface import Allowed, Candidates, StageReads
from ..ties import merged, top

#: Of a search whose caller names no number: each costs about a read.
DEFAULT_CANDIDATES = 100
_ROWS = 16384  # vectors at a time, of those that are looked at one by one
_ALL_PAGES = 1 << 62
_WALK_BYTES = 1 << 16  # of a walk under way: its list, and what it has met


class GraphPart:
    """A part with a graph, whose rows are its records. Closes the graph.

    Args:
        walks: a `espnx.graph.devices.walks.GraphWalks`, or what stands in front of one.
        is_on_device: whether a device that somebody has named reads it.
    """

    def __init__(self, first_number: int, walks: Any, *, is_on_device: bool):
        self.first_number, self.walks, self.is_on_device = first_number, walks, is_on_device
        self.count: int = walks.stored.n
        # Of what is alive there is one `Allowed` for as long as a version is open.
        self._filters: WeakKeyDictionary[Allowed, RowFilter] = WeakKeyDictionary()
        self._filtering = threading.Lock()

    def start(
        self,
        queries: np.ndarray,
        candidates: int,
        list_size: int,
        allowed: Allowed | None,
        deadline_s: float,
    ) -> WalksTicket:
        k = min(candidates, self.count)
        include = None if allowed is None else self._filter(allowed)
        list_size = min(LIST_SIZE_MAX, max(k, list_size))
        found: WalksTicket = self.walks.walk(
            queries, k, list_size=list_size, include=include, deadline_s=deadline_s
        )
        return found

    def _filter(self, allowed: Allowed) -> RowFilter:
        with self._filtering:
            found = self._filters.get(allowed)
            if found is None:
                found = rows_allowed(allowed, self.first_number, self.count)
                self._filters[allowed] = found
            return found

    def all_vectors(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `FlatPart.all_vectors`."""
        for first in range(0, self.count, _ROWS):
            rows = np.arange(first, min(first + _ROWS, self.count))
            yield rows, self.vectors(rows)

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.walks.index.vectors(rows)
        return found

    def close(self) -> None:
        self.walks.close()

    def __enter__(self) -> GraphPart:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LoadedGraph:
    """See `LoadedStage`; effort is the number of candidates that a walk keeps, L.

    Args:
        parts: ascending by record number; closed with this.
        vector: makes the first-stage vector of a query, float32 [dim].
        list_size: measured for `DEFAULT_CANDIDATES`; a search for more takes as many times a longer
            list.
        pages_per_candidate, hit_rates: as measured.
    """

    default_candidates = DEFAULT_CANDIDATES
    needs_vectors = True
    finds_equals = False

    def __init__(
        self,
        parts: Sequence[GraphPart | FlatPart],
        vector: Callable[[Encoded], np.ndarray],
        list_size: int,
        pages_per_candidate: float,
        hit_rates: Mapping[float, float],
    ):
        self.parts, self.auto_effort, self.hit_rates = list(parts), max(1, list_size), hit_rates
        self._vector, self._pages_per_candidate = vector, pages_per_candidate

    @property
    def count(self) -> int:
        """Records, deleted ones too."""
        return sum(part.count for part in self.parts)

    def prepare(self, query: Encoded, text: str | None = None) -> np.ndarray:
        return self._vector(query)

    def start(
        self,
        queries: Sequence[Any],
        candidates: int,
        effort: int | None = None,
        allowed: Allowed | None = None,
        at_least: int = 0,
        deadline_s: float = 30.0,
    ) -> GraphStageSearch:
        """`queries`: float32 [dim] each. A walk finds as many as there are, up to `candidates`, so
        `at_least` is kept."""
        list_size = self._list_size(candidates, effort)
        wide = np.ascontiguousarray(queries, dtype=np.float32)
        pages = max(1, math.ceil(self._pages_per_candidate * list_size))
        return GraphStageSearch(self.parts, wide, candidates, list_size, allowed, pages, deadline_s)

    def _list_size(self, candidates: int, effort: int | None) -> int:
        if effort is None:
            effort = math.ceil(
                max(candidates, 10) * max(1.0, self.auto_effort / DEFAULT_CANDIDATES)
            )
        return min(LIST_SIZE_MAX, max(effort, candidates))

    def search_bytes(
        self, candidates: int, effort: int | None, allowed: Allowed | None, at_least: int
    ) -> int:
        return (
            24 * candidates * len(self.parts)
            + _WALK_BYTES
            + 16 * self._list_size(candidates, effort)
        )

    def exhaustive(self, queries: np.ndarray, candidates: int) -> list[Candidates]:
        """The best of all vectors, exactly: every one is read."""
        best: list[Candidates] = [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(queries)
        for part in self.parts:
            for rows, vectors in part.all_vectors():
                scores = queries @ vectors.astype(np.float32).T
                found = [top(rows + part.first_number, each, candidates) for each in scores]
                best = [merged([a, b], candidates) for a, b in zip(best, found, strict=True)]
        return best

    def vectors(self, numbers: np.ndarray) -> np.ndarray:
        """float32 [m, dim]: of records by number counted over all parts, without what lies between
        them; ascending."""
        found, first = [np.empty((0, 0), np.float32)][:0], 0
        for part in self.parts:
            inside = numbers[(numbers >= first) & (numbers < first + part.count)] - first
            if len(inside):
                found.append(part.vectors(inside).astype(np.float32))
            first += part.count
        return np.concatenate(found)

    def close(self) -> None:
        for part in self.parts:
            part.close()


class GraphStageSearch:
    """See `StageSearch`. Walks go on by themselves from the start."""

    def __init__(
        self,
        parts: Sequence[GraphPart | FlatPart],
        queries: np.ndarray,
        candidates: int,
        list_size: int,
        allowed: Allowed | None,
        expected_pages: int,
        deadline_s: float,
    ):
        self._candidates, self._expected_pages = candidates, expected_pages
        self._walks: list[tuple[GraphPart, WalksTicket]] = []
        self.pages = 0  # read by all walks, once complete
        self.reads = StageReads()
        if candidates and len(queries):
            # Walks first: they read while the small parts are looked at.
            self._walks = [
                (part, part.start(queries, candidates, list_size, allowed, deadline_s))
                for part in parts
                if isinstance(part, GraphPart)
            ]
            flat = [
                part.search(queries, candidates, allowed)
                for part in parts
                if isinstance(part, FlatPart)
            ]
        else:
            flat = []
        self._flat = (
            [list(of_query) for of_query in zip(*flat, strict=True)]
            if flat
            else [[] for _ in queries]
        )

    def advance(self, share: float) -> list[Candidates]:
        pages = max(1, math.ceil(share * self._expected_pages)) if share < 1 else _ALL_PAGES
        return self._together([_found(part, *walk.partial(pages)) for part, walk in self._walks])

    def complete(self) -> list[Candidates]:
        each, requests, moved_bytes, device_bytes = [], 0, 0, 0
        for part, walk in self._walks:
            walked = walk.finish()
            self.pages += int(walked.pages.sum()) + walked.shared_pages
            requests += int((walked.pages + walked.code_pages).sum()) + walked.shared_pages
            moved_bytes += walked.total_bytes
            device_bytes += walked.total_bytes if part.is_on_device else 0
            each.append(_found(part, walked.ids, walked.distances))
        self.reads = StageReads(requests, moved_bytes, moved_bytes, device_bytes)
        return self._together(each)

    def _together(self, walked: list[list[Candidates]]) -> list[Candidates]:
        return [
            merged([*flat, *(found[i] for found in walked)], self._candidates)
            for i, flat in enumerate(self._flat)
        ]


def _found(part: GraphPart, ids: np.ndarray, distances: np.ndarray) -> list[Candidates]:
    """Makes candidates of what was found: by inner product the distance is the product, negated."""
    return [
        (rows[rows >= 0] + part.first_number, -far[rows >= 0])
        for rows, far in zip(ids, distances, strict=True)
    ]
