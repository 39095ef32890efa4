"""Says which way to search vectors from SSD fits them: a graph, or lists."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from ... import errors
from ...checks import check_path, check_whole
from ...graph.search.asked import beam_width_of
from ...sizes import format_size
from ...suggestions import suggests_keywords
from ...tables import render_table
from .disk import DiskTimes, measure_reads, middle_of
from .samples import Sample, draw_samples, sizes_of
from .trials import GRAPH, LISTS, Searched, Trial, TrialOptions, try_graph, try_lists
from .weighing import Cost, Verdict, cost_at, extrapolated, lie_apart, linear, mean_cost, weigh

Progress = Callable[[str, int, int], None]
#: Of each way what the smaller and the larger sample of a fold have shown.
Fold = dict[str, tuple[Trial, Trial]]
SYSTEMS = (GRAPH, LISTS)
#: Of recall: efforts that find less are in the curves, and not in a summary.
_SHOWN_MIN = 0.7
_METRICS = ("l2", "ip", "cosine")


@dataclass(frozen=True)
class CurvePoint:
    """One effort on samples of one size, the mean of the folds.

    Attributes:
        system: ``graph`` or ``clusters``. sample: vectors of each sample.
        effort: list size of a walk, or lists that are read. ratio: of distances of heads beyond
            which lists are left out; None: none are.
        recall: share of the k nearest that was found. folds: that tried this effort.
        pages, requests, size_bytes, rounds: that a query read.
        query_s: what these take on this disk. wall_s, cpu_s: of a query, as measured here, with
            whatever else was running.
    """

    system: str
    sample: int
    effort: int
    ratio: float | None
    folds: int
    recall: float
    pages: float
    requests: float
    size_bytes: float
    rounds: float
    query_s: float
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Estimate:
    """One way, for all vectors, at the recall that was asked for.

    Attributes:
        growth: the power of the number of vectors by which pages grow.
        pages, requests, size_bytes, rounds: that a query reads.
        query_s: between the ends of two queries with many under way, and query_s_range of the
            folds. alone_s: of a query with nothing else under way. merged_s: that its requests keep
            the disk busy, pages that lie side by side in one.
        folder_bytes, memory_bytes: of the index, and of it while it is open.
    """

    system: str
    growth: float
    pages: float
    requests: float
    size_bytes: float
    rounds: float
    query_s: float
    query_s_range: tuple[float, float]
    alone_s: float
    merged_s: float
    folder_bytes: int
    memory_bytes: int

    @property
    def query_said(self) -> str:
        """`query_s` and its range, in microseconds."""
        low, high = (f"{1e6 * each:.0f}" for each in self.query_s_range)
        return f"{1e6 * self.query_s:.0f} ({low} to {high})"


@dataclass(frozen=True)
class Advice:
    """What was measured, and what follows.

    Attributes:
        choice: ``graph``, ``clusters``, or None: it cannot be told. reasons: for that.
        samples: vectors of the smaller and of the larger samples. folds: pairs of these.
        is_extrapolated: whether `estimates` are of more vectors than a sample had.
        disk: what reads take where the indexes were built.
        curves: of both ways and both sizes. estimates: of those ways that found so much.
        difference, spread, of_parts: see `Verdict`.
    """

    n: int
    dim: int
    k: int
    recall: float
    metric: str
    in_flight: int
    samples: tuple[int, int]
    folds: int
    queries: int
    is_extrapolated: bool
    choice: str | None
    reasons: list[str]
    difference: float | None
    spread: float | None
    of_parts: tuple[float, float] | None
    disk: DiskTimes
    curves: list[CurvePoint]
    estimates: list[Estimate]

    def summary(self) -> str:
        """Curves of the larger samples, what both ways take, and which fits."""
        shown = [
            (
                point.system,
                point.effort if point.ratio is None else f"{point.effort}, within {point.ratio:g}x",
                f"{point.recall:.3f}",
                f"{point.pages:.1f}",
                f"{point.rounds:.1f}",
                format_size(round(point.size_bytes)),
                f"{1e6 * point.query_s:.0f}",
            )
            for point in self.curves
            if point.sample == self.samples[1] and point.recall >= _SHOWN_MIN
        ]
        curves = render_table(
            ("way", "list size, or lists", f"recall@{self.k}", "pages", "rounds", "read", "us"),
            shown,
            right=(f"recall@{self.k}", "pages", "rounds", "read", "us"),
        )
        found = [
            (
                each.system,
                f"{each.pages:.1f}",
                f"{each.rounds:.1f}",
                format_size(round(each.size_bytes)),
                each.query_said,
                f"{1e6 * each.merged_s:.0f}",
                f"{1e3 * each.alone_s:.2f}",
                format_size(each.memory_bytes),
                format_size(each.folder_bytes),
            )
            for each in self.estimates
        ]
        headers = ("way", "pages", "rounds", "read", f"us, {self.in_flight} under way",
                   "merged, us", "alone, ms", "memory", "folder")  # fmt: skip
        whole = render_table(headers, found, right=headers[1:])
        scale = (
            f"extrapolated to {self.n:,} vectors from samples of {self.samples[0]:,} and "
            f"{self.samples[1]:,}"
            if self.is_extrapolated
            else f"samples of {self.samples[1]:,} of {self.n:,} vectors"
        )
        name = self.choice or "cannot tell"
        return (
            f"{self.folds} samples of {self.samples[1]:,} vectors, {self.queries} queries of each, "
            f"on a disk that reads 4 KiB in {1e6 * self.disk.read_s:.0f} us, or "
            f"{1 / self.disk.page_s:,.0f} times a second ({self.disk.effective_path}):\n"
            f"{curves}\n\nAt recall@{self.k} {self.recall:g}, {scale}:\n{whole}\n\n"
            f"{name}: {'; '.join(self.reasons)}"
        )


@suggests_keywords
def advise(
    vectors: Any,
    *,
    queries: Any = None,
    k: int = 10,
    recall: float = 0.95,
    path: str | os.PathLike[str] | None = None,
    metric: str = "l2",
    in_flight: int = 64,
    sample: int | None = None,
    folds: int = 3,
    threads: int | None = None,
    seed: int = 0,
    column: str | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Builds a graph and lists of samples of some vectors, of two sizes, and says which way fits.

    It goes by what does not depend on what else this machine does: pages and rounds of reads that
    both take at one recall, weighed by what reads take on this disk. Requests, in which pages side
    by side are merged, and processor time are measured and shown, and do not count. What holds for
    samples is extrapolated to all vectors, by the growth between the two sizes. Each fold draws
    anew. It cannot tell where folds differ by more than the two ways do, nor where one way fits the
    queries whose neighbours lie apart and the other way the rest.

    Args:
        vectors, column: of `espnx.graph.build`.
        queries: [q, dim], or a file, of those that will be asked; None: vectors that the samples do
            not hold.
        k, recall: neighbours of a query, and the share of them that is to be found.
        path: an existing directory on the disk in question, for indexes that are gone when this
            returns; None: the current one.
        metric: ``l2``, ``ip`` or ``cosine``.
        in_flight: queries under way at a time. With many of them it matters how busy a query keeps
            the disk, with one how long its reads wait for one another.
        sample: vectors of a sample, of which the smaller one has a quarter; None: 16,384, or as
            many as 64 MiB hold.
        folds: samples, 2 or more.
        threads: of builds; None: as many as torch uses.
        seed: of samples and builds.
        progress: called now and then with (what, done, total).

    Raises:
        InvalidInputError: an option; vectors that are too few, of another shape, or not finite;
            queries that do not fit them.
        FileMissingError, FormatError, TruncatedFileError: of the files.
        MissingDependencyError: FAISS, for lists, is not installed.
        WriteError, DiskFullError, ReadError: the directory cannot be written, or read.
    """
    folder = _checked(k, recall, path, metric, in_flight, sample, folds, threads, seed)
    tell = progress or (lambda what, done, total: None)
    tell("samples", 0, 1)
    source, samples = draw_samples(
        vectors, queries, k=k, metric=metric, folds=folds, sample=sample, seed=seed, column=column
    )
    tell("samples", 1, 1)
    width, trials, disks = beam_width_of(in_flight), list[Fold](), list[DiskTimes]()
    for fold, pair in enumerate(samples):
        options = TrialOptions(k, recall, metric, width, threads, seed + fold)
        before = 4 * fold

        def step(done: int, before: int = before) -> None:
            tell("trials", before + done, 4 * folds)

        found, times = _tried(pair, folder, options, step)
        trials.append(found)
        disks.append(times)
    disk, sizes = middle_of(disks), sizes_of(samples)
    verdict, estimates = _compare(
        trials,
        [lie_apart(large.contrast) for large, _ in samples],
        disk,
        source.n,
        sizes,
        recall,
        in_flight,
    )
    return Advice(
        source.n,
        source.dim,
        k,
        recall,
        metric,
        in_flight,
        sizes,
        folds,
        len(samples[0][0].queries),
        source.n > sizes[1],
        verdict.choice,
        verdict.reasons,
        verdict.difference,
        verdict.spread,
        verdict.of_parts,
        disk,
        _curves(trials, disk, in_flight),
        estimates,
    )


