"""Impacts: weights in one byte each, and lists in layers, the heaviest postings first.

A file of its own: what is lossy about vectors is here, and nothing of how lists are written.
"""

from __future__ import annotations

import numpy as np

from ..stored.dictionary import RANKS
from ..stored.layout import LIST_ALIGN_BYTES
from .spool import TermPostings

STEPS = 255
#: Lists of so many postings have a first layer, of this share of them, and of no fewer than the least.
LAYERED_FROM, FIRST_SHARE, FIRST_LEAST = 8192, 4, 4096
#: A first layer's size has 16 bits, in units of 64 bytes; a posting takes at most nine bytes, and pieces a few more.
FIRST_MOST = 0xFFFF * LIST_ALIGN_BYTES // 10


def quantise(part: TermPostings, scale: float) -> TermPostings:
    """Float weights as steps of `scale`, 1 to 255; what is nearer to none is dropped, and with it a term that has nothing else."""
    steps = np.rint(part.values.view(np.float32).astype(np.float64) / scale).astype(np.uint32)
    kept = steps > 0
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(part.counts)])
    counts = np.diff(np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])[begins])
    used = counts > 0
    names = [name for name, is_used in zip(part.names, used.tolist(), strict=True) if is_used]
    return TermPostings(names, part.hashes[used], counts[used], part.records[kept], np.minimum(steps[kept], STEPS))


def into_layers(part: TermPostings, weights: np.ndarray, scale: float) -> tuple[TermPostings, np.ndarray, np.ndarray]:
    """Puts the heaviest postings of long lists first.

    Args:
        weights: float32 or uint32, of each posting: what orders them.
        scale: of the steps that the dictionary counts in, relative to `weights`.

    Returns:
        The postings, those of each list in layers, each ascending by record; int64 [n]: postings of the first of two layers, 0 where there
        is one; uint8 [n, 4]: the largest weight of each list and those of the ranks of `espnx.postings.stored.dictionary.RANKS`, in steps,
        rounded up.
    """
    n = len(part.names)
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(part.counts)])
    term = np.repeat(np.arange(n), part.counts)
    order = np.lexsort((-weights.astype(np.float64), term))  # stable: of equal weights the lower record first
    largest = np.zeros((n, 1 + len(RANKS)), np.uint8)
    for column, rank in enumerate((1, *RANKS)):
        there = part.counts >= rank
        found = weights[order[begins[:-1][there] + rank - 1]].astype(np.float64) / scale
        largest[there, column] = np.clip(np.ceil(found - 1e-6), 1, STEPS)
    first = np.zeros(n, np.int64)
    long = part.counts >= LAYERED_FROM
    first[long] = np.clip(part.counts[long] // FIRST_SHARE, FIRST_LEAST, FIRST_MOST)
    if not long.any():
        return part, first, largest
    layer = np.ones(len(order), np.int64)
    place = np.arange(len(order)) - begins[term]  # of a posting among those of its term, the heaviest first
    layer[order[place < first[term]]] = 0
    again = np.argsort(term * 2 + layer, kind="stable")
    return TermPostings(part.names, part.hashes, part.counts, part.records[again], part.values[again]), first, largest
