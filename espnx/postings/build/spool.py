"""Runs: what a build has read so far, cut into parts that were sorted in memory, each in a file of
its own until they are merged.

A run holds the postings of consecutive records, term after term, the terms in the order of their
hashes. Runs are cut by hash into buckets, so that a merge holds one part of the terms of all runs
at a time, and memory does not grow with the corpus.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...storage import FileHandle, NativeEngine
from ...storage.files import StreamWriter, read_range
from ..stored.terms import hashes_of

_BUCKET_BITS = 10
_BUCKETS = 1 << _BUCKET_BITS


@dataclass(frozen=True, eq=False)
class TermPostings:
    """Postings of some terms, ordered by (hash, bytes).

    Attributes:
        names: the bytes of each term.
        hashes: uint64 [n].
        counts: int64 [n]: postings of each.
        records: uint32 [sum of counts]: ascending within a term.
        values: uint32 [sum of counts]: counts, or the bits of float32 weights.
    """

    names: list[bytes]
    hashes: np.ndarray
    counts: np.ndarray
    records: np.ndarray
    values: np.ndarray


def sort_postings(
    names: list[bytes], ids: np.ndarray, records: np.ndarray, weights: np.ndarray | None
) -> TermPostings:
    """Sorts what was read of some records.

    Args:
        names: of the terms that ids count.
        ids: uint32 [n]: of each occurrence; with `weights`, of each posting.
        records: uint32 [n]: ascending.
        weights: float32 [n]; None: occurrences are counted.
    """
    hashes = hashes_of(names)
    order = (
        sorted(range(len(names)), key=lambda i: (int(hashes[i]), names[i]))
        if _collide(hashes)
        else np.argsort(hashes).tolist()
    )
    rank = np.empty(len(names), np.uint64)
    rank[order] = np.arange(len(names), dtype=np.uint64)
    key = rank[ids] << np.uint64(32) | records
    if weights is None:
        key.sort()
        first = np.flatnonzero(
            np.concatenate([np.ones(min(1, key.size), bool), key[1:] != key[:-1]])
        )
        values = np.diff(first, append=key.size).astype(np.uint32)
        key = key[first]
    else:
        places = np.argsort(key, kind="stable")
        key, values = key[places], weights[places].view(np.uint32)
    counts = np.bincount((key >> np.uint64(32)).astype(np.int64), minlength=len(names))
    records = (key & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    used = counts > 0  # a term whose every weight was zero has no posting
    kept = [names[i] for i, is_used in zip(order, used.tolist(), strict=True) if is_used]
    return TermPostings(
        kept, hashes[order][used] if len(order) else hashes, counts[used], records, values
    )


def _collide(hashes: np.ndarray) -> bool:
    return len(np.unique(hashes)) < len(hashes)


class Run:
    """Sorted postings in a file, term after term: hashes, counts, lengths of names, names, records,
    values.

    Args:
        hashes: uint64 [n]: of its terms, ascending.
        counts, lengths: uint32 [n]: postings of each, and bytes of its name.
    """

    def __init__(
        self,
        engine: NativeEngine,
        path: str,
        hashes: np.ndarray,
        counts: np.ndarray,
        lengths: np.ndarray,
    ):
        self._engine, self.path = engine, path
        self.n_postings, names_bytes = (
            int(counts.sum(dtype=np.int64)),
            int(lengths.sum(dtype=np.int64)),
        )
        sizes = [
            hashes.nbytes,
            counts.nbytes,
            lengths.nbytes,
            names_bytes,
            4 * self.n_postings,
            4 * self.n_postings,
        ]
        *self._begin, self.size_bytes = np.cumsum([0, *sizes]).tolist()
        buckets = (hashes >> np.uint64(64 - _BUCKET_BITS)).astype(np.int64)
        self._terms = np.searchsorted(buckets, np.arange(_BUCKETS + 1))
        self._postings = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])[
            self._terms
        ]
        self._names = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])[
            self._terms
        ]

    @classmethod
    def write(cls, engine: NativeEngine, path: str, postings: TermPostings) -> tuple[Run, int]:
        """A new run, on the device; and the CRC32C of its file. Raises what a `StreamWriter`
        raises."""
        lengths = np.array([len(name) for name in postings.names], np.uint32)
        counts = postings.counts.astype(np.uint32)
        with StreamWriter(engine, path) as writer:
            names = np.frombuffer(b"".join(postings.names), np.uint8)
            for array in (
                postings.hashes,
                counts,
                lengths,
                names,
                postings.records,
                postings.values,
            ):
                writer.write(np.ascontiguousarray(array).view(np.uint8))
            writer.sync()
            return cls(engine, path, postings.hashes, counts, lengths), writer.crc32c

    @classmethod
    def open(cls, engine: NativeEngine, path: str, n_terms: int) -> Run:
        """One that was written. Raises ReadError, TruncatedFileError."""
        file = engine.open(path)
        try:
            head = read_range(engine, file, 0, 16 * n_terms)
        finally:
            engine.close_file(file)
        hashes = head[: 8 * n_terms].view(np.uint64)
        return cls(
            engine,
            path,
            hashes,
            *(head[begin * n_terms : (begin + 4) * n_terms].view(np.uint32) for begin in (8, 12)),
        )

    @property
    def bucket_postings(self) -> np.ndarray:
        """int64 [buckets]."""
        return np.diff(self._postings)

    def read(self, file: FileHandle, first: int, end: int) -> TermPostings:
        """The postings of buckets [first, end)."""

        def part(which: int, dtype: type, begin: int, stop: int) -> np.ndarray:
            size = np.dtype(dtype).itemsize
            return read_range(
                self._engine, file, self._begin[which] + begin * size, (stop - begin) * size
            ).view(dtype)

        terms = int(self._terms[first]), int(self._terms[end])
        postings = int(self._postings[first]), int(self._postings[end])
        lengths = part(2, np.uint32, *terms)
        raw = part(3, np.uint8, int(self._names[first]), int(self._names[end])).tobytes()
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        names = [
            raw[stop - length : stop] for stop, length in zip(ends, lengths.tolist(), strict=True)
        ]
        return TermPostings(
            names,
            part(0, np.uint64, *terms),
            part(1, np.uint32, *terms).astype(np.int64),
            part(4, np.uint32, *postings),
            part(5, np.uint32, *postings),
        )


def merge_runs(
    engine: NativeEngine, runs: list[Run], budget_postings: int
) -> Iterator[TermPostings]:
    """The postings of all runs, some terms at a time: about `budget_postings` of them, more where
    one bucket has more. Runs are of ascending records."""
    files = [engine.open(run.path) for run in runs]
    try:
        weight = sum((run.bucket_postings for run in runs), np.zeros(_BUCKETS, np.int64))
        first = 0
        while first < _BUCKETS:
            end, total = first + 1, int(weight[first])
            while end < _BUCKETS and total + int(weight[end]) <= budget_postings:
                total += int(weight[end])
                end += 1
            if total:
                yield join(
                    [run.read(file, first, end) for run, file in zip(runs, files, strict=True)]
                )
            first = end
    finally:
        for file in files:
            engine.close_file(file)


def join(parts: list[TermPostings]) -> TermPostings:
    """One of several, of ascending records. Terms of the same hash stay apart."""
    if len(parts) == 1:
        return parts[0]
    names = [name for part in parts for name in part.names]
    hashes, counts = (
        np.concatenate([part.hashes for part in parts]),
        np.concatenate([part.counts for part in parts]),
    )
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    same_hash = ordered[1:] == ordered[:-1]
    same = _same(names, order)
    if (same_hash & ~same).any():  # several terms of one hash: put those of one name together
        order = np.array(
            sorted(range(len(names)), key=lambda i: (int(hashes[i]), names[i], i)), np.int64
        )
        ordered = hashes[order]
        same = _same(names, order)
    begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(order)), bool), ~same]))
    # where the postings of each piece begin
    source = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])[order]
    sizes = counts[order]
    ends = np.cumsum(sizes)
    places = np.arange(int(sizes.sum())) + np.repeat(source - (ends - sizes), sizes)
    records, values = (
        np.concatenate([part.records for part in parts])[places],
        np.concatenate([part.values for part in parts])[places],
    )
    merged = np.add.reduceat(sizes, begins) if len(begins) else sizes
    return TermPostings(
        [names[i] for i in order[begins].tolist()], ordered[begins], merged, records, values
    )


def _same(names: list[bytes], order: np.ndarray) -> np.ndarray:
    """bool [n - 1]: whether a name is the one before it, in that order."""
    ordered = [names[i] for i in order.tolist()]
    return np.fromiter((a == b for a, b in pairwise(ordered)), bool, max(0, len(ordered) - 1))


def remove_run(run: Run) -> None:
    """Its file."""
    os.unlink(run.path)
