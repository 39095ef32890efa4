"""Open lists: nearest neighbours, with what they cost."""

from __future__ import annotations

import os
from typing import Any

from ..suggestions import suggests_keywords
from .facts import ClusterFacts
from .found import ListNeighbours


class ClusterIndex:
    """Lists that `espnx.clusters.build` has made, open for searches. Every method may be called
    from any thread.

    Attributes:
        facts: what the directory says.

    Args:
        path: the directory.
        device: that keeps the lists and measures their vectors: None, this machine's SSD; a name,
            as of `espnx.device.open` (``emulated:smartssd``); a `NearStorageDevice`; or a
            `ClusterDevice` of this directory, which stays the caller's.
        heads: ``memory`` or ``graph``, as the lists were built with; None: that.
        engine: path of the reads: ``auto``, ``uring``, ``posix`` or ``memory``.
        threads: that measure vectors and search heads; None: as many as torch uses.
        in_flight: queries whose lists are read at a time.

    Raises:
        StoreNotFoundError, FormatError, ChecksumError, TruncatedFileError, FileMissingError: no
            lists, or damaged ones.
        InvalidInputError: heads that the lists were not built with; a device of other clusters.
        PathUnavailableError: the named path cannot be had here.
    """

    @suggests_keywords
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: Any = None,
        heads: str | None = None,
        engine: str = "auto",
        threads: int | None = None,
        in_flight: int = 32,
    ):
        raise NotImplementedError

    @property
    def facts(self) -> ClusterFacts:
        """What its files say."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.facts.n

    @suggests_keywords
    def search(
        self,
        queries: Any,
        k: int = 10,
        *,
        n_lists: int = 32,
        max_dist_ratio: float | None = None,
        include: Any = None,
        exclude: Any = None,
        deadline_s: float = 30.0,
    ) -> ListNeighbours:
        """The k nearest vectors of each query among those of its nearest lists. All lists of a
        query are one request.

        Args:
            queries: [q, dim] or [dim], array or tensor; whole numbers for lists of such, else what
                float32 holds.
            k: results of each, 1 or more.
            n_lists: that are read for a query (nprobe), at most: those of the nearest heads.
            max_dist_ratio: 1 or more: of these only lists whose head is at most so many times as
                far from the query as the nearest head, by squared distance (query-aware pruning,
                SPANN section 3.3, SPTAG's MaxDistRatio). None: all.
            include, exclude: rows that alone may be found, or may not: bool [n], or numbers in any
                collection. More lists are read, twice as many each time, until a query has k.
            deadline_s: of each read.

        Raises:
            InvalidInputError: shapes, dtypes, values that are not finite, numbers out of range.
            ReadError, ChecksumError, TruncatedFileError, DeadlineExceededError, EngineClosedError:
                no result is returned, and the index can be searched again.
        """
        raise NotImplementedError

    def verify(self) -> int:
        """Reads and checks every list: how many there are. Raises ChecksumError, FormatError,
        ReadError for the first that is damaged."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends searches that are under way. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> ClusterIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
