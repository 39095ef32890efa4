"""Builds a graph for each cluster, one after the other. A step that is finished is not done again
when the build is begun anew."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ... import errors
from ...checks import check_finite, check_whole
from ...ops.centroids import fit_means
from ...sizes import format_size
from ...storage import NativeEngine
from ...storage.files import crc32c
from ...storage.work import WorkFolder
from ..bounded.budget import fit_bytes, member_bytes, resident_bytes
from ..bounded.sample import draw_sample, stored_blocks
from ..bounded.work import identity, read_array
from ..codes.codebook import Codebook, train_codebook, unpack_codebook
from ..format import (
    CENTROIDS,
    CLUSTERS,
    CLUSTERS_MAX,
    CODEBOOK,
    ENTRIES,
    N_MAX,
    ROWS,
    GraphFacts,
    GraphShare,
    in_directory,
)
from ..layout import PageLayout
from ..options import GraphOptions
from ..pages.homes import make_homes
from ..parts import Clusters, PageFile, balanced, pages_in_files
from ..recall import add_recall
from ..vectors import Vectors
from ..write import GraphFiles, Progress, publish
from .cluster import build_cluster
from .division import COUNTS, Division, border_of, divide
from .rows import Members, row_places

#: Room of a cluster, where nobody says how much: so many times what each would have.
_ROOM = 2
_SAMPLE_ROWS, _SAMPLE_PER_CLUSTER = 65_536, 64
_BUFFERS_BYTES = 48 << 20
_COPY_BYTES = 4 << 20
# In place of a border that has no end: what a manifest holds.
_BORDER_MOST = 1e30
_SAMPLED, _DIVIDED = "sampled", "divided"


@dataclass(frozen=True)
class ClusterPlan:
    """How a build divides its vectors.

    Attributes:
        n_clusters: at most. max_points: vectors of one, at most. replicas: the share of all
            vectors that are in two, at most. sample_rows: for centres and codebook.
    """

    n_clusters: int
    max_points: int
    replicas: float
    sample_rows: int


def check_clusters(
    clusters: int | None,
    replicas: float,
    max_points: int | None = None,
    *,
    codes: str,
    vector_dtype: str | None,
    share: GraphShare | None = None,
) -> int:
    """How many clusters; options of `espnx.graph.build` that have to do with them are checked.
    Raises InvalidInputError."""
    if clusters is None:
        raise errors.InvalidInputError(
            "clusters of a graph",
            got="None, with max_points, replicas or directories",
            expected="how many",
        )
    check_whole("clusters of a graph", clusters, 1, CLUSTERS_MAX)
    if max_points is not None:
        check_whole("max_points, of a cluster", max_points, 1, N_MAX)
    check_finite("replicas, of vectors at borders", replicas)
    if not 0 <= replicas <= 1:
        raise errors.InvalidInputError(
            "replicas, of vectors at borders", got=replicas, expected="a share, 0 to 1"
        )
    for name, got, is_right, expected in (
        ("codes", codes, codes == "inline", "inline"),
        ("vector_dtype", vector_dtype, vector_dtype != "pq", "float32, float16, bfloat16, ..."),
        ("share", share, share is None, "none"),
    ):
        if not is_right:
            raise errors.InvalidInputError(
                f"{name} of a graph with clusters", got=got, expected=expected
            )
    return clusters


def build_bytes(layout: PageLayout, options: GraphOptions, n_clusters: int, most: int) -> int:
    """Bytes of memory that a build takes beside the process's libraries, the largest cluster of
    `most` vectors."""
    of_cluster, of_sample = most * member_bytes(layout, options), 16 * layout.dim * n_clusters
    return _BUFFERS_BYTES + fit_bytes(layout, options) + max(of_cluster, of_sample)


def room_of(n: int, n_clusters: int, replicas: float) -> int:
    """Vectors that a cluster may have, where nobody says how many."""
    return min(n, max(1, _ROOM * math.ceil(n * (1 + replicas) / n_clusters)))


def plan_clusters(
    layout: PageLayout,
    options: GraphOptions,
    n_clusters: int,
    max_points: int | None,
    replicas: float,
    memory_bytes: int | None,
) -> ClusterPlan:
    """Checks what was asked for, before anything is written.

    Raises InvalidInputError for clusters that have no room for all vectors, or of which one would
    take more memory than a build may.
    """
    n, count = layout.n, min(n_clusters, max(1, layout.n))
    least = -(-n // count)
    most = room_of(n, count, replicas) if max_points is None else max_points
    if most < least:
        raise errors.InvalidInputError(
            "max_points, of a cluster",
            got=most,
            expected=f"at least {least}: {count} clusters have {n} vectors",
            fix="more clusters",
        )
    most = min(most, N_MAX)
    sample = min(n, max(_SAMPLE_ROWS, _SAMPLE_PER_CLUSTER * count))
    if memory_bytes is None:
        return ClusterPlan(count, most, replicas, sample)
    used, fixed = resident_bytes(), _BUFFERS_BYTES + fit_bytes(layout, options)
    needed = used + build_bytes(layout, options, count, most)
    if memory_bytes < needed:
        raise errors.InvalidInputError(
            "memory for a build",
            got=format_size(memory_bytes),
            expected=f"at least {format_size(needed)} for clusters of up to {most:,} vectors",
            fix="more clusters, or a smaller max_points",
        )
    room = (memory_bytes - used - fixed) // (16 * layout.dim)
    return ClusterPlan(count, most, replicas, max(count, min(sample, room)))


class ClusteredBuild(NamedTuple):
    """What was built. `repaired`: nodes that were given edges; `seconds`: for sampling, dividing,
    graphs, writing, and measuring recall."""

    facts: GraphFacts
    repaired: int
    seconds: tuple[float, float, float, float, float]


def build_clustered(
    engine: NativeEngine,
    path: str,
    source: Vectors,
    layout: PageLayout,
    options: GraphOptions,
    plan: ClusterPlan,
    progress: Progress,
    generation: int,
    directories: Sequence[str] = (),
) -> ClusteredBuild:
    """Builds the graphs of all clusters in a directory that nobody else writes to.

    The directory may have the work folder of an interrupted build; where that was of the same
    vectors and options, what it had finished is kept. `generation`: of the files. `directories`:
    that the pages go to; none: beside the other files.

    Raises:
        InvalidInputError: as `espnx.graph.options.stored_rows`.
        WriteError, DiskFullError, ReadError: of the directory.
    """
    return _Builder(
        engine, path, source, layout, options, plan, progress, generation, directories
    ).run()


class _Builder:
    def __init__(
        self,
        engine: NativeEngine,
        path: str,
        source: Vectors,
        layout: PageLayout,
        options: GraphOptions,
        plan: ClusterPlan,
        progress: Progress,
        generation: int,
        directories: Sequence[str],
    ):
        self._directories = directories
        self._engine, self._path, self._source = engine, path, source
        self._layout, self._options, self._plan = layout, options, plan
        self._progress, self._generation = progress, generation
        self._chosen = {
            name: value for name, value in vars(options).items() if name != "threads"
        } | {"clusters": plan.n_clusters, "max_points": plan.max_points, "replicas": plan.replicas}
        job = {
            "generation": generation,
            "n": source.n,
            "dim": source.dim,
            "dtype": str(source.dtype),
            "input": identity(source),
            "layout": repr(layout),
            "options": repr(self._chosen),
        }
        self._work = WorkFolder(path, job)

    def run(self) -> ClusteredBuild:
        times = [time.perf_counter()]
        if not self._work.has(_SAMPLED):
            self._sample()
        book, centres, border, longest, salt = self._sampled()
        times.append(time.perf_counter())
        if not self._work.has(_DIVIDED):
            with self._work.step(_DIVIDED) as folder:
                divide(
                    lambda: self._stored("divide"),
                    centres,
                    self._plan.max_points,
                    border,
                    folder,
                    self._layout.row_dtype,
                )
        division = self._division()
        filled = np.flatnonzero(division.counts)
        times.append(time.perf_counter())
        for cluster in filled.tolist():
            self._progress("edges", int(division.counts[:cluster].sum()), self._n_nodes(division))
            if not self._work.has(_step(cluster)):
                self._build(cluster, division, book, longest, salt)
        self._progress("edges", *[self._n_nodes(division)] * 2)
        times.append(time.perf_counter())
        facts = self._write(division, filled, centres, border, book, salt)
        repaired = sum(int(self._built(each, "repaired", np.int64)[0]) for each in filled.tolist())
        times.append(time.perf_counter())
        facts = add_recall(
            self._engine,
            facts,
            division.blocks,
            threads=self._options.threads,
            seed=self._options.seed,
            progress=self._progress,
        )
        self._work.remove()
        times.append(time.perf_counter())
        read, divide_s, edges, pages, recall = np.diff(times).tolist()
        return ClusteredBuild(facts, repaired, (read, divide_s, edges, pages, recall))

    def _stored(self, what: str) -> Iterator[tuple[int, np.ndarray]]:
        layout = self._layout
        return stored_blocks(
            self._source,
            layout,
            self._options.metric,
            lambda done: self._progress(what, done, layout.n),
        )

    def _sample(self) -> None:
        """Reads all vectors once: codebook and centres of a sample, and the largest length."""
        layout, options, plan = self._layout, self._options, self._plan
        sample, longest = draw_sample(self._stored("read"), layout, options, plan.sample_rows)
        book = train_codebook(
            sample,
            layout.code_bytes,
            n=layout.n,
            use_opq=options.use_opq,
            seed=options.seed,
            device=options.device,
        )
        centres = fit_means(sample, plan.n_clusters, seed=options.seed, device=options.device)
        with self._work.step(_SAMPLED) as folder:
            book.begin.tofile(folder / "begin")
            book.packed().tofile(folder / "codebook")
            centres.astype(np.float32).tofile(folder / "centres")
            border = border_of(sample, centres, plan.replicas)
            np.array([border]).tofile(folder / "border")
            np.array([longest]).tofile(folder / "longest")
            np.array([secrets.randbits(64)], np.uint64).tofile(folder / "salt")

    def _sampled(self) -> tuple[Codebook, np.ndarray, float, float, int]:
        def read(name: str, dtype: type, width: int | None = None) -> np.ndarray:
            return read_array(self._work.file(_SAMPLED, name), dtype, width)

        book = unpack_codebook(
            read("begin", np.int64), read("codebook", np.float32), self._layout.dim
        )
        centres = read("centres", np.float32, self._layout.dim)
        border, longest = (float(read(name, np.float64)[0]) for name in ("border", "longest"))
        return book, centres, border, longest, int(read("salt", np.uint64)[0])

    def _division(self) -> Division:
        counts = read_array(self._work.file(_DIVIDED, COUNTS), np.int64)
        folder = self._work.file(_DIVIDED, COUNTS).parent
        return Division(folder, counts, self._layout.dim, self._layout.row_dtype)

    def _build(
        self, cluster: int, division: Division, book: Codebook, longest: float, salt: int
    ) -> None:
        """Writes, as a step: pages, the number of each row's node (rows ascending), and of the
        entry points numbers and codes."""
        before = int(division.counts[:cluster].sum())
        number = int(np.count_nonzero(division.counts[:cluster]))  # clusters without any have none
        built = build_cluster(
            division.vectors(cluster),
            division.rows(cluster),
            self._layout,
            self._options,
            book,
            longest,
            (salt + number) % 2**64,
            self._options.seed + cluster,
            lambda done: self._progress("edges", before + done, self._n_nodes(division)),
        )
        with self._work.step(_step(cluster)) as folder:
            with (folder / "pages").open("wb") as file:
                for part in built.pages:
                    file.write(part.data)
            built.node_of.tofile(folder / "node_of")
            built.entries.tofile(folder / "entries")
            built.entry_codes.tofile(folder / "entry_codes")
            np.array([built.repaired]).tofile(folder / "repaired")

    def _built(self, cluster: int, name: str, dtype: type, width: int | None = None) -> np.ndarray:
        return read_array(self._work.file(_step(cluster), name), dtype, width)

    def _write(
        self,
        division: Division,
        filled: np.ndarray,
        centres: np.ndarray,
        border: float,
        book: Codebook,
        salt: int,
    ) -> GraphFacts:
        layout, numbers = self._layout, filled.tolist()
        each = [self._built(cluster, "entries", np.uint32) for cluster in numbers]
        entries = np.concatenate(each).astype(np.int64)
        codes = np.concatenate(
            [self._built(c, "entry_codes", np.uint8, layout.code_bytes) for c in numbers]
        )
        pages = -(-division.counts[filled] // layout.nodes_per_page)
        n_files = max(1, len(self._directories))
        files = balanced(pages, n_files)
        sizes = np.bincount(files, pages, n_files).astype(np.int64).tolist()
        clusters = Clusters(
            np.ascontiguousarray(centres[filled]),
            division.counts[filled],
            np.array([len(part) for part in each], np.int64),
            2 if self._n_nodes(division) > layout.n else 1,
            files,
            pages_in_files(pages, files),
            np.uint64(salt) + np.arange(len(pages), dtype=np.uint64),
            [PageFile(file, self._generation, size) for file, size in enumerate(sizes)],
        )
        whole = {
            CODEBOOK: book.packed(),
            ENTRIES: np.concatenate([entries.astype("<u4").view(np.uint8), codes.ravel()]),
            CLUSTERS: clusters.table(),
            CENTROIDS: clusters.centroids,
        }
        regions = in_directory(
            self._path, self._generation, layout, len(entries), book, None, clusters
        )
        if self._directories:
            make_homes(self._directories, salt)
        facts = GraphFacts(
            self._path,
            regions,
            layout,
            self._options.metric,
            salt,
            book,
            entries,
            codes,
            {name: crc32c(_bytes(values)) for name, values in whole.items()},
            {name: value for name, value in self._chosen.items() if name != "metric"},
            generation=self._generation,
            clusters=clusters,
            directories=self._directories,
            border=min(border, _BORDER_MOST) if self._plan.replicas else None,
        )
        of_files = [
            self._pages(filled[clusters.files == file].tolist())
            for file in range(len(facts.page_files))
        ]
        contents: dict[str, Iterable[np.ndarray]] = {ROWS: self._places(division, numbers, facts)}
        contents |= {name: [values] for name, values in whole.items()}
        return publish(self._engine, self._path, GraphFiles(facts, contents, of_files))

    def _pages(self, clusters: list[int]) -> Iterator[np.ndarray]:
        for number, cluster in enumerate(clusters):
            path = self._work.file(_step(cluster), "pages")
            size = path.stat().st_size
            for first in range(0, size, _COPY_BYTES):
                yield read_array(path, np.uint8, None, first, min(_COPY_BYTES, size - first))
            self._progress("pages", number + 1, len(clusters))

    def _places(
        self, division: Division, clusters: list[int], facts: GraphFacts
    ) -> Iterator[np.ndarray]:
        first_place = facts.parts.first_page * self._layout.nodes_per_page

        def members(i: int, cluster: int) -> Members:
            path = self._work.file(_step(cluster), "node_of")
            return Members(
                int(division.counts[cluster]),
                int(first_place[i]),
                lambda first, count: division.rows(cluster, first, count),
                lambda first, count: read_array(path, np.uint32, None, first, count),
            )

        return row_places(
            self._layout.n, facts.copies, [members(*each) for each in enumerate(clusters)]
        )

    @staticmethod
    def _n_nodes(division: Division) -> int:
        return int(division.counts.sum())


def _step(cluster: int) -> str:
    return f"built_{cluster}"


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
