"""What a ticket reads, for devices that are driven from Python: blocks in the order of the file,
cut into groups, and whose rows they are.

The same plan as csrc/device/row_plan.cpp makes, over arrays: a ticket of a long context has ten
thousands of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..interface import PIECE
from ..row_layout import RowLayout


@dataclass(frozen=True)
class Chains:
    """Rows of a group that follow one another, whole blocks but for the last.

    Attributes:
        sequence, head, first_position, n_rows: int64 [chains].
        blocks: int64 [chains, most blocks]: numbers in the group; -1 after a chain's last.
    """

    sequence: np.ndarray
    head: np.ndarray
    first_position: np.ndarray
    n_rows: np.ndarray
    blocks: np.ndarray

    def chosen(self, which: np.ndarray) -> Chains:
        """Some of the chains."""
        columns = (self.sequence, self.head, self.first_position, self.n_rows, self.blocks)
        return Chains(*(column[which] for column in columns))


class RowReads:
    """The reads of one ticket.

    Args:
        layout: of the blocks.
        table, sums: of `RowFileDevice.push`: an array of `SEGMENT_READ`, and what its checksums lie
            in.
        group_bytes: that are read, checked and computed on together; at least a block.
        unit_bytes: of a single read.

    Attributes:
        offset_bytes: int64 [blocks]: where each lies in the file, ascending; what several sequences
            share is there once.
        sums: uint32 [blocks].
        group_blocks: blocks of each group but the last.
    """

    def __init__(
        self,
        layout: RowLayout,
        table: np.ndarray,
        sums: list[np.ndarray],
        group_bytes: int,
        unit_bytes: int,
    ):
        self.layout = layout
        self.group_blocks = max(1, group_bytes // layout.block_bytes)
        self._unit_blocks = max(1, unit_bytes // layout.block_bytes)
        table = table[table["n_rows"] > 0]
        n_heads = table["n_heads"]
        of = np.repeat(np.arange(len(table)), n_heads)
        at_head = np.arange(of.size) - np.repeat(np.cumsum(n_heads) - n_heads, n_heads)
        place = table["offset_bytes"][of] + at_head * table["n_blocks"][of] * layout.block_bytes
        order = np.argsort(place, kind="stable")
        of, at_head, place = of[order], at_head[order], place[order]
        self._sequence, self._head = (
            table["sequence"][of],
            table["first_head"][of] + at_head * table["head_step"][of],
        )
        self._n_rows, self._first_position = table["n_rows"][of], table["first_position"][of]
        self._used = -(-self._n_rows // layout.block_rows)
        # Runs at one place are the same blocks, of which each may use another number.
        begins = np.flatnonzero(np.diff(place, prepend=-1))
        longest = np.maximum.reduceat(self._used, begins) if begins.size else begins
        ends = np.cumsum(longest)
        at_place = np.repeat(np.arange(begins.size), np.diff(begins, append=place.size))
        self._begin, self._end = (ends - longest)[at_place], ends[at_place]
        first_sum = (table["first_sum"][of] + at_head * table["n_blocks"][of])[begins]
        source = table["sums"][of][begins]
        within = np.arange(int(longest.sum())) - np.repeat(ends - longest, longest)
        self.offset_bytes = np.repeat(place[begins], longest) + within * layout.block_bytes
        # Those of a place lie together; places that lie in one array are looked up together.
        number, self.sums = np.repeat(first_sum, longest) + within, np.empty(within.size, np.uint32)
        by_source = np.argsort(np.repeat(source, longest), kind="stable")
        for each, mine in zip(
            sums,
            np.split(by_source, np.cumsum(np.bincount(source, longest, len(sums)).astype(int))),
            strict=False,
        ):
            self.sums[mine] = each.reshape(-1)[number[mine]]

    def groups(self, first_block: int = 0, at_most: int | None = None) -> list[range]:
        """The groups' blocks, from the group that begins with a block on, perhaps so many."""
        count = self.offset_bytes.size
        end = count if at_most is None else min(count, first_block + at_most * self.group_blocks)
        return [
            range(begin, min(begin + self.group_blocks, count))
            for begin in range(first_block, end, self.group_blocks)
        ]

    def requests(self, group: range) -> tuple[np.ndarray, np.ndarray]:
        """(offset_bytes, size_bytes) of the reads of a group, one after another as its blocks
        are."""
        offsets, block_bytes = self.offset_bytes[group.start : group.stop], self.layout.block_bytes
        jumps = np.flatnonzero(np.diff(offsets) != block_bytes) + 1
        begins = np.concatenate([[0], jumps])
        lengths = np.diff(begins, append=offsets.size)
        pieces = -(-lengths // self._unit_blocks)
        at = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        first = np.repeat(begins, pieces) + at * self._unit_blocks
        return offsets[first], np.diff(first, append=offsets.size) * block_bytes

    def _pieces(self, group: range) -> tuple[np.ndarray, ...]:
        """The runs that have rows in a group, as they lie in the file: (run, first block in the
        group, blocks, rows, first position)."""
        near = slice(
            np.searchsorted(self._end, group.start, side="right"),
            np.searchsorted(self._begin, group.stop, side="left"),
        )
        begin = np.maximum(self._begin[near], group.start)
        end = np.minimum(self._begin[near] + self._used[near], group.stop)
        run = np.flatnonzero(end > begin) + near.start
        begin, end = begin[run - near.start], end[run - near.start]
        before = (begin - self._begin[run]) * self.layout.block_rows
        n_rows = np.minimum((end - begin) * self.layout.block_rows, self._n_rows[run] - before)
        return run, begin - group.start, end - begin, n_rows, self._first_position[run] + before

    def pieces(self, group: range) -> np.ndarray:
        """The pieces of a group as `RowDevice.visit` shows them: an array of `PIECE`."""
        run, block, _, n_rows, first = self._pieces(group)
        found = np.empty(run.size, PIECE)
        found["sequence"], found["head"], found["offset_bytes"] = (
            self._sequence[run],
            self._head[run],
            block * self.layout.block_bytes,
        )
        found["n_rows"], found["first_position"] = n_rows, first
        return found

    def chains(self, group: range) -> Chains:
        """The rows of a group, as few chains as possible."""
        run, block, count, n_rows, first = self._pieces(group)
        order = np.lexsort((first, self._head[run], self._sequence[run]))
        run, block, count, n_rows, first = (
            column[order] for column in (run, block, count, n_rows, first)
        )
        sequence, head = self._sequence[run], self._head[run]
        follows = (
            (sequence[1:] == sequence[:-1])
            & (head[1:] == head[:-1])
            & (first[1:] == first[:-1] + n_rows[:-1])
        )
        follows &= n_rows[:-1] % self.layout.block_rows == 0
        begins = np.flatnonzero(np.concatenate([[True], ~follows]))[: run.size]
        lengths = np.add.reduceat(count, begins)
        chain = np.repeat(np.arange(begins.size), np.diff(begins, append=run.size))
        blocks = np.full((begins.size, int(lengths.max(initial=0))), -1, dtype=np.int64)
        column = np.arange(int(count.sum())) - np.repeat(
            (np.cumsum(lengths) - lengths)[chain], count
        )
        within = np.arange(column.size) - np.repeat(np.cumsum(count) - count, count)
        blocks[np.repeat(chain, count), column] = np.repeat(block, count) + within
        return Chains(
            sequence[begins], head[begins], first[begins], np.add.reduceat(n_rows, begins), blocks
        )