def _tried(
    samples: tuple[Sample, Sample], folder: Path, options: TrialOptions, tell: Callable[[int], None]
) -> tuple[Fold, DiskTimes]:
    """Both ways on both samples of a fold, and what reads take between them: of the larger graph's
    file, while it is there."""
    found: dict[str, list[Trial]] = {name: [] for name in SYSTEMS}
    times, done = list[DiskTimes](), 0
    for sample in reversed(samples):
        for name, attempt in ((GRAPH, try_graph), (LISTS, try_lists)):
            tell(done)
            with tempfile.TemporaryDirectory(prefix=".espnx-advise-", dir=folder) as scratch:
                found[name].append(attempt(sample, Path(scratch) / name, options))
                if name == GRAPH and sample is samples[0]:
                    times.append(measure_reads(found[name][-1].path))
            done += 1
    tell(done)
    return {name: (each[0], each[1]) for name, each in found.items()}, times[-1]


def _checked(
    k: int,
    recall: float,
    path: str | os.PathLike[str] | None,
    metric: str,
    in_flight: int,
    sample: int | None,
    folds: int,
    threads: int | None,
    seed: int,
) -> Path:
    check_whole("k, neighbours wanted", k, 1, 1000)
    check_whole("queries in flight", in_flight, 1, 1 << 20)
    check_whole("folds", folds, 2, 100)
    check_whole("seed", seed, 0, 2**32 - 1)
    if sample is not None:
        check_whole("vectors of a sample", sample, 1, 1 << 20)
    if threads is not None:
        check_whole("threads", threads, 1, 256)
    if isinstance(recall, bool) or not isinstance(recall, int | float) or not 0 < recall < 1:
        raise errors.InvalidInputError("recall", got=recall, expected="a share between 0 and 1")
    if metric not in _METRICS:
        raise errors.InvalidInputError("metric", got=metric, expected=" or ".join(_METRICS))
    folder = Path(check_path("directory of samples", os.curdir if path is None else path))
    if not folder.is_dir():
        raise errors.InvalidInputError(
            f"directory {folder}", got="none", expected="an existing directory on the disk"
        )
    return folder


