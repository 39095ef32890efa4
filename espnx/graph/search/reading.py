"""Pages of a graph that are read without a walk: those of rows by their numbers, and all of them,
to check them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import errors
from ...storage import NativeEngine, Plan
from ..filters import places_at
from ..format import NODES, ROWS, GraphFacts
from ..layout import rows_of
from ..pages.checked import open_pages, read_codes, read_pages

_VERIFY_S = 3600.0  # of a block of pages
_REBUILD = "restore the graph from a copy, or build it again"


class RowReader:
    """Args:
    facts: of the graph. engine: the path of the reads.
    """

    def __init__(self, facts: GraphFacts, engine: str):
        self.facts, self._requested = facts, engine

    def vectors(self, rows: np.ndarray, deadline_s: float) -> np.ndarray:
        """See `GraphIndex.vectors`."""
        layout = self.facts.layout
        found = np.empty((len(rows), layout.dim), layout.row_dtype)
        if not len(rows):
            return found
        with NativeEngine(self._requested) as engine:
            nodes = self._there(self.nodes_of(engine, rows, deadline_s))
            pages, which = np.unique(nodes // layout.nodes_per_page, return_inverse=True)
            files = open_pages(engine, self.facts)
            for first in range(0, len(pages), 4096):
                part = pages[first : first + 4096]
                read = read_pages(engine, files, self.facts, part, deadline_s)
                wanted = np.flatnonzero((which >= first) & (which < first + len(part)))
                here = read[which[wanted] - first, nodes[wanted] % layout.nodes_per_page]
                if (wrong := np.flatnonzero(rows_of(here) != rows[wanted])).size:
                    got = f"the node of row {rows_of(here)[wrong[0]]}"
                    raise errors.FormatError(
                        f"row {rows[wanted[wrong[0]]]} of a graph",
                        path=self.facts.path(ROWS),
                        got=got,
                        fix=_REBUILD,
                    )
                found[wanted] = self.facts.coding.decode(here["vector"])
        return found

    def _there(self, nodes: np.ndarray) -> np.ndarray:
        """int64 [m]: of the copies of each row, [m, copies], one whose directory is not lost, where
        there is one."""
        if not self.facts.lost or nodes.shape[1] == 1:
            return nodes[:, 0]
        parts = self.facts.parts
        is_there = (nodes >= 0) & self.facts.is_there[
            parts.of_pages(np.maximum(nodes, 0) // parts.nodes_per_page)
        ]
        found: np.ndarray = nodes[np.arange(len(nodes)), is_there.argmax(axis=1)]
        return found

    def nodes_of(self, engine: NativeEngine, rows: np.ndarray, deadline_s: float) -> np.ndarray:
        """int64 [m, copies]: places of the nodes of some rows, at least one; -1: of a copy that a
        row has not."""
        places = engine.open(self.facts.open_path(ROWS))
        size = self.facts.place_bytes
        begin = self.facts.begin_bytes(ROWS) + size * rows
        plan = Plan.of(places, begin.tolist(), [size] * len(rows))
        future = engine.read(plan, gap_bytes=4096, deadline_s=deadline_s)
        future.wait()
        return places_at(self.facts, future.memory.numpy(), future.position_bytes.numpy())

    def verify(self) -> int:
        """Reads and checks every page, see `GraphIndex.verify`: how many there are."""
        layout, parts = self.facts.layout, self.facts.parts
        reached = np.zeros(self.facts.n_rows, bool)
        with NativeEngine(self._requested) as engine:
            self.facts.check_there(np.arange(parts.n_pages))
            files = open_pages(engine, self.facts)
            rows_file = engine.open(self.facts.open_path(ROWS))
            for first in range(0, parts.n_pages, 1024):
                part = np.arange(first, min(first + 1024, parts.n_pages))
                nodes = read_pages(engine, files, self.facts, part, _VERIFY_S).reshape(-1)
                places = first * layout.nodes_per_page + np.arange(len(nodes))
                is_node = parts.is_node(places)
                rows = rows_of(nodes[is_node])
                reached[rows] = True
                self._verify_rows(engine, rows_file, rows, places[is_node])
            if layout.paged_codes:
                read_codes(engine, self.facts)
        if np.count_nonzero(reached) != layout.n:
            raise errors.FormatError(
                "rows of a graph",
                path=self.facts.path(NODES),
                got=f"nodes of {np.count_nonzero(reached):,} rows",
                expected=f"of {layout.n:,}",
                fix=_REBUILD,
            )
        return parts.n_pages

    def _verify_rows(
        self, engine: NativeEngine, rows_file: Any, rows: np.ndarray, places: np.ndarray
    ) -> None:
        if not len(rows):
            return
        size = self.facts.place_bytes
        begin = self.facts.begin_bytes(ROWS) + size * rows
        plan = Plan.of(rows_file, begin.tolist(), [size] * len(rows))
        future = engine.read(plan, gap_bytes=1 << 16)
        future.wait()
        found = places_at(self.facts, future.memory.numpy(), future.position_bytes.numpy())
        wrong = np.flatnonzero((found != places[:, None]).all(axis=1))
        if wrong.size:
            raise errors.FormatError(
                f"node of row {rows[wrong[0]]}",
                path=self.facts.path(ROWS),
                got=int(found[wrong[0], 0]),
                expected=int(places[wrong[0]]),
                fix=_REBUILD,
            )
