"""Attention over the rows of a group of reads, where they arrived.

A file of its own: the attention of `ops`, told where blocks lie; the device beside it knows files.
"""

from __future__ import annotations

import numpy as np
import torch

from ...ops.attention.running import ChainedBlocks, RunningAttention
from ..row_layout import RowLayout
from .plan import Chains, RowReads

_TILE_BYTES = 64 << 20  # of rows or scores in float32, where matrix products make them
_GROUPS_AT_ONCE = 64  # whose tables go to the device together


class GroupAttention(RunningAttention):
    """The attention of some queries over groups of blocks."""

    _known: tuple[RowReads, dict[int, tuple[Chains, ChainedBlocks]]] | None = None

    def add_group(self, rows: RowReads, group: range, memory: torch.Tensor) -> None:
        """The rows of a group of blocks, which follow one another in `memory`."""
        chains, blocks = self._tables(rows, group)
        layout = rows.layout
        if not len(blocks.pair) or not self._q.numel():
            return
        if self._may_fuse(layout):
            seen = self.all_seen(blocks.pair, blocks.first, blocks.n_rows)
            self._add_seen(layout, chains, blocks, np.flatnonzero(seen), memory)
            if seen.all():
                return
            chains = chains.chosen(np.flatnonzero(~seen))
            blocks = self._blocks(layout, [chains])[0]
        if not self.takes(layout.d, layout.dv):
            self._add_unpacked(layout, chains, blocks.pair, memory)
            return
        self.add_blocks(blocks, memory)

    def _tables(self, rows: RowReads, group: range) -> tuple[Chains, ChainedBlocks]:
        """The chains of a group. Those of many groups are made together, and copied to the device
        in one piece."""
        if self._known is None or self._known[0] is not rows or group.start not in self._known[1]:
            groups = rows.groups(group.start, _GROUPS_AT_ONCE)
            chains = [rows.chains(each) for each in groups]
            made = zip(chains, self._blocks(rows.layout, chains), strict=True)
            self._known = rows, dict(zip((each.start for each in groups), made, strict=True))
        return self._known[1][group.start]

    def _blocks(self, layout: RowLayout, every: list[Chains]) -> list[ChainedBlocks]:
        """The tables of some groups' chains."""
        pairs = [each.sequence * self._shape[1] + each.head for each in every]
        offsets = [np.maximum(each.blocks, 0) * layout.block_bytes for each in every]
        parts = [
            part.reshape(-1)
            for pair, offset, each in zip(pairs, offsets, every, strict=True)
            for part in (pair, offset, each.n_rows)
        ]
        there = self.there(np.concatenate(parts)).split([part.size for part in parts])
        return [
            ChainedBlocks(
                pair,
                each.first_position,
                each.n_rows,
                there[3 * i],
                there[3 * i + 1].view(len(pair), 1, each.blocks.shape[1]),
                there[3 * i + 2],
                layout.block_bytes,
                layout.block_rows,
                layout.format,
                0 if layout.is_shared else layout.dv,
            )
            for i, (pair, each) in enumerate(zip(pairs, every, strict=True))
        ]

    def _may_fuse(self, layout: RowLayout) -> bool:
        row = torch.empty(0, layout.d, dtype=layout.dtype)
        return self.fuses(row, row if layout.is_shared else row.new_empty(0, layout.dv))

    def _add_seen(
        self,
        layout: RowLayout,
        chains: Chains,
        blocks: ChainedBlocks,
        which: np.ndarray,
        memory: torch.Tensor,
    ) -> None:
        """Chains that every query sees whole; those of one length together."""
        stored = memory.view(-1, layout.block_bytes)
        for n_rows in np.unique(chains.n_rows[which]).tolist():
            mine = which[chains.n_rows[which] == n_rows]
            number = chains.blocks[mine, : layout.blocks(n_rows)]
            k, v = layout.unpack(stored[self.there(number)], n_rows)
            self.add_fused(blocks.pair[mine], None, k, v)

    def _add_unpacked(
        self, layout: RowLayout, chains: Chains, pair: np.ndarray, memory: torch.Tensor
    ) -> None:
        """Rows that the kernel does not take, some blocks of every chain at a time."""
        n, width = self._q.shape[1], max(layout.d, layout.dv, self._q.shape[1])
        stored = memory.view(-1, layout.block_bytes)
        step = (
            max(1, _TILE_BYTES // (4 * max(len(pair), 1) * layout.block_rows * width)) if n else 1
        )
        for begin in range(0, chains.blocks.shape[1], step):
            mine = np.flatnonzero(chains.n_rows > begin * layout.block_rows)
            blocks = np.maximum(chains.blocks[mine, begin : begin + step], 0)
            first_row, count = begin * layout.block_rows, blocks.shape[1] * layout.block_rows
            k, v = layout.unpack(stored[self.there(blocks)], count)
            self.add_matrices(
                pair[mine], chains.first_position[mine], chains.n_rows[mine], k, v, first_row
            )
