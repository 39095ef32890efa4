"""What every version of the batched CRC32C asks of its arguments."""

from __future__ import annotations

import torch

from ...errors import InvalidInputError
from .. import ranges


def check_seed(seed: int) -> None:
    """Raises InvalidInputError unless ``seed`` is a 32-bit CRC."""
    if not 0 <= seed <= 0xFFFFFFFF:
        raise InvalidInputError(
            "crc32c seed", got=seed, expected="a CRC32C, 0 to 4294967295; 0 to start"
        )


def check_ranges(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor, seed: int
) -> None:
    """Shapes, dtypes, devices and the seed; reads no element. Raises InvalidInputError."""
    check_seed(seed)
    ranges.check_ranges("crc32c", buffer, offset_bytes, size_bytes)


def check_inside(buffer_bytes: int, offset_bytes: torch.Tensor, size_bytes: torch.Tensor) -> None:
    """Raises InvalidInputError unless every range lies inside the buffer. Waits for the device
    where the tensors are on one."""
    ranges.check_inside("crc32c", buffer_bytes, offset_bytes, size_bytes)
