"""Builds lists of vectors on storage: heads, closure, packing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..storage import NativeEngine
from ..suggestions import suggests_keywords

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ClusterReport:
    """What a build did. Sizes in bytes, times in seconds.

    Attributes:
        n, dim: vectors, and values of each. format: that they are stored in.
        n_lists: lists that were written. entries: vectors in all of them, copies included.
        list_vectors: of the smallest and of the largest list.
        split: lists that were more than `list_bytes` and became several.
        page_bytes, pages: of the file of lists. used_bytes: of its entries.
        folder_bytes: of all files. vectors_bytes: of the vectors as float32, for comparison.
        memory_bytes: that an open index keeps, whatever it searches.
        parts: passes over the vectors in which the lists were gathered.
    """

    path: str
    n: int
    dim: int
    format: str
    n_lists: int
    entries: int
    list_vectors: tuple[int, int]
    split: int
    page_bytes: int
    pages: int
    used_bytes: int
    folder_bytes: int
    vectors_bytes: int
    memory_bytes: int
    heads_s: float
    closure_s: float
    lists_s: float
    packing_s: float
    parts: int = 1

    def summary(self) -> str:
        """Two or three lines."""
        raise NotImplementedError


@suggests_keywords
def build(
    vectors: Any,
    path: str | os.PathLike[str],
    *,
    metric: str = "l2",
    n_lists: int | None = None,
    heads_share: float = 0.125,
    list_bytes: int = 12288,
    page_bytes: int = 4096,
    replicas: int = 8,
    packing: str = "co-access",
    queries: Any = None,
    vector_dtype: str = "auto",
    heads: str = "memory",
    memory: int | str | None = None,
    threads: int | None = None,
    seed: int = 0,
    column: str | None = None,
    replace: bool = False,
    progress: Progress | None = None,
    engine: NativeEngine | None = None,
) -> ClusterReport:
    """Builds lists of vectors in a directory; it holds them whole when this returns, or none.

    SPANN (Chen et al., arXiv 2111.08566): heads by hierarchical balanced clustering (section
    3.2.1), each vector in the lists of up to `replicas` near heads that the RNG rule leaves
    (3.2.2).

    Args:
        vectors: an array or tensor [n, dim], or a file, as of `espnx.graph.build`; read block by
            block.
        path: of the directory: a new or empty one.
        metric: ``l2``, ``ip`` or ``cosine``.
        n_lists: heads to begin with; None: `heads_share` of the vectors.
        heads_share: see `n_lists`; above 0, at most 1.
        list_bytes: of a list, at most: one that would be larger is split.
        page_bytes: of a NAND page, 4096 to 65536, a power of two: a list that fits one never
            straddles two, and several small ones may share one.
        replicas: lists that a vector is in, at most: 1 to 8.
        packing: which lists share a page: ``order``, those of successive numbers; ``best-fit``,
            those that fill it best; ``co-access``, those that are read together: near heads, and
            where there are `queries` the lists that these read.
        queries: [m, dim], a sample of those that will be asked, for ``co-access``.
        vector_dtype: ``float32``, ``float16``, ``uint8`` or ``int8``; ``auto``: as they come where
            they are whole numbers, else float16. ``int8`` of other vectors: each value as one of
            255 steps (scalar quantisation): half the pages, and distances of that precision.
        heads: what finds a query's lists: ``memory``, a FAISS HNSW in memory; ``graph``, an
            `espnx.graph` of the heads beside the lists, whose memory does not grow with them.
        memory: that the build may take beside the process, as ``"2GiB"`` or in bytes; None: half of
            what is free.
        threads: of the build; None: as many as torch uses.
        seed: of samples and clustering.
        column: of a Parquet file.
        replace: lists that are there, which stay as they are until the new ones are whole.
        progress: called now and then with (what, done, total), from this thread; an exception that
            it raises ends the build.
        engine: of the writes.

    Raises:
        InvalidInputError: an option, a shape, a value that is not finite; a directory with
            something else than lists that may be replaced; memory below what heads take.
        MissingDependencyError: FAISS is not installed.
        WriteError, DiskFullError, StoreBusyError: the directory cannot be written, is full, or
            somebody else builds there.
        FileMissingError, FormatError, TruncatedFileError: see `espnx.graph.vectors.read_vectors`.
    """
    raise NotImplementedError
