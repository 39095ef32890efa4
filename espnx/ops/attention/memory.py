"""Attention over rows in memory, by the fastest version there is where they lie.

A file of its own: it chooses among versions, one of which needs what `rows.py` says of queries.
"""

from __future__ import annotations

import torch

from .._native import load_extension
from .api import merge
from .rows import (
    PagesInMemory,
    Queries,
    RowsInMemory,
    check_pages_in_memory,
    check_rows_in_memory,
    native_arguments,
)
from .running import RunningAttention


def attend_rows(
    queries: Queries,
    rows: RowsInMemory | None,
    *,
    pages: PagesInMemory | None = None,
    threads: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over rows in memory: compiled on the CPU (rows are not copied), by the attention op
    and matrix products elsewhere.

    Args:
        queries: what attends.
        rows: where the queries are; None: nothing is seen of any.
        pages: where the queries are, further rows; None: there are none.
        threads: at most so many CPU threads; 0: as many as PyTorch uses.

    Returns:
        (o float32 [sequences, KV heads, n, dv], lse float32 [sequences, KV heads, n]); 0 and -inf
        for a query that sees nothing. Results over different rows merge exactly (`merge`).

    Raises:
        InvalidInputError: a wrong dtype, shape or device.
    """
    check_rows_in_memory(queries, rows)
    if pages is not None:
        check_pages_in_memory(queries, pages)
    if queries.q.device.type == "cpu":
        given = native_arguments(queries, rows, threads)
        more = None if pages is None else (pages.k, pages.v, pages.seen)
        return load_extension().attend_rows(None, -1, **given, pages=more)
    running = RunningAttention(queries, queries.q.device)
    if rows is not None:
        running.add_rows(rows)
    o, lse = running.result()
    if pages is None:
        return o, lse
    own = attend_rows(*pages.of_pairs(queries), threads=threads)
    return merge(o, lse, own[0].view_as(o), own[1].view_as(lse))
