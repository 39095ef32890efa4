"""The CPU version of the attention op, by the extension, which checks every argument."""

from __future__ import annotations

import torch

from .._native import load_extension
from .checks import check_query


def attention_cpu(
    query: torch.Tensor,
    buffer: torch.Tensor,
    block_offset_bytes: torch.Tensor,
    n_rows: torch.Tensor,
    block_rows: int,
    fmt: str,
    scale: float,
    dv: int,
    visible: torch.Tensor | None = None,
    last_position: torch.Tensor | None = None,
    threads: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`espnx.ops.attention` of tensors on the CPU; ``threads`` 0: as many as torch uses."""
    check_query(query)
    return load_extension().attention(
        query.to(torch.float32).contiguous(),
        buffer,
        block_offset_bytes.contiguous(),
        n_rows.contiguous(),
        block_rows,
        fmt,
        scale,
        dv,
        None if visible is None else visible.contiguous(),
        None if last_position is None else last_position.contiguous(),
        threads or torch.get_num_threads(),
    )


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
    """`api.attention_inside` on the CPU: the extension looks at every entry all the same."""
    given = (block_rows, fmt, scale, dv, visible, last_position, threads)
    return attention_cpu(query, buffer, block_offset_bytes, n_rows, *given)
