"""The CUDA version of the gather op: checks, allocates, and launches ``csrc/cuda/gather.cu``, or
where that is not compiled copies by torch's indexing."""

from __future__ import annotations

import ctypes

import torch

from .. import device_code
from ..ranges import check_ranges
from ..tables import on_device
from .places import places

_ALIGNMENTS = (16, 4)  # of the kernel's variants, beside 1
_THREADS, _WARPS = 256, 8
_MULTIPROCESSORS, _WARPS_WANTED = 132, 32  # of each, on an H100 or H200
_SPAN_BYTES_MIN, _SPAN_BYTES_MAX = 2048, 32768
_INDEXED_AT_ONCE = 1 << 22  # units: indices take 100 MB
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def span_bytes(total_bytes: int) -> int:
    """How much of the output a warp makes: all multiprocessors get some, and a warp many loads for
    one search."""
    share = total_bytes // (_MULTIPROCESSORS * _WARPS_WANTED)
    return min(max(share // 512 * 512, _SPAN_BYTES_MIN), _SPAN_BYTES_MAX)


def gather_cuda(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor
) -> torch.Tensor:
    """`espnx.ops.gather` of CUDA tensors."""
    check_ranges("gather", buffer, offset_bytes, size_bytes)
    _, begin, total_bytes, unit = places(buffer, offset_bytes, size_bytes)
    out = torch.empty(total_bytes, dtype=torch.uint8, device=buffer.device)
    if total_bytes == 0:
        return out
    offset, begin = on_device((offset_bytes, begin), buffer.device)
    align = next((each for each in _ALIGNMENTS if each <= unit), 1)
    kernel = f"espnx_gather_{align}"
    if not device_code.is_there("gather", kernel, buffer.device):
        copy_by_index(buffer, offset, begin, out, min(unit, 8))
        return out
    span = span_bytes(total_bytes)
    blocks = -(-total_bytes // (span * _WARPS))
    args = (buffer, offset, begin, out, ctypes.c_int64(offset.numel()), ctypes.c_int64(span))
    device_code.launch("gather", kernel, blocks, _THREADS, args, buffer.device)
    return out


def copy_by_index(
    buffer: torch.Tensor, offset: torch.Tensor, begin: torch.Tensor, out: torch.Tensor, unit: int
) -> None:
    """What the kernel does, by torch, in units of so many bytes (what everything is a multiple of);
    so many at once that indices take a bounded amount of memory."""
    source = buffer[: buffer.numel() // unit * unit].view(_UNITS[unit])
    target, first = out.view(_UNITS[unit]), (offset - begin[:-1]) // unit
    for at in range(0, target.numel(), _INDEXED_AT_ONCE):
        to = min(at + _INDEXED_AT_ONCE, target.numel())
        place = torch.arange(at, to, device=out.device)
        record = torch.searchsorted(begin // unit, place, right=True) - 1
        target[at:to] = source[place + first[record]]
