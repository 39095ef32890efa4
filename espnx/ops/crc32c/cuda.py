"""The CUDA versions of the CRC32C op: check, allocate and launch ``csrc/cuda/crc32c.cu``, or where
that is not compiled ``kernels/crc32c.py``.

By what their machine code allows the former is the faster one (docs/measured/kernels.md): its
look-ups are in shared memory, a bank for each lane, and it reads 16 bytes at a time at any address.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .. import device_code
from .._native import load_kernel, on_current
from ..ranges import look_inside
from ..tables import on_device, on_host
from .checks import check_ranges
from .shifts import device_tables, kernel_tables

LANES, WARPS = 64, 1  # fastest on an H200 for ranges of 4 KiB
# csrc/cuda/crc32c.cu: a block has its table 32 times, at a multiple of 32 KiB of shared memory, and
# a multiprocessor room for one.
THREADS, SHARED_BYTES = 1024, 160 * 1024
_BLOCKS_MAX = 132  # of an H100 or H200; a warp takes ranges in turns


def crc32c_cuda(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor, seed: int = 0
) -> torch.Tensor:
    """`espnx.ops.crc32c_ranges` of CUDA tensors."""
    if not _is_compiled(buffer.device):
        return crc32c_triton(buffer, offset_bytes, size_bytes, seed)
    check_ranges(buffer, offset_bytes, size_bytes, seed)
    look_inside("crc32c", buffer, *on_host(offset_bytes, size_bytes))
    return _launch_compiled(buffer, offset_bytes, size_bytes, seed)


def crc32c_inside_cuda(
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    size_bytes: torch.Tensor,
    has_whole_words: bool,
) -> torch.Tensor:
    """`api.crc32c_inside` of CUDA tensors: looks at no range, and so does not wait."""
    if _is_compiled(buffer.device):
        return _launch_compiled(buffer, offset_bytes, size_bytes, 0)
    return _launch_triton(buffer, offset_bytes, size_bytes, 0, has_whole_words)


def _is_compiled(device: torch.device) -> bool:
    return device_code.is_there("crc32c", "espnx_crc32c", device, SHARED_BYTES)


def _launch_compiled(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor, seed: int
) -> torch.Tensor:
    crcs = torch.empty(offset_bytes.numel(), dtype=torch.int64, device=buffer.device)
    n = crcs.numel()
    if n:
        offset_bytes, size_bytes = on_device((offset_bytes, size_bytes), buffer.device)
        device_code.launch(
            "crc32c",
            "espnx_crc32c",
            min(-(-n * 32 // THREADS), _BLOCKS_MAX),
            THREADS,
            (
                buffer,
                offset_bytes,
                size_bytes,
                device_tables(buffer.device),
                crcs,
                ctypes.c_int64(n),
                ctypes.c_uint32(seed ^ 0xFFFFFFFF),
            ),
            buffer.device,
            SHARED_BYTES,
        )
    return crcs


def crc32c_triton(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor, seed: int = 0
) -> torch.Tensor:
    """`espnx.ops.crc32c_ranges` by Triton: CUDA tensors, or CPU tensors in Triton's interpreter."""
    check_ranges(buffer, offset_bytes, size_bytes, seed)
    found = look_inside("crc32c", buffer, *on_host(offset_bytes, size_bytes))
    return _launch_triton(buffer, offset_bytes, size_bytes, seed, found.multiple % 4 == 0)


def _launch_triton(
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    size_bytes: torch.Tensor,
    seed: int,
    has_whole_words: bool,
) -> torch.Tensor:
    crcs = torch.empty(offset_bytes.numel(), dtype=torch.int64, device=buffer.device)
    if crcs.numel() == 0:
        return crcs
    register = seed ^ 0xFFFFFFFF
    offset_bytes, size_bytes = on_device((offset_bytes, size_bytes), buffer.device)
    round_shift, lane_shift = kernel_tables(LANES, buffer.device)
    kernel: Any = load_kernel("crc32c")
    with on_current(buffer.device):
        kernel.crc32c_kernel[(crcs.numel(),)](
            buffer,
            offset_bytes,
            size_bytes,
            round_shift,
            lane_shift,
            crcs,
            # the same bits as a signed number: always one type of argument
            register - (1 << 32) if register >> 31 else register,
            LANES=LANES,
            WORDS=has_whole_words,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return crcs
