"""First stages of one vector a document at equal recall: what each reads, and how long it takes, to
find the same share of the candidates that a search of all vectors finds, and what MaxSim makes of
them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import espnx
from espnx.retrieval.evaluate import evaluate
from espnx.retrieval.first_stage.interface import Candidates

from ..harness.registry import Say
from ..harness.result import Row
from .collection import Collection

#: Of which all lists are read for what is to be found: its vectors are float16.
EXACT = "clusters"
RECALLS = (0.90, 0.95, 0.98)
CANDIDATES, K = 100, 10
_GROWTH = 1.2  # of an effort that found too little
_EVERYTHING = 2**30
#: Inverted lists hold codes of vectors, whose similarities are so far off, of the largest.
_CODED, _STORED = 0.02, 1e-4


@dataclass(frozen=True)
class _Point:
    """What an effort of a stage finds. Attributes: recall: mean over queries. requests,
    bytes_moved: of the stage, mean of a query."""

    effort: int
    recall: float
    requests: float
    bytes_moved: float
    is_right: bool


def measure_stages(
    index: espnx.Index,
    encoder: espnx.Encoder,
    given: Collection,
    stages: Sequence[str],
    pairs: int,
    say: Say,
) -> list[Row]:
    """A row for each stage and recall."""
    texts = list(given.queries.values())
    encoded = dict(zip(given.queries, encoder.encode_queries(texts), strict=True))
    loaded: Mapping[str, Any] = index.first_stage.stages  # type: ignore[attr-defined]
    count = min(CANDIDATES, len(index))
    asked = {
        stage: [loaded[stage].prepare(query) for query in encoded.values()]
        for stage in {*stages, EXACT}
    }
    truth = loaded[EXACT].start(asked[EXACT], count, _EVERYTHING).complete()
    rows = []
    for stage in stages:
        effort, reached = (count if stage == "graph" else 1), list[_Point]()
        for recall in RECALLS:
            while not reached or reached[-1].recall < recall:
                if reached and effort > 2 * len(index):
                    break
                say(f"{stage}, effort {effort:,}")
                reached.append(_found(stage, loaded[stage], asked[stage], count, effort, truth))
                effort = math.ceil(_GROWTH * effort)
            point = next((each for each in reached if each.recall >= recall), reached[-1])
            rows.append(
                _row(
                    stage, recall, point, loaded[stage], asked[stage], given, index, encoded, pairs
                )
            )
    return rows


def _found(
    stage: str,
    loaded: Any,
    asked: Sequence[Any],
    count: int,
    effort: int,
    truth: Sequence[Candidates],
) -> _Point:
    search = loaded.start(asked, count, effort)
    shares, is_right = [], True
    for (numbers, scores), (wanted, right) in zip(search.complete(), truth, strict=True):
        common, a, b = np.intersect1d(numbers, wanted, return_indices=True)
        shares.append(len(common) / max(1, len(wanted)))
        off = (_CODED if stage == "ivf" else _STORED) * np.abs(right).max(initial=0)
        is_right &= bool((np.abs(scores[a] - right[b]) <= off).all())
    reads = search.reads
    each = 1 / max(1, len(asked))
    return _Point(
        effort, statistics.mean(shares), each * reads.requests, each * reads.bytes_moved, is_right
    )


def _row(
    stage: str,
    recall: float,
    point: _Point,
    loaded: Any,
    asked: Sequence[Any],
    given: Collection,
    index: espnx.Index,
    encoded: Mapping[str, Any],
    pairs: int,
) -> Row:
    count = min(CANDIDATES, len(index))
    seconds = []
    for _ in range(pairs):
        for query in asked:
            begun = time.perf_counter()
            loaded.start([query], count, point.effort).complete()
            seconds.append(time.perf_counter() - begun)
    options: dict[str, Any] = {
        "k": K,
        "candidates": count,
        "nprobe": point.effort,
        "first_stage": stage,
    }
    ids = {
        name: [hit.id for hit in index.search(query, **options)] for name, query in encoded.items()
    }
    metrics = {
        "ndcg_10": evaluate(ids, given.qrels, ("nDCG@10",))["nDCG@10"],
        "recall_candidates": point.recall,
        "effort": float(point.effort),
        "stage_requests": point.requests,
        "stage_bytes": point.bytes_moved,
    }
    return Row(
        case="hybrid",
        params={"show": "stages", **given.params(index), "candidates": count, "recall": recall},
        system=stage,
        kind="measured",
        requested_path="auto",
        effective_path=index.store.effective_path,
        cache="warm",
        n=len(seconds),
        median_s=statistics.median(seconds),
        p99_s=float(np.percentile(seconds, 99)),
        iqr_s=float(np.subtract(*np.percentile(seconds, (75, 25)))),
        bytes_asked=round(point.bytes_moved),
        bytes_moved=round(point.bytes_moved),
        correct=point.is_right,
        metrics=metrics,
    )


def stages_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "recall wanted", "first stage", "found of the candidates", "effort", "nDCG@10",
        "ms a query (IQR)", "its reads", "KiB of the stage", "right",
    ]  # fmt: skip
    return headers, [
        [
            f"{row.params['recall']:.2f}",
            row.system,
            f"{row.metrics['recall_candidates']:.3f}",
            f"{row.metrics['effort']:,.0f}",
            f"{row.metrics['ndcg_10']:.4f}",
            f"{1e3 * (row.median_s or 0):.2f} ({1e3 * (row.iqr_s or 0):.2f})",
            f"{row.metrics['stage_requests']:.0f}",
            f"{row.metrics['stage_bytes'] / 1024:,.0f}",
            "yes" if row.correct else "NO",
        ]
        for row in rows
    ]
