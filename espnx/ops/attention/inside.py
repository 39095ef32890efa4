"""Attention over blocks whose places are known to be right: nobody looks at a table, so that tables
may be on the device before anything is launched, and the host waits for none of them.

A file of its own: `api` checks what callers give; this is for rows of our own.
"""

from __future__ import annotations

import torch

from .._native import is_direct, load_ops
from .checks import ROW_FORMATS
from .cpu import attention_cpu


def attention_inside(
    query: torch.Tensor,
    buffer: torch.Tensor,
    block_offset_bytes: torch.Tensor,
    n_rows: torch.Tensor,
    *,
    rows_max: int,
    align_bytes: int,
    block_rows: int,
    format: str,  # noqa: A002
    dv: int,
    visible: torch.Tensor | None = None,
    last_position: torch.Tensor | None = None,
    threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`espnx.ops.attention` of queries that are scaled already, with every table where the query
    is.

    Args:
        rows_max: the largest of `n_rows`.
        align_bytes: what the addresses of all blocks are multiples of (`alignment`).

    The other arguments, and what it returns, as of `espnx.ops.attention`. On the CPU entries are
    checked all the same.
    """
    given = (block_rows, format, 1.0, dv, visible, last_position, threads or 0)
    if is_direct(query, buffer):
        return attention_cpu(query, buffer, block_offset_bytes, n_rows, *given)
    load_ops()
    o, lse = torch.ops.espnx.attention_inside(
        query, buffer, block_offset_bytes, n_rows, rows_max, align_bytes, *given
    )
    return o, lse


def alignment(buffer: torch.Tensor, offset_multiple: int, fmt: str) -> int:
    """What the addresses of blocks are multiples of that lie at multiples of so many bytes: 16, or
    the size of an element (int8: of a scale), which is then all that loads may count on."""
    if buffer.data_ptr() % 16 == 0 and offset_multiple % 16 == 0:
        return 16
    return max(ROW_FORMATS[fmt].itemsize, 4 if fmt == "int8" else 1)


def attention_inside_cpu(
    query: torch.Tensor,
    buffer: torch.Tensor,
    block_offset_bytes: torch.Tensor,
    n_rows: torch.Tensor,
    rows_max: int,
    align_bytes: int,
    block_rows: int,
    fmt: str,
    scale: float,
    dv: int,
    visible: torch.Tensor | None = None,
    last_position: torch.Tensor | None = None,
    threads: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU version, which looks at every entry and needs to be told of none."""
    given = (block_rows, fmt, scale, dv, visible, last_position, threads)
    return attention_cpu(query, buffer, block_offset_bytes, n_rows, *given)
