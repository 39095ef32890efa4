"""X rows: the input of the K and V projections, stored instead of both (HILOS, section 4.2:
X-cache).

Where positions are not rotary, the projections move to the other side of the product (absorption):
softmax(q W_k x) W_v x needs q W_k once and W_v once, head_dim times less arithmetic than K and V of
every stored token. b_k shifts all scores of a query alike and drops out of its softmax; b_v is
added once, since weights sum to one. Otherwise K and V are computed again, k-norm and rotation
included (recomputation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from .. import errors
from ..device.row_layout import RowLayout
from ..ops.attention import Queries, RowsInMemory
from .shown import ShownAttention, unpacked

#: k [1, KV heads, n, d] of tokens `first` to `first + n` of a sequence, as projected -> as the
#: cache keeps it. (k, sequence, first)
Finish = Callable[[torch.Tensor, int, int], torch.Tensor]
_PIECE = torch.complex128  # of the dtypes that torch copies bit by bit the one of 16 bytes


@dataclass(frozen=True)
class Projection:
    """How a layer makes K and V of its input.

    Attributes:
        k_weight, v_weight: [KV heads * d, hidden] and [KV heads * dv, hidden], as of a linear
            layer.
        k_bias, v_bias: [KV heads * d] or None.
        n_heads: KV heads.
        finish: k-norm and rotation, or None where there is neither, nor a norm of V: then
            projections can be absorbed.
        finish_v: a norm of V rows, or None.
    """

    k_weight: torch.Tensor
    v_weight: torch.Tensor
    k_bias: torch.Tensor | None
    v_bias: torch.Tensor | None
    n_heads: int
    finish: Finish | None
    finish_v: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def hidden(self) -> int:
        return self.k_weight.shape[1]

    def rows(self, x: torch.Tensor, sequence: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K [1, KV heads, n, d] and V [1, KV heads, n, dv] of x [n, hidden], tokens of one sequence
        from position `first` on."""
        x = x.to(self.k_weight)  # dtype and device
        k, v = (
            F.linear(x, weight, bias)
            .view(1, len(x), self.n_heads, weight.shape[0] // self.n_heads)
            .transpose(1, 2)
            for weight, bias in ((self.k_weight, self.k_bias), (self.v_weight, self.v_bias))
        )
        if self.finish is not None:
            k = self.finish(k, sequence, first)
        if self.finish_v is not None:
            v = self.finish_v(v)
        return contiguous_rows(k), contiguous_rows(v)

    def check(
        self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, sequence: int = 0
    ) -> None:
        """Compares K and V made here with those that the model made, k [KV heads, n, d]: a model
        may do more to them than is known here.

        Raises InvalidInputError.
        """
        try:
            made = self.rows(x, sequence, first)
        except RuntimeError as error:
            # shapes that do not fit: another order of cutting into heads, rotating, normalising
            raise errors.InvalidInputError(
                "this model's K is not made as is known here",
                got=str(error).split("\n")[0],
                expected="a linear layer, a norm of each head, a rotation of all its dimensions",
                fix="x_rows=0",
            ) from error
        for name, ours, theirs in zip("KV", made, (k, v), strict=True):
            apart, size = (ours[0].float() - theirs.float()).abs().max(), theirs.float().abs().max()
            # Sums of `hidden` products in single precision; then some roundings to the rows' own
            # (product, norm, rotation, on either side).
            allowed = (
                16 * torch.finfo(k.dtype).eps
                + 8 * torch.finfo(torch.float32).eps * self.hidden**0.5
            )
            if not bool(apart <= allowed * size.clamp_min(1e-3)):
                raise errors.InvalidInputError(
                    f"this model's {name} is not what its projections make of their input",
                    got=f"{float(apart):.3g} apart",
                    expected="the same",
                    fix="x_rows=0",
                )


def absorb(q: torch.Tensor, projection: Projection, scale: float) -> torch.Tensor:
    """Queries that look at X rows: float32 [sequences, 1, heads * n, hidden] from q [sequences,
    heads, n, d]."""
    n_sequences, heads, n, d = q.shape
    weight = projection.k_weight.view(projection.n_heads, d, projection.hidden)
    moved = _by_head(
        q.reshape(n_sequences, projection.n_heads, heads // projection.n_heads * n, d), weight
    )
    return (
        moved.float().mul_(scale).reshape(n_sequences, 1, heads * n, projection.hidden).contiguous()
    )


def bias_scores(q: torch.Tensor, projection: Projection, scale: float) -> torch.Tensor | float:
    """What b_k adds to every score of a query, float32 [sequences, heads, n]: absorbed scores do
    without it, a log-sum-exp that is merged does not."""
    if projection.k_bias is None:
        return 0.0
    bias = (
        projection.k_bias.float()
        .view(projection.n_heads, 1, -1)
        .repeat_interleave(q.shape[1] // projection.n_heads, dim=0)
    )
    return (q.float() * bias).sum(dim=-1).mul_(scale)


def release(o: torch.Tensor, lse: torch.Tensor, projection: Projection, heads: int) -> torch.Tensor:
    """Weighted sums of X rows, [sequences, 1, heads * n, hidden], as weighted sums of V: float32
    [sequences, heads, n, dv]. Where `lse` says that nothing was seen, zeros."""
    n_sequences, _, flat, hidden = o.shape
    grouped = o.reshape(n_sequences, projection.n_heads, flat // projection.n_heads, hidden)
    weight = projection.v_weight.view(projection.n_heads, -1, hidden)
    moved = _by_head(grouped, weight.transpose(-1, -2)).float()
    if projection.v_bias is not None:
        seen = lse.reshape(n_sequences, projection.n_heads, flat // projection.n_heads, 1) > float(
            "-inf"
        )
        moved = moved + projection.v_bias.float().view(projection.n_heads, 1, -1) * seen
    return moved.reshape(n_sequences, heads, flat // heads, -1)


def contiguous_rows(rows: torch.Tensor) -> torch.Tensor:
    """The same rows without gaps. A GPU's threads copy an element each, however small: pieces of 16
    bytes take an eighth of the instructions that fp16 values take."""
    piece = _PIECE.itemsize // rows.itemsize
    is_of_pieces = rows.data_ptr() % _PIECE.itemsize == 0 and not any(
        each % piece for each in (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])
    )
    is_plain = rows.stride(-1) == 1 and not rows.requires_grad
    if rows.is_contiguous() or not (is_plain and is_of_pieces):
        return rows.contiguous()
    return rows.view(_PIECE).contiguous().view(rows.dtype)


def _by_head(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows [sequences, heads, n, i] times weight [heads, i, j], in the weight's dtype. Each head's
    weight is read once for all sequences: a broadcast product would copy it for each of them."""
    n_sequences, heads, n, _ = rows.shape
    flat = rows.to(weight.dtype).transpose(0, 1).reshape(heads, n_sequences * n, -1)
    return torch.bmm(flat, weight).view(heads, n_sequences, n, -1).transpose(0, 1)


class Recomputer:
    """Attention over X rows as they arrive, K and V made again.

    Args:
        queries: of K rows: q [sequences, KV heads, group * n, d].
        projection: of the layer.
        layout: of the X rows.
        threads: that attend; 0: as many as PyTorch uses.
        first_sequence: of the queries, as the projection numbers sequences.

    Attributes:
        over: what has been attended to so far.
    """

    def __init__(
        self,
        queries: Queries,
        projection: Projection,
        layout: RowLayout,
        threads: int,
        first_sequence: int = 0,
    ):
        self.over = ShownAttention(queries, threads)
        self._projection, self._layout, self._first = projection, layout, first_sequence

    def show(self, memory: torch.Tensor, pieces: np.ndarray) -> None:
        """Rows as a device shows them. Pieces of a sequence whose tokens follow one another, as
        generating leaves them, are made K and V of together, wherever they lie."""
        order = np.lexsort((pieces["first_position"], pieces["sequence"]))
        run, end = list[torch.Tensor](), (-1, -1)
        for sequence, _, x, _, first in unpacked(self._layout, memory, pieces[order]):
            if run and end != (sequence, first):
                self._add_run(run, end)
                run = []
            run.append(x)
            end = sequence, first + len(x)
        if run:
            self._add_run(run, end)

    def _add_run(self, run: list[torch.Tensor], end: tuple[int, int]) -> None:
        """Tokens of a sequence that follow one another; `end`: it, and the position behind them."""
        x = run[0] if len(run) == 1 else torch.cat(run)
        self.add(end[0], x, end[1] - len(x))

    def add(self, sequence: int, x: torch.Tensor, first: int) -> None:
        """x [n, hidden]: tokens of a sequence from position `first` on."""
        k, v = self._projection.rows(x, self._first + sequence, first)
        self.over.add(sequence, slice(0, k.shape[1]), RowsInMemory(k, v, 0, len(x), first))
