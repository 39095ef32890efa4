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

    def moved(self) -> tuple[np.ndarray, np.ndarray]:
        """(names, numbers) of old nodes that do not keep theirs."""
        is_old = self.names < self.n_old
        return self.names[is_old], self.numbers[is_old]

    def names_of(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [m]: the names of nodes."""
        changed, names = self.by_number()
        if not len(changed):
            return numbers
        at = np.minimum(np.searchsorted(changed, numbers), len(changed) - 1)
        return np.where(changed[at] == numbers, names[at], numbers)


@dataclass(frozen=True, eq=False)
class PackedNumbers(Numbers):
    """Numbers of nodes whose pages are packed anew, so that none keeps its own.

    Attributes:
        names: uint32 [n_new]: of the nodes by number. numbers: uint32, by name; of those that are
            none any.
    """

    @classmethod
    def of(cls, n_old: int, names: np.ndarray) -> PackedNumbers:
        """Args: names: int64 [n_new], of the nodes by number."""
        numbers = np.zeros(max(n_old, int(names.max(initial=-1)) + 1), np.uint32)
        numbers[names] = np.arange(len(names), dtype=np.uint32)
        return cls(n_old, len(names), names.astype(np.uint32), numbers)

    def number_of(self, names: np.ndarray) -> np.ndarray:
        """See `Numbers.number_of`."""
        return self.numbers[names].astype(np.int64)

    def names_of(self, numbers: np.ndarray) -> np.ndarray:
        """See `Numbers.names_of`."""
        return self.names[numbers].astype(np.int64)

    def moved(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Numbers.moved`."""
        numbers = np.flatnonzero(self.names < self.n_old)
        return self.names[numbers].astype(np.int64), numbers


def choose_numbers(n_old: int, dead: np.ndarray, n_added: int) -> Numbers:
    """Additions take the places of deleted nodes; where more was deleted than added, the last nodes
    move into what is left.

    Args:
        dead: int64 [d], growing: old nodes that are deleted.
    """
    n_new = n_old - len(dead) + n_added
    free = np.concatenate([dead[dead < n_new], np.arange(n_old, max(n_old, n_new))])
    movers = np.arange(n_new, n_old)
    movers = movers[~np.isin(movers, dead)]
    return Numbers(
        n_old,
        n_new,
        np.concatenate([movers, n_old + np.arange(n_added)]),
        np.concatenate([free[n_added:], free[:n_added]]),
    )
