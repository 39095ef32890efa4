"""Builds a graph on storage from vectors: codes, edges, pages."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import errors
from ..checks import check_finite, check_whole
from ..ops._native import load_extension
from ..ops.distances import DIM_MAX, VECTOR_FORMATS, vector_bytes
from ..sizes import format_size
from ..storage import NativeEngine
from ..storage.files import make_given_directory
from ..storage.lock import DirectoryLock
from ..storage.manifest import NAME
from ..storage.native import given_engine
from .codebook import Codebook, train_codebook
from .format import METRICS, N_MAX
from .layout import CODES_IN, MAX_DEGREE_MAX, choose_layout
from .vectors import Vectors, read_vectors
from .write import Progress, WholeGraph, add_recall, clear_leftovers, connect_and_choose_entries, write_graph

if TYPE_CHECKING:
    from .._C import Vamana

_ALPHA_MAX = 4.0
_FP16_MAX = 65504.0
# Of a vector: the squared distance of two such is at most four times as large, and float32 still holds it.
_SQUARES_MAX = 2.0**125
_BLOCK_ROWS = 16_384


@dataclass(frozen=True)
class GraphReport:
    """What a build did. Sizes in bytes, times in seconds.

    Attributes:
        repaired: nodes that no walk from the entry point came to, which were given edges.
        folder_bytes: of all files. vectors_bytes: of the vectors as float32, for comparison.
        memory_bytes: that an open graph keeps, whatever it searches.
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

    def summary(self) -> str:
        """Two lines."""
        share = self.folder_bytes / self.vectors_bytes if self.vectors_bytes else 0.0
        return (
            f"{self.n:,} vectors of {self.dim} dimensions as {self.format}: {format_size(self.folder_bytes)} on storage ({share:.2f}x the"
            f" float32 vectors), {format_size(self.memory_bytes)} in memory; {self.nodes_per_page} nodes to a page of"
            f" {format_size(self.page_bytes)}, codes of {self.pq_bytes} bytes\n"
            f"{self.edges_s:.1f} s edges, {self.codes_s:.1f} s codes, {self.pages_s:.1f} s pages, {self.read_s:.1f} s reading,"
            f" {self.recall_s:.1f} s measuring recall"
        )


@dataclass(frozen=True)
class _Options:
    metric: str
    max_degree: int
    search_list_size: int
    alpha: float
    codes: str
    pq_bytes: int | None
    vector_dtype: str
    num_entry_points: int
    threads: int
    seed: int


def build(
    vectors: Any,
    path: str | os.PathLike[str],
    *,
    metric: str = "l2",
    max_degree: int = 64,
    search_list_size: int = 100,
    alpha: float = 1.2,
    codes: str = "inline",
    pq_bytes: int | None = None,
    vector_dtype: str = "auto",
    num_entry_points: int = 1000,
    threads: int | None = None,
    seed: int = 0,
    column: str | None = None,
    progress: Progress | None = None,
    engine: NativeEngine | None = None,
) -> GraphReport:
    """Builds a graph of vectors in a directory, which is a whole graph when this returns, or none.

    The graph is a Vamana graph (DiskANN, section 2). In memory are, while it is built, the vectors as they are stored and 1.3 times their
    neighbours' numbers: `n * (dim * value bytes + 5.2 * max_degree)` bytes.

    Args:
        vectors: see `espnx.graph.vectors.read_vectors`; row i of the input is vector i.
        path: a new directory, or an empty one, or one that an interrupted build has left.
        metric: ``l2``, ``ip`` (the largest inner product is nearest) or ``cosine``.
        max_degree: neighbours of a node, R; 1 to 1024.
        search_list_size: candidates of the walks that find neighbours, L.
        alpha: a neighbour is left out where another one is nearer to it by this factor; 1 to 4.
        codes: where the codes of product quantisation lie by which a walk chooses: ``inline``, beside each node its neighbours' (AiSAQ's
            performance mode: memory does not grow with n); ``paged``, in pages of their own that walks read, too (AiSAQ's scale mode: the
            smallest folder without memory that grows, and many more reads); ``memory`` (DiskANN's: n * pq_bytes of memory, few reads).
        pq_bytes: of a code; None: as many as fill the page, at most one a dimension.
        vector_dtype: ``float32``, ``float16``, ``uint8`` or ``int8``; ``auto``: as they come where they are whole numbers, else float16.
        num_entry_points: where searches may begin; they take the nearest by its code.
        threads: of the build; None: as many as torch uses. With one the same input gives the same graph.
        seed: of samples and of the order of insertion.
        column: of a Parquet file.
        progress: called now and then, from this thread; an exception that it raises ends the build.
        engine: of the writes.

    Raises:
        InvalidInputError: an option, a shape, a value that is not finite, or that float16 does not hold; a directory with a graph in it.
        WriteError, DiskFullError, StoreBusyError: the directory cannot be written, is full, or somebody else builds there.
        What `read_vectors` raises.
    """
    if threads is None:
        threads = torch.get_num_threads()
    options = _Options(metric, max_degree, search_list_size, alpha, codes, pq_bytes, vector_dtype, num_entry_points, threads, seed)
    source = read_vectors(vectors, column=column)
    format_name = _check(options, source)
    make_given_directory(path)
    with given_engine(engine) as own, DirectoryLock(path):
        clear_leftovers(path)
        return _Builder(own, os.fspath(path), source, format_name, options, progress or _no_progress).run()


