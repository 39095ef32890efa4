"""What a caller gives to a search, checked: queries as terms, rules of BM25, records that alone may be found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import errors
from .analyzer import Analyzer
from .bm25 import BM25
from .search.plan import QueryTerms

Query = str | QueryTerms


def terms_of(queries: Query | Sequence[Query], analyzer: Analyzer) -> list[QueryTerms]:
    """Of a query alone (a text, a tuple of terms, a mapping), or of each of several."""
    several: Sequence[Query] = [queries] if isinstance(queries, (str, Mapping, tuple)) else list(queries)  # type: ignore[arg-type]
    return [analyzer.terms(query) if isinstance(query, str) else query for query in several]


def rule_of(own: BM25, **given: Any) -> BM25:
    """The index's own rule but for what a search names; None stands for what it does not. Raises InvalidInputError."""
    named = {name: value for name, value in given.items() if value is not None}
    if not named:
        return own
    return BM25(**{"variant": own.variant, "k1": own.k1, "b": own.b, "delta": own.delta, **named})


def mask_of(include: Any, exclude: Any, total: int) -> np.ndarray | None:
    """bool [total]: records that may be found; None: all may. Raises InvalidInputError."""
    if include is None and exclude is None:
        return None
    allowed = np.ones(total, bool)
    if include is not None:
        allowed &= marked("include", include, total)
    if exclude is not None:
        allowed &= ~marked("exclude", exclude, total)
    return allowed


def marked(name: str, given: Any, total: int) -> np.ndarray:
    """bool [total]: records that are given as such, or by their numbers. Raises InvalidInputError."""
    values = np.asarray(given)
    if values.dtype == bool and values.shape == (total,):
        return values
    if values.size == 0:
        values = values.astype(np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise errors.InvalidInputError(name, got=f"{values.dtype} {list(values.shape)}", expected=f"bool [{total}], or numbers of records")
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < total:
        raise errors.InvalidInputError(name, got=f"numbers from {values.min()} to {values.max()}", expected=f"from 0 to {total - 1}")
    found = np.zeros(total, bool)
    found[values] = True
    return found
