"""Which stored positions a batch may look at, from the framework's two-dimensional padding mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import errors


@dataclass(frozen=True)
class Visibility:
    """What the queries of one forward pass see.

    Attributes:
        first_visible: int64 [sequences]: padding on the left ends there; None: no padding on the
            left.
        visible: uint8 [sequences, positions] where padding is elsewhere too, else None.
        hidden: bool [sequences, positions], or None where nothing is hidden.
    """

    first_visible: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    def part(self, begin: int, end: int) -> Visibility:
        """The visibility of some of the sequences."""
        return Visibility(
            *(
                None if each is None else each[begin:end]
                for each in (self.first_visible, self.visible, self.hidden)
            )
        )

    @classmethod
    def of(cls, mask: torch.Tensor | None, n_sequences: int, positions: int) -> Visibility:
        """`mask`: [sequences, positions], true or 1 where there is a token; None: everywhere.
        Raises InvalidInputError."""
        if mask is None:
            return cls()
        if tuple(mask.shape) != (n_sequences, positions):
            raise errors.InvalidInputError(
                "attention mask",
                got=list(mask.shape),
                expected=[n_sequences, positions],
                fix="pass the mask of the whole sequence",
            )
        hidden = ~mask.bool().cpu()
        if not bool(hidden.any()):
            return cls()
        counts = hidden.to(torch.int64).cumprod(dim=1).sum(dim=1)
        is_left = bool((hidden.sum(dim=1) == counts).all())
        return cls(counts, None if is_left else (~hidden).to(torch.uint8).contiguous(), hidden)
