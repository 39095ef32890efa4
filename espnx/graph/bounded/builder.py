"""A build in bounded memory, step by step. A step that is finished is not done again when the build
is begun anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ... import errors
from ...ops.centroids import fit_means
from ...storage import NativeEngine
from ...storage.work import WorkFolder
from ..codes.codebook import Codebook, codebook_bytes, train_codebook, unpack_codebook
from ..codes.coding import VectorCoding
from ..format import GraphFacts, GraphShare
from ..layout import PageLayout
from ..options import GraphOptions
from ..recall import add_recall
from ..vectors import Vectors
from ..write import Progress
from .budget import Budget, plan_parts, resident_bytes
from .merge import EdgesFile, merge_parts, number_nodes
from .partition import PartFiles, divide
from .parts import BuiltParts, build_part
from .sample import draw_sample, stored_blocks
from .work import identity, read_array
from .writing import MergedGraph, write_graph

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
        InvalidInputError: a limit that is too low, or as `espnx.graph.options.stored_rows`.
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
        built = BuiltParts(self._work, self._layout, pieces)
        node_of = built.node_of()
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
            facts = self._write(book, built, node_of, edges, entries)
        times.append(time.perf_counter())
        chosen = self._options
        facts = add_recall(
            self._engine,
            facts,
            built.blocks,
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
        return stored_blocks(self._source, self._layout, self._options.metric, self._counted(what))

    def _sample(self) -> None:
        """Reads all vectors once: codebooks and centres of a sample, and the largest length."""
        layout, seed = self._layout, self._options.seed
        count = min(layout.n, self._budget.sample_rows)
        sample, longest = draw_sample(self._stored("read"), layout, self._options, count)
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
        built: BuiltParts,
        node_of: np.ndarray,
        edges: EdgesFile,
        entries: np.ndarray,
    ) -> GraphFacts:
        layout = self._layout
        graph = MergedGraph(
            built,
            node_of,
            edges,
            entries,
            book,
            VectorCoding(layout.format, self._codebook("disk_") if layout.format == "pq" else None),
            self._options.metric,
            {
                name: value
                for name, value in vars(self._options).items()
                if name not in ("metric", "threads")
            },
        )
        return write_graph(
            self._engine,
            self._path,
            graph,
            self._budget.cache_bytes,
            self._progress,
            generation=self._generation,
            share=self._share,
        )
