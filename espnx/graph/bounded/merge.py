"""Merges the edges of parts into those of one graph, in files, and makes every node one that walks
come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...storage.work import WorkFolder
from .partition import NOBODY
from .work import read_array

_BLOCK_ROWS = 4096
# Lists that lie so near each other in a file are read at once.
_NEAR_ROWS = 64


@dataclass(frozen=True)
class Piece:
    """Successive nodes from `first_node` on: of a part, those from place `begin` to `end` - 1 of
    its own order."""

    part: int
    begin: int
    end: int
    first_node: int

    def blocks(self, rows: int = _BLOCK_ROWS) -> Iterator[Piece]:
        """Pieces of at most so many rows."""
        for begin in range(self.begin, self.end, rows):
            yield Piece(
                self.part, begin, min(begin + rows, self.end), self.first_node + begin - self.begin
            )


def number_nodes(sizes: list[int], nodes_per_page: int) -> list[Piece]:
    """Which nodes the parts' rows become: the whole pages of each part one after the other, and
    then what is left of each."""
    pieces, node = [], 0
    whole = [size // nodes_per_page * nodes_per_page for size in sizes]
    for begins, ends in (([0] * len(sizes), whole), (whole, sizes)):
        for part, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if end > begin:
                pieces.append(Piece(part, begin, end, node))
                node += end - begin
    return pieces


def interleave(first: np.ndarray, second: np.ndarray, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Merges two lists a row, uint32 [m, r]: the one's best and the other's best in turn, each only
    once.

    Lists are in the order in which pruning chose them; `NOBODY` stands where there is none.

    Returns:
        uint32 [m, degree], zeros behind the last, and how many, int64 [m].
    """
    both = np.stack([first, second], axis=2).reshape(len(first), -1)
    order = np.argsort(both, axis=1, kind="stable")
    ordered = np.take_along_axis(both, order, axis=1)
    again = np.zeros(both.shape, bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    is_wanted = np.empty(both.shape, bool)
    np.put_along_axis(is_wanted, order, ~again & (ordered != NOBODY), axis=1)
    place = np.argsort(~is_wanted, axis=1, kind="stable")[:, :degree]
    counts = np.minimum(is_wanted.sum(axis=1), degree)
    kept = np.take_along_axis(both, place, axis=1)
    return np.where(np.arange(kept.shape[1]) < counts[:, None], kept, 0), counts


class EdgesFile:
    """Edges of all nodes in a file: uint32 [n, degree], and their counts in memory.

    Args:
        counts: uint16 [n], by node.
    """

    def __init__(self, path: Path, degree: int, counts: np.ndarray):
        self.path, self.degree, self.counts = path, degree, counts

    def blocks(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(number of the first node, neighbours [m, degree], bool [m, degree]: which of these there
        are)"""
        for first in range(0, len(self.counts), _BLOCK_ROWS):
            part = read_array(
                self.path, np.uint32, self.degree, first, min(_BLOCK_ROWS, len(self.counts) - first)
            )
            yield first, part, np.arange(self.degree) < self.counts[first : first + len(part), None]

    def neighbours_of(self, first: int, count: int, most: int) -> np.ndarray:
        """int64 [m], growing: the first neighbours, `most` of each, of successive nodes."""
        wanted = np.zeros(len(self.counts), bool)
        for begin in range(first, first + count, _BLOCK_ROWS):
            rows = min(_BLOCK_ROWS, first + count - begin)
            part = read_array(self.path, np.uint32, self.degree, begin, rows)
            wanted[part[:, :most][np.arange(most) < self.counts[begin : begin + rows, None]]] = True
        return np.flatnonzero(wanted)

    def rows(self, first: int, count: int) -> np.ndarray:
        """uint32 [m, degree]: lists of successive nodes, zeros behind the last neighbour."""
        return read_array(self.path, np.uint32, self.degree, first, count)

    def get(self, node: int) -> list[int]:
        """Neighbours of a node."""
        found: list[int] = read_array(self.path, np.uint32, self.degree, node, 1)[
            0, : self.counts[node]
        ].tolist()
        return found

    def put(self, node: int, neighbours: list[int]) -> None:
        """Replaces them."""
        row = np.zeros(self.degree, np.uint32)
        row[: len(neighbours)] = neighbours
        self.counts[node] = len(neighbours)
        with self.path.open("r+b") as file:
            file.seek(4 * self.degree * node)
            file.write(row.data)

    def reached_from(self, node: int) -> np.ndarray:
        """bool [n]: which nodes walks come to. Reads the file a few times, as often as edges lead
        back in it."""
        seen = np.zeros(len(self.counts), bool)
        seen[node] = True
        return self._spread(seen, self._forward)

    def leading_to(self, node: int) -> np.ndarray:
        """bool [n]: from which nodes walks come to this one."""
        leads = np.zeros(len(self.counts), bool)
        leads[node] = True

        def backward(leads: np.ndarray, first: int, near: np.ndarray, there: np.ndarray) -> None:
            leads[first : first + len(near)] |= (leads[near] & there).any(axis=1)

        return self._spread(leads, backward)

    @staticmethod
    def _forward(seen: np.ndarray, first: int, near: np.ndarray, there: np.ndarray) -> None:
        seen[near[there & seen[first : first + len(near), None]]] = True

    def _spread(
        self, marked: np.ndarray, step: Callable[[np.ndarray, int, np.ndarray, np.ndarray], None]
    ) -> np.ndarray:
        before = -1
        while (now := int(marked.sum())) not in (before, len(marked)):
            before = now
            for first, near, there in self.blocks():
                step(marked, first, near, there)
        return marked

    def connect(self, entry: int) -> int:
        """Gives each node that no walk from `entry` comes to an edge from a near one; how many
        there were.

        A lost node takes the place of the last edge of a neighbour of its own that is reached, and
        leads on to where that edge led: what could be come to still can.
        """
        made: set[tuple[int, int]] = set()
        repaired = 0
        while True:
            lost = np.flatnonzero(~self.reached_from(entry)).tolist()
            if not lost:
                return repaired
            left = set(lost)
            for node in lost:
                if any(
                    self._splice(near, node, made) for near in self.get(node) if near not in left
                ):
                    left.discard(node)
            if len(left) == len(lost):  # none has a neighbour with an edge to spare
                self._splice(entry, lost[0], made, any_edge=True)
                left.discard(lost[0])
            repaired += len(lost) - len(left)

    def _splice(
        self, begin: int, node: int, made: set[tuple[int, int]], *, any_edge: bool = False
    ) -> bool:
        """begin -> end becomes begin -> node -> end. Not where a repair made that edge, unless
        `any_edge`: `end` would move away."""
        edges, own = self.get(begin), self.get(node)
        if len(edges) < self.degree:
            self.put(begin, [*edges, node])
        else:
            free = [i for i in range(len(edges)) if any_edge or (begin, edges[i]) not in made]
            if not free:
                return False
            end = edges[free[-1]]
            self.put(begin, [node if i == free[-1] else each for i, each in enumerate(edges)])
            self.put(node, [*[each for each in own if each != end][: self.degree - 1], end])
            made.add((node, end))
        made.add((begin, node))
        return True


def merge_parts(
    work: WorkFolder,
    folder: Path,
    pieces: list[Piece],
    node_of: np.ndarray,
    degree: int,
    n_parts: int,
    progress: Callable[[int], None],
) -> EdgesFile:
    """Writes `edges` of all nodes into a folder.

    Args:
        node_of: uint32 [n], of each row.
        progress: called with the nodes that are written.
    """
    counts = np.zeros(len(node_of), np.uint16)
    begins = [
        read_array(work.file(f"built_{part}", "guest.begin"), np.int64) for part in range(n_parts)
    ]
    done = 0
    with (folder / "edges").open("wb") as file:
        for piece in pieces:
            guests = _guests_of(work, piece.part, begins)
            for block in piece.blocks():
                merged, here = interleave(*_lists(work, block, guests, degree), degree)
                counts[block.first_node : block.first_node + len(here)] = here
                there = np.arange(degree) < here[:, None]
                file.write(np.where(there, node_of[merged], 0).astype(np.uint32).reshape(-1).data)
                done += len(here)
                progress(done)
    return EdgesFile(folder / "edges", degree, counts)


def _guests_of(
    work: WorkFolder, home: int, begins: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows that are at home in a part and guests elsewhere: (rows, in order; where: part; place
    among its guests)"""
    rows, parts, places = [], [], []
    for part, begin in enumerate(begins):
        if home + 1 >= len(begin) or begin[home] == begin[home + 1]:
            continue
        count = int(begin[home + 1] - begin[home])
        rows.append(
            read_array(
                work.file(f"built_{part}", "guest.rows"), np.uint32, None, int(begin[home]), count
            )
        )
        parts.append(np.full(count, part, np.uint32))
        places.append(np.arange(begin[home], begin[home + 1]))
    if not rows:
        return np.empty(0, np.uint32), np.empty(0, np.uint32), np.empty(0, np.int64)
    order = np.argsort(np.concatenate(rows))
    return np.concatenate(rows)[order], np.concatenate(parts)[order], np.concatenate(places)[order]


def _lists(
    work: WorkFolder, block: Piece, guests: tuple[np.ndarray, np.ndarray, np.ndarray], degree: int
) -> tuple[np.ndarray, np.ndarray]:
    """The edges that their home gave the rows of a block, and those that the other part did; uint32
    [m, degree]."""
    count = block.end - block.begin
    built = f"built_{block.part}"
    rows = read_array(work.file(built, "own.rows"), np.uint32, None, block.begin, count)
    own = _edges(work, block.part, "own", block.begin, count, degree)
    other = np.full((count, degree), NOBODY, np.uint32)
    guest_rows, parts, places = guests
    at = np.searchsorted(guest_rows, rows)
    found = at < len(guest_rows)
    found[found] = guest_rows[at[found]] == rows[found]
    which = np.flatnonzero(found)
    for part in np.unique(parts[at[which]]):
        mine = which[parts[at[which]] == part]
        wanted = places[at[mine]]
        for run in np.split(
            np.argsort(wanted), np.flatnonzero(np.diff(np.sort(wanted)) > _NEAR_ROWS) + 1
        ):
            low, high = int(wanted[run[0]]), int(wanted[run[-1]]) + 1
            lists = _edges(work, int(part), "guest", low, high - low, degree)
            other[mine[run]] = lists[wanted[run] - low]
    return own, other


def _edges(
    work: WorkFolder, part: int, name: str, first: int, count: int, degree: int
) -> np.ndarray:
    neighbours = read_array(
        work.file(f"built_{part}", f"{name}.neighbours"), np.uint32, degree, first, count
    )
    counts = read_array(work.file(f"built_{part}", f"{name}.counts"), np.uint16, None, first, count)
    return np.where(np.arange(degree) < counts[:, None], neighbours, NOBODY).astype(np.uint32)
