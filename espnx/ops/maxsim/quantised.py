"""Token formats of a few bits a value that need no codebook: int8 with a scale per token, and
signs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..scales import scale_or_nan
from .codebook import Codebook
from .token import TokenFormat

SCALE_BYTES = 4
CODE_MAX = 127
BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


@dataclass(frozen=True)
class Int8Format(TokenFormat):
    """``value = scale * code`` with ``scale = max |value| / 127`` of the token: a value is off by
    at most half a scale."""

    def token_row_bytes(self, d: int) -> int:
        return SCALE_BYTES + d

    def encode(self, tokens: torch.Tensor, codebook: Codebook | None = None) -> torch.Tensor:
        self.check_codebook(tokens.shape[-1], codebook)
        values = self.check_tokens(tokens)
        scale = values.abs().amax(dim=1, keepdim=True) / CODE_MAX
        # A token of zeros (or of values so small that their scale is 0) has codes 0.
        codes = torch.where(scale > 0, values / scale, 0.0).round().clamp(-CODE_MAX, CODE_MAX)
        scale_bytes = scale.view(-1).view(torch.uint8).view(len(values), SCALE_BYTES)
        return torch.cat([scale_bytes, codes.to(torch.int8).view(torch.uint8)], dim=1).view(-1)

    def decode(self, rows: torch.Tensor, d: int, codebook: Codebook | None = None) -> torch.Tensor:
        self.check_codebook(d, codebook)
        table = rows.reshape(-1, self.token_row_bytes(d))
        scale = (
            table[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
        )
        return scale_or_nan(scale) * table[:, SCALE_BYTES:].contiguous().view(torch.int8).float()


@dataclass(frozen=True)
class Bit1Format(TokenFormat):
    """The signs alone: ``value = +1 / sqrt(d)`` where the original was 0 or more, else ``-1 /
    sqrt(d)``; a vector of length 1."""

    def token_row_bytes(self, d: int) -> int:
        return d // 8

    def encode(self, tokens: torch.Tensor, codebook: Codebook | None = None) -> torch.Tensor:
        self.check_codebook(tokens.shape[-1], codebook)
        values = self.check_tokens(tokens)
        bits = (values >= 0).view(len(values), values.shape[1] // 8, 8)
        return (bits * BITS.to(values.device)).sum(dim=2, dtype=torch.uint8).view(-1)

    def decode(self, rows: torch.Tensor, d: int, codebook: Codebook | None = None) -> torch.Tensor:
        self.check_codebook(d, codebook)
        bits = (rows.reshape(-1, d // 8, 1) & BITS.to(rows.device)) != 0
        return torch.where(bits.view(-1, d), d**-0.5, -(d**-0.5)).float()
