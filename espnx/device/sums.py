"""Checksums of stored blocks. They stay as long as the rows do and come a few at a time: taken from the allocator's heap, between the large
tensors of every forward pass, they would keep its holes from ever closing, and memory would grow with what is stored."""

from __future__ import annotations

import numpy as np

from ..storage import NativeEngine

_PIECE_BYTES = 64 << 10
_ITEM_BYTES = 4


class SumsMemory:
    """Cuts pieces of an engine's memory into parts, one after the other. A piece returns when nobody refers to it."""

    def __init__(self, engine: NativeEngine):
        self._engine = engine
        self._piece = np.empty(0, np.uint32)
        self._used = 0

    def take(self, count: int) -> tuple[np.ndarray, int]:
        """(uint32, from where on `count` of them are the caller's). Not an array of its own: that would be small, and stay."""
        if self._used + count > self._piece.size:
            self._piece = self._engine.memory(max(_PIECE_BYTES, count * _ITEM_BYTES)).numpy().view(np.uint32)
            self._used = 0
        first, self._used = self._used, self._used + count
        return self._piece, first
