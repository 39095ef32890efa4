"""Two-step searches of impacts: first layers of the heaviest terms' lists give candidates, forward
records read at random exact scores.

Learned sparse queries have dozens of terms, whose lists together touch nearly every record; a few
of them find nearly all of the best (Two-step SPLADE, Lassance et al., 2024). What is found is
scored exactly; what no candidate is, is lost: this mode is asked for by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ... import errors
from ...checks import check_whole, plain
from ...storage import NativeEngine, Plan
from ...storage.native import load_native
from ...suggestions import suggests_keywords
from ..bm25 import BM25
from ..stored.layout import COUNT
from .plan import QueryPlan, QueryTerms
from .search import Found, PostingsSearch


@suggests_keywords
def search_two_step(
    search: PostingsSearch,
    queries: Sequence[QueryTerms],
    k: int = 10,
    *,
    query_terms: int = 16,
    candidates: int = 100,
    whole_terms: int = 8,
    allowed: Sequence[np.ndarray | None] | None = None,
    threads: int | None = None,
    deadline_s: float = 30.0,
) -> Found:
    """The k best of `candidates` records of each query, by exact scores. Arguments, result and
    errors are those of `PostingsSearch.search`.

    Args:
        query_terms: of each query, those that can add most to a score.
        candidates: of each query, k or more; each is a read.
        whole_terms: of these, the heaviest, whose lists are read whole; of the others' long lists
            the first layer.

    Raises InvalidInputError for counts, too.
    """
    if search.collection.kind == COUNT:
        raise errors.InvalidInputError(
            "two-step search",
            got="counts",
            expected="impacts",
            fix="BM25 reads whole lists: use search",
        )
    query_terms, candidates, whole_terms = plain(query_terms), plain(candidates), plain(whole_terms)
    k = search.k_of(k)
    check_whole("query_terms", query_terms, 1)
    check_whole("candidates", candidates, max(1, k))
    check_whole("whole_terms", whole_terms, 0)
    plan = QueryPlan(search.collection, queries, BM25(), allowed)
    first = search.run(
        plan,
        candidates,
        threads=threads,
        deadline_s=deadline_s,
        heaviest=query_terms,
        whole=whole_terms,
    )
    numbers, scores = (
        np.full((len(queries), k), -1, np.int64),
        np.full((len(queries), k), -np.inf, np.float32),
    )
    costs = np.stack([first.requests, first.bytes_asked, first.bytes_moved], axis=1)
    for query in range(len(queries)):
        found = first.numbers[query][first.numbers[query] >= 0]
        # their weights count in the second step alone
        costs[query] += plan.check_names(query, deadline_s)
        exact, spent = score_records(search.engine, plan, query, found, deadline_s)
        best = np.lexsort((found, -exact))[:k]
        numbers[query, : len(best)], scores[query, : len(best)] = found[best], exact[best]
        costs[query] += spent
    return Found(numbers, scores, costs[:, 0], costs[:, 1], costs[:, 2])


def score_records(
    engine: NativeEngine, plan: QueryPlan, query: int, numbers: np.ndarray, deadline_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Exact scores of records of a query in a plan: float32 [n]; and int64 [3]: requests, bytes
    asked, bytes moved.

    Raises ChecksumError for a damaged record, and what a read raises.
    """
    scores, costs = np.zeros(len(numbers), np.float32), np.zeros(3, np.int64)
    collection = plan.collection
    for number, segment in enumerate(collection.segments):
        here = np.flatnonzero(
            (numbers >= segment.first_number) & (numbers < segment.first_number + len(segment))
        )
        if segment.rows is None or not len(here):
            continue
        records = np.sort(numbers[here] - segment.first_number)
        here = here[np.argsort(numbers[here], kind="stable")]
        terms, weights = plan.forward_terms(query, number)
        offsets, sizes = segment.rows.place(records)
        lies = Plan.of(
            segment.forward.file,
            torch.from_numpy(offsets + segment.forward.offset_bytes),
            torch.from_numpy(sizes),
        )
        future = engine.read(lies, deadline_s=deadline_s)
        memory = future.wait()
        found, bad, why = load_native().score_forward(
            memory,
            future.position_bytes,
            torch.from_numpy(sizes),
            torch.from_numpy(records),
            segment.dictionary.salt,
            segment.dictionary.kind,
            segment.forward_term_bytes,
            torch.from_numpy(terms),
            torch.from_numpy(weights.view(np.int64)),
        )
        if bad >= 0:
            raise errors.ChecksumError(
                f"the forward record of number {segment.first_number + int(records[bad])} is "
                f"damaged: {why}",
                path=segment.forward.file.path,
                offset_bytes=segment.forward.offset_bytes + int(offsets[bad]),
                size_bytes=int(sizes[bad]),
                fix="restore the index from a copy, or build it again",
            )
        scores[here] = found.numpy()
        costs += [future.request_count, future.bytes_asked, future.bytes_moved]
    return scores, costs
