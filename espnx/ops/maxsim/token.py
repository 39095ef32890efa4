"""What every token format has in common, and the limits of rows and records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ...errors import InvalidInputError
from .codebook import Codebook
from .limits import check_dim


@dataclass(frozen=True)
class TokenFormat(ABC):
    """How the values of one token lie in a record: ``d`` values become one row of bytes, and rows
    of a document are contiguous.

    Attributes:
        name: as it appears in a store's manifest.
        alignment_bytes: what a row's address must be a multiple of for CUDA; the CPU takes any
            address.
    """

    name: str
    alignment_bytes: int

    @property
    def needs_codebook(self) -> bool:
        """Whether rows mean something only together with a `Codebook`."""
        return False

    @property
    def is_lossless_float(self) -> bool:
        """Whether rows are plain floating-point numbers, so that nothing beyond their rounding is
        lost."""
        return False

    @abstractmethod
    def token_row_bytes(self, d: int) -> int:
        """Bytes of one token of ``d`` values."""

    @abstractmethod
    def encode(self, tokens: torch.Tensor, codebook: Codebook | None = None) -> torch.Tensor:
        """``[n, d]`` floating-point values to their bytes, uint8 ``[n * token_row_bytes(d)]``.

        Raises:
            InvalidInputError: values that the format cannot hold, or a codebook that is missing,
                unwanted or of another shape.
        """

    @abstractmethod
    def decode(self, rows: torch.Tensor, d: int, codebook: Codebook | None = None) -> torch.Tensor:
        """Bytes of whole rows, uint8 at any address, to float32 ``[n, d]``. Raises
        InvalidInputError as `encode` does."""

    def check_codebook(self, d: int, codebook: Codebook | None) -> None:
        """Raises InvalidInputError unless a codebook is there exactly where the format needs one,
        and fits it."""
        if codebook is not None:
            raise InvalidInputError(
                f"{self.name} rows have no codebook",
                got="a codebook",
                expected="None",
                fix="leave codebook out",
            )

    def check_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` as float32 ``[n, d]``; for formats that have no code for what is not finite.
        Raises InvalidInputError."""
        if tokens.dim() != 2 or not tokens.is_floating_point():
            raise InvalidInputError(
                "token values to encode",
                got=f"{tokens.dtype} {list(tokens.shape)}",
                expected="floating point [n, d]",
            )
        check_dim(tokens.shape[1])
        values = tokens.float()
        if not bool(values.isfinite().all()):
            row = int((~values.isfinite()).any(dim=1).nonzero()[0])
            raise InvalidInputError(
                f"cannot store token values as {self.name}",
                got=f"NaN or infinity in row {row}",
                expected="finite values",
                fix="look for the cause in the encoder, or store fp16 or fp32, which keep them",
            )
        return values
