"""What a model does to scores between the products and the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class ScoreRules:
    """What is done to scores, in the order in which it is done.

    Attributes:
        soft_cap: a score s becomes soft_cap * tanh(s / soft_cap); None: it stays.
        slopes: float32 [heads]: a key at a distance adds slope * distance, which is not above 0
            (ALiBi); None: nothing.
        window: a query sees so many positions, its own the last of them; None: all up to its own.
        sinks: float32 [heads]: logits that join the softmax and bring no value; None: none.
    """

    soft_cap: float | None = None
    slopes: torch.Tensor | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None

    @cached_property
    def are_plain(self) -> bool:
        """Scores are products alone (sinks join them afterwards)."""
        return self.soft_cap is None and self.slopes is None and self.window is None

    def changed(self, scores: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """scores [sequences, heads, n, keys] with soft cap, slopes and window; `distance` int64 [n,
        keys]: of keys from queries, 0 or below."""
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if self.slopes is not None:
            scores = scores + self.slopes.to(scores)[:, None, None] * distance
        if self.window is not None:
            scores = scores.masked_fill(distance <= -self.window, float("-inf"))
        return scores


PLAIN = ScoreRules()
