"""Makes lists, up to where each is to lie, and what is then written of them: to files of a
directory, or to sections of another file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import errors
from ..device.clusters.layout import TABLE
from ..device.clusters.write import ClusterStore
from ..graph.build import make_graph
from ..graph.format import section_of
from ..graph.hnsw.links import Links
from ..graph.hnsw.write import links_of
from ..graph.options import GraphOptions
from ..graph.vectors import Vectors
from ..graph.write import graph_files
from ..ops.quantise import load_faiss
from ..sizes import format_size
from ..storage.files import crc32c
from .closure import FLAT_HEADS_MAX, hnsw_index
from .coding import ListCoding, checked_blocks, grid_of
from .facts import GRAPH_NAME
from .gather import CLOSURE_WORK, LISTS_WORK, Assigned, Gathered, assign, gather
from .heads import choose_heads, flat_index
from .options import ClusterOptions
from .packing import LISTS_OF_QUERY, best_fit, co_access, gains_of, in_order

Progress = Callable[[str, int, int], None]

#: Of the memory of a build: for the sample that heads are chosen from (with FAISS's copy of it),
#: and for entries that are gathered at a time.
_SAMPLE_SHARE, _GATHER_SHARE = 0.25, 0.4
LEAST_MEMORY_BYTES = 64 << 20
_BLOCK_BYTES = 4096


def no_progress(what: str, done: int, total: int) -> None:
    """Says nothing."""


def least_memory(options: ClusterOptions, n: int, dim: int) -> int:
    """Bytes that making lists of n vectors takes at least."""
    # as chosen, as split, and of the sample one for each, with FAISS's copies; and their links
    head_bytes = 4 * (dim + 1) * 6 + 300
    return max(LEAST_MEMORY_BYTES, options.heads_of(n) * head_bytes)


def check_memory(options: ClusterOptions, n: int, dim: int, budget_bytes: int) -> None:
    """Raises InvalidInputError for fewer bytes than heads take."""
    least = least_memory(options, n, dim)
    if budget_bytes < least:
        raise errors.InvalidInputError(
            "memory of a build of lists",
            got=format_size(budget_bytes),
            expected=f"{format_size(least)} or more, for the heads",
            fix=f'memory="{format_size(least)}", or fewer heads (heads_share=, n_lists=)',
        )


@contextmanager
def faiss_threads(threads: int) -> Iterator[None]:
    """Has FAISS work with so many threads."""
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


@dataclass(eq=False)
class MadeLists:
    """Lists in a work file, and where each is to lie.

    Attributes:
        n: vectors. heads: float32 [lists, head_dim].
        begin: int64 [lists]: the byte at which each begins.
        index: FAISS's HNSW of the heads; None where they are to be in a graph and are few.
        times: of the beginning, and of the end of each step.
    """

    work: ClusterStore
    n: int
    coding: ListCoding
    options: ClusterOptions
    gathered: Gathered
    heads: np.ndarray
    begin: np.ndarray
    index: Any
    times: list[float]

    def table(self) -> np.ndarray:
        """`TABLE` [lists], without checksums: writing the entries fills them in."""
        table = np.zeros(len(self.heads), TABLE)
        table["offset_bytes"], table["n_vectors"] = self.begin, self.gathered.n_vectors
        return table

    def _in_place(self) -> Iterator[np.ndarray]:
        """The bytes of lists, in the order in which they are to lie."""
        return self.gathered.reader(self.work, np.argsort(self.begin, kind="stable"))

    def order(self) -> Iterator[np.ndarray]:
        """Rows of the input, int64, each once, as they come in lists that lie one after the
        other."""
        seen = np.zeros(self.n, bool)
        for data in self._in_place() if self.n else ():
            rows = data.view(self.coding.entry)["id"].astype(np.int64)
            fresh = rows[~seen[rows]]
            seen[fresh] = True
            yield fresh

    def entries(self, labels: np.ndarray | None = None) -> Callable[[int], np.ndarray]:
        """The bytes of a list, uint8; to be asked in the order in which lists are to lie.

        Args:
            labels: int64 [n]: what entries call each row of the input; None: by its number.
        """
        lists = self._in_place()

        def entries_of(number: int) -> np.ndarray:
            data = next(lists)
            if labels is None:
                return data
            named = data.view(self.coding.entry).copy()
            named["id"] = labels[named["id"]]
            return named.view(np.uint8)

        return entries_of

    @cached_property
    def heads_data(self) -> bytes:
        """The file of heads."""
        values = self.heads if self.options.heads == "memory" else self.heads[:0]
        centre = self.coding.centre
        tail = b"" if centre is None else centre.astype("<f4").tobytes()
        return values.astype("<f4").tobytes() + tail

    @cached_property
    def _links(self) -> Links:
        return links_of(self.index)

    @cached_property
    def links_data(self) -> bytes:
        """The file of links, where heads are in memory."""
        return self._links.to_bytes()

    def facts(self, graph: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the manifest says of the index. `graph`: of `head_graph`, once it is written."""
        options = self.options
        facts: dict[str, Any] = {
            "n": self.n,
            "metric": options.metric,
            "list_bytes": options.list_bytes,
            "replicas": options.replicas,
            "packing": options.packing,
            "seed": options.seed,
            "heads": options.heads,
            "step": self.coding.step,
            "most_squares": self.coding.most_squares,
            "heads_crc32c": crc32c(self.heads_data),
        }
        if options.heads == "memory":
            facts["links"] = {
                "m": self._links.m,
                "n_upper": len(self._links.upper),
                "entry": self._links.entry,
                "crc32c": crc32c(self.links_data),
            }
        elif graph is not None:
            facts["graph"] = dict(graph)
        return facts

    def head_graph(self, said: dict[str, Any]) -> Iterator[np.ndarray]:
        """The file of the graph of the heads, uint8, piece after piece. `said`: is given what the
        manifest says of it, at the end."""
        options = GraphOptions(
            vector_dtype="float16" if np.abs(self.heads).max(initial=0) < 60_000 else "float32",
            threads=self.options.threads,
            seed=self.options.seed,
        )
        path = self.work.path(GRAPH_NAME)
        graph, row_of = make_graph(self.heads, path, options)
        files = graph_files(graph, row_of, path, no_progress)
        regions, end = {}, 0
        for name, pieces in files.contents.items():
            begin = end
            for piece in pieces:
                data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                yield data
                end += len(data)
            regions[section_of(name)] = [begin, end - begin]
            if end % _BLOCK_BYTES:
                yield np.zeros(-end % _BLOCK_BYTES, np.uint8)
                end += -end % _BLOCK_BYTES
        said |= {"size_bytes": end, "regions": regions, "manifest": files.facts.manifest()}

    def remove_work(self) -> None:
        """Removes the work files. Raises WriteError, DiskFullError."""
        for name in (CLOSURE_WORK, LISTS_WORK):
            self.work.remove(name)


