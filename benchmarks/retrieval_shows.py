"""What ``espnx bench retrieval`` can show, one after the other. Each returns rows whose params name it (``show``)."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace

from espnx.errors import InvalidInputError

from .corpus_store import QUERIES, Prepared
from .registry import Say
from .result import Row
from .retrieval_bound import BoundMeter, batch_threshold
from .retrieval_fleet import Fleet, System
from .retrieval_formats import show_formats
from .retrieval_index import build_indexes, overlap
from .retrieval_layout import ID_ORDER, LIST_ORDER
from .retrieval_measure import ask, measure, rows_of, split_queries, warm_up
from .retrieval_options import BATCHES, Options
from .retrieval_point import Point, espnx_systems
from .retrieval_rows import simple_row

HIT_RATE_STEPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
HIT_RATE_RECALLS = (0.95, 0.99)
INDEX_CODES = ("flat", "sq8", "sq6", "pq32")
CALLERS = (1, 4, 16)
MEMORY = System("memory", "memory", is_limited=False)
AUTO = espnx_systems(["auto"])[0]


def measure_shows(options: Options, say: Say) -> list[Row]:
    """The rows of every show, corpus by corpus. Raises InvalidInputError where one cannot be had."""
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
        for show in wanted:
            say(f"{show} of corpus {prepared.name}")
            rows += of_corpora[show](options, prepared, say)
    return rows + (show_formats(options, say) if "formats" in options.shows else [])


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
                    point = Point(prepared, limit, nprobe, options.candidates, rerank, batch, options.threads)
                    say(str(point))
                    meter = BoundMeter(fleet, point) if batch == 1 else None
                    rows += report(rows_of("table", point, measure(point, fleet, cached, queries, warm, options.seed, say, meter)), say)
    return rows


def split_systems(baselines: list[System], systems: list[System]) -> tuple[list[System], list[System]]:
    """(those that may run side by side, those that each need the page cache for themselves). ``memory`` is always among the first:
    it is the reference of all."""
    every = [*baselines, *systems]
    if not any(system.kind == "memory" for system in every):
        every.insert(0, MEMORY)
    return [s for s in every if not s.uses_page_cache], [s for s in every if s.uses_page_cache]


def resolve_nprobe(options: Options, fleet: Fleet, queries: list[int]) -> int:
    """``--nprobe`` as a number of lists."""
    if options.nprobe == "auto":
        return int(next(iter(fleet.opened.values()))["default_nprobe"])
    if options.nprobe.isdigit():
        return int(options.nprobe)
    worker = fleet.of(fleet.systems[0])
    return int(worker.ask("nprobe_for", queries=queries, candidates=options.candidates, recall=float(options.nprobe))["nprobe"])


def report(rows: list[Row], say: Say) -> list[Row]:
    for row in rows:
        if row.median_s is not None:
            ratios = ", ".join(f"{value:.2f}x {name}" for name, value in row.ratio.items())
            say(f"    {row.system}: {1e3 * row.median_s:.2f} ms" + (f" ({ratios})" if ratios else ""))
    return rows


def show_batches(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """Batches of growing size against memory; and the batch at which the disk becomes the limit, predicted (ESPN, eq. 4)."""
    rows: list[Row] = []
    queries, warm = list(range(QUERIES // 2)), list(range(QUERIES // 2, QUERIES))
    sizes = BATCHES if options.batches == [1] else options.batches
    systems = [MEMORY, *espnx_systems(["0", "auto"])]
    for limit in options.limits:
        with Fleet(prepared, systems, limit, options.threads, options.engine) as fleet:
            nprobe = resolve_nprobe(options, fleet, warm[:40])
            for rerank in options.reranks:
                for size in sizes[:3] if options.quick else sizes:
                    point = Point(prepared, limit, nprobe, options.candidates, rerank, size, options.threads)
                    say(str(point))
                    turns = max(3 if options.quick else 7, options.queries // size)
                    found = measure(point, fleet, [], queries, warm, options.seed, say, turns=turns)
                    rows += report(rows_of("batches", point, found), say)
                one = Point(prepared, limit, nprobe, options.candidates, rerank, 1, options.threads)
                rows.append(batch_threshold(fleet, AUTO, one, queries[:20], 0.1))
    return rows


def show_layout(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """The same candidates read in list order and in id order, at the gap of the cost model; list order at fixed gaps beside."""
    queries, warm = split_queries(options.queries)
    rows: list[Row] = []
    with Fleet(prepared, [AUTO], None, options.threads, options.engine) as fleet:
        worker, nprobe = fleet.of(AUTO), resolve_nprobe(options, fleet, warm)
        model = int(fleet.facts(AUTO)["gap_bytes"])
        known = {"list": (LIST_ORDER, LIST_ORDER, model), "id": (ID_ORDER, ID_ORDER, model)}
        variants = [known[name] for name in options.layouts]
        variants += [(f"{LIST_ORDER}-gap-{gap >> 10}k", LIST_ORDER, gap) for gap in (0, 16 << 10, 64 << 10)]
        for rerank in options.reranks:
            point = Point(prepared, None, nprobe, options.candidates, rerank, 1, options.threads)
            found: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in variants}
            rng = random.Random(options.seed)
            for query in [*warm[:3], *queries]:
                numbers = worker.ask("candidates", queries=[query], candidates=options.candidates, nprobe=nprobe)["numbers"][0][:rerank]
                for name, layout, gap in rng.sample(variants, len(variants)):
                    found[name].append(worker.ask("layout", numbers=numbers, layout=layout, gap_bytes=gap))
            reads = {name: values[3:] for name, values in found.items()}
            for name, _, gap in variants:
                ours, base = reads[name], reads.get(ID_ORDER, [])
                middle = {key: statistics.median(read[key] for read in ours) for key in ours[0]}
                metrics = {"requests": middle["requests"], "gap_bytes": float(gap), "moved_per_asked": middle["bytes_moved"] / middle["bytes_asked"]}
                if base:
                    metrics["requests_per_id_order"] = statistics.median(a["requests"] / b["requests"] for a, b in zip(ours, base, strict=True))
                ratio = {ID_ORDER: [b["seconds"] / a["seconds"] for a, b in zip(ours, base, strict=True)]} if name != ID_ORDER else {}
                rows.append(simple_row(
                    point.params("layout"), name, [read["seconds"] for read in ours], metrics, kind="replayed",
                    path=str(fleet.facts(AUTO)["effective_path"]), bytes_asked=middle["bytes_asked"], bytes_moved=middle["bytes_moved"],
                    ratio=ratio,
                ))  # fmt: skip
    return report(rows, say)


def show_hit_rate(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """Hit rate by prefetch step, at the nprobe of two recalls; equal to what FAISS says in two searches from scratch."""
    queries, warm = split_queries(options.queries)
    rows: list[Row] = []
    with Fleet(prepared, [AUTO], None, options.threads, options.engine) as fleet:
        worker = fleet.of(AUTO)
        for recall in HIT_RATE_RECALLS:
            nprobe = resolve_nprobe(replace(options, nprobe=str(recall)), fleet, [*queries, *warm])
            point = Point(prepared, None, nprobe, options.candidates, None, 1, options.threads)
            known = worker.ask("overlap", queries=queries, candidates=options.candidates, nprobe=nprobe, shares=HIT_RATE_STEPS)
            for step, expected in zip(HIT_RATE_STEPS, known["hit_rates"], strict=True):
                answers = [ask(fleet, AUTO, point, [query], prefetch_step=step) for query in queries]
                rate = statistics.fmean(answer["metrics"]["hit_rate"] for answer in answers)
                metrics = {"hit_rate": rate, "hit_rate_faiss": expected, "difference": abs(rate - expected), "recall": known["recall"]}
                params = {**point.params("hit-rate"), "prefetch_step": step, "recall_wanted": recall}
                seconds = [answer["seconds"] for answer in answers]
                rows.append(simple_row(
                    params, f"espnx-{100 * step:g}%", seconds, metrics, correct=abs(rate - expected) <= 0.001,
                    bytes_asked=statistics.median(answer["bytes_asked"] for answer in answers),
                    bytes_moved=statistics.median(answer["bytes_moved"] for answer in answers),
                ))  # fmt: skip
                say(f"    nprobe {nprobe}, recall {known['recall']:.3f}, step {step:g}: hit rate {rate:.4f}, FAISS {expected:.4f}")
    return rows


def show_index_memory(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """Memory of the first stage by code, as growth of a process that reads it, against the records; with the recall at one nprobe."""
    corpus = options.corpus(prepared.name, say)
    if corpus is None:
        raise InvalidInputError("index-memory builds indexes from the corpus", got="the folder of a store", expected="A, B or C")
    queries, _ = split_queries(options.queries)
    paths = build_indexes(prepared.store.parent, corpus, options.nlist, INDEX_CODES, say)
    with Fleet(prepared, [AUTO], None, options.threads, options.engine) as fleet:
        facts = fleet.facts(AUTO)
        nprobe = resolve_nprobe(options, fleet, queries)
    rows, truth = [], None
    for code in INDEX_CODES:
        shared = {"path": str(paths[code]), "queries": str(prepared.queries), "numbers": queries, "candidates": options.candidates}
        if truth is None:
            truth = one_answer("load_index", **shared, nprobe=None)["numbers"]
        answer = one_answer("load_index", **shared, nprobe=nprobe)
        recall = statistics.fmean(overlap(*pair) for pair in zip(map(as_array, answer["numbers"]), map(as_array, truth), strict=True))
        grown, records = answer["rss_growth_bytes"], facts["live_record_bytes"]
        metrics = {
            "rss_growth_bytes": grown, "file_bytes": answer["file_bytes"], "recall": recall, "record_bytes": records,
            "metadata_bytes": facts["resident_bytes"]["metadata"],
            "records_per_index": records / max(1, grown + facts["resident_bytes"]["metadata"]),
        }  # fmt: skip
        point = Point(prepared, None, nprobe, options.candidates, None, 1, 1)
        rows.append(simple_row(point.params("index-memory"), code, [answer["seconds_per_query"]], metrics, path="memory", cache="warm"))
        say(f"    {code}: {grown / 1e6:.0f} MB, 1/{metrics['records_per_index']:.0f} of the records, recall {recall:.4f}")
    return rows


def show_callers(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """Many callers of one index, each asking query after query."""
    rows: list[Row] = []
    queries, warm = split_queries(options.queries)
    for limit in options.limits:
        with Fleet(prepared, [MEMORY, AUTO], limit, options.threads, options.engine) as fleet:
            nprobe = resolve_nprobe(options, fleet, warm)
            for rerank in options.reranks:
                point = Point(prepared, limit, nprobe, options.candidates, rerank, 1, options.threads)
                warm_up(fleet, fleet.systems, point, warm)
                for callers in CALLERS:
                    for system in fleet.systems:
                        numbers = [queries[i % len(queries)] for i in range(max(len(queries), 8 * callers))]
                        answer = fleet.of(system).ask("callers", queries=numbers, options={**point.options, **system.options}, callers=callers)
                        rows.append(callers_row(point, fleet, system, callers, answer))
                        say(f"    {system.name}, {callers} callers: {rows[-1].metrics['queries_per_s']:.0f} queries/s")
    return rows


def callers_row(point: Point, fleet: Fleet, system: System, callers: int, answer: dict[str, list[float]]) -> Row:
    import numpy as np

    latencies = answer["latencies"]
    p50, p95 = np.percentile(latencies, [50, 95])
    metrics = {"p50_s": float(p50), "p95_s": float(p95), "queries_per_s": len(latencies) / float(answer["seconds"])}  # type: ignore[arg-type]
    path = str(fleet.facts(system)["effective_path"])
    params = {**point.params("callers"), "callers": callers}
    return simple_row(params, system.name, latencies, metrics, path=path, cache="warm" if system.kind == "memory" else "cold")


def show_cascade(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """Compact records of all candidates first, full ones of the best few: compact tier on SSD and in RAM, against exact search."""
    rows: list[Row] = []
    queries, warm = split_queries(options.queries)
    systems = [MEMORY, *espnx_systems(["0", "auto"])]
    for count in options.cascades:
        lossy = {"options": {"cascade": count, "prefetch_step": "auto"}, "is_lossy": True}
        systems += [
            System(f"cascade-ssd-{count}", process=f"cascade-ssd-{count}", **lossy),
            System(f"cascade-ram-{count}", opening={"compact": "ram"}, process=f"cascade-ram-{count}", **lossy),
        ]
    for limit in options.limits:
        with Fleet(prepared, systems, limit, options.threads, options.engine) as fleet:
            nprobe = resolve_nprobe(options, fleet, warm)
            point = Point(prepared, limit, nprobe, options.candidates, None, 1, options.threads)
            say(str(point))
            rows += report(rows_of("cascade", point, measure(point, fleet, [], queries, warm, options.seed, say)), say)
    return rows
