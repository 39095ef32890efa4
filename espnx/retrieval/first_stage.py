"""The first stage: an inverted file over CLS vectors (FAISS), searched exactly in two steps.

ESPN (section 4.2) reads ahead the candidates known after the delta nearest lists while the remaining ones are scanned. Scanning the
lists in two calls gives the very result of one call: every list is scanned once, with the same distances, and the two top-k merge.
`index.nprobe` is never changed, so that any number of threads may search.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .. import errors

#: FAISS factory strings of the codes a list can hold. ``flat`` is exact; ``sq8`` loses a few tenths of a point of recall for a quarter of
#: the memory.
CODES = {"flat": "Flat", "sq8": "SQ8"}


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


class FirstStage(Protocol):
    """What the searcher asks of a candidate generator."""

    def start(self, cls: np.ndarray, candidates: int, nprobe: int, prefetch_step: float) -> FirstStageQuery:
        """Begins a query. `cls`: float32 [d_cls]."""


class FirstStageQuery(Protocol):
    """One query under way. Results are (record numbers int64 [m], scores float32 [m]), best first, m <= candidates."""

    def partial(self) -> tuple[np.ndarray, np.ndarray]: ...

    def complete(self) -> tuple[np.ndarray, np.ndarray]: ...


def top(numbers: np.ndarray, scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` best by (score, then lower number), so that ties never depend on scan order."""
    order = np.lexsort((numbers, -scores))[:count]
    return numbers[order], scores[order]


@dataclass
class IvfQuery:
    """See `FirstStageQuery`. `complete` continues where `partial` stopped; without `partial` it scans everything at once."""

    stage: IvfFirstStage
    cls: np.ndarray
    candidates: int
    lists: np.ndarray
    distances: np.ndarray
    delta: int
    found: tuple[np.ndarray, np.ndarray] | None = None

    def partial(self) -> tuple[np.ndarray, np.ndarray]:
        self.found = self.stage.scan(self.cls, self.lists[: self.delta], self.distances[: self.delta], self.candidates)
        return self.found

    def complete(self) -> tuple[np.ndarray, np.ndarray]:
        begin = 0 if self.found is None else self.delta
        numbers, scores = self.stage.scan(self.cls, self.lists[begin:], self.distances[begin:], self.candidates)
        if self.found is not None:
            numbers, scores = np.concatenate([self.found[0], numbers]), np.concatenate([self.found[1], scores])
        return top(numbers, scores, self.candidates)


class IvfFirstStage:
    """FAISS IVF with inner product. `index` is a trained faiss.IndexIVF, or None for an empty corpus."""

    def __init__(self, index: Any):
        self.index = index
        self._faiss = load_faiss()

    @property
    def nlist(self) -> int:
        return 0 if self.index is None else self.index.nlist

    def start(self, cls: np.ndarray, candidates: int, nprobe: int, prefetch_step: float) -> IvfQuery:
        if self.index is None:
            return IvfQuery(self, cls, candidates, np.empty(0, "i8"), np.empty(0, "f4"), 0)
        query = np.ascontiguousarray(cls, dtype=np.float32).reshape(1, -1)
        distances, lists = self.index.quantizer.search(query, min(nprobe, self.nlist))
        delta = min(len(lists[0]), max(1, round(prefetch_step * len(lists[0]))))
        return IvfQuery(self, query, candidates, lists[0], distances[0], delta)

    def scan(self, query: np.ndarray, lists: np.ndarray, distances: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Top `count` of the given lists. Releases the GIL; safe from many threads."""
        if not len(lists) or count == 0:
            return np.empty(0, "i8"), np.empty(0, "f4")
        faiss, pointer = self._faiss, self._faiss.swig_ptr
        lists, distances = np.ascontiguousarray(lists, "i8"), np.ascontiguousarray(distances, "f4")
        scores, numbers = np.empty((1, count), "f4"), np.empty((1, count), "i8")
        # The _c form: the Python wrapper would insist on index.nprobe lists, and changing that is not thread-safe.
        parameters = faiss.SearchParametersIVF(nprobe=len(lists))
        self.index.search_preassigned_c(
            1, pointer(query), count, pointer(lists), pointer(distances), pointer(scores), pointer(numbers), False, parameters
        )
        valid = numbers[0] >= 0
        return top(numbers[0][valid], scores[0][valid], count)


def choose_nlist(records: int) -> int:
    """4 sqrt(n), FAISS's own rule of thumb, bounded so that every centroid has the 39 training points FAISS asks for."""
    return max(1, min(round(4 * records**0.5), records // 39))


def train_index(sample: np.ndarray, nlist: int, code: str) -> Any:
    """A trained, empty IVF index over unit-free inner product. Seeded: the same sample gives the same index.

    Args:
        sample: float32 [m, d_cls], m >= 1.
        code: ``flat``, ``sq8`` or ``pqM`` (M bytes a vector; M divides d_cls).

    Raises:
        InvalidInputError: unknown code.
    """
    faiss = load_faiss()
    # np: without the polysemous training that FAISS would add, seconds a byte of code for a filter that is not used here.
    name = CODES.get(code) or (f"PQ{int(code[2:])}np" if code.startswith("pq") and code[2:].isdigit() else None)
    if name is None or (code.startswith("pq") and (int(code[2:]) == 0 or sample.shape[1] % int(code[2:]))):
        raise errors.InvalidInputError("first-stage code", got=repr(code), expected="flat, sq8 or pqM where M divides the CLS dimension")
    index = faiss.index_factory(sample.shape[1], f"IVF{nlist},{name}", faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1  # small corpora are no mistake
    if code.startswith("pq") and len(sample) < 256:
        raise errors.InvalidInputError(
            "product quantisation needs at least 256 documents", got=len(sample), fix="use sq8 or flat for a corpus this small"
        )
    index.train(sample)
    return index
