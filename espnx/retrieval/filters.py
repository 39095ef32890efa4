"""Which records a search may find: what is alive, included and not excluded."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from .first_stage import Allowed, load_faiss
from .store import EmbeddingStore
from .texts import DocumentId, document_ids


class Filters:
    """Of a store and its first stage's index. Thread-safe. What it keeps is made by the first search that needs it."""

    def __init__(self, store: EmbeddingStore, index: Any):
        self._store, self._index = store, index

    def allowed(self, include: Iterable[DocumentId] | None, exclude: Iterable[DocumentId] | None) -> Allowed | None:
        """What may be found; None for every record. Ids that the store does not hold have no effect.

        Raises InvalidInputError for what is no collection of ids.
        """
        if include is None and exclude is None:
            return None if self._store.deleted is None else self._alive
        gone = self._numbers(exclude, "exclude")
        if include is None:
            bitmap = self._alive_bitmap()
            np.bitwise_and.at(bitmap, gone >> 3, ~_bit(gone))
            return Allowed(bitmap, self._alive.in_lists - self._in_lists(gone), self._alive.count - len(gone))
        chosen = np.setdiff1d(self._numbers(include, "include"), gone, assume_unique=True)
        bitmap = np.zeros(-(-self._store.end_number // 8), dtype=np.uint8)
        np.bitwise_or.at(bitmap, chosen >> 3, _bit(chosen))
        return Allowed(bitmap, self._in_lists(chosen), len(chosen))

    def _numbers(self, ids: Iterable[DocumentId] | None, name: str) -> np.ndarray:
        """Record numbers of those that are alive, ascending."""
        if ids is None:
            return np.empty(0, np.int64)
        numbers = self._store.texts.numbers(document_ids(ids, name))
        return np.unique(numbers[numbers >= 0])

    @cached_property
    def _alive(self) -> Allowed:
        store, sizes = self._store, np.array([len(ids) for ids in _lists(self._index)], dtype=np.int64)
        if store.deleted is not None:
            sizes -= self._in_lists(np.flatnonzero(np.unpackbits(store.deleted, bitorder="little")))
        return Allowed(self._alive_bitmap(), sizes, store.count)

    def _alive_bitmap(self) -> np.ndarray:
        deleted = self._store.deleted
        return np.full(-(-self._store.end_number // 8), 0xFF, dtype=np.uint8) if deleted is None else ~deleted

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray]:
        """(first record, list) of the runs of records that one list holds: one of each list in each part, as records lie in list order."""
        of_record = np.full(max(1, self._store.end_number), -1, dtype=np.int32)
        for number, ids in enumerate(_lists(self._index)):
            of_record[ids] = number
        first = np.flatnonzero(np.r_[True, of_record[1:] != of_record[:-1]])
        return first, of_record[first]

    def _in_lists(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [nlist]: how many of these records each list holds."""
        first, lists = self._runs
        nlist = 0 if self._index is None else self._index.nlist
        return np.bincount(lists[np.searchsorted(first, numbers, side="right") - 1], minlength=nlist)


def _lists(index: Any) -> Iterable[np.ndarray]:
    """Record numbers of each list."""
    pointer = load_faiss().rev_swig_ptr
    for number in range(0 if index is None else index.nlist):
        size = index.invlists.list_size(number)
        yield pointer(index.invlists.get_ids(number), size) if size else np.empty(0, np.int64)


def _bit(numbers: np.ndarray) -> np.ndarray:
    return (1 << (numbers & 7)).astype(np.uint8)
