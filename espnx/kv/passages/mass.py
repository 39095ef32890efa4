"""How much of their attention tokens paid to each passage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Of the last so many tokens; what came before is forgotten, so that memory does not grow with the
#: text.
KEPT_TOKENS = 4096


class MassRecord:
    """Shares of attention, of every token that came after the passages, the mean over its heads.

    Args:
        layers: of the model.
        columns: passages.

    Attributes:
        count: tokens so far.
    """

    def __init__(self, layers: int, columns: int):
        self._layers, self._columns = layers, columns
        self.clear()

    def clear(self) -> None:
        """No tokens have come."""
        self.count = self._first = 0
        self._shares = torch.empty(0, self._layers, 0, self._columns)

    def note(self, layer: int, begin: int, sequences: range, shares: torch.Tensor) -> None:
        """Notes the shares of tokens from `begin` on: float32 [passages, some sequences, n]."""
        skip = max(shares.shape[2] - KEPT_TOKENS, 0)
        shares, begin = shares[:, :, skip:].detach().cpu(), begin + skip
        end = begin + shares.shape[2]
        if sequences.stop > len(self._shares) or end - self._first > self._shares.shape[2]:
            self._grow(sequences.stop, end)
        at = slice(begin - self._first, end - self._first)
        self._shares[sequences.start : sequences.stop, layer, at] = shares.permute(1, 2, 0)
        self.count = max(self.count, end)

    def _grow(self, sequences: int, end: int) -> None:
        """Memory for tokens up to `end`, of so many sequences; the oldest may go."""
        old, first = self._shares, max(self._first, end - KEPT_TOKENS)
        room = min(max(2 * (end - first), 64), 2 * KEPT_TOKENS)
        self._shares = torch.zeros(max(sequences, len(old)), self._layers, room, self._columns)
        held = max(self.count - first, 0)
        skip = first - self._first
        self._shares[: len(old), :, :held] = old[:, :, skip : skip + held]
        self._first = first

    def shares(self) -> tuple[int, torch.Tensor]:
        """(number of the first token, float32 [sequences, layers, tokens, passages])."""
        held = self.count - self._first
        first = max(held - KEPT_TOKENS, 0)
        return self._first + first, self._shares[:, :, first:held].clone()

    def crop(self, count: int) -> None:
        """Keeps the first tokens."""
        if count < self.count:
            if count <= self._first:
                self.clear()
                self._first = count
            self.count = count

    def select(self, sequences: Sequence[int]) -> None:
        """Sequence i becomes what `sequences[i]` was."""
        if self._shares.shape[0]:
            self._shares = self._shares[list(sequences)]
