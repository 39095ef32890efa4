"""Builds a graph on storage from vectors: codes, edges, pages."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import errors
from ..checks import check_path
from ..sizes import format_size, parse_size
from ..storage import NativeEngine
from ..storage.manifest import NAME
from ..storage.native import given_engine
from ..suggestions import suggests_keywords
from .bounded import Seconds, build_bounded
from .bounded.budget import available_bytes, fit_bytes, member_bytes, plan_parts, resident_bytes
from .codes.codebook import Codebook, train_codebook
from .edges import build_edges, check_device
from .format import N_MAX, ROWS_MAX, GraphFacts, GraphShare
from .global_index.builder import build_bytes, build_clustered, check_clusters, plan_clusters
from .global_index.places import check_directories
from .layout import PageLayout, choose_layout, shorter_codes_hint
from .options import GraphOptions, check_options, measured_rows, stored_rows
from .recall import add_recall, row_blocks
from .vectors import Vectors, read_vectors
from .write import Progress, WholeGraph, connect_and_choose_entries, write_graph, writing_graph

if TYPE_CHECKING:
    from .._C import Vamana

_BLOCK_ROWS = 16_384
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphReport:
    """What a build did. Sizes in bytes, times in seconds.

    Attributes:
        repaired: nodes that no walk from the entry point came to, which were given edges.
        folder_bytes: of all files. vectors_bytes: of the vectors as float32, for comparison.
        memory_bytes: that an open graph keeps, whatever it searches.
        parts: in which it was built.
        recall_ceiling: where nodes have codes in place of vectors: recall@10 of a search that
            measures all of them.
        hint: where `pq_bytes` a little smaller would make pages much smaller, or nodes share one:
            which.
        clusters: that have a graph each; None: there is one graph. cluster_points: of these
            vectors of the smallest and of the largest.
    """

    path: str
    n: int
    dim: int
    format: str
    page_bytes: int
    nodes_per_page: int
    pq_bytes: int
    repaired: int
    folder_bytes: int
    vectors_bytes: int
    memory_bytes: int
    read_s: float
    codes_s: float
    edges_s: float
    pages_s: float
    recall_s: float
    parts: int = 1
    recall_ceiling: float | None = None
    hint: str | None = None
    clusters: int | None = None
    cluster_points: tuple[int, int] | None = None

    def summary(self) -> str:
        """Two to four lines."""
        share = self.folder_bytes / self.vectors_bytes if self.vectors_bytes else 0.0
        return (
            (
                f"{self.n:,} vectors of {self.dim} dimensions as {self.format}: "
                f"{format_size(self.folder_bytes)} on storage ({share:.2f}x the float32 vectors), "
                f"{format_size(self.memory_bytes)} in memory; {self.nodes_per_page} nodes to a "
                f"page of {format_size(self.page_bytes)}, codes of {self.pq_bytes} bytes\n"
                f"{self.edges_s:.1f} s edges, {self.codes_s:.1f} s codes, {self.pages_s:.1f} s "
                f"pages, {self.read_s:.1f} s reading, {self.recall_s:.1f} s measuring "
                f"recall{f'; built in {self.parts} parts' if self.parts > 1 else ''}"
            )
            + (
                ""
                if self.cluster_points is None
                else f"\n{self.clusters} clusters of {self.cluster_points[0]:,} to "
                f"{self.cluster_points[1]:,} vectors"
            )
            + (
                ""
                if self.recall_ceiling is None
                else f"\nrecall@10 of these codes, all of them measured: {self.recall_ceiling:.3f}"
            )
            + ("" if self.hint is None else f"\nhint: {self.hint}")
        )


@suggests_keywords
def build(
    vectors: Any,
    path: str | os.PathLike[str],
    *,
    metric: str = "l2",
    max_degree: int = 64,
    list_size: int = 100,
    alpha: float = 1.2,
    codes: str = "inline",
    inline_pq: int | None = None,
    pq_bytes: int | None = None,
    vector_dtype: str = "auto",
    disk_pq_bytes: int | None = None,
    use_opq: bool = True,
    num_entry_points: int = 1000,
    threads: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    column: str | None = None,
    memory: int | str | None = None,
    clusters: int | None = None,
    max_points: int | None = None,
    replicas: float = 0.0,
    directories: Sequence[str | os.PathLike[str]] | None = None,
    replace: bool = False,
    share: GraphShare | None = None,
    progress: Progress | None = None,
    engine: NativeEngine | None = None,
) -> GraphReport:
    """Builds a graph of vectors in a directory, which is a whole graph when this returns, or none:
    but for recall by list size, which is measured last. A graph whose build was interrupted then is
    searched with a list of 320.

    The graph is a Vamana graph (DiskANN, section 2). Without `memory` all of it is built in memory.
    With it, vectors are divided among parts that overlap, whose graphs are built one after the
    other and merged (section 4.2). Such a build goes on where it was interrupted; files in the
    folder ``work`` of the directory take about `2 * n * (dim * value bytes + 4 * max_degree)` bytes
    meanwhile.

    With `clusters` vectors are divided by k-means, and each cluster has a graph of its own in the
    directory (AiSAQ's global index, section 3); a search goes through those near its query. Such a
    build works cluster by cluster, goes on where it was interrupted, and writes about twice what it
    leaves.

    Args:
        vectors: see `espnx.graph.vectors.read_vectors`; row i of the input is vector i.
        path: a new directory, or an empty one, or one that an interrupted build has left.
        metric: ``l2``, ``ip`` (the largest inner product is nearest) or ``cosine``.
        max_degree: neighbours of a node, R; 1 to 1024.
        list_size: candidates of the walks that find neighbours, L.
        alpha: a neighbour is left out where another one is nearer to it by this factor; 1 to 4.
        codes: where the codes of product quantisation lie by which a walk chooses: ``inline``,
            beside each node its neighbours' (AiSAQ's performance mode: memory does not grow with
            n); ``paged``, in pages of their own that walks read, too (AiSAQ's scale mode: the
            smallest folder without memory that grows, and many more reads); ``memory`` (DiskANN's:
            n * pq_bytes of memory, few reads).
        inline_pq: where codes are paged or in memory: neighbours whose codes lie in a node all the
            same; -1: as many as a page holds.
        pq_bytes: of a code; None: as many as fill the page, at most one a dimension.
        vector_dtype: ``float32``, ``float16``, ``bfloat16``, ``uint8`` or ``int8``; ``auto``: as
            they come where they are whole numbers, else float16. ``pq``: codes of `disk_pq_bytes`
            in their place, whose distances searches return, and which limit what they find:
            `GraphReport.recall_ceiling` says how much.
        disk_pq_bytes: of such a code (DiskANN's pq_disk_bytes), 1 to a byte a dimension.
        use_opq: codes are of rotated vectors (`espnx.graph.codes.rotation`) where a sample shows
            that these say more (`train_codebook`).
        num_entry_points: where searches may begin; they take the nearest by its code.
        threads: of the build; None: as many as torch uses. With one the same input gives the same
            graph.
        seed: of samples and of the order of insertion.
        device: that builds the edges and trains the codes: ``cpu``, or ``cuda`` (``cuda:1``), where
            cuVS does.
        column: of a Parquet file.
        memory: that this process may hold in all, as ``"2GiB"`` or in bytes. None: as much as the
            build takes.
        clusters: how many, at most; those that get no vector are left out. Codes are inline then,
            and vectors stored as such. None: one graph.
        max_points: vectors of a cluster, at most: those that find no room go to the next nearest
            that has some. None: twice as many as each would have if all had as many.
        replicas: the share of the vectors, 0 to 1, that are in two clusters: those for which the
            second is nearly as near as their own, and has room. A search goes through fewer
            clusters then; the directory becomes larger by that share.
        directories: other directories, one for each SSD, in which the clusters' pages lie, so that
            all have about as many; the rest stays in `path`. None: all is in `path`.
        replace: a graph that is there, which stays as it is until the new one is whole.
        share: of a collection whose graphs are searched together, by `PrivateGraphs`;
            `build_private` builds all of them.
        progress: called now and then, from this thread; an exception that it raises ends the build.
            engine: of the writes.

    Raises:
        InvalidInputError: an option, a shape, a value that is not finite, or that float16 does not
            hold; a directory with something else than a graph that may be replaced; a limit of
            memory below what the smallest part takes.
        OutOfMemoryError: no limit was given, and the build takes more than there is.
        MissingDependencyError, PathUnavailableError: no cuVS, or no GPU.
        WriteError, DiskFullError, StoreBusyError: the directory cannot be written, is full, or
            somebody else builds there.
        FileMissingError, FormatError, TruncatedFileError: see `espnx.graph.vectors.read_vectors`.
    """
    options = GraphOptions(
        metric,
        max_degree,
        list_size,
        alpha,
        codes,
        inline_pq,
        pq_bytes,
        vector_dtype,
        num_entry_points,
        torch.get_num_threads() if threads is None else threads,
        seed,
        device,
        disk_pq_bytes,
        use_opq,
    )
    source, path = read_vectors(vectors, column=column), check_path("directory of a graph", path)
    progress = progress or _no_progress
    homes = check_directories(path, directories)
    if clusters is None and max_points is None and not replicas and not homes:
        return _build(source, path, options, memory, progress, engine, replace, share)
    clusters = check_clusters(
        clusters,
        replicas,
        max_points,
        codes=options.codes,
        vector_dtype=options.vector_dtype,
        share=share,
    )
    return _build_clusters(
        source, path, options, memory, progress, engine, replace,
        clusters, max_points, float(replicas), homes,
    )  # fmt: skip


def _build(
    source: Vectors,
    path: str,
    options: GraphOptions,
    memory: int | str | None,
    progress: Progress,
    engine: NativeEngine | None,
    replace: bool,
    share: GraphShare | None,
) -> GraphReport:
    layout = _layout_of(options, source)
    check_device(options)
    if hint := shorter_codes_hint(layout):  # before hours are spent on it
        log.warning("%s: %s", path, hint)
    limit_bytes = None if memory is None or source.n == 0 else parse_size(memory)
    if limit_bytes is None:
        _check_memory(
            f"a build of {layout.n:,} vectors in memory",
            layout.n * member_bytes(layout, options) + fit_bytes(layout, options),
            'give it a limit, and it is built in parts: memory="{}"',
        )
    else:
        plan_parts(layout, options, limit_bytes, resident_bytes())  # before anything is written
    with (
        given_engine(engine) as own,
        writing_graph(own, path, replace=replace, keep_work=limit_bytes is not None) as generation,
    ):
        if limit_bytes is None:
            return _Builder(own, path, source, layout, options, progress).run(generation, share)
        built = build_bounded(
            own, path, source, layout, options, limit_bytes, progress, generation, share
        )
        return _report(built.facts, built.repaired, built.seconds, built.n_parts)


def _build_clusters(
    source: Vectors,
    path: str,
    options: GraphOptions,
    memory: int | str | None,
    progress: Progress,
    engine: NativeEngine | None,
    replace: bool,
    clusters: int,
    max_points: int | None,
    replicas: float,
    directories: Sequence[str],
) -> GraphReport:
    layout = _layout_of(options, source, ROWS_MAX)
    check_device(options)
    if source.n == 0:
        raise errors.InvalidInputError(
            "vectors to divide among clusters", got=0, expected="1 or more"
        )
    limit_bytes = None if memory is None else parse_size(memory)
    plan = plan_clusters(layout, options, clusters, max_points, replicas, limit_bytes)
    if limit_bytes is None:
        _check_memory(
            f"a build of clusters of up to {plan.max_points:,} vectors",
            build_bytes(layout, options, plan.n_clusters, plan.max_points),
            "more clusters, or a smaller max_points",
        )
    if hint := shorter_codes_hint(layout):
        log.warning("%s: %s", path, hint)
    with (
        given_engine(engine) as own,
        writing_graph(own, path, replace=replace, keep_work=True) as generation,
    ):
        built = build_clustered(
            own, path, source, layout, options, plan, progress, generation, directories
        )
    return _report(built.facts, built.repaired, built.seconds, clusters=built.facts.parts.nodes)


def _layout_of(options: GraphOptions, source: Vectors, n_max: int = N_MAX) -> PageLayout:
    """Raises InvalidInputError for options that are not of such vectors."""
    return choose_layout(
        source.n,
        source.dim,
        check_options(options, source, n_max),
        max_degree=options.max_degree,
        codes=options.codes,
        code_bytes=options.pq_bytes,
        inline_pq=options.inline_pq,
        disk_pq_bytes=options.disk_pq_bytes,
    )


def _check_memory(what: str, needed_bytes: int, fix: str) -> None:
    """Refuses what cannot be built in memory, before hours are spent on it. `fix`: may name a
    limit."""
    free = available_bytes()
    if free is not None and needed_bytes > free:
        raise errors.OutOfMemoryError(
            what, needed_bytes=needed_bytes, free_bytes=free, fix=fix.format(format_size(free // 2))
        )


def _report(
    facts: GraphFacts,
    repaired: int,
    seconds: Seconds,
    parts: int = 1,
    clusters: np.ndarray | None = None,
) -> GraphReport:
    layout = facts.layout
    folder_bytes = sum(facts.file_sizes.values()) + os.path.getsize(os.path.join(facts.where, NAME))
    return GraphReport(
        facts.where,
        layout.n,
        layout.dim,
        layout.format,
        layout.page_bytes,
        layout.nodes_per_page,
        layout.code_bytes,
        repaired,
        folder_bytes,
        4 * layout.n * layout.dim,
        facts.memory_bytes,
        *seconds,
        parts,
        facts.recall_ceiling,
        shorter_codes_hint(layout),
        None if clusters is None else len(clusters),
        None if clusters is None else (int(clusters.min()), int(clusters.max())),
    )


def make_graph(
    vectors: Any, where: str, options: GraphOptions, progress: Progress | None = None
) -> tuple[WholeGraph, np.ndarray]:
    """A graph in memory, for whoever writes it elsewhere than into a directory of its own.

    Args:
        vectors: as of `build`. where: for messages.

    Returns:
        The graph, and the row of each node, int64 [n], numbered page by page, as `graph_files`
        takes them.

    Raises as `build`.
    """
    source = read_vectors(vectors)
    layout = _layout_of(options, source)
    with given_engine(None) as engine:
        whole, row_of, _ = _Builder(
            engine, where, source, layout, options, progress or _no_progress
        ).graph()
    return whole, row_of


def _no_progress(what: str, done: int, total: int) -> None:
    pass


class _Builder:
    """One build: its parts, in order."""

    def __init__(
        self,
        engine: NativeEngine,
        path: str,
        source: Vectors,
        layout: PageLayout,
        options: GraphOptions,
        progress: Progress,
    ):
        self._engine, self._path, self._options, self._progress = engine, path, options, progress
        self._source, self._layout = source, layout
        self._times = [time.perf_counter()]

    def run(self, generation: int, share: GraphShare | None) -> GraphReport:
        whole, row_of, repaired = self.graph()
        facts = write_graph(
            self._engine, self._path, whole, row_of, self._progress, generation, share
        )
        self._lap()
        chosen = self._options
        facts = add_recall(
            self._engine,
            facts,
            lambda: row_blocks(whole.rows),
            threads=chosen.threads,
            seed=chosen.seed,
            progress=self._progress,
        )
        self._lap()
        read, codes, edges, pages, recall = np.diff(self._times).tolist()
        return _report(facts, repaired, (read, codes, edges, pages, recall))

    def graph(self) -> tuple[WholeGraph, np.ndarray, int]:
        """(the graph; the row of each node, numbered page by page; how many nodes were repaired)"""
        rows = self._read()
        self._lap()
        book = self._codebook(rows, self._layout.code_bytes)
        disk_book = (
            self._codebook(rows, self._layout.disk_pq_bytes)
            if self._layout.format == "pq"
            else None
        )
        row_codes = self._encode(book, rows)
        self._lap()
        graph, repaired, entries = self._edges(rows)
        self._lap()
        row_of = graph.pack(self._layout.nodes_per_page).numpy()
        neighbours, counts = (each.numpy() for each in graph.edges())
        del graph  # its edges have been copied
        chosen = self._options
        options = {
            name: value for name, value in vars(chosen).items() if name not in ("metric", "threads")
        }
        whole = WholeGraph(
            self._layout,
            chosen.metric,
            rows,
            row_codes,
            book,
            neighbours,
            counts,
            entries,
            options,
            disk_book,
        )
        return whole, row_of, repaired

    def _lap(self) -> None:
        self._times.append(time.perf_counter())

    def _codebook(self, rows: np.ndarray, code_bytes: int) -> Codebook:
        if len(rows):
            chosen = self._options
            return train_codebook(
                rows, code_bytes, use_opq=chosen.use_opq, seed=chosen.seed, device=chosen.device
            )
        begin = np.linspace(0, self._layout.dim, code_bytes + 1).round().astype(np.int64)
        return Codebook(begin, np.zeros((256, self._layout.dim), np.float32))

    def _read(self) -> np.ndarray:
        """The vectors as they will be stored, [n, dim], or what codes in their place will be of."""
        layout, name = self._layout, self._source.name
        rows = np.empty((layout.n, layout.dim), layout.row_dtype)
        done = 0
        for block in self._source.blocks():
            if done + len(block) > layout.n:
                raise errors.FormatError(
                    f"{name}", got="more vectors than it said", expected=layout.n
                )
            rows[done : done + len(block)] = stored_rows(
                block, done, self._options.metric, layout.format
            )
            done += len(block)
            self._progress("read", done, layout.n)
        if done != layout.n:
            raise errors.FormatError(f"{name}", got=f"{done} vectors", expected=layout.n)
        return rows

    def _encode(self, book: Codebook, rows: np.ndarray) -> np.ndarray:
        found = np.empty((len(rows), book.code_bytes), np.uint8)
        for first in range(0, len(rows), _BLOCK_ROWS):
            part = slice(first, first + _BLOCK_ROWS)
            found[part] = book.encode(rows[part])
            self._progress("codes", min(first + _BLOCK_ROWS, len(rows)), len(rows))
        return found

    def _edges(self, rows: np.ndarray) -> tuple[Vamana, int, np.ndarray]:
        """(the graph; how many nodes were repaired; rows of the entry points)"""
        options = self._options
        measured, format_name = measured_rows(rows, options.metric, self._layout.row_format)
        graph = build_edges(
            measured,
            format_name,
            options,
            options.seed,
            lambda done, total: self._progress("edges", done, total),
        )
        return graph, *connect_and_choose_entries(
            graph, len(rows), options.num_entry_points, options.seed
        )
