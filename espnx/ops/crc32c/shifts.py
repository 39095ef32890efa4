"""Shifting a CRC register past bytes it has not seen: multiplication of polynomials over GF(2),
modulo Castagnoli's.

A register that has taken a message stands for the polynomial ``message * x^32 mod P``; appending k
zero bits multiplies it by ``x^k``. So parts of a message can be taken side by side and joined. Used
for the tables of the CUDA kernels.
"""

from __future__ import annotations

import functools

import torch

from .reference import POLYNOMIAL

X_TO_0 = 1 << 31  # the polynomial 1, reflected


def multiply(a: int, b: int) -> int:
    """The product of two reflected polynomials of degree below 32, modulo P."""
    product = 0
    for power in range(32):
        if a >> (31 - power) & 1:
            product ^= b
        b = (b >> 1) ^ (POLYNOMIAL if b & 1 else 0)
    return product


def power_of_x(exponent: int) -> int:
    """``x^exponent mod P``, reflected."""
    result, square = X_TO_0, X_TO_0 >> 1
    while exponent:
        if exponent & 1:
            result = multiply(result, square)
        square = multiply(square, square)
        exponent >>= 1
    return result


def _as_int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)  # wraps: the same 32 bits


def _table(distance_bytes: int) -> list[int]:
    """[4 * 256]: what byte k of a register, of that value, becomes when it moves so far. Of 32
    products: the others are sums of them."""
    past = power_of_x(8 * distance_bytes)
    table = [0] * 1024
    for k in range(4):
        for bit in range(8):
            product = multiply(1 << (8 * k + bit), past)
            for value in range(1 << bit):
                table[256 * k + (1 << bit) + value] = table[256 * k + value] ^ product
    return table


#: By which csrc/cuda/crc32c.cu moves registers: a round; the words of a piece; 1 to 16 pieces.
DEVICE_DISTANCES_BYTES = (512, 4, 8, 12, 16, 16, 32, 64, 128, 256)


@functools.cache
def device_tables(device: torch.device) -> torch.Tensor:
    """The tables of ``csrc/cuda/crc32c.cu``, int32 bit patterns ``[10, 4, 256]`` on ``device``."""
    values = [value for each in DEVICE_DISTANCES_BYTES for value in _table(each)]
    return _as_int32(values).view(-1, 4, 256).to(device)


@functools.cache
def kernel_tables(lanes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The constants of ``kernels/crc32c.py`` for that many lanes, as int32 bit patterns on
    ``device``.

    Returns:
        ``round_shift`` ``[4, 256]``: what byte k of a register, of that value, becomes when one
            word per lane is appended.
        ``lane_shift`` ``[lanes]``: the factor that moves lane i's register to its place in the
            message.
    """
    round_shift = _as_int32(_table(4 * lanes))
    lane_shift = _as_int32([power_of_x(32 * (lanes - lane)) for lane in range(lanes)])
    return round_shift.to(device), lane_shift.to(device)
