"""What ``espnx bench retrieval`` can show, one after the other."""

from __future__ import annotations

from .registry import Say
from .result import Row
from .retrieval_bound import BoundMeter
from .retrieval_fleet import Fleet, System
from .retrieval_measure import measure, rows_of
from .retrieval_options import Options
from .retrieval_point import Point


def measure_shows(options: Options, say: Say) -> list[Row]:
    rows: list[Row] = []
    for show in options.shows:
        if show == "table":
            rows += show_table(options, say)
    return rows


def split_queries(options: Options) -> tuple[list[int], list[int]]:
    """Numbers of the measured queries, and of those that warm up."""
    return list(range(options.queries)), list(range(options.queries, options.queries + 40))


def show_table(options: Options, say: Say) -> list[Row]:
    """Every system at every memory limit and depth of re-ranking; the bound beside."""
    rows: list[Row] = []
    queries, warm = split_queries(options)
    for name in options.corpora:
        prepared = options.prepare(name, say)
        for limit in options.limits:
            resident, cached = split_systems(options.baselines, options.systems)
            with Fleet(prepared, resident, limit, options.threads, options.engine) as fleet:
                nprobe = resolve_nprobe(options, fleet, warm)
                for rerank in options.reranks:
                    for batch in options.batches:
                        point = Point(prepared, limit, nprobe, options.candidates, rerank, batch, options.threads)
                        say(str(point))
                        meter = BoundMeter(fleet, point) if batch == 1 else None
                        found = measure(point, fleet, cached, queries, warm, options.seed, say, meter)
                        rows += report(rows_of("table", point, found), say)
    return rows


def split_systems(baselines: list[System], systems: list[System]) -> tuple[list[System], list[System]]:
    """(those that may run side by side, those that each need the page cache for themselves). ``memory`` is always among the first:
    it is the reference of all."""
    every = [*baselines, *systems]
    if not any(system.kind == "memory" for system in every):
        every.insert(0, System("memory", "memory", is_limited=False))
    return [s for s in every if not s.uses_page_cache], [s for s in every if s.uses_page_cache]


def resolve_nprobe(options: Options, fleet: Fleet, queries: list[int]) -> int:
    """``--nprobe`` as a number of lists."""
    if options.nprobe == "auto":
        return int(next(iter(fleet.opened.values()))["default_nprobe"])
    if options.nprobe.isdigit():
        return int(options.nprobe)
    answer = fleet.process("memory").ask("nprobe_for", queries=queries, candidates=options.candidates, recall=float(options.nprobe))
    return int(answer["nprobe"])


def report(rows: list[Row], say: Say) -> list[Row]:
    for row in rows:
        if row.median_s is not None:
            ratios = ", ".join(f"{value:.2f}x {name}" for name, value in row.ratio.items())
            say(f"    {row.system}: {1e3 * row.median_s:.2f} ms" + (f" ({ratios})" if ratios else ""))
    return rows
