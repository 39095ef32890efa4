"""What every version of the batched CRC32C asks of its arguments."""

from __future__ import annotations

import torch

from ...errors import InvalidInputError


def check_seed(seed: int) -> None:
    """Raises InvalidInputError unless ``seed`` is a 32-bit CRC."""
    if not 0 <= seed <= 0xFFFFFFFF:
        raise InvalidInputError(
            "crc32c seed", got=seed, expected="a CRC32C, 0 to 4294967295; 0 to start"
        )


def check_ranges(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor, seed: int
) -> None:
    """Shapes, dtypes and devices; reads no element. Raises InvalidInputError."""
    check_seed(seed)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise InvalidInputError(
            "crc32c buffer",
            got=f"{buffer.dtype} {list(buffer.shape)}",
            expected="contiguous uint8 [bytes]",
        )
    for name, tensor in (("offset_bytes", offset_bytes), ("size_bytes", size_bytes)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.shape != offset_bytes.shape:
            raise InvalidInputError(
                f"crc32c {name}",
                got=f"{tensor.dtype} {list(tensor.shape)}",
                expected="int64 [n], as many entries in offset_bytes and size_bytes",
            )
        if tensor.device != buffer.device and tensor.device.type != "cpu":
            raise InvalidInputError(
                f"crc32c {name}",
                got=f"on {tensor.device}",
                expected=f"on {buffer.device}, where the buffer is, or on the CPU",
            )


def check_inside(buffer_bytes: int, offset_bytes: torch.Tensor, size_bytes: torch.Tensor) -> None:
    """Raises InvalidInputError unless every range lies inside the buffer. Waits for the device
    where the tensors are on one."""
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
        "crc32c range outside the buffer",
        got=f"range {i} (offset_bytes {int(offset_bytes[i])}, size_bytes {int(size_bytes[i])})",
        expected=f"a range within the buffer's {buffer_bytes} bytes",
    )
