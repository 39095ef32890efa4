"""Checksums of stored blocks. They stay as long as the rows do and come a few at a time: taken from
the allocator's heap, between the large tensors of every forward pass, they would keep its holes
from ever closing, and memory would grow with what is stored."""

from __future__ import annotations

import mmap

import numpy as np

_PIECE_BYTES = 64 << 10
_ITEM_BYTES = 4


class SumsMemory:
    """Cuts mappings of its own into parts, one after the other. A mapping goes when nobody refers
    to it. Not the engine's memory, which rounds sizes up: that is for what comes and goes."""

    def __init__(self) -> None:
        self._piece = np.empty(0, np.uint32)
        self._used = 0

    def take(self, count: int) -> tuple[np.ndarray, int]:
        """(uint32, from where on `count` of them are the caller's). Not an array of its own: that
        would be small, and stay."""
        if self._used + count > self._piece.size:
            mapped = mmap.mmap(
                -1, max(_PIECE_BYTES, count * _ITEM_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            self._piece = np.frombuffer(mapped, np.uint32)
            self._used = 0
        first, self._used = self._used, self._used + count
        return self._piece, first
