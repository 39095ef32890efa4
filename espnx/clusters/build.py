"""Builds lists of vectors on storage: heads, closure, packing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import errors
from ..checks import check_path
from ..device.clusters.layout import TABLE
from ..device.clusters.write import ClusterStore, writing_clusters
from ..graph.bounded.budget import available_bytes
from ..graph.build import make_graph
from ..graph.format import section_of
from ..graph.hnsw.write import links_of
from ..graph.options import GraphOptions
from ..graph.vectors import Vectors, read_vectors
from ..graph.write import graph_files
from ..ops.quantise import load_faiss
from ..sizes import format_size, parse_size
from ..storage import NativeEngine
from ..storage.files import StreamWriter, write_file
from ..suggestions import suggests_keywords
from .closure import FLAT_HEADS_MAX, hnsw_index
from .coding import ListCoding, checked_blocks, step_of
from .facts import GRAPH_NAME, HEADS_NAME, LINKS_NAME, info
from .gather import CLOSURE_WORK, LISTS_WORK, Assigned, Gathered, assign, gather
from .heads import choose_heads, flat_index
from .options import ClusterOptions, check_options
from .packing import LISTS_OF_QUERY, best_fit, co_access, gains_of, in_order

Progress = Callable[[str, int, int], None]

#: Of the memory of a build: for the sample that heads are chosen from (with FAISS's copy of it),
#: and for entries that are gathered at a time.
_SAMPLE_SHARE, _GATHER_SHARE = 0.25, 0.4
_LEAST_MEMORY_BYTES = 64 << 20


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
    faiss = load_faiss()
    source, where = read_vectors(vectors, column=column), check_path("directory of lists", path)
    format, is_rounded = check_options(options, source)  # noqa: A001
    budget_bytes = _budget(memory, source, options)
    coding = ListCoding(format, source.dim, metric, step=1.0 if is_rounded else 0.0)
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(options.threads)
    try:
        with writing_clusters(where, replace=replace, engine=engine) as store:
            job = _Build(store, source, coding, options, budget_bytes, progress or _no_progress)
            return job.run(queries)
    finally:
        faiss.omp_set_num_threads(before)


def _no_progress(what: str, done: int, total: int) -> None:
    pass


def _budget(memory: int | str | None, source: Vectors, options: ClusterOptions) -> int:
    """Bytes that a build may take. Raises InvalidInputError for fewer than heads take."""
    if memory is None:
        free = available_bytes()
        budget_bytes = max(_LEAST_MEMORY_BYTES, (1 << 32) if free is None else free // 2)
    else:
        budget_bytes = parse_size(memory)
    # as chosen, as split, and of the sample one for each, with FAISS's copies; and their links
    head_bytes = 4 * (source.dim + 1) * 6 + 300
    least = max(_LEAST_MEMORY_BYTES, options.heads_of(source.n) * head_bytes)
    if budget_bytes < least:
        raise errors.InvalidInputError(
            "memory of a build of lists",
            got=format_size(budget_bytes),
            expected=f"{format_size(least)} or more, for the heads",
            fix=f'memory="{format_size(least)}", or fewer heads (heads_share=, n_lists=)',
        )
    return budget_bytes


class _Build:
    """One build: its parts, in order."""

    def __init__(
        self,
        store: ClusterStore,
        source: Vectors,
        coding: ListCoding,
        options: ClusterOptions,
        budget_bytes: int,
        progress: Progress,
    ):
        self._store, self._source, self._coding = store, source, coding
        self._options, self._budget_bytes, self._progress = options, budget_bytes, progress
        self._times = [time.perf_counter()]

    def run(self, queries: Any) -> ClusterReport:
        options, source = self._options, self._source
        sample = self._look_through()
        asked = None if queries is None else self._coding.queries(queries).wide
        heads = np.empty((0, self._coding.head_dim), np.float32)
        if source.n:
            heads = choose_heads(sample, options.heads_of(source.n), options.seed)
        del sample
        self._lap("heads")
        if source.n:
            assigned = assign(
                self._store, source, self._coding, heads, options.replicas, self._progress
            )
        self._lap("closure")
        gathered = self._gathered(assigned, heads) if source.n else Gathered("", self._coding.entry)
        self._lap("lists")
        heads = np.array(gathered.heads, np.float32).reshape(-1, self._coding.head_dim)
        self._publish(gathered, heads, asked)
        self._lap("packing")
        return self._report(gathered)

    def _lap(self, what: str) -> None:
        self._times.append(time.perf_counter())
        self._progress(what, self._source.n, self._source.n)

    def _look_through(self) -> np.ndarray:
        """One pass: refuses what cannot be stored, and completes the coding. Returns a sample of
        vectors in the space of heads, as many as memory takes."""
        source, coding = self._source, self._coding
        room = int(self._budget_bytes * _SAMPLE_SHARE) // (8 * coding.head_dim)
        count = min(source.n, max(room, self._options.heads_of(source.n)))
        rng = np.random.default_rng(self._options.seed)
        chosen = (
            np.arange(source.n)
            if count == source.n
            else np.sort(rng.choice(source.n, count, replace=False))
        )
        sample = np.empty((count, source.dim), np.float32)
        least = np.full(source.dim, np.inf, np.float32)
        most, most_squares = -least, 0.0
        for first, rows in checked_blocks(source, coding):
            begin, end = np.searchsorted(chosen, [first, first + len(rows)])
            sample[begin:end] = rows[chosen[begin:end] - first]
            if coding.metric == "ip" and len(rows):
                squares = np.square(rows.astype(np.float32)).sum(axis=1)
                most_squares = max(most_squares, float(squares.max()))
            if coding.step and len(rows):
                least, most = (
                    np.minimum(least, rows.min(axis=0)),
                    np.maximum(most, rows.max(axis=0)),
                )
            self._progress("read", first + len(rows), source.n)
        step, centre = 0.0, None
        if coding.step:
            middle = sample.mean(axis=0, dtype=np.float64) if count else np.zeros(source.dim)
            centre = middle.astype(np.float32)
            largest = np.maximum(most - centre, centre - least) if count else least[:0]
            step = step_of(sample, largest, centre)
        self._coding = ListCoding(
            coding.format, coding.dim, coding.metric, most_squares, step, centre
        )
        return self._coding.wide(sample)

    def _gathered(self, assigned: Assigned, heads: np.ndarray) -> Gathered:
        return gather(
            self._store,
            self._source,
            self._coding,
            assigned,
            heads,
            list_bytes=self._options.list_bytes,
            seed=self._options.seed,
            budget_bytes=int(self._budget_bytes * _GATHER_SHARE),
            progress=self._progress,
        )

    def _publish(self, gathered: Gathered, heads: np.ndarray, asked: np.ndarray | None) -> None:
        options, store = self._options, self._store
        index = (
            hnsw_index(heads) if options.heads == "memory" or len(heads) > FLAT_HEADS_MAX else None
        )
        nearest = flat_index(heads) if len(heads) <= FLAT_HEADS_MAX else index
        begin = self._places(gathered, heads, nearest, asked)
        table = np.zeros(len(heads), TABLE)
        table["offset_bytes"], table["n_vectors"] = begin, gathered.n_vectors
        self._progress("packing", 0, len(heads))
        lists = gathered.reader(store, np.argsort(begin, kind="stable"))
        data_bytes = store.write(table, options.page_bytes, lambda number: next(lists))
        facts: dict[str, Any] = {
            "n": self._source.n,
            "metric": options.metric,
            "list_bytes": options.list_bytes,
            "replicas": options.replicas,
            "packing": options.packing,
            "seed": options.seed,
            "heads": options.heads,
            "step": self._coding.step,
            "most_squares": self._coding.most_squares,
        }
        centre = self._coding.centre
        values = heads if options.heads == "memory" else heads[:0]
        tail = b"" if centre is None else centre.astype("<f4").tobytes()
        data = values.astype("<f4").tobytes() + tail
        _, facts["heads_crc32c"] = write_file(store.engine, store.path(HEADS_NAME), data)
        if options.heads == "memory":
            links = links_of(index)
            _, links_crc32c = write_file(store.engine, store.path(LINKS_NAME), links.to_bytes())
            facts["links"] = {
                "m": links.m,
                "n_upper": len(links.upper),
                "entry": links.entry,
                "crc32c": links_crc32c,
            }
        elif len(heads):
            facts["graph"] = self._write_graph(heads)
        for name in (CLOSURE_WORK, LISTS_WORK):
            store.remove(name)
        coding = self._coding
        store.publish(coding.format, coding.dim, options.page_bytes, table, data_bytes, facts)

    def _places(
        self, gathered: Gathered, heads: np.ndarray, nearest: Any, asked: np.ndarray | None
    ) -> np.ndarray:
        size_bytes, page_bytes = gathered.size_bytes, self._options.page_bytes
        if self._options.packing == "order" or not len(heads):
            return in_order(size_bytes, page_bytes)
        if self._options.packing == "best-fit":
            return best_fit(size_bytes, page_bytes)
        read = None
        if asked is not None and len(asked):
            read = nearest.search(asked, min(len(heads), LISTS_OF_QUERY))[1]
        return co_access(size_bytes, gains_of(heads, nearest, read), page_bytes)

    def _write_graph(self, heads: np.ndarray) -> dict[str, Any]:
        """Writes the graph of the heads. Returns what the manifest says of it."""
        store = self._store
        options = GraphOptions(
            vector_dtype="float16" if np.abs(heads).max(initial=0) < 60_000 else "float32",
            threads=self._options.threads,
            seed=self._options.seed,
        )
        path = store.path(GRAPH_NAME)
        graph, row_of = make_graph(heads, path, options)
        files = graph_files(graph, row_of, path, _no_progress)
        regions = {}
        with StreamWriter(store.engine, path) as writer:
            for name, pieces in files.contents.items():
                writer.pad(4096)
                begin = writer.size_bytes
                for piece in pieces:
                    writer.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
                regions[section_of(name)] = [begin, writer.size_bytes - begin]
            writer.pad(4096)
            writer.sync()
            size_bytes = writer.size_bytes
        return {"size_bytes": size_bytes, "regions": regions, "manifest": files.facts.manifest()}

    def _report(self, gathered: Gathered) -> ClusterReport:
        facts = info(self._store.directory)
        heads_s, closure_s, lists_s, packing_s = np.diff(self._times).tolist()
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
