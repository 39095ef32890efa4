"""A collection in private partitions: each device has its share, its own index and its own result;
the host merges the best of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np

from espnx.device.several import top


@dataclass(frozen=True)
class Work:
    """What one query took of one device.

    Attributes:
        reads: requests to flash, after merging.
        flash_bytes: whole blocks. Of a device that computes nothing, they cross its link, too.
        link_bytes: of one that computes: the query in, what comes back out.
        distances: vectors that were measured, or records that were scored, or postings.
        rounds: of reads that waited for one another.
    """

    reads: float = 0
    flash_bytes: float = 0
    link_bytes: float = 0
    distances: float = 0
    rounds: float = 0


@dataclass(frozen=True, eq=False)
class Found:
    """What one device found for one query, the best first. Attributes: ids: int64 [m], numbers of
    the whole collection; far: float64 [m], the smaller the better."""

    ids: np.ndarray
    far: np.ndarray
    work: Work


@dataclass(frozen=True, eq=False)
class Answer:
    """What all devices found for one query together. Attributes: ids, far: as of `Found`, at most
    k; works: of each device."""

    ids: np.ndarray
    far: np.ndarray
    works: Sequence[Work]


class Part(Protocol):
    """The index of one device's share."""

    def ask(self, effort: int, k: int) -> list[Found]:
        """What is found for each query of the collection; ids are the share's rows from 0."""

    def close(self) -> None: ...


class Spread(Protocol):
    """A collection on all of its devices."""

    def ask(self, effort: int, k: int) -> list[Answer]:
        """What is found for each query of the collection."""

    def close(self) -> None: ...


class Private:
    """Devices each of which has an index of its own share: every one is asked, with the same
    effort, and the host takes the best of all.

    Args:
        parts: in the order of the shares; closed with this.
        shares: int64 rows of the collection, ascending.
    """

    def __init__(self, parts: Sequence[Part], shares: Sequence[np.ndarray]):
        self._parts, self._shares = parts, shares

    def ask(self, effort: int, k: int) -> list[Answer]:
        found = [part.ask(effort, k) for part in self._parts]
        return [self._merged(of_query, k) for of_query in zip(*found, strict=True)]

    def _merged(self, found: Sequence[Found], k: int) -> Answer:
        ids = np.concatenate(
            [rows[each.ids] for each, rows in zip(found, self._shares, strict=True)]
        )
        far = np.concatenate([each.far for each in found])
        best = top(far, ids, k)
        return Answer(ids[best], far[best], [each.work for each in found])

    def close(self) -> None:
        for part in self._parts:
            part.close()


class Retriever(Protocol):
    """One way to find passages.

    Attributes:
        name: as case.py has it. index: what it finds them by.
        collection: what is searched.
        effort: what `Spread.ask` is given at equal effort; 0: it is exact, and takes no effort.
        least: effort.
    """

    name: str
    index: str
    collection: str
    effort: int
    least: int

    def build(self, folder: Path, shares: Sequence[np.ndarray]) -> Spread:
        """Builds on one device for each share, int64 rows of the collection, ascending."""

    def recall(self, ids: Sequence[np.ndarray]) -> float:
        """The share of this retriever's exact result that was found."""

    def problem(self, answers: Sequence[Answer], k: int) -> str | None:
        """What is wrong with the results, or None."""


@dataclass(frozen=True)
class Point:
    """One way to ask. Means are over queries.

    Attributes:
        effort: of every device.
        recall: of the merged results.
        most: of each quantity, what the device took that took the most of it.
        total: of all devices together.
        problem: what is wrong with the results.
        queries: that were asked.
    """

    effort: int
    recall: float
    most: Work
    total: Work
    problem: str | None
    queries: int


def shares_of(n: int, count: int, seed: int) -> list[np.ndarray]:
    """Random shares of n rows, which differ by one at most. By clusters, one device would answer
    everything."""
    order = np.random.default_rng(seed).permutation(n)
    return [np.sort(each) for each in np.array_split(order, count)]


def ask(retriever: Retriever, spread: Spread, effort: int, k: int) -> Point:
    """Asks all queries."""
    answers = spread.ask(effort, k)
    works = np.array([[_values(work) for work in each.works] for each in answers])
    most, total = (
        Work(*(float(each) for each in part.mean(axis=0)))
        for part in (works.max(axis=1), works.sum(axis=1))
    )
    return Point(
        effort,
        retriever.recall([each.ids for each in answers]),
        most,
        total,
        retriever.problem(answers, k),
        len(answers),
    )


def at_recall(
    ask_with: Callable[[int], Point], wanted: float, least: int, first: Point, most: int
) -> Point:
    """The point of the least effort, to within an eighth, that finds as much as was wanted; that of
    `most`, where none does.

    Args:
        ask_with: an effort. first: the point of one that was asked with already.
    """
    best, low = first, least
    while best.recall < wanted and best.effort < most:
        low = best.effort + 1
        best = ask_with(min(most, 2 * best.effort))
    high = best.effort
    while best.recall >= wanted and high - low >= max(1, low // 8):
        middle = (low + high) // 2
        point = ask_with(middle)
        if point.recall >= wanted:
            best, high = point, middle
        else:
            low = middle + 1
    return best


def _values(work: Work) -> list[float]:
    return [getattr(work, each.name) for each in fields(work)]
