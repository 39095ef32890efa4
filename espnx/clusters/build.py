"""Builds lists of vectors on storage: heads, closure, packing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..checks import check_path
from ..device.clusters.write import ClusterStore, writing_clusters
from ..graph.bounded.budget import available_bytes
from ..graph.vectors import Vectors, read_vectors
from ..ops.quantise import load_faiss
from ..sizes import format_size, parse_size
from ..storage import NativeEngine
from ..storage.files import StreamWriter, write_file
from ..suggestions import suggests_keywords
from .coding import ListCoding
from .facts import GRAPH_NAME, HEADS_NAME, LINKS_NAME, info
from .making import (
    LEAST_MEMORY_BYTES,
    ListBuild,
    MadeLists,
    check_memory,
    faiss_threads,
    no_progress,
)
from .options import ClusterOptions, check_options

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
        """Three lines."""
        share = self.folder_bytes / self.vectors_bytes if self.vectors_bytes else 0.0
        copies = self.entries / self.n if self.n else 0.0
        return (
            f"{self.n:,} vectors of {self.dim} dimensions as {self.format}: "
            f"{format_size(self.folder_bytes)} on storage ({share:.2f}x the float32 vectors), "
            f"{format_size(self.memory_bytes)} in memory\n"
            f"{self.n_lists:,} lists of {self.list_vectors[0]} to {self.list_vectors[1]} vectors, "
            f"each vector in {copies:.2f}, on {self.pages:,} pages of "
            f"{format_size(self.page_bytes)}; {self.split:,} lists were split\n"
            f"{self.heads_s:.1f} s heads, {self.closure_s:.1f} s closure, {self.lists_s:.1f} s "
            f"lists{f' in {self.parts} passes' if self.parts > 1 else ''}, {self.packing_s:.1f} s "
            "packing"
        )


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
            block, several times.
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
            `espnx.graph` of the heads beside the lists, whose memory does not grow with them (the
            build holds all heads in memory).
        memory: that the build may take beside what the process has, as ``"2GiB"`` or in bytes, 64
            MiB or more; None: half of what is free.
        threads: of the build; None: as many as torch uses.
        seed: of samples and clustering, below 2^31.
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
    options = ClusterOptions(
        metric,
        n_lists,
        heads_share,
        list_bytes,
        page_bytes,
        replicas,
        packing,
        vector_dtype,
        heads,
        torch.get_num_threads() if threads is None else threads,
        seed,
    )
    load_faiss()
    source, where = read_vectors(vectors, column=column), check_path("directory of lists", path)
    format, is_rounded = check_options(options, source)  # noqa: A001
    budget_bytes = _budget(memory, source, options)
    coding = ListCoding(format, source.dim, metric, step=1.0 if is_rounded else 0.0)
    told = progress or no_progress
    with (
        faiss_threads(options.threads),
        writing_clusters(where, replace=replace, engine=engine) as store,
    ):
        made = ListBuild(store, source, coding, options, budget_bytes, told).run(queries)
        _publish(store, made)
        told("packing", source.n, source.n)
        return _report(store, made)


def _budget(memory: int | str | None, source: Vectors, options: ClusterOptions) -> int:
    """Bytes that a build may take. Raises InvalidInputError for fewer than heads take."""
    if memory is None:
        free = available_bytes()
        budget_bytes = max(LEAST_MEMORY_BYTES, (1 << 32) if free is None else free // 2)
    else:
        budget_bytes = parse_size(memory)
    check_memory(options, source.n, source.dim, budget_bytes)
    return budget_bytes


def _publish(store: ClusterStore, made: MadeLists) -> None:
    """Writes what was made into its directory."""
    table, page_bytes = made.table(), made.options.page_bytes
    data_bytes = store.write(table, page_bytes, made.entries())
    write_file(store.engine, store.path(HEADS_NAME), made.heads_data)
    graph: dict[str, Any] = {}
    if made.options.heads == "memory":
        write_file(store.engine, store.path(LINKS_NAME), made.links_data)
    elif len(made.heads):
        with StreamWriter(store.engine, store.path(GRAPH_NAME)) as writer:
            for piece in made.head_graph(graph):
                writer.write(piece)
            writer.sync()
    made.remove_work()
    facts = made.facts(graph or None)
    coding = made.coding
    store.publish(coding.format, coding.dim, page_bytes, table, data_bytes, facts)


def _report(store: ClusterStore, made: MadeLists) -> ClusterReport:
    facts, gathered = info(store.directory), made.gathered
    heads_s, closure_s, lists_s, packing_s = np.diff([*made.times, time.perf_counter()]).tolist()
    return ClusterReport(
        facts.where,
        facts.n,
        facts.dim,
        facts.format,
        facts.n_lists,
        facts.entries,
        (facts.list_vectors[0], facts.list_vectors[2]),
        gathered.n_split,
        facts.page_bytes,
        facts.pages,
        facts.used_bytes,
        facts.folder_bytes,
        4 * facts.n * facts.dim,
        facts.memory_bytes,
        heads_s,
        closure_s,
        lists_s,
        packing_s,
        gathered.passes,
    )
