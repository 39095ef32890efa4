"""Rows and tables: every point of a sweep, what each system does at equal recall, and what memory
it takes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..harness.cells import ABSENT, metric, number, ratio
from ..harness.result import Row, untimed
from ..harness.runner import interquartile_range
from .names import IN_RAM, OURS, PEER, PEER_PAGE_BYTES

TARGETS = (0.95, 0.99)
#: Of a query, that is compared with the peer's.
_WORK = ("reads", "bytes_read", "cpu_s")
#: (threads, beam width; None: the system's own)
Way = tuple[int, int | None]


def counted(
    params: Mapping[str, Any], system: str, metrics: Mapping[str, float], *, is_right: bool
) -> Row:
    """A row of counts: nothing in it was timed."""
    return untimed(
        "graph",
        params,
        system,
        path="auto",
        effective_path="files",
        correct=is_right,
        metrics=metrics,
    )


@dataclass(frozen=True)
class Point:
    """One pass over all queries with one list size.

    Attributes:
        seconds: of them all.
        per_query: reads, bytes_read, moved_bytes: the mean, where somebody counts.
        alone: seconds of queries with nothing else under way.
        cache: of the pages of its files, as it began.
    """

    seconds: float
    recall: float
    per_query: Mapping[str, float]
    alone: Sequence[float]
    cache: str


@dataclass
class Built:
    """A system's index, and what was measured of it.

    Attributes:
        why: there is none.
        problem: what is wrong with its results.
        said: build_s, pq_bytes, folder_bytes, open_s, more_bytes: above an empty process.
        curves: way -> list size -> a point for each pass.
        disk_rates: random reads of 4 KiB a second that fio made of its files right before each
            pass; None: no fio.
    """

    system: str
    folder: str
    why: str = ""
    problem: str | None = None
    said: dict[str, float] = field(default_factory=dict)
    curves: dict[Way, dict[int, list[Point]]] = field(default_factory=dict)
    disk_rates: list[float | None] = field(default_factory=list)


def at_recall(points: Sequence[tuple[float, float]], recall: float) -> float | None:
    """The value at which a recall is reached, between two points of (recall, value) by ascending
    effort by a straight line; the first value where the least effort reaches it, None where none
    does."""
    if points and points[0][0] >= recall:
        return points[0][1]
    for (low, before), (high, after) in itertools.pairwise(points):
        if low < recall <= high:
            return before + (after - before) * (recall - low) / (high - low)
    return None


def _along(
    curve: Mapping[int, Sequence[Point]], value: Callable[[Sequence[Point]], float | None]
) -> list[tuple[float, float]]:
    """(recall, value) of the passes of each list size, where there is a value."""
    found = [
        (statistics.mean(point.recall for point in points), value(points))
        for _, points in sorted(curve.items())
    ]
    return [(recall, known) for recall, known in found if known is not None]


def _of_query(name: str) -> Callable[[Sequence[Point]], float | None]:
    def value(points: Sequence[Point]) -> float | None:
        known = [point.per_query[name] for point in points if name in point.per_query]
        return statistics.median(known) if known else None

    return value


def _percentile(share: float) -> Callable[[Sequence[Point]], float | None]:
    def value(points: Sequence[Point]) -> float | None:
        known = [seconds for point in points for seconds in point.alone]
        return float(np.percentile(known, share)) if known else None

    return value


def queries_per_s(
    curve: Mapping[int, Sequence[Point]], recall: float, n_queries: int
) -> list[float]:
    """Queries a second of each pass at that recall; empty where it is not reached."""
    n_passes = len(next(iter(curve.values())))
    found = [
        at_recall(
            _along(
                {size: [points[i]] for size, points in curve.items()},
                lambda one: n_queries / one[0].seconds,
            ),
            recall,
        )
        for i in range(n_passes)
    ]
    known = [value for value in found if value is not None]
    return known if len(known) == n_passes else []


def _best(built: Built, recall: float, n_queries: int) -> tuple[Way | None, list[float]]:
    """The way with the most queries a second at that recall, and those of each pass."""
    best: tuple[Way | None, list[float]] = (None, [])
    for way, curve in built.curves.items():
        found = queries_per_s(curve, recall, n_queries)
        if found and (not best[1] or statistics.median(found) > statistics.median(best[1])):
            best = way, found
    return best


def _plain(params: Mapping[str, Any], built: Built, **changes: Any) -> Row:
    """A row of nothing but what was said of the index."""
    fields: dict[str, Any] = {
        "case": "graph",
        "params": {**params, "why": built.why},
        "system": built.system,
        "kind": "measured",
        "requested_path": "auto",
        "effective_path": "memory" if built.system == IN_RAM else "files",
        "cache": "cold",
        "n": 0,
        "median_s": None,
        "p99_s": None,
        "iqr_s": None,
        "bytes_asked": 0,
        "bytes_moved": 0,
        "correct": built.problem is None,
        "metrics": {name: float(value) for name, value in built.said.items()},
        "ratio": {},
    }
    return Row(**fields | changes)


def memory(params: Mapping[str, Any], built: Built, *, in_flight: int) -> Row:
    """What an open index takes while so many queries are under way."""
    return _plain({**params, "show": "memory", "in_flight": in_flight}, built)


def sweep(params: Mapping[str, Any], all_built: Sequence[Built]) -> list[Row]:
    """A row for each system, way and list size."""
    found = []
    for built in all_built:
        for (threads, width), curve in built.curves.items():
            for list_size, points in sorted(curve.items()):
                here = {
                    **params,
                    "show": "sweep",
                    "threads": threads,
                    "beamwidth": width,
                    "list_size": list_size,
                }
                found.append(_swept(here, built, points))
    return found


def _timed(seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "n": len(seconds),
        "median_s": statistics.median(seconds),
        "p99_s": float(np.percentile(seconds, 99)),
        "iqr_s": interquartile_range(seconds),
    }


def _swept(params: Mapping[str, Any], built: Built, points: Sequence[Point]) -> Row:
    n, seconds = params["queries"], [point.seconds for point in points]
    values = {name: _of_query(name)(points) for name in ("reads", "bytes_read", "moved_bytes")}
    alone = {f"alone_p{share}_s": _percentile(share)(points) for share in (50, 95, 99)}
    metrics = {
        "recall": statistics.mean(point.recall for point in points),
        "queries_per_s": n / statistics.median(seconds),
    }
    metrics |= {name: value for name, value in {**values, **alone}.items() if value is not None}
    return _plain(
        params,
        built,
        metrics=metrics,
        bytes_asked=round(n * (values["bytes_read"] or 0)),
        bytes_moved=round(n * (values["moved_bytes"] or 0)),
        cache="cold" if {point.cache for point in points} == {"cold"} else "warm",
        **_timed(seconds),
    )


def summaries(
    params: Mapping[str, Any], all_built: Sequence[Built], *, vectors_bytes: int
) -> list[Row]:
    """A row for each recall and system; ours with the paired ratio of queries a second, and the
    ratio of reads, to the peer's best."""
    found = []
    peer = next((built for built in all_built if built.system == PEER), Built(PEER, ""))
    for recall in TARGETS:
        theirs = _best(peer, recall, params["queries"])[1]
        their_work = {
            name: at_recall(_along(_narrowest(peer), _of_query(name)), recall) for name in _WORK
        }
        here = {**params, "show": "summary", "recall": recall}
        found += [_summary(here, built, vectors_bytes, theirs, their_work) for built in all_built]
    return found


