"""Graphs from DiskANN's indexes, and indexes that DiskANN reads from graphs. Their files are
`espnx.graph.diskann.files`'s.

Theirs have no checksums and ours have: an import reads all of an index and checks what can be
checked, once.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...checks import check_whole
from ...ops._native import load_extension
from ...sizes import format_size
from ...storage import NativeEngine, Plan
from ...storage.files import make_given_directory, write_error
from ...storage.manifest import NAME
from ...storage.native import given_engine
from ...suggestions import suggests_keywords
from ..codes.codebook import Codebook
from ..format import N_ENTRIES_MAX, NODES, GraphFacts
from ..layout import CODES_IN, PageLayout, choose_layout
from ..pages.checked import parse_pages, read_codes
from ..pages.directory import read_graph
from ..recall import add_recall, row_blocks
from ..search.kinds import refuse_clusters, refuse_gaps
from ..vectors import read_vectors
from ..write import Progress, WholeGraph, connect_and_choose_entries, write_graph, writing_graph
from . import files as theirs

#: How an imported graph's nodes are numbered: packed into pages as `espnx.graph.build` does it, or
#: as they were.
ORDERS = ("packed", "given")
_FORMATS = {"float32": "fp32", "uint8": "uint8", "int8": "int8"}
_REPAIR_LIST_SIZE = 100
_PAGES_AT_ONCE = 1024
# Of given vectors that are encoded again: how many, and what share of their codes must be the
# index's; what two programs round differently is far less.
_CHECKED_ROWS, _SAME_CODES = 1000, 0.9


@dataclass(frozen=True)
class ImportReport:
    """What an import made. Sizes in bytes, times in seconds.

    Attributes:
        repaired: nodes that no walk from the index's medoid came to, which were given edges.
        folder_bytes: of the graph's files. index_bytes: of the index's that were read.
        memory_bytes: that the open graph keeps.
    """

    path: str
    n: int
    dim: int
    format: str
    metric: str
    max_degree: int
    page_bytes: int
    nodes_per_page: int
    pq_bytes: int
    repaired: int
    folder_bytes: int
    index_bytes: int
    memory_bytes: int
    read_s: float
    pages_s: float
    recall_s: float

    def summary(self) -> str:
        """Two lines."""
        return (
            f"{self.n:,} vectors of {self.dim} dimensions as {self.format}, {self.metric}: "
            f"{format_size(self.folder_bytes)} on storage (the index: "
            f"{format_size(self.index_bytes)}), {format_size(self.memory_bytes)} in memory; "
            f"{self.nodes_per_page} nodes to a page of {format_size(self.page_bytes)}, codes of "
            f"{self.pq_bytes} bytes\n"
            f"{self.read_s:.1f} s reading, {self.pages_s:.1f} s pages, {self.recall_s:.1f} s "
            "measuring recall"
        )


@dataclass(frozen=True)
class ExportReport:
    """What an export made. Sizes in bytes.

    Attributes:
        files: by the end of their names behind the prefix.
        dtype: of the vectors in them.
    """

    prefix: str
    n: int
    dim: int
    dtype: str
    max_degree: int
    pq_bytes: int
    files: dict[str, int]

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.n:,} vectors of {self.dim} dimensions as {self.dtype}, {self.max_degree} "
            f"neighbours, codes of {self.pq_bytes} bytes: {format_size(sum(self.files.values()))} "
            f"in {len(self.files)} files {self.prefix}_*"
        )


@dataclass(frozen=True, eq=False)
class _Index:
    """An index of theirs, in memory. `measured`: the vectors as its edges were chosen by; `rows`:
    as they are stored here; `disk_book`: of the codes that its nodes have in place of vectors,
    where nobody gave these: then both are what the codes stand for."""

    measured: np.ndarray
    rows: np.ndarray
    neighbours: np.ndarray
    counts: np.ndarray
    medoid: int
    codebook: Codebook
    codes: np.ndarray
    metric: str
    size_bytes: int
    disk_book: Codebook | None = None


@suggests_keywords
def import_diskann(
    prefix: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    vectors: Any = None,
    data_type: str | None = None,
    metric: str | None = None,
    codes: str = "inline",
    order: str = "packed",
    num_entry_points: int = 1000,
    threads: int | None = None,
    seed: int = 0,
    column: str | None = None,
    replace: bool = False,
    progress: Progress | None = None,
    engine: NativeEngine | None = None,
) -> ImportReport:
    """Makes a graph of an index that DiskANN (C++, diskannpy 0.7) has built, with its edges and its
    codes.

    Row i of the graph is its vector i. All of the index is read, and checked before anything is
    believed; vectors and neighbours' numbers are in memory meanwhile.

    Args:
        prefix: of its files: ``PREFIX_disk.index``, ``PREFIX_pq_pivots.bin``,
            ``PREFIX_pq_compressed.bin``.
        path: a new directory, or an empty one.
        vectors: where its nodes have codes in place of vectors (``pq_disk_bytes``), what it was
            built from, and what the graph's nodes are to have: see
            `espnx.graph.vectors.read_vectors`. None: they have the same codes,
            ``PREFIX_disk.index_pq_pivots.bin`` is read as well, and nothing says what recall these
            cost.
        data_type: ``float32``, ``uint8`` or ``int8``. None: as diskannpy noted in
            ``PREFIX_metadata.bin``; no other file says it. Of no interest where nodes have codes.
        metric: ``l2`` or ``ip`` (theirs: mips). None: as noted there, else ``l2``.
        codes: ``inline``, beside each node its neighbours', or ``memory``.
        order: ``packed``: nodes with many edges between them lie together in a page; ``given``: by
            number, as in the index.
        num_entry_points: where searches may begin.
        threads: that measure recall; None: as many as torch uses.
        seed: of the choice of entry points and of the vectors that recall is measured with.
        column: of a Parquet file of vectors.
        replace: a graph that is there, as of `espnx.graph.build`.
        progress: called now and then; an exception that it raises ends the import.
        engine: of reads and writes.

    Raises:
        InvalidInputError: an option, or vectors that are not the index's; a directory with a graph
            in it that is not to be replaced.
        FileMissingError, TruncatedFileError, FormatError: the index is damaged, or of another kind
            or version: says file, got, expected.
        ReadError, WriteError, DiskFullError, StoreBusyError: files cannot be read or written.
    """
    where = os.fspath(prefix)
    threads = torch.get_num_threads() if threads is None else threads
    _check_options(codes, order, num_entry_points, seed, threads)
    tell = progress or (lambda what, done, total: None)
    times = [time.perf_counter()]
    with given_engine(engine) as own:
        index = _read_index(own, where, vectors, data_type, metric, column, tell)
        n, dim = index.rows.shape
        layout = _layout_of(index, codes)
        times.append(time.perf_counter())
        options = {
            "imported": "DiskANN",
            "codes": codes,
            "order": order,
            "num_entry_points": num_entry_points,
            "seed": seed,
        }
        with writing_graph(own, path, replace=replace) as generation:
            facts, repaired = _write_index(
                own, os.fspath(path), index, layout, options, tell, generation
            )
            times.append(time.perf_counter())
            facts = add_recall(
                own,
                facts,
                lambda: row_blocks(index.rows),
                threads=threads,
                seed=seed,
                progress=tell,
                of_codes=index.disk_book is not None,
            )
    times.append(time.perf_counter())
    folder = sum(facts.file_sizes.values()) + os.path.getsize(os.path.join(facts.where, NAME))
    return ImportReport(
        os.fspath(path),
        n,
        dim,
        layout.format,
        index.metric,
        layout.max_degree,
        layout.page_bytes,
        layout.nodes_per_page,
        layout.code_bytes,
        repaired,
        folder,
        index.size_bytes,
        facts.memory_bytes,
        *np.diff(times).tolist(),
    )


def _layout_of(index: _Index, codes: str) -> PageLayout:
    n, dim = index.rows.shape
    held = index.disk_book
    return choose_layout(
        n,
        dim,
        _FORMATS[index.rows.dtype.name] if held is None else "pq",
        max_degree=index.neighbours.shape[1],
        codes=codes,
        code_bytes=index.codebook.code_bytes,
        disk_pq_bytes=None if held is None else held.code_bytes,
    )


def _check_options(codes: str, order: str, num_entry_points: int, seed: int, threads: int) -> None:
    for name, got, among in (("codes", codes, CODES_IN), ("order", order, ORDERS)):
        if got not in among:
            raise errors.InvalidInputError(
                f"{name} of an import", got=repr(got), expected=" or ".join(among)
            )
    check_whole("num_entry_points", num_entry_points, 1, N_ENTRIES_MAX)
    check_whole("seed", seed, 0, 2**63 - 1)
    check_whole("threads", threads, 1, 256)


def _write_index(
    engine: NativeEngine,
    path: str,
    index: _Index,
    layout: PageLayout,
    options: dict[str, Any],
    progress: Progress,
    generation: int,
) -> tuple[GraphFacts, int]:
    """(the graph that was written; how many nodes were repaired)"""
    graph = load_extension().Vamana.from_edges(
        vectors=_as_tensor(index.measured),
        format=_FORMATS[index.measured.dtype.name],
        neighbours=torch.from_numpy(index.neighbours),
        counts=torch.from_numpy(index.counts),
        medoid=index.medoid,
        list_size=_REPAIR_LIST_SIZE,
    )
    repaired, entries = connect_and_choose_entries(
        graph, layout.n, options["num_entry_points"], options["seed"]
    )
    row_of = (
        graph.pack(layout.nodes_per_page).numpy()
        if options["order"] == "packed"
        else np.arange(layout.n)
    )
    neighbours, counts = (each.numpy() for each in graph.edges())
    del graph  # its edges have been copied
    whole = WholeGraph(
        layout,
        index.metric,
        index.rows,
        index.codes,
        index.codebook,
        neighbours,
        counts,
        entries,
        options,
        index.disk_book,
    )
    return write_graph(engine, path, whole, row_of, progress, generation), repaired


def _as_tensor(vectors: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(vectors.view(np.uint8) if vectors.dtype == np.int8 else vectors)


def _read_index(
    engine: NativeEngine,
    prefix: str,
    vectors: Any,
    data_type: str | None,
    metric: str | None,
    column: str | None,
    progress: Progress,
) -> _Index:
    theirs.refuse_other_kinds(prefix)
    header = theirs.read_header(engine, prefix + theirs.INDEX)
    progress("read", 0, header.n)
    noted = theirs.read_metadata(engine, prefix + theirs.METADATA)
    metric = _agreed("metric", metric, noted and noted[1], ("l2", "ip"), prefix, default="l2")
    given = None
    if holds_codes := os.path.lexists(prefix + theirs.DISK_PIVOTS):
        if vectors is not None:
            given = _read_given(vectors, column, header.n)
            _agreed("data_type", given.dtype.name, noted and noted[0], theirs.DTYPES, prefix)
        if metric == "ip":
            raise errors.FormatError(
                "an index by inner product whose nodes have codes",
                path=prefix + theirs.DISK_PIVOTS,
                expected="nodes that have vectors",
            )
    elif vectors is not None:
        raise errors.InvalidInputError(
            "vectors of an import", got="given", expected="none: the index has them in its nodes"
        )
    dtype = np.dtype(
        "uint8"
        if holds_codes
        else _agreed("data_type", data_type, noted and noted[0], theirs.DTYPES, prefix)
    )
    nodes = theirs.read_nodes(engine, prefix + theirs.INDEX, header, dtype)
    disk_book, measured = None, nodes.vectors if given is None else given
    if holds_codes and given is None:
        dim = theirs.read_dim(engine, prefix + theirs.PIVOTS)
        disk_book = theirs.read_codebook(engine, prefix + theirs.DISK_PIVOTS, header.width, dim)
        measured = np.ascontiguousarray(disk_book.decode(nodes.vectors))
    codes = theirs.read_codes(engine, prefix + theirs.CODES, header.n)
    book = theirs.read_codebook(engine, prefix + theirs.PIVOTS, codes.shape[1], measured.shape[1])
    progress("read", header.n, header.n)
    if given is not None:
        _check_given(given, codes, book)
    names = (
        theirs.INDEX,
        theirs.CODES,
        theirs.PIVOTS,
        theirs.PIVOTS + theirs.ROTATION,
        theirs.DISK_PIVOTS,
        theirs.METADATA,
        theirs.NORM,
    )
    size_bytes = sum(
        os.path.getsize(prefix + each) for each in names if os.path.exists(prefix + each)
    )
    found = _Index(
        measured,
        measured,
        nodes.neighbours,
        nodes.counts,
        header.medoid,
        book,
        codes,
        metric,
        size_bytes,
        disk_book,
    )
    return found if metric == "l2" else _without_added_dimension(engine, prefix, found)


def _agreed(
    name: str,
    given: str | None,
    noted: str | None,
    among: tuple[str, ...],
    prefix: str,
    default: str | None = None,
) -> str:
    """What the caller, or else diskannpy's note, or else the default says. Raises
    InvalidInputError, FormatError."""
    if given is not None and given not in among:
        raise errors.InvalidInputError(
            f"{name} of an import", got=repr(given), expected=" or ".join(among)
        )
    if noted is not None and noted not in among:
        raise errors.FormatError(
            f"{name} of a DiskANN index",
            path=prefix + theirs.METADATA,
            got=noted,
            expected=" or ".join(among),
        )
    if given is not None and noted is not None and given != noted:
        raise errors.InvalidInputError(
            f"{name} of an import",
            got=given,
            expected=f"{noted}, as {prefix + theirs.METADATA} says",
        )
    found = given or noted or default
    if found is None:
        raise errors.InvalidInputError(
            f"{name} of an import",
            got=f"no {prefix + theirs.METADATA} that says it",
            expected=" or ".join(among),
            fix=f"{name}=",
        )
    return found


def _read_given(vectors: Any, column: str | None, n: int) -> np.ndarray:
    """What an index was built from whose nodes have codes in place of vectors."""
    source = read_vectors(vectors, column=column)
    if source.n != n or source.dtype.name not in _FORMATS:
        raise errors.InvalidInputError(
            "vectors of an import",
            got=f"{source.n} of {source.dtype}",
            expected=f"{n} of {', '.join(_FORMATS)}, as the index has",
        )
    found = np.concatenate(list(source.blocks()))
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise errors.InvalidInputError(
            "vectors of an import", got="values that are not finite", expected="finite numbers"
        )
    return np.ascontiguousarray(found)


def _check_given(given: np.ndarray, codes: np.ndarray, book: Codebook) -> None:
    """Raises InvalidInputError for vectors whose codes are not those of the index: it was built
    from others, or in another order."""
    chosen = np.random.default_rng(0).permutation(len(given))[:_CHECKED_ROWS]
    if not len(chosen):
        return
    share = float((book.encode(given[chosen].astype(np.float32)) == codes[chosen]).mean())
    if share < _SAME_CODES:
        raise errors.InvalidInputError(
            "vectors of an import",
            got=f"{share:.0%} of the codes that they should have",
            expected="the vectors of the index, in its order",
        )


def _without_added_dimension(engine: NativeEngine, prefix: str, found: _Index) -> _Index:
    """The vectors that an index by inner product was built from.

    DiskANN divides them by the largest length and adds a dimension in which all are of length 1, so
    that the nearest by distance have the largest product. Edges were chosen by that, and so it
    stays for what repairs and packs them.
    """
    norm = theirs.read_norm(engine, prefix + theirs.NORM)
    if found.codebook.rotation is not None:
        raise errors.FormatError(
            "an index by inner product",
            path=prefix + theirs.PIVOTS + theirs.ROTATION,
            got="codes of rotated vectors (OPQ)",
            expected=(
                "codes of the vectors as they are: the dimension that DiskANN adds cannot be taken "
                "out of these"
            ),
        )
    dim = found.measured.shape[1] - 1
    begin = np.minimum(found.codebook.begin, dim)
    # without a chunk that was the added dimension alone
    begin = begin[: np.searchsorted(begin, dim) + 1]
    if found.measured.dtype != np.float32 or len(begin) < 2:
        raise errors.FormatError(
            "an index by inner product",
            path=prefix + theirs.INDEX,
            got=f"{dim + 1} dimensions of {found.measured.dtype}",
            expected="2 or more of float32, one of them added",
        )
    book = Codebook(
        begin, np.ascontiguousarray(found.codebook.centroids[:, :dim] * np.float32(norm))
    )
    rows = np.ascontiguousarray(found.measured[:, :dim] * np.float32(norm))
    if not (np.isfinite(rows).all() and np.isfinite(book.centroids).all()):
        raise errors.FormatError(
            "the largest length of vectors",
            path=prefix + theirs.NORM,
            got=norm,
            expected="one that fits the vectors",
        )
    codes = np.ascontiguousarray(found.codes[:, : book.code_bytes])
    return _Index(
        found.measured,
        rows,
        found.neighbours,
        found.counts,
        found.medoid,
        book,
        codes,
        found.metric,
        found.size_bytes,
    )


@suggests_keywords
def export_diskann(
    path: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    *,
    engine: NativeEngine | None = None,
) -> ExportReport:
    """Writes an index that DiskANN's C++ library and diskannpy's StaticDiskIndex search, with a
    graph's edges and codes.

    Vector i of the index is row i of the graph; float16 becomes float32. Their metric is l2, by
    which vectors of a ``cosine`` graph, all of length 1, are found in the same order. The index has
    no checksums. Vectors and neighbours' numbers are in memory meanwhile.

    Args:
        path: a graph's directory.
        prefix: of the new files, ``PREFIX_disk.index`` and the rest; none may be there yet.
        engine: of reads and writes.

    Raises:
        InvalidInputError: files that are there; a graph by inner product, without vectors, or with
            more neighbours or bytes of a code than DiskANN reads.
        WriteError, DiskFullError: and no file of that prefix is left.
        StoreNotFoundError, FormatError, ChecksumError, TruncatedFileError, ReadError: of the graph,
            as of `GraphIndex` and its `verify`.
    """
    where = os.fspath(prefix)
    make_given_directory(os.path.dirname(os.path.abspath(where)))
    rotation_file = theirs.PIVOTS + theirs.ROTATION
    # the index last
    names = [theirs.CODES, theirs.PIVOTS, rotation_file, theirs.METADATA, theirs.INDEX]
    if there := [where + each for each in names if os.path.lexists(where + each)]:
        raise errors.InvalidInputError(
            "prefix of an export", got=there[0], expected="no file of that name"
        )
    with given_engine(engine) as own:
        facts = read_graph(own, path)
        refuse_clusters(facts, "to export")
        refuse_gaps(facts, "to export")
        _check_exportable(facts)
        nodes, codes, entry_rows = _read_rows(own, facts)
        medoid = _most_central(nodes.vectors, entry_rows)
        layout = facts.layout
        header = theirs.DiskannHeader(
            layout.n,
            layout.dim,
            medoid,
            layout.dim * nodes.vectors.itemsize + 4 + 4 * layout.max_degree,
        )
        try:
            theirs.write_codes(own, where + theirs.CODES + ".new", codes)
            theirs.write_codebook(own, where + theirs.PIVOTS + ".new", facts.codebook)
            if facts.codebook.rotation is None:
                names.remove(rotation_file)
            else:
                theirs.write_rotation(own, where + rotation_file + ".new", facts.codebook.rotation)
            theirs.write_metadata(
                own,
                where + theirs.METADATA + ".new",
                nodes.vectors.dtype.name,
                layout.n,
                layout.dim,
            )
            theirs.write_nodes(own, where + theirs.INDEX + ".new", header, nodes)
            for each in names:
                _rename(where + each)
        except BaseException:
            for each in names:
                for end in ("", ".new"):
                    with contextlib.suppress(OSError):
                        os.unlink(where + each + end)
            raise
    sizes = {each: os.path.getsize(where + each) for each in names}
    return ExportReport(
        where,
        layout.n,
        layout.dim,
        nodes.vectors.dtype.name,
        layout.max_degree,
        layout.code_bytes,
        sizes,
    )


def _rename(path: str) -> None:
    try:
        os.rename(path + ".new", path)
    except OSError as error:
        raise write_error("cannot name a file of a DiskANN index", path, error) from error


def _check_exportable(facts: GraphFacts) -> None:
    layout = facts.layout
    for name, got, is_well, expected in (
        ("metric of a graph to export", facts.metric, facts.metric != "ip", "l2 or cosine"),
        ("vectors of a graph to export", layout.n, 0 < layout.n < 2**31, "1 to 2147483647"),
        ("what nodes of a graph to export hold", "codes", layout.format != "pq", "vectors"),
        (
            "max_degree of a graph to export",
            layout.max_degree,
            layout.max_degree <= theirs.DEGREE_MAX,
            f"at most {theirs.DEGREE_MAX}",
        ),
        (
            "pq_bytes of a graph to export",
            layout.code_bytes,
            layout.code_bytes <= theirs.CHUNKS_MAX,
            f"at most {theirs.CHUNKS_MAX}",
        ),
    ):
        if not is_well:
            raise errors.InvalidInputError(name, got=got, expected=f"{expected}, as DiskANN reads")


def _read_rows(
    engine: NativeEngine, facts: GraphFacts
) -> tuple[theirs.DiskannNodes, np.ndarray, np.ndarray]:
    """(all nodes, by row; their codes, uint8 [n, code_bytes], by row; rows of the entry points)"""
    layout = facts.layout
    dtype = np.dtype(np.float32) if layout.row_dtype == np.float16 else layout.row_dtype
    vectors = np.empty((layout.n, layout.dim), dtype)
    near = np.empty((layout.n, layout.max_degree), np.uint32)
    counts = np.full(layout.n, -1, np.int64)
    row_of = np.empty(layout.n, np.uint32)
    codes = np.zeros((layout.n, layout.code_bytes), np.uint8)  # by node
    has_code = np.zeros(layout.n, bool)
    file = engine.open(facts.path(NODES))
    try:
        for first in range(0, layout.n_pages, _PAGES_AT_ONCE):
            pages = np.arange(first, min(first + _PAGES_AT_ONCE, layout.n_pages))
            at_bytes = facts.begin_bytes(NODES) + first * layout.page_bytes
            future = engine.read(Plan.of(file, [at_bytes], [len(pages) * layout.page_bytes]))
            memory = future.wait()
            found = parse_pages(
                facts,
                pages,
                memory,
                int(future.position_bytes[0]) + (pages - first) * layout.page_bytes,
            )
            begin = first * layout.nodes_per_page
            nodes = found.reshape(-1)[: layout.n - begin]
            rows = nodes["row"]
            row_of[begin : begin + len(nodes)] = rows
            vectors[rows] = facts.coding.decode(nodes["vector"])
            near[rows], counts[rows] = nodes["neighbours"], nodes["n_neighbours"]
            if layout.codes_in == "inline":
                there = np.arange(layout.max_degree) < nodes["n_neighbours"][:, None]
                codes[nodes["neighbours"][there]] = nodes["codes"][there]
                has_code[nodes["neighbours"][there]] = True
    finally:
        engine.close_file(file)
    if (missing := np.flatnonzero(counts < 0)).size:
        raise errors.FormatError(
            "rows of a graph",
            path=facts.path(NODES),
            got=f"no node of row {missing[0]}",
            expected="one of each row",
        )
    if layout.codes_in == "inline":
        codes[facts.entries] = facts.entry_codes
        has_code[facts.entries] = True
        left = np.flatnonzero(~has_code)  # nobody's neighbours
        codes[left] = facts.codebook.encode(vectors[row_of[left]])
    else:
        codes = read_codes(engine, facts)
    by_row = np.empty_like(codes)
    by_row[row_of] = codes
    there = np.arange(layout.max_degree) < counts[:, None]
    return (
        theirs.DiskannNodes(vectors, np.where(there, row_of[near], 0), counts),
        by_row,
        row_of[facts.entries].astype(np.int64),
    )


def _most_central(vectors: np.ndarray, rows: np.ndarray) -> int:
    """The row that is nearest to the mean of all vectors, of some rows: of entry points, the medoid
    from which the graph was built."""
    mean = vectors.mean(axis=0, dtype=np.float64)
    return int(rows[np.square(vectors[rows] - mean).sum(axis=1).argmin()])
