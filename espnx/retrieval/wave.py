"""A wave: queries searched together, from first stage to scores.

    first stage, some lists --> more lists --> ... --> all lists ----> misses: read, score --> outcome
                   \\--> read, check, score as records arrive --------------/

ESPN (sections 4.2 to 4.4), with its stated weakness removed: misses are read at once, ahead of what the prefetch still waits for, instead
of after it. `begin` goes as far as nothing waits for the disk, so that the next wave's first stage runs while this one's records arrive.

With a compact tier (the cascade) the same is done with compact records of all candidates first, and full ones of the best few.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from .advice import Steps
from .first_stage import Allowed, Candidates, FirstStage
from .hot import HotDocuments
from .rerank import QueryVectors, score
from .resident import ResidentTier
from .result import Timings
from .scoring import Costs, TierScoring
from .tier import Tier


@dataclass(frozen=True)
class Request:
    """What every query of a wave asks for.

    Attributes:
        candidates: of the first stage.
        depth: how many of them are scored exactly.
        nprobe, steps: lists, and the shares of them after which reads begin.
        allowed: which records may be found; None for all.
        at_least: more than `nprobe` lists are scanned where those hold fewer records that may be found.
        is_pipelined: another wave's first stage runs before this one is finished, so nothing of it is urgent.
        is_cascade: `depth` full records are chosen by compact scores of all candidates, not by the first stage.
    """

    candidates: int
    depth: int
    nprobe: int
    steps: Steps
    allowed: Allowed | None
    at_least: int
    deadline_s: float
    is_pipelined: bool = False
    is_cascade: bool = False


@dataclass(frozen=True)
class Means:
    """What a search works with."""

    first_stage: FirstStage
    full: Tier
    compact: Tier | ResidentTier | None
    workers: ThreadPoolExecutor
    device: torch.device
    gap_bytes: int
    hot: HotDocuments | None


@dataclass(frozen=True)
class Outcome:
    """One query's candidates in first-stage order (compact order in a cascade), and exact scores of the first `depth` of them."""

    numbers: np.ndarray
    similarities: np.ndarray
    exact: np.ndarray
    hit_rate: float


