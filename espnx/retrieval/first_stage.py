"""The first stage: an inverted file over first-stage vectors (FAISS), searched exactly in as many steps as wanted.

ESPN (section 4.2) reads ahead the candidates known after the delta nearest lists while the remaining ones are scanned. Scanning the
lists in several calls gives the very result of one call: every list is scanned once, with the same distances, and the tops merge.
Nothing of the index is changed by a search, so that any number of threads may search.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from .. import errors

#: FAISS factory strings of the codes a list can hold. ``flat`` is exact; ``sq8`` loses a few tenths of a point of recall for a quarter of
#: the memory.
CODES = {"flat": "Flat", "sq8": "SQ8", "sq6": "SQ6", "sq4": "SQ4"}

#: Asked of FAISS beyond what is wanted: among equal similarities at the last place it keeps whichever it meets first, we the lowest number.
_SLACK = 16
#: Below this many vectors, waking a second thread costs more than it saves.
_VECTORS_PER_THREAD = 32768

Candidates = tuple[np.ndarray, np.ndarray]


def load_faiss() -> Any:
    """FAISS, or MissingDependencyError."""
    # FAISS brings its own OpenMP, whose idle threads would otherwise spin on the core that the reads and MaxSim need. Read once, at load.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import faiss
    except ImportError as error:
        raise errors.MissingDependencyError(
            "the first stage needs FAISS", got=str(error), fix="pip install 'espnx[retrieval]' (or faiss-cpu)"
        ) from error
    return faiss


@dataclass(frozen=True, eq=False)
class Allowed:
    """Which records a search may find.

    Attributes:
        bitmap: bit i % 8 of byte i // 8 is set where record i may be found; None: every record may.
        in_lists: int64 [nlist], how many of them each list holds.
        count: of all of them.
    """

    bitmap: np.ndarray | None
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
        return int(self._fewest[min(lists, len(self._fewest)) - 1]) if len(self._fewest) == len(self.in_lists) > 0 else 0

    def lists_at_most(self, nprobe: int, at_least: int) -> int:
        """No query needs more of the useful lists: so many nearest, and more until `at_least` records (or all) are in them."""
        enough = 1 + int(np.searchsorted(self._fewest, min(at_least, self.count)))
        return min(len(self._fewest), max(nprobe, enough))


class FirstStage(Protocol):
    """What the searcher asks of a candidate generator."""

    @property
    def nlist(self) -> int: ...

    def start(
        self, vectors: np.ndarray, candidates: int, nprobe: int, allowed: Allowed | None = None, at_least: int = 0
    ) -> FirstStageSearch:
        """Begins a search. `vectors`: float32 [q, dim]. Lists without a record that may be found do not count among the `nprobe`, and
        there are more of them where those hold fewer than `at_least` such records."""

    def lists_at_most(self, nprobe: int, allowed: Allowed | None, at_least: int) -> int:
        """No query of such a search needs more lists."""


class FirstStageSearch(Protocol):
    """Some queries under way. For each: (record numbers int64 [m], similarities float32 [m]), best first, m <= candidates."""

    def advance(self, share: float) -> list[Candidates]:
        """What is known after that share of the lists (at least one), continuing where the last call stopped."""

    def complete(self) -> list[Candidates]: ...


def top(numbers: np.ndarray, scores: np.ndarray, count: int) -> Candidates:
    """The `count` best by (score, then lower number), so that ties never depend on scan order."""
    if not (scores[1:] < scores[:-1]).all():  # FAISS's own answers come in order, but for equal scores
        # Stable: runs that are in order merge in linear time, and numbers decide only where scores are equal.
        order = np.argsort(-scores, kind="stable")
        numbers, scores = numbers[order], scores[order]
        if (scores[1:] == scores[:-1]).any():
            order = np.lexsort((numbers, -scores))
            numbers, scores = numbers[order], scores[order]
    return numbers[:count], scores[:count]


class IvfSearch:
    """See `FirstStageSearch`."""

    def __init__(self, stage: IvfFirstStage, vectors: np.ndarray, candidates: int, lists: np.ndarray, distances: np.ndarray, selector: Any):
        self._stage, self._vectors, self._candidates, self._selector = stage, vectors, candidates, selector
        self._lists, self._distances = lists, distances
        self._done = 0
        empty = np.empty(0, "i8"), np.empty(0, "f4")
        self._found: list[Candidates] = [empty] * len(vectors)

    def advance(self, share: float) -> list[Candidates]:
        total = self._lists.shape[1]
        end = min(total, max(1, round(share * total)))
        if end > self._done:
            part = slice(self._done, end)
            new = self._stage.scan(self._vectors, self._lists[:, part], self._distances[:, part], self._candidates + _SLACK, self._selector)
            if self._done:
                new = [merge(pair, self._candidates + _SLACK) for pair in zip(self._found, new, strict=True)]
            self._found, self._done = new, end
        return [(numbers[: self._candidates], scores[: self._candidates]) for numbers, scores in self._found]

    def complete(self) -> list[Candidates]:
        return self.advance(1.0)


def merge(parts: Iterable[Candidates], count: int) -> Candidates:
    numbers, scores = zip(*parts, strict=True)
    return top(np.concatenate(numbers), np.concatenate(scores), count)


class IvfFirstStage:
    """FAISS IVF with inner product.

    Args:
        index: a trained faiss.IndexIVF whose ids are record numbers, or None for an empty corpus.
        threads: that scan at a time for one search; the caller's is one of them.
    """

    def __init__(self, index: Any, threads: int = 1):
        self.index, self.threads = index, threads
        self._faiss = load_faiss()
        self._helpers = ThreadPoolExecutor(max_workers=threads - 1, thread_name_prefix="espnx-first-stage") if threads > 1 else None
        self._helping = threading.Lock()
        self._list_vectors = 0.0 if index is None else index.ntotal / index.nlist
        sizes = np.array([index.invlists.list_size(number) for number in range(self.nlist)], dtype=np.int64)
        self._everything = Allowed(None, sizes, int(sizes.sum()))

    @property
    def nlist(self) -> int:
        return 0 if self.index is None else self.index.nlist

    def start(self, vectors: np.ndarray, candidates: int, nprobe: int, allowed: Allowed | None = None, at_least: int = 0) -> IvfSearch:
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        held = self._everything if allowed is None else allowed
        distances, lists = self._nearest(vectors, nprobe, held, min(at_least, held.count))
        selector = None if held.bitmap is None else self._faiss.IDSelectorBitmap(held.bitmap)
        return IvfSearch(self, vectors, candidates, lists, distances, selector)

    def lists_at_most(self, nprobe: int, allowed: Allowed | None, at_least: int) -> int:
        return (self._everything if allowed is None else allowed).lists_at_most(nprobe, at_least)

    def _nearest(self, vectors: np.ndarray, nprobe: int, held: Allowed, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        """(distances, lists) of the nearest lists that hold a record that may be found: `nprobe`, or as many as hold `wanted` of them.
        Queries may need different numbers: -1 is no list."""
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
        needed = np.minimum(most, np.maximum(nprobe, 1 + (np.cumsum(held.in_lists[more], axis=1) < wanted).sum(axis=1)))
        count = np.full(len(vectors), lists.shape[1])
        count[short] = needed
        width = int(count.max())
        wide_distances, wide = np.zeros((len(vectors), width), "f4"), np.full((len(vectors), width), -1, "i8")
        for to, own, found in ((wide_distances, distances, more_distances), (wide, lists, more)):
            to[:, : own.shape[1]] = own[:, :width]
            to[short] = found[:, :width]
        wide[np.arange(width) >= count[:, None]] = -1
        return wide_distances, wide

    def _nearest_useful(self, vectors: np.ndarray, count: int, held: Allowed) -> tuple[np.ndarray, np.ndarray]:
        """(distances, lists) of the `count` nearest lists that are useful."""
        parameters = None
        if not held.useful.all():
            selector = self._faiss.IDSelectorBitmap(np.packbits(held.useful, bitorder="little"))
            parameters = self._faiss.SearchParameters(sel=selector)
        return self.index.quantizer.search(vectors, count, params=parameters)

    def scan(self, vectors: np.ndarray, lists: np.ndarray, distances: np.ndarray, count: int, selector: Any) -> list[Candidates]:
        """Top `count` of the given lists for each query. Releases the GIL; safe from many threads."""
        threads = min(self.threads, int(1 + lists.size * self._list_vectors / _VECTORS_PER_THREAD))
        # The helpers are one search's at a time: another's has the cores that they run on.
        if self._helpers is None or threads < 2 or not self._helping.acquire(blocking=False):
            return self._scan_part(vectors, lists, distances, count, selector)
        try:
            return self._scan_together(self._helpers, threads, vectors, lists, distances, count, selector)
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
            rows = [slice(len(vectors) * i // threads, len(vectors) * (i + 1) // threads) for i in range(threads)]
            tasks = [helpers.submit(self._scan_part, vectors[r], lists[r], distances[r], count, selector) for r in rows[1:]]
            found = self._scan_part(vectors[rows[0]], lists[rows[0]], distances[rows[0]], count, selector)
            return found + [candidates for task in tasks for candidates in task.result()]
        # Every so many-th list each: the nearest lists, which fill the top, are shared evenly.
        parts = [slice(i, None, threads) for i in range(threads)]
        tasks = [helpers.submit(self._scan_part, vectors, lists[:, p], distances[:, p], count, selector) for p in parts[1:]]
        results = [
            self._scan_part(vectors, lists[:, parts[0]], distances[:, parts[0]], count, selector),
            *(task.result() for task in tasks),
        ]
        return [merge(candidates, count) for candidates in zip(*results, strict=True)]

    def _scan_part(self, vectors: np.ndarray, lists: np.ndarray, distances: np.ndarray, count: int, selector: Any) -> list[Candidates]:
        queries = len(vectors)
        if not lists.size or count == 0:
            return [(np.empty(0, "i8"), np.empty(0, "f4"))] * queries
        faiss, pointer = self._faiss, self._faiss.swig_ptr
        vectors = np.ascontiguousarray(vectors)
        lists, distances = np.ascontiguousarray(lists, "i8"), np.ascontiguousarray(distances, "f4")
        count = min(count, self.index.ntotal)
        scores, numbers = np.empty((queries, count), "f4"), np.empty((queries, count), "i8")
        # The _c form: the Python wrapper would insist on index.nprobe lists, and changing that is not thread-safe.
        parameters = faiss.SearchParametersIVF(nprobe=lists.shape[1], sel=selector)
        self.index.search_preassigned_c(
            queries, pointer(vectors), count, pointer(lists), pointer(distances), pointer(scores), pointer(numbers), False, parameters
        )
        return [top(n[n >= 0], s[n >= 0], count) for n, s in zip(numbers, scores, strict=True)]

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown(wait=True)


def choose_nlist(records: int) -> int:
    """4 sqrt(n), FAISS's own rule of thumb, bounded so that every centroid has the 39 training points FAISS asks for."""
    return max(1, min(round(4 * records**0.5), records // 39))


def train_index(sample: np.ndarray, nlist: int, code: str) -> Any:
    """A trained, empty IVF index over unit-free inner product. Seeded: the same sample gives the same index.

    Args:
        sample: float32 [m, dim], m >= 1.
        code: ``flat``, ``sq8``, ``sq6``, ``sq4`` or ``pqM`` (M bytes a vector; M divides dim).

    Raises:
        InvalidInputError: unknown code.
    """
    faiss = load_faiss()
    # np: without the polysemous training that FAISS would add, seconds a byte of code for a filter that is not used here.
    name = CODES.get(code) or (f"PQ{int(code[2:])}np" if code.startswith("pq") and code[2:].isdigit() else None)
    if name is None or (code.startswith("pq") and (int(code[2:]) == 0 or sample.shape[1] % int(code[2:]))):
        raise errors.InvalidInputError(
            "first-stage code", got=repr(code), expected=f"{', '.join(CODES)} or pqM where M divides the dimension of its vectors"
        )
    index = faiss.index_factory(sample.shape[1], f"IVF{nlist},{name}", faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1  # small corpora are no mistake
    if code.startswith("pq") and len(sample) < 256:
        raise errors.InvalidInputError(
            "product quantisation needs at least 256 documents", got=len(sample), fix="use sq8 or flat for a corpus this small"
        )
    index.train(sample)
    return index
