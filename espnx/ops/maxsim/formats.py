"""The token formats by name: the one place in Python. ``csrc/cpu/formats/format.hpp`` says the same
for C++.

To add a format: a class (or an instance of one) here, an entry in the C++ header with a decoder per
instruction set, and a branch in ``kernels/maxsim.py``; callers pass the name and do not change.

=========  ============  ================================================================
name       bytes (d=128) row, little-endian
=========  ============  ================================================================
fp32       512           d values
fp16       256           d values
bf16       256           d values
int8       132           float32 scale, then d int8 codes: value = scale * code
bit1       16            d sign bits, lowest bit first: value = +-1 / sqrt(d)
residualN  4 + 16 N      int32 centroid number, then d codes of N bits as ColBERTv2 packs
                         them: value = centroid + weight, normalised
=========  ============  ================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import InvalidInputError
from .codebook import Codebook
from .limits import DIM_MAX, DIM_MULTIPLE, TOKENS_MAX, check_dim
from .quantised import Bit1Format, Int8Format
from .residual import ResidualFormat
from .token import TokenFormat

__all__ = [
    "DIM_MAX",
    "DIM_MULTIPLE",
    "FORMATS",
    "TOKENS_MAX",
    "FloatFormat",
    "TokenFormat",
    "check_dim",
    "token_format",
    "token_row_bytes",
]


@dataclass(frozen=True)
class FloatFormat(TokenFormat):
    """Plain floating-point values.

    Attributes:
        dtype: of the stored values.
    """

    dtype: torch.dtype

    @property
    def is_lossless_float(self) -> bool:
        return True

    def token_row_bytes(self, d: int) -> int:
        return d * self.dtype.itemsize

    def encode(self, tokens: torch.Tensor, codebook: Codebook | None = None) -> torch.Tensor:
        """Does what `TokenFormat.encode` says; a finite value that is too large for the format is
        refused, infinities and NaNs are kept."""
        self.check_codebook(tokens.shape[-1], codebook)
        # in one dimension, since an empty tensor may have any strides in two
        stored = tokens.to(self.dtype).contiguous().reshape(-1)
        if torch.isinf(stored).sum() != torch.isinf(tokens).sum():
            largest = tokens[torch.isfinite(tokens)].abs().max().item()
            raise InvalidInputError(
                f"cannot store token values as {self.name}",
                got=largest,
                expected=f"at most {torch.finfo(self.dtype).max}",
                fix="use fp32",
            )
        return stored.view(torch.uint8)

    def decode(self, rows: torch.Tensor, d: int, codebook: Codebook | None = None) -> torch.Tensor:
        self.check_codebook(d, codebook)
        # The copy is aligned, which a view of another dtype requires and a record need not be.
        return rows.clone().view(self.dtype).view(-1, d).float()


FORMATS: dict[str, TokenFormat] = {
    known.name: known
    for known in (
        FloatFormat("fp32", 4, torch.float32),
        FloatFormat("fp16", 2, torch.float16),
        FloatFormat("bf16", 2, torch.bfloat16),
        Int8Format("int8", 4),
        Bit1Format("bit1", 1),
        ResidualFormat("residual1", 1, nbits=1),
        ResidualFormat("residual2", 1, nbits=2),
        ResidualFormat("residual4", 1, nbits=4),
    )
}


def token_format(name: str) -> TokenFormat:
    """The format of that name. Raises InvalidInputError for any other."""
    try:
        return FORMATS[name]
    except (KeyError, TypeError):  # a list has no hash
        raise InvalidInputError(
            "unknown token format", got=repr(name), expected=" or ".join(FORMATS)
        ) from None


def token_row_bytes(name: str, d: int) -> int:
    """Bytes of one token of ``d`` values in the format of that name. Raises InvalidInputError for
    an unknown format or a bad ``d``."""
    check_dim(d)
    return token_format(name).token_row_bytes(d)
