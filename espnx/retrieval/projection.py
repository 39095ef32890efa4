"""PCA of token vectors to fewer dimensions: fitted on a sample at build time, stored, and applied to documents and queries alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .. import errors


@dataclass(frozen=True)
class Projection:
    """y = x @ components. `components`: float32 [d_in, d_out], orthonormal columns."""

    components: torch.Tensor

    @classmethod
    def fit(cls, sample: Iterable[torch.Tensor], d_in: int, dim: int) -> Projection:
        """PCA of the rows of `sample`, float32 [m, d_in] each, to `dim` dimensions. Deterministic, signs included. Holds one at a time.

        Not centred: MaxSim compares inner products, and for those the uncentred second moment is what loses least; subtracting a mean
        would change every score by an amount that depends on the query.

        Raises InvalidInputError where `dim` does not fit or the sample is empty.
        """
        if not 0 < dim <= d_in:
            raise errors.InvalidInputError("dimensions to project to", got=dim, expected=f"1 to {d_in}")
        moments, count = torch.zeros(d_in, d_in, dtype=torch.float64), 0
        for tokens in sample:
            for rows in tokens.split(4096):
                moments += rows.double().T @ rows.double()
            count += len(tokens)
        if not count:
            raise errors.InvalidInputError(
                "cannot fit a projection", got="no tokens", expected="a corpus with tokens", fix="build without --pca"
            )
        moments /= count
        components = torch.linalg.eigh(moments).eigenvectors.flip(1)[:, :dim]
        # eigh leaves signs open; the largest entry of each column is made positive.
        largest = components.gather(0, components.abs().argmax(0, keepdim=True))
        components = (components * largest.sign()).float().contiguous()
        return cls(components)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [n, d_in] -> float32 [n, d_out]."""
        return tokens @ self.components
