"""BM25 in its five variants, as bm25s (Lù, 2024; Kamphuis et al., 2020) has them: what terms weigh,
and what lengths take away.

Everything here is decided when a query is asked: an index holds counts and lengths, so k1, b and
the variant are free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .. import errors
from ..checks import check_finite, plain

#: In the order of ``csrc/cpu/postings/kernels.hpp``.
VARIANTS = ("robertson", "lucene", "atire", "bm25l", "bm25+")
#: Whose records get a score from terms that they do not have.
_WITH_ABSENT = ("bm25l", "bm25+")


@dataclass(frozen=True)
class BM25:
    """How counts become scores.

    Attributes:
        variant: one of `VARIANTS`; ``lucene`` with exact lengths.
        k1: how soon more occurrences stop to matter, 0 or more.
        b: how much long records are held back, 0 to 1.
        delta: of ``bm25l`` and ``bm25+`` alone: what an occurrence is worth however long the record
            is.
    """

    variant: str = "lucene"
    k1: float = 1.5
    b: float = 0.75
    delta: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.variant, str) or self.variant not in VARIANTS:
            raise errors.InvalidInputError(
                "variant of BM25", got=repr(self.variant), expected=", ".join(VARIANTS)
            )
        for name in ("k1", "b", "delta"):
            object.__setattr__(self, name, plain(getattr(self, name)))
            check_finite(f"{name} of BM25", getattr(self, name))
        if self.k1 < 0 or not 0 <= self.b <= 1 or self.delta < 0:
            raise errors.InvalidInputError(
                "BM25",
                got=f"k1 {self.k1}, b {self.b}, delta {self.delta}",
                expected="k1 and delta of 0 or more, b from 0 to 1",
            )

    @property
    def number(self) -> int:
        """The number of the variant in the compiled part."""
        return VARIANTS.index(self.variant)

    def idf(self, df: int, n_records: int) -> float:
        """What a term weighs that `df` of `n_records` records have; float64. `df` is 1 to
        `n_records`.

        Searches have it from ``csrc/postings/plan.cpp``; this is what that is compared with.
        """
        if self.variant == "robertson":
            return math.log(max(1.0, (n_records - df + 0.5) / (df + 0.5)))
        if self.variant == "lucene":
            return math.log(1 + (n_records - df + 0.5) / (df + 0.5))
        if self.variant == "atire":
            return math.log(n_records / df)
        if self.variant == "bm25l":
            return math.log((n_records + 1) / (df + 0.5))
        return math.log((n_records + 1) / df)

    def norms(self, lengths: np.ndarray, average: float) -> np.ndarray:
        """float64: what records of these lengths, in terms, add to a count below the fraction; of
        ``bm25l`` without k1."""
        ratio = (1 - self.b) + self.b * lengths.astype(np.float64) / max(average, 1e-300)
        return ratio if self.variant == "bm25l" else self.k1 * ratio

    def part(self, counts: np.ndarray, norms: np.ndarray) -> np.ndarray:
        """float64: the part of a score that counts and lengths decide; times `idf` it is the score.
        As in bm25s, products of counts are rounded to float32."""
        wide = counts.astype(np.float64)
        if self.variant == "bm25l":
            c = wide / norms
            found = (self.k1 + 1) * (c + self.delta) / (self.k1 + c + self.delta)
        elif self.variant in ("robertson", "lucene"):
            found = wide / (norms + wide)
        else:
            found = (counts.astype(np.float32) * np.float32(self.k1 + 1)).astype(np.float64) / (
                norms + wide
            )
        return found + self.delta if self.variant == "bm25+" else found

    @property
    def absent_part(self) -> float:
        """The part of a term's idf that it gives to records that do not have it; scores of those
        that do are summed less that."""
        if self.variant not in _WITH_ABSENT:
            return 0.0
        # 0 / 0: no occurrence is worth nothing
        if self.k1 == 0 and (self.variant == "bm25+" or self.delta == 0):
            return self.delta
        norm = 1.0 if self.variant == "bm25l" else self.k1
        return float(self.part(np.zeros(1), np.array([norm]))[0])
