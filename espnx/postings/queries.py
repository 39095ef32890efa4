"""What a caller gives to a build or a search, checked: queries as terms, rules of BM25, records
that alone may be found, the directories of a collection."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .. import errors
from ..checks import check_path, check_whole, plain
from ..storage.documents.ids import DocumentId, document_ids
from .analyzer import Analyzer
from .bm25 import BM25
from .build.records import is_tokenized, words_of
from .format import PARTS_MAX
from .search.plan import QueryTerms

Query = str | QueryTerms
_EXPECTED = (
    "a text, a tuple of terms, or a mapping of terms to weights; or a list of those, or of lists "
    "of terms"
)


def terms_of(queries: Query | Sequence[Query], analyzer: Analyzer) -> list[QueryTerms]:
    """The terms of a query alone (a text, a tuple of terms, a mapping), or of each of several.
    Raises InvalidInputError."""
    if is_tokenized(queries):
        return list(words_of(queries))
    if isinstance(queries, (str, Mapping, tuple)):
        return [_terms(queries, analyzer)]
    if (
        isinstance(queries, (bytes, bytearray))
        or not isinstance(queries, Iterable)
        or getattr(queries, "ndim", 1) == 0
    ):
        raise errors.InvalidInputError("queries", got=_shown(queries), expected=_EXPECTED)
    return [_terms(query, analyzer) for query in queries]


def _terms(query: Any, analyzer: Analyzer) -> QueryTerms:
    if isinstance(query, str):
        return analyzer.terms(query)
    if (
        isinstance(query, (bytes, bytearray))
        or not isinstance(query, Iterable)
        or getattr(query, "ndim", 1) == 0
    ):
        raise errors.InvalidInputError("query", got=_shown(query), expected=_EXPECTED)
    return query if isinstance(query, Mapping) else [plain(term) for term in query]


def _shown(value: object) -> str:
    return repr(value)[:80]


def analyzer_of(given: Analyzer | str | None) -> Analyzer:
    """An analyzer as given, or the one for a language's name. Raises InvalidInputError."""
    if given is None:
        return Analyzer()
    if isinstance(given, str):
        return Analyzer.of(given)
    if not isinstance(given, Analyzer):
        raise errors.InvalidInputError(
            "analyzer", got=_shown(given), expected="an Analyzer, or a language such as 'english'"
        )
    return given


def bm25_of(given: BM25 | str | Mapping[str, Any] | None) -> BM25:
    """The BM25 of a variant's name, or of some of the fields, with the others as they are by
    default. Raises InvalidInputError."""
    if given is None:
        return BM25()
    if isinstance(given, str):
        return BM25(given)
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in BM25.__dataclass_fields__]:
            raise errors.InvalidInputError(
                "fields of BM25", got=unknown[0], expected=", ".join(BM25.__dataclass_fields__)
            )
        return BM25(**given)
    if not isinstance(given, BM25):
        raise errors.InvalidInputError(
            "bm25",
            got=_shown(given),
            expected="a BM25, a variant such as 'lucene', or a mapping of fields",
        )
    return given


def directories_of(given: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The directories of a collection that is split over several. Raises InvalidInputError."""
    what = "directories of a collection"
    if isinstance(given, (str, bytes, os.PathLike)) or not isinstance(given, Iterable):
        raise errors.InvalidInputError(what, got=_shown(given), expected="all of them, in a list")
    found = [check_path("directory of postings", path) for path in given]
    check_whole(what, len(found), 1, PARTS_MAX)
    return found


def rule_of(own: BM25, **given: Any) -> BM25:
    """The index's own rule but for what a search names; None stands for what it does not. Raises
    InvalidInputError."""
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


def as_array(name: str, given: Any, expected: str) -> np.ndarray:
    """Any collection as an array. Raises InvalidInputError for what is none."""
    if (
        isinstance(given, (str, bytes, bytearray))
        or not isinstance(given, Iterable)
        or getattr(given, "ndim", 1) == 0
    ):
        raise errors.InvalidInputError(name, got=_shown(given), expected=expected)
    if hasattr(given, "__array__"):
        return np.asarray(given)
    values = [plain(value) for value in given]
    try:
        return np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise errors.InvalidInputError(name, got=str(error), expected=expected) from None


def ids_or_mask(name: str, given: Any) -> np.ndarray | list[DocumentId]:
    """Records in any collection of ids, or bool [n]. Raises InvalidInputError."""
    held = list(given) if isinstance(given, Iterator) else given
    array = as_array(name, held, "ids of records, or bool [n]")
    return array if array.dtype == bool else document_ids(held, name)


def marked(name: str, given: Any, total: int) -> np.ndarray:
    """bool [total]: records that are given as such, or by their numbers, in any collection. Raises
    InvalidInputError."""
    expected = f"bool [{total}], or numbers of records"
    values = as_array(name, given, expected)
    if values.dtype == bool and values.shape == (total,):
        return values
    if values.size == 0:
        values = values.astype(np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise errors.InvalidInputError(
            name, got=f"{values.dtype} {list(values.shape)}", expected=expected
        )
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < total:
        raise errors.InvalidInputError(
            name,
            got=f"numbers from {values.min()} to {values.max()}",
            expected=f"from 0 to {total - 1}",
        )
    found = np.zeros(total, bool)
    found[values] = True
    return found
