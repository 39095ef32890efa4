"""What is proposed for a text, whoever proposes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....kv.draft.sources import LOOKUP


@dataclass
class Draft:
    """What is proposed for a text.

    Attributes:
        tokens: that may come next.
        drawn_by: float32 [vocabulary] for each, the probabilities by which it was drawn; None: they
            were certain.
        source: who proposes them.
    """

    tokens: list[int]
    drawn_by: list[torch.Tensor] | None = None
    source: str = LOOKUP

    def at(self, place: int) -> tuple[int | None, torch.Tensor | None]:
        """(token, by what it was drawn) at a place; (None, None) behind the last."""
        if place >= len(self.tokens):
            return None, None
        return self.tokens[place], None if self.drawn_by is None else self.drawn_by[place]
