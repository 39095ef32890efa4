"""Attention over the rows of a group of reads, where they arrived.

A file of its own: the attention of `ops`, told where blocks lie; the device beside it knows files.
"""

from __future__ import annotations

import numpy as np
import torch

from ...ops.attention.running import RunningAttention
from ..row_layout import RowLayout
from .plan import Chains, RowReads

_TILE_BYTES = 64 << 20  # of rows or scores in float32, where matrix products make them


class GroupAttention(RunningAttention):
    """The attention of some queries over groups of blocks."""

    def add_group(self, rows: RowReads, group: range, memory: torch.Tensor) -> None:
        """The rows of a group of blocks, which follow one another in `memory`."""
        layout, chains, self.table = rows.layout, rows.chains(group), rows.tables.put
        pair = chains.sequence * self._shape[1] + chains.head
        if not self.takes(layout.d, layout.dv):
            self._add_unpacked(layout, chains, pair, memory)
            return
        offsets = self.table(np.maximum(chains.blocks, 0) * layout.block_bytes)
        self.add_blocks(
            pair,
            chains.first_position,
            chains.n_rows,
            memory,
            offsets,
            block_rows=layout.block_rows,
            form=layout.format,
            dv=0 if layout.is_shared else layout.dv,
        )

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
            k, v = layout.unpack(
                stored[self.table(blocks).to(memory.device, non_blocking=True)], count
            )
            self.add_matrices(
                pair[mine], chains.first_position[mine], chains.n_rows[mine], k, v, first_row
            )
