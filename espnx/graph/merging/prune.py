"""Robust pruning (DiskANN, algorithm 2) of many nodes' candidates at a time; the build's own is in
csrc/graph/build."""

from __future__ import annotations

import numpy as np
import torch

#: Candidates of a node, the nearest.
POOL_MOST = 750
_ALPHA_STEP = 1.2
_PAIRS_AT_ONCE = 1 << 24
_MOST = torch.finfo(torch.float32).max


def robust_prune(
    targets: np.ndarray, pool: np.ndarray, vectors: np.ndarray, degree: int, alpha: float
) -> tuple[np.ndarray, np.ndarray]:
    """The neighbours that some nodes get of their candidates.

    A candidate is left out where a chosen one is nearer to it than the node is by the factor
    `alpha`, squared distances compared, which grows from 1; and what is free then is filled with
    the nearest that were left out.

    Args:
        targets: float32 [m, dim]: the nodes. pool: int64 [m, p]: numbers of candidates; -1: none;
            neither a node itself nor the same twice.
        vectors: float32 [m, p, dim]: theirs.

    Returns:
        int64 [m, degree]: numbers, those chosen first in front, -1 behind the last; counts,
        int64 [m].
    """
    kept = np.full((len(pool), degree), -1, np.int64)
    width = min(pool.shape[1], POOL_MOST)
    at_once = max(1, _PAIRS_AT_ONCE // max(1, width * width))
    for first in range(0, len(pool), at_once):
        part = slice(first, first + at_once)
        rank, order = _ranks(targets[part], pool[part], vectors[part], width, degree, alpha)
        places = np.argsort(rank, axis=1, kind="stable")[:, :degree]
        numbers = np.take_along_axis(pool[part], np.take_along_axis(order, places, axis=1), axis=1)
        kept[part, : numbers.shape[1]] = numbers
    return kept, (kept >= 0).sum(axis=1)


def _ranks(
    targets: np.ndarray,
    pool: np.ndarray,
    vectors: np.ndarray,
    width: int,
    degree: int,
    alpha: float,
) -> tuple[np.ndarray, np.ndarray]:
    """(rank [m, width] in which each of the nearest is taken; the places of these in the pool)"""
    there = torch.from_numpy(vectors)
    far = (there - torch.from_numpy(targets)[:, None]).square().sum(-1)
    far[torch.from_numpy(pool < 0)] = torch.inf
    far, order = torch.sort(far, dim=1, stable=True)
    far, order = far[:, :width], order[:, :width]
    # from the nodes, so that differences of large values are not lost
    there = torch.gather(there, 1, order[:, :, None].expand(-1, -1, there.shape[2]))
    there = there - torch.from_numpy(targets)[:, None]
    squares = there.square().sum(-1)
    between = squares[:, :, None] + squares[:, None] - 2 * torch.bmm(there, there.transpose(1, 2))
    occludes = far[:, None] / between.clamp(min=0)
    occludes = torch.nan_to_num(occludes, nan=_MOST, posinf=_MOST)  # a copy is reached by way of it
    occludes = torch.triu(occludes, diagonal=1)  # what is nearer than the chosen one stays
    m = len(pool)
    rows = torch.arange(m)
    is_left = far < torch.inf
    occlusion = torch.zeros_like(far)
    rank = torch.full(far.shape, 2 * width, dtype=torch.int64)
    rank += torch.arange(width)  # the nearest of what is left out come next
    rank[~is_left] = 4 * width
    count, now = torch.zeros(m, dtype=torch.int64), 1.0
    while True:
        for _ in range(width):
            may = is_left & (occlusion <= now) & (count < degree)[:, None]
            is_any = may.any(dim=1)
            if not is_any.any():
                break
            which = may.to(torch.uint8).argmax(dim=1)
            some, place = rows[is_any], which[is_any]
            rank[some, place] = count[some]
            is_left[some, place] = False
            count[some] += 1
            occlusion[some] = torch.maximum(occlusion[some], occludes[some, place])
        if now >= alpha:
            return rank.numpy(), order.numpy()
        now = min(now * _ALPHA_STEP, alpha)


def without_copies(pool: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """A pool [m, p] in which the nodes [m] themselves, and all but the first of each number, are
    -1."""
    pool = np.where(pool == nodes[:, None], -1, pool)
    order = np.argsort(pool, axis=1, kind="stable")
    ordered = np.take_along_axis(pool, order, axis=1)
    again = np.zeros(pool.shape, bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    is_copy = np.empty(pool.shape, bool)
    np.put_along_axis(is_copy, order, again, axis=1)
    return np.where(is_copy, -1, pool)
