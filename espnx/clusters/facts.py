"""What a directory of lists says of itself."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class ClusterFacts:
    """Attributes:
    where: the directory.
    n, dim, format, metric: of the vectors.
    n_lists: heads, and lists. entries: vectors in all lists, copies included.
    list_vectors: of the smallest, the middle and the largest list.
    list_bytes: of a list, at most.
    page_bytes, pages: of the file of lists. used_bytes: of its entries.
    packing: that it was written with.
    heads: ``memory`` or ``graph``.
    folder_bytes: of all files. memory_bytes: that an open index keeps.
    """

    where: str
    n: int
    dim: int
    format: str
    metric: str
    n_lists: int
    entries: int
    list_vectors: tuple[int, int, int]
    list_bytes: int
    page_bytes: int
    pages: int
    used_bytes: int
    packing: str
    heads: str
    folder_bytes: int
    memory_bytes: int

    def summary(self) -> str:
        """A few lines."""
        raise NotImplementedError


def info(path: str | os.PathLike[str]) -> ClusterFacts:
    """What a directory of lists is, without reading a list. Raises as `ClusterIndex`."""
    raise NotImplementedError
