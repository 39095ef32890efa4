"""Shifting a CRC register past bytes it has not seen: multiplication of polynomials over GF(2),
modulo Castagnoli's.

A register that has taken a message stands for the polynomial ``message * x^32 mod P``; appending k
zero bits multiplies it by ``x^k``. So parts of a message can be taken side by side and joined. Used
for the tables of the CUDA kernel.
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
    past_round = power_of_x(32 * lanes)
    round_shift = _as_int32(
        [multiply(byte << (8 * k), past_round) for k in range(4) for byte in range(256)]
    )
    lane_shift = _as_int32([power_of_x(32 * (lanes - lane)) for lane in range(lanes)])
    return round_shift.to(device), lane_shift.to(device)
