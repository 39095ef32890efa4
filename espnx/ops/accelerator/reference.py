"""The accelerator in plain numpy: what it computes, operation by operation, and what the compiled
version equals to the bit.

Every ``*`` and ``+`` of float32 arrays below is one rounding. Loops run where the order of
roundings counts; what is an array runs side by side and never meets.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .checks import (
    BLOCK,
    DIM,
    MASK,
    PAD_TO,
    ROW_BYTES,
    Buffered,
    check_arguments,
    check_halves,
    check_inside,
    default_scale,
)

_LOG2_E, _LN2_HIGH, _LN2_LOW = (
    1.4426950408889634,
    6.93147180369123816490e-01,
    1.90821492927058770002e-10,
)
_NO_FRACTIONS = 6755399441055744.0  # 1.5 * 2^52: a double this large has no room for fractions
_LEAST_EXPONENT = -200.0
_FACTORIALS = (362880, 40320, 5040, 720, 120, 24, 6)


def exponential(x: np.ndarray) -> np.ndarray:
    """exp of float32 values up to 0, float32; NaN for NaN. 2^k times a polynomial, in doubles."""
    wide = x.astype(np.float64)
    wide = np.where(wide < _LEAST_EXPONENT, _LEAST_EXPONENT, wide)
    shifted = wide * _LOG2_E + _NO_FRACTIONS
    k = shifted - _NO_FRACTIONS
    r = (wide - k * _LN2_HIGH) - k * _LN2_LOW
    p = np.full_like(r, 1.0 / 3628800)
    for factorial in _FACTORIALS:
        p = p * r + 1.0 / factorial
    for coefficient in (0.5, 1.0, 1.0):
        p = p * r + coefficient
    bits = shifted.view(np.uint64) - np.float64(_NO_FRACTIONS).view(np.uint64)
    power = ((bits + np.uint64(1023)) << np.uint64(52)).view(np.float64)
    return (p * power).astype(np.float32)


def logarithm(x: np.float32) -> np.float64:
    """log of a finite float32 above 0; NaN for NaN."""
    if not x > 0:
        return np.float64(np.nan)
    fraction, power = np.frexp(np.float64(x))
    f, exponent = fraction * 2.0, np.float64(power - 1)
    if f > 1.4142135623730951:
        f, exponent = f * 0.5, exponent + 1.0
    s = (f - 1.0) / (f + 1.0)
    square, total = s * s, np.float64(1.0 / 17)
    for divisor in (15, 13, 11, 9, 7, 5, 3, 1):
        total = total * square + 1.0 / divisor
    return exponent * 0.6931471805599453 + 2.0 * s * total


def _tree(lanes: np.ndarray, join: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.float32:
    """A balanced binary tree over 128 lanes: lane i meets lane i + 64, then i + 32, and so on."""
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = join(lanes[:half], lanes[half:])
    return lanes[0]


def _larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(a > b, a, b)


def _one(x: np.float32) -> np.float32:
    """exp of one value."""
    return exponential(np.asarray([x], np.float32))[0]


def statistics(x: np.ndarray) -> tuple[np.float32, np.float32]:
    """The first pass of algorithm 1 over padded scores: their maximum and the sum of exp(x -
    maximum)."""
    m, z = np.float32(-np.inf), np.float32(0)
    for begin in range(0, len(x), BLOCK):
        block = x[begin : begin + BLOCK]
        lanes, sums = np.full(BLOCK, -np.inf, np.float32), np.zeros(BLOCK, np.float32)
        lanes[: len(block)] = block
        m_block = _tree(lanes, _larger)
        sums[: len(block)] = exponential(block - m_block)
        s_block = _tree(sums, np.add)
        if m_block > m:
            z = z * _one(m - m_block) + s_block
            m = m_block
        else:
            z = z + s_block * _one(m_block - m)
    return m, z


def _attend(x: np.ndarray, hidden: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """One query: scores of its tokens, which of them it does not see, their V in float32."""
    if hidden.all():
        return np.zeros(DIM, np.float16), np.float32(-np.inf)
    padded = np.full(-(-len(x) // PAD_TO) * PAD_TO, MASK, np.float32)
    padded[: len(x)] = np.where(hidden, np.float32(MASK), x)
    m, z = statistics(padded)
    y = exponential(padded[: len(x)] - m) / z
    o = np.zeros(DIM, np.float32)
    for t in range(len(x)):  # padding is last, and adds zeros
        if not (hidden[t] and y[t] == 0):
            o = o + y[t] * v[t]
    return o.astype(np.float16), np.float32(np.float64(m) + logarithm(z))


def _scores(query: np.ndarray, k: np.ndarray, scale: np.float32) -> np.ndarray:
    """[n, rows] of queries [n, 128] and rows [rows, 128], all float32."""
    total = np.zeros((len(query), len(k)), np.float32)
    for i in range(DIM):
        total = total + query[:, i, None] * k[:, i]
    return total * scale


def _rows(
    buffer: np.ndarray, pieces: np.ndarray, block_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """K and V [rows, 128] in float32, and positions [rows], of the pieces of one head."""
    k, v, positions = (
        [np.empty((0, DIM), np.float16)],
        [np.empty((0, DIM), np.float16)],
        [np.empty(0, np.int64)],
    )
    for _, _, offset, n_rows, first in pieces.tolist():
        n_blocks = -(-n_rows // block_rows)
        size = n_blocks * block_rows * 2 * ROW_BYTES
        blocks = np.frombuffer(buffer[offset : offset + size].tobytes(), np.float16).reshape(
            n_blocks, 2, block_rows, DIM
        )
        k.append(blocks[:, 0].reshape(-1, DIM)[:n_rows])
        v.append(blocks[:, 1].reshape(-1, DIM)[:n_rows])
        positions.append(first + np.arange(n_rows))
    return (
        np.concatenate(k).astype(np.float32),
        np.concatenate(v).astype(np.float32),
        np.concatenate(positions),
    )


def accelerator_reference(
    query: torch.Tensor,
    buffer: torch.Tensor,
    pieces: torch.Tensor,
    *,
    block_rows: int,
    scale: float | None = None,
    first_visible: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    last_position: torch.Tensor | None = None,
    buffered: Buffered | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`espnx.ops.accelerator.accelerator` in plain numpy; same arguments, results and errors."""
    factor = default_scale(scale)
    check_arguments(
        query, buffer, pieces, block_rows, factor, first_visible, visible, last_position, buffered
    )
    check_inside(query, buffer, pieces, block_rows, visible)
    batch, heads, n = query.shape[:3]
    q, table = query.numpy().astype(np.float32), pieces.numpy()
    o, lse = torch.zeros_like(query), torch.full(query.shape[:3], -torch.inf)
    with np.errstate(all="ignore"):  # what infinities and NaNs do is part of the result
        for sequence in range(batch):
            for head in range(heads):
                own = table[(table[:, 0] == sequence) & (table[:, 1] == head)]
                k, v, positions = _rows(buffer.numpy(), own, block_rows)
                x = _scores(q[sequence, head], k, np.float32(factor))
                if buffered is not None:
                    x = np.concatenate([x, buffered.scores[sequence, head].numpy()], axis=1)
                    v = np.concatenate([v, buffered.v[sequence, head].numpy().astype(np.float32)])
                    positions = np.concatenate(
                        [positions, buffered.first_position + np.arange(buffered.v.shape[2])]
                    )
                hidden = np.zeros(len(positions), bool)
                if first_visible is not None:
                    hidden |= positions < int(first_visible[sequence])
                if visible is not None:
                    hidden |= visible[sequence].numpy()[positions] == 0
                for i in range(n):
                    later = False if last_position is None else positions > int(last_position[i])
                    found, total = _attend(x[i], hidden | later, v)
                    o[sequence, head, i], lse[sequence, head, i] = (
                        torch.from_numpy(found),
                        float(total),
                    )
    return o, lse


def accelerator_scores_reference(
    query: torch.Tensor, rows: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """`espnx.ops.accelerator.accelerator_scores` in plain numpy; same arguments, results and
    errors."""
    check_halves("query", query, "[B, H, n, 128]")
    check_halves("K rows", rows, f"[{query.shape[0]}, {query.shape[1]}, t, 128]")
    q, k, factor = (
        query.numpy().astype(np.float32),
        rows.numpy().astype(np.float32),
        np.float32(default_scale(scale)),
    )
    found = torch.empty((*query.shape[:3], rows.shape[2]))
    for sequence in range(query.shape[0]):
        for head in range(query.shape[1]):
            found[sequence, head] = torch.from_numpy(
                _scores(q[sequence, head], k[sequence, head], factor)
            )
    return found
