"""The CPU version of the gather op, by the extension."""

from __future__ import annotations

import torch

from .._native import load_extension
from ..ranges import check_ranges
from .places import places


def gather_cpu(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor
) -> torch.Tensor:
    """`espnx.ops.gather` of tensors on the CPU."""
    check_ranges("gather", buffer, offset_bytes, size_bytes)
    found = places(buffer, offset_bytes, size_bytes)
    out = torch.empty(found.total_bytes, dtype=torch.uint8)
    load_extension().gather(buffer, found.offset_bytes, found.begin, out, torch.get_num_threads())
    return out
