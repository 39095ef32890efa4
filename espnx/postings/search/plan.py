"""What a batch of queries reads: terms looked up in every segment, weighed, and their lists in the
order in which they are summed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...checks import check_finite, plain
from ...storage.native import load_native
from ..bm25 import BM25
from ..stored.layout import COUNT
from ..stored.segment import Segment
from ..stored.terms import hashes_of, name_of, term_bytes

#: A query as terms: as often as they stand in it, or each with a weight.
QueryTerms = Sequence[str] | Sequence[int] | Mapping[str, float] | Mapping[int, float]
#: Of a segment: numbers of terms that deleted records had, ascending, and how many of those.
RemovedTerms = tuple[np.ndarray, np.ndarray]
_NONE = np.zeros(0, np.int64)


class Collection:
    """Segments that are searched together: what is global (how many records have a term, how long
    records are) is summed over them.

    Args:
        segments: of one kind; their numbers do not overlap.
        removed: how many records were deleted, and the sum of their lengths in terms: both are
            taken from the totals.
        removed_terms: of each segment, the terms that they had.

    Raises InvalidInputError for segments of several kinds.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        removed: tuple[int, int] = (0, 0),
        removed_terms: Sequence[RemovedTerms] | None = None,
    ):
        self.segments = list(segments)
        kinds = {segment.dictionary.kind for segment in segments}
        if len(kinds) > 1:
            raise errors.InvalidInputError(
                "segments of postings", got=f"kinds {sorted(kinds)}", expected="one kind"
            )
        self.kind = kinds.pop() if kinds else COUNT
        self.n_records = sum(len(segment) for segment in segments) - removed[0]
        self.sum_lengths = sum(segment.dictionary.sum_lengths for segment in segments) - removed[1]
        self._norms: tuple[BM25, list[torch.Tensor]] | None = None
        #: The compiled part's view of the segments' terms.
        self.dictionaries = load_native().PostingsDictionaries()
        for i, segment in enumerate(self.segments):
            held, (numbers, df) = (
                segment.dictionary,
                removed_terms[i] if removed_terms else (_NONE, _NONE),
            )
            layer = None if held.first_layer is None else held.first_layer.data
            steps = None if held.exponents is None else held.exponents.data
            self.dictionaries.add(
                held.hashes.data,
                held.first.data,
                held.df.data,
                layer,
                steps,
                numbers.data,
                df.data,
                held.kind,
            )

    @property
    def average_length(self) -> float:
        """Terms of a record, on average."""
        return self.sum_lengths / max(1, self.n_records)

    def norms(self, bm25: BM25) -> list[torch.Tensor]:
        """The bits of each length's norm (float64), for each segment; kept for the next search."""
        held = self._norms  # read once: another thread may put others there
        if held is None or held[0] != bm25:
            made = [
                bm25.norms(segment.length_table, self.average_length) for segment in self.segments
            ]
            self._norms = held = bm25, [torch.from_numpy(each.view(np.int64)) for each in made]
        return held[1]


@dataclass(frozen=True)
class TermWeight:
    """A term of a query, and what it counts in the search.

    Attributes:
        term: as bytes.
        weight: idf of BM25 (float32's value); of vectors 1.
        absent: what a record without it gets (bm25l, bm25+).
    """

    term: bytes
    weight: float
    absent: float


