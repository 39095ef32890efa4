"""Entries of a part: its lists as sections, made of vectors, and what is read of them again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from .... import errors
from ....clusters.coding import ListCoding
from ....clusters.facts import (
    GRAPH_NAME,
    HEADS_NAME,
    LINKS_NAME,
    StoredLists,
    check_all_there,
    entries_in,
)
from ....clusters.gather import CLOSURE_WORK, LISTS_WORK
from ....clusters.making import ListBuild, MadeLists, faiss_threads, no_progress
from ....clusters.options import ClusterOptions
from ....device.clusters.layout import (
    DATA_NAME,
    INDEX_FIELD,
    TABLE_NAME,
    ClusterSections,
    section_of,
)
from ....device.clusters.write import ClusterStore, data_pieces, manifest_of
from ....device.vectors.interface import PAGE_BYTES
from ....graph.vectors import Vectors
from ....storage import NativeEngine
from ..in_turn import in_turn
from ..interface import Entries, StoredEntries

#: Sections of a part: what the manifest of a directory of lists says, and what its files hold; or
#: the vectors alone.
MANIFEST, VECTORS = "manifest", "vectors"
DATA, TABLE, HEADS, LINKS, GRAPH = map(
    section_of, (DATA_NAME, TABLE_NAME, HEADS_NAME, LINKS_NAME, GRAPH_NAME)
)
#: Read where they lie.
IN_PLACE = frozenset((DATA, TABLE, HEADS, LINKS, GRAPH))
_ORDER = "order"
FIX = "restore the store from a copy, or build it again"


@dataclass(frozen=True)
class Recipe:
    """How lists are made. Attributes: see `espnx.clusters.making.ListBuild`."""

    coding: ListCoding
    options: ClusterOptions
    budget_bytes: int


def flat_entries(rows: np.ndarray, numbers: np.ndarray, order: np.ndarray | None) -> Entries:
    """The entries of a small part: `rows`, [n, dim], are of these document or record numbers."""
    found = numbers if order is None else order
    return Entries([found], {VECTORS: [rows[_places(numbers, found)]]})


def _places(numbers: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """int64 [m]: where each of `wanted` is among `numbers`, all of which differ."""
    by_number = np.argsort(numbers, kind="stable")
    found: np.ndarray = by_number[np.searchsorted(numbers[by_number], wanted)]
    return found


def list_entries(
    source: Vectors, numbers: np.ndarray, order: np.ndarray | None, recipe: Recipe, scratch: str
) -> Entries:
    """The entries of a part with lists.

    Args:
        source: of the vectors; read several times.
        numbers: int64 [n]: documents or records that they are of.
        order: see `FirstStage.add`; None: records lie as the lists do, each where it comes first.
        scratch: a directory for work files, which are removed.
    """
    names = (DATA, TABLE, HEADS, LINKS if recipe.options.heads == "memory" else GRAPH, MANIFEST)
    made = _made(source, numbers, order, recipe, scratch)
    if order is not None:
        return Entries([order], in_turn(made, names))
    sections = in_turn(made, (_ORDER, *names))
    return Entries(sections.pop(_ORDER), sections)


def _made(
    source: Vectors, numbers: np.ndarray, order: np.ndarray | None, recipe: Recipe, scratch: str
) -> Iterator[tuple[str, Iterable[np.ndarray]]]:
    """The order, where none was given, then each section, made as they are asked for."""
    with NativeEngine() as engine:
        work = ClusterStore(engine, scratch or ".", 1)
        try:
            with faiss_threads(recipe.options.threads):
                build = ListBuild(
                    work, source, recipe.coding, recipe.options, recipe.budget_bytes, no_progress
                )
                made = build.run()
            if order is None:
                rows = np.concatenate(list(made.order()))
                yield _ORDER, [numbers[rows]]
            else:
                rows = _places(numbers, order)
            labels = np.empty(source.n, np.int64)  # of each row the place of its record
            labels[rows] = np.arange(source.n)
            yield from _sections(made, labels)
        finally:
            for name in (CLOSURE_WORK, LISTS_WORK):
                with suppress(errors.EspnxError):
                    work.remove(name)


def _sections(made: MadeLists, labels: np.ndarray) -> Iterator[tuple[str, Iterable[np.ndarray]]]:
    table, graph = made.table(), dict[str, Any]()
    yield DATA, data_pieces(table, PAGE_BYTES, made.entries(labels))
    yield TABLE, [table.view(np.uint8)]
    yield HEADS, [np.frombuffer(made.heads_data, np.uint8)]
    if made.options.heads == "memory":
        yield LINKS, [np.frombuffer(made.links_data, np.uint8)]
    else:
        yield GRAPH, made.head_graph(graph)
    end = int((made.begin + made.gathered.size_bytes).max())
    data_bytes = -(-end // PAGE_BYTES) * PAGE_BYTES
    facts, coding = made.facts(graph or None), made.coding
    manifest = manifest_of(coding.format, coding.dim, PAGE_BYTES, table, data_bytes, facts)
    yield MANIFEST, [np.frombuffer(json.dumps(manifest).encode(), np.uint8)]


def sections_of(part: StoredEntries) -> ClusterSections:
    """The lists of a part. Raises FormatError."""
    try:
        manifest = json.loads(part.read(MANIFEST).tobytes())
    except ValueError as error:
        raise _refused(part, str(error)) from error
    said = manifest.get(INDEX_FIELD) if isinstance(manifest, dict) else None
    if not isinstance(said, dict):
        raise _refused(part, type(manifest).__name__)
    names = (DATA, TABLE, HEADS, LINKS if said.get("heads") == "memory" else GRAPH)
    return ClusterSections(part.path, manifest, {name: part.place(name) for name in names})


def _refused(part: StoredEntries, got: str) -> errors.FormatError:
    return errors.FormatError("what lists say of themselves", path=part.path, got=got, fix=FIX)


def flat_vectors(part: StoredEntries, dtype: np.dtype, dim: int) -> np.ndarray:
    """[count, dim]: the vectors of a small part. Raises FormatError for another size."""
    size_bytes = part.count * dim * dtype.itemsize
    if part.size_bytes(VECTORS) != size_bytes:
        raise errors.FormatError(
            "vectors do not fit the part",
            path=part.path,
            got=part.size_bytes(VECTORS),
            expected=size_bytes,
            fix=FIX,
        )
    return part.read(VECTORS).view(dtype).reshape(part.count, dim)


def stored_rows(
    engine: NativeEngine, stored: StoredLists
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows int64 [m], their vectors as stored [m, dim]), list by list, each row once. Raises
    FormatError for one that no list has, and as `entries_in`."""
    seen = np.zeros(stored.facts.n, bool)
    for _, held in entries_in(engine, stored):
        fresh = ~seen[held["id"]]
        rows = held["id"][fresh].astype(np.int64)
        seen[rows] = True
        yield rows, held["vector"][fresh]
    check_all_there(stored.facts, seen)


def work_directory(parts: Iterable[StoredEntries]) -> str:
    """A directory for what merging parts makes."""
    return next((os.path.dirname(part.path) for part in parts), "")
