"""A build in bounded memory, step by step. A step that is finished is not done again when the build
is begun anew."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ... import errors
from ...ops.centroids import fit_means
from ...storage import FileHandle, NativeEngine, Plan
from ...storage.files import crc32c
from ...storage.work import WorkFolder
from ..codes.codebook import Codebook, codebook_bytes, train_codebook, unpack_codebook
from ..codes.coding import VectorCoding
from ..format import (
    CODEBOOK,
    CODES,
    DISK_CODEBOOK,
    ENTRIES,
    NODES,
    ROWS,
    GraphFacts,
    GraphShare,
    in_directory,
)
from ..layout import PageLayout
from ..options import GraphOptions, stored_rows
from ..recall import RECALL_BLOCK_ROWS, add_recall
from ..vectors import Vectors
from ..write import GraphFiles, Progress, code_pages, pages_of, publish
from .budget import Budget, plan_parts, resident_bytes
from .merge import EdgesFile, Piece, merge_parts, number_nodes
from .partition import PartFiles, divide
from .parts import build_part
from .work import identity, read_array

_PAGE_BLOCK_BYTES = 2 << 20
# Read together, with what lies between them: 16 MiB at most.
_CODES_AT_ONCE = 4096
_SAMPLED, _PARTS, _GRAPH = "sampled", "parts", "graph"


#: For reading, codes, edges, pages, and measuring recall.
Seconds = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class BoundedBuild:
    """What was built.

    Attributes:
        repaired: nodes that were given edges.
        seconds: the codes' are with those of the edges.
    """

    facts: GraphFacts
    repaired: int
    n_parts: int
    seconds: Seconds


def build_bounded(
    engine: NativeEngine,
    path: str,
    source: Vectors,
    layout: PageLayout,
    options: GraphOptions,
    memory_bytes: int,
    progress: Progress,
    generation: int,
    share: GraphShare | None,
) -> BoundedBuild:
    """Builds a graph in a directory that nobody else writes to, holding at most `memory_bytes` of
    memory in all.

    The directory may have the work folder of an interrupted build; where that was of the same
    vectors and options, what it had finished is kept. `generation`: of the graph's files; `share`:
    that it is of a collection.

    Raises:
        InvalidInputError: a limit that is too low, or as `stored_rows`.
        WriteError, DiskFullError, ReadError: of the directory.
    """
    budget = plan_parts(layout, options, memory_bytes, resident_bytes())
    return _Bounded(
        engine, path, source, layout, options, budget, progress, generation, share
    ).run()


class _Bounded:
    def __init__(
        self,
        engine: NativeEngine,
        path: str,
        source: Vectors,
        layout: PageLayout,
        options: GraphOptions,
        budget: Budget,
        progress: Progress,
        generation: int,
        share: GraphShare | None,
    ):
        self._generation, self._share = generation, share
        self._engine, self._path, self._source, self._layout, self._options = (
            engine,
            path,
            source,
            layout,
            options,
        )
        self._progress = progress
        job = {
            "generation": generation,
            "n": source.n,
            "dim": source.dim,
            "dtype": str(source.dtype),
            "input": identity(source),
            "layout": repr(layout),
            "options": repr(
                {name: value for name, value in vars(options).items() if name != "threads"}
            ),
        }
        self._work = WorkFolder(path, job)
        self._budget = budget

    def run(self) -> BoundedBuild:
        times = [time.perf_counter()]
        if not self._work.has(_SAMPLED):
            self._sample()
        book, centres, longest = self._read_sample()
        if not self._work.has(_PARTS):
            self._divide(centres)
        n_parts = len(centres)
        times.append(time.perf_counter())
        for part in range(n_parts):
            self._build(part, n_parts, book, longest)
        times.append(time.perf_counter())
        sizes = [
            self._work.file(f"built_{part}", "own.rows").stat().st_size // 4
            for part in range(n_parts)
        ]
        pieces = number_nodes(sizes, self._layout.nodes_per_page)
        node_of = self._node_of(pieces)
        with self._work.step(_GRAPH) as folder:
            edges = merge_parts(
                self._work,
                folder,
                pieces,
                node_of,
                self._layout.max_degree,
                n_parts,
                self._counted("merge"),
            )
            repaired, entries = self._entries(edges, node_of, n_parts)
            facts = self._write(book, pieces, node_of, edges, entries)
        times.append(time.perf_counter())
        chosen = self._options
        facts = add_recall(
            self._engine,
            facts,
            lambda: self._blocks(pieces),
            threads=chosen.threads,
            seed=chosen.seed,
            progress=self._progress,
        )
        self._work.remove()
        read, edges_s, pages, recall = np.diff([*times, time.perf_counter()]).tolist()
        return BoundedBuild(facts, repaired, n_parts, (read, 0.0, edges_s, pages, recall))

    def _counted(self, what: str) -> Callable[[int], None]:
        return lambda done: self._progress(what, done, self._layout.n)

    def _stored(self, what: str) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the first, vectors as they are stored) block by block."""
        layout, done = self._layout, 0
        dtype = layout.row_dtype
        for block in self._source.blocks():
            if done + len(block) > layout.n:
                raise errors.FormatError(
                    self._source.name, got="more vectors than it said", expected=layout.n
                )
            yield (
                done,
                stored_rows(block, done, self._options.metric, layout.format).astype(
                    dtype, copy=False
                ),
            )
            done += len(block)
            self._progress(what, done, layout.n)
        if done != layout.n:
            raise errors.FormatError(self._source.name, got=f"{done} vectors", expected=layout.n)

    def _sample(self) -> None:
        """Reads all vectors once: codebooks and centres of a sample, and the largest length."""
        layout, seed = self._layout, self._options.seed
        count = min(layout.n, self._budget.sample_rows)
        chosen = np.sort(
            np.random.default_rng(seed).choice(layout.n, count, replace=False, shuffle=False)
        )
        sample = np.empty((count, layout.dim), np.float32)
        longest = 0.0
        for first, rows in self._stored("read"):
            begin, end = np.searchsorted(chosen, [first, first + len(rows)])
            sample[begin:end] = rows[chosen[begin:end] - first]
            if self._options.metric == "ip" and len(rows):
                longest = max(longest, float(np.square(rows.astype(np.float32)).sum(axis=1).max()))
        device = self._options.device
        train = partial(
            train_codebook,
            sample,
            n=layout.n,
            use_opq=self._options.use_opq,
            seed=seed,
            device=device,
        )
        book = train(layout.code_bytes)
        disk_book = train(layout.disk_pq_bytes) if layout.format == "pq" else None
        centres = fit_means(sample, min(self._budget.n_parts, count), seed=seed, device=device)
        with self._work.step(_SAMPLED) as folder:
            for name, each in (("", book), ("disk_", disk_book)):
                if each is not None:
                    each.begin.tofile(folder / f"{name}begin")
                    each.packed().tofile(folder / f"{name}codebook")
                    np.array([each.rotation is not None], np.int64).tofile(
                        folder / f"{name}rotated"
                    )
            centres.tofile(folder / "centres")
            np.array([longest]).tofile(folder / "longest")
            np.array([self._budget.part_rows]).tofile(folder / "part_rows")

    def _sampled(self, name: str, dtype: type, width: int | None = None) -> np.ndarray:
        return read_array(self._work.file(_SAMPLED, name), dtype, width)

    def _codebook(self, name: str = "") -> Codebook:
        dim = self._layout.dim
        is_rotated = (
            read_array(self._work.file(_SAMPLED, f"{name}rotated"), np.int64, None, 0, 1)[0] != 0
        )
        packed = read_array(
            self._work.file(_SAMPLED, f"{name}codebook"),
            np.float32,
            None,
            0,
            codebook_bytes(dim, is_rotated=is_rotated) // 4,
        )
        return unpack_codebook(self._sampled(f"{name}begin", np.int64), packed, dim)

    def _coding(self) -> VectorCoding:
        """The coding of vectors in nodes."""
        return VectorCoding(
            self._layout.format, self._codebook("disk_") if self._layout.format == "pq" else None
        )

    def _read_sample(self) -> tuple[Codebook, np.ndarray, float]:
        if int(self._sampled("part_rows", np.int64)[0]) > self._budget.part_rows:
            raise errors.InvalidInputError(
                "memory for a build that was interrupted",
                got="less than it was begun with",
                expected="as much, or a new directory",
            )
        return (
            self._codebook(),
            self._sampled("centres", np.float32, self._layout.dim),
            float(self._sampled("longest", np.float64)[0]),
        )

    def _divide(self, centres: np.ndarray) -> None:
        room = np.full(
            len(centres), int(read_array(self._work.file(_SAMPLED, "part_rows"), np.int64)[0])
        )
        with self._work.step(_PARTS) as folder:
            files = PartFiles(folder, len(centres))
            for first, rows in self._stored("divide"):
                home, guest = divide(rows.astype(np.float32), centres, room)
                files.add(first, rows, home, guest)

    def _build(self, part: int, n_parts: int, book: Codebook, longest: float) -> None:
        whole = self._layout.n * (2 if n_parts > 1 else 1)
        before = sum(
            self._work.file(_PARTS, f"{each}.{name}.rows").stat().st_size // 4
            for each in range(part)
            for name in ("own", "guest")
        )
        self._progress("edges", before, whole)
        if not self._work.has(f"built_{part}"):
            build_part(
                self._work,
                part,
                self._layout,
                self._options,
                book,
                longest,
                lambda done: self._progress("edges", before + done, whole),
            )

    def _node_of(self, pieces: list[Piece]) -> np.ndarray:
        node_of = np.zeros(self._layout.n, np.uint32)
        for piece in pieces:
            for block in piece.blocks():
                rows = self._rows(block)
                node_of[rows] = np.arange(
                    block.first_node, block.first_node + len(rows), dtype=np.uint32
                )
        return node_of

    def _rows(self, piece: Piece) -> np.ndarray:
        return read_array(
            self._work.file(f"built_{piece.part}", "own.rows"),
            np.uint32,
            None,
            piece.begin,
            piece.end - piece.begin,
        )

    def _vectors(self, piece: Piece) -> np.ndarray:
        path, dtype = self._work.file(f"built_{piece.part}", "own.vectors"), self._layout.row_dtype
        return read_array(path, dtype, self._layout.dim, piece.begin, piece.end - piece.begin)

    def _codes(self, piece: Piece) -> np.ndarray:
        path = self._work.file(f"built_{piece.part}", "own.codes")
        return read_array(
            path, np.uint8, self._layout.code_bytes, piece.begin, piece.end - piece.begin
        )

    def _blocks(self, pieces: list[Piece]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for piece in pieces:
            for block in piece.blocks(RECALL_BLOCK_ROWS):
                yield self._rows(block).astype(np.int64), self._vectors(block)

    def _entries(
        self, edges: EdgesFile, node_of: np.ndarray, n_parts: int
    ) -> tuple[int, np.ndarray]:
        """How many nodes were repaired; the nodes at which searches begin: some at random, and
        where walks of each part do."""
        medoids = np.concatenate(
            [
                read_array(self._work.file(f"built_{part}", "medoid"), np.uint32)
                for part in range(n_parts)
            ]
        )
        central = node_of[medoids].astype(np.int64)
        repaired = edges.connect(int(central[0]))
        wanted = self._options.num_entry_points - 1
        others = np.random.default_rng(self._options.seed).choice(
            len(node_of), min(wanted, len(node_of)), replace=False
        )
        others = np.concatenate([central[1:], others])[:wanted]
        leads = edges.leading_to(int(central[0]))
        return repaired, np.unique(np.append(others[leads[others]], central[0]))

    def _write(
        self,
        book: Codebook,
        pieces: list[Piece],
        node_of: np.ndarray,
        edges: EdgesFile,
        entries: np.ndarray,
    ) -> GraphFacts:
        layout, salt, disk_book = self._layout, secrets.randbits(64), self._coding().book
        codes = CodeReader(
            self._engine, edges.path.parent / "codes", layout, self._budget.cache_bytes
        )
        sum_of_codes = 0
        with codes.path.open("wb") as file:
            for piece in pieces:
                for block in piece.blocks():
                    part = self._codes(block).reshape(-1)
                    sum_of_codes = crc32c(part, sum_of_codes)
                    file.write(part.data)
        codes.open()
        codes.load(entries)
        entry_codes = codes.get(entries)
        whole = {
            CODEBOOK: book.packed(),
            ENTRIES: np.concatenate(
                [entries.astype("<u4").view(np.uint8).ravel(), entry_codes.ravel()]
            ),
        }
        if disk_book is not None:
            whole[DISK_CODEBOOK] = disk_book.packed()
        sums = {
            name: crc32c(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
            for name, values in whole.items()
        }
        contents: dict[str, Iterable[np.ndarray]] = {
            NODES: self._pages(pieces, edges, codes, salt),
            ROWS: [node_of],
        }
        contents |= {name: [values] for name, values in whole.items()}
        if layout.codes_in != "inline":
            contents[CODES] = self._code_blocks(codes.path, salt)
        if layout.codes_in == "memory":
            sums[CODES] = sum_of_codes
        options = {
            name: value
            for name, value in vars(self._options).items()
            if name not in ("metric", "threads")
        }
        facts = GraphFacts(
            self._path,
            in_directory(self._path, self._generation, layout, len(entries), book, disk_book),
            layout,
            self._options.metric,
            salt,
            book,
            entries,
            entry_codes,
            sums,
            options,
            disk_codebook=disk_book,
            generation=self._generation,
            share=self._share,
        )
        try:
            return publish(self._engine, self._path, GraphFiles(facts, contents))
        finally:
            codes.close()

    def _code_blocks(self, path: Path, salt: int) -> Iterator[np.ndarray]:
        layout = self._layout
        rows = (
            max(1, _PAGE_BLOCK_BYTES // (layout.codes_per_page * layout.code_bytes))
            * layout.codes_per_page
        )
        for first in range(0, layout.n, rows):
            part = read_array(path, np.uint8, layout.code_bytes, first, min(rows, layout.n - first))
            yield (
                code_pages(part, layout, salt, first // layout.codes_per_page)
                if layout.paged_codes
                else part
            )

    def _pages(
        self, pieces: list[Piece], edges: EdgesFile, codes: CodeReader, salt: int
    ) -> Iterator[np.ndarray]:
        layout = self._layout
        for nodes, first in self._nodes(pieces, edges, codes):
            yield pages_of(nodes, layout, first // layout.nodes_per_page, salt)
            self._progress("pages", min(first + len(nodes), layout.n), layout.n)

    def _nodes(
        self, pieces: list[Piece], edges: EdgesFile, codes: CodeReader
    ) -> Iterator[tuple[np.ndarray, int]]:
        """(nodes of whole pages, number of the first)"""
        layout, coding = self._layout, self._coding()
        at_once = max(1, _PAGE_BLOCK_BYTES // layout.page_bytes) * layout.nodes_per_page
        ready = np.zeros(at_once, layout.node_dtype)
        filled = first = 0
        for piece in (part for whole in pieces for part in whole.blocks(codes.rows_at_once)):
            if layout.inline_pq:
                codes.load(
                    edges.neighbours_of(piece.first_node, piece.end - piece.begin, layout.inline_pq)
                )
            begin = piece.begin
            while begin < piece.end:
                end = min(piece.end, begin + at_once - filled)
                block = Piece(piece.part, begin, end, piece.first_node + begin - piece.begin)
                self._fill(ready[filled : filled + end - begin], block, edges, codes, coding)
                filled, begin = filled + end - begin, end
                if filled == at_once:
                    yield ready, first
                    ready, filled, first = np.zeros(at_once, layout.node_dtype), 0, first + at_once
        if filled:
            yield ready[: -(-filled // layout.nodes_per_page) * layout.nodes_per_page], first

    def _fill(
        self,
        nodes: np.ndarray,
        block: Piece,
        edges: EdgesFile,
        codes: CodeReader,
        coding: VectorCoding,
    ) -> None:
        layout = self._layout
        counts = edges.counts[block.first_node : block.first_node + len(nodes)]
        near = read_array(edges.path, np.uint32, layout.max_degree, block.first_node, len(nodes))
        there = np.arange(layout.max_degree) < counts[:, None]
        nodes["vector"] = coding.encode(self._vectors(block))
        nodes["row"], nodes["n_neighbours"] = self._rows(block), counts
        nodes["neighbours"] = np.where(there, near, 0)
        if inline := layout.inline_pq:
            nodes["codes"][there[:, :inline]] = codes.get(near[:, :inline][there[:, :inline]])


class CodeReader:
    """Codes of nodes from a file, [n, code_bytes]: all in memory where they fit, else those that
    the next nodes want.

    Attributes:
        rows_at_once: nodes whose neighbours' codes fit.
    """

    def __init__(self, engine: NativeEngine, path: Path, layout: PageLayout, cache_bytes: int):
        self.path, self._engine, self._layout = path, engine, layout
        self._keeps = layout.n * layout.code_bytes <= cache_bytes
        row_bytes = 2 * layout.max_degree * layout.code_bytes
        self.rows_at_once = max(1, layout.n if self._keeps else cache_bytes // row_bytes)
        self._nodes = np.empty(0, np.int64)
        self._codes = np.empty((0, layout.code_bytes), np.uint8)
        self._file: FileHandle | None = None

    def open(self) -> None:
        """When the file is written."""
        if self._keeps:
            self._codes = read_array(self.path, np.uint8, self._layout.code_bytes)
        else:
            self._file = self._engine.open(self.path)

    def load(self, nodes: np.ndarray) -> None:
        """Codes of these nodes, int64 [m], growing, in place of those before."""
        if self._file is None:
            return
        size = self._layout.code_bytes
        self._nodes = nodes
        self._codes = np.empty((len(nodes), size), np.uint8)
        for first in range(0, len(nodes), _CODES_AT_ONCE):
            part = nodes[first : first + _CODES_AT_ONCE]
            future = self._engine.read(
                Plan.of(self._file, (part * size).tolist(), [size] * len(part)), gap_bytes=4096
            )
            memory = future.wait().numpy()
            self._codes[first : first + len(part)] = memory[
                future.position_bytes.numpy()[:, None] + np.arange(size)
            ]

    def get(self, nodes: np.ndarray) -> np.ndarray:
        """uint8 [m, code_bytes], of nodes that were loaded."""
        return self._codes[nodes if self._file is None else np.searchsorted(self._nodes, nodes)]

    def close(self) -> None:
        if self._file is not None:
            self._engine.close_file(self._file)
