"""Records one after the other in plain Python: what the fast versions are tested against, and so a
file of its own, which shares no code with them."""

from __future__ import annotations

import torch

from ..ranges import check_inside, check_ranges


def gather_reference(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor
) -> torch.Tensor:
    """`espnx.ops.gather` in plain Python, on any device; same arguments, result and errors."""
    check_ranges("gather", buffer, offset_bytes, size_bytes)
    check_inside("gather", buffer.numel(), offset_bytes, size_bytes)
    pairs = zip(offset_bytes.tolist(), size_bytes.tolist(), strict=True)
    return torch.cat([buffer[:0], *(buffer[begin : begin + size] for begin, size in pairs)])
