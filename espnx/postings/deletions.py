"""Records that were deleted: which, and what those that still have postings take from the totals, so that scores are the others' alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..storage.files import crc32c
from .search.plan import RemovedTerms
from .stored.layout import REMOVED, Sealed, seal


@dataclass(frozen=True, eq=False)
class Deletions:
    """Attributes:
    numbers: int64 [n], ascending: records that were deleted, since the index was built.
    n_present: of those, how many a segment's lists still have; the others were dropped by a compaction.
    sum_lengths: of those present, in terms.
    terms: of each segment, terms of those present: their numbers, ascending, and in how many of those records they are.
    """

    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    n_present: int = 0
    sum_lengths: int = 0
    terms: tuple[RemovedTerms, ...] = ()

    def of_segment(self, segment: int) -> RemovedTerms:
        """None of a segment that is younger."""
        return self.terms[segment] if segment < len(self.terms) else (np.zeros(0, np.int64), np.zeros(0, np.int64))

    def section(self, salts: list[int]) -> np.ndarray:
        """uint8: as they are stored. `salts`: of the segments that `terms` are of."""
        counts = np.array([len(numbers) for numbers, _ in self.terms], "<i8")
        none = np.zeros(0, np.int64)
        numbers = np.concatenate([none, *(numbers for numbers, _ in self.terms)]).astype("<u4")
        df = np.concatenate([none, *(df for _, df in self.terms)]).astype("<u4")
        fields = {
            "salt": _salt_of(salts), "n_records": len(self.numbers), "n_terms": len(counts), "n_postings": self.n_present,
            "sum_lengths": self.sum_lengths,
        }  # fmt: skip
        return seal(REMOVED, fields, [self.numbers.astype("<i8"), counts, numbers, df])

    @classmethod
    def parse(cls, data: np.ndarray, path: str, salts: list[int], n_terms: list[int], end_number: int) -> Deletions:
        """`salts`, `n_terms`: of all segments. Raises FormatError, ChecksumError, TruncatedFileError."""
        sealed = Sealed(REMOVED, data, path)
        header = sealed.header
        n_segments = int(header["n_terms"])
        if n_segments > len(salts) or int(header["salt"]) != _salt_of(salts[:n_segments]):
            sealed.refuse("deletions of other segments", "of these")
        numbers, counts = sealed.take("<i8", int(header["n_records"])), sealed.take("<i8", n_segments)
        if bool((counts < 0).any()) or int(counts.sum()) > data.size:
            sealed.refuse("counts of terms", "what the file holds")
        terms, df = sealed.take("<u4", int(counts.sum())), sealed.take("<u4", int(counts.sum()))
        sealed.end()
        if bool((np.diff(numbers) <= 0).any()) or (len(numbers) and not 0 <= numbers[0] <= numbers[-1] < end_number):
            sealed.refuse("numbers out of order", f"ascending ones below {end_number}")
        ends = np.cumsum(counts).tolist()
        parts = [
            (terms[end - count : end].astype(np.int64), df[end - count : end].astype(np.int64))
            for end, count in zip(ends, counts.tolist(), strict=True)
        ]
        for (part, _), total in zip(parts, n_terms, strict=False):
            if bool((np.diff(part) <= 0).any()) or (len(part) and part[-1] >= total):
                sealed.refuse("terms out of order", f"ascending ones below {total}")
        return cls(numbers, int(header["n_postings"]), int(header["sum_lengths"]), tuple(parts))


def _salt_of(salts: list[int]) -> int:
    return crc32c(np.array(salts, "<u4").tobytes())
