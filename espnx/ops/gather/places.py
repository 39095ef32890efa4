"""The places of records in the compact tensor."""

from __future__ import annotations

import torch

from ...errors import InvalidInputError

_TOTAL_BYTES_MAX = 1 << 60  # sums of sizes stay far below what 64 bits hold


def begins(size_bytes: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Exclusive sums int64 ``[n + 1]`` of sizes, the last of them the whole, which comes as a
    number, too. Raises InvalidInputError where no memory can be so large."""
    begin = torch.zeros(size_bytes.numel() + 1, dtype=torch.int64, device=size_bytes.device)
    torch.cumsum(size_bytes, 0, out=begin[1:])
    total = float(size_bytes.double().sum())
    if total > _TOTAL_BYTES_MAX:
        raise InvalidInputError(
            "gather size_bytes",
            got=f"{total:.3g} bytes in all",
            expected=f"at most {_TOTAL_BYTES_MAX}",
            fix="gather fewer records at once",
        )
    return begin, int(begin[-1])
