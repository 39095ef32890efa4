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
#: Of all queries, that each of two parts has at least.
PART_LEAST = 0.2


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
        return disk.query_s(self.rounds, self.size_bytes, in_flight)

    def between(self, other: Cost, share: float) -> Cost:
        """So far along the straight line to another one."""
        return Cost(
            **{
                each.name: getattr(self, each.name) * (1 - share)
                + getattr(other, each.name) * share
                for each in fields(self)
            }
        )


def mean_cost(found: Searched, k: int, part: np.ndarray | None = None) -> Cost:
    """What its queries read, and find. `part`: bool [q]: those that count; None: all."""
    some = slice(None) if part is None else part
    return Cost(
        float(found.hits[some].mean() / k),
        float(found.effort),
        *(
            float(each[some].mean())
            for each in (found.pages, found.requests, found.size_bytes, found.rounds)
        ),
    )


def cost_at(
    trial: Trial, recall: float, disk: DiskTimes, in_flight: int, part: np.ndarray | None = None
) -> Cost | None:
    """What a query, of all or of a part of them, reads at a recall, between two efforts by a
    straight line; that of the least effort where this finds as much, None where the largest does
    not. An effort counts that nothing quicker finds as much as."""
    costs = [mean_cost(each, trial.k, part) for each in trial.searched]
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
    power of the vectors, 0 to 1; and that power, of pages. What fell with more vectors is taken
    to stay as it was."""
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


def lie_apart(contrast: np.ndarray) -> np.ndarray:
    """bool [q]: which of two parts a query is in: those whose neighbours lie apart, and the others.
    The parts differ from one another as much as they can where each is a fifth of all or more.

    Args:
        contrast: of `Sample`.
    """
    order = np.argsort(contrast, kind="stable")
    values, n = contrast[order].astype(np.float64), len(contrast)
    least = max(1, math.ceil(PART_LEAST * n))
    sums = np.cumsum(values)
    places = np.arange(least, max(least, n - least) + 1)
    places = places[places < n] if n > 1 else places[:0]
    found = np.zeros(n, bool)
    if len(places):
        low, high = sums[places - 1] / places, (sums[-1] - sums[places - 1]) / (n - places)
        between = places * (n - places) * np.square(high - low)
        found[order[: places[int(between.argmax())]]] = True
    return found


@dataclass(frozen=True)
class Verdict:
    """Which takes less of the disk's time, or None.

    Attributes:
        choice: ``graph``, ``clusters`` or None: it cannot be told. reasons: for it.
        difference: what clusters take over what the graph takes, as a factor: the middle of the
            folds, of all vectors. spread: the largest of the folds over the smallest, a factor.
        of_parts: that factor of the queries whose neighbours lie apart, and of the others.
    """

    choice: str | None
    reasons: list[str]
    difference: float | None
    spread: float | None
    of_parts: tuple[float, float] | None


def weigh(
    n: int,
    over: Sequence[float | None],
    parts: Sequence[tuple[float | None, float | None]],
    reach: dict[str, bool],
    recall: float,
) -> Verdict:
    """Decides.

    Args:
        n: vectors in all.
        over: of each fold, the time of clusters over that of the graph, of all vectors; None where
            one of them does not find so much.
        parts: likewise, of the two parts of the queries (`lie_apart`).
        reach: whether each way finds so much, in all folds.
    """
    known = [each for each in over if each is not None]
    middle, spread = (middle_of(known), max(known) / min(known)) if known else (None, None)
    apart, others = (
        middle_of([each[place] for each in parts]) if parts else None for place in (0, 1)
    )
    of_parts = None if apart is None or others is None else (apart, others)

    def verdict(choice: str | None, *reasons: str) -> Verdict:
        return Verdict(choice, list(reasons), middle, spread, of_parts)

    if n < N_LEAST:
        return verdict(
            None, f"{n:,} vectors are too few to say: from {N_LEAST:,} on samples are alike"
        )
    if not all(reach.values()):
        there = [name for name, does in reach.items() if does]
        missing = " and ".join(name for name, does in reach.items() if not does)
        why = f"{missing} did not find {recall:g} of the neighbours with any effort that was tried"
        return verdict(there[0] if there else None, why)
    if middle is None or spread is None or of_parts is None:
        return verdict(None, f"a part of the queries does not find {recall:g} of its neighbours")
    said = (
        f"clusters take {middle:.2f} times what the graph takes, samples differ by a factor of "
        f"{spread:.2f}; {of_parts[0]:.2f} times for queries whose neighbours lie apart, "
        f"{of_parts[1]:.2f} for the others"
    )
    if len(known) < 2 or spread >= max(middle, 1 / middle):
        return verdict(None, f"samples differ as much as the two ways do: {said}")
    if any((part > 1) != (middle > 1) for part in of_parts):
        return verdict(None, f"one fits a part of the queries, the other the rest: {said}")
    return verdict(GRAPH if middle > 1 else LISTS, said)


def middle_of(factors: Sequence[float | None]) -> float | None:
    """The geometric mean of those that are there; None of none."""
    known = [math.log(each) for each in factors if each is not None]
    return math.exp(sum(known) / len(known)) if known else None