def _no_progress(what: str, done: int, total: int) -> None:
    pass


class _Builder:
    """One build: its parts, in order."""

    def __init__(self, engine: NativeEngine, path: str, source: Vectors, format_name: str, options: _Options, progress: Progress):
        self._engine, self._path, self._options, self._progress = engine, path, options, progress
        self._source = source
        self._layout = choose_layout(
            source.n, source.dim, format_name, max_degree=options.max_degree, codes=options.codes, code_bytes=options.pq_bytes,
        )  # fmt: skip
        self._times = [time.perf_counter()]

    def run(self) -> GraphReport:
        rows = self._read()
        self._lap()
        book = train_codebook(rows, self._layout.code_bytes, seed=self._options.seed) if len(rows) else self._no_codebook()
        row_codes = self._encode(book, rows)
        self._lap()
        graph, repaired, entries = self._edges(rows)
        self._lap()
        row_of = graph.pack(self._layout.nodes_per_page).numpy()
        neighbours, counts = (each.numpy() for each in graph.edges())
        del graph  # its edges have been copied
        chosen = self._options
        options = {name: value for name, value in vars(chosen).items() if name not in ("metric", "threads")}
        whole = WholeGraph(self._layout, chosen.metric, rows, row_codes, book, neighbours, counts, entries, options)
        facts = write_graph(self._engine, self._path, whole, row_of, self._progress)
        self._lap()
        facts = add_recall(self._engine, facts, rows, threads=chosen.threads, seed=chosen.seed, progress=self._progress)
        self._lap()
        spent = np.diff(self._times).tolist()
        layout = self._layout
        manifest_bytes = os.path.getsize(os.path.join(self._path, NAME))
        return GraphReport(
            self._path, layout.n, layout.dim, layout.format, layout.page_bytes, layout.nodes_per_page, layout.code_bytes, repaired,
            sum(facts.file_sizes.values()) + manifest_bytes, 4 * layout.n * layout.dim, facts.memory_bytes, *spent,
        )  # fmt: skip

    def _lap(self) -> None:
        self._times.append(time.perf_counter())

    def _no_codebook(self) -> Codebook:
        begin = np.linspace(0, self._layout.dim, self._layout.code_bytes + 1).round().astype(np.int64)
        return Codebook(begin, np.zeros((256, self._layout.dim), np.float32))

    def _read(self) -> np.ndarray:
        """The vectors as they will be stored, [n, dim]."""
        layout, name = self._layout, self._source.name
        rows = np.empty((layout.n, layout.dim), layout.node_dtype["vector"].base)
        done = 0
        for block in self._source.blocks():
            if done + len(block) > layout.n:
                raise errors.FormatError(f"{name}", got="more vectors than it said", expected=layout.n)
            rows[done : done + len(block)] = self._converted(block, done)
            done += len(block)
            self._progress("read", done, layout.n)
        if done != layout.n:
            raise errors.FormatError(f"{name}", got=f"{done} vectors", expected=layout.n)
        return rows

    def _converted(self, block: np.ndarray, first: int) -> np.ndarray:
        if block.dtype.kind in "iu" and self._options.metric != "cosine":
            return block
        values = np.asarray(block, dtype=np.float32)
        if not np.isfinite(values).all():
            row, dim = (int(each[0]) for each in np.nonzero(~np.isfinite(values)))
            raise errors.InvalidInputError(f"vector {first + row}, value {dim}", got=float(values[row, dim]), expected="a finite number")
        squares = np.square(values.astype(np.float64)).sum(axis=1)
        if squares.size and squares.max() > _SQUARES_MAX:
            row = int(np.argmax(squares))
            raise errors.InvalidInputError(
                f"vector {first + row}", got=f"length {np.sqrt(squares[row]):.3g}", expected=f"at most {np.sqrt(_SQUARES_MAX):.3g}",
                fix="scale the vectors: distances between such overflow float32",
            )  # fmt: skip
        if self._options.metric == "cosine":
            length = np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
            values = (values / np.where(length > 0, length, 1)).astype(np.float32)
        if self._layout.format == "fp16" and values.size and (most := float(np.abs(values).max())) > _FP16_MAX:
            raise errors.InvalidInputError(
                "a vector's value", got=most, expected=f"at most {_FP16_MAX:g} as float16", fix='vector_dtype="float32"'
            )
        return values

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
        measured, format_name = self._by_distance(rows)
        view = torch.from_numpy(measured.view(np.uint8) if measured.dtype == np.int8 else measured)
        graph = load_extension().Vamana(
            vectors=view, format=format_name, degree=options.max_degree, list_size=options.search_list_size, alpha=options.alpha, passes=1,
            saturate=True, threads=options.threads, seed=options.seed,
        )  # fmt: skip
        graph.build(lambda done, total: self._progress("edges", done, total))
        return graph, *connect_and_choose_entries(graph, len(rows), options.num_entry_points, options.seed)

    def _by_distance(self, rows: np.ndarray) -> tuple[np.ndarray, str]:
        """What the graph is built of. By inner product: with a dimension more, in which all vectors have one length, so that the nearest by
        distance has the largest product with any query (Bachrach et al., Speeding up the Xbox recommender system)."""
        if self._options.metric != "ip":
            return rows, self._layout.format
        squares = np.square(rows.astype(np.float32)).sum(axis=1)
        rest = np.sqrt(np.maximum(squares.max() - squares, 0)) if len(rows) else squares
        return np.concatenate([rows.astype(np.float32), rest[:, None]], axis=1), "fp32"


