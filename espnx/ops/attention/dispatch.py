"""Registers the versions of the attention op that are written in Python. Imported once, after the op itself exists."""

from __future__ import annotations

import torch

from .cuda import attention_triton

torch.library.impl("espnx::attention", "CUDA")(attention_triton)


@torch.library.register_fake("espnx::attention")
def _(
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
    shape = query.shape
    return query.new_empty((*shape[:3], dv or shape[3]), dtype=torch.float32), query.new_empty(shape[:3], dtype=torch.float32)
