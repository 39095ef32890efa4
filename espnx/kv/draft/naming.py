"""Attention over rows that a device shows, which names the pages that weigh most on the way:
compiled where the rows are in the processor's memory, by tensors elsewhere.

A file of its own: it is to `PageTier` what `ShownAttention` is to nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ...device.row_layout import RowLayout
from ...ops.attention import Queries, RowsInMemory, attend_pages, merge
from ..shown import unpacked
from .pages import PAGE_ROWS, PageTier


class NamingAttention:
    """The attention of some queries, over the rows that were shown so far: called as
    `RowDevice.visit` calls.

    Args:
        queries: what attends.
        layout: of the rows.
        tier: is offered every page.
        first_sequence: of the queries, as the tier numbers sequences.
        threads: that compute, where a device hands reads on to `native`.

    Attributes:
        native: the compiled version, for devices that hand on reads without Python between; None
            where queries are not in the processor's memory.
    """

    def __init__(
        self, queries: Queries, layout: RowLayout, tier: PageTier, first_sequence: int, threads: int
    ):
        self._queries, self._layout, self._tier = queries, layout, tier
        self._first = first_sequence
        self.native = (
            tier.native(queries, layout, first_sequence, threads)
            if queries.q.device.type == "cpu"
            else None
        )
        self._by_tensors = (
            TensorNaming(queries, tier, first_sequence) if self.native is None else None
        )

    def __call__(self, memory: torch.Tensor, pieces: np.ndarray) -> None:
        """Rows as a device shows them."""
        if self._by_tensors is not None:
            self._by_tensors.show(self._layout, memory, pieces)
        elif self.native is not None:
            table = np.ascontiguousarray(pieces).view(np.int64).reshape(len(pieces), -1)
            self.native.see(memory, torch.from_numpy(table))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(o float32 [sequences, KV heads, n, dv], lse [sequences, KV heads, n])."""
        if self._by_tensors is not None:
            return self._by_tensors.o, self._by_tensors.lse
        o, lse = self.native.finish()  # type: ignore[union-attr]
        return o, lse


class TensorNaming:
    """The same in plain PyTorch, on any device.

    Args:
        queries, tier, first_sequence: as of `NamingAttention`.

    Attributes:
        o, lse: float32 [sequences, KV heads, n, dv] and [sequences, KV heads, n].
    """

    def __init__(self, queries: Queries, tier: PageTier, first_sequence: int):
        self._queries, self._tier, self._first = queries, tier, first_sequence
        self._own, self._first_pages = dict[tuple[int, int], Queries](), dict[int, int]()
        self.o = torch.zeros(*queries.q.shape[:3], queries.dv, device=queries.q.device)
        self.lse = torch.full(queries.q.shape[:3], -torch.inf, device=queries.q.device)

    def show(self, layout: RowLayout, memory: torch.Tensor, pieces: np.ndarray) -> None:
        """Rows as a device shows them."""
        for sequence, head, k, v, first in unpacked(layout, memory, pieces):
            k, v = (rows.to(self.o.device).contiguous()[None, None] for rows in (k, v))
            rows = RowsInMemory(k, v, 0, k.shape[2], first)
            o, lse, page_lse = attend_pages(self._of(sequence, head), rows, PAGE_ROWS)
            at = slice(sequence, sequence + 1), slice(head, head + 1)
            self.o[at], self.lse[at] = merge(self.o[at], self.lse[at], o, lse)
            self._tier.offer(
                self._first + sequence,
                head,
                rows,
                self._seen(sequence, rows),
                page_lse[0, 0],
                self.lse[sequence, head],
                self._begins(sequence),
            )

    def _of(self, sequence: int, head: int) -> Queries:
        if (sequence, head) not in self._own:
            one = self._queries.part(sequence, sequence + 1)
            slopes = None if one.slopes is None else one.slopes[head : head + 1]
            self._own[sequence, head] = replace(
                one, q=one.q[:, head : head + 1].contiguous(), slopes=slopes
            )
        return self._own[sequence, head]

    def _begins(self, sequence: int) -> int:
        """The page in which the text of a sequence begins."""
        if sequence not in self._first_pages:
            first, visible = self._queries.first_visible, self._queries.visible
            at = 0 if first is None else int(first[sequence])
            if visible is not None:
                at += int(visible[sequence, at:].bool().int().argmax())
            self._first_pages[sequence] = at // PAGE_ROWS
        return self._first_pages[sequence]

    def _seen(self, sequence: int, rows: RowsInMemory) -> torch.Tensor | None:
        """bool [n]: which of the rows are no padding; None: all."""
        first, visible = self._queries.first_visible, self._queries.visible
        at = rows.first_position + torch.arange(rows.n_rows)
        if first is None or (visible is None and int(first[sequence]) <= rows.first_position):
            return None
        seen = at >= int(first[sequence])
        return seen if visible is None else seen & visible[sequence, at].bool()
