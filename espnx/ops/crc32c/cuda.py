"""The CUDA version of the CRC32C op: checks, allocates and launches ``kernels/crc32c.py``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .._native import load_kernel
from .checks import check_inside, check_ranges
from .shifts import kernel_tables

LANES, WARPS = 64, 1  # fastest on an H200 for ranges of 4 KiB


def crc32c_triton(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor, seed: int = 0
) -> torch.Tensor:
    """`espnx.ops.crc32c_ranges` by Triton: CUDA tensors, or CPU tensors in Triton's interpreter."""
    check_ranges(buffer, offset_bytes, size_bytes, seed)
    check_inside(buffer.numel(), offset_bytes, size_bytes)
    crcs = torch.empty(offset_bytes.numel(), dtype=torch.int64, device=buffer.device)
    if crcs.numel() == 0:
        return crcs
    is_aligned = not bool((((offset_bytes + buffer.data_ptr() % 4) | size_bytes) % 4).any())
    register = seed ^ 0xFFFFFFFF
    round_shift, lane_shift = kernel_tables(LANES, buffer.device)
    kernel: Any = load_kernel("crc32c")
    with torch.cuda.device(buffer.device) if buffer.is_cuda else contextlib.nullcontext():
        kernel.crc32c_kernel[(crcs.numel(),)](
            buffer,
            offset_bytes.to(buffer.device, non_blocking=True).contiguous(),
            size_bytes.to(buffer.device, non_blocking=True).contiguous(),
            round_shift,
            lane_shift,
            crcs,
            # the same bits as a signed number: always one type of argument
            register - (1 << 32) if register >> 31 else register,
            LANES=LANES,
            WORDS=is_aligned,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return crcs
