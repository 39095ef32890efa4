"""A buffer of more than 2^32 bytes that takes no memory where nothing is written.

A file of its own: several kernels are shown such offsets.
"""

from __future__ import annotations

import mmap

import torch

MAP_NORESERVE = 0x4000  # of Linux; Python has no name for it before 3.13
BEYOND = (1 << 32) + (1 << 20)  # a multiple of every alignment


def moved(buffer: torch.Tensor, before: int = BEYOND) -> torch.Tensor:
    """The bytes of a buffer, so many zeros before them and nothing behind."""
    size = before + buffer.numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    whole = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8, count=size)
    whole[before:] = buffer
    return whole