def _check(options: _Options, source: Vectors) -> str:
    """The format that vectors are stored in. Raises InvalidInputError."""
    if options.metric not in METRICS:
        raise errors.InvalidInputError("metric of a graph", got=repr(options.metric), expected=" or ".join(METRICS))
    if options.codes not in CODES_IN:
        raise errors.InvalidInputError("codes of a graph", got=repr(options.codes), expected=", ".join(CODES_IN))
    check_whole("max_degree", options.max_degree, 1, MAX_DEGREE_MAX)
    check_whole("search_list_size", options.search_list_size, 1, 1 << 16)
    check_finite("alpha", options.alpha)
    if not 1 <= options.alpha <= _ALPHA_MAX:
        raise errors.InvalidInputError("alpha", got=options.alpha, expected=f"1 to {_ALPHA_MAX:g}")
    check_whole("num_entry_points", options.num_entry_points, 1, 65536)
    check_whole("threads", options.threads, 1, 1024)
    check_whole("seed", options.seed, 0, 2**63 - 1)
    if source.dim > DIM_MAX:
        raise errors.InvalidInputError("dimensions of vectors", got=source.dim, expected=f"at most {DIM_MAX}")
    if source.n > N_MAX:
        raise errors.InvalidInputError("vectors of a graph", got=source.n, expected=f"at most {N_MAX}", fix="build several graphs")
    if options.pq_bytes is not None:
        check_whole("pq_bytes", options.pq_bytes, 1, source.dim)
    formats = {str(dtype).removeprefix("torch."): name for name, dtype in VECTOR_FORMATS.items()}
    is_whole = source.dtype.kind in "iu"
    wanted = options.vector_dtype
    if wanted == "auto":
        wanted = source.dtype.name if is_whole and options.metric != "cosine" else "float16"
    if wanted not in formats or (wanted in ("uint8", "int8") and (wanted != source.dtype.name or options.metric == "cosine")):
        raise errors.InvalidInputError(
            "vector_dtype", got=f"{options.vector_dtype!r} of {source.dtype} vectors, metric {options.metric}",
            expected="float16 or float32, or the vectors' own where they are whole numbers and the metric is not cosine",
        )  # fmt: skip
    if vector_bytes(formats[wanted], source.dim) > 1 << 16:
        raise errors.InvalidInputError("a vector", got=f"{vector_bytes(formats[wanted], source.dim)} bytes", expected="at most 64 KiB")
    return formats[wanted]
