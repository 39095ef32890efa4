"""What a store holds, by id: how an open index answers for its documents, beside ranking them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import numpy as np

from ... import errors
from ...storage.documents.ids import DocumentId, document_ids
from ..store.store import EmbeddingStore

_AT_ONCE = 500  # texts held while ids are listed


def texts_of(store: EmbeddingStore, ids: Sequence[DocumentId]) -> list[str | None]:
    """The text of each document; None where the store has none of that id. Raises what reading
    texts raises."""
    numbers = store.texts.numbers(ids)
    found = np.flatnonzero(numbers >= 0)
    rows = store.texts.get(numbers[found].tolist())
    result: list[str | None] = [None] * len(ids)
    for place, (_, text) in zip(found.tolist(), rows, strict=True):
        result[place] = text
    return result


def alive_numbers(store: EmbeddingStore) -> Iterator[np.ndarray]:
    """Record numbers of all documents, ascending, a few hundred at a time."""
    for part in store.parts:
        end = part.first_number + part.count
        for first in range(part.first_number, end, _AT_ONCE):
            numbers = np.arange(first, min(first + _AT_ONCE, end))
            if store.deleted is not None:
                numbers = numbers[
                    (store.deleted[numbers >> 3] >> (numbers & 7).astype(np.uint8)) & 1 == 0
                ]
            if len(numbers):
                yield numbers


def check_judged_known(store: EmbeddingStore, judged: Set[DocumentId]) -> None:
    """Raises InvalidInputError where none of the judged documents is in the store: their ids are
    then of another kind."""
    ids = document_ids(judged, "qrels")
    if not ids or (store.texts.numbers(ids) >= 0).any():
        return
    stored = store.texts.any_id()
    raise errors.InvalidInputError(
        "evaluate: no judged document is in the store",
        got=f"ids such as {ids[0]!r} ({type(ids[0]).__name__})",
        expected="a store with documents"
        if stored is None
        else f"ids such as {stored!r} ({type(stored).__name__})",
        fix="give both the same ids, of the same type",
    )