class Wave:
    """See the module. `begin`, then `finish`; after a failure of either, everything under way has been cancelled."""

    def __init__(self, means: Means, queries: list[QueryVectors], request: Request):
        self.queries = queries
        self._means, self._request = means, request
        self._depths = [request.depth if len(query.tokens) else 0 for query in queries]  # MaxSim of no tokens says nothing
        self._full = self._scoring(means.full, means.hot)
        compact = means.compact if request.is_cascade else None
        self._resident = compact if isinstance(compact, ResidentTier) else None
        self._compact = self._scoring(compact, None) if isinstance(compact, Tier) else None
        self._final: list[Candidates] = []
        self._wanted = self._missed = [0] * len(queries)
        self.timings, self.costs = Timings(), Costs()
        self._begun = time.perf_counter()

    def _scoring(self, tier: Tier, hot: HotDocuments | None) -> TierScoring:
        means = self._means
        # A block holds a dozen compact records: what lies between two that are wanted is other blocks, nearly as much again.
        gap_bytes = means.gap_bytes if tier is means.full else 0
        return TierScoring(
            tier, self.queries, means.workers, means.device, gap_bytes=gap_bytes, deadline_s=self._request.deadline_s, hot=hot
        )

    def begin(self) -> None:
        """The first stage, and the start of every read that it leads to."""
        try:
            self._begin()
        except BaseException:
            self.cancel()
            raise

    def _begin(self) -> None:
        request = self._request
        self._begun = begun = time.perf_counter()
        vectors = np.stack([query.vector for query in self.queries])
        search = self._means.first_stage.start(vectors, request.candidates, request.nprobe, request.allowed, request.at_least)
        for step in request.steps if request.depth else ():
            early = search.advance(step)
            if step == request.steps[0]:
                self.timings.delta_s = time.perf_counter() - begun
            self._ask(early, is_last=False)
        self._final = search.complete()
        complete = time.perf_counter()
        self.timings.prefetch_budget_s = complete - begun - self.timings.delta_s
        self._prefetch_begun = begun + self.timings.delta_s
        if request.depth:
            self._missed = self._ask(self._final, is_last=True)

    def _ask(self, candidates: list[Candidates], *, is_last: bool) -> list[int]:
        """Starts the reads for what the first stage knows. Returns how many records were new, per query."""
        request = self._request
        if self._resident is not None:
            candidates = [self._by_resident(q, found) for q, found in enumerate(candidates)]
            if is_last:
                self._final = candidates
        all_compact = self._compact is not None
        wanted = [
            numbers if all_compact and depth else numbers[:depth] for (numbers, _), depth in zip(candidates, self._depths, strict=True)
        ]
        self._wanted = [len(numbers) for numbers in wanted]
        return (self._full if self._compact is None else self._compact).ask(wanted, urgent=is_last and not request.is_pipelined)

    def _by_resident(self, q: int, candidates: Candidates) -> Candidates:
        """Candidates by the score of their compact rows in RAM."""
        numbers, similarities = candidates
        resident, query = self._resident, self.queries[q]
        if resident is None or not len(numbers) or not self._depths[q]:
            return candidates
        begun = time.perf_counter()
        maxsim = score(resident, resident.memory, resident.position_bytes(numbers), numbers, query)
        self.timings.compact_s += time.perf_counter() - begun
        return _ordered(numbers, maxsim + query.similarity_weight * similarities)

    def finish(self) -> list[Outcome]:
        """Waits for the records, and for those of the best few in a cascade. Raises what a read or a check raised."""
        try:
            return self._finish()
        except BaseException:
            self.cancel()
            raise

    def _finish(self) -> list[Outcome]:
        begun = time.perf_counter()
        if self._compact is not None:
            self._choose_by_compact(self._compact)
        scored = self._full.finish()
        end = time.perf_counter()
        self.costs.add(self._full.costs)
        self.timings.critical_io_s = min(self.costs.waited_s, end - begun)
        self.timings.maxsim_s = self.costs.maxsim_s + self.timings.compact_s
        if self._request.steps:
            self.timings.prefetch_s = max(0.0, self.costs.finished_at - self._prefetch_begun)
        self.timings.total_s = end - self._begun
        outcomes = []
        hit_rates = [1 - m / w if w and self._request.steps else 0.0 for m, w in zip(self._missed, self._wanted, strict=True)]
        for (numbers, similarities), (known, scores), hit_rate, depth in zip(self._final, scored, hit_rates, self._depths, strict=True):
            head = numbers[:depth]
            exact = scores[np.searchsorted(known, head)] if len(head) else np.empty(0, np.float32)
            outcomes.append(Outcome(numbers, similarities, exact, hit_rate))
        return outcomes

    def _choose_by_compact(self, compact: TierScoring) -> None:
        ordered = []
        for q, (known, scores) in enumerate(compact.finish()):
            numbers, similarities = self._final[q]
            if not len(known):
                ordered.append(self._final[q])
                continue
            maxsim = scores[np.searchsorted(known, numbers)]
            ordered.append(_ordered(numbers, maxsim + self.queries[q].similarity_weight * similarities))
        self._final = ordered
        self.costs.add(compact.costs)
        self._full.ask([numbers[:depth] for (numbers, _), depth in zip(ordered, self._depths, strict=True)], urgent=True)

    def cancel(self) -> None:
        """Ends the reads under way."""
        self._full.cancel()
        if self._compact is not None:
            self._compact.cancel()


def _ordered(numbers: np.ndarray, scores: np.ndarray) -> Candidates:
    order = np.lexsort((numbers, -scores))
    return numbers[order], scores[order]
