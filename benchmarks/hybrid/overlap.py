"""What it costs to ask several first stages at once: their time together beside what their CPU and
their waits allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import espnx

from ..harness.registry import Say
from ..harness.result import Row
from .collection import Collection

ALONE = ("bm25", "splade", "ivf")
TOGETHER = "together"
CORES, K = 2, 10


class Clocked:
    """An encoder that adds up what it takes of wall clock and CPU."""

    def __init__(self, encoder: Any):
        self._encoder, self.wall_s, self.cpu_s = encoder, 0.0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode_queries(self, texts: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        found = self._encoder.encode_queries(texts)
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu
        return found


@dataclass
class _Times:
    """Times of each query, without encoding."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    bytes_moved: list[int] = field(default_factory=list)


def measure_overlap(
    index: espnx.Index, encoders: list[Clocked], given: Collection, pairs: int, say: Say
) -> list[Row]:
    """A row for each stage alone, and one for all of them. Each query is asked of all before the
    next one is. What they find together is compared with the ranks that they give alone."""
    systems: dict[str, Any] = {**{kind: kind for kind in ALONE}, TOGETHER: ALONE}
    times = {name: _Times() for name in systems}
    right = True
    for turn in range(pairs + 1):  # the first pass warms up, and is verified
        say(f"pass {turn} of {pairs}")
        for text in given.queries.values():
            found = {
                name: _asked(index, encoders, text, stage, times[name] if turn else None)
                for name, stage in systems.items()
            }
            if not turn:
                right = right and _are_ranks_kept(found)
    medians = {
        name: (statistics.median(each.wall_s), statistics.median(each.cpu_s))
        for name, each in times.items()
    }
    wait_s = max(max(0.0, medians[name][0] - medians[name][1]) for name in ALONE)
    bound_s = sum(medians[name][1] for name in ALONE) / CORES + wait_s
    return [
        _row(
            name,
            times[name],
            medians[name][1],
            bound_s if name == TOGETHER else None,
            given,
            index,
            right,
        )
        for name in systems
    ]


def _asked(
    index: espnx.Index, encoders: list[Clocked], text: str, stage: Any, times: _Times | None
) -> espnx.SearchResult:
    before_wall, before_cpu = (
        sum(getattr(each, name) for each in encoders) for name in ("wall_s", "cpu_s")
    )
    wall, cpu = time.perf_counter(), time.process_time()
    k = len(index) if times is None else K  # ids and texts of hits cost what no stage does
    result = index.search(text, k=k, candidates=len(index), first_stage=stage, rerank=0)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    if times is not None:
        times.wall_s.append(wall - sum(each.wall_s for each in encoders) + before_wall)
        times.cpu_s.append(cpu - sum(each.cpu_s for each in encoders) + before_cpu)
        times.bytes_moved.append(result.stage_bytes)
    return result


def _are_ranks_kept(found: dict[str, espnx.SearchResult]) -> bool:
    """Whether every hit of all stages together says the rank and the score that each of them gives
    it alone."""
    alone = {name: {hit.number: hit.found_by[name] for hit in found[name].hits} for name in ALONE}
    said = {
        name: {
            hit.number: hit.found_by[name] for hit in found[TOGETHER].hits if name in hit.found_by
        }
        for name in ALONE
    }
    return alone == said


def _row(
    name: str,
    times: _Times,
    cpu_s: float,
    bound_s: float | None,
    given: Collection,
    index: espnx.Index,
    right: bool,
) -> Row:
    wall = times.wall_s
    metrics = {"cpu_s": cpu_s} | ({} if bound_s is None else {"bound_s": bound_s})
    return Row(
        case="hybrid",
        params={"show": "overlap", **given.params(index)},
        system=name,
        kind="measured",
        requested_path="auto",
        effective_path=index.store.effective_path,
        cache="warm",
        n=len(wall),
        median_s=statistics.median(wall),
        p99_s=float(np.percentile(wall, 99)),
        iqr_s=float(np.subtract(*np.percentile(wall, (75, 25)))),
        bytes_asked=0,
        bytes_moved=int(statistics.median(times.bytes_moved)),
        correct=right,
        metrics=metrics,
    )


def overlap_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "first stages",
        "ms a query (IQR)",
        "ms of CPU",
        "CPU over two cores and the longest wait, ms",
        "of that",
        "KiB read",
        "right",
    ]
    return headers, [
        [
            row.system,
            f"{1e3 * (row.median_s or 0):.2f} ({1e3 * (row.iqr_s or 0):.2f})",
            f"{1e3 * row.metrics['cpu_s']:.2f}",
            *(
                [f"{1e3 * bound:.2f}", f"{(row.median_s or 0) / bound:.2f}"]
                if (bound := row.metrics.get("bound_s"))
                else ["", ""]
            ),
            f"{row.bytes_moved / 1024:,.0f}",
            "yes" if row.correct else "NO",
        ]
        for row in rows
    ]
