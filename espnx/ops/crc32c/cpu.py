"""The CPU version of the CRC32C op, by the extension, which checks every argument."""

from __future__ import annotations

import torch

from .._native import load_extension


def crc32c_cpu(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor, seed: int = 0
) -> torch.Tensor:
    """`espnx.ops.crc32c_ranges` of tensors on the CPU."""
    return load_extension().crc32c_ranges(
        buffer, offset_bytes.contiguous(), size_bytes.contiguous(), seed
    )


def crc32c_inside_cpu(
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    size_bytes: torch.Tensor,
    has_whole_words: bool,
) -> torch.Tensor:
    """`api.crc32c_inside` on the CPU: the extension looks at every range all the same."""
    return crc32c_cpu(buffer, offset_bytes, size_bytes)
