"""How large the spool of a build will be, told from some of its records before it begins."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from ... import errors
from ...sizes import BUILD_BYTES, format_size
from ...suggestions import suggests_keywords
from ..analyzer import Analyzer
from .builder import BYTES_A_TOKEN
from .records import CsrArrays, Records

SAMPLE_RECORDS = 1000
#: Of a posting in a run: its record and its value. In what forward records are sorted from: its
#: term, too.
_RUN_BYTES, _FORWARD_BYTES = 8, 12
T = TypeVar("T")


@dataclass(frozen=True)
class SpoolEstimate:
    """What a build will put into its directory beside the index, until that is whole.

    Attributes:
        n_records, n_postings: of the index, the latter as far as a sample tells.
        size_bytes: of the spool; 0 where all is sorted in memory.
    """

    n_records: int
    n_postings: int
    size_bytes: int

    def summary(self) -> str:
        """The estimate in a line."""
        spool = (
            f"about {format_size(self.size_bytes)} of spool"
            if self.size_bytes
            else "no spool: they fit in memory"
        )
        return f"{self.n_records:,} records, about {self.n_postings:,} postings; {spool}"


@suggests_keywords
def estimate_spool(
    n_records: int | None = None,
    *,
    texts: Iterable[Any] | None = None,
    terms: Iterable[Any] | None = None,
    vectors: Iterable[Any] | CsrArrays | None = None,
    analyzer: Analyzer | None = None,
    memory_bytes: int = BUILD_BYTES,
) -> SpoolEstimate:
    """What `espnx.Postings.build` with these arguments will need.

    Args:
        n_records: of the whole input; None: it knows its length.
        texts, terms, vectors: the input. Of one with a length that can be indexed, 1,000 records
            are looked at, from everywhere; of any other iterable the first 1,000, which are used
            up.
        analyzer, memory_bytes: of the build.

    Raises InvalidInputError for no input, or one of unknown length.
    """
    given: Any = next((each for each in (texts, terms, vectors) if each is not None), None)
    if given is None:
        raise errors.InvalidInputError(
            "estimate of a spool", got="nothing", expected="texts, terms or vectors"
        )
    if isinstance(given, CsrArrays):
        return _estimate(
            len(given.indptr) - 1,
            len(given.data),
            len(given.data),
            is_vectors=True,
            memory_bytes=memory_bytes,
        )
    n_records = operator.length_hint(given, -1) if n_records is None else n_records
    if n_records < 0:
        raise errors.InvalidInputError(
            "estimate of a spool", got="an input of unknown length", expected="n_records"
        )
    sample = list(_sample(given))
    records = Records(*(None if each is None else sample for each in (texts, terms, vectors)))
    counting = _Counting(analyzer or Analyzer())
    seen = sum(1 for _ in records.add_to(counting))
    each = n_records / max(1, seen)
    return _estimate(
        n_records,
        round(counting.n_tokens * each),
        round(counting.n_postings * each),
        is_vectors=vectors is not None,
        memory_bytes=memory_bytes,
    )


class _Counting:
    """Counts what records have, and keeps nothing; to `Records` it is a builder."""

    def __init__(self, analyzer: Analyzer):
        self._analyzer, self.n_tokens, self.n_postings = analyzer, 0, 0

    def resumed(self, items: Iterator[T], _identity: Callable[[T], bytes]) -> Iterator[T | None]:
        return items

    def add_text(self, text: str) -> None:
        self.add_terms(self._analyzer.words(text))

    def add_terms(self, terms: Sequence[str | int]) -> None:
        self.n_tokens += len(terms)
        self.n_postings += len(set(terms))

    def add_vector(self, vector: Mapping[Any, float]) -> None:
        self.add_terms(list(vector))

    def add_rows(self, terms: np.ndarray, _weights: np.ndarray, _counts: np.ndarray) -> None:
        self.n_tokens, self.n_postings = self.n_tokens + len(terms), self.n_postings + len(terms)


def _estimate(
    n_records: int, n_tokens: int, n_postings: int, *, is_vectors: bool, memory_bytes: int
) -> SpoolEstimate:
    # How many terms there are, no sample tells: a quarter of the memory is theirs.
    if n_tokens * BYTES_A_TOKEN < memory_bytes * 3 // 4:
        return SpoolEstimate(n_records, n_postings, 0)
    return SpoolEstimate(
        n_records, n_postings, n_postings * (_RUN_BYTES + (_FORWARD_BYTES if is_vectors else 0))
    )


def _sample(records: Any) -> Iterable[Any]:
    if isinstance(records, Sequence) and len(records) > SAMPLE_RECORDS:
        return (records[i * len(records) // SAMPLE_RECORDS] for i in range(SAMPLE_RECORDS))
    return islice(iter(records), SAMPLE_RECORDS)
