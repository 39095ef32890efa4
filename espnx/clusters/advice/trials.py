"""Builds a graph and lists of a sample and searches both with efforts that grow: what each query
found, and what it read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ...graph.build import build as build_graph
from ...graph.format import NODES
from ...graph.index import GraphIndex
from ...graph.neighbours import Neighbours
from ..build import build as build_lists
from ..facts import info
from ..index import ClusterIndex
from .samples import Sample

GRAPH, LISTS = "graph", "clusters"
#: From one effort to the next.
_STEP = 1.2
#: Of the recall that is missing, what an effort leaves after which none is tried.
_LEFT = 0.2
_LIST_FACTOR_MAX = 64
#: Heads that are at most so much farther than the nearest, by squared distance.
_RATIOS = (1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5)


@dataclass(frozen=True, eq=False)
class Searched:
    """All queries with one effort.

    Attributes:
        effort: list size of a walk, or lists that are read for a query.
        ratio: of heads' distances, that leaves out some of these lists; None: all are read.
        hits: int64 [q]: of the k nearest. pages, requests, size_bytes, rounds: int64 [q]: what was
            read for each query, and in how many rounds that waited for one another.
        wall_s, cpu_s: of all queries together.
    """

    effort: int
    ratio: float | None
    hits: np.ndarray
    pages: np.ndarray
    requests: np.ndarray
    size_bytes: np.ndarray
    rounds: np.ndarray
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, eq=False)
class Trial:
    """One way on one sample.

    Attributes:
        system: `GRAPH` or `LISTS`. n: vectors. k: neighbours.
        searched: by ascending effort; those with a ratio come last.
        folder_bytes, memory_bytes: of the index, and of it while it is open. build_s: seconds.
        path: of the file that searches read.
    """

    system: str
    n: int
    k: int
    searched: list[Searched]
    folder_bytes: int
    memory_bytes: int
    build_s: float
    path: str

    @property
    def ladder(self) -> list[Searched]:
        """Without those that leave out lists by their distance."""
        return [each for each in self.searched if each.ratio is None]


@dataclass(frozen=True)
class TrialOptions:
    """Attributes: k, recall: that are aimed at. beam_width: pages of a walk that are under way at
    a time. threads: of builds and searches; None: as many as torch uses. seed: of builds."""

    k: int
    recall: float
    metric: str
    beam_width: int
    threads: int | None
    seed: int

    @property
    def enough(self) -> float:
        """Recall after which no larger effort is tried."""
        return 1 - _LEFT * (1 - self.recall)


def try_graph(sample: Sample, folder: Path, options: TrialOptions) -> Trial:
    """A graph as `espnx.graph.build` makes it unless it is told otherwise. Raises what building and
    searching raise."""
    begun = time.perf_counter()
    report = build_graph(
        sample.base, folder, metric=options.metric, threads=options.threads, seed=options.seed
    )
    build_s = time.perf_counter() - begun
    with GraphIndex(folder) as index:

        def search(list_size: int) -> Neighbours:
            return index.search(
                sample.queries, options.k, list_size=list_size, beam_width=options.beam_width
            )

        def reads(found: Neighbours) -> tuple[np.ndarray, np.ndarray]:
            requests = found.pages + found.code_pages
            return requests, -(-requests // options.beam_width)

        longest = min(len(sample.base), _LIST_FACTOR_MAX * options.k)
        searched = list(
            _climb(sample, options, efforts(options.k, max(options.k, longest)), search, reads)
        )
        facts = index.facts
        return Trial(
            GRAPH,
            len(sample.base),
            options.k,
            searched,
            report.folder_bytes,
            facts.memory_bytes,
            build_s,
            facts.path(NODES),
        )


def try_lists(sample: Sample, folder: Path, options: TrialOptions) -> Trial:
    """Lists as `espnx.clusters.build` makes them unless it is told otherwise. Raises what building
    and searching raise."""
    begun = time.perf_counter()
    report = build_lists(
        sample.base, folder, metric=options.metric, threads=options.threads, seed=options.seed
    )
    build_s = time.perf_counter() - begun
    facts = info(folder)
    with ClusterIndex(folder, threads=options.threads) as index:
        searched = list(
            _climb(
                sample,
                options,
                efforts(1, facts.n_lists),
                lambda n_lists: index.search(sample.queries, options.k, n_lists=n_lists),
                _reads_of_lists,
            )
        )
        most = searched[-1].effort
        searched += [
            _searched(
                sample,
                most,
                ratio,
                partial(
                    index.search, sample.queries, options.k, n_lists=most, max_dist_ratio=ratio
                ),
                _reads_of_lists,
            )
            for ratio in (_RATIOS if options.metric != "ip" else ())
        ]
    return Trial(
        LISTS,
        len(sample.base),
        options.k,
        searched,
        report.folder_bytes,
        report.memory_bytes,
        build_s,
        str(folder),
    )


def efforts(first: int, last: int) -> Iterator[int]:
    """Yields whole numbers that grow by a fifth, or by one, up to the last."""
    effort = first
    while effort < last:
        yield effort
        effort = min(last, max(effort + 1, math.floor(effort * _STEP)))
    yield last


def _reads_of_lists(found: Neighbours) -> tuple[np.ndarray, np.ndarray]:
    return found.requests + found.head_pages, found.rounds  # type: ignore[attr-defined]


def _climb(
    sample: Sample,
    options: TrialOptions,
    all_efforts: Iterator[int],
    search: Callable[[int], Neighbours],
    reads: Callable[[Neighbours], tuple[np.ndarray, np.ndarray]],
) -> Iterator[Searched]:
    for effort in all_efforts:
        found = _searched(sample, effort, None, partial(search, effort), reads)
        yield found
        if found.hits.mean() >= options.enough * options.k:
            return


def _searched(
    sample: Sample,
    effort: int,
    ratio: float | None,
    search: Callable[[], Neighbours],
    reads: Callable[[Neighbours], tuple[np.ndarray, np.ndarray]],
) -> Searched:
    begun, begun_cpu = time.perf_counter(), time.process_time()
    found = search()
    wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    requests, rounds = reads(found)
    return Searched(
        effort,
        ratio,
        sample.hits(found.ids),
        found.pages + found.code_pages,
        requests,
        found.bytes_read,
        rounds,
        wall_s,
        cpu_s,
    )
