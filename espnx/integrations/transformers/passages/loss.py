"""What composing passages loses against full attention. A file of its own: callers get it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True)
class PassageLoss:
    """The words that come next behind each token of a question, against full attention over the
    same tokens.

    Attributes:
        kl_nats: mean Kullback-Leibler divergence from what full attention gives, in nats a token; 0
            where nothing is lost.
        same_next: share of the tokens behind which the likeliest word is the same.
        repaired_share: of the prompt's tokens in front of the question, those that were computed
            anew at their place.
    """

    kl_nats: float
    same_next: float
    repaired_share: float

    @classmethod
    def of(cls, exact: torch.Tensor, lossy: torch.Tensor, repaired_share: float) -> Self:
        """The loss by log-probabilities [n, words] of both."""
        kl = (exact.exp() * (exact - lossy)).sum(dim=-1).mean()
        same = (exact.argmax(dim=-1) == lossy.argmax(dim=-1)).double().mean()
        return cls(float(kl), float(same), repaired_share)
