"""What ops on ranges of a byte buffer ask of them: the same for each op, and on every device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import InvalidInputError
from ._native import load_extension


class RangesFound(NamedTuple):
    """What a look at ranges finds.

    Attributes:
        multiple: the largest power of two, to 16, of which all addresses and sizes are multiples.
        total_bytes: of all ranges, where it is not beyond any memory (csrc/cpu/places.hpp).
    """

    multiple: int
    total_bytes: int


def check_ranges(
    op: str, buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor
) -> None:
    """Shapes, dtypes and devices; reads no element. Raises InvalidInputError."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise InvalidInputError(
            f"{op} buffer",
            got=f"{buffer.dtype} {list(buffer.shape)}",
            expected="contiguous uint8 [bytes]",
        )
    for name, tensor in (("offset_bytes", offset_bytes), ("size_bytes", size_bytes)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.shape != offset_bytes.shape:
            raise InvalidInputError(
                f"{op} {name}",
                got=f"{tensor.dtype} {list(tensor.shape)}",
                expected="int64 [n], as many entries in offset_bytes and size_bytes",
            )
        if tensor.device != buffer.device and tensor.device.type != "cpu":
            raise InvalidInputError(
                f"{op} {name}",
                got=f"on {tensor.device}",
                expected=f"on {buffer.device}, where the buffer is, or on the CPU",
            )


def check_inside(
    op: str, buffer_bytes: int, offset_bytes: torch.Tensor, size_bytes: torch.Tensor
) -> None:
    """Raises InvalidInputError unless every range lies inside the buffer. Waits for the device
    where the tensors are on one; `look_inside` is the fast version."""
    room_bytes = buffer_bytes - offset_bytes.clamp(0, buffer_bytes)
    inside = (
        (offset_bytes >= 0)
        & (offset_bytes <= buffer_bytes)
        & (size_bytes >= 0)
        & (size_bytes <= room_bytes)
    )
    if bool(inside.all()):
        return
    i = int((~inside).nonzero()[0])
    raise InvalidInputError(
        f"{op} range outside the buffer",
        got=f"range {i} (offset_bytes {int(offset_bytes[i])}, size_bytes {int(size_bytes[i])})",
        expected=f"a range within the buffer's {buffer_bytes} bytes",
    )


def look_inside(
    op: str,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    size_bytes: torch.Tensor,
    begin: torch.Tensor | None = None,
) -> RangesFound:
    """`check_inside`, by one look at each entry, and what it finds besides.

    Args:
        offset_bytes, size_bytes: contiguous, on the host.
        begin: int64 [n + 1], filled with the sums of the sizes before each range, and of all.

    Raises:
        InvalidInputError: as `check_inside`.
    """
    buffer_bytes = buffer.numel()
    outside, at, size, _, total = load_extension().look_at_records(
        offset_bytes, size_bytes, 1, buffer_bytes, buffer_bytes, buffer.data_ptr(), begin
    )
    if outside >= 0:
        check_inside(op, buffer_bytes, offset_bytes, size_bytes)
        raise changed_tables(op)
    return RangesFound(min(at, size), total)


def changed_tables(op: str) -> InvalidInputError:
    """The error of a call whose tables were found wrong, and are right when a text is made of
    it."""
    return InvalidInputError(
        f"{op} tables",
        got="entries that changed during the call",
        expected="tables that nobody writes to until the op returns",
    )
