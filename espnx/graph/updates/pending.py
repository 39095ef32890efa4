"""Additions and deletions that are in no page yet, and what searches find with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ... import errors
from ..format import GraphFacts
from ..neighbours import Neighbours, nearest, nearest_of, shown
from ..search.asked import WalkRequest
from .added import AddedIndex
from .log import ADD, Change, check_ids

_AT_ONCE = 16_384


@dataclass(frozen=True, eq=False)
class Pending:
    """One version of what is not merged; never changed once it is made.

    Attributes:
        ids: int64 [m]: of additions, in the order in which they came.
        rows: [m, dim]: their vectors, as `PageLayout.row_dtype`.
        lives: bool [m]: those that have not been deleted since.
        dead: int64 [d], growing: ids whose nodes in the pages are deleted.
        id_end: above every id that there has been.
        stamp: changes that made it, from none on.
        index: of the additions of all versions since the last merge; None: nodes hold codes in
            place of vectors, and additions are measured one by one, as what their codes stand for.
    """

    ids: np.ndarray
    rows: np.ndarray
    lives: np.ndarray
    dead: np.ndarray
    id_end: int
    stamp: int = 0
    index: AddedIndex | None = None

    @classmethod
    def none(cls, facts: GraphFacts) -> Pending:
        """A graph's version in which nothing was changed."""
        layout = facts.layout
        empty = np.empty(0, np.int64)
        rows = np.empty((0, layout.dim), layout.row_dtype)
        index = AddedIndex(facts) if facts.disk_codebook is None else None
        return cls(empty, rows, np.empty(0, bool), empty, facts.n_rows, index=index)

    @property
    def n_added(self) -> int:
        """Additions that live."""
        return int(np.count_nonzero(self.lives))

    @cached_property
    def is_empty(self) -> bool:
        """Whether searches see the pages alone."""
        return not len(self.dead) and not self.lives.any()

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        of_index = 0 if self.index is None else self.index.size_bytes
        return self.rows.nbytes + 9 * len(self.ids) + self.dead.nbytes + of_index

    def is_dead(self, ids: np.ndarray) -> np.ndarray:
        """bool, of the shape of `ids`: whether the node of an id is deleted."""
        if not len(self.dead):
            return np.zeros(ids.shape, bool)
        at = np.minimum(np.searchsorted(self.dead, ids), len(self.dead) - 1)
        found: np.ndarray = self.dead[at] == ids
        return found

    def living(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids, growing; vectors) of additions that live."""
        places = np.flatnonzero(self.lives)
        places = places[np.argsort(self.ids[places], kind="stable")]
        return self.ids[places], self.rows[places]

    def places_of(self, ids: np.ndarray) -> np.ndarray:
        """int64 [m]: where living additions are; -1: an id is none."""
        places = np.flatnonzero(self.lives)
        order = places[np.argsort(self.ids[places], kind="stable")]
        if not len(order):
            return np.full(len(ids), -1, np.int64)
        at = np.minimum(np.searchsorted(self.ids[order], ids), len(order) - 1)
        return np.where(self.ids[order][at] == ids, order[at], -1)

    def blocks(self, allowed: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, vectors) of living additions, of those that `allowed`, bool by id, says."""
        chosen = self.lives if allowed is None else self.lives & allowed[self.ids]
        for first in range(0, len(self.ids), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            here = chosen[part]
            if here.all():
                yield self.ids[part], self.rows[part]
            elif here.any():
                yield self.ids[part][here], self.rows[part][here]

    def added(self, ids: np.ndarray, rows: np.ndarray) -> Pending:
        """The version with these too; none of them is there."""
        return replace(
            self,
            ids=_appended(self.ids, ids),
            rows=_appended(self.rows, rows),
            lives=_appended(self.lives, np.ones(len(ids), bool)),
            id_end=max(self.id_end, int(ids.max()) + 1) if len(ids) else self.id_end,
            stamp=self.stamp + 1,
        )

    def deleted(self, ids: np.ndarray) -> Pending:
        """The version without these, each of which is there."""
        places = self.places_of(ids)
        lives = self.lives.copy()
        lives[places[places >= 0]] = False
        dead = np.union1d(self.dead, ids[places < 0]).astype(np.int64)
        return replace(self, lives=lives, dead=dead, stamp=self.stamp + 1)


def _appended(values: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Values with some more behind them: in what is left of the memory that they are a view of,
    where no other version has used it."""
    owner, count = values.base, len(values)
    end = count + len(more)
    if not isinstance(owner, _Room) or owner.used != count or end > len(owner):
        room = np.empty((max(64, 2 * end), *values.shape[1:]), values.dtype).view(_Room)
        room[:count] = values
        owner = room
    owner[count:end] = more
    owner.used = end
    return _view(owner, end)


class _Room(np.ndarray):
    """Memory that versions share: each sees a beginning of it, `used` is the longest of these."""

    used: int = 0


def _view(room: _Room, end: int) -> np.ndarray:
    # its base is the room
    return np.ndarray((end, *room.shape[1:]), room.dtype, buffer=room, strides=room.strides)


def replayed(
    facts: GraphFacts, changes: list[Change], path: str, before: Pending | None = None
) -> Pending:
    """The version after the changes of a log; `before`: one after the first of these, if there are
    as many. Raises FormatError for a change that cannot be."""
    now = before
    if now is None or now.stamp > len(changes):
        now = Pending.none(facts)
    for change in changes[now.stamp :]:
        ids = change.ids
        is_right = check_ids(facts, ids) and len(np.unique(ids)) == len(ids)
        if is_right and change.kind == ADD and change.rows is not None:
            is_right = bool((now.places_of(ids) < 0).all())
            finite = change.rows.dtype.kind in "iu" or bool(np.isfinite(change.rows).all())
            is_right = is_right and finite
            now = now.added(ids, change.rows)
        elif is_right:
            absent = (now.places_of(ids) < 0) & ((ids >= facts.n_rows) | now.is_dead(ids))
            is_right = not absent.any()
            now = now.deleted(ids)
        if not is_right:
            raise errors.FormatError(
                "change of a graph",
                path=path,
                got="ids or values that cannot be",
                fix="restore the graph from a copy",
            )
    return now


def merge_found(
    facts: GraphFacts,
    pending: Pending,
    walk: WalkRequest,
    found: Neighbours | None,
    allowed: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What walks have found and additions together.

    Args:
        found: of the pages: no deleted ones; None: nothing.
        allowed: bool by id; None: all.

    Returns:
        ids and distances [q, k], as `Neighbours` has them; additions that were measured, int64 [q].
    """
    if pending.index is not None:
        may = pending.lives if allowed is None else pending.lives & allowed[pending.ids]
        return pending.index.nearest(pending.rows, pending.ids, may, walk, found)
    coding, k, measured = facts.coding, walk.k, 0

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        nonlocal measured
        for ids, rows in pending.blocks(allowed):
            measured += len(ids)
            yield ids, coding.decode(coding.encode(rows))  # as walks measure them

    far, ids = nearest_of(facts.metric, walk.wide, k, blocks())
    far = shown(facts.metric, far)
    if found is not None:
        far = np.concatenate([found.distances, far], axis=1)
        ids = np.concatenate([found.ids, ids], axis=1)
    # nobody's last, and before them in the order of their ids
    far = np.where(ids < 0, np.inf, far).astype(np.float32)
    keys = np.where(ids < 0, np.int64(2**62), ids)
    far, keys = nearest(far, keys, k)
    ids = np.where(keys == 2**62, -1, keys)
    short = ((0, 0), (0, k - ids.shape[1]))
    return (
        np.pad(ids, short, constant_values=-1),
        np.pad(far, short, constant_values=np.inf),
        np.full(len(ids), measured),
    )
