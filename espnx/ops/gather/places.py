"""The places of records in the compact tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...errors import InvalidInputError
from ..ranges import look_inside
from ..tables import on_host

#: Sums of sizes stay far below what 64 bits hold; csrc/cpu/places.hpp has the same one.
_TOTAL_BYTES_MAX = 1 << 60


class Places(NamedTuple):
    """The way of records into the compact tensor, as one look at them has found it, on the host.

    Attributes:
        offset_bytes: int64 [n], contiguous.
        begin: int64 [n + 1], exclusive sums of sizes, the last of them the whole.
        total_bytes: the whole as a number.
        multiple: the largest power of two, to 16, of which all addresses and sizes are multiples.
    """

    offset_bytes: torch.Tensor
    begin: torch.Tensor
    total_bytes: int
    multiple: int


def places(buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor) -> Places:
    """Looks at every record once; for tables of a device the host waits. Raises InvalidInputError
    where a record does not lie inside the buffer, or no memory can hold all of them."""
    offset_bytes, size_bytes = on_host(offset_bytes, size_bytes)
    begin = torch.empty(size_bytes.numel() + 1, dtype=torch.int64)
    found = look_inside("gather", buffer, offset_bytes, size_bytes, begin)
    if found.total_bytes > _TOTAL_BYTES_MAX:
        raise InvalidInputError(
            "gather size_bytes",
            got=f"{float(size_bytes.double().sum()):.3g} bytes in all",
            expected=f"at most {_TOTAL_BYTES_MAX}",
            fix="gather fewer records at once",
        )
    return Places(offset_bytes, begin, found.total_bytes, found.multiple)