class QueryPlan:
    """What a batch of queries reads: terms looked up in every segment, weighed, and their lists in
    the order in which they are summed."""

    def __init__(
        self,
        collection: Collection,
        queries: Sequence[QueryTerms],
        bm25: BM25,
        allowed: Sequence[np.ndarray | None] | None,
    ):
        self.collection, self.bm25 = collection, bm25
        self._allowed = _checked_allowed(collection.segments, allowed)
        known: dict[bytes, int] = {}
        terms, weights, self._first = list[int](), list[float](), [0]
        for query in queries:
            for term, weight in _items(query):
                terms.append(known.setdefault(term_bytes(term), len(known)))
                weights.append(weight)
            self._first.append(len(terms))
        self._tokens, self._token_weights = np.array(terms, np.int64), np.array(weights, np.float64)
        self.look_up(list(known))

    @property
    def n_queries(self) -> int:
        return len(self._first) - 1

    def look_up(self, terms: list[bytes]) -> None:
        """Finds terms in every segment, and weighs them."""
        self._terms, self._names = terms, [name_of(term) for term in terms]
        self._is_read = np.zeros((len(self.collection.segments), len(terms)), bool)
        numbers, shared = self.collection.dictionaries.look_up(
            torch.from_numpy(hashes_of(terms).view(np.int64))
        )
        self._numbers = numbers.numpy()
        for segment, i, count in shared:  # the terms themselves tell which
            held, first = self.collection.segments[segment], int(self._numbers[segment, i])
            self._numbers[segment, i] = next(
                (j for j in range(first, first + count) if held.term(j) == terms[i]), -1
            )
        self._weigh()

    def leave_out(self, places: np.ndarray) -> None:
        """Leaves out lists that are of other terms than those with whose hash they were found.
        `places`: among the last `rows`."""
        for segment, name in self._rows[places][:, [0, 9]].tolist():
            self._numbers[segment, name] = -1
        self._weigh()

    def check_names(self, query: int, deadline_s: float = 30.0) -> np.ndarray:
        """Leaves out those of a query's terms that merely share a hash with one, where their lists,
        which say whose they are, were not asked for.

        Returns:
            int64 [3]: requests, bytes asked, bytes moved; none for terms that were looked at
                before.

        Raises as `Segment.term`.
        """
        tokens, costs, is_other = (
            np.unique(self._tokens[self._first[query] : self._first[query + 1]]),
            np.zeros(3, np.int64),
            False,
        )
        for number, segment in enumerate(self.collection.segments):
            here = tokens[(self._numbers[number, tokens] >= 0) & ~self._is_read[number, tokens]]
            names, spent = segment.names(self._numbers[number, here], deadline_s)
            costs += spent
            others = [
                i for i, name in zip(here.tolist(), names, strict=True) if name != self._terms[i]
            ]
            self._numbers[number, others] = -1
            self._is_read[number, here] = True
            is_other = is_other or bool(others)
        if is_other:
            self._weigh()
        return costs

    def _weigh(self) -> None:
        """Global weights of the terms, which change where a list turned out to be another
        term's."""
        held = self.collection
        weights, absent, rows = held.dictionaries.plan(
            torch.from_numpy(self._numbers),
            torch.from_numpy(self._tokens),
            torch.from_numpy(self._token_weights.view(np.int64)),
            torch.tensor(self._first),
            self.bm25.number,
            held.n_records,
            self.bm25.absent_part,
        )
        self._weights, self._absent, self._all_rows = (
            weights.numpy().view(np.float64),
            absent.numpy(),
            rows.numpy(),
        )

    def weight_of(self, i: int) -> TermWeight | None:
        """The weight of a term that was looked up."""
        if not (self._numbers[:, i] >= 0).any():
            return None
        return TermWeight(self._terms[i], float(self._weights[i]), float(self._absent[i]))

    def request(
        self, common: dict[str, Any], heaviest: int | None = None, whole: int = 0
    ) -> dict[str, Any]:
        """What the compiled part is asked. `heaviest`: so many terms of each query alone, those
        that can weigh most; of long lists the first layer, but the whole of the `whole`
        heaviest."""
        rows = self.rows(heaviest, whole)
        segments = self.collection.segments
        norms = (
            self.collection.norms(self.bm25)
            if self.collection.kind == COUNT
            else [None] * len(segments)
        )
        return {
            **common,
            "variant": self.bm25.number,
            "k1": self.bm25.k1,
            "delta": self.bm25.delta,
            "segments": [
                segment.view(allowed, norm)
                for segment, allowed, norm in zip(segments, self._allowed, norms, strict=True)
            ],
            "lists": torch.from_numpy(rows),
            "names": [name for name, _ in self._names],
            "constants": torch.from_numpy(self.constants()),
        }

    def rows(self, heaviest: int | None = None, whole: int = 0) -> np.ndarray:
        """int64 [lists, 12]: the lists that are wanted, by query, segment, and the order of the
        query's terms; columns as in csrc/postings/plan.hpp."""
        rows = self._all_rows
        if heaviest is not None:
            rows = rows[_among_heaviest(self._most(rows), rows[:, 10], rows[:, 11], heaviest)]
            cut = (rows[:, 4] > 0) & ~_among_heaviest(
                self._most(rows), rows[:, 10], rows[:, 11], whole
            )
            rows[cut, 5], rows[cut, 3] = 1, rows[cut, 4]
        if any(is_digest for _, is_digest in self._names):
            rows[:, 6] = np.array([is_digest for _, is_digest in self._names])[rows[:, 9]]
        self._rows = rows
        self._is_read[rows[:, 0], rows[:, 9]] = True
        return rows

    def name(self, i: int) -> bytes:
        """What stands in the lists of a term that was looked up, by the ninth of the columns of
        `rows`, counted from 0."""
        return self._names[i][0]

    def _token_weight(self, number: int, places: np.ndarray) -> np.ndarray:
        """float64: what a count's part, an impact or a float of a segment is multiplied by, of the
        terms at these places: it has them."""
        held, tokens = self.collection.segments[number].dictionary, self._tokens[places]
        found: np.ndarray = (
            self._weights[tokens]
            * self._token_weights[places]
            * held.steps(self._numbers[number, tokens])
        )
        return found

    def _most(self, rows: np.ndarray) -> np.ndarray:
        """float64: the most that each list can add to a score, of impacts."""
        found = np.zeros(len(rows))
        for number, segment in enumerate(self.collection.segments):
            here = rows[:, 0] == number
            largest = segment.dictionary.largest
            if largest is not None:
                found[here] = self._token_weights[rows[here, 11]] * largest[rows[here, 1]]
        return found

    def weighted(self, query: int, number: int) -> Iterator[tuple[int, bytes, float, float]]:
        """Yields the terms of a query that any record has: number in a segment (-1: none), bytes,
        weight (of values, not of steps), and what records without it get."""
        for place in range(self._first[query], self._first[query + 1]):
            token = int(self._tokens[place])
            if (self._numbers[:, token] >= 0).any():
                weight = float(self._weights[token] * self._token_weights[place])
                absent = float(self._absent[token]) * float(self._token_weights[place])
                yield int(self._numbers[number, token]), self._terms[token], weight, absent

    def constant(self, query: int) -> float:
        """What every record gets of a query, float32's value."""
        return float(self.constants()[query])

    def forward_terms(self, query: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(uint32 terms, float64 weights) of a query in a segment, in the order in which they are
        summed."""
        places = np.arange(self._first[query], self._first[query + 1])
        terms = self._numbers[number, self._tokens[places]]
        there = terms >= 0
        return terms[there].astype(np.uint32), self._token_weight(number, places[there])

    def constants(self) -> np.ndarray:
        """float32 [q]: what every record gets, of terms that it does not have; as bm25s sums it."""
        n_queries = self.n_queries
        found = np.zeros(n_queries, np.float32)
        if not self._absent.any():
            return found
        there = np.any(self._numbers >= 0, axis=0)
        for i in range(n_queries):
            tokens = self._tokens[self._first[i] : self._first[i + 1]]
            weights = self._token_weights[self._first[i] : self._first[i + 1]]
            found[i] = (self._absent[tokens] * weights.astype(np.float32))[there[tokens]].sum()
        return found


def _items(query: QueryTerms) -> Iterable[tuple[str | int, float]]:
    """Terms of a query and their weights. Raises InvalidInputError."""
    if isinstance(query, (str, bytes)):
        raise errors.InvalidInputError(
            "query",
            got=type(query).__name__,
            expected="its terms, or a mapping of terms to weights",
        )
    if not isinstance(query, Mapping):
        return [(term, 1.0) for term in query]
    for weight in query.values():
        check_finite("weight of a term", plain(weight))
    return [(term, float(weight)) for term, weight in query.items()]


def _checked_allowed(
    segments: Sequence[Segment], allowed: Sequence[np.ndarray | None] | None
) -> list[torch.Tensor | None]:
    if allowed is None:
        return [None] * len(segments)
    if len(allowed) != len(segments):
        raise errors.InvalidInputError(
            "allowed",
            got=f"{len(allowed)} arrays",
            expected=f"one for each of {len(segments)} segments",
        )
    found: list[torch.Tensor | None] = []
    for segment, bits in zip(segments, allowed, strict=True):
        if bits is not None and (
            bits.dtype != np.uint8 or bits.ndim != 1 or bits.size * 8 < len(segment)
        ):
            raise errors.InvalidInputError(
                "allowed",
                got=f"{bits.dtype} {list(bits.shape)}",
                expected=f"uint8 [{-(-len(segment) // 8)}]",
            )
        found.append(
            None if bits is None else torch.from_numpy(np.require(bits, requirements=["C", "W"]))
        )
    return found


def _among_heaviest(
    most: np.ndarray, query: np.ndarray, place: np.ndarray, count: int
) -> np.ndarray:
    """bool [lists]: those of the `count` terms of each query that can add most, in any segment."""
    if not len(most):
        return np.zeros(0, bool)
    by_place = np.zeros(int(place.max()) + 1)
    np.maximum.at(by_place, place, most)
    places, first = np.unique(place, return_index=True)
    of_query = query[first]
    order = np.lexsort((places, -by_place[places], of_query))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - np.searchsorted(
        of_query[order], of_query[order], side="left"
    )
    chosen = np.zeros(len(by_place), bool)
    chosen[places[rank < count]] = True
    return chosen[place]
