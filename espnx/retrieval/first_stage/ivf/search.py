"""An inverted file over first-stage vectors (FAISS), searched exactly in as many steps as wanted.

ESPN (section 4.2) reads ahead the candidates known after the delta nearest lists while the
remaining ones are scanned. Scanning the lists in several calls gives the very result of one call:
every list is scanned once, with the same distances, and the tops merge. Nothing of the index is
changed by a search, so that any number of threads may search.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ....ops.quantise import load_faiss
from ...encoder import Encoded
from ..interface import CANDIDATES, Allowed, Candidates, StageReads
from ..ties import merged, top

#: Asked of FAISS beyond what is wanted: among equal similarities at the last place it keeps
#: whichever it meets first, we the lowest number.
_SLACK = 16
#: Below this many vectors, waking a second thread costs more than it saves.
_VECTORS_PER_THREAD = 32768
#: What a search notes of a candidate, or of a list to scan: its number and its similarity.
_FOUND_BYTES = 12


@dataclass(frozen=True, eq=False)
class ListRuns:
    """The places of the records of each list: in each part, one run of record numbers.

    Attributes:
        lists, begin, end: int64 [runs]; the records of a run are those from `begin` to before
            `end`. nlist: of all lists.
    """

    lists: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    nlist: int

    def counts(self, allowed: Allowed | None) -> ListCounts:
        """How many of these records each list holds; None: of all records."""
        inside = (
            self.end - self.begin
            if allowed is None
            else _bits_below(allowed.bitmap, self.end) - _bits_below(allowed.bitmap, self.begin)
        )
        in_lists = np.zeros(self.nlist, dtype=np.int64)
        np.add.at(in_lists, self.lists, inside)
        return ListCounts(in_lists, int(in_lists.sum()))


_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(
    1, dtype=np.uint8
)


def _bits_below(bitmap: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64: how many bits are set before each position."""
    before = np.concatenate(
        [np.zeros(1, np.int64), np.cumsum(_BITS_OF_BYTE[bitmap], dtype=np.int64)]
    )
    at = positions >> 3
    last = np.append(bitmap, np.uint8(0))[at] & ((1 << (positions & 7)) - 1).astype(np.uint8)
    return before[at] + _BITS_OF_BYTE[last]


@dataclass(frozen=True, eq=False)
class ListCounts:
    """How many records that may be found each list holds.

    Attributes:
        in_lists: int64 [nlist]. count: of all of them.
    """

    in_lists: np.ndarray
    count: int

    @cached_property
    def useful(self) -> np.ndarray:
        """bool [nlist]: the lists that hold any."""
        return self.in_lists > 0

    @cached_property
    def _fewest(self) -> np.ndarray:
        """int64: how many 1, 2, ... of the useful lists hold at least."""
        return np.cumsum(np.sort(self.in_lists[self.useful]))

    def in_any(self, lists: int) -> int:
        """How many any so many lists hold at least; 0 where a list holds none."""
        return (
            int(self._fewest[min(lists, len(self._fewest)) - 1])
            if len(self._fewest) == len(self.in_lists) > 0
            else 0
        )

    def lists_at_most(self, nprobe: int, at_least: int) -> int:
        """No query needs more of the useful lists: so many nearest, and more until `at_least`
        records (or all) are in them."""
        enough = 1 + int(np.searchsorted(self._fewest, min(at_least, self.count)))
        return min(len(self._fewest), max(nprobe, enough))


class IvfSearch:
    """See `StageSearch`."""

    def __init__(
        self,
        stage: LoadedIvf,
        vectors: np.ndarray,
        candidates: int,
        lists: np.ndarray,
        distances: np.ndarray,
        selector: Any,
    ):
        self._stage, self._vectors, self._candidates, self._selector = (
            stage,
            vectors,
            candidates,
            selector,
        )
        self._lists, self._distances = lists, distances
        self._done = 0
        empty = np.empty(0, "i8"), np.empty(0, "f4")
        self._found: list[Candidates] = [empty] * len(vectors)

    def advance(self, share: float) -> list[Candidates]:
        total = self._lists.shape[1]
        end = min(total, max(1, round(share * total)))
        if end > self._done:
            part = slice(self._done, end)
            new = self._stage.scan(
                self._vectors,
                self._lists[:, part],
                self._distances[:, part],
                self._candidates + _SLACK,
                self._selector,
            )
            if self._done:
                new = [
                    merged(pair, self._candidates + _SLACK)
                    for pair in zip(self._found, new, strict=True)
                ]
            self._found, self._done = new, end
        return [
            (numbers[: self._candidates], scores[: self._candidates])
            for numbers, scores in self._found
        ]

    def complete(self) -> list[Candidates]:
        return self.advance(1.0)

    @property
    def reads(self) -> StageReads:
        return StageReads()