def _extrapolated(
    trials: tuple[Trial, Trial],
    recall: float,
    disk: DiskTimes,
    n: int,
    sizes: tuple[int, int],
    in_flight: int,
    part: np.ndarray | None,
) -> tuple[Cost, float] | None:
    small, large = (cost_at(each, recall, disk, in_flight, part) for each in trials)
    return None if small is None or large is None else extrapolated(small, large, sizes, n)


def _over(
    found: dict[str, tuple[Cost, float] | None], disk: DiskTimes, in_flight: int
) -> float | None:
    """The time of clusters over that of the graph."""
    graph, lists = found[GRAPH], found[LISTS]
    if graph is None or lists is None:
        return None
    return lists[0].query_s(disk, in_flight) / graph[0].query_s(disk, in_flight)


def _compare(
    trials: Sequence[Fold],
    is_apart: Sequence[np.ndarray],
    disk: DiskTimes,
    n: int,
    sizes: tuple[int, int],
    recall: float,
    in_flight: int,
) -> tuple[Verdict, list[Estimate]]:
    costs: dict[str, list[Cost | None]] = {name: [] for name in SYSTEMS}
    powers: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    over, parts = list[float | None](), list[tuple[float | None, float | None]]()
    for fold, apart in zip(trials, is_apart, strict=True):
        of_fold = []
        for part in (None, apart, ~apart):
            found = {
                name: _extrapolated(fold[name], recall, disk, n, sizes, in_flight, part)
                for name in SYSTEMS
            }
            of_fold.append(_over(found, disk, in_flight))
            if part is None:
                for name, cost in found.items():
                    costs[name].append(None if cost is None else cost[0])
                    powers[name] += [] if cost is None else [cost[1]]
        over.append(of_fold[0])
        parts.append((of_fold[1], of_fold[2]))
    reach = {name: all(cost is not None for cost in found) for name, found in costs.items()}
    verdict = weigh(n, over, parts, reach, recall)
    estimates = [
        _estimate(
            name,
            [cost for cost in costs[name] if cost is not None],
            powers[name],
            [fold[name] for fold in trials],
            disk,
            n,
            sizes,
            in_flight,
        )
        for name in SYSTEMS
        if any(cost is not None for cost in costs[name])
    ]
    return verdict, estimates


