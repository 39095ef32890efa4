"""Defines the CRC32C op and registers its versions. Imported once, by `load_ops`."""

from __future__ import annotations

import torch

from .cpu import crc32c_cpu, crc32c_inside_cpu
from .cuda import crc32c_cuda, crc32c_inside_cuda

torch.library.define(
    "espnx::crc32c", "(Tensor buffer, Tensor offset_bytes, Tensor size_bytes, int seed=0) -> Tensor"
)
torch.library.impl("espnx::crc32c", "CPU")(crc32c_cpu)
torch.library.impl("espnx::crc32c", "CUDA")(crc32c_cuda)


@torch.library.register_fake("espnx::crc32c")
def _(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor, seed: int = 0
) -> torch.Tensor:
    return buffer.new_empty(offset_bytes.shape, dtype=torch.int64)


# The same, of ranges that nobody looks at (`api.crc32c_inside`).
torch.library.define(
    "espnx::crc32c_inside",
    "(Tensor buffer, Tensor offset_bytes, Tensor size_bytes, bool has_whole_words) -> Tensor",
)
torch.library.impl("espnx::crc32c_inside", "CPU")(crc32c_inside_cpu)
torch.library.impl("espnx::crc32c_inside", "CUDA")(crc32c_inside_cuda)


@torch.library.register_fake("espnx::crc32c_inside")
def _(
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    size_bytes: torch.Tensor,
    has_whole_words: bool,
) -> torch.Tensor:
    return buffer.new_empty(offset_bytes.shape, dtype=torch.int64)
