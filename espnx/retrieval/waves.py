"""The queries of one call, wave by wave: the first stage of one runs while the records of the one before arrive."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import errors
from .advice import NO_PREFETCH
from .explain import token_matches
from .first_stage import Allowed
from .ranking import rank
from .request import Arguments
from .rerank import QueryVectors
from .result import Hit, SearchResult
from .searchable import Searchable
from .tier import Tier
from .turns import Turns
from .wave import Outcome, Request, Wave

#: A wave is cut so that its records, candidates and lists take no more memory than this, and two waves are under way at a time.
_WAVE_BYTES = 48 << 20
#: What the first stage notes of a candidate, or of a list to scan: its number and its similarity.
_FOUND_BYTES = 12
#: A batch of more queries than `_TOGETHER` is cut into at least so many waves: one's first stage runs while another's records arrive.
_WAVES = 2
_TOGETHER = 4


class Waves:
    """See the module.

    Args:
        version: searched; the caller holds it.
        turns: tell whether another search has begun meanwhile.
        is_alone: whether none was under way at the start.
        allowed: which records may be found; None for all.
    """

    def __init__(self, version: Searchable, turns: Turns, is_alone: bool, arguments: Arguments, allowed: Allowed | None, explain: bool):
        self._version, self._turns, self._is_alone = version, turns, is_alone
        self._arguments, self._allowed, self._explain = arguments, allowed, explain

    def search(self, queries: list[QueryVectors], encode_s: float) -> Iterator[SearchResult]:
        """One result per query, in order. `encode_s`: seconds that encoding each has taken."""
        is_alone = self._is_alone and len(queries) == 1
        request, kind, predicted_s = self._plan(queries, is_alone)
        size = self._wave_queries(len(queries), request)
        request = replace(request, is_pipelined=size < len(queries))
        under_way: Wave | None = None
        wave: Wave | None = None
        try:
            for first in range(0, len(queries), size):
                wave = Wave(self._version.means, queries[first : first + size], request)
                wave.begin()
                if under_way is not None:
                    yield from self._results(under_way, request, encode_s, 0.0)
                under_way = wave
            if under_way is not None:
                yield from self._results(under_way, request, encode_s, predicted_s)
                if is_alone and self._turns.still_alone:
                    timings = under_way.timings
                    self._version.adviser.learn(kind, request.steps, timings.first_stage_s, timings.total_s)
        except BaseException:
            for begun in (under_way, wave):
                if begun is not None:
                    begun.cancel()
            raise

    def _plan(self, queries: list[QueryVectors], is_alone: bool) -> tuple[Request, Hashable, float]:
        arguments, version = self._arguments, self._version
        nprobe = version.default_nprobe if arguments.nprobe is None else arguments.nprobe
        candidates = min(arguments.candidates, version.store.end_number)
        # Who names a number of lists wants no more of them, as long as they hold k documents.
        at_least = candidates if arguments.nprobe is None or self._allowed is not None else min(arguments.k, candidates)
        depth = arguments.depth if any(len(query.tokens) for query in queries) else 0
        kind = (nprobe, candidates, depth, arguments.is_cascade, self._allowed is None)
        steps, predicted_s = arguments.steps, None
        if steps is None:
            steps, predicted_s = version.adviser.choose(kind) if is_alone else (NO_PREFETCH, None)
        request = Request(candidates, depth, nprobe, steps, self._allowed, at_least, arguments.deadline_s, is_cascade=arguments.is_cascade)
        return request, kind, predicted_s or 0.0

    def _wave_queries(self, queries: int, request: Request) -> int:
        version = self._version

        def mean_bytes(tier: Tier) -> float:
            return tier.size_bytes / max(1, version.store.count)

        lists = version.first_stage.lists_at_most(request.nprobe, request.allowed, request.at_least)
        bytes_each = request.depth * mean_bytes(version.store.full) + _FOUND_BYTES * (request.candidates + lists)
        if request.is_cascade and isinstance(version.compact, Tier):
            bytes_each += request.candidates * mean_bytes(version.compact)
        most = int(_WAVE_BYTES / max(1.0, bytes_each))
        return max(1, min(most, queries if queries <= _TOGETHER else -(-queries // _WAVES)))

    def _results(self, wave: Wave, request: Request, encode_s: float, predicted_s: float) -> Iterator[SearchResult]:
        outcomes = wave.finish()
        timings, costs, store, count = wave.timings, wave.costs, self._version.store, len(wave.queries)
        timings.encode_s, timings.predicted_s = encode_s, predicted_s
        for i, (query, outcome) in enumerate(zip(wave.queries, outcomes, strict=True)):
            begun = time.perf_counter()
            hits = self._hits(query, outcome, request.deadline_s)
            merge_s = time.perf_counter() - begun
            yield SearchResult(
                hits=hits,
                candidates=len(outcome.numbers),
                reranked=len(outcome.exact),
                hit_rate=outcome.hit_rate,
                bytes_asked=_share(costs.bytes_asked, i, count),
                bytes_moved=_share(costs.bytes_moved, i, count),
                requests=_share(costs.requests, i, count),
                hot=_share(costs.hot, i, count),
                effective_path=store.effective_path,
                fallback_reason=store.fallback_reason,
                prefetch_steps=request.steps,
                queries_together=count,
                timings=replace(timings, merge_s=merge_s, total_s=timings.total_s + merge_s + encode_s),
            )

    def _hits(self, query: QueryVectors, outcome: Outcome, deadline_s: float) -> list[Hit]:
        for scores in (outcome.exact, outcome.similarities):
            if not np.isfinite(scores).all():
                got = f"a score of {scores[~np.isfinite(scores)][0]}"
                raise errors.InvalidInputError("query vectors", got=got, expected="scores that float32 can hold", fix="smaller vectors")
        store = self._version.store
        chosen, values, exact = rank(outcome, self._arguments.k)
        rows = store.texts.get(chosen.tolist())
        matches: Sequence[Any] = [None] * len(chosen)
        if self._explain and len(chosen):
            matches = token_matches(store.full, chosen, query.tokens, deadline_s)
        return [
            Hit(id=identifier, score=float(value), text=text, number=int(number), reranked=i < exact, matches=found)
            for i, (number, value, (identifier, text), found) in enumerate(zip(chosen, values, rows, matches, strict=True))
        ]


def _share(total: int, i: int, parts: int) -> int:
    return total * (i + 1) // parts - total * i // parts
