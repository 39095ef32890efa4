"""Defines the gather op and registers its versions. Imported once, by `load_ops`."""

from __future__ import annotations

import torch

from .cpu import gather_cpu
from .cuda import gather_cuda

torch.library.define(
    "espnx::gather", "(Tensor buffer, Tensor offset_bytes, Tensor size_bytes) -> Tensor"
)
torch.library.impl("espnx::gather", "CPU")(gather_cpu)
torch.library.impl("espnx::gather", "CUDA")(gather_cuda)


@torch.library.register_fake("espnx::gather")
def _(buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor) -> torch.Tensor:
    return buffer.new_empty(torch.library.get_ctx().new_dynamic_size())
