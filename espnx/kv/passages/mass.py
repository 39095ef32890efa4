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
        shares = shares.detach().to("cpu", torch.float32)[:, :, -KEPT_TOKENS:]
        n = shares.shape[2]
        begin = max(begin, self.count - KEPT_TOKENS) if self.count > begin else begin
        self._make_room(sequences.stop, begin, n)
        at = begin - self._first
        self._shares[sequences.start : sequences.stop, layer, at : at + n] = shares.permute(1, 2, 0)
        self.count = max(self.count, begin + n)

    def _make_room(self, sequences: int, begin: int, n: int) -> None:
        """Memory for n tokens from `begin` on, of so many sequences."""
        old, held = self._shares, max(min(self.count, begin) - self._first, 0)
        kept = max(min(held, KEPT_TOKENS - n), 0)
        fits = begin - self._first + n <= old.shape[2] and sequences <= old.shape[0]
        if fits and begin - self._first + n <= 2 * KEPT_TOKENS:
            return
        room = min(2 * (kept + n), 2 * KEPT_TOKENS)
        rows = max(sequences, old.shape[0])
        new = torch.zeros(rows, self._layers, max(room, kept + n), self._columns)
        new[: old.shape[0], :, :kept] = old[:, :, held - kept : held]
        self._shares, self._first = new, begin - kept

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
