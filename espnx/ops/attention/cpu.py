"""The CPU version of the attention op: makes the results' memory and calls the extension, which checks the other arguments."""

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
    scaled = query.to(torch.float32).mul(scale).contiguous()
    *shape, d = query.shape
    o, lse = scaled.new_empty((*shape, dv or d)), scaled.new_empty(shape)
    load_extension().attention(
        scaled, buffer, block_offset_bytes.contiguous(), n_rows.contiguous(), block_rows, fmt, dv,
        None if visible is None else visible.contiguous(), None if last_position is None else last_position.contiguous(),
        threads or torch.get_num_threads(), o, lse,
    )  # fmt: skip
    return o, lse
