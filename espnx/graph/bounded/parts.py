"""The graph of one part, on its way to being merged with the others: edges as rows of the input, in
the order in which they were chosen; and what all parts hold of the nodes of the merged graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from ...ops._native import load_extension
from ...storage.work import WorkFolder
from ..codes.codebook import Codebook
from ..edges import build_edges
from ..layout import PageLayout
from ..options import GraphOptions, measured_rows
from ..recall import RECALL_BLOCK_ROWS
from .merge import Piece
from .work import read_array

_BLOCK_ROWS = 4096


def build_part(
    work: WorkFolder,
    part: int,
    layout: PageLayout,
    options: GraphOptions,
    book: Codebook,
    longest: float,
    progress: Callable[[int], None],
) -> None:
    """Builds the graph of a part and writes, as the step `built_P`:

    - ``own.rows``: rows that are at home here, uint32 [m], page by page; ``own.vectors``,
      ``own.codes``, ``own.neighbours`` (uint32 [m, max_degree], rows of the input, zeros behind the
      last) and ``own.counts`` (uint16) of each;
    - ``guest.rows``, ``guest.neighbours``, ``guest.counts``: of guests, by their homes, of which
      ``guest.begin`` (int64 [parts + 1]) says where each begins;
    - ``medoid``: the row at which walks of the part begin.

    Args:
        longest: the largest squared length of all vectors.
        progress: called with the nodes that are inserted.
    """
    own, guests = (
        read_array(work.file("parts", f"{part}.{name}.rows"), np.uint32)
        for name in ("own", "guest")
    )
    homes = read_array(work.file("parts", f"{part}.guest.homes"), np.uint32)
    vectors = _read_vectors(work, part, layout, len(own), len(guests))
    measured, format_name = measured_rows(vectors, options.metric, layout.row_format, longest)
    graph = build_edges(
        measured,
        format_name,
        options,
        options.seed + part,
        lambda done, total: progress(len(vectors) * done // max(1, total)),
    )
    if len(vectors):
        graph.connect(torch.tensor([graph.medoid]))
    medoid = graph.medoid
    neighbours, counts = (each.numpy() for each in graph.edges())
    del graph
    order = _packed(measured[: len(own)], format_name, neighbours, counts, medoid, layout)
    rows = np.concatenate([own, guests])
    by_home = len(own) + np.argsort(homes, kind="stable")
    with work.step(f"built_{part}") as folder:
        rows[order].tofile(folder / "own.rows")
        _write_edges(folder, "own", rows, neighbours, counts, order)
        with (
            (folder / "own.vectors").open("wb") as stored,
            (folder / "own.codes").open("wb") as codes,
        ):
            for first in range(0, len(order), _BLOCK_ROWS):
                block = vectors[order[first : first + _BLOCK_ROWS]]
                stored.write(block.view(np.uint8).reshape(-1).data)
                codes.write(book.encode(block).reshape(-1).data)
        rows[by_home].tofile(folder / "guest.rows")
        _write_edges(folder, "guest", rows, neighbours, counts, by_home)
        n_homes = int(homes.max()) + 1 if len(homes) else 0
        np.searchsorted(np.sort(homes), np.arange(n_homes + 1)).astype(np.int64).tofile(
            folder / "guest.begin"
        )
        np.array([rows[medoid]] if len(rows) else [], np.uint32).tofile(folder / "medoid")
    with work.writing():
        work.drop("parts", *(f"{part}.{name}.vectors" for name in ("own", "guest")))


def _read_vectors(
    work: WorkFolder, part: int, layout: PageLayout, n_own: int, n_guests: int
) -> np.ndarray:
    dtype = layout.row_dtype
    vectors = np.empty((n_own + n_guests, layout.dim), dtype)
    for name, begin, end in (("own", 0, n_own), ("guest", n_own, n_own + n_guests)):
        for first in range(begin, end, _BLOCK_ROWS):
            count = min(_BLOCK_ROWS, end - first)
            vectors[first : first + count] = read_array(
                work.file("parts", f"{part}.{name}.vectors"),
                dtype,
                layout.dim,
                first - begin,
                count,
            )
    return vectors


def _write_edges(
    folder: Path,
    name: str,
    rows: np.ndarray,
    neighbours: np.ndarray,
    counts: np.ndarray,
    order: np.ndarray,
) -> None:
    counts[order].astype(np.uint16).tofile(folder / f"{name}.counts")
    with (folder / f"{name}.neighbours").open("wb") as file:
        for first in range(0, len(order), _BLOCK_ROWS):
            chosen = order[first : first + _BLOCK_ROWS]
            there = np.arange(neighbours.shape[1]) < counts[chosen, None]
            file.write(
                np.where(there, rows[neighbours[chosen]], 0).astype(np.uint32).reshape(-1).data
            )


def _packed(
    own: np.ndarray,
    format_name: str,
    neighbours: np.ndarray,
    counts: np.ndarray,
    medoid: int,
    layout: PageLayout,
) -> np.ndarray:
    """The order of those that are at home: that of pages of their own, by the edges between
    them."""
    n = len(own)
    if layout.nodes_per_page == 1 or n == 0:
        return np.arange(n)
    inner, inner_counts = np.zeros((n, neighbours.shape[1]), np.uint32), np.zeros(n, np.int64)
    for first in range(0, n, _BLOCK_ROWS):
        part = slice(first, min(first + _BLOCK_ROWS, n))
        inside = (np.arange(neighbours.shape[1]) < counts[part, None]) & (neighbours[part] < n)
        place = np.argsort(~inside, axis=1, kind="stable")
        inner_counts[part] = inside.sum(axis=1)
        inner[part] = np.take_along_axis(np.where(inside, neighbours[part], 0), place, axis=1)
    view = torch.from_numpy(own.view(np.uint8) if own.dtype == np.int8 else own)
    graph = load_extension().Vamana.from_edges(
        vectors=view,
        format=format_name,
        neighbours=torch.from_numpy(inner),
        counts=torch.from_numpy(inner_counts),
        medoid=medoid if medoid < n else 0,
        list_size=1,
    )
    order: np.ndarray = graph.pack(layout.nodes_per_page).numpy()
    return order


class BuiltParts:
    """What the parts of a build hold of their own rows, which are nodes of one graph.

    Args:
        work: of the build, whose parts `build_part` has built.
        pieces: of nodes, as `espnx.graph.bounded.merge.number_nodes` numbers them.
    """

    def __init__(self, work: WorkFolder, layout: PageLayout, pieces: list[Piece]):
        self._work, self.layout, self.pieces = work, layout, pieces

    def _read(
        self, piece: Piece, name: str, dtype: np.dtype | type, width: int | None
    ) -> np.ndarray:
        path = self._work.file(f"built_{piece.part}", f"own.{name}")
        return read_array(path, dtype, width, piece.begin, piece.end - piece.begin)

    def rows(self, piece: Piece) -> np.ndarray:
        """uint32 [m], of the input."""
        return self._read(piece, "rows", np.uint32, None)

    def vectors(self, piece: Piece) -> np.ndarray:
        """[m, dim], of `PageLayout.row_dtype`."""
        return self._read(piece, "vectors", self.layout.row_dtype, self.layout.dim)

    def codes(self, piece: Piece) -> np.ndarray:
        """uint8 [m, code_bytes]."""
        return self._read(piece, "codes", np.uint8, self.layout.code_bytes)

    def node_of(self) -> np.ndarray:
        """uint32 [n]: the node of each row."""
        node_of = np.zeros(self.layout.n, np.uint32)
        for piece in self.pieces:
            for block in piece.blocks():
                rows = self.rows(block)
                node_of[rows] = np.arange(
                    block.first_node, block.first_node + len(rows), dtype=np.uint32
                )
        return node_of

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(rows int64 [m], vectors [m, dim]) of all nodes, in order."""
        for piece in self.pieces:
            for block in piece.blocks(RECALL_BLOCK_ROWS):
                yield self.rows(block).astype(np.int64), self.vectors(block)
