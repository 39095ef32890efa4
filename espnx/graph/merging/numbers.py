"""Numbers that nodes have after a merge. Until pages are written, nodes are called by a name that
does not change: old ones by their number, additions by what follows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Numbers:
    """Attributes:
    n_old, n_new: nodes before and after.
    names, numbers: int64 [s]: of additions and of old nodes that move, by name; all others keep
        their number.
    """

    n_old: int
    n_new: int
    names: np.ndarray
    numbers: np.ndarray

    def number_of(self, names: np.ndarray) -> np.ndarray:
        """int64, of the shape of `names`, of nodes that there are."""
        if not len(self.names):
            return names
        at = np.minimum(np.searchsorted(self.names, names), len(self.names) - 1)
        return np.where(self.names[at] == names, self.numbers[at], names)

    def by_number(self) -> tuple[np.ndarray, np.ndarray]:
        """(numbers, growing; names) of those that do not keep theirs."""
        order = np.argsort(self.numbers)
        return self.numbers[order], self.names[order]

    def names_of(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [m]: the names of nodes."""
        changed, names = self.by_number()
        if not len(changed):
            return numbers
        at = np.minimum(np.searchsorted(changed, numbers), len(changed) - 1)
        return np.where(changed[at] == numbers, names[at], numbers)


def choose_numbers(n_old: int, dead: np.ndarray, near: np.ndarray, nodes_per_page: int) -> Numbers:
    """Additions take the places of deleted nodes, beside their neighbours where a page holds
    several; where more was deleted than added, the last nodes move into what is left.

    Args:
        dead: int64 [d], growing: old nodes that are deleted.
        near: int64 [a, r]: names of the neighbours of each addition, -1: none.
    """
    n_added = len(near)
    n_new = n_old - len(dead) + n_added
    free = np.concatenate([dead[dead < n_new], np.arange(n_old, max(n_old, n_new))])
    chosen = np.full(n_added, -1, np.int64)
    is_taken = np.zeros(len(free), bool)
    if nodes_per_page > 1:
        in_page: dict[int, list[int]] = {}
        for place, page in enumerate((free // nodes_per_page).tolist()):
            in_page.setdefault(page, []).append(place)
        for addition in range(n_added):
            old = near[addition][(near[addition] >= 0) & (near[addition] < n_old)]
            pages, counts = np.unique(old // nodes_per_page, return_counts=True)
            for page in pages[np.argsort(-counts, kind="stable")].tolist():
                if in_page.get(page):
                    place = in_page[page].pop(0)
                    chosen[addition], is_taken[place] = free[place], True
                    break
    movers = np.arange(n_new, n_old)
    movers = movers[~np.isin(movers, dead)]
    left, waiting = free[~is_taken], np.flatnonzero(chosen < 0)
    chosen[waiting] = left[: len(waiting)]
    return Numbers(
        n_old,
        n_new,
        np.concatenate([movers, n_old + np.arange(n_added)]),
        np.concatenate([left[len(waiting) :], chosen]),
    )
