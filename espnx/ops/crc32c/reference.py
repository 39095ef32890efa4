"""CRC32C in plain Python: what the fast versions are tested against, and what the checksum
means."""

from __future__ import annotations

import functools

import torch

from .checks import check_inside, check_ranges

# Castagnoli's x^32 + x^28 + ... + 1, reflected: bit 31 - i is the coefficient of x^i
POLYNOMIAL = 0x82F63B78
MASK = 0xFFFFFFFF


@functools.cache
def byte_table() -> tuple[int, ...]:
    """The register that each byte leaves when it is shifted through an empty one."""
    table = []
    for byte in range(256):
        register = byte
        for _ in range(8):
            register = (register >> 1) ^ (POLYNOMIAL if register & 1 else 0)
        table.append(register)
    return tuple(table)


def crc32c_reference(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """The CRC32C of ``data``, byte by byte, continuing from ``seed`` (RFC 3720, appendix B.4).
    About 10 MB/s."""
    table = byte_table()
    register = seed ^ MASK
    for byte in memoryview(data).cast("B"):
        register = (register >> 8) ^ table[(register ^ byte) & 0xFF]
    return register ^ MASK


def crc32c_ranges_reference(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor, seed: int = 0
) -> torch.Tensor:
    """`espnx.ops.crc32c_ranges` in plain Python, on any device; same arguments, result and
    errors."""
    check_ranges(buffer, offset_bytes, size_bytes, seed)
    check_inside(buffer.numel(), offset_bytes, size_bytes)
    pairs = zip(offset_bytes.tolist(), size_bytes.tolist(), strict=True)
    crcs = [
        crc32c_reference(bytes(buffer[begin : begin + size].tolist()), seed)
        for begin, size in pairs
    ]
    return torch.tensor(crcs, dtype=torch.int64, device=buffer.device)
