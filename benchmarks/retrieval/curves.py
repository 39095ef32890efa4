"""What a corpus and its layout give, searches aside: requests and bytes by layout, hit rates,
memory of the first stage."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import numpy as np

from espnx.errors import InvalidInputError

from ..corpora.stores import Prepared
from ..harness.processes import Worker
from ..harness.registry import Say
from ..harness.result import Row
from .fleet import Fleet
from .index import build_indexes, overlap
from .layout import ID_ORDER, LIST_ORDER
from .measure import ask, report, split_queries
from .options import Options, resolve_nprobe
from .point import AUTO, Point
from .rows import simple_row

HIT_RATE_STEPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
HIT_RATE_RECALLS = (0.95, 0.99)
INDEX_CODES = ("flat", "sq8", "sq6", "pq32")
_FIXED_GAPS = (0, 16 << 10, 64 << 10)
_UNCOUNTED = 3  # reads of each layout, before the first that counts

Reads = dict[str, list[dict[str, float]]]


def show_layout(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """The same candidates read in list order and in id order, at the gap of the cost model; list
    order at fixed gaps beside."""
    queries, warm = split_queries(options.queries)
    rows: list[Row] = []
    with Fleet(prepared, [AUTO], None, options.threads, options.engine) as fleet:
        nprobe = resolve_nprobe(options, fleet, warm)
        gap = int(fleet.facts(AUTO)["gap_bytes"])
        known = {"list": (LIST_ORDER, LIST_ORDER, gap), "id": (ID_ORDER, ID_ORDER, gap)}
        variants = [known[name] for name in options.layouts]
        variants += [
            (f"{LIST_ORDER}-gap-{fixed >> 10}k", LIST_ORDER, fixed) for fixed in _FIXED_GAPS
        ]
        for rerank in options.reranks:
            point = Point(prepared, None, nprobe, options.candidates, rerank, 1, options.threads)
            reads = _read_layouts(
                fleet.worker_of(AUTO), point, [*warm[:_UNCOUNTED], *queries], variants, options.seed
            )
            path = str(fleet.facts(AUTO)["effective_path"])
            rows += [_layout_row(point, name, reads, fixed, path) for name, _, fixed in variants]
    return report(rows, say)


def _read_layouts(
    worker: Worker,
    point: Point,
    queries: list[int],
    variants: list[tuple[str, str, int]],
    seed: int,
) -> Reads:
    reads: Reads = {name: [] for name, _, _ in variants}
    rng = random.Random(seed)
    for turn, query in enumerate(queries):
        found = worker.ask(
            "candidates", queries=[query], candidates=point.candidates, nprobe=point.nprobe
        )
        for name, layout, gap in rng.sample(variants, len(variants)):
            read = worker.ask(
                "layout", numbers=found["numbers"][0][: point.rerank], layout=layout, gap_bytes=gap
            )
            if turn >= _UNCOUNTED:
                reads[name].append(read)
    return reads


def _layout_row(point: Point, name: str, reads: Reads, gap_bytes: int, path: str) -> Row:
    ours, base = reads[name], reads.get(ID_ORDER, [])
    middle = {key: statistics.median(read[key] for read in ours) for key in ours[0]}
    metrics = {
        "requests": middle["requests"],
        "gap_bytes": float(gap_bytes),
        "moved_per_asked": middle["bytes_moved"] / middle["bytes_asked"],
    }
    ratio = {}
    if base and name != ID_ORDER:
        pairs = list(zip(ours, base, strict=True))
        metrics["requests_per_id_order"] = statistics.median(
            a["requests"] / b["requests"] for a, b in pairs
        )
        metrics["seconds_per_id_order"] = statistics.median(
            a["seconds"] / b["seconds"] for a, b in pairs
        )
        ratio = {ID_ORDER: [b["seconds"] / a["seconds"] for a, b in pairs]}
    return simple_row(
        point.params("layout"),
        name,
        [read["seconds"] for read in ours],
        metrics,
        kind="replayed",
        path=path,
        ratio=ratio,
        bytes_asked=middle["bytes_asked"],
        bytes_moved=middle["bytes_moved"],
    )


def show_hit_rate(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """Hit rate by prefetch step, at the nprobe of two recalls; equal to what FAISS says in two
    searches from scratch."""
    queries, warm = split_queries(options.queries)
    rows: list[Row] = []
    with Fleet(prepared, [AUTO], None, options.threads, options.engine) as fleet:
        worker = fleet.worker_of(AUTO)
        for recall in HIT_RATE_RECALLS:
            nprobe = resolve_nprobe(replace(options, nprobe=str(recall)), fleet, [*queries, *warm])
            point = Point(prepared, None, nprobe, options.candidates, None, 1, options.threads)
            known = worker.ask(
                "overlap",
                queries=queries,
                candidates=options.candidates,
                nprobe=nprobe,
                shares=HIT_RATE_STEPS,
            )
            for step, expected in zip(HIT_RATE_STEPS, known["hit_rates"], strict=True):
                answers = [
                    ask(fleet, AUTO, point, [query], prefetch_step=step) for query in queries
                ]
                row = _hit_rate_row(point, step, recall, answers, expected, known["recall"])
                say(
                    f"    nprobe {nprobe}, recall {known['recall']:.3f}, step {step:g}: "
                    f"{row.metrics['hit_rate']:.4f}, FAISS {expected:.4f}"
                )
                rows.append(row)
    return rows


def _hit_rate_row(
    point: Point,
    step: float,
    wanted: float,
    answers: list[dict[str, Any]],
    expected: float,
    recall: float,
) -> Row:
    rate = statistics.fmean(answer["metrics"]["hit_rate"] for answer in answers)
    asked, moved = (
        statistics.median(answer[key] for answer in answers)
        for key in ("bytes_asked", "bytes_moved")
    )
    return simple_row(
        {**point.params("hit-rate"), "prefetch_step": step, "recall_wanted": wanted},
        f"espnx-{100 * step:g}%",
        [answer["seconds"] for answer in answers],
        {
            "hit_rate": rate,
            "hit_rate_faiss": expected,
            "difference": abs(rate - expected),
            "recall": recall,
        },
        correct=abs(rate - expected) <= 0.001,
        bytes_asked=asked,
        bytes_moved=moved,
    )


def show_index_memory(options: Options, prepared: Prepared, say: Say) -> list[Row]:
    """Memory of the first stage by code, as growth of a process that reads it, against the records;
    with the recall at one nprobe."""
    corpus = options.corpus(prepared.name, say)
    if corpus is None:
        raise InvalidInputError(
            "index-memory builds indexes from the corpus",
            got="the folder of a store",
            expected="A, B or C",
        )
    queries, _ = split_queries(options.queries)
    paths = build_indexes(prepared.store.parent, corpus, options.nlist, INDEX_CODES, say)
    with Fleet(prepared, [AUTO], None, options.threads, options.engine) as fleet:
        facts, nprobe = fleet.facts(AUTO), resolve_nprobe(options, fleet, queries)
    shared = {
        "queries": str(prepared.queries),
        "numbers": queries,
        "candidates": options.candidates,
    }
    truth = _ask_alone("load_index", path=str(paths["flat"]), nprobe=None, **shared)["numbers"]
    rows = []
    for code, path in paths.items():
        answer = _ask_alone("load_index", path=str(path), nprobe=nprobe, **shared)
        recall = statistics.fmean(
            overlap(np.array(a), np.array(b)) for a, b in zip(answer["numbers"], truth, strict=True)
        )
        resident = answer["rss_growth_bytes"] + facts["resident_bytes"]["metadata"]
        metrics = {
            "rss_growth_bytes": float(answer["rss_growth_bytes"]),
            "file_bytes": float(answer["file_bytes"]),
            "metadata_bytes": float(facts["resident_bytes"]["metadata"]),
            "record_bytes": float(facts["live_record_bytes"]),
            "records_per_index": facts["live_record_bytes"] / max(1, resident),
            "recall": recall,
        }
        point = Point(prepared, None, nprobe, options.candidates, None, 1, 1)
        rows.append(
            simple_row(
                point.params("index-memory"),
                code,
                [answer["seconds_per_query"]],
                metrics,
                path="memory",
                cache="warm",
            )
        )
        size = (
            f"{answer['rss_growth_bytes'] / 1e6:.0f} MB, 1/{metrics['records_per_index']:.1f} of "
            "the records"
        )
        say(f"    {code}: {size}, recall {recall:.4f}")
    return rows


def _ask_alone(do: str, **arguments: Any) -> dict[str, Any]:
    """Asks a process that has done nothing else."""
    with Worker("retrieval", do) as worker:
        return worker.ask(do, **arguments)