def _narrowest(built: Built) -> dict[int, list[Point]]:
    """The curve with the fewest pages under way at a time, which reads the least."""
    return (
        built.curves[min(built.curves, key=lambda way: (way[1] or 0, way[0]))]
        if built.curves
        else {}
    )


def _alone(built: Built, recall: float) -> dict[str, float]:
    """Percentiles of a query alone, of the way whose median is the least."""
    best: dict[str, float] = {}
    for curve in built.curves.values():
        values = {
            f"alone_p{share}_s": at_recall(_along(curve, _percentile(share)), recall)
            for share in (50, 95, 99)
        }
        known = {name: value for name, value in values.items() if value is not None}
        if known and known["alone_p50_s"] < best.get("alone_p50_s", float("inf")):
            best = known
    return best


def _summary(
    params: Mapping[str, Any],
    built: Built,
    vectors_bytes: int,
    theirs: Sequence[float],
    their_work: Mapping[str, float | None],
) -> Row:
    recall, n = params["recall"], params["queries"]
    way, ours = _best(built, recall, n)
    if way is None:
        return _plain(params, built)
    metrics: dict[str, float] = {
        **built.said,
        **_alone(built, recall),
        "queries_per_s": statistics.median(ours),
        "best_threads": way[0],
        "best_beamwidth": way[1] or 0,
        "folder_over_vectors": built.said["folder_bytes"] / vectors_bytes,
    }
    for name in ("reads", "bytes_read", "moved_bytes", "cpu_s"):
        if (value := at_recall(_along(_narrowest(built), _of_query(name)), recall)) is not None:
            metrics[name] = value
    ratios: dict[str, float] = {}
    if built.system in OURS and theirs:
        pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
        ratios[PEER], metrics[f"ratio_iqr_{PEER}"] = (
            statistics.median(pairs),
            interquartile_range(pairs),
        )
    if known := [rate for rate in built.disk_rates if rate is not None]:
        metrics["fio_reads_per_s"] = statistics.median(known)
    if built.system in OURS:
        metrics |= {
            f"{name}_over_peer": metrics[name] / value
            for name, value in their_work.items()
            if value and name in metrics
        }
    caches = {
        point.cache
        for curve in built.curves.values()
        for points in curve.values()
        for point in points
    }
    return _plain(
        params,
        built,
        metrics=metrics,
        ratio=ratios,
        bytes_asked=round(n * metrics.get("bytes_read", 0)),
        bytes_moved=round(n * metrics.get("moved_bytes", 0)),
        cache="cold" if caches == {"cold"} else "warm",
        **_timed([n / value for value in ours]),
    )


