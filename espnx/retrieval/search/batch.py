"""The queries of one call in batches, from first stage to hits: one's first stage runs while the
records of the one before arrive.

    first stage, some lists --> more lists --> ... --> all lists ----> misses: read, score --> hits
                   \\--> read, check, score as records arrive --------------/

ESPN (sections 4.2 to 4.4), with its stated weakness removed: misses are read at once, ahead of what
the prefetch still waits for, instead of after it. `begin` goes as far as nothing waits for the
disk.

With a coarse tier (the cascade) the same is done with coarse records of all candidates first, and
full ones of the best few.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...device.interface import DeviceStats
from ...device.records.score import score
from ..first_stage.fused import FusedSearch
from ..first_stage.interface import Allowed, Candidates, StageReads
from ..first_stage.ties import settled
from ..store.tier import Tier
from .chosen_stage import ChosenStage
from .gate import SearchGate
from .hits import ScoredCandidates, hits_of
from .known import KnownCandidates
from .opened.scoring import QueryVectors, TierScoring
from .opened.version import OpenVersion
from .options import SearchOptions
from .prefetch import NO_PREFETCH, Steps
from .result import SearchResult, Timings

log = logging.getLogger(__name__)

#: A batch is cut so that its records, candidates and lists take no more memory than this, and two
#: batches are under way at a time.
_BATCH_BYTES = 48 << 20
#: More queries than `_TOGETHER` are cut into at least so many batches.
_BATCHES = 2
_TOGETHER = 4


@dataclass(frozen=True)
class BatchPlan:
    """What was asked for, and what follows from it for this store and these queries.

    Attributes:
        options: as asked.
        candidates: of the first stage; no more than there are.
        depth: how many of them are scored exactly.
        steps: shares of the first stage's work after which reads begin.
        predicted_s: of the search, where the steps were chosen by that; else 0.
        allowed: which records may be found; None for all.
        at_least: the first stage looks at more than its effort says where that finds fewer records.
        is_pipelined: another batch's first stage runs before this one is finished, so nothing of it
            is urgent.
    """

    options: SearchOptions
    candidates: int
    depth: int
    steps: Steps
    predicted_s: float
    allowed: Allowed | None
    at_least: int
    is_pipelined: bool = False

    @property
    def kind(self) -> Hashable:
        """Searches of one kind take about the same time."""
        return (
            self.options.effort,
            self.candidates,
            self.depth,
            self.options.is_cascade,
            self.allowed is None,
        )


def search_in_batches(
    version: OpenVersion,
    stage: ChosenStage,
    gate: SearchGate,
    queries: list[QueryVectors],
    options: SearchOptions,
    encode_s: float,
    *,
    is_alone: bool,
) -> Iterator[SearchResult]:
    """One result per query, in order.

    Args:
        version: searched; the caller holds it.
        stage: that finds candidates, of this version. options: with a number of candidates.
        gate: tells whether another search has begun meanwhile.
        encode_s: seconds that encoding each query has taken.
        is_alone: whether no other search was under way at the start.
    """
    is_alone = is_alone and len(queries) == 1
    plan = _plan(version, stage, queries, options, is_alone=is_alone)
    size = _queries_of_a_batch(version, stage, len(queries), plan)
    plan = replace(plan, is_pipelined=size < len(queries))
    under_way: list[QueryBatch] = []
    try:
        for first in range(0, len(queries), size):
            batch = QueryBatch(version, stage, queries[first : first + size], plan, first)
            under_way.append(batch)
            under_way[-1].begin()
            if len(under_way) > 1:
                yield from under_way.pop(0).results(encode_s)
        for batch in under_way:
            yield from batch.results(encode_s)
            if is_alone and gate.still_alone:
                stage.prefetch.learn(
                    plan.kind, plan.steps, batch.timings.first_stage_s, batch.timings.total_s
                )
    except BaseException:
        for batch in under_way:
            batch.cancel()
        raise


def _plan(
    version: OpenVersion,
    stage: ChosenStage,
    queries: list[QueryVectors],
    options: SearchOptions,
    *,
    is_alone: bool,
) -> BatchPlan:
    allowed = version.filters.allowed(options.include, options.exclude)
    candidates = min(options.wanted, version.end_number)
    # Who names a number of lists wants no more of them, as long as they hold k documents.
    at_least = (
        candidates if options.effort is None or allowed is not None else min(options.k, candidates)
    )
    depth = options.depth if any(len(query.tokens) for query in queries) else 0
    plan = BatchPlan(
        options, candidates, depth, options.steps or NO_PREFETCH, 0.0, allowed, at_least
    )
    if options.steps is not None or not is_alone:
        why = (
            "as asked"
            if options.steps is not None
            else "the first stages of a batch, or of other callers, hide the reads"
        )
    else:
        steps, predicted_s = stage.prefetch.choose(plan.kind)
        plan = replace(plan, steps=steps, predicted_s=predicted_s or 0.0)
        why = (
            "the first search of its kind"
            if predicted_s is None
            else f"{1e3 * predicted_s:.2f} ms predicted"
        )
    asked = (len(queries), candidates, min(depth, candidates))
    log.debug(
        "queries: %d, candidates: %d, scored: %d, prefetch after %s: %s",
        *asked,
        plan.steps or "no step",
        why,
    )
    return plan


def _queries_of_a_batch(
    version: OpenVersion, stage: ChosenStage, queries: int, plan: BatchPlan
) -> int:
    count = max(1, version.store.count)
    bytes_each = plan.depth * version.store.full.size_bytes / count
    bytes_each += stage.loaded.search_bytes(
        plan.candidates, plan.options.effort, plan.allowed, plan.at_least
    )
    if plan.options.is_cascade and version.ram_tier is None and version.store.coarse is not None:
        bytes_each += plan.candidates * version.store.coarse.size_bytes / count
    most = int(_BATCH_BYTES / max(1.0, bytes_each))
    return max(1, min(most, queries if queries <= _TOGETHER else -(-queries // _BATCHES)))


class QueryBatch:
    """See the module. `begin`, then `finish`; after a failure of either, everything under way has
    been cancelled."""

    def __init__(
        self,
        version: OpenVersion,
        stage: ChosenStage,
        queries: list[QueryVectors],
        plan: BatchPlan,
        first_query: int,
    ):
        self.queries, self._first_query = queries, first_query
        self._version, self._stage, self._plan = version, stage, plan
        # MaxSim of no tokens says nothing
        self._depths = [plan.depth if len(query.tokens) else 0 for query in queries]
        self._full = self._scoring(version.store.full)
        self._resident = version.ram_tier if plan.options.is_cascade else None
        coarse = (
            version.store.coarse if plan.options.is_cascade and version.ram_tier is None else None
        )
        self._coarse = None if coarse is None else self._scoring(coarse)
        self._final: list[Candidates] = []
        self._by_stage: list[Mapping[str, Candidates]] = []
        self._stage_reads = StageReads()
        self._wanted = self._missed = [0] * len(queries)
        self.timings, self.stats, self.n_hot = Timings(), DeviceStats(), 0
        self._begun = time.perf_counter()

    def _scoring(self, tier: Tier) -> TierScoring:
        version, deadline_s = self._version, self._plan.options.deadline_s
        if tier is version.store.full:
            return TierScoring(
                tier,
                self.queries,
                gap_bytes=version.gap_bytes,
                deadline_s=deadline_s,
                hot=version.hot,
            )
        # A block holds a dozen coarse records: what lies between two that are wanted is other
        # blocks, nearly as much again.
        return TierScoring(tier, self.queries, gap_bytes=0, deadline_s=deadline_s)

    def begin(self) -> None:
        """The first stage, and the start of every read that it leads to."""
        try:
            self._begin()
        except BaseException:
            self.cancel()
            raise

    def _begin(self) -> None:
        plan = self._plan
        self._begun = begun = time.perf_counter()
        prepared = [query.prepared for query in self.queries]
        options = plan.options
        search = self._stage.loaded.start(
            prepared,
            plan.candidates,
            options.effort,
            plan.allowed,
            plan.at_least,
            deadline_s=options.deadline_s,
        )
        for step in plan.steps if plan.depth else ():
            early = search.advance(step)
            if step == plan.steps[0]:
                self.timings.delta_s = time.perf_counter() - begun
            self._ask(early, is_last=False)
            self._tell(early, step)
        self._final = search.complete()
        self._by_stage = (
            search.found
            if isinstance(search, FusedSearch)
            else [{self._stage.kinds[0]: found} for found in self._final]
        )
        self._stage_reads = search.reads
        complete = time.perf_counter()
        self.timings.prefetch_budget_s = complete - begun - self.timings.delta_s
        self._prefetch_begun = begun + self.timings.delta_s
        if plan.depth:
            self._missed = self._ask(self._final, is_last=True)
        self._tell(self._final, 1.0)

    def _tell(self, candidates: list[Candidates], share: float) -> None:
        """Tells the caller what the first stage knows, if asked to."""
        tell, k = self._plan.options.on_candidates, self._plan.options.k
        if tell is None:
            return
        for q, (numbers, _) in enumerate(candidates):
            documents = tuple(self._version.store.texts.get(numbers[:k].tolist()))
            tell(KnownCandidates(self._first_query + q, share, False, documents))

    def _ask(self, candidates: list[Candidates], *, is_last: bool) -> list[int]:
        """Starts the reads for what the first stage knows. Returns how many records were new, per
        query."""
        plan = self._plan
        if self._resident is not None:
            candidates = [self._by_resident(q, found) for q, found in enumerate(candidates)]
        if is_last:
            candidates = self._final = [
                self._settled(q, found) for q, found in enumerate(candidates)
            ]
        all_coarse = self._coarse is not None
        wanted = [
            numbers if all_coarse and depth else numbers[:depth]
            for (numbers, _), depth in zip(candidates, self._depths, strict=True)
        ]
        self._wanted = [len(numbers) for numbers in wanted]
        return (self._full if self._coarse is None else self._coarse).ask(
            wanted, is_urgent=is_last and not plan.is_pipelined
        )

    def _settled(self, q: int, candidates: Candidates) -> Candidates:
        """So that those which are scored exactly do not depend on how records lie."""
        return settled(candidates, self._depths[q], self._version.store.texts.first_of)

    def _by_resident(self, q: int, candidates: Candidates) -> Candidates:
        """Candidates by the score of their coarse rows in RAM."""
        numbers, similarities = candidates
        resident, query = self._resident, self.queries[q]
        if resident is None or not len(numbers) or not self._depths[q]:
            return candidates
        begun = time.perf_counter()
        maxsim = score(resident, resident.memory, resident.position_bytes(numbers), numbers, query)
        self.timings.coarse_s += time.perf_counter() - begun
        return _ordered(numbers, maxsim + query.similarity_weight * similarities)

    def finish(self) -> list[ScoredCandidates]:
        """Waits for the records, and for those of the best few in a cascade. Raises what a read or
        a check raised."""
        try:
            return self._finish()
        except BaseException:
            self.cancel()
            raise

    def _finish(self) -> list[ScoredCandidates]:
        begun = time.perf_counter()
        if self._coarse is not None:
            self._choose_by_coarse(self._coarse)
        scored = self._full.finish()
        end = time.perf_counter()
        self.stats += self._full.stats
        self.n_hot = self._full.n_hot
        self.timings.critical_io_s = min(self.stats.waiting_s, end - begun)
        self.timings.maxsim_s = self.stats.computing_s + self.timings.coarse_s
        if self._plan.steps:
            finished_at = max(
                each.finished_at for each in (self._full, self._coarse) if each is not None
            )
            self.timings.prefetch_s = max(0.0, finished_at - self._prefetch_begun)
        self.timings.total_s = end - self._begun
        outcomes = []
        hit_rates = [
            1 - m / w if w and self._plan.steps else 0.0
            for m, w in zip(self._missed, self._wanted, strict=True)
        ]
        for (numbers, similarities), (known, scores), hit_rate, depth in zip(
            self._final, scored, hit_rates, self._depths, strict=True
        ):
            head = numbers[:depth]
            exact = scores[np.searchsorted(known, head)] if len(head) else np.empty(0, np.float32)
            outcomes.append(ScoredCandidates(numbers, similarities, exact, hit_rate))
        return outcomes

    def _choose_by_coarse(self, coarse: TierScoring) -> None:
        ordered = []
        for q, (known, scores) in enumerate(coarse.finish()):
            numbers, similarities = self._final[q]
            if not len(known):
                ordered.append(self._final[q])
                continue
            maxsim = scores[np.searchsorted(known, numbers)]
            ordered.append(
                self._settled(
                    q, _ordered(numbers, maxsim + self.queries[q].similarity_weight * similarities)
                )
            )
        self._final = ordered
        self.stats += coarse.stats
        self._full.ask(
            [numbers[:depth] for (numbers, _), depth in zip(ordered, self._depths, strict=True)],
            is_urgent=True,
        )

    def results(self, encode_s: float) -> Iterator[SearchResult]:
        """Waits, and makes the hits of each query. Queries that were searched together share what
        that has cost."""
        found, plan, store, count = (
            self.finish(),
            self._plan,
            self._version.store,
            len(self.queries),
        )
        timings, stats = self.timings, self.stats
        timings.encode_s, timings.predicted_s = encode_s, plan.predicted_s
        for i, (query, candidates) in enumerate(zip(self.queries, found, strict=True)):
            begun = time.perf_counter()
            hits = hits_of(store, candidates, query.tokens, plan.options, self._by_stage[i])
            merge_s = time.perf_counter() - begun
            if (tell := plan.options.on_candidates) is not None:
                documents = tuple((hit.id, hit.text) for hit in hits)
                tell(KnownCandidates(self._first_query + i, 1.0, True, documents))
            yield SearchResult(
                hits=hits,
                candidates=len(candidates.numbers),
                reranked=len(candidates.exact),
                hit_rate=candidates.hit_rate,
                bytes_asked=_share(stats.bytes_asked, i, count),
                bytes_moved=_share(stats.bytes_moved, i, count),
                requests=_share(stats.read_requests, i, count),
                hot=_share(self.n_hot, i, count),
                effective_path=store.effective_path,
                fallback_reason=store.fallback_reason,
                prefetch_steps=plan.steps,
                queries_together=count,
                stages=self._stage.kinds,
                stage_requests=_share(self._stage_reads.requests, i, count),
                stage_bytes=_share(self._stage_reads.bytes_moved, i, count),
                stage_device_bytes=_share(self._stage_reads.device_bytes, i, count),
                timings=replace(
                    timings, merge_s=merge_s, total_s=timings.total_s + merge_s + encode_s
                ),
            )

    def cancel(self) -> None:
        """Ends the reads under way."""
        self._full.cancel()
        if self._coarse is not None:
            self._coarse.cancel()


def _ordered(numbers: np.ndarray, scores: np.ndarray) -> Candidates:
    order = np.lexsort((numbers, -scores))
    return numbers[order], scores[order]


def _share(total: int, i: int, parts: int) -> int:
    return total * (i + 1) // parts - total * i // parts
