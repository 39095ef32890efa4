"""What people are told of a graph, and refusals of graphs that not everything understands."""

from __future__ import annotations

import os

import numpy as np

from ... import errors
from ...sizes import format_size
from ...storage.replacing import versioned
from ..format import CHANGES, N_MAX, GraphFacts
from ..parts import Clusters

# Recall at which pages are compared, and by how much they have to grow before somebody is told to
# build anew.
_DRIFT_AT, _DRIFTED = (0.95, 0.9, 0.8), 1.25


def summary_of(facts: GraphFacts, path: tuple[str, str, bool]) -> str:
    """A few lines. `path`: of the reads, why it is not another, and whether past the page cache."""
    layout = facts.layout
    effective, reason, is_direct = path
    where = {
        "inline": "beside their nodes",
        "paged": "in pages of their own",
        "memory": "in memory",
    }[layout.codes_in]
    if layout.codes_in != "inline" and layout.inline_pq:
        where += f", and those of {layout.inline_pq} neighbours beside each node"
    rotated = " of rotated vectors" if facts.codebook.rotation is not None else ""
    held = f"codes of {layout.disk_pq_bytes} bytes" if layout.format == "pq" else layout.format
    what = (
        f"{layout.n:,} vectors of {layout.dim} dimensions as {held}, {facts.metric}; "
        f"{layout.max_degree} neighbours"
    )
    sizes = (
        f"{format_size(sum(facts.file_sizes.values()))} on storage, "
        f"{format_size(facts.memory_bytes)} in memory"
    )
    lines = [
        f"{what}, codes of {layout.code_bytes} bytes{rotated} {where}",
        f"{sizes}; {layout.nodes_per_page} nodes to a page of {format_size(layout.page_bytes)}",
        (
            "reads by "
            f"{effective}{'' if is_direct else ' (buffered)'}{f' ({reason})' if reason else ''}"
        ),
    ]
    if facts.recall_ceiling is not None:
        lines.append(
            "recall@10 of a search that measures all codes in place of vectors: "
            f"{facts.recall_ceiling:.3f}"
        )
    if facts.clusters is not None:
        lines += _of_clusters(facts, facts.clusters)
    for number, directory in enumerate(facts.directories):
        inside = facts.in_directory(number)
        size = int(facts.parts.pages[inside].sum()) * layout.page_bytes
        state = "lost" if number in facts.lost_directories else format_size(size)
        lines.append(f"{np.count_nonzero(inside)} of them in {directory}: {state}")
    lines += [
        f"list of {each.list_size}: recall@10 {each.recall:.3f}, {each.pages:.1f} pages a query"
        + ("" if each.clusters is None else f", through {each.clusters:.1f} clusters")
        for each in facts.recall
    ]
    return "\n".join(lines)


def _of_clusters(facts: GraphFacts, clusters: Clusters) -> list[str]:
    least, largest = int(clusters.nodes.min()), int(clusters.nodes.max())
    lines = [f"{len(clusters.nodes)} clusters of {least:,} to {largest:,} vectors, a graph each"]
    most = int(facts.options.get("max_points", N_MAX))
    if crowded := int(np.count_nonzero(clusters.nodes > most)):
        lines.append(
            f"{crowded} of them have more than the {most:,} that they were to have: a merge with "
            "more memory divides them"
        )
    if unused := facts.unused_bytes:
        lines.append(
            f"{format_size(unused)} of clusters that were written anew since, which later merges "
            "give back"
        )
    if (drift := _drift_of(facts)) is not None:
        recall, before, now = drift
        line = (
            f"recall@10 {recall:g} took {before:.1f} pages a query when it was built, {now:.1f} "
            "since it was changed"
        )
        lines.append(f"{line}: build it again" if now > _DRIFTED * before else line)
    return lines


def _drift_of(facts: GraphFacts) -> tuple[float, float, float] | None:
    """How pages of a query have grown with the changes of a graph of clusters: (a recall@10; pages
    of the cheapest search that reached it when the graph was built; of one that does as was
    measured last). None: it was not measured again."""
    if not facts.built_recall or facts.recall == facts.built_recall:
        return None
    for recall in _DRIFT_AT:
        both = [
            [each.pages for each in points if each.recall >= recall]
            for points in (facts.built_recall, facts.recall)
        ]
        if all(both):
            return recall, min(both[0]), min(both[1])
    return None


def refuse_clusters(facts: GraphFacts, where: str) -> None:
    """Raises InvalidInputError for a directory with a graph for each cluster, where only one graph
    is understood. `where`: for the message."""
    if facts.clusters is not None:
        raise errors.InvalidInputError(
            f"graph {facts.where} {where}",
            got=f"{len(facts.clusters.nodes)} clusters, each with a graph",
            expected="one graph",
            fix="build it without clusters",
        )


def refuse_gaps(facts: GraphFacts, where: str) -> None:
    """Raises InvalidInputError for a graph that was changed, where only one as it was built is
    understood: some of its ids may have no node, or its log holds changes."""
    if facts.has_gaps or os.path.exists(
        os.path.join(facts.where, versioned(CHANGES, facts.generation))
    ):
        raise errors.InvalidInputError(
            f"graph {facts.where} {where}",
            got="one that was added to or deleted from",
            expected="one as it was built",
            fix="build it again of its vectors",
        )