class ListBuild:
    """One build of lists.

    Args:
        work: where work files go. source: of the vectors.
        coding: of the vectors; where values are rounded, and it has no centre, the steps are
            chosen by a sample.
        budget_bytes: that it may take, see `least_memory`.
    """

    def __init__(
        self,
        work: ClusterStore,
        source: Vectors,
        coding: ListCoding,
        options: ClusterOptions,
        budget_bytes: int,
        progress: Progress,
    ):
        self._work, self._source, self._coding = work, source, coding
        self._options, self._budget_bytes, self._progress = options, budget_bytes, progress
        self._times = [time.perf_counter()]

    def run(self, queries: Any = None) -> MadeLists:
        """Makes them. `queries`: a sample of those that will be asked, or None. Raises as
        `espnx.clusters.build`."""
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
                self._work, source, self._coding, heads, options.replicas, self._progress
            )
        self._lap("closure")
        gathered = self._gathered(assigned, heads) if source.n else Gathered("", self._coding.entry)
        self._lap("lists")
        heads = np.array(gathered.heads, np.float32).reshape(-1, self._coding.head_dim)
        index = (
            hnsw_index(heads) if options.heads == "memory" or len(heads) > FLAT_HEADS_MAX else None
        )
        nearest = flat_index(heads) if len(heads) <= FLAT_HEADS_MAX else index
        begin = self._places(gathered, heads, nearest, asked)
        self._progress("packing", 0, len(heads))
        return MadeLists(
            self._work, source.n, self._coding, options, gathered, heads, begin, index, self._times
        )

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
        step, centre = coding.step, coding.centre
        if step and centre is None:
            step, centre = grid_of(sample, least, most)
        self._coding = ListCoding(
            coding.format, coding.dim, coding.metric, most_squares, step, centre
        )
        return self._coding.wide(sample)

    def _gathered(self, assigned: Assigned, heads: np.ndarray) -> Gathered:
        return gather(
            self._work,
            self._source,
            self._coding,
            assigned,
            heads,
            list_bytes=self._options.list_bytes,
            seed=self._options.seed,
            budget_bytes=int(self._budget_bytes * _GATHER_SHARE),
            progress=self._progress,
        )

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
