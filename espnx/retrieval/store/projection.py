"""PCA of token vectors to fewer dimensions: fitted on a sample at build time, stored, and applied
to documents and queries alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ... import errors

# how far from 1 the length of a vector may be that an encoder has normalised, in half precision too
_UNIT = 1e-3
# of a vector's length: what a projection leaves below it is rounding, and not scaled up
_NOISE = 1e-5


@dataclass(frozen=True)
class Projection:
    """y = x @ components, and where the encoder's vectors are of length 1, scaled to the length of
    x.

    Tokens that lose most of their length in the projection would otherwise count least in MaxSim,
    however well they match.

    Attributes:
        components: float32 [d_in, d_out], orthonormal columns.
        is_normalised: whether rows keep their length; documents and queries alike.
    """

    components: torch.Tensor
    is_normalised: bool = False

    @classmethod
    def fit(cls, sample: Iterable[torch.Tensor], d_in: int, dim: int) -> Projection:
        """PCA of the rows of `sample`, float32 [m, d_in] each, to `dim` dimensions. Deterministic,
        signs included. Holds one at a time. Whether the rows are of length 1 decides on
        `is_normalised`.

        Not centred: MaxSim compares inner products, and for those the uncentred second moment is
        what loses least; subtracting a mean would change every score by an amount that depends on
        the query.

        Raises InvalidInputError where `dim` does not fit or the sample is empty.
        """
        if not 0 < dim <= d_in:
            raise errors.InvalidInputError(
                "dimensions to project to", got=dim, expected=f"1 to {d_in}"
            )
        moments, count, is_unit = torch.zeros(d_in, d_in, dtype=torch.float64), 0, True
        for tokens in sample:
            for rows in tokens.split(4096):
                moments += rows.double().T @ rows.double()
                length = rows.norm(dim=1)
                # a masked token may be 0
                is_unit &= bool((((length - 1).abs() <= _UNIT) | (length == 0)).all())
            count += len(tokens)
        if not count:
            raise errors.InvalidInputError(
                "cannot fit a projection",
                got="no tokens",
                expected="a corpus with tokens",
                fix="build without --pca",
            )
        moments /= count
        components = torch.linalg.eigh(moments).eigenvectors.flip(1)[:, :dim]
        # eigh leaves signs open; the largest entry of each column is made positive.
        largest = components.gather(0, components.abs().argmax(0, keepdim=True))
        components = (components * largest.sign()).float().contiguous()
        return cls(components, is_unit)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [n, d_in] -> float32 [n, d_out]."""
        projected = tokens @ self.components
        if not self.is_normalised:
            return projected
        before, after = tokens.norm(dim=1, keepdim=True), projected.norm(dim=1, keepdim=True)
        return projected * torch.where(after > _NOISE * before, before / after, 1.0)
