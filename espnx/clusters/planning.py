"""What lists will take on SSD and in memory, before there are some. Sizes are computed; nothing is
measured."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Sizes of lists of n vectors of `dim` values. Options are those of `espnx.clusters.build`.

    Args:
        copies: lists that a vector is in, mean.
        probed: lists of a query.

    Raises InvalidInputError.
    """
    raise NotImplementedError
