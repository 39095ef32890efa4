"""How far a right result may be from float64: docs/tolerances.md, for what kernels compute on GPUs
(the tests hold the derivations).

Peers that round weights, similarities or results to the rows' own dtype may be off by that, too, as
that page allows torch's flash kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch

UNIT = 2.0**-24  # of fp32
TRUNCATED = 2.0**-23  # tensor cores truncate
_PARTS = 2.0**-20  # products in parts, exponentials
_TILE_ROWS, _PIECES_MAX = 128, 8
#: Unit roundoff of a row's dtype, twice and a little.
ROUNDED = {torch.float16: 2.01 * 2.0**-11, torch.bfloat16: 2.01 * 2.0**-8, torch.float32: 0.0}
_SPLIT = ("fp16", "int8", "bit1")


def gamma(n: float, unit: float) -> float:
    """Relative error bound of n roundings in a row."""
    return n * unit / (1 - n * unit)


def attention(
    n: int, d: int, largest: torch.Tensor, absolute: torch.Tensor, extra: float = 0.0
) -> torch.Tensor:
    """The bound for `o` over n rows of d values.

    Args:
        largest: [..., 1], the most that a score's products sum to, as absolute values.
        absolute: [..., dv], the sums of ``|v|`` by the same weights.
        extra: what a score may be off beside, relative to `largest`.
    """
    rescales = math.ceil(n / _TILE_ROWS) + _PIECES_MAX
    score = gamma(d + 12, TRUNCATED) + _PARTS + extra
    relative = torch.expm1(score * largest) + gamma(n + 6 * rescales + 12, TRUNCATED) + _PARTS
    return 2 * relative / (1 - relative).clamp_min(1e-9) * absolute + n * 2.0**-126


def maxsim(
    fmt: str, d: int, n_query_tokens: int, magnitude: torch.Tensor, peaks: torch.Tensor
) -> torch.Tensor:
    """The bound for scores; of int8 and bit1 rows that of products in parts, which is the wider one
    for embeddings.

    Args:
        magnitude: MaxSim of the absolute values.
        peaks: the same, each query token's values replaced by its largest.
    """
    roundings = d + n_query_tokens
    if fmt in ("int8", "bit1"):
        roundings += 4
    elif fmt.startswith("residual"):
        return 2 * gamma(roundings + d / 2 + 4, UNIT) * magnitude
    if fmt in _SPLIT:
        relative = gamma(roundings + 1, TRUNCATED) + gamma(roundings, UNIT) + 2.0**-22
        return relative * magnitude + 2.0**-36 * peaks
    if fmt == "bf16":
        relative = gamma(roundings + 2, TRUNCATED) + gamma(roundings, UNIT) + 2.0**-21
        return relative * magnitude
    return 2 * gamma(roundings, UNIT) * magnitude


def problem(found: Any, exact: torch.Tensor, bound: torch.Tensor) -> str | None:
    """What is wrong with a result, of the exact one's shape; None: nothing."""
    error = (found.detach().double().reshape(exact.shape) - exact).abs()
    wrong = ~(error <= bound)  # NaN is wrong
    if not bool(wrong.any()):
        return None
    worst = (error / bound.clamp_min(1e-300)).nan_to_num(nan=math.inf).max()
    return f"{int(wrong.sum())} of {wrong.numel()} values differ, at worst {float(worst):.3g} times"
