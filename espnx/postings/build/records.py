"""What a caller gives to be indexed: texts, terms, or sparse vectors as mappings or as arrays; each
with an id, or none of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

from ... import errors
from ...storage.documents.ids import DocumentId, document_id

_ROWS_AT_ONCE, _TERMS_MAX = 1024, 2**31
_Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
T = TypeVar("T")


class RecordBuilder(Protocol):
    """A `SegmentBuilder`, or what hands records over to several."""

    def resumed(
        self, items: Iterator[T], identity: Callable[[T], bytes], /
    ) -> Iterator[T | None]: ...
    def add_text(self, text: str, /) -> None: ...
    def add_terms(self, terms: Sequence[str | int], /) -> None: ...
    def add_vector(self, vector: Mapping[Any, float], /) -> None: ...
    def add_rows(self, terms: np.ndarray, weights: np.ndarray, counts: np.ndarray, /) -> None: ...


@dataclass(frozen=True, eq=False)
class CsrArrays:
    """Sparse vectors as SciPy's CSR matrix has them: of record i, entries ``indptr[i]`` to
    ``indptr[i + 1]``.

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
        fits = (
            begins.ndim == 1
            and len(begins) > 0
            and begins[0] == 0
            and bool((np.diff(begins) >= 0).all())
        )
        if not fits or not len(self.indices) == len(self.data) == begins[-1]:
            raise errors.InvalidInputError(
                "CSR arrays",
                got="indptr that does not fit",
                expected="rising from 0 to the number of entries",
            )
        terms = np.asarray(self.indices)
        if terms.dtype.kind not in "iu" or (
            len(terms) and not 0 <= int(terms.min()) <= int(terms.max()) < _TERMS_MAX
        ):
            raise errors.InvalidInputError(
                "CSR arrays",
                got="indices that are no terms",
                expected=f"whole numbers below {_TERMS_MAX}",
            )

    def __iter__(self) -> Iterator[dict[int, float]]:
        """Each record as a mapping."""
        for begin, end in pairwise(np.asarray(self.indptr).tolist()):
            yield dict(
                zip(self.indices[begin:end].tolist(), self.data[begin:end].tolist(), strict=True)
            )


class Records:
    """Records as a caller gives them, told apart from their ids.

    Args:
        texts: a mapping of ids to texts; or of each a str, an (id, text) pair, a mapping with
            ``text`` and perhaps ``id`` (or ``_id``) and ``title``, which is put before the text, or
            an object with ``id`` and ``text``.
        terms: of each a list of terms, or an (id, terms) pair; or what ``bm25s.tokenize`` gives.
        vectors: of each a mapping of terms to weights, or an (id, mapping) pair; or `CsrArrays`.
        ids: of the records, in their order, where they do not bring them.

    Attributes:
        source: ``texts``, ``terms``, ``vectors`` or ``rows``: by what the items are told apart.
        has_ids: whether the first one has an id; the others must be as it is.

    Raises InvalidInputError: not one of the three, or what is no collection of records.
    """

    def __init__(self, texts: Any = None, terms: Any = None, vectors: Any = None, ids: Any = None):
        given = {
            name: value
            for name, value in (("texts", texts), ("terms", terms), ("vectors", vectors))
            if value is not None
        }
        if len(given) != 1:
            got = " and ".join(given) or "nothing"
            raise errors.InvalidInputError(
                "postings", got=got, expected="one of texts, terms and vectors"
            )
        ((name, value),) = given.items()
        if is_tokenized(value):
            name, value = "terms", words_of(value)
        if isinstance(value, (str, bytes)):
            raise errors.InvalidInputError(
                "records",
                got=f"one text as {name}",
                expected="a list of them",
                fix="put it into a list",
            )
        if not isinstance(value, Iterable) or (isinstance(value, Mapping) and name != "texts"):
            raise errors.InvalidInputError(
                name,
                got=type(value).__name__,
                expected="a collection of records",
                fix="put one into a list",
            )
        value = value.items() if isinstance(value, Mapping) else value
        self.source = "rows" if isinstance(value, CsrArrays) else name
        self._items: Iterator[Any] = (
            _row_blocks(value) if isinstance(value, CsrArrays) else iter(value)
        )
        self._ids = None if ids is None else _ids(ids)
        self.has_ids = ids is not None
        if ids is None and self.source != "rows":
            first = list(islice(self._items, 1))
            self.has_ids = any(self._taken(item, 0)[0] is not None for item in first)
            self._items = chain(first, self._items)

    def add_to(self, builder: RecordBuilder) -> Iterator[tuple[DocumentId | None, str]]:
        """Hands all of them over, one at a time, but for those that an attempt before has kept; of
        each its id and its text, in their order, no later than it is needed. Raises
        InvalidInputError."""
        rows = deque[tuple[DocumentId | None, str]]()
        add, identity = {
            "texts": (builder.add_text, _identity_of_text),
            "terms": (builder.add_terms, _identity_of_terms),
            "vectors": (builder.add_vector, _identity_of_vector),
            "rows": (lambda block: builder.add_rows(*block), _identity_of_rows),
        }[self.source]
        contents: Iterator[Any] = builder.resumed(self._contents(rows), identity)  # type: ignore[arg-type]
        for content in contents:
            if content is not None:
                add(content)  # type: ignore[operator]
            while rows:
                yield rows.popleft()
        yield from rows
        if self._ids is not None and next(self._ids, None) is not None:
            raise errors.InvalidInputError(
                "ids", got="more than there are records", expected="one for each"
            )

    def _contents(self, rows: deque[tuple[DocumentId | None, str]]) -> Iterator[Any]:
        number = 0
        for item in self._items:
            if self.source == "rows":
                rows.extend((self._next_id(number + place), "") for place in range(len(item[2])))
                number += len(item[2])
                yield item
                continue
            identifier, content = self._taken(item, number)
            if self._ids is not None:
                if identifier is not None:
                    raise errors.InvalidInputError(
                        f"record {number}", got="an id of its own", expected="none beside ids="
                    )
                identifier = self._next_id(number)
            if (identifier is None) == self.has_ids:
                got, expected = (
                    ("no id", "one, as") if self.has_ids else (f"the id {identifier!r}", "none, as")
                )
                raise errors.InvalidInputError(
                    f"record {number}", got=got, expected=f"{expected} those before"
                )
            rows.append((identifier, content if self.source == "texts" else ""))
            number += 1
            yield content

    def _next_id(self, number: int) -> DocumentId | None:
        if self._ids is None:
            return None
        found = next(self._ids, None)
        if found is None:
            raise errors.InvalidInputError("ids", got=f"{number}", expected="one for each record")
        return found

    def _taken(self, item: Any, number: int) -> tuple[DocumentId | None, Any]:
        """(id or None, what is indexed)."""
        identifier, content = {"texts": _text_of, "terms": _terms_of, "vectors": _vector_of}[
            self.source
        ](item, number)
        return None if identifier is None else document_id(
            identifier, f"id of record {number}"
        ), content


