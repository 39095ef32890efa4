"""Which records a search may find, as a bitmap for the first stage: what is alive, included and not excluded."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .. import errors
from .store import EmbeddingStore
from .texts import DocumentId


def allowed_records(
    store: EmbeddingStore, include: Iterable[DocumentId] | None, exclude: Iterable[DocumentId] | None
) -> tuple[np.ndarray | None, int]:
    """(bitmap: bit i % 8 of byte i // 8 is set where record i may be found, or None where all may; how many may at most).

    Ids that the store does not hold have no effect. Raises InvalidInputError for one string in place of a collection of ids.
    """
    if include is None and exclude is None:
        return (None if store.deleted is None else ~store.deleted), store.count
    included, excluded = _numbers(store, include, "include"), _numbers(store, exclude, "exclude")
    size = -(-store.end_number // 8)
    if included is None:
        allowed = np.full(size, 0xFF, dtype=np.uint8) if store.deleted is None else ~store.deleted
        count = store.count
    else:
        allowed = np.zeros(size, dtype=np.uint8)
        np.bitwise_or.at(allowed, included >> 3, _bit(included))
        count = len(included)
    if excluded is not None:
        np.bitwise_and.at(allowed, excluded >> 3, ~_bit(excluded))
    return allowed, count


def _bit(numbers: np.ndarray) -> np.ndarray:
    return (1 << (numbers & 7)).astype(np.uint8)


def _numbers(store: EmbeddingStore, ids: Iterable[DocumentId] | None, name: str) -> np.ndarray | None:
    if ids is None:
        return None
    if isinstance(ids, (str, bytes)):
        raise errors.InvalidInputError(name, got=repr(ids), expected="a collection of document ids", fix=f"pass [{ids!r}]")
    numbers = store.texts.numbers(list(ids))
    return np.unique(numbers[numbers >= 0])
