"""Defines the attention op and registers its versions. Imported once, by `load_ops`."""

from __future__ import annotations

import torch

from .cpu import attention_cpu, attention_inside_cpu
from .cuda import attention_inside_triton, attention_triton

# dv 0: blocks hold X rows, which stand for K and V at once.
torch.library.define(
    "espnx::attention",
    "(Tensor query, Tensor buffer, Tensor block_offset_bytes, Tensor n_rows, int block_rows, str "
    "format, float scale, int dv, Tensor? visible=None, Tensor? last_position=None, int threads=0) "
    "-> (Tensor, Tensor)",
)
torch.library.impl("espnx::attention", "CPU")(attention_cpu)
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
    return query.new_empty((*shape[:3], dv or shape[3]), dtype=torch.float32), query.new_empty(
        shape[:3], dtype=torch.float32
    )


# The same, of tables that nobody looks at (`api.attention_inside`).
torch.library.define(
    "espnx::attention_inside",
    "(Tensor query, Tensor buffer, Tensor block_offset_bytes, Tensor n_rows, int rows_max, int "
    "align_bytes, int block_rows, str format, float scale, int dv, Tensor? visible=None, Tensor? "
    "last_position=None, int threads=0) -> (Tensor, Tensor)",
)
torch.library.impl("espnx::attention_inside", "CPU")(attention_inside_cpu)
torch.library.impl("espnx::attention_inside", "CUDA")(attention_inside_triton)


@torch.library.register_fake("espnx::attention_inside")
def _(
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
    shape = query.shape
    return query.new_empty((*shape[:3], dv or shape[3]), dtype=torch.float32), query.new_empty(
        shape[:3], dtype=torch.float32
    )
