"""Plots of search: time over the size of the records, what record formats cost in quality, what a
prefetch knows."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from espnx.sizes import format_size

from ..harness.result import Row
from .found import Found, by_system
from .looks import (
    SYSTEMS,
    WHOLE_INCHES,
    Look,
    line,
    logarithmic,
    memory_ends,
    name_ends,
    new_axes,
    plain,
)

_CORPORA = {"A": "A: copies of passages", "B": "B: tidy topics", "C": "C: overlapping topics"}
_STEP = 0.3  # of the title


def sizes(found: Sequence[Found]) -> Any:
    """Milliseconds of a search over the size of the records, and where memory ends; what is in
    memory beyond that has more of it. Of the first corpus, under its least memory. A cascade, which
    may miss a hit, is drawn where its recall was measured."""
    least = min(each.memory_bytes("memory_bytes") for each in found)
    found = [each for each in found if each.memory_bytes("memory_bytes") == least]
    found = [
        each
        for each in found
        if each.row.params["corpus"] == found[0].row.params["corpus"] and each.row.median_s
    ]
    systems = by_system(
        [
            each
            for each in found
            if "cascade" not in each.row.system or "recall@10" in each.row.metrics
        ]
    )
    if not systems:
        return None
    figure, axes = new_axes(
        _sizes_title(systems, least),
        f"GB of records (corpus {found[0].row.params['corpus']})",
        "median ms of a search",
    )
    for system, rows in systems.items():
        points = sorted(
            (row.metrics["record_bytes"] / 1e9, 1e3 * (row.median_s or 0)) for row in rows
        )
        look = Look(SYSTEMS[system].name + _recall(rows), *_of(SYSTEMS[system]))
        within = [point for point in points if system != "memory" or point[0] <= least / 1e9]
        if len(within) == len(points):
            line(axes, look, points)
        else:  # what lies beyond had more memory than the others
            line(axes, look, points[max(0, len(within) - 1) :], alpha=0.55)
            line(axes, Look(f"_{look.name}", look.colour), within)
    logarithmic(axes, plain, plain)
    memory_ends(axes, least / 1e9)
    name_ends(axes)
    return figure


def _of(look: Look) -> tuple[str, str]:
    return look.colour, look.line


def _recall(rows: Sequence[Row]) -> str:
    """The recall of the largest records, where it was measured."""
    last = max(rows, key=lambda row: row.metrics["record_bytes"])
    return f" ({last.metrics['recall@10']:.3f})" if "recall@10" in last.metrics else ""


def _sizes_title(systems: Mapping[str, Sequence[Row]], limit: int) -> str:
    last = {
        name: max(rows, key=lambda row: row.metrics["record_bytes"])
        for name, rows in systems.items()
    }
    ours = next((last[name] for name in ("cascade-ssd-64", "espnx") if name in last), None)
    if ours is None or "mmap-1" not in last:
        return "Searching records on disk"
    gigabytes, times = (
        ours.metrics["record_bytes"] / 1e9,
        [1e3 * (each.median_s or 0) for each in (ours, last["mmap-1"])],
    )
    recalled = " (recall@10)" if "recall@10" in ours.metrics else ""
    return (
        f"{gigabytes:.1f} GB of records, {format_size(limit)} of memory: espnx {times[0]:.0f} ms a "
        f"search, mmap {times[1]:.0f}{recalled}"
    )


def formats(found: Sequence[Found]) -> Any:
    """nDCG@10 of each way to store or score records beside fp16's, a line for each collection, by
    the bytes that they take; None without fp16."""
    known: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in (each.row for each in found):
        if "bytes_per_document" in row.metrics and "nDCG@10" in row.metrics:
            known[row.params["corpus"]][row.system] = (
                row.metrics["bytes_per_document"],
                row.metrics["nDCG@10"],
            )
    known = {corpus: points for corpus, points in known.items() if "fp16" in points}
    if not known:
        return None
    share = {
        name: points[name][0] / points["fp16"][0] for points in known.values() for name in points
    }
    order = sorted(share, key=lambda name: (share[name], name))
    figure, axes = new_axes(
        _formats_title(known, share),
        "format, and its bytes beside fp16's",
        "nDCG@10 beside fp16's",
        WHOLE_INCHES,
    )
    for number, (corpus, points) in enumerate(known.items()):
        places = [
            (order.index(name), points[name][1] / points["fp16"][1])
            for name in order
            if name in points
        ]
        line(axes, Look(corpus, f"C{number + 1}"), places, linewidth=1.2, markersize=6)
    axes.set_xticks(
        range(len(order)),
        [f"{textwrap.fill(name.replace('-', ' '), 9)}\n{share[name]:.0%}" for name in order],
        size=8,
    )
    axes.yaxis.set_major_formatter("{x:.2f}")
    name_ends(axes)
    return figure


def _formats_title(
    known: dict[str, dict[str, tuple[float, float]]], share: dict[str, float]
) -> str:
    kept = [points["bit1"][1] / points["fp16"][1] for points in known.values() if "bit1" in points]
    if not kept:
        return "Quality of record formats"
    return (
        f"One bit a dimension: {share['bit1']:.0%} of the bytes, at least {min(kept):.0%} of the "
        "quality"
    )


def hit_rate(found: Sequence[Found]) -> Any:
    """Hit rate over the prefetch step, a line for each corpus at the least recall; at others
    dashed, without a name."""
    least = min(each.row.params["recall_wanted"] for each in found)
    lines: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
    for row in (each.row for each in found):
        lines[row.params["corpus"], row.params["recall_wanted"]].append(
            (100 * row.params["prefetch_step"], row.metrics["hit_rate"])
        )
    at_step = [
        rate
        for (_, recall), points in lines.items()
        for step, rate in points
        if recall == least and step == 100 * _STEP
    ]
    title = (
        (
            f"After {_STEP:.0%} of the lists {min(at_step):.0%} to {max(at_step):.0%} of the "
            "candidates are known"
        )
        if at_step
        else "Hit rate"
    )
    others = sorted({recall for _, recall in lines} - {least})
    more = "".join(f"; dashed: for {recall:g}" for recall in others)
    figure, axes = new_axes(
        title,
        f"prefetch step, % of the lists that give recall {least:g}{more}",
        "hit rate",
        WHOLE_INCHES,
    )
    colours = {
        corpus: f"C{number}"
        for number, corpus in enumerate(dict.fromkeys(corpus for corpus, _ in lines), 1)
    }
    for (corpus, recall), points in lines.items():
        name = _CORPORA.get(corpus, corpus)
        look = (
            Look(name, colours[corpus])
            if recall == least
            else Look(f"_{name}", colours[corpus], "--")
        )
        line(
            axes,
            look,
            sorted(points),
            **({} if recall == least else {"linewidth": 1, "alpha": 0.8}),
        )
    axes.set_ylim(0, 1.02)
    name_ends(axes)
    return figure
