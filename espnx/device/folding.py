"""Attention on a torch device over rows in blocks, part by part, merged exactly: the attention op where its kernel takes rows of such a
length, otherwise (the X rows of most models, on a GPU) matrix products.

Rows are computed on where they arrived; tables are made on the host, so that nothing here waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch

from ..ops.attention import attention, merge
from ..ops.attention.checks import DIM_MAX as HOST_DIM_MAX
from ..ops.attention.cuda import DIM_MAX as CUDA_DIM_MAX
from ..ops.precision import whole_float32
from .interface import Queries, Tail
from .layout import RowLayout, format_of
from .row_reads import Chains, RowReads

_TILE_BYTES = 64 << 20  # of rows or scores in float32, where matrix products make them


class Folding:
    """The attention of some queries, over what has been added so far.

    Args:
        queries: what attends; `q` may be anywhere.
        device: where rows are.
        threads: that compute on a CPU; None: as many as the op finds worth it.
    """

    def __init__(self, queries: Queries, device: torch.device, threads: int | None = None):
        self._shape = n_sequences, n_heads, n, d = queries.q.shape
        self._dv, self._threads = queries.dv, threads
        self._q = queries.q.to(device).reshape(n_sequences * n_heads, n, d)
        self._last = _host(queries.last_position)
        self._first_visible, self._visible = _host(queries.first_visible), _host(queries.visible)
        self._dim_max = CUDA_DIM_MAX if device.type == "cuda" else HOST_DIM_MAX
        self._o = torch.zeros(n_sequences * n_heads, n, queries.dv, dtype=torch.float32, device=device)
        self._lse = torch.full((n_sequences * n_heads, n), -torch.inf, dtype=torch.float32, device=device)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(o float32 [sequences, heads, n, dv], lse [sequences, heads, n])."""
        n_sequences, n_heads, n, _ = self._shape
        return self._o.view(n_sequences, n_heads, n, self._dv), self._lse.view(n_sequences, n_heads, n)

    def add_group(self, rows: RowReads, group: range, memory: torch.Tensor) -> None:
        """The rows of a group of blocks, which follow one another in `memory`."""
        layout, chains = rows.layout, rows.chains(group)
        pair = chains.sequence * self._shape[1] + chains.head
        if max(layout.d, layout.dv) > self._dim_max:
            self._add_wide(layout, chains, pair, memory)
            return
        offsets = torch.from_numpy(np.maximum(chains.blocks, 0) * layout.block_bytes)
        self._add(pair, chains.first_position, chains.n_rows, memory, offsets, layout)

    def add_tail(self, tail: Tail) -> None:
        """Rows in memory. They become one block of each head."""
        if tail.n_rows == 0 or not self._q.numel():
            return
        part = slice(tail.skip, tail.skip + tail.n_rows)
        k, v = (rows[:, :, part].to(self._o.device).flatten(0, 1) for rows in (tail.k, tail.v))
        if k.dtype != v.dtype:
            k, v = k.float(), v.float()
        pair = np.arange(len(k))
        first, n_rows = np.full(len(k), tail.first_position), np.full(len(k), tail.n_rows)
        if max(k.shape[-1], v.shape[-1]) > self._dim_max:
            seen = self._seen(pair, first, n_rows, 0, tail.n_rows)
            self._fold(pair, *matrix_attention(self._q, k, v, seen))
            return
        is_shared = tail.v is tail.k
        flat = k.flatten(1) if is_shared else torch.cat([k.flatten(1), v.flatten(1)], dim=1)
        memory = flat.contiguous().view(torch.uint8)
        layout = RowLayout(format_of(k.dtype), k.shape[-1], v.shape[-1], is_shared)
        offsets = torch.arange(len(k)).unsqueeze(1) * memory.shape[1]
        self._add(pair, first, n_rows, memory.view(-1), offsets, layout, block_rows=tail.n_rows)

    def _add(
        self, pair: np.ndarray, first: np.ndarray, n_rows: np.ndarray, memory: torch.Tensor, offsets: torch.Tensor, layout: RowLayout,
        block_rows: int | None = None,
    ) -> None:  # fmt: skip
        """Rows of blocks at `offsets` [chains, blocks]."""
        last = None
        if self._last is not None and self._last.size and int(self._last.min()) < int((first + n_rows).max()) - 1:
            last = torch.from_numpy(self._last[None, :] - first[:, None])
        visible = self._visible_rows(pair, first, 0, int(n_rows.max(initial=0)))
        o, lse = attention(
            self._chosen(self._q, pair).unsqueeze(1), memory, offsets.unsqueeze(1), torch.from_numpy(n_rows),
            block_rows=layout.block_rows if block_rows is None else block_rows, format=layout.format, scale=1.0,
            dv=0 if layout.is_shared else layout.dv, visible=None if visible is None else torch.from_numpy(visible.view(np.uint8)),
            last_position=last, threads=self._threads,
        )  # fmt: skip
        self._fold(pair, o.squeeze(1), lse.squeeze(1))

    def _visible_rows(self, pair: np.ndarray, first: np.ndarray, begin: int, end: int) -> np.ndarray | None:
        """bool [chains, end - begin]: which rows are no padding; None: all."""
        if self._first_visible is None and self._visible is None:
            return None
        sequence = pair // self._shape[1]
        position = first[:, None] + np.arange(begin, end)
        seen = np.ones(position.shape, dtype=bool)
        if self._first_visible is not None:
            seen &= position >= self._first_visible[sequence][:, None]
        if self._visible is not None:
            known = np.minimum(position, self._visible.shape[1] - 1)
            seen &= (self._visible[sequence[:, None], known] != 0) & (position < self._visible.shape[1])
        return None if seen.all() else seen

    def _seen(self, pair: np.ndarray, first: np.ndarray, n_rows: np.ndarray, begin: int, end: int) -> torch.Tensor:
        """bool [chains, n or 1, end - begin], on the device: which rows from `begin` on a query sees."""
        row = np.arange(begin, end)
        seen = row < n_rows[:, None]
        if (visible := self._visible_rows(pair, first, begin, end)) is not None:
            seen &= visible
        found = seen[:, None, :]
        if self._last is not None:
            found = found & (first[:, None, None] + row <= self._last[:, None])
        return torch.from_numpy(found).to(self._o.device, non_blocking=True)

    def _add_wide(self, layout: RowLayout, chains: Chains, pair: np.ndarray, memory: torch.Tensor) -> None:
        """Rows that the kernel does not take, some blocks of every chain at a time."""
        n, width = self._q.shape[1], max(layout.d, layout.dv, self._q.shape[1])
        stored = memory.view(-1, layout.block_bytes)
        step = max(1, _TILE_BYTES // (4 * max(len(pair), 1) * layout.block_rows * width)) if n else 1
        for begin in range(0, chains.blocks.shape[1], step):
            mine = np.flatnonzero(chains.n_rows > begin * layout.block_rows)
            blocks = np.maximum(chains.blocks[mine, begin : begin + step], 0)
            first_row, count = begin * layout.block_rows, blocks.shape[1] * layout.block_rows
            k, v = layout.unpack(stored[torch.from_numpy(blocks).to(memory.device, non_blocking=True)], count)
            seen = self._seen(pair[mine], chains.first_position[mine], chains.n_rows[mine], first_row, first_row + count)
            self._fold(pair[mine], *matrix_attention(self._chosen(self._q, pair[mine]), k, v, seen))

    def _chosen(self, rows: torch.Tensor, pair: np.ndarray) -> torch.Tensor:
        if len(pair) == len(rows) and np.array_equal(pair, np.arange(len(rows))):
            return rows
        return rows[torch.from_numpy(pair).to(rows.device, non_blocking=True)]

    def _fold(self, pair: np.ndarray, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Parts of these (sequence, head) pairs, ascending. Where a pair has several, one after the other: sums in a fixed order."""
        turn = np.arange(len(pair)) - np.searchsorted(pair, pair)
        for i in range(int(turn.max(initial=-1)) + 1):
            mine = np.flatnonzero(turn == i)
            if len(mine) == len(self._o):
                self._o, self._lse = merge(self._o, self._lse, self._chosen(o, mine), self._chosen(lse, mine))
                continue
            at = torch.from_numpy(pair[mine]).to(o.device, non_blocking=True)
            merged = merge(self._o[at], self._lse[at], self._chosen(o, mine), self._chosen(lse, mine))
            self._o[at], self._lse[at] = merged


def _host(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.cpu().numpy()


def matrix_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(o float32 [b, n, dv], lse [b, n]) of scaled queries q [b, n, d] over k [b, rows, d] and v; `seen`: bool [b, n or 1, rows].

    Where a query sees a V row that is not finite, its o is NaN.
    """
    v = v.float()
    broken = ~v.isfinite().all(dim=-1)
    with whole_float32():
        scores = torch.bmm(q, k.float().transpose(1, 2)).masked_fill_(~seen, -torch.inf)
        lse = scores.logsumexp(dim=-1)
        weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
        o = torch.bmm(weights, v.masked_fill(broken.unsqueeze(-1), 0.0))
    return o.masked_fill_((seen & broken.unsqueeze(1)).any(dim=-1, keepdim=True), torch.nan), lse
