"""Packs the pages of a merged graph anew, so that neighbours lie together as in one that was just
built: csrc/graph/build/pack.cpp, part by part where memory is short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from ...ops._native import load_extension
from ...ops.centroids import distances_to_means, fit_means
from ...storage import NativeEngine, Plan
from ..bounded.merge import EdgesFile
from ..bounded.partition import take_nearest
from .numbers import Numbers, PackedNumbers

_SAMPLE_ROWS = 16_384
_POINTS_AT_ONCE = 4096
_GATHERED_BYTES = 4 << 20
#: Of a node while it is packed: its edges as they are read, in a `Vamana` with slack, and turned
#: round; its numbers.
_EDGE_BYTES, _NODE_BYTES = 14, 48
#: Parts have room for so much more than the mean, so that vectors find it in one that is near.
_ROOM = 1.25


def packed_order(
    edges: EdgesFile,
    points: Callable[[np.ndarray], np.ndarray],
    nodes_per_page: int,
    root: int,
    memory_bytes: int,
) -> np.ndarray:
    """The nodes of a graph in the order in which pages hold them.

    Args:
        points: vectors, float32 [m, dim], of nodes, int64 [m].
        root: the node from which the first page grows.
        memory_bytes: of what one part takes.

    Returns:
        int64 [n]: numbers of nodes.
    """
    n = len(edges.counts)
    if not n:
        return np.empty(0, np.int64)
    dim = points(np.zeros(1, np.int64)).shape[1]
    of_node = _EDGE_BYTES * edges.degree + 4 * dim + _NODE_BYTES
    n_parts = min(n, -(-n * of_node // max(1, memory_bytes)))
    if n_parts == 1:
        return _packed(edges, np.arange(n), points, nodes_per_page, root)
    home = _homes(n, points, n_parts)
    order = [
        _packed(edges, np.flatnonzero(home == part), points, nodes_per_page, root)
        for part in range(n_parts)
    ]
    return np.concatenate(order)


def _homes(n: int, points: Callable[[np.ndarray], np.ndarray], n_parts: int) -> np.ndarray:
    """uint32 [n]: the part of each node, by k-means of a sample."""
    rows = min(n, max(n_parts, _SAMPLE_ROWS))
    sample = np.sort(np.random.default_rng(0).choice(n, rows, replace=False))
    centres = fit_means(points(sample), n_parts)
    room = np.full(n_parts, int(_ROOM * -(-n // n_parts)) + 1)
    found = np.empty(n, np.uint32)
    for first in range(0, n, _POINTS_AT_ONCE):
        part = np.arange(first, min(n, first + _POINTS_AT_ONCE))
        found[part] = take_nearest(distances_to_means(points(part), centres).copy(), room)
    return found


def _packed(
    edges: EdgesFile,
    members: np.ndarray,
    points: Callable[[np.ndarray], np.ndarray],
    nodes_per_page: int,
    root: int,
) -> np.ndarray:
    """Some nodes, int64 [m], growing, in the order of their pages, by the edges among them."""
    if not len(members):
        return members
    place = np.full(len(edges.counts), -1, np.int64)
    place[members] = np.arange(len(members))
    near = np.zeros((len(members), edges.degree), np.uint32)
    counts = np.zeros(len(members), np.int64)
    for first, part, there in edges.blocks():
        here = place[first : first + len(part)]
        mine = here >= 0
        local = place[part[mine]]
        inside = there[mine] & (local >= 0)
        front = np.argsort(~inside, axis=1, kind="stable")
        near[here[mine]] = np.where(
            np.take_along_axis(inside, front, axis=1), np.take_along_axis(local, front, axis=1), 0
        )
        counts[here[mine]] = inside.sum(axis=1)
    vectors = np.empty((len(members), points(members[:1]).shape[1]), np.float32)
    for first in range(0, len(members), _POINTS_AT_ONCE):
        vectors[first : first + _POINTS_AT_ONCE] = points(members[first : first + _POINTS_AT_ONCE])
    graph = load_extension().Vamana.from_edges(
        vectors=torch.from_numpy(vectors),
        format="fp32",
        neighbours=torch.from_numpy(near),
        counts=torch.from_numpy(counts),
        medoid=max(0, int(place[root])),
        list_size=1,
    )
    return members[graph.pack(nodes_per_page).numpy()]


def reordered(
    engine: NativeEngine, edges: EdgesFile, before: Numbers, order: np.ndarray, path: Path
) -> tuple[PackedNumbers, EdgesFile]:
    """The numbers of nodes that lie in that order, int64 [n], of the numbers `before`; and their
    edges by these, in another file."""
    names = before.names_of(order)
    new = np.empty(len(order), np.uint32)
    new[order] = np.arange(len(order), dtype=np.uint32)
    row_bytes = 4 * edges.degree
    file = engine.open(edges.path)
    at_once = max(1, _GATHERED_BYTES // row_bytes)
    with path.open("wb") as written:
        for first in range(0, len(order), at_once):
            wanted = np.sort(part := order[first : first + at_once])
            future = engine.read(
                Plan.of(file, (wanted * row_bytes).tolist(), [row_bytes] * len(wanted)),
                gap_bytes=row_bytes,
            )
            memory, begin = future.wait().numpy(), future.position_bytes.numpy()
            at = begin[np.searchsorted(wanted, part)]
            near = sliding_window_view(memory, row_bytes)[at].view("<u4")
            there = np.arange(edges.degree) < edges.counts[part][:, None]
            written.write(np.where(there, new[np.where(there, near, 0)], 0).reshape(-1).data)
    engine.close_file(file)
    return PackedNumbers.of(before.n_old, names), EdgesFile(path, edges.degree, edges.counts[order])
