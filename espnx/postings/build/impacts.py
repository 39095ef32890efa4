"""Impacts: weights in one byte each, and lists in layers, the heaviest postings first.

A file of its own: what is lossy about vectors is here, and nothing of how lists are written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..stored.dictionary import EXPONENT_LEAST, EXPONENT_MOST, STEPS
from ..stored.layout import LIST_ALIGN_BYTES
from .spool import TermPostings

#: Lists of so many postings have a first layer, of this share of them, and of no fewer than the
#: least.
LAYERED_FROM, FIRST_SHARE, FIRST_LEAST = 8192, 4, 4096
#: A first layer's size has 16 bits, in units of 64 bytes; a posting takes at most nine bytes, and
#: pieces a few more.
FIRST_MOST = 0xFFFF * LIST_ALIGN_BYTES // 10


@dataclass(frozen=True, eq=False)
class LargestWeights:
    """The largest weight of each term, by its hash: those that share one have the same steps, so
    that whoever knows hashes alone decides alike.

    Attributes:
        hashes: uint64 [n], ascending, each once.
        weights: float32 [n].
    """

    hashes: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, hashes: np.ndarray, weights: np.ndarray) -> LargestWeights:
        """Takes hashes in any order, some of them several times."""
        order = np.argsort(hashes, kind="stable")
        known, first = np.unique(hashes[order], return_index=True)
        return cls(known, np.maximum.reduceat(weights[order], first) if len(known) else weights)

    @classmethod
    def in_postings(cls, part: TermPostings) -> LargestWeights:
        """The largest weights of lists whose values are the bits of float32."""
        return cls.of(part.hashes, _largest(part, part.values.view(np.float32)))

    def joined(self, other: LargestWeights) -> LargestWeights:
        """The largest weights of both."""
        return self.of(
            np.concatenate([self.hashes, other.hashes]),
            np.concatenate([self.weights, other.weights]),
        )

    def exponents(self, hashes: np.ndarray) -> np.ndarray:
        """int8: the least powers of 2 of which 255 are as much as the largest weight, of these
        hashes."""
        mantissa, exponent = np.frexp(
            self.weights[np.searchsorted(self.hashes, hashes)].astype(np.float64)
        )
        found = np.where(mantissa <= STEPS / 256, exponent - 8, exponent - 7)
        return np.clip(found, EXPONENT_LEAST, EXPONENT_MOST).astype(np.int8)


def quantise(part: TermPostings, exponents: np.ndarray) -> tuple[TermPostings, int]:
    """Float weights as 1 to 255 steps, of each list 2 to the power of its exponent: at most half a
    step off, but for those below half a step, which are one: what a record has is never stored as
    nothing.

    Steps are powers of 2, so lists of coarser steps hold what they can of finer ones: however often
    lists are merged, a weight is less than one step off, of the coarsest that it had.

    Returns the postings, and how many weights were below half a step.
    """
    steps = part.values.view(np.float32) / np.repeat(
        np.ldexp(1.0, exponents.astype(np.int32)), part.counts
    )
    values = np.clip(np.rint(steps), 1, STEPS).astype(np.uint32)
    return TermPostings(part.names, part.hashes, part.counts, part.records, values), int(
        np.count_nonzero(steps < 0.5)
    )


def into_layers(
    part: TermPostings, weights: np.ndarray
) -> tuple[TermPostings, np.ndarray, np.ndarray]:
    """Puts the heaviest postings of long lists first.

    Args:
        weights: float32 or uint32, of each posting: what orders them.

    Returns:
        The postings, those of each list in layers, each ascending by record; int64 [n]: postings of
        the first of two layers, 0 where there is one; the largest weight of each list.
    """
    n = len(part.names)
    largest, first = _largest(part, weights), np.zeros(n, np.int64)
    long = part.counts >= LAYERED_FROM
    first[long] = np.clip(part.counts[long] // FIRST_SHARE, FIRST_LEAST, FIRST_MOST)
    if not long.any():
        return part, first, largest
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(part.counts)])
    term = np.repeat(np.arange(n), part.counts)
    # stable: of equal weights the lower record first
    order = np.lexsort((-weights.astype(np.float64), term))
    layer = np.ones(len(order), np.int64)
    # of a posting among those of its term, the heaviest first
    place = np.arange(len(order)) - begins[term]
    layer[order[place < first[term]]] = 0
    again = np.argsort(term * 2 + layer, kind="stable")
    return (
        TermPostings(part.names, part.hashes, part.counts, part.records[again], part.values[again]),
        first,
        largest,
    )


def _largest(part: TermPostings, weights: np.ndarray) -> np.ndarray:
    """The largest weight of each list; none is empty."""
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(part.counts)])[:-1]
    return np.maximum.reduceat(weights, begins) if len(begins) else weights[:0]
