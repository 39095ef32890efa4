"""Small parts of a store, whose first-stage vectors are looked at one by one in memory, and what
stages that search their parts one beside the other share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...graph.filters import RowFilter
from .interface import Allowed, Candidates
from .ties import top


class FlatPart:
    """A small part: vectors in memory.

    Args:
        vectors: [n, dim], of the records from `first_number` on.

    Attributes:
        wide: the same, float32.
    """

    def __init__(self, first_number: int, vectors: np.ndarray):
        self.first_number, self.count = first_number, len(vectors)
        self._stored = vectors
        self.wide = vectors.astype(np.float32)

    @property
    def memory_bytes(self) -> int:
        """What it keeps in memory."""
        return self._stored.nbytes + self.wide.nbytes

    def search(
        self, queries: np.ndarray, candidates: int, allowed: Allowed | None
    ) -> list[Candidates]:
        """The best of each query, exactly."""
        rows = (
            np.arange(self.count)
            if allowed is None
            else rows_allowed(allowed, self.first_number, self.count).rows()
        )
        scores = queries @ self.wide[rows].T
        return [top(rows + self.first_number, each, candidates) for each in scores]

    def all_vectors(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(rows, their vectors as stored), in pieces, by row."""
        yield np.arange(self.count), self._stored

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        return self._stored[rows]

    def close(self) -> None: ...

    def __enter__(self) -> FlatPart:
        return self

    def __exit__(self, *_: object) -> None: ...


def rows_allowed(allowed: Allowed, first_number: int, count: int) -> RowFilter:
    """The filter of a part's rows. Parts begin at multiples of 64 records, so at whole bytes."""
    first = first_number >> 3
    mask = np.unpackbits(
        allowed.bitmap[first : first + -(-count // 8)], count=count, bitorder="little"
    ).astype(bool)
    padded = np.zeros(count, bool)
    padded[: len(mask)] = mask
    return RowFilter.of(padded)
