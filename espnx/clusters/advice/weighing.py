"""Weighs what two ways to search read, by what reads take on a disk, and says which takes less, or
that it cannot tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from .disk import DiskTimes
from .trials import GRAPH, LISTS, Searched, Trial

#: Of fewer vectors a sample says nothing: all of them lie on a few hundred pages.
N_LEAST = 2000
#: Pages grow with the vectors, at most as fast as these.
_GROWTH = 0.0, 1.0
_QUARTILES = (25, 75)


@dataclass(frozen=True)
class Cost:
    """What a query reads at a recall, the mean.

    Attributes:
        effort: list size of a walk, or lists that are read.
        recall: at which this is.
    """

    recall: float
    effort: float
    pages: float
    requests: float
    size_bytes: float
    rounds: float

    def query_s(self, disk: DiskTimes, in_flight: int) -> float:
        """See `DiskTimes.query_s`."""
        return disk.query_s(self.rounds, self.requests, self.size_bytes, in_flight)

    def between(self, other: Cost, share: float) -> Cost:
        """So far along the straight line to another one."""
        return Cost(
            **{
                each.name: getattr(self, each.name) * (1 - share)
                + getattr(other, each.name) * share
                for each in fields(self)
            }
        )


def mean_cost(found: Searched, k: int) -> Cost:
    """What its queries read, and find."""
    return Cost(
        float(found.hits.mean() / k),
        float(found.effort),
        *(
            float(each.mean())
            for each in (found.pages, found.requests, found.size_bytes, found.rounds)
        ),
    )


def cost_at(trial: Trial, recall: float, disk: DiskTimes, in_flight: int) -> Cost | None:
    """What a query reads at a recall, between two efforts by a straight line; that of the least
    effort where this finds as much, None where the largest does not. An effort counts that nothing
    quicker finds as much as."""
    costs = [mean_cost(each, trial.k) for each in trial.searched]
    kept = list[Cost]()
    for cost in sorted(costs, key=lambda one: (-one.recall, one.query_s(disk, in_flight))):
        if not kept or cost.query_s(disk, in_flight) < kept[-1].query_s(disk, in_flight):
            kept.append(cost)
    kept.reverse()
    for place, cost in enumerate(kept):
        if cost.recall >= recall:
            if place == 0:
                return cost
            low = kept[place - 1]
            return low.between(cost, (recall - low.recall) / (cost.recall - low.recall))
    return None


def extrapolated(small: Cost, large: Cost, sizes: tuple[int, int], n: int) -> tuple[Cost, float]:
    """What a query of all n vectors reads, if reads grow as they did between two samples, by a
    power of the vectors, 0 to 1; and that power, of pages. What fell with more vectors is taken to stay
    as it was."""
    grown: dict[str, float] = {}
    for each in fields(large):
        before, after = getattr(small, each.name), getattr(large, each.name)
        power = growth(before, after, sizes)
        grown[each.name] = after * (n / sizes[1]) ** power
    grown["recall"] = large.recall
    return Cost(**grown), growth(small.pages, large.pages, sizes)


def growth(before: float, after: float, sizes: tuple[int, int]) -> float:
    """The power of the vectors by which something grew."""
    if before <= 0 or after <= 0 or sizes[0] >= sizes[1]:
        return 0.0
    return float(np.clip(math.log(after / before) / math.log(sizes[1] / sizes[0]), *_GROWTH))


def linear(before: float, after: float, sizes: tuple[int, int], n: int) -> float:
    """Something of n vectors that has a fixed part and one that grows with them."""
    per_vector = max(0.0, (after - before) / (sizes[1] - sizes[0]))
    return after + per_vector * (n - sizes[1])


def cost_of_each(trial: Trial, recall: float, disk: DiskTimes, in_flight: int) -> np.ndarray:
    """float64 [q]: seconds of each query with the least effort that finds it so many of its
    neighbours; where none does, with the largest that was tried: it takes that, or more."""
    wanted = recall * trial.k
    low, high = math.floor(wanted), math.ceil(wanted)
    share = wanted - low
    ladder = trial.ladder
    seconds = np.array(
        [
            [
                disk.query_s(*reads, in_flight)
                for reads in zip(each.rounds, each.requests, each.size_bytes, strict=True)
            ]
            for each in ladder
        ]
    )
    hits = np.array([each.hits for each in ladder])

    def at(needed: int) -> np.ndarray:
        is_enough = hits >= needed
        place = np.where(is_enough.any(axis=0), is_enough.argmax(axis=0), len(ladder) - 1)
        found: np.ndarray = seconds[place, np.arange(seconds.shape[1])]
        return found

    return at(low) * (1 - share) + at(high) * share


@dataclass(frozen=True)
class Verdict:
    """Which takes less of the disk's time, or None.

    Attributes:
        choice: ``graph``, ``clusters`` or None: it cannot be told. reasons: for it.
        difference: what clusters take over what the graph takes, as a factor: the middle of the
            folds, of all vectors. spread: the largest of the folds over the smallest, a factor.
        of_queries: that factor of single queries of the larger samples, the lower and the upper
            quartile.
    """

    choice: str | None
    reasons: list[str]
    difference: float | None
    spread: float | None
    of_queries: tuple[float, float] | None


def weigh(
    n: int, over: Sequence[float | None], reach: dict[str, bool], queries: np.ndarray, recall: float
) -> Verdict:
    """Decides.

    Args:
        n: vectors in all.
        over: of each fold, the time of clusters over that of the graph, of all vectors; None where
            one of them does not find so much.
        reach: whether each way finds so much, in all folds.
        queries: float64 [q]: the same of single queries.
    """
    of_queries: tuple[float, float] | None = None
    if len(queries):
        low, high = np.exp(np.percentile(np.log(queries), _QUARTILES))
        of_queries = float(low), float(high)
    known = [each for each in over if each is not None]
    middle = spread = None
    if known:
        middle, spread = float(np.exp(np.mean(np.log(known)))), max(known) / min(known)
    if n < N_LEAST:
        why = f"{n:,} vectors are too few: fewer than {N_LEAST:,} say nothing of one another"
        return Verdict(None, [why], middle, spread, of_queries)
    if not all(reach.values()):
        there = [name for name, does in reach.items() if does]
        missing = " and ".join(name for name, does in reach.items() if not does)
        why = f"{missing} did not find {recall:g} of the neighbours with any effort tried"
        return Verdict(there[0] if there else None, [why], middle, spread, of_queries)
    reasons = list[str]()
    if middle is None or spread is None or of_queries is None:
        return Verdict(None, ["nothing was measured"], middle, spread, of_queries)
    factor = max(middle, 1 / middle)
    if len(known) < 2 or spread >= factor:
        reasons.append(
            f"samples differ by a factor of {spread:.2f}, the two ways by {factor:.2f}"
            if len(known) > 1
            else "one sample has no spread"
        )
    if of_queries[0] <= 1 <= of_queries[1]:
        reasons.append(
            f"queries differ: of the middle half of them clusters take {of_queries[0]:.2f} to "
            f"{of_queries[1]:.2f} times what the graph takes"
        )
    elif (of_queries[0] > 1) != (middle > 1):
        reasons.append("the mean says one thing, most single queries the other")
    if reasons:
        return Verdict(None, reasons, middle, spread, of_queries)
    return Verdict(
        GRAPH if middle > 1 else LISTS,
        [
            (
                f"clusters take {middle:.2f} times what the graph takes; samples differ by a "
                f"factor of {spread:.2f}, the middle half of the queries from {of_queries[0]:.2f} "
                f"to {of_queries[1]:.2f}"
            )
        ],
        middle,
        spread,
        of_queries,
    )
