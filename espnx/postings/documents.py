"""Ids and texts of the records of open segments, where postings keep them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .. import errors
from ..storage import FileHandle, NativeEngine
from ..storage.documents.ids import DocumentId
from ..storage.documents.rows import PartTexts
from .deletions import Deletions
from .format import SegmentFacts

_AT_ONCE = 4096

#: An id, and the text: empty where texts are not kept.
Row = tuple[DocumentId, str]


class Documents:
    """The documents of segments, ascending by number. Every method may be called from any thread.

    Args:
        segments: each with its file, open for as long as this is used, and its salt.
        deletions: of these: ids of such records are those of no record.
    """

    def __init__(
        self,
        engine: NativeEngine,
        segments: Sequence[tuple[SegmentFacts, FileHandle, int]],
        deletions: Deletions,
    ):
        self._deletions = deletions
        self._parts = [
            (facts, file, PartTexts(engine, file.path, facts.first_number, facts.n_records, salt))
            for facts, file, salt in segments
        ]
        self._ends = np.array([facts.end_number for facts, _, _ in self._parts], np.int64)

    def get(self, numbers: Sequence[int] | np.ndarray) -> list[Row]:
        """The row of each record, in the order asked. Raises ChecksumError, FormatError, and what a
        read raises."""
        wanted = np.asarray(numbers, np.int64)
        of = np.searchsorted(self._ends, wanted, side="right")
        found = list[Row]()
        rows = dict[int, Row]()
        for part in np.unique(of).tolist():
            facts, file, texts = self._parts[part]
            here = wanted[of == part].tolist()
            rows |= zip(here, texts.get(file, facts.sections, here), strict=True)
        found += (rows[number] for number in wanted.tolist())
        return found

    def numbers(self, ids: Sequence[DocumentId]) -> np.ndarray:
        """int64: the record of each id, -1 where there is none. Raises as `get`."""
        found = np.full(len(ids), -1, np.int64)
        for facts, file, texts in reversed(self._parts):
            left = np.flatnonzero(found < 0)
            if not len(left):
                break
            found[left] = texts.numbers(
                file, facts.sections, [ids[place] for place in left.tolist()], self._is_alive
            )
        return found

    def check(self, *, ids_differ: bool) -> None:
        """Reads everything. Raises ChecksumError, FormatError; the latter with `ids_differ` also
        where an id leads to another record."""
        for first in range(0, int(self._ends[-1]) if len(self._ends) else 0, _AT_ONCE):
            numbers = np.arange(first, min(first + _AT_ONCE, int(self._ends[-1])))
            numbers = numbers[
                (numbers >= self._parts[0][0].first_number) & ~self._deletions.is_deleted(numbers)
            ]
            rows = self.get(numbers)
            if not ids_differ:
                continue
            found = self.numbers([identifier for identifier, _ in rows])
            if len(again := np.flatnonzero(found != numbers)):
                place = int(again[0])
                raise errors.FormatError(
                    f"ids of postings: {rows[place][0]!r}",
                    path=self._parts[0][1].path,
                    got=f"record {found[place]}",
                    expected=f"record {numbers[place]}",
                    fix="restore the index from a copy, or build it again",
                )

    def _is_alive(self, number: int) -> bool:
        return not bool(self._deletions.is_deleted(np.array([number]))[0])

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Yields the rows of all records that are not deleted, ascending by number, some at a time.
        Raises as `get`."""
        for facts, file, texts in self._parts:
            for first in range(facts.first_number, facts.end_number, _AT_ONCE):
                numbers = np.arange(first, min(first + _AT_ONCE, facts.end_number))
                left = numbers[~self._deletions.is_deleted(numbers)].tolist()
                yield from zip(left, texts.get(file, facts.sections, left), strict=True)
