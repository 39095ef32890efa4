"""The order of records inside a list: like beside like, so that a page holds several of those that
one query wants.

Small records (the coarse tier of a cascade) share a page with eight or ten others. A query's
candidates are the nearest of a list, not all of it, and in the order in which documents came they
lie on nearly as many pages as there are candidates. So a list is halved along the direction in
which its vectors differ most, then each half, down to cells of a few records: whatever the records'
size, pages then hold neighbours. No page is aligned to a cell, and nothing on disk says where one
begins. A file of its own: any stage that has vectors can lay its records out so.
"""

from __future__ import annotations

import numpy as np

#: Records of a cell, at most: fewer than the smallest that share a page. Inside a cell they stay as
#: they came.
CELL_RECORDS = 8
_ALIKE = 1e-6  # of their values: what remains is the rounding of a mean
_ITERATIONS = 8  # of the power method: a rough direction halves as well as an exact one


def cell_order(vectors: np.ndarray) -> np.ndarray:
    """int64 [m]: the rows of `vectors` (float32 [m, d]) in the order in which they are to lie."""
    found: list[np.ndarray] = []
    waiting = [np.arange(len(vectors))]
    while waiting:
        rows = waiting.pop()
        halves = _halves(vectors[rows]) if len(rows) > CELL_RECORDS else None
        if halves is None:
            found.append(rows)
        else:
            waiting += [rows[half] for half in reversed(halves)]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _halves(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Rows by the half they belong to, each ascending, the first a whole number of cells; None
    where all vectors are alike."""
    centred = vectors - vectors.mean(axis=0)
    spread = np.abs(centred).max()
    if spread <= _ALIKE * np.abs(vectors).max():
        return None
    centred /= spread  # neither overflows nor vanishes when it is squared
    direction = centred[np.argmax(np.einsum("md,md->m", centred, centred))]
    for _ in range(_ITERATIONS):
        direction = centred.T @ (centred @ direction)
        direction /= np.linalg.norm(direction)
    order = np.argsort(centred @ direction, kind="stable")
    middle = max(1, round(len(order) / 2 / CELL_RECORDS)) * CELL_RECORDS
    return np.sort(order[:middle]), np.sort(order[middle:])
