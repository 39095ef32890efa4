"""Ragged records of an I/O buffer as one compact tensor, for callers; a file of its own, as each
op has one."""

from __future__ import annotations

import torch

from .._native import is_direct, load_ops
from ..ranges import check_ranges
from .cpu import gather_cpu
from .cuda import gather_cuda


def gather(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor
) -> torch.Tensor:
    """The bytes of n records of an I/O buffer, one after the other, in a tensor of their own (ESPN,
    section 4: "restructuring").

    Args:
        buffer: uint8 ``[bytes]``, contiguous.
        offset_bytes: int64 ``[n]``, where each record begins, at any address; records may overlap
            and come in any order.
        size_bytes: int64 ``[n]``, 0 allowed. This and ``offset_bytes`` may stay on the CPU for a
            CUDA buffer.

    Returns:
        uint8 ``[sum of size_bytes]`` on the buffer's device. Records of rows of d numbers are
        ``result.view(dtype).view(-1, d)``; record i begins at ``size_bytes.cumsum(0)[i - 1]``.

    Raises:
        InvalidInputError: a wrong dtype, shape or device, or a record outside the buffer (checked
            before any byte is read).
        MissingDependencyError: the extension is not built.
    """
    check_ranges("gather", buffer, offset_bytes, size_bytes)
    if is_direct(buffer):
        return gather_cpu(buffer, offset_bytes, size_bytes)
    if is_direct(buffer, on="cuda"):
        return gather_cuda(buffer, offset_bytes, size_bytes)
    load_ops()
    found: torch.Tensor = torch.ops.espnx.gather(buffer, offset_bytes, size_bytes)
    return found
