"""Rankings of one index by several first stages, judged and timed: see case.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import espnx
from espnx.retrieval.evaluate import compare_rankings, evaluate
from espnx.retrieval.first_stage.fusion import RRF_K, fuse

from ..harness.registry import Say
from ..harness.result import Row
from .collection import Collection

METRICS = ("nDCG@10", "recall@100")
#: Of a ranking: as deep as it is judged and fused.
DEPTH = 1000


@dataclass(frozen=True)
class _System:
    """What a ranking is asked with; `parts`: fused afterwards from these systems' rankings."""

    name: str
    options: Mapping[str, Any] | None
    parts: tuple[str, ...] = ()


SYSTEMS = (
    _System("bm25", {"first_stage": "bm25", "rerank": 0}),
    _System("splade", {"first_stage": "splade", "rerank": 0}),
    _System("maxsim", {"first_stage": "ivf"}),
    _System(
        "rrf: bm25, splade", {"first_stage": ("bm25", "splade"), "rerank": 0}, ("bm25", "splade")
    ),
    _System("rrf: bm25, splade, maxsim", None, ("bm25", "splade", "maxsim")),
    _System("rrf+maxsim: bm25, splade", {"first_stage": ("bm25", "splade"), "fuse": "rrf+maxsim"}),
    _System("maxsim over the union", {"first_stage": ("bm25", "splade", "ivf")}),
)
_ALONE = ("bm25", "splade", "maxsim")


def measure_rankings(index: espnx.Index, given: Collection, pairs: int, say: Say) -> list[Row]:
    """One row a system. Raises what the library raises."""
    rankings, results = dict[str, dict[str, list[Any]]](), dict[str, list[espnx.SearchResult]]()
    for system in SYSTEMS:
        say(system.name)
        rankings[system.name], results[system.name] = _ranked(index, given, system, rankings, pairs)
    right = _is_fused_right(index, given, rankings)
    best = max(
        _ALONE, key=lambda name: evaluate(_ids(rankings[name]), given.qrels, METRICS)["nDCG@10"]
    )
    return [
        _row(system, given, rankings, results[system.name], best, right, index)
        for system in SYSTEMS
    ]


def _ranked(
    index: espnx.Index,
    given: Collection,
    system: _System,
    rankings: Mapping[str, Mapping[str, list[Any]]],
    pairs: int,
) -> tuple[dict[str, list[Any]], list[espnx.SearchResult]]:
    """Hits by query, and the results of every time that they were asked."""
    if system.options is None:
        return {
            query: _fused_by_hand([rankings[name][query] for name in system.parts])
            for query in given.queries
        }, []
    depth = min(DEPTH, len(index))
    found = {
        query: index.search(text, k=depth, candidates=depth, **system.options)
        for query, text in given.queries.items()
    }
    again = [
        index.search(text, k=100, candidates=depth, **system.options)
        for _ in range(pairs)
        for text in given.queries.values()
    ]
    return {query: result.hits for query, result in found.items()}, again


def _fused_by_hand(rankings: Sequence[list[Any]]) -> list[Any]:
    """Hits of several rankings in the order of their reciprocal ranks."""
    by_number = {hit.number: hit for hits in rankings for hit in hits}
    lists = [
        (
            np.array([hit.number for hit in hits], np.int64),
            np.array([hit.score for hit in hits], np.float32),
        )
        for hits in rankings
    ]
    return [by_number[number] for number in fuse(lists, "rrf").numbers.tolist()]


def _is_fused_right(
    index: espnx.Index, given: Collection, rankings: Mapping[str, Mapping[str, list[Any]]]
) -> bool:
    """Whether fused searches give every document the sum that its ranks have by hand."""
    for query in given.queries:
        sums: dict[int, float] = {}
        for kind in ("bm25", "splade"):
            for hit in rankings[kind][query]:
                sums[hit.number] = sums.get(hit.number, 0.0) + 1 / (RRF_K + hit.found_by[kind].rank)
        best = sorted(sums.values(), reverse=True)
        found = rankings["rrf: bm25, splade"][query]
        if len(found) != min(len(sums), DEPTH, len(index)) or not np.allclose(
            [hit.score for hit in found], best[: len(found)], rtol=1e-5
        ):
            return False
        if not all(np.isclose(hit.score, sums[hit.number], rtol=1e-5) for hit in found):
            return False
        for hit in rankings["rrf+maxsim: bm25, splade"][query]:
            if not np.isclose(
                hit.score,
                sum(1 / (RRF_K + place.rank) for place in hit.found_by.values()),
                rtol=1e-5,
            ):
                return False
    return True


def _ids(ranking: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {query: [hit.id for hit in hits] for query, hits in ranking.items()}


def _row(
    system: _System,
    given: Collection,
    rankings: Mapping[str, Mapping[str, list[Any]]],
    results: list[espnx.SearchResult],
    best: str,
    right: bool,
    index: espnx.Index,
) -> Row:
    found = evaluate(_ids(rankings[system.name]), given.qrels, METRICS)
    metrics = {"ndcg_10": found["nDCG@10"], "recall_100": found["recall@100"]}
    if system.name not in _ALONE:
        beyond = compare_rankings(
            _ids(rankings[system.name]), _ids(rankings[best]), given.qrels, METRICS
        )[0]
        metrics |= {
            "beyond": beyond.difference,
            "beyond_low": beyond.low,
            "beyond_high": beyond.high,
        }
    times = [result.timings.total_s for result in results]
    if times:
        metrics["encode_s"] = statistics.median(result.timings.encode_s for result in results)
    moved = [result.bytes_moved + result.stage_bytes for result in results] or [0]
    return Row(
        case="hybrid",
        params={"show": "rankings", **given.params(index), "best_alone": best},
        system=system.name,
        kind="measured",
        requested_path="auto",
        effective_path=index.store.effective_path,
        cache="warm",
        n=len(times),
        median_s=statistics.median(times) if times else None,
        p99_s=float(np.percentile(times, 99)) if times else None,
        iqr_s=float(np.subtract(*np.percentile(times, (75, 25)))) if times else None,
        bytes_asked=int(statistics.median(result.bytes_asked for result in results))
        if results
        else 0,
        bytes_moved=int(statistics.median(moved)),
        correct=right,
        metrics=metrics,
    )
