"""Pages of a graph that are read without a walk: those of rows by their numbers, and all of them,
to check them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import errors
from ...storage import NativeEngine, Plan
from ..format import NODES, ROWS, GraphFacts, parse_pages, read_codes

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
            nodes = self.nodes_of(engine, rows, deadline_s)
            pages, which = np.unique(nodes // layout.nodes_per_page, return_inverse=True)
            file = engine.open(self.facts.path(NODES))
            for first in range(0, len(pages), 4096):
                part = pages[first : first + 4096]
                begin = self.facts.begin_bytes(NODES) + part * layout.page_bytes
                plan = Plan.of(file, begin.tolist(), [layout.page_bytes] * len(part))
                future = engine.read(plan, deadline_s=deadline_s)
                future.wait()
                read = parse_pages(self.facts, part, future.memory, future.position_bytes.numpy())
                wanted = np.flatnonzero((which >= first) & (which < first + len(part)))
                here = read[which[wanted] - first, nodes[wanted] % layout.nodes_per_page]
                if (wrong := np.flatnonzero(here["row"] != rows[wanted])).size:
                    got = f"the node of row {here['row'][wrong[0]]}"
                    raise errors.FormatError(
                        f"row {rows[wanted[wrong[0]]]} of a graph",
                        path=self.facts.path(ROWS),
                        got=got,
                        fix=_REBUILD,
                    )
                found[wanted] = self.facts.coding.decode(here["vector"])
        return found

    def nodes_of(self, engine: NativeEngine, rows: np.ndarray, deadline_s: float) -> np.ndarray:
        """int64 [m]: numbers of the nodes of some rows, at least one."""
        places = engine.open(self.facts.path(ROWS))
        plan = Plan.of(places, (self.facts.begin_bytes(ROWS) + 4 * rows).tolist(), [4] * len(rows))
        future = engine.read(plan, gap_bytes=4096, deadline_s=deadline_s)
        future.wait()
        at = future.position_bytes.numpy()[:, None] + np.arange(4)
        nodes: np.ndarray = future.memory.numpy()[at].view("<u4").ravel().astype(np.int64)
        if nodes.max() >= self.facts.layout.n:
            raise errors.FormatError(
                "a row's node",
                path=self.facts.path(ROWS),
                got=int(nodes.max()),
                expected=f"below {self.facts.layout.n}",
                fix=_REBUILD,
            )
        return nodes

    def verify(self) -> int:
        """See `GraphIndex.verify`."""
        layout = self.facts.layout
        reached = np.zeros(layout.n, bool)
        with NativeEngine(self._requested) as engine:
            file = engine.open(self.facts.path(NODES))
            rows_file = engine.open(self.facts.path(ROWS))
            for first in range(0, layout.n_pages, 1024):
                part = np.arange(first, min(first + 1024, layout.n_pages))
                at_bytes = self.facts.begin_bytes(NODES) + first * layout.page_bytes
                future = engine.read(Plan.of(file, [at_bytes], [len(part) * layout.page_bytes]))
                future.wait()
                begin = future.position_bytes.numpy()[0] + np.arange(len(part)) * layout.page_bytes
                nodes = parse_pages(self.facts, part, future.memory, begin).reshape(-1)[
                    : layout.n - first * layout.nodes_per_page
                ]
                reached[nodes["row"]] = True
                self._verify_rows(engine, rows_file, nodes, first * layout.nodes_per_page)
            if layout.paged_codes:
                read_codes(engine, self.facts)
        if not reached.all():
            raise errors.FormatError(
                "rows of a graph",
                path=self.facts.path(NODES),
                got=f"no node of row {int(np.argmin(reached))}",
                fix=_REBUILD,
            )
        return layout.n_pages

    def _verify_rows(
        self, engine: NativeEngine, rows_file: Any, nodes: np.ndarray, first: int
    ) -> None:
        if not len(nodes):
            return
        begin = self.facts.begin_bytes(ROWS) + 4 * nodes["row"].astype(np.int64)
        future = engine.read(
            Plan.of(rows_file, begin.tolist(), [4] * len(nodes)), gap_bytes=1 << 16
        )
        future.wait()
        at = future.position_bytes.numpy()[:, None] + np.arange(4)
        numbers = future.memory.numpy()[at].view("<u4").ravel()
        wrong = np.flatnonzero(numbers != np.arange(first, first + len(nodes)))
        if wrong.size:
            raise errors.FormatError(
                f"node of row {nodes['row'][wrong[0]]}",
                path=self.facts.path(ROWS),
                got=int(numbers[wrong[0]]),
                expected=first + int(wrong[0]),
                fix=_REBUILD,
            )
