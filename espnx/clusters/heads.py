"""Heads: the middles of small groups of vectors, by hierarchical balanced clustering (SPANN,
section 3.2.1), and what splits a list that is too long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..ops.quantise import fit_clusters, load_faiss

_BRANCHES = 32  # SPTAG's BKTKmeansK
_LEAF_VECTORS = 1024  # that are clustered at once
_ROUNDS = 10
#: Fewer take less time than other threads take to wake up: on cores that others use, too, a hundred
#: times as long.
_ALONE_DISTANCES = 1 << 15


def choose_heads(vectors: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Middles of about `count` groups of vectors.

    Vectors are divided by k-means, and what is divided again gets heads by how many vectors it has:
    that is what keeps groups alike in size. Heads come in the order of that tree, so that those
    of one branch have successive numbers.

    Args:
        vectors: float32 [m, dim], m >= count >= 1.

    Returns:
        float32 [heads, dim], at most `count`: groups that got no vector, as of vectors that are all
        alike, have none.
    """
    found: list[np.ndarray] = []
    waiting = [(np.arange(len(vectors)), count)]
    while waiting:
        rows, wanted = waiting.pop()
        if wanted == 1:
            found.append(vectors[rows].mean(axis=0, dtype=np.float64)[None])
            continue
        is_leaf = len(rows) <= _LEAF_VECTORS or wanted <= _BRANCHES
        branches = wanted if is_leaf else _BRANCHES
        with _suited(len(rows) * branches):
            middles = fit_clusters(
                vectors[rows], branches, is_spherical=False, iterations=_ROUNDS, seed=seed
            )
            of = nearest_middle(vectors[rows], middles)
        counts = np.bincount(of, minlength=len(middles))
        if is_leaf or counts.max() == len(rows):
            found.append(middles[counts > 0])
            continue
        parts = [rows[of == each] for each in np.flatnonzero(counts)]
        shares = _shared_out(wanted, np.array([len(part) for part in parts]))
        waiting += reversed(list(zip(parts, shares.tolist(), strict=True)))
    return np.ascontiguousarray(np.concatenate(found), np.float32)


@contextmanager
def _suited(n_distances: int) -> Iterator[None]:
    """Has FAISS work on so few distances with one thread."""
    if n_distances >= _ALONE_DISTANCES:
        yield
        return
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _shared_out(total: int, sizes: np.ndarray) -> np.ndarray:
    """Divides a total among parts by their sizes: each gets 1 or more, at most its size."""
    exact = total * sizes / sizes.sum()
    shares = np.floor(exact).astype(np.int64)
    rest = total - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:rest]] += 1
    return np.clip(shares, 1, sizes)


def nearest_middle(vectors: np.ndarray, middles: np.ndarray) -> np.ndarray:
    """int64 [m]: the nearest of each."""
    index = flat_index(middles)
    found: np.ndarray = index.search(np.ascontiguousarray(vectors, np.float32), 1)[1][:, 0]
    return found


def flat_index(vectors: np.ndarray) -> Any:
    """FAISS's exact index by squared distance."""
    index = load_faiss().IndexFlatL2(vectors.shape[1])
    index.add(np.ascontiguousarray(vectors, np.float32))
    return index


def split(vectors: np.ndarray, most: int, seed: int) -> list[np.ndarray]:
    """Groups of near vectors, of at most `most` each: places int64 in `vectors`, float32 [m,
    dim]."""
    found: list[np.ndarray] = []
    waiting = [np.arange(len(vectors))]
    while waiting:
        rows = waiting.pop()
        if len(rows) <= most:
            found.append(rows)
            continue
        count = -(-len(rows) // most)
        heads = choose_heads(vectors[rows], count, seed)
        with _suited(len(rows) * len(heads)):
            of = nearest_middle(vectors[rows], heads)
        counts = np.bincount(of)
        if counts.max() == len(rows):  # they are alike
            found += np.array_split(rows, count)
            continue
        waiting += [rows[of == each] for each in np.flatnonzero(counts)[::-1]]
    return found
