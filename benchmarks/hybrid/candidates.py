"""How many candidates a first stage should find: quality and cost of MaxSim over 50 to 1,000 of
them, from a graph and from lists on SSD, and from inverted lists in memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import espnx
from espnx.retrieval.evaluate import evaluate

from ..harness.registry import Say
from ..harness.result import Row
from .collection import Collection

COUNTS = (50, 100, 200, 400, 700, 1000)
K = 10


@dataclass
class _Point:
    """One stage with one number of candidates. Attributes: seconds: of each search, without
    encoding."""

    hits: dict[str, list[Any]] = field(default_factory=dict)
    results: list[espnx.SearchResult] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def measure_candidates(
    index: espnx.Index,
    encoder: espnx.Encoder,
    given: Collection,
    stages: Sequence[str],
    pairs: int,
    say: Say,
) -> list[Row]:
    """A row for each stage and number of candidates. Each query is asked of all of them before the
    next one is."""
    encoded = dict(
        zip(given.queries, encoder.encode_queries(list(given.queries.values())), strict=True)
    )
    exact = {
        name: index.search(query, k=len(index), candidates=len(index), first_stage="ivf")
        for name, query in encoded.items()
    }
    asked = [(stage, count) for count in COUNTS if count < len(index) for stage in stages] or [
        (stage, len(index)) for stage in stages
    ]
    points = {at: _Point() for at in asked}
    for turn in range(pairs):
        say(f"candidates, pass {turn + 1} of {pairs}")
        for place, (name, query) in enumerate(encoded.items()):
            for stage, count in asked[:: 1 if (place + turn) % 2 else -1]:
                point, begun = points[stage, count], time.perf_counter()
                result = index.search(query, k=K, candidates=count, first_stage=stage)
                point.seconds.append(time.perf_counter() - begun)
                point.results.append(result)
                point.hits[name] = result.hits
    return [
        _row(stage, count, point, given, exact, index) for (stage, count), point in points.items()
    ]


def _row(
    stage: str,
    count: int,
    point: _Point,
    given: Collection,
    exact: Mapping[str, espnx.SearchResult],
    index: espnx.Index,
) -> Row:
    ids = {name: [hit.id for hit in hits] for name, hits in point.hits.items()}
    nearest = {name: {hit.number for hit in result.hits[:K]} for name, result in exact.items()}
    found = [
        len(nearest[name] & {hit.number for hit in hits}) / len(nearest[name])
        for name, hits in point.hits.items()
    ]
    metrics = {
        "ndcg_10": evaluate(ids, given.qrels, ("nDCG@10",))["nDCG@10"],
        "recall_exact": statistics.mean(found),
    }
    for name in ("requests", "stage_requests", "stage_bytes"):
        metrics[name] = statistics.mean(getattr(result, name) for result in point.results)
    metrics["hit_rate"] = statistics.mean(result.hit_rate for result in point.results)
    return Row(
        case="hybrid",
        params={"show": "candidates", **given.params(index), "candidates": count},
        system=stage,
        kind="measured",
        requested_path="auto",
        effective_path=index.store.effective_path,
        cache="warm",
        n=len(point.seconds),
        median_s=statistics.median(point.seconds),
        p99_s=float(np.percentile(point.seconds, 99)),
        iqr_s=float(np.subtract(*np.percentile(point.seconds, (75, 25)))),
        bytes_asked=int(statistics.median(result.bytes_asked for result in point.results)),
        bytes_moved=int(statistics.median(result.bytes_moved for result in point.results)),
        correct=_are_scores_exact(point, exact),
        metrics=metrics,
    )


def _are_scores_exact(point: _Point, exact: Mapping[str, espnx.SearchResult]) -> bool:
    """Whether every hit has the score that a search of all documents gives it."""
    for name, hits in point.hits.items():
        scores = {hit.number: hit.score for hit in exact[name].hits}
        if not hits or not all(
            np.isclose(hit.score, scores[hit.number], rtol=1e-5) for hit in hits
        ):
            return False
    return True


def candidates_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "candidates", "first stage", "nDCG@10", "of the exact 10", "ms a query (IQR)",
        "KiB of records", "requests", "KiB of the stage", "its reads",
        "read before the stage ended", "right",
    ]  # fmt: skip
    return headers, [
        [
            str(row.params["candidates"]),
            row.system,
            f"{row.metrics['ndcg_10']:.4f}",
            f"{row.metrics['recall_exact']:.4f}",
            f"{1e3 * (row.median_s or 0):.1f} ({1e3 * (row.iqr_s or 0):.1f})",
            f"{row.bytes_moved / 1024:,.0f}",
            f"{row.metrics['requests']:.0f}",
            f"{row.metrics['stage_bytes'] / 1024:,.0f}",
            f"{row.metrics['stage_requests']:.0f}",
            f"{row.metrics['hit_rate']:.0%}",
            "yes" if row.correct else "NO",
        ]
        for row in rows
    ]
