"""What a caller gives to be indexed: texts, terms, or sparse vectors as mappings or as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ... import errors
from .builder import SegmentBuilder

_ROWS_AT_ONCE, _TERMS_MAX = 1024, 2**31
_Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class CsrArrays:
    """Sparse vectors as SciPy's CSR matrix has them: of record i, entries ``indptr[i]`` to ``indptr[i + 1]``.

    Attributes:
        indptr: whole numbers [n + 1].
        indices: whole numbers [entries]: terms, by number; those of a record differ.
        data: [entries]: weights, 0 or more.
    """

    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray

    def __post_init__(self) -> None:
        """Raises InvalidInputError for arrays that do not fit one another."""
        begins = np.asarray(self.indptr, np.int64)
        fits = begins.ndim == 1 and len(begins) > 0 and begins[0] == 0 and bool((np.diff(begins) >= 0).all())
        if not fits or not len(self.indices) == len(self.data) == begins[-1]:
            raise errors.InvalidInputError("CSR arrays", got="indptr that does not fit", expected="rising from 0 to the number of entries")
        terms = np.asarray(self.indices)
        if terms.dtype.kind not in "iu" or (len(terms) and not 0 <= int(terms.min()) <= int(terms.max()) < _TERMS_MAX):
            raise errors.InvalidInputError("CSR arrays", got="indices that are no terms", expected=f"whole numbers below {_TERMS_MAX}")

    def __iter__(self) -> Iterator[dict[int, float]]:
        """Each record as a mapping."""
        for begin, end in pairwise(np.asarray(self.indptr).tolist()):
            yield dict(zip(self.indices[begin:end].tolist(), self.data[begin:end].tolist(), strict=True))


def add_records(
    builder: SegmentBuilder,
    *,
    texts: Iterable[str] | None = None,
    terms: Iterable[Sequence[str] | Sequence[int]] | None = None,
    vectors: Iterable[Mapping[Any, float]] | None = None,
) -> None:
    """Hands all of them over, one at a time, but for those that an attempt before has kept. Raises InvalidInputError."""
    if isinstance(texts, (str, bytes)) or isinstance(terms, (str, bytes)):
        raise errors.InvalidInputError("records", got="one text", expected="a list of them", fix="put it into a list, of texts")
    for text in () if texts is None else builder.resumed(iter(texts), _identity_of_text):
        builder.add_text(text)
    for each in () if terms is None else builder.resumed(iter(terms), _identity_of_terms):
        builder.add_terms(each)
    if isinstance(vectors, CsrArrays):
        for rows in builder.resumed(_row_blocks(vectors), _identity_of_rows):
            builder.add_rows(*rows)
        return
    for vector in () if vectors is None else builder.resumed(iter(vectors), _identity_of_vector):
        builder.add_vector(vector)


def source_name(texts: object, terms: object, vectors: object) -> str:
    """By what the items of an input are told apart, of those above."""
    return "texts" if texts is not None else "terms" if terms is not None else "rows" if isinstance(vectors, CsrArrays) else "vectors"


def _row_blocks(vectors: CsrArrays) -> Iterator[_Rows]:
    """Terms, weights and counts of some records at a time."""
    begins = np.asarray(vectors.indptr, np.int64)
    for first in range(0, len(begins) - 1, _ROWS_AT_ONCE):
        rows = begins[first : first + _ROWS_AT_ONCE + 1]
        terms, weights = (np.asarray(each[rows[0] : rows[-1]]) for each in (vectors.indices, vectors.data))
        yield terms.astype(np.int64), weights.astype(np.float64), np.diff(rows)


def _identity_of_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else repr(text).encode()


def _identity_of_terms(terms: Sequence[str] | Sequence[int]) -> bytes:
    return repr(list(terms)).encode("utf-8", "surrogatepass")


def _identity_of_vector(vector: Mapping[Any, float]) -> bytes:
    return _identity_of_terms(list(vector)) + np.fromiter(vector.values(), np.float64, len(vector)).tobytes()


def _identity_of_rows(rows: _Rows) -> bytes:
    return b"".join(each.tobytes() for each in (rows[2], rows[0], rows[1]))
