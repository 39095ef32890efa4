"""Plots of KV caches: time to first token, and decoding over the context, with memory to spare and
under a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from espnx.sizes import format_size

from ..harness.result import Row
from .found import Found, alike, by_system
from .looks import (
    OTHER,
    SYSTEMS,
    Look,
    bars,
    line,
    logarithmic,
    memory_ends,
    name_ends,
    new_axes,
    plain,
)

_SAME = ("model", "batch", "dtype", "memory", "throttle_bytes_per_s")


def first_token(found: Sequence[Found]) -> Any:
    """Seconds to the first token about the longest context that was read before: read again, kept
    by espnx, and kept in memory. None where one is missing."""
    most = max(each.row.params["context"] for each in found)
    rows = {each.row.system: each.row for each in found if each.row.params["context"] == most}
    if not {"recomputed", "espnx-kept"} <= rows.keys():
        return None
    times = {
        name: rows[name].median_s or 0.0
        for name in ("recomputed", "espnx-kept", "kept-in-ram")
        if name in rows
    }
    factor = times["recomputed"] / times["espnx-kept"]
    of = rows["espnx-kept"].params
    figure, axes = new_axes(
        f"About {most:,} tokens read before: the first token {factor:.0f} times sooner",
        f"seconds to the first token, {of['model']}",
        "",
    )
    bars(
        axes,
        [
            (SYSTEMS[name], seconds, f"{seconds:.{2 if seconds < 10 else 1}f} s")
            for name, seconds in times.items()
        ],
    )
    axes.set_xlim(0, 1.18 * max(times.values()))
    return figure


def ample(found: Sequence[Found]) -> Sequence[Found]:
    """Rows of the context with memory to spare: of the model, batch and memory of the first."""
    return alike(
        [each for each in found if not isinstance(each.row.params.get("memory"), int)], *_SAME
    )


def limited(found: Sequence[Found]) -> Sequence[Found]:
    """Rows of the context under the first limit that caches in memory end at before espnx does;
    none where there is no such limit."""
    rows = alike([each for each in found if isinstance(each.row.params.get("memory"), int)], *_SAME)
    reached = {name: max(row.params["context"] for row in of) for name, of in _rates(rows).items()}
    return (
        rows if reached.get("dynamic", 0) < reached.get("espnx", 0) and "dynamic" in reached else []
    )


def context(found: Sequence[Found]) -> Any:
    """Tokens a second over the context, with memory to spare, beside what the disk's rate alone
    would allow, and where K and V would fill the memory. None where nothing of espnx is in the
    rows."""
    systems = _rates(found)
    if "espnx" not in systems:
        return None
    figure, axes = new_axes(_ample_title(systems), "tokens of context", "tokens a second")
    last = _lines(axes, systems)
    at = found[0].memory_bytes("memory") / (last.metrics["asked_per_step"] / last.params["context"])
    if at <= 2 * axes.get_xlim()[1]:
        memory_ends(axes, at)
    else:  # far beyond the points
        axes.annotate(
            f"memory ends at {tokens(at)} \u2192",
            (1, 1),
            xycoords="axes fraction",
            ha="right",
            va="bottom",
            size=9,
        )
    name_ends(axes)
    return figure


def under_a_limit(found: Sequence[Found]) -> Any:
    """Tokens a second over the context under a memory limit: caches in memory end where they no
    longer fit."""
    systems = _rates(found)
    fits, reached = (
        max(row.params["context"] for row in systems[name]) for name in ("dynamic", "espnx")
    )
    limit = found[0].memory_bytes("memory")
    title = (
        f"{format_size(limit)} of memory hold {tokens(fits)} tokens of context; espnx goes on to "
        f"{tokens(reached)}"
    )
    figure, axes = new_axes(title, "tokens of context", "tokens a second")
    last = _lines(axes, systems)
    ends = next(row for row in systems["dynamic"] if row.params["context"] == fits)
    axes.plot(
        [fits],
        [ends.metrics["tokens_per_s"]],
        marker="X",
        markersize=9,
        color=SYSTEMS["dynamic"].colour,
        label="_end",
    )
    alone = limit / (last.metrics["asked_per_step"] / last.params["context"])
    if alone < reached:
        memory_ends(axes, alone, "K and V alone\nare larger")
    name_ends(axes)
    return figure


def _size(found: Found) -> tuple[int, int, int]:
    """Sequences, tokens of each, and bytes that may be read while drafts are made."""
    params = found.row.params
    return params["batch"], params["context"], params.get("draft_read_ahead_bytes", 0)


def timed(found: Sequence[Found]) -> Sequence[Found]:
    """Rows of the largest batch, context and room for reads ahead that have a time of their own and
    the disk's; none where they are of a single rate."""
    rows = [
        each for each in found if {"step_s", "fio_s", "tokens_a_pass"} <= each.row.metrics.keys()
    ]
    most = max(map(_size, rows), default=None)
    rows = [each for each in rows if _size(each) == most]
    rates = {each.row.params["throttle_bytes_per_s"] for each in rows}
    return rows if len(rates) > 1 else []


