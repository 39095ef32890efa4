"""Ids of documents: text, or whole numbers of 64 bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ... import errors

DocumentId = int | str


def document_id(value: Any, what: str = "document id") -> DocumentId:
    """An id as a store keeps it: NumPy's and PyTorch's scalars become Python's own. Raises
    InvalidInputError for what cannot be one."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, int) and not isinstance(value, bool):
        if -(2**63) <= value < 2**63:
            return int(value)
        raise errors.InvalidInputError(
            what, got=f"an int of {value.bit_length()} bits", expected="a str or a 64-bit int"
        )
    if not isinstance(value, str):
        raise errors.InvalidInputError(
            what, got=f"{value!r} ({type(value).__name__})", expected="a str or a 64-bit int"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise errors.InvalidInputError(
            what, got=f"{value!r}, a lone surrogate", expected="text that UTF-8 can hold"
        ) from None
    return str.__str__(value)


def id_order(identifier: DocumentId) -> tuple[bool, DocumentId]:
    """Sorts ids: numbers first, by value, then texts, by code points."""
    return isinstance(identifier, str), identifier


def document_ids(ids: Any, what: str = "ids") -> list[DocumentId]:
    """A collection of ids (an array or a tensor is one) as a list. Raises InvalidInputError for one
    id, and for what cannot be one."""
    if (
        isinstance(ids, (str, bytes))
        or not isinstance(ids, Iterable)
        or getattr(ids, "ndim", None) == 0
    ):
        raise errors.InvalidInputError(
            what, got=repr(ids), expected="a collection of document ids", fix=f"pass [{ids!r}]"
        )
    return [
        document_id(value, f"{what}: a document id")
        for value in (ids.tolist() if hasattr(ids, "tolist") else ids)
    ]


def require_known(
    wanted: Sequence[DocumentId], numbers: np.ndarray, what: str, holder: str
) -> None:
    """Raises InvalidInputError unless each id was found. `numbers`: int64, of each id, -1 where
    there is none."""
    if not (numbers < 0).any():
        return
    missing = wanted[int(np.flatnonzero(numbers < 0)[0])]
    is_digits = isinstance(missing, str) and missing.removeprefix("-").isdecimal()
    raise errors.InvalidInputError(
        f"no such {what}",
        got=repr(missing),
        expected=f"ids that the {holder}",
        fix=f"if its id is a number, give it as one: {missing} (--int)" if is_digits else None,
    )
