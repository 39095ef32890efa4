"""Divides vectors among clusters, in files: those of a cluster lie together, in the order of the
input."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...ops.centroids import distances_to_means
from ..bounded.partition import NOBODY, take_nearest
from ..bounded.work import read_array

HOMES, GUESTS, COUNTS = "homes", "guests", "counts"
ROWS, IS_COPY, VECTORS = "rows", "is_copy", "vectors"
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

    def _is_copy(self, cluster: int, first: int, count: int) -> np.ndarray:
        """bool [count]: whether each is a copy of one that is in another cluster."""
        begin = int(self.counts[:cluster].sum()) + first
        return read_array(self.folder / IS_COPY, np.bool_, None, begin, count)

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows and vectors, each once, cluster by cluster, some thousands at a time."""
        for cluster, n in enumerate(self.counts.tolist()):
            for first in range(0, n, _BLOCK_ROWS):
                count = min(_BLOCK_ROWS, n - first)
                own = ~self._is_copy(cluster, first, count)
                yield (
                    self.rows(cluster, first, count)[own],
                    self.vectors(cluster, first, count)[own],
                )


def divide(
    blocks: Blocks,
    centres: np.ndarray,
    max_points: int,
    border: float,
    folder: Path,
    dtype: np.dtype,
) -> None:
    """Writes the files of a `Division`: each vector goes to the nearest centre that has room, and
    one at a border to its second centre too, if that has room left when all have theirs.

    Args:
        centres: float32 [clusters, dim].
        max_points: vectors of a cluster; times the clusters, as many as there are, or more.
        border: of `border_of`.
        folder: for `COUNTS` (int64 [clusters]), `ROWS` (int64), `IS_COPY` (bool), `VECTORS`.
    """
    room, kinds = np.full(len(centres), max_points), [HOMES]
    _write_homes(blocks, folder / HOMES, lambda vectors, _: homes_of(vectors, centres, room))
    if border >= 0 and len(centres) > 1:
        kinds.append(GUESTS)
        with (folder / HOMES).open("rb") as homes:
            _write_homes(
                blocks,
                folder / GUESTS,
                lambda vectors, count: guests_of(
                    vectors, centres, np.fromfile(homes, np.uint32, count), room, border
                ),
            )
    counts = max_points - room
    place = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])[:-1]
    with ExitStack() as stack:
        files = [stack.enter_context((folder / kind).open("rb")) for kind in kinds]
        rows_file, copies_file, vectors_file = (
            stack.enter_context((folder / name).open("wb")).fileno()
            for name in (ROWS, IS_COPY, VECTORS)
        )
        for first, vectors in blocks():
            m = len(vectors)
            home = np.concatenate([np.fromfile(each, np.uint32, m) for each in files])
            which = np.tile(np.arange(m), len(files))
            order = np.lexsort((which, home))
            order = order[home[order] != NOBODY]
            here, begin = np.unique(home[order], return_index=True)
            for cluster, chosen in zip(here.tolist(), np.split(order, begin[1:]), strict=True):
                at, part = int(place[cluster]), which[chosen]
                _write_at(rows_file, at, (first + part).astype(np.int64))
                _write_at(copies_file, at, chosen >= m)
                _write_at(vectors_file, at, vectors[part].astype(dtype, copy=False))
                place[cluster] += len(part)
    for kind in kinds:
        (folder / kind).unlink()
    counts.astype(np.int64).tofile(folder / COUNTS)


def border_of(sample: np.ndarray, centres: np.ndarray, share: float) -> float:
    """Share by which the squared distance to the second centre may exceed that to the first, so
    that so many vectors like those of a sample, float32 [m, dim], are at a border; negative: none
    is."""
    if not share or len(centres) < 2:
        return -1.0
    if share >= 1:
        return float("inf")
    found = [
        _beyond(np.sort(far, axis=1), np.zeros(len(far), np.int64), np.ones(len(far), np.int64))
        for far in (_squares(part, centres) for part in _pieces(sample, centres))
    ]
    return float(np.quantile(np.concatenate(found), share))


def _write_homes(
    blocks: Blocks, path: Path, homes_of: Callable[[np.ndarray, int], np.ndarray]
) -> None:
    with path.open("wb") as file:
        for _, vectors in blocks():
            wide = vectors.astype(np.float32, copy=False)
            file.write(homes_of(wide, len(wide)).data)


def _pieces(vectors: np.ndarray, centres: np.ndarray) -> Iterator[np.ndarray]:
    at_once = max(1, _PRODUCTS // len(centres))
    for first in range(0, len(vectors), at_once):
        yield vectors[first : first + at_once]


def homes_of(vectors: np.ndarray, centres: np.ndarray, room: np.ndarray) -> np.ndarray:
    """uint32 [m]: the clusters that some vectors, float32 [m, dim], go to; `room`, of each centre,
    becomes less."""
    found = [
        take_nearest(distances_to_means(part, centres).copy(), room)
        for part in _pieces(vectors, centres)
    ]
    return np.concatenate(found) if found else np.empty(0, np.uint32)


def guests_of(
    vectors: np.ndarray, centres: np.ndarray, homes: np.ndarray, room: np.ndarray, border: float
) -> np.ndarray:
    """uint32 [m]: the clusters that they are copied into; `NOBODY` where a vector is at no border,
    or its second centre has no room."""
    found, done = [np.empty(0, np.uint32)], 0
    for part in _pieces(vectors, centres):
        far, each = _squares(part, centres), np.arange(len(part))
        home = homes[done : done + len(part)].astype(np.int64)
        others = far.copy()
        others[each, home] = np.inf
        second = others.argmin(axis=1)
        is_at_border = _beyond(far, home, second) <= border
        wanted = np.full_like(far, np.inf)
        wanted[each[is_at_border], second[is_at_border]] = 0
        found.append(take_nearest(wanted, room))
        done += len(part)
    return np.concatenate(found)


def _squares(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """float32 [m, clusters]: squared distances."""
    own = np.square(vectors.astype(np.float64)).sum(axis=1, keepdims=True)
    found: np.ndarray = (distances_to_means(vectors, centres) + own).astype(np.float32)
    return np.maximum(found, 0)


def _beyond(far: np.ndarray, home: np.ndarray, second: np.ndarray) -> np.ndarray:
    """float64 [m]: how much farther the second centre is, as a share."""
    each, least = np.arange(len(far)), np.finfo(np.float32).tiny
    near, next_near = (far[each, at].astype(np.float64) for at in (home, second))
    found: np.ndarray = next_near / np.maximum(near, least) - 1
    return found


def _write_at(descriptor: int, place: int, values: np.ndarray) -> None:
    """Rows of an array from row `place` of a file on."""
    left = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    at = place * (left.size // len(values))
    while left.size:
        done = os.pwrite(descriptor, left.data, at)
        left, at = left[done:], at + done
