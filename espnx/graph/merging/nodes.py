"""Nodes of one graph while changes are merged into it: the old ones, as its pages have them, and
additions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...storage import NativeEngine
from ..bounded.codes import CodeReader
from ..codes.codebook import Codebook
from ..format import N_MAX, GraphFacts
from ..layout import rows_of
from ..options import measured_rows
from ..pages.checked import open_pages, read_codes, read_pages
from ..write import Progress
from .coding import codebook_for

BLOCK_BYTES = 4 << 20
DEADLINE_S = 3600.0


@dataclass(frozen=True, eq=False)
class PartChanges:
    """Changes of one graph.

    Attributes:
        ids, rows: int64 [a] and [a, dim], as `PageLayout.row_dtype`: of additions.
        dead: int64 [d], growing: nodes that are deleted.
        stamp: of a seed.
    """

    ids: np.ndarray
    rows: np.ndarray
    dead: np.ndarray
    stamp: int


class MergedNodes:
    """Nodes by a name that does not change: old ones by their number, additions by what follows.

    Attributes:
        facts: of one graph; codes inline, or of all of a directory.
        n: old nodes. changes: what is merged.
        old_ids: of old nodes by number, once `read` has ended; none where nobody wants them.
        book: of the codes: the graph's, or one that is trained where that says too little of the
            additions.
        longest: the largest squared length, once `read` has ended, by inner product.
        exact: vectors by name, where there is room for them.

    Args:
        folder: for a file of codes.
        memory_bytes: of vectors and codes.
        keeps_ids: whether ids of old nodes stay in memory.
        book: see above; None: that is found out.
    """

    def __init__(
        self,
        engine: NativeEngine,
        facts: GraphFacts,
        changes: PartChanges,
        folder: Path,
        memory_bytes: int,
        *,
        keeps_ids: bool,
        book: Codebook | None = None,
    ):
        self.facts, self.changes = facts, changes
        layout = self.layout = facts.layout
        self.n = layout.n
        self._engine, self._files = engine, open_pages(engine, facts)
        names = self.n + len(changes.ids)
        whole = names * layout.dim * layout.row_dtype.itemsize
        self.exact = (
            np.empty((names, layout.dim), layout.row_dtype) if 2 * whole <= memory_bytes else None
        )
        self._codes = CodeReader(
            engine, folder / "codes", replace(layout, n=names), memory_bytes // 4
        )
        self._keeps_ids = keeps_ids
        self.old_ids = np.empty(
            self.n if keeps_ids else 0, np.uint32 if facts.n_rows <= N_MAX else np.int64
        )
        self.longest: float | None = None
        if book is None:
            living = np.setdiff1d(np.arange(self.n), changes.dead, assume_unique=True)
            book = codebook_for(
                facts,
                len(living),
                lambda numbers: self._vectors(living[numbers]),
                changes.rows,
                memory_bytes // 8,
            )
        self.book = book

    def close(self) -> None:
        """Ends its threads and closes its files."""
        self._codes.close()
        for file in self._files:
            if file is not None:
                self._engine.close_file(file)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the first, nodes) of the old pages."""
        layout = self.layout
        at_once = max(1, BLOCK_BYTES // layout.page_bytes)
        for first in range(0, layout.n_pages, at_once):
            part = np.arange(first, min(first + at_once, layout.n_pages))
            nodes = read_pages(self._engine, self._files, self.facts, part, DEADLINE_S)
            begin = first * layout.nodes_per_page
            yield begin, nodes.reshape(-1)[: self.n - begin]

    def read(self, look_at: Callable[[int, np.ndarray], None], progress: Progress) -> None:
        """Reads codes of all nodes, and their vectors where there is room. `look_at`: is shown the
        vectors [m, dim] of successive old nodes, and the number of the first."""
        facts, layout = self.facts, self.layout
        is_kept = layout.codes_in == "memory" and self.book is facts.codebook
        held = read_codes(self._engine, facts) if is_kept else None
        longest = 0.0
        with self._codes.path.open("wb") as file:
            for first, nodes in self.blocks():
                rows = facts.coding.decode(nodes["vector"])
                part = slice(first, first + len(nodes))
                if self.exact is not None:
                    self.exact[part] = rows
                if self._keeps_ids:
                    self.old_ids[part] = rows_of(nodes)
                look_at(first, rows)
                longest = max(longest, _longest(rows))
                codes = self.book.encode(rows) if held is None else held[part]
                file.write(np.ascontiguousarray(codes).reshape(-1).data)
                progress("read", first + len(nodes), self.n)
            file.write(self.book.encode(self.changes.rows).reshape(-1).data)
        if self.exact is not None:
            self.exact[self.n :] = self.changes.rows
        if facts.metric == "ip":
            self.longest = max(longest, _longest(self.changes.rows))
        self._codes.open()

    def points(self, names: np.ndarray) -> np.ndarray:
        """float32 [m, dim], one more by inner product: vectors as edges are chosen by."""
        unique, inverse = np.unique(names, return_inverse=True)
        if self.exact is not None:
            rows = self.exact[unique]
        else:
            self._codes.load(unique)
            rows = self.book.decode(self._codes.get(unique))
            is_new = unique >= self.n
            rows[is_new] = self.changes.rows[unique[is_new] - self.n]
        return self.measured(rows)[inverse]

    def measured(self, rows: np.ndarray) -> np.ndarray:
        """What edges are chosen by, of vectors [m, dim]."""
        layout, metric = self.layout, self.facts.metric
        return np.asarray(
            measured_rows(rows, metric, layout.row_format, self.longest)[0], np.float32
        )

    def codes_of(self, names: np.ndarray) -> np.ndarray:
        """uint8 [m, code_bytes]."""
        self._codes.load(np.unique(names))
        return self._codes.get(names)

    def held(self, names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(what old nodes hold of their vectors; their ids)"""
        if self._keeps_ids and self.exact is not None and self.layout.format != "pq":
            return self.facts.coding.encode(self.exact[names]), self.old_ids[names]
        read = self.at(names)
        return read["vector"], rows_of(read)

    def at(self, names: np.ndarray) -> np.ndarray:
        """Old nodes [m], of the old pages."""
        layout = self.layout
        pages, which = np.unique(names // layout.nodes_per_page, return_inverse=True)
        if not len(pages):
            return np.empty(0, layout.node_dtype)
        read = read_pages(self._engine, self._files, self.facts, pages, DEADLINE_S)
        return read[which, names % layout.nodes_per_page]

    def _vectors(self, names: np.ndarray) -> np.ndarray:
        """float32 [m, dim] of old nodes, growing."""
        rows = np.empty((len(names), self.layout.dim), np.float32)
        at_once = max(1, BLOCK_BYTES // self.layout.page_bytes)
        for first in range(0, len(names), at_once):
            part = slice(first, first + at_once)
            rows[part] = self.facts.coding.decode(self.at(names[part])["vector"])
        return rows


def _longest(rows: np.ndarray) -> float:
    """The largest squared length."""
    return float(np.square(rows.astype(np.float32)).sum(axis=1).max()) if len(rows) else 0.0
