"""Pages of a query over the number of clusters, of which each has a graph, beside blind sharding:
as many graphs of shares of the vectors in their order, every one of which each query asks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import espnx.graph
from espnx.graph.planning import plan_graph
from espnx.graph.search.probing import Probing

from ..harness.cells import metric
from ..harness.leftovers import size_bytes
from ..harness.processes import Worker
from ..harness.registry import Say
from ..harness.result import Row
from .data import Data
from .measure import IN_FLIGHT
from .rows import at_recall, counted

TARGETS = (0.90, 0.95)
OURS, SHARDS, SHARDS_FOR_ALL = "espnx-clusters", "espnx-shards", "espnx-shards-k"
_LISTS = (10, 12, 14, 17, 20, 24, 28, 34, 40, 56, 80, 112, 160)
#: Neighbours that each shard is asked for, and the list of its walk.
_ASKED = ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 5), (5, 5))
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_CPU_S = 0.5  # that is measured at least


@dataclass(frozen=True)
class Tried:
    """A way to search, with the mean of a query: recall, pages, and clusters that were asked."""

    setting: tuple[float, ...]
    recall: float
    pages: float
    clusters: float
    problem: str | None


@dataclass(frozen=True)
class ClusterPlan:
    """Attributes: path: of a directory. counts: of clusters. per_cluster: vectors. replicas: shares
    of these in two clusters, each of a graph of its own. threads: of builds."""

    path: Path
    counts: Sequence[int]
    per_cluster: int
    replicas: Sequence[float]
    threads: int


def measure_clusters(make: Callable[[int], Data], plan: ClusterPlan, say: Say) -> list[Row]:
    """A row for each number of clusters, system, and recall.

    Args:
        make: vectors of a recipe, so many.
    """
    found = list[Row]()
    for count in plan.counts:
        data = make(count * plan.per_cluster)
        params = {
            "show": "clusters",
            "data": data.name,
            "n": len(data.base),
            "dim": data.base.shape[1],
            "queries": len(data.queries),
            "k": data.k,
            "clusters": count,
        }
        with tempfile.TemporaryDirectory(prefix="espnx-bench-graph-", dir=plan.path) as folder:
            tried, said = dict[str, list[Tried]](), dict[str, dict[str, float]]()
            for share in plan.replicas:
                system = f"{OURS}-{share:g}" if share else OURS
                tried[system], said[system] = _clusters(
                    data, Path(folder), count, share, plan.threads
                )
                say(f"{system}, {count} clusters: built in {said[system]['build_s']:.1f} s")
            tried |= _shards(data, Path(folder), count, plan.threads)
            say(f"{count} shards: done")
        for recall in TARGETS:
            theirs = value_at(tried[SHARDS], recall, lambda each: each.pages)
            for system, ways in tried.items():
                found.append(_row(params, system, recall, ways, said.get(system, {}), theirs))
    return found


def _clusters(
    data: Data, folder: Path, count: int, replicas: float, threads: int
) -> tuple[list[Tried], dict[str, float]]:
    """Every list through every number of clusters, and what the open graph takes."""
    np.save(folder / "base.npy", data.base)
    np.save(folder / "queries.npy", data.queries[: 4 * IN_FLIGHT])
    begun, path = time.perf_counter(), folder / "clusters"
    espnx.graph.build(
        data.base, path, clusters=count, replicas=replicas, replace=True, threads=threads
    )
    said = {"build_s": time.perf_counter() - begun, "folder_bytes": float(size_bytes(path))}
    before, begun = _own_counts(), time.process_time()
    with espnx.graph.open(path) as graph:
        said["open_cpu_s"] = time.process_time() - begun
        one = plan_graph(
            *data.base.shape,
            vector_dtype=_DTYPES.get(graph.facts.layout.format, graph.facts.layout.format),
            pq_bytes=graph.facts.layout.code_bytes,
        )
        said["folder_over_one"] = said["folder_bytes"] / one.disk["total_bytes"]
        graph.search(data.queries, data.k)
        said["threads"], said["descriptors"] = (
            float(more - less) for more, less in zip(_own_counts(), before, strict=True)
        )
        assert graph.facts.clusters is not None
        said["centroid_bytes"] = float(graph.facts.clusters.centroids.nbytes)
        tried = [_one(data, graph, margin, each) for margin, each in _ways(data, graph)]
        for recall in TARGETS:
            cheapest = min(
                (each for each in tried if each.recall >= recall),
                key=lambda each: each.pages,
                default=None,
            )
            if cheapest is not None:
                said[f"cpu_s_{recall:g}"] = _cpu_s(data, graph, cheapest)
        for recall in TARGETS:  # as users ask for it
            chosen = graph.search(data.queries, data.k, recall=recall)
            said[f"chosen_recall_{recall:g}"] = data.recall(chosen.ids)
            said[f"chosen_pages_{recall:g}"] = float(chosen.pages.mean())
    with Worker("graph", "espnx-inline") as worker:
        worker.ask(
            "open",
            system="espnx-inline",
            folder=str(path),
            queries=str(folder / "queries.npy"),
            k=data.k,
            threads=2,
            in_flight=IN_FLIGHT,
        )
        said["more_bytes"] = worker.ask("peak", setting=(40, 2, 1))["more_bytes"]
    return tried, said


def _own_counts() -> list[int]:
    return [len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd")]


def _ways(data: Data, graph: espnx.graph.GraphIndex) -> Iterator[tuple[float, int]]:
    for margin in graph.probe_margins(data.queries):
        for list_size in _LISTS:
            yield margin, list_size


def _one(data: Data, graph: espnx.graph.GraphIndex, margin: float, list_size: int) -> Tried:
    found = graph.walk(data.queries, data.k, list_size, Probing(margin=margin))
    assert found.clusters is not None
    return Tried(
        (margin, list_size),
        data.recall(found.ids),
        float(found.pages.mean()),
        float(found.clusters.mean()),
        data.problem(found.ids, found.distances),
    )


def _cpu_s(data: Data, graph: espnx.graph.GraphIndex, way: Tried) -> float:
    """CPU seconds a query of all threads, whether its pages come from the cache or the drive."""
    margin, list_size = way.setting
    begun, times = time.process_time(), 0
    while time.process_time() - begun < _CPU_S:
        graph.walk(data.queries, data.k, int(list_size), Probing(margin=margin))
        times += 1
    return (time.process_time() - begun) / times / len(data.queries)


def _shards(data: Data, folder: Path, count: int, threads: int) -> dict[str, list[Tried]]:
    """Blind sharding, asked for few neighbours of each shard, and for all of them."""
    q = len(data.queries)
    asked = {SHARDS: _ASKED, SHARDS_FOR_ALL: tuple((data.k, each) for each in (10, 14, 20))}
    best = {
        way: (np.empty((q, 0)), np.empty((q, 0), np.int64), np.zeros(q))
        for ways in asked.values()
        for way in ways
    }
    first = 0
    for share in np.array_split(data.base, count):
        with tempfile.TemporaryDirectory(dir=folder) as path:
            espnx.graph.build(share, path, threads=threads)
            with espnx.graph.open(path) as graph:
                for way, (far, ids, pages) in best.items():
                    found = graph.search(data.queries, way[0], list_size=way[1], beam_width=1)
                    far = np.concatenate([far, found.distances], axis=1)
                    ids = np.concatenate([ids, found.ids + first], axis=1)
                    order = np.argsort(far, axis=1, kind="stable")[:, : data.k]
                    best[way] = (
                        np.take_along_axis(far, order, axis=1),
                        np.take_along_axis(ids, order, axis=1),
                        pages + found.pages,
                    )
        first += len(share)
    return {
        system: [
            Tried(
                way,
                data.recall(best[way][1]),
                float(best[way][2].mean()),
                float(count),
                data.problem(best[way][1], best[way][0]),
            )
            for way in ways
            if best[way][1].shape[1] == data.k
        ]
        for system, ways in asked.items()
    }


def value_at(
    tried: Sequence[Tried], recall: float, value: Callable[[Tried], float]
) -> float | None:
    """The value at a recall, between two ways by a straight line; a way counts that nothing cheaper
    finds as much as."""
    kept = list[Tried]()
    for each in sorted(tried, key=lambda one: (-one.recall, one.pages)):
        if not kept or each.pages < kept[-1].pages:
            kept.append(each)
    return at_recall([(each.recall, value(each)) for each in reversed(kept)], recall)


def _row(
    params: dict[str, Any],
    system: str,
    recall: float,
    tried: Sequence[Tried],
    said: dict[str, float],
    theirs: float | None,
) -> Row:
    pages = value_at(tried, recall, lambda each: each.pages)
    asked = value_at(tried, recall, lambda each: each.clusters)
    ends = [f"_{each:g}" for each in TARGETS]
    metrics = {name: value for name, value in said.items() if not name.endswith(tuple(ends))} | {
        name.removesuffix(f"_{recall:g}"): value
        for name, value in said.items()
        if name.endswith(f"_{recall:g}")
    }
    if pages is not None and asked is not None:
        metrics |= {"reads": pages, "clusters_asked": asked}
        if theirs is not None:
            metrics["reads_over_shards"] = pages / theirs
    return counted(
        {**params, "recall": recall},
        system,
        metrics,
        is_right=all(each.problem is None for each in tried),
    )


def clusters_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "clusters", "vectors", "recall@10", "system", "pages", "of blind sharding's",
        "clusters asked", "CPU, us", "by recall=: recall", "pages", "RAM, MiB", "threads",
        "descriptors", "folder, MB", "of one graph's", "open, CPU ms", "build, s", "correct",
    ]  # fmt: skip
    cells = [
        [
            str(row.params["clusters"]),
            f"{row.params['n']:,}",
            f"{row.params['recall']:g}",
            row.system,
            metric("reads", 1, 1)(row),
            metric("reads_over_shards", 1, 3)(row),
            metric("clusters_asked", 1, 1)(row),
            metric("cpu_s", 1e-6, 0)(row),
            metric("chosen_recall", 1, 3)(row),
            metric("chosen_pages", 1, 1)(row),
            metric("more_bytes", 2**20, 2)(row),
            metric("threads", 1, 0)(row),
            metric("descriptors", 1, 0)(row),
            metric("folder_bytes", 1e6, 1)(row),
            metric("folder_over_one", 1, 3)(row),
            metric("open_cpu_s", 1e-3, 1)(row),
            metric("build_s", 1, 1)(row),
            "yes" if row.correct else "NO",
        ]
        for row in rows
    ]
    return headers, cells
