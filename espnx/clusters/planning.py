"""What lists will take on SSD and in memory, before there are some. Sizes are computed; nothing is
measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..checks import check_finite, check_whole
from ..device.clusters.layout import TABLE, entry_bytes
from ..errors import InvalidInputError
from ..graph.planning import plan_graph
from ..graph.vectors import Vectors
from .closure import HNSW_M
from .options import DTYPES, N_MAX, REPLICAS_MAX, ClusterOptions, check_options

#: Of a list that was split this much is used, about; and of pages, where lists are at most half as
#: long as one, and where they are longer.
_FILLED = 0.8
_SMALL_PACKED, _LARGE_PACKED = 0.95, 0.85
#: Of a list in memory beside the table: links of its head in the lowest layer, and above.
_LINK_BYTES = 1 + 8 + 4 * 2 * HNSW_M + 4


@dataclass(frozen=True)
class ClusterPlan:
    """Sizes in bytes.

    Attributes:
        n_lists: expected, those that are split included. entries: vectors in all lists.
        pages_per_query: NAND pages that `probed` lists lie on, at most: lists that share one are
            read together.
        probed: lists of a query.
        disk: ``lists_bytes``, ``table_bytes``, ``heads_bytes`` and ``total_bytes``.
        memory: of the open index: ``table_bytes``, ``heads_bytes``, ``total_bytes``.
    """

    n_lists: int
    entries: int
    pages_per_query: float
    probed: int
    disk: dict[str, int]
    memory: dict[str, int]


def plan(
    n: int,
    dim: int,
    *,
    vector_dtype: str = "float16",
    heads_share: float = 0.125,
    n_lists: int | None = None,
    list_bytes: int = 12288,
    page_bytes: int = 4096,
    copies: float = 4.0,
    probed: int = 32,
    heads: str = "memory",
) -> ClusterPlan:
    """Sizes of lists of n vectors of `dim` values by ``l2``. Options are those of
    `espnx.clusters.build`.

    Args:
        copies: lists that a vector is in, mean, 1 to 8: about 1.2 where vectors lie in separate
            groups, 3 to 4 where they do not.
        probed: lists of a query.

    Raises InvalidInputError.
    """
    check_whole("vectors of a plan", n, 1, N_MAX)
    check_whole("dim of a plan", dim, 1)
    check_finite("copies", copies)
    check_whole("probed, lists of a query", probed, 1, N_MAX)
    if not 1 <= copies <= REPLICAS_MAX:
        raise InvalidInputError("copies of a plan", got=copies, expected=f"1 to {REPLICAS_MAX}")
    if vector_dtype not in DTYPES:
        raise InvalidInputError(
            "vector_dtype of a plan", got=repr(vector_dtype), expected=", ".join(DTYPES)
        )
    options = ClusterOptions(
        n_lists=n_lists,
        heads_share=heads_share,
        list_bytes=list_bytes,
        page_bytes=page_bytes,
        vector_dtype=vector_dtype,
        heads=heads,
    )
    dtype = np.dtype(vector_dtype)
    check_options(options, Vectors(n, dim, dtype, lambda: iter(()), "a plan"))
    entry = entry_bytes(DTYPES[vector_dtype], dim)
    entries = math.ceil(n * copies)
    least = math.ceil(entries / (max(1, list_bytes // entry) * _FILLED))
    count = max(options.heads_of(n), least)
    mean_bytes = entries * entry / count
    pages_each = math.ceil(mean_bytes / page_bytes)
    packed = _SMALL_PACKED if 2 * mean_bytes <= page_bytes else _LARGE_PACKED
    lists_bytes = math.ceil(entries * entry / packed / page_bytes) * page_bytes
    table_bytes, head_bytes = TABLE.itemsize * count, 4 * dim * count
    if heads == "memory":
        on_disk, resident = head_bytes + _LINK_BYTES * count, head_bytes + _LINK_BYTES * count
    else:
        graph = plan_graph(count, dim)
        on_disk, resident = graph.disk["total_bytes"], graph.memory["total_bytes"]
    return ClusterPlan(
        count,
        entries,
        float(min(probed, count) * pages_each),
        probed,
        {
            "lists_bytes": lists_bytes,
            "table_bytes": table_bytes,
            "heads_bytes": on_disk,
            "total_bytes": lists_bytes + table_bytes + on_disk,
        },
        {
            "table_bytes": table_bytes + 4 * count,
            "heads_bytes": resident,
            "total_bytes": table_bytes + 4 * count + resident,
        },
    )