class LoadedIvf:
    """FAISS IVF with inner product. See `LoadedStage`; effort is the number of lists that are
    scanned.

    Args:
        index: a trained faiss.IndexIVF whose ids are record numbers, or None for an empty corpus.
        runs: where its lists' records lie.
        vector: makes the first-stage vector of a query, float32 [dim].
        nprobe, hit_rates: as measured.
        threads: that scan at a time for one search; the caller's is one of them.
    """

    default_candidates = CANDIDATES
    needs_vectors = True
    finds_equals = True

    def __init__(
        self,
        index: Any,
        runs: ListRuns,
        vector: Callable[[Encoded], np.ndarray],
        nprobe: int,
        hit_rates: Mapping[float, float],
        threads: int = 1,
    ):
        self.index, self.threads, self.auto_effort, self.hit_rates = (
            index,
            threads,
            max(1, nprobe),
            hit_rates,
        )
        self._runs, self._vector = runs, vector
        self._faiss = load_faiss()
        self._helpers = (
            ThreadPoolExecutor(max_workers=threads - 1, thread_name_prefix="espnx-first-stage")
            if threads > 1
            else None
        )
        self._helping = threading.Lock()
        self._list_vectors = 0.0 if index is None else index.ntotal / index.nlist
        self._everything = runs.counts(None)
        # Of what is alive there is one `Allowed` for as long as a version is open: its lists are
        # counted once.
        self._counted: WeakKeyDictionary[Allowed, ListCounts] = WeakKeyDictionary()
        self._counting = threading.Lock()

    @property
    def nlist(self) -> int:
        return 0 if self.index is None else self.index.nlist

    def counts(self, allowed: Allowed | None) -> ListCounts:
        """How many records that may be found each list holds."""
        if allowed is None:
            return self._everything
        with self._counting:
            found = self._counted.get(allowed)
            if found is None:
                found = self._counted[allowed] = self._runs.counts(allowed)
            return found

    def prepare(self, query: Encoded, text: str | None = None) -> np.ndarray:
        return self._vector(query)

    def start(
        self,
        queries: Sequence[np.ndarray] | np.ndarray,
        candidates: int,
        effort: int | None = None,
        allowed: Allowed | None = None,
        at_least: int = 0,
        deadline_s: float = 30.0,
    ) -> IvfSearch:
        """`queries`: float32 [dim] each."""
        vectors = np.ascontiguousarray(queries, dtype=np.float32)
        held = self.counts(allowed)
        distances, lists = self._nearest(
            vectors, self._nprobe(effort), held, min(at_least, held.count)
        )
        selector = None if allowed is None else self._faiss.IDSelectorBitmap(allowed.bitmap)
        return IvfSearch(self, vectors, candidates, lists, distances, selector)

    def _nprobe(self, effort: int | None) -> int:
        return self.auto_effort if effort is None else effort

    def search_bytes(
        self, candidates: int, effort: int | None, allowed: Allowed | None, at_least: int
    ) -> int:
        return _FOUND_BYTES * (
            candidates + self.counts(allowed).lists_at_most(self._nprobe(effort), at_least)
        )

    def _nearest(
        self, vectors: np.ndarray, nprobe: int, held: ListCounts, wanted: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(distances, lists) of the nearest lists that hold a record that may be found: `nprobe`,
        or as many as hold `wanted` of them. Queries may need different numbers: -1 is no list."""
        if not held.count:
            return np.empty((len(vectors), 0), "f4"), np.empty((len(vectors), 0), "i8")
        distances, lists = self.index.quantizer.search(vectors, min(nprobe, self.nlist))
        if held.in_any(nprobe) >= max(1, wanted):
            return distances, lists
        inside = held.in_lists[lists]
        short = np.flatnonzero((inside == 0).any(axis=1) | (inside.sum(axis=1) < wanted))
        if not len(short):
            return distances, lists
        most = held.lists_at_most(nprobe, wanted)
        more_distances, more = self._nearest_useful(vectors[short], most, held)
        needed = np.minimum(
            most,
            np.maximum(nprobe, 1 + (np.cumsum(held.in_lists[more], axis=1) < wanted).sum(axis=1)),
        )
        count = np.full(len(vectors), lists.shape[1])
        count[short] = needed
        width = int(count.max())
        wide_distances, wide = (
            np.zeros((len(vectors), width), "f4"),
            np.full((len(vectors), width), -1, "i8"),
        )
        for to, own, found in ((wide_distances, distances, more_distances), (wide, lists, more)):
            to[:, : own.shape[1]] = own[:, :width]
            to[short] = found[:, :width]
        wide[np.arange(width) >= count[:, None]] = -1
        return wide_distances, wide

    def _nearest_useful(
        self, vectors: np.ndarray, count: int, held: ListCounts
    ) -> tuple[np.ndarray, np.ndarray]:
        """(distances, lists) of the `count` nearest lists that are useful."""
        parameters = None
        if not held.useful.all():
            selector = self._faiss.IDSelectorBitmap(np.packbits(held.useful, bitorder="little"))
            parameters = self._faiss.SearchParameters(sel=selector)
        return self.index.quantizer.search(vectors, count, params=parameters)

    def scan(
        self,
        vectors: np.ndarray,
        lists: np.ndarray,
        distances: np.ndarray,
        count: int,
        selector: Any,
    ) -> list[Candidates]:
        """Top `count` of the given lists for each query. Releases the GIL; safe from many
        threads."""
        threads = min(self.threads, int(1 + lists.size * self._list_vectors / _VECTORS_PER_THREAD))
        # The helpers are one search's at a time: another's has the cores that they run on.
        if self._helpers is None or threads < 2 or not self._helping.acquire(blocking=False):
            return self._scan_part(vectors, lists, distances, count, selector)
        try:
            return self._scan_together(
                self._helpers, threads, vectors, lists, distances, count, selector
            )
        finally:
            self._helping.release()

    def _scan_together(
        self,
        helpers: ThreadPoolExecutor,
        threads: int,
        vectors: np.ndarray,
        lists: np.ndarray,
        distances: np.ndarray,
        count: int,
        selector: Any,
    ) -> list[Candidates]:
        if len(vectors) >= threads:  # a share of the queries each
            rows = [
                slice(len(vectors) * i // threads, len(vectors) * (i + 1) // threads)
                for i in range(threads)
            ]
            tasks = [
                helpers.submit(self._scan_part, vectors[r], lists[r], distances[r], count, selector)
                for r in rows[1:]
            ]
            found = self._scan_part(
                vectors[rows[0]], lists[rows[0]], distances[rows[0]], count, selector
            )
            return found + [candidates for task in tasks for candidates in task.result()]
        # Every so many-th list each: the nearest lists, which fill the top, are shared evenly.
        parts = [slice(i, None, threads) for i in range(threads)]
        tasks = [
            helpers.submit(self._scan_part, vectors, lists[:, p], distances[:, p], count, selector)
            for p in parts[1:]
        ]
        results = [
            self._scan_part(vectors, lists[:, parts[0]], distances[:, parts[0]], count, selector),
            *(task.result() for task in tasks),
        ]
        return [merged(candidates, count) for candidates in zip(*results, strict=True)]

    def _scan_part(
        self,
        vectors: np.ndarray,
        lists: np.ndarray,
        distances: np.ndarray,
        count: int,
        selector: Any,
    ) -> list[Candidates]:
        queries = len(vectors)
        if not lists.size or count == 0:
            return [(np.empty(0, "i8"), np.empty(0, "f4"))] * queries
        faiss, pointer = self._faiss, self._faiss.swig_ptr
        vectors = np.ascontiguousarray(vectors)
        lists, distances = np.ascontiguousarray(lists, "i8"), np.ascontiguousarray(distances, "f4")
        count = min(count, self.index.ntotal)
        scores, numbers = np.empty((queries, count), "f4"), np.empty((queries, count), "i8")
        # The _c form: the Python wrapper would insist on index.nprobe lists, and changing that is
        # not thread-safe.
        parameters = faiss.SearchParametersIVF(nprobe=lists.shape[1], sel=selector)
        self.index.search_preassigned_c(
            queries,
            pointer(vectors),
            count,
            pointer(lists),
            pointer(distances),
            pointer(scores),
            pointer(numbers),
            False,
            parameters,
        )
        return [top(n[n >= 0], s[n >= 0], count) for n, s in zip(numbers, scores, strict=True)]

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown(wait=True)
