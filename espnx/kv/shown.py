"""Attention over rows that a device only shows (`RowDevice.visit`): X rows, whose K and V are made
here, and rows that the device cannot attend over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from ..device.row_layout import RowLayout
from ..ops.attention import Queries, RowsInMemory, attend_rows, merge


def unpacked(
    layout: RowLayout, memory: torch.Tensor, pieces: np.ndarray
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor, int]]:
    """(sequence, head, k [n, d], v [n, dv], position of the first) of each piece of what a device
    shows."""
    for sequence, head, offset, n_rows, first in pieces.tolist():
        size = layout.blocks(n_rows) * layout.block_bytes
        yield (
            sequence,
            head,
            *layout.unpack(memory[offset : offset + size].view(-1, layout.block_bytes), n_rows),
            first,
        )


class ShownAttention:
    """The attention of some queries, over the rows that were added so far.

    Args:
        queries: what attends.
        threads: that attend on the CPU; 0: as many as PyTorch uses.

    Attributes:
        o, lse: float32 [sequences, KV heads, n, dv] and [sequences, KV heads, n].
    """

    def __init__(self, queries: Queries, threads: int):
        self._queries, self._threads = queries, threads
        self.o = torch.zeros(*queries.q.shape[:3], queries.dv, device=queries.q.device)
        self.lse = torch.full(queries.q.shape[:3], float("-inf"), device=queries.q.device)

    def show(self, layout: RowLayout, memory: torch.Tensor, pieces: np.ndarray) -> None:
        """Rows as a device shows them."""
        for sequence, head, k, v, first in unpacked(layout, memory, pieces):
            k, v = (rows.to(self.o.device).contiguous()[None, None] for rows in (k, v))
            self.add(sequence, slice(head, head + 1), RowsInMemory(k, v, 0, k.shape[2], first))

    def add(self, sequence: int, heads: slice, rows: RowsInMemory) -> None:
        """Rows of some heads of a sequence."""
        queries = self._queries.part(sequence, sequence + 1)
        if heads != slice(0, queries.q.shape[1]):
            slopes = None if queries.slopes is None else queries.slopes[heads]
            queries = replace(queries, q=queries.q[:, heads].contiguous(), slopes=slopes)
        at = slice(sequence, sequence + 1), heads
        self.o[at], self.lse[at] = merge(
            self.o[at], self.lse[at], *attend_rows(queries, rows, threads=self._threads)
        )
