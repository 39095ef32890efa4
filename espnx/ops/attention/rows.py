"""Attention over rows in memory: what it is given, and what it means, in plain PyTorch. `memory.py`
has the fast versions."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from ...errors import InvalidInputError


@dataclass(frozen=True)
class Queries:
    """What attends, to rows wherever they lie.

    The score of a query row and a K row is their product; then `soft_cap` and `slopes` change it,
    in this order. A query sees the rows that none of the masks hides.

    Attributes:
        q: float32 [sequences, KV heads, n, d], contiguous, multiplied by the softmax scale; n: the
            query heads of one KV head times their positions.
        dv: length of a V row.
        last_position: int64 [n]: the last position that each row of q sees; None: all.
        first_visible: int64 [sequences]: positions before it are padding, or None.
        visible: uint8 [sequences, positions]: 0 hides a position, or None.
        position: int64 [n]: where each row of q stands; for a window and slopes alone.
        window: a query sees so many positions, of which its own is the last; None: all.
        soft_cap: a score s becomes soft_cap * tanh(s / soft_cap), or None.
        slopes: float32 [KV heads, n]: a row at position p adds slope * (p - position) to its score
            (ALiBi), or None.
        scale, dtype: what q was multiplied by, and what it was before that: where rows have the
            same dtype of half precision, many queries are attended with in it.

    Raises:
        InvalidInputError: a window or slopes without position; one of them out of range.
    """

    q: torch.Tensor
    dv: int
    last_position: torch.Tensor | None = None
    first_visible: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    position: torch.Tensor | None = None
    window: int | None = None
    soft_cap: float | None = None
    slopes: torch.Tensor | None = None
    scale: float = 1.0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.position is None and (self.window is not None or self.slopes is not None):
            raise InvalidInputError(
                "a window or slopes", got="no position", expected="the position of each query"
            )
        if self.window is not None and self.window < 1:
            raise InvalidInputError(
                "window of attention", got=self.window, expected="at least 1 position"
            )
        if self.soft_cap is not None and not 0 < self.soft_cap < float("inf"):
            raise InvalidInputError(
                "soft cap of scores", got=self.soft_cap, expected="a finite number above 0"
            )
        if self.slopes is not None and self.slopes.shape != self.q.shape[1:3]:
            raise InvalidInputError(
                "slopes",
                got=list(self.slopes.shape),
                expected=f"{list(self.q.shape[1:3])}: [KV heads, n]",
            )

    def part(self, begin: int, end: int) -> Self:
        """The queries of some of the sequences."""
        first, visible = (
            None if each is None else each[begin:end] for each in (self.first_visible, self.visible)
        )
        return replace(self, q=self.q[begin:end], first_visible=first, visible=visible)

    def chosen(self, sequences: list[int]) -> Self:
        """The queries of these sequences, in this order."""
        first, visible = (
            None if each is None else each[sequences] for each in (self.first_visible, self.visible)
        )
        return replace(self, q=self.q[sequences], first_visible=first, visible=visible)

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(
            **{
                name: each.to(device) if isinstance(each, torch.Tensor) else each
                for name, each in every.items()
            }
        )


@dataclass(frozen=True)
class RowsInMemory:
    """K and V rows of consecutive tokens that lie in memory.

    Attributes:
        k, v: [sequences, KV heads, capacity, d] and [..., dv], contiguous, of one dtype; the same
            tensor for X rows.
        skip: rows before those that count.
        n_rows: rows that count.
        first_position: of the first of them.
        counts: bool [sequences, KV heads], whose rows do; None: all of them. Devices alone know of
            it, those that say so.
    """

    k: torch.Tensor
    v: torch.Tensor
    skip: int
    n_rows: int
    first_position: int
    counts: torch.Tensor | None = None

    @property
    def counting(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(k [sequences, KV heads, n_rows, d], v): views of the rows that count."""
        k = self.k[:, :, self.skip : self.skip + self.n_rows]
        return k, k if self.v is self.k else self.v[:, :, self.skip : self.skip + self.n_rows]

    def part(self, begin: int, end: int) -> Self:
        """The rows of some of the sequences."""
        k = self.k[begin:end]
        counts = None if self.counts is None else self.counts[begin:end]
        return replace(self, k=k, v=k if self.v is self.k else self.v[begin:end], counts=counts)

    def to(self, device: torch.device) -> Self:
        """The rows that count, on another device."""
        k, v = (each.to(device) for each in self.counting)
        return type(self)(
            k, k if self.v is self.k else v, 0, self.n_rows, self.first_position, self.counts
        )


@dataclass(frozen=True)
class PagesInMemory:
    """K and V rows in memory that say themselves which of them are seen, by every query alike:
    pages from anywhere in a text, say. Of what queries bring, `soft_cap` alone is for them.

    Attributes:
        k, v: [sequences, KV heads, rows, d] and [..., dv], contiguous, of one dtype.
        seen: uint8 [sequences, KV heads, rows], contiguous: 0 hides a row.
    """

    k: torch.Tensor
    v: torch.Tensor
    seen: torch.Tensor

    def of_pairs(self, queries: Queries) -> tuple[Queries, RowsInMemory]:
        """The same as queries and rows of one head each, whose marks hide positions."""
        pairs, rows = self.k.shape[0] * self.k.shape[1], self.k.shape[2]
        q = queries.q.view(pairs, 1, *queries.q.shape[2:])
        own = Queries(q, queries.dv, visible=self.seen.view(pairs, rows), soft_cap=queries.soft_cap)
        k, v = (each.view(pairs, 1, rows, each.shape[-1]) for each in (self.k, self.v))
        return own, RowsInMemory(k, v, 0, rows, 0)


