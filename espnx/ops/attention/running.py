"""Attention of some queries on a torch device, over rows in blocks or in memory, part by part,
merged exactly: the attention op where its kernel takes such rows and scores, otherwise (the longest
X rows on a GPU; windows, soft caps and slopes on the CPU) matrix products.

Rows are computed on where they arrived; tables are made on the host, so that nothing here waits for
the device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..precision import whole_float32
from .api import attention, merge
from .checks import DIM_MAX as HOST_DIM_MAX
from .checks import ROW_FORMATS
from .cuda import DIM_MAX as CUDA_DIM_MAX
from .cuda import ScoreRules, attention_triton
from .rows import Queries, RowsInMemory

#: Types of devices on which the op knows more of scores than products and masks.
_RULED = ("cuda",)


class RunningAttention:
    """The attention of some queries, over what has been added so far.

    Args:
        queries: what attends; `q` may be anywhere.
        device: where rows are.
        threads: that compute on a CPU; None: as many as the op finds worth it.
    """

    def __init__(self, queries: Queries, device: torch.device, threads: int | None = None):
        #: Makes a host tensor of an array, for the device to copy.
        self.table: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy
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
        self._o = torch.zeros(
            n_sequences * n_heads, n, queries.dv, dtype=torch.float32, device=device
        )
        self._lse = torch.full(
            (n_sequences * n_heads, n), -torch.inf, dtype=torch.float32, device=device
        )

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(o float32 [sequences, heads, n, dv], lse [sequences, heads, n])."""
        n_sequences, n_heads, n, _ = self._shape
        return self._o.view(n_sequences, n_heads, n, self._dv), self._lse.view(
            n_sequences, n_heads, n
        )

    def add_rows(self, rows: RowsInMemory) -> None:
        """Rows in memory. They become one block of each head."""
        if rows.n_rows == 0 or not self._q.numel():
            return
        k, v = (each.to(self._o.device).flatten(0, 1) for each in rows.counting)
        if k.dtype != v.dtype:
            k, v = k.float(), v.float()
        pair = np.arange(len(k))
        first, n_rows = np.full(len(k), rows.first_position), np.full(len(k), rows.n_rows)
        if not self.takes(k.shape[-1], v.shape[-1]):
            self.add_matrices(pair, first, n_rows, k, v, 0)
            return
        is_shared = rows.v is rows.k
        flat = k.flatten(1) if is_shared else torch.cat([k.flatten(1), v.flatten(1)], dim=1)
        memory = flat.contiguous().view(torch.uint8)
        offsets = torch.arange(len(k)).unsqueeze(1) * memory.shape[1]
        form = next(name for name, dtype in ROW_FORMATS.items() if dtype == k.dtype)
        self.add_blocks(
            pair,
            first,
            n_rows,
            memory.view(-1),
            offsets,
            block_rows=rows.n_rows,
            form=form,
            dv=0 if is_shared else v.shape[-1],
        )

    def add_blocks(
        self,
        pair: np.ndarray,
        first: np.ndarray,
        n_rows: np.ndarray,
        memory: torch.Tensor,
        offset_bytes: torch.Tensor,
        *,
        block_rows: int,
        form: str,
        dv: int,
    ) -> None:
        """Rows of chains of blocks, as the attention op takes them (`dv` 0: X rows).

        Args:
            pair: int64 [chains]: sequence x heads + head of each, ascending.
            first, n_rows: int64 [chains]: position of the first row, and how many there are.
            memory: uint8 [bytes], on the device.
            offset_bytes: int64 [chains, blocks], on the host.
        """
        last = None
        if (
            self._last is not None
            and self._last.size
            and int(self._last.min()) < int((first + n_rows).max()) - 1
        ):
            last = self.table(self._last[None, :] - first[:, None])
        visible = self._visible_rows(pair, first, 0, int(n_rows.max(initial=0)))
        q, table, counts = (
            self.chosen(self._q, pair).unsqueeze(1),
            offset_bytes.unsqueeze(1),
            self.table(n_rows),
        )
        shown = None if visible is None else self.table(visible.view(np.uint8))
        if self._is_plain:
            o, lse = attention(
                q,
                memory,
                table,
                counts,
                block_rows=block_rows,
                format=form,
                scale=1.0,
                dv=dv,
                visible=shown,
                last_position=last,
                threads=self._threads,
            )
        else:
            rules = self._rules(pair, first)
            o, lse = attention_triton(
                q, memory, table, counts, block_rows, form, 1.0, dv, shown, last, rules=rules
            )
        self.fold(pair, o.squeeze(1), lse.squeeze(1))

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
        self.fold(pair, *matrix_attention(q, k, v, seen, soft_cap=self._soft_cap, bias=bias))

    def takes(self, d: int, dv: int) -> bool:
        """Whether the op on this device takes rows of these lengths with these queries' scores."""
        return max(d, dv) <= self._dim_max and (self._is_plain or self._takes_rules)

    def _rules(self, pair: np.ndarray, first: np.ndarray) -> ScoreRules:
        """What changes the scores of chains whose first rows stand at these positions."""
        position = None
        if self._position is not None and (self._window or self._slopes is not None):
            position = self.table(self._position[None, :] - first[:, None])
        slopes = None if self._slopes is None else self.chosen(self._slopes, pair).unsqueeze(1)
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
        return self.table(found).to(self._o.device, non_blocking=True)

    def chosen(self, rows: torch.Tensor, pair: np.ndarray) -> torch.Tensor:
        """Those of the (sequence, head) pairs, of rows that all of them have."""
        if len(pair) == len(rows) and np.array_equal(pair, np.arange(len(rows))):
            return rows
        return rows[self.table(pair).to(rows.device, non_blocking=True)]

    def fold(self, pair: np.ndarray, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Parts of these (sequence, head) pairs, ascending. Where a pair has several, one after the
        other: sums in a fixed order."""
        turn = np.arange(len(pair)) - np.searchsorted(pair, pair)
        for i in range(int(turn.max(initial=-1)) + 1):
            mine = np.flatnonzero(turn == i)
            if len(mine) == len(self._o):
                self._o, self._lse = merge(
                    self._o, self._lse, self.chosen(o, mine), self.chosen(lse, mine)
                )
                continue
            at = self.table(pair[mine]).to(o.device, non_blocking=True)
            merged = merge(self._o[at], self._lse[at], self.chosen(o, mine), self.chosen(lse, mine))
            self._o[at], self._lse[at] = merged


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
        weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
        o = torch.bmm(weights, v.masked_fill(broken.unsqueeze(-1), 0.0))
    return o.masked_fill_((seen & broken.unsqueeze(1)).any(dim=-1, keepdim=True), torch.nan), lse
