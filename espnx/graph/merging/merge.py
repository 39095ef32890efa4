"""Writes what was added to a graph and deleted from it into pages, in a new version beside the old
one."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...storage import NativeEngine, Plan
from ...storage.files import crc32c
from ...storage.native import given_engine
from ...storage.work import WorkFolder
from ..bounded.merge import EdgesFile
from ..format import CODEBOOK, CODES, DISK_CODEBOOK, ENTRIES, NODES, ROWS, GraphFacts, in_directory
from ..layout import rows_of
from ..parts import NO_NODE
from ..search.version import GraphVersion
from ..updates.pending import Pending
from ..write import GraphFiles, Progress, code_pages, publish, writing_version
from .clusters import merge_clusters
from .measuring import measured_if
from .nodes import BLOCK_BYTES, DEADLINE_S, PartChanges
from .numbers import Numbers
from .part import PartMerge


def merge_changes(
    pages: GraphVersion, pending: Pending, memory_bytes: int, measure: str, progress: Progress
) -> GraphFacts:
    """Publishes the next version of a graph, whose writer holds its lock. Raises as
    `GraphWriter.merge`; then the version before stays."""
    with given_engine(None) as engine, writing_version(engine, pages.facts) as generation:
        job = {"generation": generation, "merge": secrets.token_hex(16)}
        work = WorkFolder(pages.facts.where, job)
        with work.step("merged") as folder:
            if pages.facts.clusters is not None:
                facts = merge_clusters(
                    engine, pages, pending, folder, memory_bytes, generation, measure, progress
                )
            else:
                merge = _Merge(engine, pages, pending, folder, memory_bytes, progress)
                facts = merge.publish(generation, measure)
        work.remove()
        return facts


class _Merge(PartMerge):
    def __init__(
        self,
        engine: NativeEngine,
        pages: GraphVersion,
        pending: Pending,
        folder: Path,
        memory_bytes: int,
        progress: Progress,
    ):
        self._pages, self._pending = pages, pending
        ids, rows = pending.living()
        dead = pending.dead
        nodes = pages.reader.nodes_of(engine, dead, DEADLINE_S)[:, 0] if len(dead) else dead
        changes = PartChanges(ids, rows, np.sort(nodes), pending.stamp)
        super().__init__(engine, pages.facts, changes, folder, memory_bytes, progress)

    def publish(self, generation: int, measure: str) -> GraphFacts:
        """Everything, in order."""
        numbers, edges, entries = self.run()
        try:
            return publish(
                self._engine,
                self._facts.where,
                self._files(generation, numbers, edges, entries),
                lambda facts: measured_if(self._engine, facts, measure, self._progress),
            )
        finally:
            self.close()

    def _searcher(self) -> Any:
        return super()._searcher() if self._facts.metric == "ip" else self._pages.native

    def _nodes_of(self, ids: np.ndarray) -> np.ndarray:
        return self._pages.reader.nodes_of(self._engine, ids, DEADLINE_S)[:, 0]

    def _files(
        self, generation: int, numbers: Numbers, edges: EdgesFile, entries: np.ndarray
    ) -> GraphFiles:
        facts, changes, salt = self._facts, self._changes, secrets.randbits(64)
        layout = replace(self._layout, n=numbers.n_new)
        entry_codes = self._codes_of(numbers, entries)
        whole = {
            CODEBOOK: self._nodes.book.packed(),
            ENTRIES: np.concatenate(
                [entries.astype("<u4").view(np.uint8).ravel(), entry_codes.ravel()]
            ),
        }
        if facts.disk_codebook is not None:
            whole[DISK_CODEBOOK] = facts.disk_codebook.packed()
        sums = {
            name: crc32c(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
            for name, values in whole.items()
        }
        moved_ids = self._moved_ids(numbers)
        contents: dict[str, Iterable[np.ndarray]] = {
            NODES: self._node_pages(numbers, edges, replace(facts, layout=layout), salt),
            ROWS: self._row_blocks(numbers, moved_ids),
        }
        contents |= {name: [values] for name, values in whole.items()}
        if layout.codes_in == "memory":
            sums[CODES] = 0
            for part in self._code_blocks(numbers):
                sums[CODES] = crc32c(np.ascontiguousarray(part).reshape(-1), sums[CODES])
            contents[CODES] = self._code_blocks(numbers)
        elif layout.paged_codes:
            contents[CODES] = self._paged_codes(numbers, salt)
        id_end = self._pending.id_end
        regions = in_directory(
            facts.where, generation, layout, len(entries), self._nodes.book, facts.disk_codebook,
            id_end=id_end,
        )  # fmt: skip
        made = replace(
            facts, regions=regions, layout=layout, salt=salt, entries=entries,
            entry_codes=entry_codes, codebook=self._nodes.book, sums=sums, generation=generation,
            id_end=id_end, pins={},
            unmeasured=facts.unmeasured + len(changes.ids) + len(changes.dead),
        )  # fmt: skip
        return GraphFiles(made, contents)

    def _code_blocks(self, numbers: Numbers) -> Iterator[np.ndarray]:
        per_page = self._layout.codes_per_page if self._layout.paged_codes else 1
        rows = max(1, BLOCK_BYTES // (self._layout.code_bytes * per_page)) * per_page
        for first in range(0, numbers.n_new, rows):
            yield self._codes_of(numbers, np.arange(first, min(first + rows, numbers.n_new)))

    def _paged_codes(self, numbers: Numbers, salt: int) -> Iterator[np.ndarray]:
        page = 0
        for part in self._code_blocks(numbers):
            yield code_pages(part, self._layout, salt, page)
            page += -(-len(part) // self._layout.codes_per_page)

    def _moved_ids(self, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
        """(ids; numbers) of old nodes that move."""
        names, moved = numbers.moved()
        if self._packs:
            return self._nodes.old_ids[names].astype(np.int64), moved
        at_once = max(1, BLOCK_BYTES // self._layout.page_bytes)
        ids = [
            rows_of(self._nodes.at(names[first : first + at_once]))
            for first in range(0, len(names), at_once)
        ]
        return np.concatenate([np.empty(0, np.int64), *ids]), moved

    def _row_blocks(
        self, numbers: Numbers, moved: tuple[np.ndarray, np.ndarray]
    ) -> Iterator[np.ndarray]:
        """uint32: the number of the node of each id."""
        facts, dead = self._facts, self._pending.dead
        added = numbers.number_of(self._n + np.arange(len(self._changes.ids)))
        file = self._engine.open(facts.open_path(ROWS))
        at_once = BLOCK_BYTES // 4
        for first in range(0, self._pending.id_end, at_once):
            end = min(first + at_once, self._pending.id_end)
            found = np.full(end - first, NO_NODE, "<u4")
            count = min(end, facts.n_rows) - first
            if count > 0:
                plan = Plan.of(file, [facts.begin_bytes(ROWS) + 4 * first], [4 * count])
                future = self._engine.read(plan)
                future.wait()
                at = int(future.position_bytes[0])
                found[:count] = future.memory.numpy()[at : at + 4 * count].view("<u4")
            for ids, values in ((dead, None), moved, (self._changes.ids, added)):
                is_here = (ids >= first) & (ids < end)
                found[ids[is_here] - first] = NO_NODE if values is None else values[is_here]
            yield found
