"""What a search of lists has found."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..graph.neighbours import Neighbours


def _none() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class ListNeighbours(Neighbours):
    """What a search of q queries found, as `espnx.graph.Neighbours` has it, and what it read.

    Here `pages` are those of `page_bytes` (NAND pages) that a query's lists lie on, each counted
    once a query, and `measured` counts a vector as often as the lists of a query hold it.
    `code_pages` are 0, and `clusters` is None: see `lists`.

    Attributes:
        lists: int64 [q]: that were read.
        requests: int64 [q]: reads that the storage queue was sent, after merging.
        bytes_moved: int64 [q]: across that queue, whole blocks of 4096 bytes. Of a device that
            measures by itself these stay on it.
        rounds: int64 [q]: of reads, each of which waited for the one before: 1 where heads are in
            memory and no filter asks for more.
        head_pages: int64 [q]: 4096 bytes each, that were read to find the heads, where these are a
            graph on storage.
    """

    lists: np.ndarray = field(default_factory=_none)
    requests: np.ndarray = field(default_factory=_none)
    bytes_moved: np.ndarray = field(default_factory=_none)
    rounds: np.ndarray = field(default_factory=_none)
    head_pages: np.ndarray = field(default_factory=_none)

    def __repr__(self) -> str:
        q, k = self.ids.shape
        pages, lists = (each.mean() if q else 0.0 for each in (self.pages, self.lists))
        return (
            f"<ListNeighbours: {q} queries, k {k}, {lists:.1f} lists on {pages:.1f} pages a query>"
        )
