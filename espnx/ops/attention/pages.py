"""Attention over rows in memory that also says what each page of them weighs: the log-sum-exp of a
page, from which follows the part of a query's attention that falls on it.

A file of its own: nothing else needs results by page.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..precision import whole_float32
from .rows import Queries, RowsInMemory, check_rows_in_memory, seen_by


def attend_pages(
    queries: Queries, rows: RowsInMemory, page_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attend_rows`, by matrix products, and the log-sum-exp of every page.

    Args:
        queries: what attends.
        rows: where the queries are.
        page_rows: positions of a page: those of the first row begin at a multiple of it.

    Returns:
        (o float32 [sequences, KV heads, n, dv], lse [sequences, KV heads, n], page_lse [sequences,
        KV heads, n, pages]): a page's part of a query's attention is exp(page_lse - lse).

    Raises:
        InvalidInputError: a wrong dtype, shape or device.
    """
    check_rows_in_memory(queries, rows)
    k, v = (each.float() for each in rows.counting)
    position = rows.first_position + torch.arange(rows.n_rows, device=k.device)
    with whole_float32():
        scores = queries.q @ k.mT
        if queries.soft_cap is not None:
            scores = queries.soft_cap * torch.tanh(scores / queries.soft_cap)
        if queries.slopes is not None and queries.position is not None:
            distance = position - queries.position.to(k.device)[:, None]
            scores = scores + queries.slopes[:, :, None] * distance
        seen = None
        if _may_hide(queries, rows):
            seen = seen_by(queries, position)
            scores = scores.masked_fill(~seen, -torch.inf)
        before = rows.first_position % page_rows
        behind = -(before + rows.n_rows) % page_rows
        padded = F.pad(scores, (before, behind), value=-torch.inf) if before or behind else scores
        page_lse = padded.unflatten(-1, (-1, page_rows)).logsumexp(dim=-1)
        lse = page_lse.logsumexp(dim=-1)
        weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
        o = weights @ v
        if not bool(o.isfinite().all()):
            # what a hidden row holds has no effect, and a NaN that is seen has
            broken = ~v.isfinite().all(dim=-1)
            o = weights @ v.masked_fill(broken[..., None], 0.0)
            hit = broken[:, :, None] if seen is None else broken[:, :, None] & seen
            o = o.masked_fill(hit.any(dim=-1, keepdim=True), torch.nan)
    return o, lse, page_lse


def _may_hide(queries: Queries, rows: RowsInMemory) -> bool:
    """Whether some of the rows may be hidden from some query."""
    last = queries.last_position
    return (
        queries.first_visible is not None
        or queries.visible is not None
        or queries.window is not None
        or (last is not None and int(last.min()) < rows.first_position + rows.n_rows - 1)
    )