def _ids(given: Any) -> Iterator[DocumentId]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise errors.InvalidInputError(
            "ids", got=type(given).__name__, expected="a collection of them"
        )
    return (document_id(value, f"id of record {number}") for number, value in enumerate(given))


def text_of(item: Any) -> str:
    """What is indexed of a record of texts."""
    found: str = _text_of(item, 0)[1]
    return found


def _text_of(item: Any, number: int) -> tuple[Any, Any]:
    identifier, text = None, item
    if isinstance(item, Mapping):
        identifier, text = item.get("id", item.get("_id")), item.get("text")
        if item.get("title") and isinstance(text, str):
            text = f"{item['title']} {text}"
    elif isinstance(item, tuple) and len(item) == 2:
        identifier, text = item
    elif hasattr(item, "id") and hasattr(item, "text"):
        identifier, text = item.id, item.text
    if isinstance(text, str):
        return identifier, text
    fix = None
    if isinstance(item, Mapping) and "text" not in item:
        fix = "weights of terms go into vectors=; a document has a text"
    elif isinstance(item, (list, tuple)):
        fix = "records that are cut into terms already go into terms="
    raise errors.InvalidInputError(
        f"text of record {number}",
        got=type(text if text is not None else item).__name__,
        expected="a str, an (id, text) pair, or a mapping with id and text",
        fix=fix,
    )


def _terms_of(item: Any, number: int) -> tuple[Any, Any]:
    is_pair = (
        isinstance(item, tuple)
        and len(item) == 2
        and isinstance(item[1], (list, tuple, np.ndarray))
    )
    identifier, terms = item if is_pair else (None, item)
    if isinstance(terms, (str, bytes, Mapping)) or not isinstance(terms, Iterable):
        raise errors.InvalidInputError(
            f"terms of record {number}",
            got=type(terms).__name__,
            expected="a list of them, or an (id, terms) pair",
            fix="texts go into texts=" if isinstance(terms, str) else None,
        )
    return identifier, terms.tolist() if isinstance(terms, np.ndarray) else list(terms)


def _vector_of(item: Any, number: int) -> tuple[Any, Any]:
    identifier, vector = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
    if not isinstance(vector, Mapping):
        raise errors.InvalidInputError(
            f"vector of record {number}",
            got=type(vector).__name__,
            expected="a mapping of terms to weights, or an (id, mapping) pair",
        )
    return identifier, vector


def is_tokenized(value: object) -> bool:
    """Whether it is what ``bm25s.tokenize`` gives: numbers of words, and the words."""
    return isinstance(value, tuple) and getattr(value, "_fields", ()) == ("ids", "vocab")


def words_of(tokenized: Any) -> Iterator[list[str]]:
    """The words of each text that ``bm25s.tokenize`` has cut. Raises InvalidInputError for numbers
    of no word."""
    words = {number: word for word, number in tokenized.vocab.items()}
    for numbers in tokenized.ids:
        found = [words.get(int(number)) for number in numbers]
        if None in found:
            raise errors.InvalidInputError(
                "words of bm25s",
                got="a number that is no word's",
                expected="those of its vocabulary",
            )
        yield [word for word in found if word is not None]


def _row_blocks(vectors: CsrArrays) -> Iterator[_Rows]:
    """Terms, weights and counts of some records at a time."""
    begins = np.asarray(vectors.indptr, np.int64)
    for first in range(0, len(begins) - 1, _ROWS_AT_ONCE):
        rows = begins[first : first + _ROWS_AT_ONCE + 1]
        terms, weights = (
            np.asarray(each[rows[0] : rows[-1]]) for each in (vectors.indices, vectors.data)
        )
        yield terms.astype(np.int64), weights.astype(np.float64), np.diff(rows)


def _identity_of_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else repr(text).encode()


def _identity_of_terms(terms: Sequence[str] | Sequence[int]) -> bytes:
    return repr(list(terms)).encode("utf-8", "surrogatepass")


def _identity_of_vector(vector: Mapping[Any, float]) -> bytes:
    return (
        _identity_of_terms(list(vector))
        + np.fromiter(vector.values(), np.float64, len(vector)).tobytes()
    )


def _identity_of_rows(rows: _Rows) -> bytes:
    return b"".join(each.tobytes() for each in (rows[2], rows[0], rows[1]))
