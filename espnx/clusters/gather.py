"""Gathers the vectors of lists, in bounded memory: which lists each vector is in is known block by
block; of as many lists as memory holds the vectors are then picked from one pass over the input.

Lists lie in a work file as they are gathered, before it is known which of them share a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from ..device.clusters.write import ClusterStore
from ..graph.vectors import Vectors
from ..storage import Plan
from ..storage.files import StreamWriter, read_windows
from .closure import Closure
from .coding import ListCoding, checked_blocks
from .heads import split

CLOSURE_WORK, LISTS_WORK = "closure.work", "lists.work"
#: Of lists that are read from the work file at a time.
_READ_BYTES = 8 << 20
#: Vectors that are split at a time: what a list has beyond begins another.
_SPLIT_BYTES = 16 << 20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Assigned:
    """Which lists vectors are in, in a work file: int32 [n, replicas], -1 behind the last.

    Attributes:
        counts: int64 [heads]: vectors of each list.
    """

    path: str
    replicas: int
    counts: np.ndarray

    def blocks(self, store: ClusterStore, sizes: Iterator[int]) -> Iterator[np.ndarray]:
        """int32 [size, replicas] for each of the sizes, in order."""
        windows = read_windows(store.engine, self.path)
        held = np.empty(0, np.uint8)
        for size in sizes:
            wanted = 4 * self.replicas * size
            parts, have = [held], len(held)
            while have < wanted:
                parts.append(next(windows).copy())
                have += len(parts[-1])
            whole = np.concatenate(parts)
            yield whole[:wanted].view(np.int32).reshape(size, self.replicas)
            held = whole[wanted:]


def assign(
    store: ClusterStore,
    source: Vectors,
    coding: ListCoding,
    heads: np.ndarray,
    replicas: int,
    progress: Progress,
) -> Assigned:
    """Finds the lists of all vectors. Raises as `checked_blocks`, WriteError, DiskFullError."""
    counts = np.zeros(len(heads), np.int64)
    closure = Closure(heads, replicas)
    path = store.path(CLOSURE_WORK)
    with StreamWriter(store.engine, path) as writer:
        for first, rows in checked_blocks(source, coding):
            lists = closure.lists_of(coding.wide(rows))
            counts += np.bincount(lists[lists >= 0], minlength=len(heads))
            writer.write(np.ascontiguousarray(lists).view(np.uint8).ravel())
            progress("closure", first + len(rows), source.n)
        writer.sync()
    return Assigned(path, replicas, counts)


@dataclass(eq=False)
class Gathered:
    """Lists in the work file, one behind the other.

    Attributes:
        path: of the file. entry: of its entries.
        heads: float32 [dim] each. n_vectors: of each.
        n_split: lists that became several. passes: over the vectors.
    """

    path: str
    entry: np.dtype
    heads: list[np.ndarray] = field(default_factory=list)
    n_vectors: list[int] = field(default_factory=list)
    n_split: int = 0
    passes: int = 0

    @property
    def size_bytes(self) -> np.ndarray:
        """int64 [lists]."""
        return np.array(self.n_vectors, np.int64) * self.entry.itemsize

    def reader(self, store: ClusterStore, order: np.ndarray) -> Iterator[np.ndarray]:
        """The bytes of lists, uint8 each, read many at a time, in the order of these numbers."""
        size_bytes = self.size_bytes
        begin = np.cumsum(size_bytes) - size_bytes
        file = store.engine.open(self.path)
        try:
            group = np.cumsum(size_bytes[order]) // _READ_BYTES
            for some in np.split(order, np.flatnonzero(np.diff(group)) + 1):
                future = store.engine.read(
                    Plan.of(file, begin[some].tolist(), size_bytes[some].tolist())
                )
                memory, places = future.wait().numpy(), future.position_bytes.tolist()
                for place, size in zip(places, size_bytes[some].tolist(), strict=True):
                    yield memory[place : place + size]
        finally:
            store.engine.close_file(file)


class _Gatherer:
    """One gathering. Lists that are too large for memory are gathered, and split, in pieces."""

    def __init__(
        self,
        store: ClusterStore,
        source: Vectors,
        coding: ListCoding,
        assigned: Assigned,
        heads: np.ndarray,
        list_bytes: int,
        seed: int,
    ):
        self._store, self._source, self._coding = store, source, coding
        self._assigned, self._heads, self._seed = assigned, heads, seed
        self._entry = coding.entry
        self._most = list_bytes // self._entry.itemsize
        self._piece = max(self._most, _SPLIT_BYTES // self._entry.itemsize)
        pieces = -(-assigned.counts // self._piece)
        self._list_of = np.repeat(np.arange(len(heads)), pieces)
        self._first_piece = np.cumsum(pieces) - pieces
        number = np.arange(len(self._list_of)) - self._first_piece[self._list_of]
        self._sizes = np.minimum(self._piece, assigned.counts[self._list_of] - number * self._piece)

    def run(self, budget_bytes: int, progress: Progress) -> Gathered:
        found = Gathered(self._store.path(LISTS_WORK), self._entry)
        group = np.cumsum(self._sizes * self._entry.itemsize) // max(1, budget_bytes)
        bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(self._sizes)]
        passes = [each for each in pairwise(bounds) if each[1] > each[0]]

        def told(number: int, done: int) -> None:
            n = self._source.n
            progress("lists", number * n + done, len(passes) * n)

        with StreamWriter(self._store.engine, found.path) as writer:
            for number, (begin, end) in enumerate(passes):
                entries = self._pass(begin, end, partial(told, number))
                self._write(begin, end, entries, found, writer)
            writer.sync()
        found.passes = len(passes)
        return found

    def _pass(self, begin: int, end: int, progress: Callable[[int], None]) -> np.ndarray:
        """The entries of pieces begin..end, one after the other, in the order of rows."""
        starts = np.cumsum(self._sizes[begin:end]) - self._sizes[begin:end]
        entries = np.empty(int(self._sizes[begin:end].sum()), self._entry)
        seen = np.zeros(len(self._heads), np.int64)
        sizes: list[int] = []
        assigned = self._assigned.blocks(self._store, iter(sizes.pop, None))
        for first, rows in checked_blocks(self._source, self._coding):
            sizes.append(len(rows))
            lists = next(assigned)
            row, place = np.nonzero(lists >= 0)
            of = lists[row, place].astype(np.int64)
            order = np.argsort(of, kind="stable")
            row, of = row[order], of[order]
            beginning = np.flatnonzero(np.diff(of, prepend=-1))
            counts = np.diff(beginning, append=len(of))
            rank = np.arange(len(of)) - np.repeat(beginning, counts)
            within = seen[of] + rank
            seen[of[beginning]] += counts
            piece = self._first_piece[of] + within // self._piece
            here = (piece >= begin) & (piece < end)
            target = starts[piece[here] - begin] + within[here] % self._piece
            entries["id"][target] = first + row[here]
            chosen, inverse = np.unique(row[here], return_inverse=True)
            entries["vector"][target] = self._coding.stored(rows[chosen])[inverse]
            progress(first + len(rows))
        return entries

    def _write(
        self, begin: int, end: int, entries: np.ndarray, found: Gathered, writer: StreamWriter
    ) -> None:
        at = 0
        for piece in range(begin, end):
            held = entries[at : at + int(self._sizes[piece])]
            at += len(held)
            number = int(self._list_of[piece])
            if len(held) <= self._most and self._assigned.counts[number] == len(held):
                _keep(found, writer, held, self._heads[number])
                continue
            vectors = self._coding.wide(self._coding.restored(held["vector"]))
            for rows in split(vectors, self._most, self._seed):
                _keep(found, writer, held[rows], vectors[rows].mean(axis=0, dtype=np.float64))
            found.n_split += int(piece == self._first_piece[number])


def _keep(found: Gathered, writer: StreamWriter, entries: np.ndarray, head: np.ndarray) -> None:
    found.heads.append(np.asarray(head, np.float32))
    found.n_vectors.append(len(entries))
    writer.write(np.ascontiguousarray(entries).view(np.uint8).ravel())


def gather(
    store: ClusterStore,
    source: Vectors,
    coding: ListCoding,
    assigned: Assigned,
    heads: np.ndarray,
    *,
    list_bytes: int,
    seed: int,
    budget_bytes: int,
    progress: Progress,
) -> Gathered:
    """Gathers all lists that have vectors; one that is longer than `list_bytes` becomes several,
    each with a head of its own.

    Args:
        budget_bytes: of entries that are in memory at a time.

    Raises as `checked_blocks`, WriteError, DiskFullError.
    """
    gatherer = _Gatherer(store, source, coding, assigned, heads, list_bytes, seed)
    return gatherer.run(budget_bytes, progress)
