"""Searches over segments of postings: one plan a query, all queries of a batch in one call of the compiled part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import errors
from ..checks import check_finite, check_whole
from ..storage import NativeEngine
from ..storage.native import load_native
from .bm25 import BM25
from .layout import COUNT, FLOAT, LIST_ALIGN_BYTES
from .segment import Segment
from .terms import hashes_of, name_of, term_bytes

#: A query as terms: as often as they stand in it, or each with a weight.
QueryTerms = Sequence[str] | Sequence[int] | Mapping[str, float] | Mapping[int, float]
K_MAX = 1 << 24
_COLUMNS = 10  # of a list that is wanted: see csrc/bindings/postings.cpp


@dataclass(frozen=True, eq=False)
class Found:
    """What a search of q queries found.

    Attributes:
        numbers: int64 [q, k]: records, best first, of equal scores the lower number first; -1 where no more have a term of the query.
        scores: float32 [q, k]; minus infinity there.
        requests, bytes_asked, bytes_moved: int64 [q]: of the reads; moved: what crossed the queue, whole blocks.
    """

    numbers: np.ndarray
    scores: np.ndarray
    requests: np.ndarray
    bytes_asked: np.ndarray
    bytes_moved: np.ndarray

    def __repr__(self) -> str:
        q, k = self.numbers.shape
        mean = self.requests.mean() if q else 0
        return f"<Found: {q} queries, k {k}, {mean:.1f} requests a query>"


@dataclass(frozen=True)
class TermWeight:
    """A term of a query, and what it counts in the search.

    Attributes:
        term: as bytes.
        weight: idf of BM25 (float32's value), or the query's weight times the scale of impacts.
        absent: what a record without it gets (bm25l, bm25+).
    """

    term: bytes
    weight: float
    absent: float


class PostingsSearch:
    """Segments that are searched together: what is global (how many records have a term, how long records are) is summed over them.

    Every method may be called from any thread.

    Args:
        engine: of the segments' reads.
        segments: of one kind, COUNT or impacts; their numbers do not overlap.
        removed: records that were deleted, and their lengths in terms: both are taken from the totals.
        removed_df: of deleted records, how many had each term; by the term's bytes.

    Raises InvalidInputError for segments of several kinds.
    """

    def __init__(
        self,
        engine: NativeEngine,
        segments: Sequence[Segment],
        *,
        removed: tuple[int, int] = (0, 0),
        removed_df: Mapping[bytes, int] | None = None,
    ):
        self.engine, self.segments = engine, list(segments)
        kinds = {segment.dictionary.kind for segment in segments}
        if len(kinds) > 1:
            raise errors.InvalidInputError("segments of postings", got=f"kinds {sorted(kinds)}", expected="one kind")
        self.kind = kinds.pop() if kinds else COUNT
        self.n_records = sum(len(segment) for segment in segments) - removed[0]
        self.sum_lengths = sum(segment.dictionary.sum_lengths for segment in segments) - removed[1]
        self._removed_df = removed_df or {}
        self._norms: tuple[BM25, list[torch.Tensor]] | None = None

    def __len__(self) -> int:
        return self.n_records

    def search(
        self,
        queries: Sequence[QueryTerms],
        k: int = 10,
        *,
        bm25: BM25 | None = None,
        allowed: Sequence[np.ndarray | None] | None = None,
        threads: int | None = None,
        deadline_s: float = 30.0,
    ) -> Found:
        """The k best records of each query.

        Args:
            queries: terms of each: a sequence, in which one that comes twice counts twice, or a mapping to weights. Scores are summed in
                float32 in their order. Of BM25, weights multiply; unknown terms are left out.
            k: 1 or more.
            bm25: how counts become scores; None: `BM25()`. Not of impacts.
            allowed: for each segment uint8 [ceil(n / 8)]: bit i % 8 of byte i / 8 says whether record i may be found; None: all may.
            threads: at most so many scan; None: as many as torch uses, one for a query alone.
            deadline_s: of each query's reads.

        Raises:
            InvalidInputError: of arguments.
            ChecksumError: a list is damaged. ReadError, TruncatedFileError, DeadlineExceededError, ...: of reads. No result is given then.
        """
        check_whole("k", k, 1, K_MAX)
        check_finite("deadline_s", deadline_s)
        if threads is not None:
            check_whole("threads", threads, 1, 1024)
        plan = _Plan(self, queries, bm25 or BM25(), allowed)
        common = {"k": k, "threads": threads or max(1, min(torch.get_num_threads(), len(queries))), "deadline_s": float(deadline_s)}
        for _ in range(len(self.segments) + 1):
            found = load_native().search_postings(self.engine.native, plan.request(common))
            if not found[3].numel():
                break
            plan.leave_out(found[3].numpy())  # of another term with the same hash: the totals change, too
        costs = found[2].numpy()
        return Found(found[0].numpy(), found[1].numpy(), costs[:, 0], costs[:, 1], costs[:, 2])

    def begin(
        self,
        query: QueryTerms,
        k: int,
        *,
        bm25: BM25 | None = None,
        allowed: Sequence[np.ndarray | None] | None = None,
        deadline_s: float = 30.0,
    ) -> PostingsState:
        """Starts the reads of one query, whose result is asked for later. Arguments and errors are `search`'s."""
        check_whole("k", k, 1, K_MAX)
        return PostingsState(self, query, k, bm25 or BM25(), allowed, deadline_s)

    def weigh(self, terms: Sequence[bytes], bm25: BM25) -> list[TermWeight | None]:
        """What each term counts; None for one that no record has. Of impacts the weight is the scale of one step."""
        plan = _Plan(self, [], bm25, None)
        plan.look_up(list(terms))
        return [plan.weight_of(i) for i in range(len(terms))]

    def norms(self, bm25: BM25) -> list[torch.Tensor]:
        """For each segment, the bits of the float64 norm of each length; kept for the next search."""
        if self._norms is None or self._norms[0] != bm25:
            average = self.sum_lengths / max(1, self.n_records)
            made = [bm25.norms(segment.length_table, average) for segment in self.segments]
            self._norms = bm25, [torch.from_numpy(each.view(np.int64)) for each in made]
        return self._norms[1]


class PostingsState:
    """One query whose lists are being read. `partial` and `complete` may be called in any order, by one thread at a time.

    Lists are read in the order in which they are summed; a partial result is of the first of them alone.
    """

    def __init__(
        self, search: PostingsSearch, query: QueryTerms, k: int, bm25: BM25, allowed: Sequence[np.ndarray | None] | None, deadline_s: float
    ):
        self._search, self._k, self._deadline_s = search, k, deadline_s
        self._plan = _Plan(search, [query], bm25, allowed)
        self._begin()

    def _begin(self) -> None:
        common = {"k": self._k, "threads": 1, "deadline_s": float(self._deadline_s)}
        self._request = self._plan.request(common)  # the compiled part looks into its tensors
        self._ticket = load_native().PostingsTicket(self._search.engine.native, self._request)

    @property
    def n_lists(self) -> int:
        """How many lists the query reads."""
        return len(self._request["lists"])

    @property
    def list_bytes(self) -> np.ndarray:
        """int64 [lists]: of each, in the order in which they are summed."""
        return self._request["lists"][:, 3].numpy()

    def partial(self, share: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
        """(numbers int64, scores float32) of the best by the first lists alone: as many as make up this share of the bytes, one at least.

        Waits for those. Scores are sums of what was looked at, not bounds. Raises as `PostingsSearch.search`.
        """
        sizes = self.list_bytes
        enough = np.searchsorted(np.cumsum(sizes), share * sizes.sum(), side="left") + 1
        return self._result(int(min(enough, len(sizes))))

    def complete(self) -> tuple[np.ndarray, np.ndarray]:
        """(numbers int64 [at most k], scores float32), best first. Raises as `PostingsSearch.search`."""
        return self._result(self.n_lists)

    def _result(self, n_lists: int) -> tuple[np.ndarray, np.ndarray]:
        for _ in range(len(self._search.segments) + 1):
            numbers, scores, costs, others = self._ticket.result(n_lists)
            if not others.numel():
                break
            self._plan.leave_out(others.numpy())
            self._begin()
            n_lists = min(n_lists, self.n_lists)
        self.costs = costs.numpy()[0]
        found = numbers.numpy()[0] >= 0
        return numbers.numpy()[0][found], scores.numpy()[0][found]


class _Plan:
    """What a batch of queries reads: terms looked up in every segment, weighed, and their lists in the order in which they are summed."""

    def __init__(self, search: PostingsSearch, queries: Sequence[QueryTerms], bm25: BM25, allowed: Sequence[np.ndarray | None] | None):
        self._search, self._bm25 = search, bm25
        self._allowed = _checked_allowed(search.segments, allowed)
        known: dict[bytes, int] = {}
        terms, weights, self._first = list[int](), list[float](), [0]
        for query in queries:
            for term, weight in _items(query):
                terms.append(known.setdefault(term_bytes(term), len(known)))
                weights.append(weight)
            self._first.append(len(terms))
        self._tokens, self._token_weights = np.array(terms, np.int64), np.array(weights, np.float64)
        self.look_up(list(known))

    def look_up(self, terms: list[bytes]) -> None:
        self._terms = terms
        hashes = hashes_of(terms)
        segments = self._search.segments
        self._numbers = np.empty((len(segments), len(terms)), np.int64)
        for i, segment in enumerate(segments):
            self._numbers[i] = segment.look_up(terms, hashes)
        self._weigh()

    def leave_out(self, places: np.ndarray) -> None:
        """Of lists that are of other terms than those with whose hash they were found."""
        for segment, name in self._rows[places][:, [0, 9]].tolist():
            self._numbers[segment, name] = -1
        self._weigh()

    def _weigh(self) -> None:
        """Global weights of the terms, which change where a list turned out to be another term's."""
        search = self._search
        self._weights, self._absent = np.zeros(len(self._terms)), np.zeros(len(self._terms), np.float32)
        if search.kind != COUNT:
            self._weights[:] = 1
            return
        df = np.zeros(len(self._terms), np.int64)
        for numbers, segment in zip(self._numbers, search.segments, strict=True):
            there = numbers >= 0
            df[there] += segment.dictionary.df[numbers[there]]
        for i, term in enumerate(self._terms):
            count = int(df[i]) - search._removed_df.get(term, 0)
            if count <= 0:  # of deleted records alone, or of none
                self._numbers[:, i] = -1
                continue
            idf = self._bm25.idf(min(count, search.n_records), search.n_records)
            self._weights[i], self._absent[i] = np.float32(idf), self._bm25.absent(idf)

    def weight_of(self, i: int) -> TermWeight | None:
        """Of a term that was looked up."""
        if not (self._numbers[:, i] >= 0).any():
            return None
        return TermWeight(self._terms[i], float(self._weights[i]), float(self._absent[i]))

    def request(self, common: dict[str, Any]) -> dict[str, Any]:
        """What the compiled part is asked."""
        search, n_queries = self._search, len(self._first) - 1
        segments, counts = search.segments, np.diff(self._first)
        query = np.repeat(np.arange(n_queries), counts)
        parts = []
        for number, segment in enumerate(segments):
            held = segment.dictionary
            terms = self._numbers[number, self._tokens]
            there = np.flatnonzero(terms >= 0)
            rows = np.zeros((len(there), _COLUMNS + 2), np.int64)
            wanted, tokens = terms[there], self._tokens[there]
            rows[:, 0], rows[:, 1] = number, wanted
            rows[:, 2], rows[:, 3] = held.place(wanted)
            if held.first_layer is not None:
                rows[:, 4] = held.first_layer[wanted].astype(np.int64) * LIST_ALIGN_BYTES
            scale = held.scale if held.kind not in (COUNT, FLOAT) else 1.0
            rows[:, 7] = (self._weights[tokens] * self._token_weights[there] * scale).view(np.int64)
            rows[:, 8] = (self._absent[tokens].astype(np.float64) * self._token_weights[there]).view(np.int64)
            rows[:, 9], rows[:, 10], rows[:, 11] = tokens, query[there], there
            parts.append(rows)
        rows = np.concatenate(parts) if parts else np.zeros((0, _COLUMNS + 2), np.int64)
        if len(parts) > 1:
            rows = rows[np.lexsort((rows[:, 11], rows[:, 0], rows[:, 10]))]
        names = [name_of(term) for term in self._terms]
        rows[:, 6] = np.array([is_digest for _, is_digest in names], np.int64)[rows[:, 9]] if names else 0
        self._rows = rows
        norms = search.norms(self._bm25) if search.kind == COUNT else [None] * len(segments)
        views = [segment.view(allowed, norm) for segment, allowed, norm in zip(segments, self._allowed, norms, strict=True)]
        begin = np.cumsum([0, *(len(name) for name, _ in names)])
        return {
            **common, "variant": self._bm25.number, "k1": self._bm25.k1, "delta": self._bm25.delta, "segments": views,
            "lists": torch.from_numpy(rows[:, :_COLUMNS].copy()),
            "first_list": torch.from_numpy(np.searchsorted(rows[:, 10], np.arange(n_queries + 1))),
            "names": torch.frombuffer(bytearray(b"".join(name for name, _ in names) + b"\0"), dtype=torch.uint8),
            "name_begin": torch.from_numpy(begin), "constants": torch.from_numpy(self._constants(n_queries)),
        }  # fmt: skip

    def _constants(self, n_queries: int) -> np.ndarray:
        """float32 [q]: what every record gets, of terms that it does not have; as bm25s sums it."""
        there = np.any(self._numbers >= 0, axis=0)
        found = np.zeros(n_queries, np.float32)
        if not self._absent.any():
            return found
        for i in range(n_queries):
            tokens = self._tokens[self._first[i] : self._first[i + 1]]
            weights = self._token_weights[self._first[i] : self._first[i + 1]]
            found[i] = (self._absent[tokens] * weights.astype(np.float32))[there[tokens]].sum()
        return found


def _items(query: QueryTerms) -> Iterable[tuple[str | int, float]]:
    """Terms of a query and their weights. Raises InvalidInputError."""
    if isinstance(query, (str, bytes)):
        raise errors.InvalidInputError("query", got=type(query).__name__, expected="its terms, or a mapping of terms to weights")
    if not isinstance(query, Mapping):
        return [(term, 1.0) for term in query]
    for weight in query.values():
        check_finite("weight of a term", weight)
    return [(term, float(weight)) for term, weight in query.items()]


def _checked_allowed(segments: Sequence[Segment], allowed: Sequence[np.ndarray | None] | None) -> list[torch.Tensor | None]:
    if allowed is None:
        return [None] * len(segments)
    if len(allowed) != len(segments):
        raise errors.InvalidInputError("allowed", got=f"{len(allowed)} arrays", expected=f"one for each of {len(segments)} segments")
    found: list[torch.Tensor | None] = []
    for segment, bits in zip(segments, allowed, strict=True):
        if bits is not None and (bits.dtype != np.uint8 or bits.ndim != 1 or bits.size * 8 < len(segment)):
            raise errors.InvalidInputError("allowed", got=f"{bits.dtype} {list(bits.shape)}", expected=f"uint8 [{-(-len(segment) // 8)}]")
        found.append(None if bits is None else torch.from_numpy(np.require(bits, requirements=["C", "W"])))
    return found
