"""The graph of one cluster, built in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..codes.codebook import Codebook
from ..edges import build_edges
from ..layout import PageLayout
from ..options import GraphOptions, measured_rows
from ..parts import most_entries
from ..write import WholeGraph, connect_and_choose_entries, node_pages


@dataclass(frozen=True, eq=False)
class BuiltCluster:
    """Attributes:
    pages: uint8, some at a time, once. node_of: uint32 [n]: the nodes of the vectors.
    entries: uint32 [m]: nodes at which searches begin. entry_codes: uint8 [m, code_bytes].
    repaired: nodes that were given edges.
    """

    pages: Iterator[np.ndarray]
    node_of: np.ndarray
    entries: np.ndarray
    entry_codes: np.ndarray
    repaired: int


def build_cluster(
    vectors: np.ndarray,
    rows: np.ndarray,
    layout: PageLayout,
    options: GraphOptions,
    book: Codebook,
    longest: float,
    salt: int,
    seed: int,
    progress: Callable[[int], None],
) -> BuiltCluster:
    """Builds the graph of some vectors.

    Args:
        vectors: [n, dim], n at least 1, as `PageLayout.row_dtype`. rows: int64 [n]: as what
            searches return each.
        longest: by inner product, the largest squared length of all vectors of all clusters.
        salt: of its pages.
        progress: called with the vectors that have edges.
    """
    layout = replace(layout, n=len(vectors))
    measured, format_name = measured_rows(vectors, options.metric, layout.row_format, longest)
    graph = build_edges(measured, format_name, options, seed, lambda done, _: progress(done))
    n_entries = min(options.num_entry_points, most_entries(layout.code_bytes))
    repaired, entries = connect_and_choose_entries(graph, layout.n, n_entries, seed)
    row_of = graph.pack(layout.nodes_per_page).numpy()
    neighbours, counts = (each.numpy() for each in graph.edges())
    del graph, measured
    codes = book.encode(vectors)
    node_of = np.empty(layout.n, np.uint32)
    node_of[row_of] = np.arange(layout.n, dtype=np.uint32)
    whole = WholeGraph(
        layout, options.metric, vectors, codes, book, neighbours, counts, entries, {}
    )
    pages = node_pages(whole, row_of, node_of, rows, salt, _silent)
    return BuiltCluster(pages, node_of, node_of[entries], codes[entries], repaired)


def _silent(what: str, done: int, total: int) -> None:
    pass
