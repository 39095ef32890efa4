"""Attention of some queries on a torch device, over rows in blocks or in memory, part by part,
merged exactly: the attention op where its kernel takes such rows and scores, otherwise (the longest
X rows on a GPU; windows, soft caps and slopes on the CPU) matrix products.

Rows are computed on where they arrived; tables are made on the host, so that nothing here waits for
the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..precision import whole_float32
from .api import alignment, attention_inside
from .checks import DIM_MAX as HOST_DIM_MAX
from .checks import ROW_FORMATS
from .cuda import DIM_MAX as CUDA_DIM_MAX
from .cuda import ScoreRules, attention_inside_triton
from .fused import QUERIES_MIN, fused_attention, takes_fused
from .parts import Parts
from .rows import Queries, RowsInMemory

#: Types of devices on which the op knows more of scores than products and masks.
_RULED = ("cuda",)


@dataclass(frozen=True)
class ChainedBlocks:
    """Rows of chains of blocks in one buffer, and the tables that kernels look them up in.

    Attributes:
        pair: int64 [chains]: sequence x heads + head of each, ascending.
        first, n_rows: int64 [chains]: position of the first row, and how many there are.
        at, offset_bytes, counts: int64 [chains], [chains, 1, blocks] and [chains], on the device:
            `pair`, where the blocks begin, and `n_rows`.
        multiple: all of `offset_bytes` are multiples of it.
        block_rows: rows of a block.
        form: of the rows.
        dv: of the op: 0 for X rows.
    """

    pair: np.ndarray
    first: np.ndarray
    n_rows: np.ndarray
    at: torch.Tensor
    offset_bytes: torch.Tensor
    counts: torch.Tensor
    multiple: int
    block_rows: int
    form: str
    dv: int

    @property
    def rows_max(self) -> int:
        return int(self.n_rows.max(initial=0))


class RunningAttention:
    """The attention of some queries, over what has been added so far.

    Args:
        queries: what attends; `q` may be anywhere.
        device: where rows are.
        threads: that compute on a CPU; None: as many as the op finds worth it.
        table: makes a host tensor of an array, for the device to copy.
    """

    def __init__(
        self,
        queries: Queries,
        device: torch.device,
        threads: int | None = None,
        table: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy,
    ):
        self.table = table
        self._shape = n_sequences, n_heads, n, d = queries.q.shape
        self._dv, self._threads = queries.dv, threads
        self._q = queries.q.to(device).reshape(n_sequences * n_heads, n, d)
        self._last = _host(queries.last_position)
        self._first_visible, self._visible = _host(queries.first_visible), _host(queries.visible)
        self._position = _host(queries.position)
        self._window, self._soft_cap = queries.window or 0, queries.soft_cap or 0.0
        self._slopes = None
        if queries.slopes is not None:
            slopes = queries.slopes.to(device=device, dtype=torch.float32)
            self._slopes = slopes.repeat(n_sequences, 1)
        self._is_plain = not self._window and not self._soft_cap and self._slopes is None
        self._takes_rules = device.type in _RULED
        self._dim_max = CUDA_DIM_MAX if device.type == "cuda" else HOST_DIM_MAX
        self._device, self._scale, self._dtype = device, queries.scale, queries.dtype
        self._parts = Parts(n_sequences * n_heads, n, queries.dv, device)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(o float32 [sequences, heads, n, dv], lse [sequences, heads, n])."""
        n_sequences, n_heads, n, _ = self._shape
        o, lse = self._parts.merged(self.there)
        return o.view(n_sequences, n_heads, n, self._dv), lse.view(n_sequences, n_heads, n)

    def there(self, array: np.ndarray) -> torch.Tensor:
        """A table on the device."""
        return self.table(array).to(self._device, non_blocking=True)

    def add_rows(self, rows: RowsInMemory) -> None:
        """Rows in memory. They become one block of each head."""
        if rows.n_rows == 0 or not self._q.numel():
            return
        k, v = (each.to(self._device).flatten(0, 1) for each in rows.counting)
        if k.dtype != v.dtype:
            k, v = k.float(), v.float()
        pair = np.arange(len(k))
        first, n_rows = np.full(len(k), rows.first_position), np.full(len(k), rows.n_rows)
        if self.all_seen(pair, first, n_rows).all() and self.fuses(k, v):
            self.add_fused(pair, None, k, v)
            return
        if not self.takes(k.shape[-1], v.shape[-1]):
            self.add_matrices(pair, first, n_rows, k, v, 0)
            return
        is_shared = rows.v is rows.k
        flat = k.flatten(1) if is_shared else torch.cat([k.flatten(1), v.flatten(1)], dim=1)
        memory = flat.contiguous().view(torch.uint8)
        size = memory.shape[1]
        table = self.there(np.concatenate([pair, pair * size, n_rows]))
        at, offsets, counts = table.split(len(k))
        blocks = ChainedBlocks(
            pair,
            first,
            n_rows,
            at,
            offsets.view(-1, 1, 1),
            counts,
            size,
            rows.n_rows,
            next(name for name, dtype in ROW_FORMATS.items() if dtype == k.dtype),
            0 if is_shared else v.shape[-1],
        )
        self.add_blocks(blocks, memory.view(-1))

    def add_blocks(self, blocks: ChainedBlocks, memory: torch.Tensor) -> None:
        """Rows of chains of blocks in `memory`, uint8 [bytes] on the device, as the attention op
        takes them (`takes`)."""
        pair, first, rows_max = blocks.pair, blocks.first, blocks.rows_max
        last = shown = None
        if self._last is not None and self._hides_last(first, blocks.n_rows).any():
            last = self.there(self._last[None, :] - first[:, None])
        if (visible := self._visible_rows(pair, first, 0, rows_max)) is not None:
            shown = self.there(visible.view(np.uint8))
        q = self.chosen(self._q, pair, blocks.at).unsqueeze(1)
        align_bytes = alignment(memory, blocks.multiple, blocks.form)
        if self._is_plain:
            o, lse = attention_inside(
                q,
                memory,
                blocks.offset_bytes,
                blocks.counts,
                rows_max=rows_max,
                align_bytes=align_bytes,
                block_rows=blocks.block_rows,
                format=blocks.form,
                dv=blocks.dv,
                visible=shown,
                last_position=last,
                threads=self._threads,
            )
        else:
            given = (q, memory, blocks.offset_bytes, blocks.counts, rows_max, align_bytes)
            kind = (blocks.block_rows, blocks.form, 1.0, blocks.dv, shown, last)
            rules = self._rules(pair, first, blocks.at)
            o, lse = attention_inside_triton(*given, *kind, rules=rules)
        self._parts.add(pair, o.squeeze(1), lse.squeeze(1), self.there)

    def add_fused(
        self, pair: np.ndarray, at: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Rows of chains of one length, all of which every query sees (`all_seen`), by the
        framework's kernel for many queries (`fuses`).

        Args:
            pair: int64 [chains]; `at`: the same on the device, or None.
            k, v: [chains, rows, d] and [chains, rows, dv], on the device.
        """
        q = self.chosen(self._q, pair, at)
        self._parts.add(pair, *fused_attention(q, k, v, self._scale), self.there)

    def fuses(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether `add_fused` takes such rows, and is faster than the attention op."""
        return (
            self._is_plain
            and self._shape[2] >= QUERIES_MIN
            and self._dtype == k.dtype == v.dtype
            and takes_fused(k.shape[-1], v.shape[-1], k.dtype, self._device)
        )

    def all_seen(self, pair: np.ndarray, first: np.ndarray, n_rows: np.ndarray) -> np.ndarray:
        """bool [chains]: whether every query sees all rows of a chain."""
        seen = ~self._hides_last(first, n_rows)
        visible = self._visible_rows(pair, first, 0, int(n_rows.max(initial=0)))
        if visible is not None:
            row = np.arange(visible.shape[1])
            seen &= (visible | (row >= n_rows[:, None])).all(axis=1)
        return seen

    def _hides_last(self, first: np.ndarray, n_rows: np.ndarray) -> np.ndarray:
        """bool [chains]: whether some query sees not even up to the last row."""
        if self._last is None or not self._last.size:
            return np.zeros(len(first), dtype=bool)
        hides: np.ndarray = self._last.min() < first + n_rows - 1
        return hides

    def add_matrices(
        self,
        pair: np.ndarray,
        first: np.ndarray,
        n_rows: np.ndarray,
        k: torch.Tensor,
        v: torch.Tensor,
        begin: int,
    ) -> None:
        """Rows `begin` and further of chains, where the op does not take them (`takes`).

        Args:
            pair, first, n_rows: of `add_blocks`.
            k, v: [chains, rows, d] and [chains, rows, dv], on the device.
        """
        end = begin + k.shape[1]
        seen = self.seen(pair, first, n_rows, begin, end)
        bias = None
        if self._slopes is not None and self._position is not None:
            row = first[:, None, None] + np.arange(begin, end)
            far = self.table((row - self._position[:, None]).astype(np.float32))
            slopes = self.chosen(self._slopes, pair)
            bias = slopes[:, :, None] * far.to(slopes.device, non_blocking=True)
        q = self.chosen(self._q, pair)
        found = matrix_attention(q, k, v, seen, soft_cap=self._soft_cap, bias=bias)
        self._parts.add(pair, *found, self.there)

    def takes(self, d: int, dv: int) -> bool:
        """Whether the op on this device takes rows of these lengths with these queries' scores."""
        return max(d, dv) <= self._dim_max and (self._is_plain or self._takes_rules)

    def _rules(self, pair: np.ndarray, first: np.ndarray, at: torch.Tensor) -> ScoreRules:
        """What changes the scores of chains whose first rows stand at these positions."""
        position = slopes = None
        if self._position is not None and (self._window or self._slopes is not None):
            position = self.there(self._position[None, :] - first[:, None])
        if self._slopes is not None:
            slopes = self.chosen(self._slopes, pair, at).unsqueeze(1)
        return ScoreRules(self._soft_cap, self._window, position, slopes)

    def _visible_rows(
        self, pair: np.ndarray, first: np.ndarray, begin: int, end: int
    ) -> np.ndarray | None:
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
            seen &= (self._visible[sequence[:, None], known] != 0) & (
                position < self._visible.shape[1]
            )
        return None if seen.all() else seen

    def seen(
        self, pair: np.ndarray, first: np.ndarray, n_rows: np.ndarray, begin: int, end: int
    ) -> torch.Tensor:
        """bool [chains, n or 1, end - begin], on the device: which rows from `begin` on a query
        sees."""
        row = np.arange(begin, end)
        seen = row < n_rows[:, None]
        if (visible := self._visible_rows(pair, first, begin, end)) is not None:
            seen &= visible
        found = seen[:, None, :]
        if self._last is not None:
            found = found & (first[:, None, None] + row <= self._last[:, None])
        if self._window and self._position is not None:
            found = found & (first[:, None, None] + row > self._position[:, None] - self._window)
        return self.there(found)

    def chosen(
        self, rows: torch.Tensor, pair: np.ndarray, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Those of the (sequence, head) pairs, of rows that all of them have. `at`: the pairs on
        the device, where they are there."""
        if len(pair) == len(rows) and np.array_equal(pair, np.arange(len(rows))):
            return rows
        return rows[self.there(pair) if at is None else at]


def _host(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.cpu().numpy()


def matrix_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    *,
    soft_cap: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o float32 [b, n, dv], lse [b, n]) of scaled queries q [b, n, d] over k [b, rows, d] and v;
    `seen`: bool [b, n or 1, rows]; scores are capped unless `soft_cap` is 0, then `bias`
    [b, n, rows] is added.

    Where a query sees a V row that is not finite, its o is NaN.
    """
    v = v.float()
    broken = ~v.isfinite().all(dim=-1)
    with whole_float32():
        scores = torch.bmm(q, k.float().transpose(1, 2))
        if soft_cap:
            scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
        if bias is not None:
            scores += bias
        scores = scores.masked_fill_(~seen, -torch.inf)
        lse = scores.logsumexp(dim=-1)
        lse.masked_fill_(lse == torch.inf, torch.nan)
        weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
        o = torch.bmm(weights, v.masked_fill(broken.unsqueeze(-1), 0.0))
    return o.masked_fill_((seen & broken.unsqueeze(1)).any(dim=-1, keepdim=True), torch.nan), lse