def _estimate(
    name: str,
    costs: Sequence[Cost],
    powers: Sequence[float],
    trials: Sequence[tuple[Trial, Trial]],
    disk: DiskTimes,
    n: int,
    sizes: tuple[int, int],
    in_flight: int,
) -> Estimate:
    seconds = [cost.query_s(disk, in_flight) for cost in costs]
    return Estimate(
        name,
        mean(powers),
        mean(cost.pages for cost in costs),
        mean(cost.requests for cost in costs),
        mean(cost.size_bytes for cost in costs),
        mean(cost.rounds for cost in costs),
        mean(seconds),
        (min(seconds), max(seconds)),
        mean(disk.alone_s(cost.rounds, cost.size_bytes) for cost in costs),
        mean(disk.merged_s(cost.requests, cost.size_bytes) for cost in costs),
        *(
            round(mean(linear(of(small), of(large), sizes, n) for small, large in trials))
            for of in (lambda each: each.folder_bytes, lambda each: each.memory_bytes)
        ),
    )


def _curves(trials: Sequence[Fold], disk: DiskTimes, in_flight: int) -> list[CurvePoint]:
    found = list[CurvePoint]()
    for name in SYSTEMS:
        for size in (0, 1):
            same_effort: dict[tuple[float, int], list[tuple[Searched, Trial]]] = {}
            for fold in trials:
                for each in fold[name][size].searched:
                    # lists that are left out by distance are left out of however many
                    key = (0.0, each.effort) if each.ratio is None else (each.ratio, 0)
                    same_effort.setdefault(key, []).append((each, fold[name][size]))
            for (ratio, _), same in sorted(same_effort.items(), key=lambda item: item[0]):
                costs = [mean_cost(one, trial.k) for one, trial in same]
                found.append(
                    CurvePoint(
                        name,
                        same[0][1].n,
                        round(mean(one.effort for one, _ in same)),
                        ratio or None,
                        len(same),
                        recall=mean(cost.recall for cost in costs),
                        pages=mean(cost.pages for cost in costs),
                        requests=mean(cost.requests for cost in costs),
                        size_bytes=mean(cost.size_bytes for cost in costs),
                        rounds=mean(cost.rounds for cost in costs),
                        query_s=mean(cost.query_s(disk, in_flight) for cost in costs),
                        wall_s=mean(one.wall_s / len(one.hits) for one, _ in same),
                        cpu_s=mean(one.cpu_s / len(one.hits) for one, _ in same),
                    )
                )
    return found
