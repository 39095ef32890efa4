"""What a graph will take on SSD and in memory, before there is one. Sizes are computed from its
layout; nothing is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..checks import check_whole
from ..errors import InvalidInputError
from ..ops.distances import DIM_MAX, VECTOR_FORMATS
from .bounded.budget import fit_bytes, least_bytes, member_bytes
from .codes.codebook import codebook_bytes, may_rotate
from .format import DIRECTORIES_MAX, N_MAX, ROWS_MAX
from .global_index.builder import build_bytes, check_clusters, room_of
from .layout import CODES_IN, MAX_DEGREE_MAX, PageLayout, choose_layout, shorter_codes_hint
from .options import GraphOptions
from .parts import TABLE, most_entries

_MANY = "a graph for each cluster: --clusters N (clusters=)"
_DTYPES = {str(dtype).removeprefix("torch."): name for name, dtype in VECTOR_FORMATS.items()} | {
    "pq": "pq"
}


@dataclass(frozen=True)
class GraphPlan:
    """Sizes in bytes.

    Attributes:
        disk: ``nodes_bytes``, ``rows_bytes``, ``codebook_bytes`` (of both where codes are in place
            of vectors; with rotations, which a build leaves out where they do not make codes
            better), ``entries_bytes``, ``codes_bytes`` (0 where codes are inline) and
            ``total_bytes``; a manifest of some kilobytes comes to it.
        memory: of the open graph: ``codebook_bytes``, ``entries_bytes``, ``codes_bytes``,
            ``total_bytes``; searches have buffers.

    Of a graph for each cluster both have ``clusters_bytes``, too: of centroids, and on disk of the
    table; where its pages lie in several directories, ``disk`` has ``directory_bytes``, what the
    fullest of these has of ``nodes_bytes``.

    Attributes:
        build: what a build asks for, beside the process's libraries: ``whole_bytes`` in memory at a
            time, ``least_bytes`` as the smallest limit of a build in parts (``memory=``).
        hint: see `espnx.graph.GraphReport`.
    """

    page_bytes: int
    nodes_per_page: int
    pq_bytes: int
    disk: dict[str, int]
    memory: dict[str, int]
    build: dict[str, int]
    hint: str | None = None


def plan_graph(
    n: int,
    dim: int,
    *,
    vector_dtype: str = "float16",
    codes: str = "inline",
    max_degree: int = 64,
    pq_bytes: int | None = None,
    disk_pq_bytes: int | None = None,
    use_opq: bool = True,
    num_entry_points: int = 1000,
    clusters: int | None = None,
    replicas: float = 0.0,
    directories: int = 0,
) -> GraphPlan:
    """Sizes of a graph of n vectors of `dim` values. Options are those of `espnx.graph.build`, by
    distance (``l2``, ``cosine``); clusters are taken to be of equal size, and `replicas` to find
    room. `directories`: how many the clusters' pages lie in; 0: beside the rest.

    Raises InvalidInputError.
    """
    if clusters is None and n > N_MAX:
        raise InvalidInputError(
            "vectors of a plan", got=n, expected=f"at most {N_MAX} of one graph", fix=_MANY
        )
    check_whole("vectors of a plan", n, 0 if clusters is None else 1, ROWS_MAX)
    check_whole("dim of a plan", dim, 1, DIM_MAX)
    check_whole("max_degree", max_degree, 1, MAX_DEGREE_MAX)
    check_whole("num_entry_points", num_entry_points, 1, 65536)
    check_whole("directories of a plan", directories, 0, DIRECTORIES_MAX)
    if clusters is None and directories:
        raise InvalidInputError(
            "directories of a plan", got="no clusters", expected="how many clusters"
        )
    if clusters is not None:
        check_clusters(clusters, replicas, codes=codes, vector_dtype=vector_dtype)
    if vector_dtype not in _DTYPES or codes not in CODES_IN:
        raise InvalidInputError(
            "vector_dtype and codes of a plan",
            got=f"{vector_dtype!r} and {codes!r}",
            expected=f"{', '.join(_DTYPES)}; {', '.join(CODES_IN)}",
        )
    if pq_bytes is not None:
        check_whole("pq_bytes", pq_bytes, 1, dim)
    if holds_codes := vector_dtype == "pq" or disk_pq_bytes is not None:
        check_whole("disk_pq_bytes", disk_pq_bytes, 1, dim)
    layout = choose_layout(
        n,
        dim,
        "pq" if holds_codes else _DTYPES[vector_dtype],
        max_degree=max_degree,
        codes=codes,
        code_bytes=pq_bytes,
        disk_pq_bytes=disk_pq_bytes,
    )
    if clusters is not None:
        plan = _plan_clusters(layout, min(clusters, n), replicas, num_entry_points, use_opq)
        if directories:
            largest = -(-plan.disk["nodes_bytes"] // min(clusters, n))
            plan.disk["directory_bytes"] = -(-min(clusters, n) // directories) * largest
        return plan
    code_bytes, entries = layout.code_bytes, min(n, num_entry_points)
    resident_bytes = layout.codes_bytes if codes == "memory" else 0
    of_books = [code_bytes, layout.disk_pq_bytes] if holds_codes else [code_bytes]
    books_bytes = sum(
        codebook_bytes(dim, is_rotated=may_rotate(n, dim, each, use_opq=use_opq))
        for each in of_books
    )
    disk = {
        "nodes_bytes": layout.size_bytes,
        "rows_bytes": 4 * n,
        "codebook_bytes": books_bytes,
        "entries_bytes": entries * (4 + code_bytes),
        "codes_bytes": layout.codes_bytes,
    }
    memory = {
        "codebook_bytes": books_bytes + 8 * sum(each + 1 for each in of_books),
        "entries_bytes": entries * (8 + code_bytes),
        "codes_bytes": resident_bytes,
    }
    options = GraphOptions(max_degree=max_degree, use_opq=use_opq)
    whole_bytes = n * member_bytes(layout, options) + fit_bytes(layout, options)
    build = {"whole_bytes": whole_bytes, "least_bytes": least_bytes(layout, options)}
    sizes = _with_total(disk), _with_total(memory), build
    return GraphPlan(
        layout.page_bytes, layout.nodes_per_page, code_bytes, *sizes, shorter_codes_hint(layout)
    )


def _plan_clusters(
    layout: PageLayout, n_clusters: int, replicas: float, num_entry_points: int, use_opq: bool
) -> GraphPlan:
    n, dim, code_bytes = layout.n, layout.dim, layout.code_bytes
    largest = -(-math.ceil(n * (1 + replicas)) // n_clusters)
    n_pages = n_clusters * -(-largest // layout.nodes_per_page)
    entries = n_clusters * min(largest, num_entry_points, most_entries(code_bytes))
    book_bytes = codebook_bytes(dim, is_rotated=may_rotate(n, dim, code_bytes, use_opq=use_opq))
    centroids_bytes, copies = 4 * dim * n_clusters, 2 if replicas and n_clusters > 1 else 1
    disk = {
        "nodes_bytes": n_pages * layout.page_bytes,
        "rows_bytes": 8 * copies * n,
        "codebook_bytes": book_bytes,
        "entries_bytes": entries * (4 + code_bytes),
        "codes_bytes": 0,
        "clusters_bytes": centroids_bytes + TABLE.itemsize * n_clusters,
    }
    memory = {
        "codebook_bytes": book_bytes + 8 * (code_bytes + 1),
        "entries_bytes": entries * (8 + code_bytes),
        "codes_bytes": 0,
        "clusters_bytes": centroids_bytes,
    }
    options = GraphOptions(max_degree=layout.max_degree, use_opq=use_opq)
    room = room_of(n, n_clusters, replicas)
    needed_bytes = build_bytes(layout, options, n_clusters, room)
    build = {"whole_bytes": needed_bytes, "least_bytes": needed_bytes}
    return GraphPlan(
        layout.page_bytes,
        layout.nodes_per_page,
        code_bytes,
        _with_total(disk),
        _with_total(memory),
        build,
        shorter_codes_hint(layout),
    )


def _with_total(sizes: dict[str, int]) -> dict[str, int]:
    return sizes | {"total_bytes": sum(sizes.values())}