def _runs(row: Row) -> str:
    return row.params["why"] or ("yes" if row.correct else "NO")


def _alone_cell(row: Row) -> str:
    return (
        " / ".join(metric(f"alone_p{share}_s", 1e-3)(row) for share in (50, 95, 99))
        if "alone_p50_s" in row.metrics
        else ABSENT
    )


def _bytes_over_peer(row: Row) -> str:
    """The ratio of bytes to the peer's, which reads pages of 4 KiB; also for runs that were written
    before the ratio was."""
    metrics = row.metrics
    if "bytes_read_over_peer" not in metrics and {"reads", "bytes_read", "reads_over_peer"} <= set(
        metrics
    ):
        theirs = PEER_PAGE_BYTES * metrics["reads"] / metrics["reads_over_peer"]
        return number(metrics["bytes_read"] / theirs, 1, 2)
    return metric("bytes_read_over_peer")(row)


def _way(row: Row) -> str:
    if "best_threads" not in row.metrics:
        return ABSENT
    width = row.metrics["best_beamwidth"]
    return f"{row.metrics['best_threads']:.0f} threads" + (f", W {width:.0f}" if width else "")


def summary_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "vectors",
        "recall@10",
        "system",
        "PQ bytes",
        "reads",
        "of diskann's",
        "KiB read",
        "of diskann's",
        "CPU, us",
        "of diskann's",
        "queries/s",
        "with",
        f"vs {PEER} [IQR]",
        "fio, reads/s",
        "alone, ms p50 / p95 / p99",
        "RAM, MiB",
        "folder, x vectors",
        "build, s",
        "correct",
    ]
    cells = [
        [
            row.params["data"],
            f"{row.params['recall']:g}",
            row.system,
            metric("pq_bytes", 1, 0)(row),
            metric("reads", 1, 1)(row),
            metric("reads_over_peer")(row),
            metric("bytes_read", 1024, 0)(row),
            _bytes_over_peer(row),
            metric("cpu_s", 1e-6, 0)(row),
            metric("cpu_s_over_peer")(row),
            metric("queries_per_s", 1, 0)(row),
            _way(row),
            ratio(row, PEER),
            metric("fio_reads_per_s", 1, 0)(row),
            _alone_cell(row),
            metric("more_bytes", 2**20, 1)(row),
            metric("folder_over_vectors")(row),
            metric("build_s", 1, 1)(row),
            _runs(row),
        ]
        for row in rows
    ]
    return headers, cells


def sweep_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "vectors", "system", "threads", "W", "list", "recall@10", "reads", "KiB read", "KiB moved",
        "queries/s", "ms (IQR)", "alone, ms p50 / p95 / p99", "n", "correct",
    ]  # fmt: skip
    cells = [
        [
            row.params["data"],
            row.system,
            str(row.params["threads"]),
            str(row.params["beamwidth"] or ABSENT),
            str(row.params["list_size"]),
            metric("recall", 1, 4)(row),
            metric("reads", 1, 1)(row),
            metric("bytes_read", 1024, 0)(row),
            metric("moved_bytes", 1024, 0)(row),
            metric("queries_per_s", 1, 0)(row),
            f"{number(row.median_s, 1e-3, 0)} ({number(row.iqr_s, 1e-3, 0)})",
            _alone_cell(row),
            str(row.n),
            _runs(row),
        ]
        for row in rows
    ]
    return headers, cells


def memory_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "vectors",
        "system",
        "PQ bytes",
        "RAM above an empty process, MiB",
        "open, ms",
        "folder, MB",
        "build, s",
        "runs",
    ]
    cells = [
        [
            row.params["data"],
            row.system,
            metric("pq_bytes", 1, 0)(row),
            metric("more_bytes", 2**20, 2)(row),
            metric("open_s", 1e-3, 1)(row),
            metric("folder_bytes", 1e6, 1)(row),
            metric("build_s", 1, 1)(row),
            _runs(row),
        ]
        for row in rows
    ]
    return headers, cells
