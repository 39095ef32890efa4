"""Which records a search may find: what is alive, included and not excluded."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from ...storage.documents.ids import DocumentId, document_ids
from ..first_stage.interface import Allowed
from ..store.store import EmbeddingStore


class Filters:
    """The filters of a store, each made by the first search that needs it. Thread-safe."""

    def __init__(self, store: EmbeddingStore):
        self._store = store

    def allowed(
        self, include: Iterable[DocumentId] | None, exclude: Iterable[DocumentId] | None
    ) -> Allowed | None:
        """What may be found; None for every record. Ids that the store does not hold have no
        effect.

        Raises InvalidInputError for what is no collection of ids.
        """
        if include is None and exclude is None:
            return None if self._store.deleted is None else self._alive
        excluded = self._numbers(exclude, "exclude")
        if include is None:
            bitmap = self._alive_bitmap()
            np.bitwise_and.at(bitmap, excluded >> 3, ~_bit(excluded))
            return Allowed(bitmap, self._store.count - len(excluded))
        chosen = np.setdiff1d(self._numbers(include, "include"), excluded, assume_unique=True)
        bitmap = np.zeros(-(-self._store.manifest.end_number // 8), dtype=np.uint8)
        np.bitwise_or.at(bitmap, chosen >> 3, _bit(chosen))
        return Allowed(bitmap, len(chosen))

    def _numbers(self, ids: Iterable[DocumentId] | None, name: str) -> np.ndarray:
        """Record numbers of those that are alive, ascending."""
        if ids is None:
            return np.empty(0, np.int64)
        numbers = self._store.texts.numbers(document_ids(ids, name))
        return np.unique(numbers[numbers >= 0])

    @cached_property
    def _alive(self) -> Allowed:
        return Allowed(self._alive_bitmap(), self._store.count)

    def _alive_bitmap(self) -> np.ndarray:
        deleted = self._store.deleted
        return (
            np.full(-(-self._store.manifest.end_number // 8), 0xFF, dtype=np.uint8)
            if deleted is None
            else ~deleted
        )


def _bit(numbers: np.ndarray) -> np.ndarray:
    return (1 << (numbers & 7)).astype(np.uint8)
