"""Records that were deleted: which, and what those that still have postings take from the totals,
so that scores are the others' alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn

import numpy as np

from .. import errors
from ..storage import NativeEngine
from .compaction import bits_of
from .search.plan import RemovedTerms
from .stored.layout import REMOVED, Sealed, seal
from .stored.lists import read_lists
from .stored.segment import Segment

_NONE: RemovedTerms = (np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class Removed:
    """What was deleted from a segment whose lists still have postings of it.

    Attributes:
        salt: of the segment.
        n_records, sum_lengths: of those records, and of their lengths in terms.
        terms: theirs: numbers, ascending, and in how many of those records each is.
    """

    salt: int
    n_records: int
    sum_lengths: int
    terms: RemovedTerms


@dataclass(frozen=True, eq=False)
class Deletions:
    """Attributes:
    numbers: int64 [n], ascending: records that were deleted, since the index was built.
    removed: by the name of a segment: what its lists still have of them.
    """

    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    removed: Mapping[str, Removed] = field(default_factory=dict)

    @property
    def n_present(self) -> int:
        """Deleted records of which lists still have postings."""
        return sum(each.n_records for each in self.removed.values())

    @property
    def sum_lengths(self) -> int:
        """Terms of the deleted records."""
        return sum(each.sum_lengths for each in self.removed.values())

    def terms_of(self, segment: str) -> RemovedTerms:
        """Terms of the deleted records of a segment."""
        return self.removed[segment].terms if segment in self.removed else _NONE

    def without(self, segments: Collection[str]) -> Deletions:
        """When these segments are gone, and what took their place has no postings of deleted
        records."""
        return Deletions(
            self.numbers,
            {name: each for name, each in self.removed.items() if name not in segments},
        )

    def is_deleted(self, numbers: np.ndarray) -> np.ndarray:
        """bool, of numbers of records."""
        places = np.searchsorted(self.numbers, numbers)
        found: np.ndarray = np.append(self.numbers, -1)[places] == numbers
        return found

    def section(self) -> np.ndarray:
        """uint8: as they are stored."""
        held = list(self.removed.values())
        names = np.array([int(name[1:]) for name in self.removed], "<i8")
        counts = np.array(
            [[each.n_records, each.sum_lengths, len(each.terms[0])] for each in held], "<i8"
        ).reshape(-1, 3)
        terms, df = (
            np.concatenate([_NONE[0], *(each.terms[i] for each in held)]).astype("<u4")
            for i in range(2)
        )
        fields = {
            "n_records": len(self.numbers),
            "n_terms": len(held),
            "n_postings": self.n_present,
            "sum_lengths": self.sum_lengths,
        }
        salts = np.array([each.salt for each in held], "<u4")
        return seal(REMOVED, fields, [self.numbers.astype("<i8"), names, salts, counts, terms, df])

    @classmethod
    def parse(cls, data: np.ndarray, path: str, end_number: int, n_deleted: int) -> Deletions:
        """`end_number`, `n_deleted`: as the manifest has them. Raises FormatError, ChecksumError,
        TruncatedFileError."""
        sealed = Sealed(REMOVED, data, path)
        n_numbers, n = int(sealed.header["n_records"]), int(sealed.header["n_terms"])
        if n_numbers != n_deleted:
            sealed.refuse(f"{n_numbers} records", n_deleted)
        numbers, names, salts = (
            sealed.take("<i8", n_numbers),
            sealed.take("<i8", n),
            sealed.take("<u4", n),
        )
        counts = sealed.take("<i8", 3 * n).reshape(n, 3)
        if (
            bool((counts < 0).any())
            or int(counts[:, 0].sum()) > n_numbers
            or int(counts[:, 2].sum()) > data.size
        ):
            sealed.refuse("counts of terms", "what the file holds")
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[:, 2])]).tolist()
        terms, df = (sealed.take("<u4", ends[-1]).astype(np.int64) for _ in range(2))
        sealed.end()
        if bool((np.diff(numbers) <= 0).any()) or (
            len(numbers) and not 0 <= numbers[0] <= numbers[-1] < end_number
        ):
            sealed.refuse("numbers out of order", f"ascending ones below {end_number}")
        removed = {
            f"s{name}": Removed(salt, n_records, sum_lengths, (terms[begin:end], df[begin:end]))
            for name, salt, (n_records, sum_lengths, _), (begin, end) in zip(
                names.tolist(), salts.tolist(), counts.tolist(), pairwise(ends), strict=True
            )
        }
        found = cls(numbers, removed)
        if found.n_present != int(sealed.header["n_postings"]) or found.sum_lengths != int(
            sealed.header["sum_lengths"]
        ):
            sealed.refuse("totals", "those of the segments")
        return found

    def check(self, names: Sequence[str], segments: Sequence[Segment], path: str) -> None:
        """Raises FormatError unless what was removed, was removed from these."""
        known = dict(zip(names, segments, strict=True))
        for name, each in self.removed.items():
            if name not in known or known[name].dictionary.salt != each.salt:
                _refuse(path, f"deletions of another segment, {name}", "of these")
            segment, (terms, df) = known[name], each.terms
            here = np.searchsorted(
                self.numbers, [segment.first_number, segment.first_number + len(segment)]
            )
            fits = not len(terms) or (
                terms[-1] < len(segment.dictionary) and bool((np.diff(terms) > 0).all())
            )
            if (
                not fits
                or each.n_records > here[1] - here[0]
                or bool((df > segment.dictionary.df[terms]).any())
            ):
                _refuse(
                    path,
                    f"terms of {name} that it does not have",
                    f"ascending ones below {len(segment.dictionary)}",
                )


def _refuse(path: str, got: str, expected: str) -> NoReturn:
    raise errors.FormatError("deletions of postings", path=path, got=got, expected=expected)


def removed_terms(
    engine: NativeEngine, segment: Segment, records: np.ndarray, before: RemovedTerms
) -> RemovedTerms:
    """Terms of deleted records of a segment, and in how many of them each is; those of `before`,
    deleted earlier, among them. Goes through all lists. Raises as `read_lists`."""
    if not len(records):
        return before
    wanted = bits_of(len(segment), records)
    df = np.zeros(len(segment.dictionary), np.int64)
    for part in read_lists(engine, segment, kept=wanted):
        df[part.first : part.first + len(part.names)] = part.counts
    df[before[0]] += before[1]
    found = np.flatnonzero(df)
    return found, df[found]
