"""Rows that alone a search may find: as a caller names them, as a walk over a graph needs them, and
measured one by one."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import errors
from ..checks import plain
from ..storage import NativeEngine, Plan
from .format import ROWS, GraphFacts
from .layout import rows_of
from .pages.checked import open_pages, read_pages
from .parts import NO_COPY, NO_NODE
from .vectors import as_array

_REBUILD = "restore the graph from a copy, or build it again"
#: Entry points that a scattered filter has at least, and places in which any other has one: of a
#: graph's own, or nodes that are read.
ENTRIES_MIN, _PLACES = 16, 64
# Of the pages with allowed nodes, those that are read for entry points.
_ENTRY_PAGES_SHARE = 1 / 8
# Whether a filter is scattered is told by so many of the graph's entry points and the nearest of
# these to each; by fewer of them that it allows it cannot be told.
_LOOKED_AT, _SURROUNDING, _TELLING = 1024, 16, 24
_BY_CHANCE = 4  # standard deviations
_KEPT = 4  # filters that an open graph knows again
_READ_BYTES = 8 << 20  # at a time


@dataclass(frozen=True, eq=False)
class RowFilter:
    """Rows that alone a search may find, made once for many searches.

    Attributes:
        bits: uint8 tensor; bit i % 8 of byte i // 8 is set where row i may be found.
        count: how many may.
    """

    bits: torch.Tensor
    count: int

    @classmethod
    def of(cls, mask: np.ndarray) -> RowFilter:
        """Packs a mask, bool [n]."""
        return cls(torch.from_numpy(np.packbits(mask, bitorder="little")), int(mask.sum()))

    def mask(self, n: int) -> np.ndarray:
        """bool [n]."""
        return np.unpackbits(self.bits.numpy(), count=n, bitorder="little").astype(bool)

    def rows(self) -> np.ndarray:
        """Numbers of those that may be found, int64, ascending."""
        return np.flatnonzero(np.unpackbits(self.bits.numpy(), bitorder="little"))


def row_mask(rows: Any, n: int, name: str) -> np.ndarray:
    """bool [n] of rows as `GraphIndex.search` takes them, in any collection. `name`: of the
    argument. Raises InvalidInputError."""
    if isinstance(rows, RowFilter):
        return rows.mask(n)
    expected = f"bool [{n}], or numbers from 0 to {n - 1}"
    is_collection = (
        isinstance(rows, Iterable)
        and not hasattr(rows, "__array__")
        and not isinstance(rows, str | bytes)
    )
    try:
        found = as_array([plain(row) for row in rows] if is_collection else rows)
    except (ValueError, OverflowError) as error:
        raise errors.InvalidInputError(
            f"rows to {name}", got=str(error), expected=expected
        ) from None
    if found.dtype == bool and found.shape == (n,):
        return found
    if found.size == 0:
        return np.zeros(n, bool)
    if found.ndim != 1 or found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= n:
        raise errors.InvalidInputError(
            f"rows to {name}", got=f"{found.dtype} {list(found.shape)}", expected=expected
        )
    mask = np.zeros(n, bool)
    mask[found] = True
    return mask


def filter_of(include: Any, exclude: Any, n: int) -> RowFilter | None:
    """The filter for rows as `GraphIndex.search` takes them; None: all of the n may be found.
    Raises InvalidInputError."""
    if isinstance(include, RowFilter) and exclude is None:
        return include
    allowed = mask_of(include, exclude, n)
    return None if allowed is None else RowFilter.of(allowed)


def mask_of(include: Any, exclude: Any, n: int) -> np.ndarray | None:
    """The same as a mask, bool [n]."""
    if include is None and exclude is None:
        return None
    allowed = np.ones(n, bool) if include is None else row_mask(include, n, "include")
    return allowed if exclude is None else allowed & ~row_mask(exclude, n, "exclude")


@dataclass(frozen=True, eq=False)
class NodeFilter:
    """A filter of rows, as walks over one graph take it: neighbours are named by the numbers of
    their nodes.

    Attributes:
        rows: that may be found.
        nodes: uint8 tensor, a bit for each place of a node (`Parts`), as those of `RowFilter`.
        counts, part_pages: int64 [parts]: nodes that may be found, and the pages that they are on.
        page_mask: bool [pages]: those that have such a node.
        is_scattered: whether they lie everywhere, like rows drawn by lot, as far as the graph's
            entry points tell: then some lie around every query. Else some places have more of them
            than others, and a query may be far from all.
        read_bytes, read_requests: of the file of rows.
    """

    rows: RowFilter
    nodes: torch.Tensor
    counts: np.ndarray
    part_pages: np.ndarray
    page_mask: np.ndarray
    is_scattered: bool
    read_bytes: int
    read_requests: int

    @property
    def n_pages(self) -> int:
        """Pages that have a node which may be found."""
        return int(np.count_nonzero(self.page_mask))

    @property
    def costs(self) -> dict[str, int]:
        """What a search has read of the file of rows for it, see `Neighbours`."""
        return {"filter_bytes": self.read_bytes, "filter_requests": self.read_requests}

    @property
    def n_runs(self) -> int:
        """How many runs those pages are in, side by side."""
        return _runs(np.flatnonzero(self.page_mask))

    def native(self, seeds: Seeds) -> dict[str, Any]:
        """The filter as the native searcher takes it: a walk and what was read to begin it read no
        more than all pages that have such a node."""
        return {
            "rows": self.rows.bits,
            "nodes": self.nodes,
            "counts": torch.from_numpy(self.counts),
            "pages": torch.from_numpy(self.part_pages - seeds.part_pages),
            "entries": torch.from_numpy(seeds.nodes),
            "entry_codes": torch.from_numpy(seeds.codes),
            "entries_begin": torch.from_numpy(seeds.begin),
        }


@dataclass(frozen=True, eq=False)
class Seeds:
    """Nodes that a filter allows, at which walks begin, too.

    Attributes:
        nodes: int64 [m]: some, in as many places as may be, each numbered in its own graph; of each
            those from ``begin[p]`` on, int64 [parts + 1]. codes: uint8 [m, code_bytes].
        part_pages: int64 [parts]: that are read for those which are no entry points of the graph.
        n_runs: how many runs side by side these are.
    """

    nodes: np.ndarray
    begin: np.ndarray
    codes: np.ndarray
    part_pages: np.ndarray
    n_runs: int

    @property
    def n_pages(self) -> int:
        """Pages of all graphs."""
        return int(self.part_pages.sum())

    @property
    def costs(self) -> dict[str, int]:
        """What a search has read that read those pages, see `Neighbours`."""
        return {"shared_pages": self.n_pages, "shared_requests": self.n_runs}


class FilterReader:
    """What filters need of one graph's files. Any thread.

    Args:
        facts: of the graph. engine: the path of its reads.
    """

    def __init__(self, facts: GraphFacts, engine: str):
        self._facts, self._requested = facts, engine
        self._kept: list[NodeFilter] = []
        self._seeds: weakref.WeakKeyDictionary[NodeFilter, Seeds] = weakref.WeakKeyDictionary()
        self._surroundings: tuple[np.ndarray, np.ndarray] | None = None
        self._existing: np.ndarray | None = None
        self._lock = threading.Lock()

    def nodes_of(self, rows: RowFilter, deadline_s: float) -> tuple[NodeFilter, bool]:
        """(the filter; whether anything was read for it: the last few are kept). Raises as
        `GraphIndex.search`."""
        with self._lock:
            for i, each in enumerate(self._kept):
                if each.rows is rows or (
                    each.rows.count == rows.count and torch.equal(each.rows.bits, rows.bits)
                ):
                    self._kept.insert(0, self._kept.pop(i))
                    return each, False
        made = self._make(rows, _Clock(deadline_s))
        with self._lock:
            self._kept = [made, *self._kept[: _KEPT - 1]]
        return made, True

    def existing(self, deadline_s: float) -> np.ndarray:
        """bool [n_rows]: ids that have a node. Read once, and kept a bit a row. Raises as
        `GraphIndex.search`."""
        facts = self._facts
        if not facts.has_gaps:
            return np.ones(facts.n_rows, bool)
        if self._existing is None:
            found = np.zeros(facts.n_rows, bool)
            clock = _Clock(deadline_s)
            with NativeEngine(self._requested) as engine:
                file = engine.open(facts.open_path(ROWS))
                size = facts.place_bytes
                for first in range(0, facts.n_rows, _READ_BYTES // size):
                    count = min(_READ_BYTES // size, facts.n_rows - first)
                    plan = Plan.of(file, [facts.begin_bytes(ROWS) + size * first], [size * count])
                    future = engine.read(plan, deadline_s=clock.left_s())
                    future.wait()
                    at = int(future.position_bytes[0]) + size * np.arange(count)
                    found[first : first + count] = (
                        places_at(facts, future.memory.numpy(), at)[:, 0] >= 0
                    )
            if np.count_nonzero(found) != facts.layout.n:
                raise errors.FormatError(
                    "rows of a graph",
                    path=facts.path(ROWS),
                    got=f"{np.count_nonzero(found)} with a node",
                    expected=facts.layout.n,
                    fix=_REBUILD,
                )
            self._existing = np.packbits(found, bitorder="little")
        bits = np.unpackbits(self._existing, count=facts.n_rows, bitorder="little")
        return bits.astype(bool)

    def _make(self, rows: RowFilter, clock: _Clock) -> NodeFilter:
        layout, parts = self._facts.layout, self._facts.parts
        allowed = np.zeros(parts.n_places, bool)
        with NativeEngine(self._requested) as engine:
            marked, read_bytes, requests = self._mark(engine, rows, allowed, clock)
            if np.count_nonzero(allowed) != marked:
                raise errors.FormatError(
                    "rows of a graph",
                    path=self._facts.path(ROWS),
                    got="a node of two rows",
                    expected="one of each",
                    fix=_REBUILD,
                )
        by_page = allowed.reshape(-1, layout.nodes_per_page)
        if self._facts.lost:
            by_page[~np.repeat(self._facts.is_there, parts.pages)] = False
        per_page = by_page.sum(axis=1)
        page_mask = per_page > 0
        return NodeFilter(
            rows,
            torch.from_numpy(np.packbits(allowed, bitorder="little")),
            parts.by_part(per_page),
            parts.by_part(page_mask),
            page_mask,
            self._is_scattered(allowed),
            read_bytes,
            requests,
        )

    def _is_scattered(self, allowed: np.ndarray) -> bool:
        """Whether around allowed entry points no more are allowed than among all of them."""
        if self._surroundings is None:
            self._surroundings = _surroundings(self._facts)
        looked_at, nearest = self._surroundings
        may = allowed[looked_at]
        count, width = int(np.count_nonzero(may)), nearest.shape[1]
        if count < _TELLING or not width:
            return count == len(may)
        # Moran's I: around a mean of zero, so that points which are near to many others weigh no
        # more than any.
        off = may - count / len(may)
        alike = float((off[:, None] * off[nearest]).sum())
        # Of two that are near to each other, each is among the nearest of the other: at most half
        # of what is summed tells nothing new.
        deviation = float(np.square(off).mean() * np.sqrt(2 * width * len(may)))
        return alike <= _BY_CHANCE * deviation

    def seeds_of(self, nodes: NodeFilter, deadline_s: float) -> tuple[Seeds, bool]:
        """(where walks begin, for a filter; whether pages were read for it). Raises as
        `GraphIndex.search`."""
        with self._lock:
            kept = self._seeds.get(nodes)
        if kept is not None:
            return kept, False
        parts, codes = self._facts.parts, self._facts.entry_codes
        entries = parts.places_of(self._facts.entries)
        mask = np.unpackbits(nodes.nodes.numpy(), count=parts.n_places, bitorder="little") > 0
        chosen = mask[entries]
        entries, codes, pages = entries[chosen], codes[chosen], np.empty(0, np.int64)
        if not nodes.is_scattered or len(entries) < min(ENTRIES_MIN, nodes.rows.count):
            with NativeEngine(self._requested) as engine:
                more, more_codes, pages = self._more_entries(
                    engine, nodes, np.flatnonzero(mask), entries, _Clock(deadline_s)
                )
            entries, codes = np.concatenate([entries, more]), np.concatenate([codes, more_codes])
        part = parts.of_pages(entries // parts.nodes_per_page)
        order, n_parts = np.argsort(part, kind="stable"), len(parts.nodes)
        made = Seeds(
            entries[order] - parts.first_page[part[order]] * parts.nodes_per_page,
            np.searchsorted(part[order], np.arange(n_parts + 1)),
            np.ascontiguousarray(codes[order]),
            np.bincount(parts.of_pages(pages), minlength=n_parts),
            _runs(pages),
        )
        with self._lock:
            self._seeds[nodes] = made
        return made, len(pages) > 0

    def _mark(
        self, engine: NativeEngine, rows: RowFilter, allowed: np.ndarray, clock: _Clock
    ) -> tuple[int, int, int]:
        """Sets the places of the nodes of these rows: how many there are, and bytes that were read,
        in how many requests."""
        n, marked, read_bytes, requests = self._facts.n_rows, 0, 0, 0
        bits = rows.bits.numpy()
        size = self._facts.place_bytes
        file = engine.open(self._facts.open_path(ROWS))
        at_once = _READ_BYTES // size
        for begin in range(0, n, at_once):
            wanted = (
                np.flatnonzero(
                    np.unpackbits(bits[begin // 8 : (begin + at_once) // 8], bitorder="little")
                )
                + begin
            )
            wanted = wanted[wanted < n]
            if not len(wanted):
                continue
            # Of a few rows, blocks in which one is; else all between the first and the last.
            blocks = np.unique(wanted // 1024)
            if len(blocks) * 4 > blocks[-1] - blocks[0]:
                blocks = np.arange(blocks[0], blocks[-1] + 1)
            sizes = np.minimum(1024, n - blocks * 1024) * size
            begins = self._facts.begin_bytes(ROWS) + 1024 * size * blocks
            plan = Plan.of(file, begins.tolist(), sizes.tolist())
            future = engine.read(plan, deadline_s=clock.left_s())
            future.wait()
            at = future.position_bytes.numpy()[np.searchsorted(blocks, wanted // 1024)] + size * (
                wanted % 1024
            )
            places = places_at(self._facts, future.memory.numpy(), at)
            places = places[places >= 0]
            allowed[places] = True
            marked += len(places)
            read_bytes += int(sizes.sum())
            requests += _runs(blocks)
        return marked, read_bytes, requests

    def _more_entries(
        self,
        engine: NativeEngine,
        nodes: NodeFilter,
        allowed: np.ndarray,
        entries: np.ndarray,
        clock: _Clock,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(nodes, their codes, pages that were read): neighbours have near numbers, so that numbers
        far from one another are different places, and a few allowed nodes far from most have one of
        their own."""
        layout, parts = self._facts.layout, self._facts.parts
        places = ENTRIES_MIN if nodes.is_scattered else _PLACES
        first = np.searchsorted(allowed, np.arange(places + 1) * parts.end_place / places)
        lacking = np.flatnonzero(
            (np.diff(first) > 0)
            & (np.bincount(entries * places // parts.end_place, minlength=places) == 0)
        )
        pages = np.unique(
            allowed[(first[lacking] + first[lacking + 1]) // 2] // layout.nodes_per_page
        )
        most = int(max(1, nodes.n_pages * _ENTRY_PAGES_SHARE))
        pages = pages[
            np.unique(np.linspace(0, len(pages) - 1, min(most, len(pages))).astype(np.int64))
        ]
        if not len(pages):
            return np.empty(0, np.int64), np.empty((0, layout.code_bytes), np.uint8), pages
        found = read_pages(
            engine, open_pages(engine, self._facts), self._facts, pages, clock.left_s()
        )
        numbers = pages[:, None] * layout.nodes_per_page + np.arange(layout.nodes_per_page)
        may = np.isin(numbers, allowed)
        vectors = self._facts.coding.decode(found["vector"][may])
        return numbers[may], self._facts.codebook.encode(vectors), pages

    def blocks(
        self, nodes: NodeFilter, deadline_s: float
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows that may be found and their vectors, (int64 [m], [m, dim]), in pieces: each page
        that has some is read once."""
        layout, parts, clock = self._facts.layout, self._facts.parts, _Clock(deadline_s)
        pages = np.flatnonzero(nodes.page_mask)
        may = np.unpackbits(nodes.nodes.numpy(), count=parts.n_places, bitorder="little") > 0
        left = nodes.rows.bits.numpy().copy()  # of rows with copies only one is measured
        with NativeEngine(self._requested) as engine:
            files = open_pages(engine, self._facts)
            at_once = max(1, _READ_BYTES // layout.page_bytes)
            for first in range(0, len(pages), at_once):
                part = pages[first : first + at_once]
                found = read_pages(engine, files, self._facts, part, clock.left_s())
                numbers = part[:, None] * layout.nodes_per_page + np.arange(layout.nodes_per_page)
                inside = parts.is_node(numbers)
                here, is_wanted = found[inside], may[numbers[inside]]
                rows = rows_of(here)
                if not np.array_equal(_bits_at(nodes.rows.bits.numpy(), rows), is_wanted):
                    raise errors.FormatError(
                        "rows of a graph",
                        path=self._facts.path(ROWS),
                        got="other nodes than the pages say",
                        fix=_REBUILD,
                    )
                if self._facts.copies > 1:
                    rows, here = rows[is_wanted], here[is_wanted]
                    rows, first_of = np.unique(rows, return_index=True)
                    is_wanted = _bits_at(left, rows)
                    here = here[first_of]
                    np.bitwise_and.at(left, rows >> 3, ~(1 << (rows & 7)).astype(np.uint8))
                yield rows[is_wanted], self._facts.coding.decode(here["vector"][is_wanted])


def _runs(numbers: np.ndarray) -> int:
    """How many runs of consecutive numbers these are; ascending."""
    return int(np.count_nonzero(np.diff(numbers) > 1)) + 1 if len(numbers) else 0


def _surroundings(facts: GraphFacts) -> tuple[np.ndarray, np.ndarray]:
    """(some of a graph's entry points; of each the places among these of those that are nearest to
    it), as their codes tell."""
    chosen = np.unique(
        np.linspace(0, max(0, len(facts.entries) - 1), min(_LOOKED_AT, len(facts.entries))).astype(
            np.int64
        )
    )
    width, places = min(_SURROUNDING, len(chosen) - 1), facts.parts.places_of(facts.entries)
    if width < 1:
        return places[chosen], np.empty((len(chosen), 0), np.int64)
    vectors = facts.codebook.decode(facts.entry_codes[chosen])
    squares = np.square(vectors).sum(axis=1)
    nearest = []
    for first in range(0, len(chosen), 128):
        far = squares - 2 * vectors[first : first + 128] @ vectors.T
        far[np.arange(len(far)), first + np.arange(len(far))] = np.inf
        nearest.append(np.argpartition(far, width - 1, axis=1)[:, :width])
    return places[chosen], np.concatenate(nearest)


def places_at(facts: GraphFacts, memory: np.ndarray, at: np.ndarray) -> np.ndarray:
    """int64 [m, copies]: places of rows' nodes, -1 for those that a row does not have, read from
    the file of rows: `at`: of each row the first byte. Raises FormatError where there can be no
    node."""
    size, width = facts.place_bytes, facts.place_bytes // facts.copies
    read: np.ndarray = memory[at[:, None] + np.arange(size)].view(f"<u{width}")
    is_none = read == (NO_NODE if facts.clusters is None else NO_COPY)
    if not facts.has_gaps:
        is_none[:, 0] = False
    places = np.where(is_none, -1, read.astype(np.int64))
    found = places[~is_none]
    if (found >= facts.parts.n_places).any() or not facts.parts.is_node(found).all():
        raise errors.FormatError(
            "a row's node",
            path=facts.path(ROWS),
            got=int(found.max()),
            expected=f"below {facts.parts.n_places}",
            fix=_REBUILD,
        )
    return places


def _bits_at(bits: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """bool [m]."""
    found: np.ndarray = (bits[rows >> 3] >> (rows & 7) & 1).astype(bool)
    return found


class _Clock:
    """What is left of a deadline."""

    def __init__(self, deadline_s: float):
        self._deadline_s, self._end = deadline_s, time.monotonic() + deadline_s

    def left_s(self) -> float:
        """Raises DeadlineExceededError where it is over."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise errors.DeadlineExceededError(
                "searching a graph", got=f"{self._deadline_s:g} s", fix="a longer deadline_s"
            )
        return left
