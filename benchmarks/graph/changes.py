"""A graph that changes, beside one that is built anew: recall and pages after rounds of deletions,
additions and merges; what a merge takes; the CPU of searches while a tenth is not merged."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import espnx.graph
from espnx.graph.search.probing import Probing

from ..harness.cells import metric
from ..harness.processes import Worker
from ..harness.registry import Say
from ..harness.result import Row
from .clusters import Tried, value_at
from .data import Data
from .names import CODES
from .rows import counted

TARGETS = (0.90, 0.95, 0.99)
#: A node a page, and several.
SYSTEMS = ("espnx-inline-full", "espnx-memory")
SHOW = "changes"
DRIFT, MERGE, SEARCH = (f"{SHOW}-{each}" for each in ("drift", "merge", "search"))
_LISTS = (10, 12, 14, 17, 20, 24, 28, 34, 40, 56, 80, 112, 160, 224, 320)
_REPLACED, _UNMERGED = 0.2, 0.1
_ALONE = 50  # queries that are asked one at a time
_PAIRS_S = 0.2  # of CPU that a side of a pair takes at least
# Through as many clusters, no longer list is tried once one finds no more than this; nor more
# clusters, once so much is found.
_GAIN_MIN, _ENOUGH = 0.001, 0.998


@dataclass(frozen=True)
class ChangesPlan:
    """Attributes: path: of a directory. systems: of `SYSTEMS`, or that of clusters alone. rounds:
    in which a fifth of the vectors is replaced. series: of such rounds, each of other vectors.
    merged: shares of the vectors that the merges replace whose costs are measured. pairs: of
    searches, with and without changes. threads: of builds. clusters: of a graph, which has a graph
    for each; None: it is one."""

    path: Path
    systems: Sequence[str]
    rounds: int
    series: int
    merged: Sequence[float]
    pairs: int
    threads: int
    clusters: int | None = None


@dataclass(frozen=True)
class Point:
    """A list's recall and pages, the mean of a query; of a graph with clusters those of the
    cheapest search that finds as much, between two by a straight line."""

    list_size: int
    recall: float
    pages: float


@dataclass(frozen=True)
class Series:
    """One series: `fresh`, `changed`: by recall, of the list with which the fresh graph reaches it,
    or, with clusters, of what reaches it in each; `drift`: after each round, from none on, of the
    list of the second target, or of what reaches that; `is_right`: whether all distances were those
    of the vectors."""

    fresh: Mapping[float, Point]
    changed: Mapping[float, Point]
    drift: Sequence[Point]
    is_right: bool


def measure_changes(
    make: Callable[[int, int], Data], n: int, plan: ChangesPlan, say: Say
) -> list[Row]:
    """Rows of each system.

    Args:
        make: vectors of a recipe: so many, of a series.
        n: vectors of a graph.
    """
    found = list[Row]()
    for system in plan.systems:
        series = list[Series]()
        for number in range(plan.series):
            data = make(n + round(_REPLACED * n), number)
            series.append(_series(data, n, system, plan))
            say(f"{system}: series {number + 1} of {plan.series} done")
        data = make(n + round(_UNMERGED * n), 0)
        params = {
            "n": n, "dim": data.base.shape[1], "queries": len(data.queries), "k": data.k,
            "rounds": plan.rounds, "series": plan.series,
        }  # fmt: skip
        if plan.clusters is not None:
            params["clusters"] = plan.clusters
        found += _beside_fresh(params, system, series)
        with tempfile.TemporaryDirectory(prefix="espnx-bench-graph-", dir=plan.path) as folder:
            found += _costs(params, system, data, n, Path(folder), plan)
            found += _searches(params, system, data, n, Path(folder), plan)
        say(f"{system}: merge and searches done")
    return sorted(found, key=lambda row: (SHOW, DRIFT, MERGE, SEARCH).index(row.params["show"]))


class _Known:
    """The vectors that a graph has by now, and what a search should find of them."""

    def __init__(self, data: Data, n: int):
        self._drawn = data
        self._take(np.arange(n))

    def _take(self, ids: np.ndarray) -> None:
        self.ids, self.data = ids, replace(self._drawn, base=self._drawn.base[ids])

    def change(self, gone: np.ndarray, given: np.ndarray) -> None:
        """What was deleted, and what was added."""
        self._take(np.concatenate([np.setdiff1d(self.ids, gone), given]))

    def point(
        self,
        graph: espnx.graph.GraphIndex,
        list_size: int,
        own: bool,
        probing: Probing | None = None,
    ) -> tuple[Point, bool]:
        """What a list finds, and whether that is right. `own`: ids are numbers of this series, and
        not of a graph that was built of what there is now. `probing`: clusters, where there are
        some."""
        data = self.data
        if probing is None:
            found = graph.search(data.queries, data.k, list_size=list_size, beam_width=1)
        else:
            found = graph.walk(data.queries, data.k, list_size, probing)
        ids = np.searchsorted(self.ids, found.ids) if own else found.ids
        if own and not np.array_equal(self.ids[np.minimum(ids, len(self.ids) - 1)], found.ids):
            return Point(list_size, 0.0, 0.0), False  # one that is deleted
        pages = float((found.pages + found.code_pages).mean())
        is_right = data.problem(ids, found.distances) is None
        return Point(list_size, data.recall(ids), pages), is_right


def _series(data: Data, n: int, system: str, plan: ChangesPlan) -> Series:
    known, random = _Known(data, n), np.random.default_rng(n)
    with tempfile.TemporaryDirectory(prefix="espnx-bench-graph-", dir=plan.path) as folder:
        path, fresh_path = Path(folder, "changed"), Path(folder, "fresh")
        _build(data.base[:n], path, system, plan)
        with espnx.graph.open_writer(path, durability="none") as graph:
            usual = _at_targets(known, graph, True)[0][TARGETS[1]].list_size
            drift = [_usual(known, graph, usual)]
            for part in np.array_split(np.arange(n, len(data.base)), plan.rounds):
                gone = np.sort(random.choice(known.ids, len(part), replace=False))
                graph.delete(gone)
                given = graph.add(data.base[part])
                known.change(gone, given)
                graph.merge(measure="never")
                drift.append(_usual(known, graph, usual))
            _build(known.data.base, fresh_path, system, plan)
            with espnx.graph.open(fresh_path) as fresh:
                theirs, is_right = _at_targets(known, fresh, False)
            if graph.facts.clusters is not None:
                ours, is_ours_right = _at_targets(known, graph, True)
            else:
                points = {
                    recall: known.point(graph, point.list_size, True)
                    for recall, point in theirs.items()
                }
                ours = {recall: point for recall, (point, _) in points.items()}
                is_ours_right = all(right for _, right in points.values())
    return Series(
        theirs,
        ours,
        [point for point, _ in drift],
        is_right and is_ours_right and all(right for _, right in drift),
    )


def _build(vectors: np.ndarray, path: Path, system: str, plan: ChangesPlan) -> None:
    espnx.graph.build(vectors, path, **_options(system, plan))


def _options(system: str, plan: ChangesPlan) -> dict[str, Any]:
    """How graphs are built: the fresh ones, and those that change."""
    return {
        "codes": CODES.get(system, "inline"), "threads": plan.threads, "clusters": plan.clusters,
    }  # fmt: skip


def _usual(known: _Known, graph: espnx.graph.GraphIndex, list_size: int) -> tuple[Point, bool]:
    """See `Series.drift`."""
    if graph.facts.clusters is None:
        return known.point(graph, list_size, True)
    found, is_right = _at_targets(known, graph, True)
    return found[TARGETS[1]], is_right


def _at_targets(
    known: _Known, graph: espnx.graph.GraphIndex, own: bool
) -> tuple[dict[float, Point], bool]:
    """(the shortest list that reaches each recall; of one that none reaches the longest; whether
    what was found is right)"""
    if graph.facts.clusters is not None:
        return _at_targets_of_clusters(known, graph, own)
    found: dict[float, Point] = {}
    is_right = True
    for list_size in _LISTS:
        point, right = known.point(graph, list_size, own)
        is_right &= right
        for recall in TARGETS:
            if point.recall >= recall or list_size == _LISTS[-1]:
                found.setdefault(recall, point)
        if len(found) == len(TARGETS):
            break
    return found, is_right


def _at_targets_of_clusters(
    known: _Known, graph: espnx.graph.GraphIndex, own: bool
) -> tuple[dict[float, Point], bool]:
    """Searches by lists of every length through every number of clusters."""
    tried = list[Tried]()
    is_right = True
    for margin in graph.probe_margins(known.data.queries):
        best = 0.0
        for list_size in _LISTS:
            point, right = known.point(graph, list_size, own, Probing(margin=margin))
            is_right &= right
            tried.append(Tried((list_size, margin), point.recall, point.pages, 0.0, None))
            if point.recall - best < _GAIN_MIN:
                break  # what is missing lies in other clusters
            best = point.recall
        if best >= _ENOUGH:
            break
    most = max(tried, key=lambda each: (each.recall, -each.pages))
    found: dict[float, Point] = {}
    for recall in TARGETS:
        reached = [each for each in tried if each.recall >= recall]
        cheapest = min(reached, key=lambda each: each.pages, default=most)
        pages = value_at(tried, recall, lambda each: each.pages)
        found[recall] = Point(
            int(cheapest.setting[0]),
            cheapest.recall if pages is None else recall,
            cheapest.pages if pages is None else pages,
        )
    return found, is_right


def _beside_fresh(params: dict[str, Any], system: str, series: Sequence[Series]) -> Iterator[Row]:
    is_right = all(each.is_right for each in series)
    for recall in TARGETS:
        pairs = [(each.changed[recall], each.fresh[recall]) for each in series]
        pages = [ours.pages / theirs.pages for ours, theirs in pairs]
        less = [theirs.recall - ours.recall for ours, theirs in pairs]
        yield _row(
            {**params, "show": SHOW, "recall": recall},
            system,
            {
                "list_size": statistics.mean(theirs.list_size for _, theirs in pairs),
                "recall": statistics.mean(ours.recall for ours, _ in pairs),
                "fresh_recall": statistics.mean(theirs.recall for _, theirs in pairs),
                "recall_less_most": max(less),
                "reads": statistics.mean(ours.pages for ours, _ in pairs),
                "fresh_reads": statistics.mean(theirs.pages for _, theirs in pairs),
                "reads_over_fresh": statistics.mean(pages),
                "reads_over_fresh_most": max(pages),
            },
            is_right,
        )
    for number in range(params["rounds"] + 1):
        points = [each.drift[number] for each in series]
        yield _row(
            {**params, "show": DRIFT, "recall": TARGETS[1], "round": number},
            system,
            {
                "list_size": statistics.mean(each.list_size for each in points),
                "recall": statistics.mean(each.recall for each in points),
                "recall_least": min(each.recall for each in points),
                "recall_most": max(each.recall for each in points),
                "reads": statistics.mean(each.pages for each in points),
                "reads_least": min(each.pages for each in points),
                "reads_most": max(each.pages for each in points),
            },
            is_right,
        )


def _costs(
    params: dict[str, Any], system: str, data: Data, n: int, folder: Path, plan: ChangesPlan
) -> Iterator[Row]:
    """Merges, each in a process of its own, and a build."""
    np.save(folder / "base.npy", data.base[:n])
    options = _options(system, plan)
    with Worker("graph", system) as worker:
        built = worker.ask(
            "cost", base=str(folder / "base.npy"), folder=str(folder / "built"), **options
        )
    yield _row({**params, "show": MERGE, "what": "build", "replaced": 1.0}, system, built, True)
    for share in plan.merged:
        count = round(share * n)
        np.save(folder / "added.npy", data.base[n : n + count])
        with Worker("graph", system) as worker:
            said = worker.ask("cost_of_merge", added=str(folder / "added.npy"), **{
                "base": str(folder / "base.npy"), "folder": str(folder / "merged"), **options
            })  # fmt: skip
        said |= {f"{name}_over_build": said[name] / built[name] for name in said if built.get(name)}
        here = {**params, "show": MERGE, "what": "merge", "replaced": share}
        yield _row(here, system, said, True)


def _searches(
    params: dict[str, Any], system: str, data: Data, n: int, folder: Path, plan: ChangesPlan
) -> Iterator[Row]:
    """CPU of searches of a graph alone, and with a tenth as many additions that are not merged, in
    turns."""
    added = data.base[n:]
    _build(data.base[:n], folder / "plain", system, plan)
    _build(data.base[:n], folder / "more", system, plan)
    with (
        espnx.graph.open(folder / "plain") as plain,
        espnx.graph.open_writer(folder / "more", durability="none") as more,
    ):
        more.add(added)
        begun = time.process_time()
        first = more.search(data.queries, data.k)
        first_s = (time.process_time() - begun) / max(1, len(data.queries))
        while _grows(more, data):
            pass
        for recall in TARGETS:
            known = [each for each in plain.facts.recall if each.recall >= recall]
            list_size = (known or [*plain.facts.recall])[0].list_size if plain.facts.recall else 80
            for at_once in (True, False):
                pairs = [
                    [_cpu_s(graph, data, list_size, at_once) for graph in (plain, more)]
                    for _ in range(plan.pairs)
                ]
                found = more.search(data.queries, data.k, list_size=list_size)
                yield _row(
                    {**params, "show": SEARCH, "recall": recall, "alone": not at_once},
                    system,
                    {
                        "list_size": list_size,
                        "recall": data.recall(found.ids),
                        "measured": float(found.measured.mean()),
                        "measured_at_first": float(first.measured.mean()),
                        "cpu_s": statistics.median(ours for _, ours in pairs),
                        "plain_cpu_s": statistics.median(theirs for theirs, _ in pairs),
                        "cpu_over_plain": statistics.median(b / a for a, b in pairs),
                        "first_cpu_s": first_s,
                        "unmerged": len(added),
                    },
                    data.problem(found.ids, found.distances) is None,
                )


def _grows(graph: espnx.graph.GraphIndex, data: Data) -> bool:
    """Searches once more; whether the index of additions has grown by it."""
    index = graph.pending.index
    before = 0 if index is None else index.n_indexed
    graph.search(data.queries, data.k)
    return index is not None and index.n_indexed > before


def _cpu_s(graph: espnx.graph.GraphIndex, data: Data, list_size: int, at_once: bool) -> float:
    """CPU seconds of a query, of all threads."""
    begun, done = time.process_time(), 0
    while time.process_time() - begun < _PAIRS_S:
        if at_once:
            graph.search(data.queries, data.k, list_size=list_size)
            done += len(data.queries)
            continue
        for i in range(min(_ALONE, len(data.queries))):
            graph.search(data.queries[i : i + 1], data.k, list_size=list_size)
            done += 1
    return (time.process_time() - begun) / done


def _row(params: dict[str, Any], system: str, metrics: Mapping[str, float], is_right: bool) -> Row:
    return counted(
        params, system, {name: float(value) for name, value in metrics.items()}, is_right=is_right
    )


def _system(row: Row) -> str:
    clusters = row.params.get("clusters")
    return row.system if clusters is None else f"{row.system}, {clusters}"


def _right(row: Row) -> str:
    return "yes" if row.correct else "NO"


def changes_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "vectors", "recall@10", "system", "list", "recall", "of a fresh build", "less by, most",
        "pages", "of a fresh build", "ratio", "most", "series", "correct",
    ]  # fmt: skip
    return headers, [
        [
            f"{row.params['n']:,}",
            f"{row.params['recall']:g}",
            _system(row),
            metric("list_size", 1, 0)(row),
            metric("recall", 1, 4)(row),
            metric("fresh_recall", 1, 4)(row),
            metric("recall_less_most", 1, 4)(row),
            metric("reads", 1, 1)(row),
            metric("fresh_reads", 1, 1)(row),
            metric("reads_over_fresh", 1, 3)(row),
            metric("reads_over_fresh_most", 1, 3)(row),
            str(row.params["series"]),
            _right(row),
        ]
        for row in rows
    ]


def drift_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = ["vectors", "system", "list", "round", "recall", "least", "most", "pages", "least",
               "most", "correct"]  # fmt: skip
    return headers, [
        [
            f"{row.params['n']:,}",
            _system(row),
            metric("list_size", 1, 0)(row),
            str(row.params["round"]),
            metric("recall", 1, 4)(row),
            metric("recall_least", 1, 4)(row),
            metric("recall_most", 1, 4)(row),
            metric("reads", 1, 1)(row),
            metric("reads_least", 1, 1)(row),
            metric("reads_most", 1, 1)(row),
            _right(row),
        ]
        for row in rows
    ]


def merge_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = ["vectors", "system", "what", "replaced", "seconds", "of a build", "CPU, s",
               "of a build", "memory, MiB", "of a build", "written, MB", "of a build"]  # fmt: skip
    return headers, [
        [
            f"{row.params['n']:,}",
            _system(row),
            row.params["what"],
            f"{row.params['replaced']:.0%}",
            metric("seconds", 1, 1)(row),
            metric("seconds_over_build")(row),
            metric("cpu_s", 1, 1)(row),
            metric("cpu_s_over_build")(row),
            metric("more_bytes", 2**20, 0)(row),
            metric("more_bytes_over_build")(row),
            metric("written_bytes", 1e6, 0)(row),
            metric("written_bytes_over_build")(row),
        ]
        for row in rows
    ]


def search_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "vectors", "not merged", "system", "recall=", "list", "queries", "recall@10", "CPU, us",
        "without changes", "ratio", "measured", "at first", "correct",
    ]  # fmt: skip
    return headers, [
        [
            f"{row.params['n']:,}",
            metric("unmerged", 1, 0)(row),
            _system(row),
            f"{row.params['recall']:g}",
            metric("list_size", 1, 0)(row),
            "one at a time" if row.params["alone"] else "at once",
            metric("recall", 1, 4)(row),
            metric("cpu_s", 1e-6, 0)(row),
            metric("plain_cpu_s", 1e-6, 0)(row),
            metric("cpu_over_plain")(row),
            metric("measured", 1, 0)(row),
            metric("measured_at_first", 1, 0)(row),
            _right(row),
        ]
        for row in rows
    ]