def speculation(found: Sequence[Found]) -> Any:
    """Seconds of a step over the rate of the disk, with drafts and one by one, and what the disk
    alone needs for all of K and V. None where nothing is there to compare."""
    systems = by_system(found)
    if not {"one-by-one", "pages-1/16"} <= systems.keys():
        return None

    def rate(row: Row) -> float:
        asked = row.bytes_asked / (row.median_s or 1.0) * row.metrics["step_s"]
        return asked / row.metrics["fio_s"]

    params = found[0].row.params
    slowest = min(systems["pages-1/16"], key=rate)
    share = slowest.metrics["step_s"] / slowest.metrics["fio_s"]
    title = (
        f"At {rate(slowest) / 1e6:,.0f} MB/s a step takes {share:.2f} of the time that the disk "
        "needs for K and V"
    )
    where = f"{params['batch']} x {tokens(params['context'])} tokens, {params['model']}"
    figure, axes = new_axes(title, "MB/s of the disk (fio)", f"seconds a step, {where}")
    for system, rows in systems.items():
        points = sorted((rate(row) / 1e6, row.metrics["step_s"]) for row in rows)
        line(axes, SYSTEMS[system], points)
    disk = sorted((rate(row) / 1e6, row.metrics["fio_s"]) for row in systems["one-by-one"])
    line(axes, Look("disk alone (fio)", OTHER, ":"), disk, linewidth=1, markersize=0)
    logarithmic(axes, plain, plain)
    name_ends(axes)
    return figure


def _rates(found: Sequence[Found]) -> Mapping[str, list[Row]]:
    return by_system([each for each in found if "tokens_per_s" in each.row.metrics])


def _ample_title(systems: Mapping[str, Sequence[Row]]) -> str:
    memory = {
        row.params["context"]: row.metrics["tokens_per_s"] for row in systems.get("dynamic", [])
    }
    shares = [
        row.metrics["tokens_per_s"] / memory[at]
        for row in systems["espnx"]
        if (at := row.params["context"]) in memory
    ]
    if not shares:
        return "Decoding with K and V on disk"
    return (
        f"Where K and V fit in memory, espnx decodes at {min(shares):.2f} to {max(shares):.2f} of "
        "its rate"
    )


def _lines(axes: Any, systems: Mapping[str, Sequence[Row]]) -> Row:
    """A line for each system, and the disk's rate where it is near them. Returns espnx's row of the
    longest context."""
    for system, rows in systems.items():
        line(
            axes,
            SYSTEMS[system],
            sorted((row.params["context"], row.metrics["tokens_per_s"]) for row in rows),
        )
    top = max(row.metrics["tokens_per_s"] for rows in systems.values() for row in rows)
    timed = [row for rows in systems.values() for row in rows if "fio_s" in row.metrics]
    bound = sorted(
        {(row.params["context"], row.params["batch"] / row.metrics["fio_s"]) for row in timed}
    )
    line(
        axes,
        Look("disk alone (fio)", OTHER, ":"),
        [point for point in bound if point[1] <= 1.5 * top],
        linewidth=1,
        markersize=0,
    )
    logarithmic(axes, tokens, plain)
    return max(systems["espnx"], key=lambda row: int(row.params["context"]))


def tokens(count: float) -> str:
    """``500``, ``20K``, ``128K``, ``3.1M``: of contexts that double, K is 1,024."""
    unit = 1024 if count % 1024 == 0 else 1000
    for size, letter in ((unit**2, "M"), (unit, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"
