"""Searches of a graph with changes that are in no page yet: walks, without what was deleted, and
additions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ... import errors
from ..filters import RowFilter
from ..format import GraphFacts
from ..neighbours import Neighbours
from ..search.asked import LIST_SIZE_MAX, WalkRequest
from ..search.under_way import GraphSearch
from ..search.version import GraphVersion
from .pending import Pending, merge_found

# Of more deleted nodes, walks are told which they may find.
_PASSED_BY_MOST = 0.5


class ChangedSearch(GraphSearch):
    """See `GraphSearch`. Args as of `search_changed`; `inner`: walks over the pages; None: none
    can find anything. `again`: searches by a filter for some of the queries, int64 [m], where
    too few of what walks found live."""

    def __init__(
        self,
        pages: GraphVersion,
        pending: Pending,
        walk: WalkRequest,
        mask: np.ndarray | None,
        inner: GraphSearch | None,
        again: Callable[[np.ndarray], GraphSearch] | None,
    ):
        super().__init__(pages.facts, walk.k, None)
        self._pending, self._walk, self._mask = pending, walk, mask
        self._inner, self._again = inner, again
        self._more: GraphSearch | None = None
        self._found: Neighbours | None = None
        self._is_wanted = True

    def partial(self, pages: int) -> tuple[np.ndarray, np.ndarray]:
        """See `GraphSearch.partial`."""
        if self._found is not None:
            return self._found.ids, self._found.distances
        found = None
        if self._inner is not None:
            found = self._living(_neighbours(*self._inner.partial(pages), self._facts))
        ids, far, _ = self._with_additions(found)
        return ids, far

    def finish(self) -> Neighbours:
        """See `GraphSearch.finish`."""
        if self._found is None:
            q, k = len(self._walk.wide), self._walk.k
            if self._inner is None:
                ids, far = np.full((q, k), -1), np.full((q, k), np.inf, np.float32)
                found = _neighbours(ids, far, self._facts)
            else:
                found = self._living(self._inner.finish())
                found = self._completed(found)
            ids, far, measured = self._with_additions(found)
            self._found = replace(found, ids=ids, distances=far, measured=found.measured + measured)
            if self._pending.index is not None:
                self._pending.index.grow(len(self._pending.ids), q)
        return self._found

    def cancel(self) -> None:
        """See `GraphSearch.cancel`."""
        self._is_wanted = False
        for search in (self._inner, self._more):
            if self._found is None and search is not None:
                search.cancel()

    def _living(self, found: Neighbours) -> Neighbours:
        """The first k of each query that are not deleted."""
        k = self._walk.k
        if not len(self._pending.dead) and found.ids.shape[1] == k:
            return found
        is_gone = (found.ids < 0) | self._pending.is_dead(found.ids)
        order = np.argsort(is_gone, axis=1, kind="stable")[:, :k]
        gone = np.take_along_axis(is_gone, order, axis=1)
        ids = np.where(gone, -1, np.take_along_axis(found.ids, order, axis=1))
        far = np.where(gone, np.inf, np.take_along_axis(found.distances, order, axis=1))
        return replace(found, ids=ids, distances=far.astype(np.float32))

    def _completed(self, found: Neighbours) -> Neighbours:
        if self._again is None:
            return found
        living = self._facts.layout.n - len(self._pending.dead)
        short = np.flatnonzero((found.ids >= 0).sum(axis=1) < min(self._walk.k, living))
        if not len(short):
            return found
        self._more = self._again(short)
        if not self._is_wanted:  # since before it began
            self._more.cancel()
        more = self._more.finish()
        names = ("ids", "distances")
        sums = ("pages", "code_pages", "measured", "estimated", "seconds")
        changed = {name: getattr(found, name).copy() for name in (*names, *sums)}
        for name in names:
            changed[name][short] = getattr(more, name)
        for name in sums:
            changed[name][short] += getattr(more, name)
        shared = ("shared_pages", "filter_bytes", "shared_requests", "filter_requests")
        totals = {name: getattr(found, name) + getattr(more, name) for name in shared}
        return replace(found, **changed, **totals)

    def _with_additions(
        self, found: Neighbours | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return merge_found(self._facts, self._pending, self._walk, found, self._mask)


def search_changed(
    pages: GraphVersion, pending: Pending, walk: WalkRequest, mask: np.ndarray | None
) -> GraphSearch:
    """Begins a search of a version of a graph.

    Args:
        mask: bool by id, of those that may be found; None: all.
    """
    facts, dead = pages.facts, len(pending.dead)
    living = facts.layout.n - dead
    if mask is None and dead <= _PASSED_BY_MOST * facts.layout.n:
        if not dead:
            return ChangedSearch(pages, pending, walk, mask, pages.search(walk, None), None)
        # walks go by what was deleted, so that their lists lose as large a share of what they hold
        length = min(LIST_SIZE_MAX, math.ceil(walk.list_size * facts.layout.n / max(1, living)))
        longer = max(walk.k, length)
        inner = pages.search(replace(walk, k=longer, list_size=max(length, longer)), None)

        def again(short: np.ndarray) -> GraphSearch:
            some = torch.from_numpy(short)
            part = replace(walk, native=walk.native[some], wide=walk.wide[some])
            return pages.search(part, _allowed(pages, pending, None, walk.deadline_s))

        return ChangedSearch(pages, pending, walk, mask, inner, again)
    allowed = _allowed(pages, pending, mask, walk.deadline_s)
    filtered = pages.search(walk, allowed) if allowed.count else None
    return ChangedSearch(pages, pending, walk, mask, filtered, None)


def vectors_of(
    pages: GraphVersion, pending: Pending, ids: np.ndarray, deadline_s: float
) -> np.ndarray:
    """Vectors [m, dim] of ids, int64 [m], as `GraphIndex.vectors`. Raises InvalidInputError for one
    that is not there."""
    facts = pages.facts
    found = np.empty((len(ids), facts.layout.dim), facts.layout.row_dtype)
    places = pending.places_of(ids)
    is_new = places >= 0
    absent = ~is_new & ~in_pages(pages, pending, ids, deadline_s)
    if absent.any():
        raise errors.InvalidInputError(
            "rows to read", got=f"id {ids[absent][0]}", expected="ids of vectors that are there"
        )
    coding = facts.coding
    found[is_new] = coding.decode(coding.encode(pending.rows[places[is_new]]))
    if not is_new.all():
        found[~is_new] = pages.reader.vectors(ids[~is_new], deadline_s)
    return found


def in_pages(
    pages: GraphVersion, pending: Pending, ids: np.ndarray, deadline_s: float
) -> np.ndarray:
    """bool [m]: ids whose node is in the pages, and not deleted."""
    facts = pages.facts
    found = (ids >= 0) & (ids < facts.n_rows) & ~pending.is_dead(ids)
    if facts.has_gaps and found.any():
        found[found] = pages.filters.existing(deadline_s)[ids[found]]
    return found


def _allowed(
    pages: GraphVersion, pending: Pending, mask: np.ndarray | None, deadline_s: float
) -> RowFilter:
    allowed = pages.filters.existing(deadline_s)
    if mask is not None:
        allowed &= mask[: len(allowed)]
    allowed[pending.dead] = False
    return RowFilter.of(allowed)


def _neighbours(ids: np.ndarray, far: np.ndarray, facts: GraphFacts) -> Neighbours:
    """What was found, at no cost."""
    none = np.zeros(len(ids), np.int64)
    return Neighbours(
        ids,
        far,
        none,
        none,
        none,
        none,
        none.astype(np.float32),
        facts.layout.page_bytes,
        lost_share=facts.lost_share,
    )
