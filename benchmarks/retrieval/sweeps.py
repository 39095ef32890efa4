"""What ``espnx bench retrieval`` can show, one after the other. Each returns rows whose params name
it (``show``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from ..corpora.stores import QUERIES, Prepared
from ..harness.registry import Say
from ..harness.result import Row
from ..machine.throttle import throttled
from .bound import BoundMeter, batch_threshold
from .curves import show_hit_rate, show_index_memory, show_layout
from .fleet import Fleet, System
from .formats import show_formats
from .index import overlap
from .measure import Measured, ask, measure, report, rows_of, split_queries, warm_up
from .options import BATCHES, Options, resolve_nprobe
from .point import AUTO, MEMORY, Point, cascade_systems, espnx_systems
from .rows import simple_row

CALLERS = (1, 4, 16)
LEAST_BATCHES = 7


def measure_shows(options: Options, say: Say) -> list[Row]:
    """The rows of every show, corpus by corpus. Raises InvalidInputError where one cannot be
    had."""
    of_corpora: dict[str, Callable[[Options, Prepared, Say], list[Row]]] = {
        "table": show_table,
        "batches": show_batches,
        "layout": show_layout,
        "hit-rate": show_hit_rate,
        "index-memory": show_index_memory,
        "callers": show_callers,
        "cascade": show_cascade,
    }
    rows: list[Row] = []
    wanted = [show for show in options.shows if show in of_corpora]
    for name in options.corpora if wanted else []:
        prepared = options.prepare(name, say)
        with _slowed(options, prepared):  # before the processes, which inherit it
            for show in wanted:
                say(f"{show} of corpus {prepared.name}")
                rows += of_corpora[show](options, prepared, say)
    rows += show_sizes(options, say) if "sizes" in options.shows else []
    return rows + (show_formats(options, say) if "formats" in options.shows else [])


def _slowed(options: Options, prepared: Prepared) -> AbstractContextManager[None]:
    """The disk of a store as `--throttle` wants it."""
    return throttled(prepared.store, options.throttle) if options.throttle else nullcontext()


def show_table(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """Every system at every memory limit and depth of re-ranking; the bound beside."""
    rows: list[Row] = []
    queries, warm = split_queries(options.queries)
    for limit in options.limits:
        resident, cached = split_systems(options.baselines, options.systems)
        with Fleet(prepared, resident, limit, options.threads, options.engine) as fleet:
            nprobe = resolve_nprobe(options, fleet, warm)
            for rerank in options.reranks:
                for batch in options.batches:
                    point = _point(options, prepared, limit, nprobe, rerank, batch)
                    say(str(point))
                    meter = BoundMeter(fleet, point) if batch == 1 else None
                    rows += report(
                        rows_of(
                            "table",
                            point,
                            measure(point, fleet, cached, queries, warm, options.seed, say, meter),
                        ),
                        say,
                    )
    return rows


def _point(
    options: Options,
    prepared: Prepared,
    limit: int | None,
    nprobe: int,
    rerank: int | None,
    batch: int = 1,
) -> Point:
    return Point(
        prepared,
        limit,
        nprobe,
        options.candidates,
        rerank,
        batch,
        options.threads,
        throttle=options.throttle,
    )


def split_systems(
    baselines: list[System], systems: list[System]
) -> tuple[list[System], list[System]]:
    """(those that may run side by side, those that each need the page cache for themselves).
    ``memory`` is always among the first: it is the reference of all."""
    every = [*baselines, *systems]
    if not any(system.kind == "memory" for system in every):
        every.insert(0, MEMORY)
    return [s for s in every if not s.uses_page_cache], [s for s in every if s.uses_page_cache]


def show_batches(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """Batches of growing size against memory; and the batch at which the disk becomes the limit,
    predicted (ESPN, eq. 4)."""
    rows: list[Row] = []
    queries, warm = list(range(QUERIES // 2)), list(range(QUERIES // 2, QUERIES))
    sizes = BATCHES if options.batches == [1] else options.batches
    systems = [MEMORY, *espnx_systems(["0", "auto"])]
    for limit in options.limits:
        with Fleet(prepared, systems, limit, options.threads, options.engine) as fleet:
            nprobe = resolve_nprobe(options, fleet, warm[:40])
            for rerank in options.reranks:
                for size in sizes[:3] if options.quick else sizes:
                    point = _point(options, prepared, limit, nprobe, rerank, size)
                    say(str(point))
                    turns = 3 if options.quick else max(LEAST_BATCHES, options.queries // size)
                    found = measure(point, fleet, [], queries, warm, options.seed, say, turns=turns)
                    rows += report(rows_of("batches", point, found), say)
                one = _point(options, prepared, limit, nprobe, rerank)
                rows.append(batch_threshold(fleet, AUTO, one, queries[:20], 0.1))
    return rows


def show_callers(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """Many callers of one index, each asking query after query."""
    rows: list[Row] = []
    queries, warm = split_queries(options.queries)
    for limit in options.limits:
        with Fleet(prepared, [MEMORY, AUTO], limit, options.threads, options.engine) as fleet:
            nprobe = resolve_nprobe(options, fleet, warm)
            for rerank in options.reranks:
                point = _point(options, prepared, limit, nprobe, rerank)
                warm_up(fleet, fleet.systems, point, warm)
                for callers in CALLERS:
                    for system in fleet.systems:
                        numbers = [
                            queries[i % len(queries)] for i in range(max(len(queries), 8 * callers))
                        ]
                        answer = fleet.worker_of(system).ask(
                            "callers",
                            queries=numbers,
                            options={**point.options, **system.options},
                            callers=callers,
                        )
                        rows.append(_callers_row(point, fleet, system, callers, answer))
                        say(
                            f"    {system.name}, {callers} callers: "
                            f"{rows[-1].metrics['queries_per_s']:.0f} queries/s"
                        )
    return rows


def _callers_row(
    point: Point, fleet: Fleet, system: System, callers: int, answer: dict[str, Any]
) -> Row:
    latencies = answer["latencies"]
    p50, p95 = np.percentile(latencies, [50, 95])
    metrics = {
        "p50_s": float(p50),
        "p95_s": float(p95),
        "queries_per_s": len(latencies) / answer["seconds"],
    }
    path = str(fleet.facts(system)["effective_path"])
    params = {**point.params("callers"), "callers": callers}
    return simple_row(
        params,
        system.name,
        latencies,
        metrics,
        path=path,
        cache="warm" if system.kind == "memory" else "cold",
    )


def show_cascade(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """Coarse records of all candidates first, full ones of the best few: coarse tier on SSD and in
    RAM, against exact search."""
    rows: list[Row] = []
    queries, warm = split_queries(options.queries)
    systems = [MEMORY, *espnx_systems(["0", "auto"]), *cascade_systems(options.cascades)]
    for limit in options.limits:
        with Fleet(prepared, systems, limit, options.threads, options.engine) as fleet:
            nprobe = resolve_nprobe(options, fleet, warm)
            point = _point(options, prepared, limit, nprobe, None)
            say(str(point))
            rows += report(
                rows_of(
                    "cascade", point, measure(point, fleet, [], queries, warm, options.seed, say)
                ),
                say,
            )
    return rows


def show_sizes(options: Options, say: Say) -> list[Row]:
    """An exact search and a cascade in corpora of every number of documents, with the bytes of
    their records: what happens where those no longer fit a memory limit. ``memory`` has no
    limit."""
    rows: list[Row] = []
    queries, warm = split_queries(options.queries)
    cascades = cascade_systems(options.cascades) if options.coarse else []
    resident, cached = split_systems(options.baselines, [AUTO, *cascades])
    for prepared in (
        sized.prepare(name, say) for name in options.corpora for sized in options.of_sizes(name)
    ):
        for limit in options.limits:
            with (
                _slowed(options, prepared),
                Fleet(prepared, resident, limit, options.threads, options.engine) as fleet,
            ):
                nprobe = resolve_nprobe(options, fleet, warm)
                point = _point(options, prepared, limit, nprobe, None)
                say(f"{prepared.documents:,} documents: {point}")
                measured = measure(point, fleet, cached, queries, warm, options.seed, say)
                size, found = (
                    float(fleet.facts(AUTO)["record_bytes"]),
                    recalls(point, fleet, measured, queries),
                )
                metrics = {
                    name: {"record_bytes": size, "recall@10": recall}
                    for name, recall in found.items()
                }
                every = rows_of("sizes", point, measured)
                rows += report(
                    [
                        replace(row, metrics={**row.metrics, **metrics.get(row.system, {})})
                        for row in every
                    ],
                    say,
                )
    return rows


def recalls(
    point: Point, fleet: Fleet, measured: Mapping[str, Measured], queries: Sequence[int]
) -> dict[str, float]:
    """The mean share of the best hits, those of an exact search of every list, that each system
    found; without those that are wrong."""
    lists = int(fleet.facts(MEMORY)["first_stage"]["nlist"])
    best = [
        _numbers(ask(fleet, MEMORY, replace(point, nprobe=lists), [query])) for query in queries
    ]
    right = {name: each.answers for name, each in measured.items() if each.problem is None}
    return {
        name: float(
            np.mean(
                [overlap(_numbers(answer), best[turn]) for (_, turn), answer in answers.items()]
            )
        )
        for name, answers in right.items()
    }


def _numbers(answer: Mapping[str, Any]) -> np.ndarray:
    """The numbers of the hits of one query."""
    return np.array([number for number, _ in answer["hits"][0]], dtype=np.int64)