def native_arguments(queries: Queries, rows: RowsInMemory | None, threads: int) -> dict[str, Any]:
    """The queries and rows as the compiled attention takes them, over stored rows too. `threads` 0:
    as many as PyTorch uses."""
    tail = (
        None
        if rows is None or not rows.n_rows
        else (rows.k, rows.v, rows.skip, rows.n_rows, rows.first_position)
    )
    return {
        "q": queries.q,
        "dv": queries.dv,
        "rows": tail,
        "position": queries.position,
        "last_position": queries.last_position,
        "first_visible": queries.first_visible,
        "visible": queries.visible,
        "window": queries.window or 0,
        "soft_cap": queries.soft_cap or 0.0,
        "slopes": queries.slopes,
        "threads": threads or torch.get_num_threads(),
    }


def check_rows_in_memory(queries: Queries, rows: RowsInMemory | None) -> None:
    """Raises InvalidInputError unless the rows are such as these queries look at."""
    q = queries.q
    if q.dim() != 4 or q.dtype != torch.float32 or not q.is_contiguous():
        raise InvalidInputError(
            "queries",
            got=f"{q.dtype} {list(q.shape)}",
            expected="contiguous float32 [sequences, KV heads, n, d]",
        )
    if rows is None:
        return
    for name, each, width in (("K", rows.k, q.shape[3]), ("V", rows.v, queries.dv)):
        fits = each.dim() == 4 and (each.shape[:2], each.shape[3], each.dtype, each.device) == (
            q.shape[:2],
            width,
            rows.k.dtype,
            q.device,
        )
        if (
            not fits
            or not each.is_contiguous()
            or not 0 <= rows.skip <= rows.skip + rows.n_rows <= each.shape[2]
        ):
            raise InvalidInputError(
                f"{name} rows in memory",
                got=f"{each.dtype} {list(each.shape)} on {each.device}",
                expected=(
                    f"contiguous [{q.shape[0]}, {q.shape[1]}, rows, {width}] on {q.device}, with "
                    f"rows {rows.skip} to {rows.skip + rows.n_rows}"
                ),
            )


def check_pages_in_memory(queries: Queries, pages: PagesInMemory) -> None:
    """Raises InvalidInputError unless the pages are such as these queries look at."""
    shape, seen = (*queries.q.shape[:2], pages.k.shape[2] if pages.k.dim() == 4 else 0), pages.seen
    if (tuple(seen.shape), seen.dtype, seen.device) != (shape, torch.uint8, queries.q.device):
        raise InvalidInputError(
            "seen of pages in memory",
            got=f"{seen.dtype} {list(seen.shape)} on {seen.device}",
            expected=f"uint8 {list(shape)} on {queries.q.device}",
        )
    check_rows_in_memory(queries, RowsInMemory(pages.k, pages.v, 0, shape[2], 0))


def attend_rows_reference(
    queries: Queries, rows: RowsInMemory | None, *, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """`espnx.ops.attention.attend_rows` in plain PyTorch, on any device. `dtype` is what it
    computes in, and the dtype of its results."""
    q = queries.q.to(dtype)
    if rows is None or not rows.n_rows:
        return q.new_zeros(*q.shape[:3], queries.dv), q.new_full(q.shape[:3], -torch.inf)
    k, v = (each.to(q) for each in rows.counting)
    position = rows.first_position + torch.arange(rows.n_rows, device=q.device)
    scores = q @ k.transpose(-1, -2)
    if queries.soft_cap is not None:
        scores = queries.soft_cap * torch.tanh(scores / queries.soft_cap)
    if queries.slopes is not None and queries.position is not None:
        scores = scores + queries.slopes.to(q)[:, :, None] * (
            position - queries.position.to(q.device)[:, None]
        )
    seen = seen_by(queries, position)
    scores = torch.where(seen, scores, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    lse = torch.where(lse == torch.inf, torch.nan, lse)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    # Infinities and NaNs one by one, since a hidden row's weight of 0 would turn them into NaN.
    broken = ~v.isfinite().all(dim=-1)
    o = weights @ torch.where(broken[..., None], 0.0, v)
    for row in broken.flatten(0, 1).any(dim=0).nonzero().flatten().tolist():
        counts = seen[..., row, None] & broken[:, :, None, row, None]
        o += torch.where(counts, weights[..., row, None] * v[:, :, row, None], 0.0)
    return torch.where(lse[..., None] == -torch.inf, 0.0, o), lse


def seen_by(queries: Queries, position: torch.Tensor) -> torch.Tensor:
    """bool [sequences or 1, 1, n or 1, rows]: which rows each query sees."""
    seen = torch.ones(1, 1, 1, len(position), dtype=torch.bool, device=position.device)
    if queries.last_position is not None:
        seen = seen & (position <= queries.last_position.to(position.device)[:, None])
    if queries.window is not None and queries.position is not None:
        seen = seen & (position > queries.position.to(position.device)[:, None] - queries.window)
    if queries.first_visible is not None:
        seen = seen & (position >= queries.first_visible.to(position.device)[:, None, None, None])
    if queries.visible is not None:
        seen = seen & (queries.visible.to(position.device)[:, None, None, position] != 0)
    return seen


def add_sinks(
    o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sink logits join the softmax's denominator and bring no value: a correction of what all rows
    together gave, made once, after every part is merged. No device needs to know of them.

    Args:
        o, lse: float32 ``[..., n, dv]`` and ``[..., n]``.
        sinks: float32, broadcastable to lse.

    Returns:
        ``o`` and ``lse`` like the arguments.
    """
    sinks = sinks.to(lse)
    return o * torch.sigmoid(lse - sinks)[..., None], torch.logaddexp(lse, sinks.expand_as(lse))
