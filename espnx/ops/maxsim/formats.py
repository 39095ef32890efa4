"""What a token format is: the one place in Python. ``csrc/cpu/maxsim_format.hpp`` says the same for C++.

A format turns a token embedding of d values into one row of bytes. Rows of a document are contiguous. To add a format: an entry here, one
in the C++ header with a decoder per instruction set, and a branch in ``kernels/maxsim.py``; callers pass the name and do not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import InvalidInputError

DIM_MULTIPLE = 8
DIM_MAX = 65536
TOKENS_MAX = 65535


@dataclass(frozen=True)
class TokenFormat:
    """How the values of one token lie in a record.

    Attributes:
        name: as it appears in a store's manifest.
        dtype: of the stored values.
        alignment_bytes: what a row's address must be a multiple of for CUDA; the CPU takes any address.
    """

    name: str
    dtype: torch.dtype
    alignment_bytes: int

    def token_row_bytes(self, d: int) -> int:
        """Bytes of one token of ``d`` values."""
        return d * self.dtype.itemsize

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[n, d]`` floating-point values to their bytes, uint8 ``[n * token_row_bytes(d)]``.

        Raises:
            InvalidInputError: a finite value is too large for the format.
        """
        stored = tokens.to(self.dtype).contiguous()
        if torch.isinf(stored).sum() != torch.isinf(tokens).sum():
            largest = tokens[torch.isfinite(tokens)].abs().max().item()
            raise InvalidInputError(
                f"cannot store token values as {self.name}", got=largest, expected=f"at most {torch.finfo(self.dtype).max}", fix="use fp32"
            )
        return stored.view(torch.uint8).reshape(-1)

    def decode(self, rows: torch.Tensor, d: int) -> torch.Tensor:
        """Bytes of whole rows, uint8 at any address, to float32 ``[n, d]``."""
        # The copy is aligned, which a view of another dtype requires and a record need not be.
        return rows.clone().view(self.dtype).view(-1, d).float()


FORMATS = {
    known.name: known
    for known in (
        TokenFormat("fp32", torch.float32, alignment_bytes=4),
        TokenFormat("fp16", torch.float16, alignment_bytes=2),
    )
}


def token_format(name: str) -> TokenFormat:
    """The format of that name. Raises InvalidInputError for any other."""
    try:
        return FORMATS[name]
    except KeyError:
        raise InvalidInputError("unknown token format", got=repr(name), expected=" or ".join(FORMATS)) from None


def token_row_bytes(name: str, d: int) -> int:
    """Bytes of one token of ``d`` values in the format of that name. Raises InvalidInputError for an unknown format or a bad ``d``."""
    check_dim(d)
    return token_format(name).token_row_bytes(d)


def check_dim(d: int) -> None:
    """Raises InvalidInputError unless ``d`` is a multiple of 8 from 8 to 65536."""
    if d % DIM_MULTIPLE or not DIM_MULTIPLE <= d <= DIM_MAX:
        raise InvalidInputError("token dimension", got=d, expected=f"a multiple of {DIM_MULTIPLE} from {DIM_MULTIPLE} to {DIM_MAX}")
