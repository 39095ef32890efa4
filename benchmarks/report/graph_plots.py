"""Plots of graphs: queries a second and reads over recall, of the vectors that say most: real ones
before made ones, then the most; and reads over the number of clusters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ..harness.result import Row
from .found import Found
from .looks import ESPNX, OTHER, Look, line, logarithmic, name_ends, new_axes, plain

_MADE = ("hard,", "tidy,")  # how the names of vectors from a recipe begin
_LINES = ("-", "--", ":", "-.")
_RECALL_LEAST, _MISSED_LEAST = 0.8, 0.0005
_CLUSTERS = (
    ("espnx-shards", Look("as many graphs, all asked", OTHER)),
    ("espnx-clusters-0.3", Look("clusters, .3 in two", ESPNX, "--")),
    ("espnx-clusters", Look("clusters", ESPNX)),
)


def rates(found: Sequence[Found]) -> Any:
    """Queries a second over recall. Of each list size the fastest threads and width count."""
    return _over_recall(found, "queries a second", "queries_per_s", max)


def reads(found: Sequence[Found]) -> Any:
    """Reads of a query over recall, of the systems that count them. Of each list size the threads
    and width with the fewest count."""
    return _over_recall(
        [each for each in found if each.row.metrics.get("reads")], "reads a query", "reads", min
    )


def over_clusters(found: Sequence[Found]) -> Any:
    """Reads of a query over the number of clusters, of which each has as many vectors, at the
    largest recall; None without two numbers."""
    rows = [each.row for each in found if each.row.metrics.get("reads")]
    recall = max((row.params["recall"] for row in rows), default=None)
    rows = [row for row in rows if row.params["recall"] == recall]
    counts = sorted({row.params["clusters"] for row in rows})
    if len(counts) < 2:
        return None
    title = f"Reads at recall@10 {recall:g}"
    for row in rows:
        if row.system == "espnx-clusters" and row.params["clusters"] == counts[-1]:
            share = row.metrics.get("reads_over_shards")
            if share:
                title = f"At {counts[-1]} clusters, {share:.2f} of the reads of as many graphs"
    figure, axes = new_axes(title, f"clusters, for recall@10 {recall:g}", "reads a query")
    for system, look in _CLUSTERS:
        points = [
            (row.params["clusters"], row.metrics["reads"]) for row in rows if row.system == system
        ]
        line(axes, look, sorted(points))
    logarithmic(axes, plain, plain)
    axes.set_xticks(counts, [str(count) for count in counts])
    name_ends(axes)
    return figure


def _over_recall(found: Sequence[Found], what: str, name: str, best: Callable[..., Row]) -> Any:
    """A line for each system of the chosen vectors; None without points at a recall that anybody
    wants."""
    swept = [each.row for each in found if each.row.params["show"] == "sweep"]
    data = max(
        dict.fromkeys(row.params["data"] for row in swept),
        key=lambda each: _worth(each, swept),
        default=None,
    )
    rows = [
        row
        for row in swept
        if row.params["data"] == data and row.metrics["recall"] >= _RECALL_LEAST
    ]
    if not rows:
        return None
    title = _title([each.row for each in found if each.row.params["data"] == data], name)
    figure, axes = new_axes(
        title or f"{what.capitalize()} at equal recall", f"recall@10, {data}", what
    )
    systems = list(dict.fromkeys(row.system for row in rows))
    ours = [system for system in systems if system.startswith("espnx")]
    peers = [system for system in systems if system not in ours]
    for system in [*peers, *ours]:
        sizes: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            if row.system == system:
                sizes[row.params["list_size"]].append(row)
        chosen = [
            best(here, key=lambda row: row.metrics[name]) for _, here in sorted(sizes.items())
        ]
        alike = ours if system in ours else peers
        look = Look(
            system, ESPNX if system in ours else OTHER, _LINES[alike.index(system) % len(_LINES)]
        )
        line(
            axes, look, sorted(((_missed(row), row.metrics[name]) for row in chosen), reverse=True)
        )
    logarithmic(axes, lambda missed: f"{1 - missed:g}", None, subs=(1, 5))
    logarithmic(axes, None, plain)
    axes.tick_params(axis="x", labelsize=8)
    # of what is missed: rising recall, and the same room for each halving of what it lacks
    axes.invert_xaxis()
    name_ends(axes, with_leaders=True)
    return figure


def _missed(row: Row) -> float:
    return max(1 - float(row.metrics["recall"]), _MISSED_LEAST)


def _worth(data: str, rows: Sequence[Row]) -> tuple[bool, int, int, float]:
    """Real vectors first, then how many there are, then how many systems were measured with them,
    and the recall that all of them reach."""
    reached: dict[str, float] = {}
    here = [row for row in rows if row.params["data"] == data]
    for row in here:
        reached[row.system] = max(reached.get(row.system, 0.0), float(row.metrics["recall"]))
    return not data.startswith(_MADE), here[0].params["n"], len(reached), min(reached.values())


def _title(rows: Sequence[Row], name: str) -> str | None:
    """What our best system does beside DiskANN at the least recall of the summary; None where none
    was compared."""
    summary = [
        row for row in rows if row.params["show"] == "summary" and row.system.startswith("espnx")
    ]
    least = min((row.params["recall"] for row in summary), default=None)
    here = [row for row in summary if row.params["recall"] == least]
    if name == "reads":
        shares = {
            row.metrics["reads_over_peer"]: row.system
            for row in here
            if row.metrics.get("reads_over_peer")
        }
        return (
            f"At recall {least:g}, {min(shares):.2f} of DiskANN's reads ({shares[min(shares)]})"
            if shares
            else None
        )
    ratios = {row.ratio["diskann"]: row.system for row in here if "diskann" in row.ratio}
    return (
        f"At recall {least:g}, {max(ratios):.1f} times DiskANN's queries ({ratios[max(ratios)]})"
        if ratios
        else None
    )
