"""Pages of a query of lists (SPANN) beside those of a graph of the same vectors, by recall, for
each order in which lists are packed into pages."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import espnx.clusters
import espnx.graph
from espnx.clusters.advice.trials import efforts
from espnx.clusters.facts import read_lists
from espnx.clusters.finding import MemoryHeads
from espnx.clusters.found import ListNeighbours
from espnx.errors import InvalidInputError
from espnx.storage import NativeEngine

from ..harness.cells import ABSENT, metric
from ..harness.leftovers import size_bytes
from ..harness.registry import Say
from ..harness.result import Row
from .data import Data
from .rows import at_recall, counted

TARGETS = (0.90, 0.93, 0.95, 0.99)
GRAPH, LISTS = "espnx-graph", "espnx-lists"
#: Of what is missing to all neighbours, that the largest effort leaves.
_ENOUGH = 0.995
_LIST_SIZE_MAX = 320
#: Of the graph; what lists read of larger ones is not compared with it.
PAGE_BYTES = 4096
#: Heads that are at most so much farther than the nearest, by squared distance.
_RATIOS = (1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5)
_DEADLINE_S = 30.0


@dataclass(frozen=True)
class ListsPlan:
    """Attributes: path: of a directory. packings, page_bytes, dtypes: of lists, each with each.
    threads: of builds. seed: of these. cpu_s: of a search whose processor time is measured, at
    least."""

    path: Path
    packings: Sequence[str]
    page_bytes: Sequence[int]
    dtypes: Sequence[str]
    threads: int
    seed: int
    cpu_s: float


@dataclass(frozen=True)
class Tried:
    """An effort, and what a query took, the mean.

    Attributes:
        effort: list size of a walk, or lists. ratio: of heads' distances, that leaves some out.
    """

    effort: int
    ratio: float | None
    recall: float
    pages: float
    size_bytes: float
    requests: float
    rounds: float
    lists: float
    problem: str | None


def measure_lists(sets: Iterator[Data], plan: ListsPlan, say: Say) -> list[Row]:
    """A row for each recall, and the graph and each kind of lists.

    The first half of the queries says to ``co-access`` which lists are read together; the second
    half is what everything is measured with.
    """
    found = list[Row]()
    for data in sets:
        half = len(data.queries) // 2
        learnt, held_out = (
            data.queries[:half],
            dataclasses.replace(data, queries=data.queries[half:]),
        )
        params = {
            "show": "lists",
            "data": data.name,
            "n": len(data.base),
            "dim": data.base.shape[1],
            "queries": len(held_out.queries),
            "k": data.k,
        }
        with tempfile.TemporaryDirectory(prefix="espnx-bench-lists-", dir=plan.path) as folder:
            graph, said = _graph(held_out, Path(folder) / "graph", plan)
            say(f"{data.name}: {GRAPH}: built in {said['build_s']:.1f} s")
            systems: dict[str, tuple[list[Tried], dict[str, float], dict[str, Any]]]
            systems = {GRAPH: (graph, said, {"page_bytes": PAGE_BYTES})}
            for dtype, page_bytes, packing in _kinds(plan):
                name = f"{LISTS}-{packing}"
                kind = {"page_bytes": page_bytes, "dtype": dtype}
                tried, said = _lists(
                    held_out, learnt, Path(folder) / "lists", plan, packing, page_bytes, dtype
                )
                say(f"{data.name}: {name}, {kind}: built in {said['build_s']:.1f} s")
                systems[f"{name} {dtype} {page_bytes}"] = tried, said, kind
        for recall in TARGETS:
            theirs = _at(graph, recall, "pages")
            found += [
                _row({**params, **kind, "recall": recall}, name.split()[0], tried, said, theirs)
                for name, (tried, said, kind) in systems.items()
            ]
    return found


def _kinds(plan: ListsPlan) -> Iterator[tuple[str, int, str]]:
    for dtype in plan.dtypes:
        for page_bytes in plan.page_bytes:
            for packing in plan.packings:
                yield dtype, page_bytes, packing


def _graph(data: Data, path: Path, plan: ListsPlan) -> tuple[list[Tried], dict[str, float]]:
    begun = time.perf_counter()
    espnx.graph.build(data.base, path, threads=plan.threads, seed=plan.seed)
    said = {"build_s": time.perf_counter() - begun, "folder_bytes": float(size_bytes(path))}
    with espnx.graph.open(path) as graph:
        said["memory_bytes"] = float(graph.facts.memory_bytes)
        tried = list[Tried]()
        for list_size in efforts(data.k, max(data.k, min(_LIST_SIZE_MAX, len(data.base)))):
            found = graph.search(data.queries, data.k, list_size=list_size, beam_width=1)
            pages = float((found.pages + found.code_pages).mean())
            tried.append(
                Tried(
                    list_size,
                    None,
                    data.recall(found.ids),
                    pages,
                    float(found.bytes_read.mean()),
                    pages,
                    pages,
                    0.0,
                    data.problem(found.ids, found.distances),
                )
            )
            if tried[-1].recall >= _ENOUGH:
                break
        said |= _cpu(
            tried,
            lambda each: graph.search(data.queries, data.k, list_size=each.effort, beam_width=1),
            len(data.queries),
            plan.cpu_s,
        )
    return tried, said


def _lists(
    data: Data,
    learnt: np.ndarray,
    path: Path,
    plan: ListsPlan,
    packing: str,
    page_bytes: int,
    dtype: str,
) -> tuple[list[Tried], dict[str, float]]:
    begun = time.perf_counter()
    report = espnx.clusters.build(
        data.base,
        path,
        packing=packing,
        page_bytes=page_bytes,
        vector_dtype=dtype,
        queries=learnt if packing == "co-access" else None,
        threads=plan.threads,
        seed=plan.seed,
        replace=True,
    )
    said = {
        "build_s": time.perf_counter() - begun,
        "folder_bytes": float(report.folder_bytes),
        "memory_bytes": float(report.memory_bytes),
        "n_lists": float(report.n_lists),
        "copies": report.entries / report.n,
        "filled": report.used_bytes / (report.pages * report.page_bytes),
    }
    with espnx.clusters.open(path) as index:

        def one(n_lists: int, ratio: float | None) -> Tried:
            found = index.search(data.queries, data.k, n_lists=n_lists, max_dist_ratio=ratio)
            # what is stored in fewer bits is as far as its stored values are; few lists may hold
            # fewer than k
            is_known = dtype != "int8" and found.ids.min() >= 0
            problem = data.problem(found.ids, found.distances) if is_known else None
            return _tried(data, found, n_lists, ratio, problem)

        tried = list[Tried]()
        for n_lists in efforts(1, report.n_lists):
            tried.append(one(n_lists, None))
            if tried[-1].recall >= _ENOUGH or _is_flat(tried):
                break
        tried += [one(tried[-1].effort, ratio) for ratio in _RATIOS]
        said |= _cpu(
            tried,
            lambda each: index.search(
                data.queries, data.k, n_lists=each.effort, max_dist_ratio=each.ratio
            ),
            len(data.queries),
            plan.cpu_s,
        )
    heads, wide = _heads(path, data.queries)
    of_heads = _cpu(
        tried,
        lambda each: heads.find(wide, each.effort, _DEADLINE_S),
        len(data.queries),
        plan.cpu_s,
    )
    said |= {f"heads_{name}": value for name, value in of_heads.items()}
    return tried, said


def _heads(path: Path, queries: np.ndarray) -> tuple[MemoryHeads, np.ndarray]:
    """The heads of lists, without the lists, and queries as these take them."""
    with NativeEngine("posix", threads=1, pool_bytes=0) as engine:
        stored = read_lists(engine, path)
    if stored.heads is None or stored.links is None:
        raise InvalidInputError("heads", got="a graph", expected="heads in memory")
    finder = MemoryHeads(stored.heads, stored.links, torch.get_num_threads())
    return finder, stored.coding.queries(queries).wide


def _is_flat(tried: Sequence[Tried]) -> bool:
    """Whether twice as many lists have found next to nothing more: what is missing is lost to the
    format."""
    half = next((each for each in reversed(tried) if 2 * each.effort <= tried[-1].effort), None)
    return (
        half is not None
        and tried[-1].recall > TARGETS[0]
        and tried[-1].recall - half.recall < (1 - _ENOUGH) / 2
    )


def _tried(
    data: Data, found: ListNeighbours, n_lists: int, ratio: float | None, problem: str | None
) -> Tried:
    return Tried(
        n_lists,
        ratio,
        _recall(data, found.ids),
        float(found.pages.mean()),
        float(found.bytes_moved.mean()),
        float(found.requests.mean()),
        float(found.rounds.mean()),
        float(found.lists.mean()),
        problem,
    )


def _recall(data: Data, ids: np.ndarray) -> float:
    """See `Data.recall`; -1 stands for nothing."""
    far = np.where(ids < 0, np.inf, data.distances(np.maximum(ids, 0)))
    return float((far <= data.farthest[:, None] * (1 + 1e-9)).mean())


def _cpu(
    tried: Sequence[Tried], search: Callable[[Tried], object], n_queries: int, least_s: float
) -> dict[str, float]:
    """CPU seconds a query of all threads, for the cheapest effort of each recall."""
    said = dict[str, float]()
    for recall in TARGETS:
        cheapest = min(
            (each for each in tried if each.recall >= recall),
            key=lambda each: each.pages,
            default=None,
        )
        if cheapest is None:
            continue
        begun, times = time.process_time(), 0
        while not times or time.process_time() - begun < least_s:
            search(cheapest)
            times += 1
        said[f"cpu_s_{recall:g}"] = (time.process_time() - begun) / times / n_queries
    return said


def _at(tried: Sequence[Tried], recall: float, of: str) -> float | None:
    """A value at a recall, between two efforts by a straight line; an effort counts that nothing
    finds as much as in fewer pages."""
    kept = list[Tried]()
    for each in sorted(tried, key=lambda one: (-one.recall, one.pages)):
        if not kept or each.pages < kept[-1].pages:
            kept.append(each)
    return at_recall([(each.recall, getattr(each, of)) for each in reversed(kept)], recall)


def _row(
    params: dict[str, Any],
    system: str,
    tried: Sequence[Tried],
    said: dict[str, float],
    theirs: float | None,
) -> Row:
    recall = params["recall"]
    metrics = {name: value for name, value in said.items() if "cpu_s_" not in name}
    if f"cpu_s_{recall:g}" in said:
        metrics["cpu_s"] = said[f"cpu_s_{recall:g}"]
    if f"heads_cpu_s_{recall:g}" in said:
        metrics["heads_share"] = said[f"heads_cpu_s_{recall:g}"] / metrics["cpu_s"]
    metrics["best_recall"] = max(each.recall for each in tried)
    names = {"reads": "pages", "bytes_read": "size_bytes", "requests": "requests",
             "rounds": "rounds", "lists": "lists"}  # fmt: skip
    at = {name: _at(tried, recall, of) for name, of in names.items()}
    metrics |= {name: value for name, value in at.items() if value is not None}
    if theirs is not None and at["reads"] is not None and params["page_bytes"] == PAGE_BYTES:
        metrics["reads_over_graph"] = at["reads"] / theirs
    return counted(params, system, metrics, is_right=all(each.problem is None for each in tried))


def lists_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "vectors", "recall@10", "system", "stored as", "page, KiB", "pages", "of the graph's",
        "rounds", "requests", "KiB read", "lists", "CPU, us", "of it heads", "most recall",
        "copies", "pages filled", "RAM, MiB", "folder, MB", "build, s", "correct",
    ]  # fmt: skip
    cells = [
        [
            row.params["data"],
            f"{row.params['recall']:g}",
            row.system,
            row.params.get("dtype", ABSENT),
            str(row.params["page_bytes"] // 1024),
            metric("reads", 1, 1)(row),
            metric("reads_over_graph")(row),
            metric("rounds", 1, 1)(row),
            metric("requests", 1, 1)(row),
            metric("bytes_read", 1024, 0)(row),
            metric("lists", 1, 1)(row),
            metric("cpu_s", 1e-6, 0)(row),
            metric("heads_share")(row),
            metric("best_recall", 1, 3)(row),
            metric("copies", 1, 2)(row),
            metric("filled", 1, 2)(row),
            metric("memory_bytes", 2**20, 2)(row),
            metric("folder_bytes", 1e6, 1)(row),
            metric("build_s", 1, 1)(row),
            "yes" if row.correct else "NO",
        ]
        for row in rows
    ]
    return headers, cells
