"""Divides vectors among clusters, in files: those of a cluster lie together, in the order of the
input."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...ops.centroids import distances_to_means
from ..bounded.partition import take_nearest
from ..bounded.work import read_array

HOMES, ROWS, VECTORS, COUNTS = "homes", "rows", "vectors", "counts"
_PRODUCTS = 2 << 20
_BLOCK_ROWS = 8192

#: Vectors of the input as they are stored, [m, dim] at a time, with the number of the first; begins
#: anew each time it is called.
Blocks = Callable[[], Iterable[tuple[int, np.ndarray]]]


@dataclass(frozen=True, eq=False)
class Division:
    """Vectors of clusters, in a folder.

    Attributes:
        folder: with the files of `divide`. counts: int64 [clusters], of the vectors of each.
        dim, dtype: of the vectors.
    """

    folder: Path
    counts: np.ndarray
    dim: int
    dtype: np.dtype

    def rows(self, cluster: int, first: int = 0, count: int | None = None) -> np.ndarray:
        """int64, ascending: of a cluster, all or `count` from the place `first` on."""
        begin = int(self.counts[:cluster].sum()) + first
        count = int(self.counts[cluster]) - first if count is None else count
        return read_array(self.folder / ROWS, np.int64, None, begin, count)

    def vectors(self, cluster: int, first: int = 0, count: int | None = None) -> np.ndarray:
        """[m, dim]: the same rows' vectors."""
        begin = int(self.counts[:cluster].sum()) + first
        count = int(self.counts[cluster]) - first if count is None else count
        return read_array(self.folder / VECTORS, self.dtype, self.dim, begin, count)

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows and vectors, cluster by cluster, some thousands at a time."""
        for cluster, n in enumerate(self.counts.tolist()):
            for first in range(0, n, _BLOCK_ROWS):
                count = min(_BLOCK_ROWS, n - first)
                yield self.rows(cluster, first, count), self.vectors(cluster, first, count)


def divide(
    blocks: Blocks, centres: np.ndarray, max_points: int, folder: Path, dtype: np.dtype
) -> None:
    """Writes the files of a `Division`: each vector goes to the nearest centre that has room.

    Args:
        centres: float32 [clusters, dim].
        max_points: vectors of a cluster; times the clusters, as many as there are, or more.
        folder: for `COUNTS` (int64 [clusters]), `ROWS` (int64), `VECTORS`.
    """
    room = np.full(len(centres), max_points)
    with (folder / HOMES).open("wb") as file:
        for _, vectors in blocks():
            file.write(_homes(vectors.astype(np.float32, copy=False), centres, room).data)
    counts = max_points - room
    place = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])[:-1]
    with (
        (folder / HOMES).open("rb") as homes,
        (folder / ROWS).open("wb") as rows_file,
        (folder / VECTORS).open("wb") as vectors_file,
    ):
        for first, vectors in blocks():
            home = np.fromfile(homes, np.uint32, len(vectors))
            order = np.argsort(home, kind="stable")
            here, begin = np.unique(home[order], return_index=True)
            for cluster, part in zip(here.tolist(), np.split(order, begin[1:]), strict=True):
                at = int(place[cluster])
                _write_at(rows_file.fileno(), at, (first + part).astype(np.int64))
                _write_at(vectors_file.fileno(), at, vectors[part].astype(dtype, copy=False))
                place[cluster] += len(part)
    (folder / HOMES).unlink()
    counts.astype(np.int64).tofile(folder / COUNTS)


def _homes(vectors: np.ndarray, centres: np.ndarray, room: np.ndarray) -> np.ndarray:
    """uint32 [m]; `room`, of each centre, becomes less."""
    at_once = max(1, _PRODUCTS // len(centres))
    found = [
        take_nearest(distances_to_means(vectors[first : first + at_once], centres).copy(), room)
        for first in range(0, len(vectors), at_once)
    ]
    return np.concatenate(found) if found else np.empty(0, np.uint32)


def _write_at(descriptor: int, place: int, values: np.ndarray) -> None:
    """Rows of an array from row `place` of a file on."""
    left = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    at = place * (left.size // len(values))
    while left.size:
        done = os.pwrite(descriptor, left.data, at)
        left, at = left[done:], at + done
