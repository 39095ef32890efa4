"""How far the accelerator's results may be from exact ones: the bound that docs/lossless.md
derives, for whoever compares.

A file of its own: tests and `espnx device verify` take it, no computation does.
"""

from __future__ import annotations

import torch

from .checks import BLOCK, DIM

U, HALF = 2.0**-24, 2.0**-11  # unit roundoffs of fp32 and fp16


def accelerator_bound(
    *,
    peak: torch.Tensor,
    mass: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    n: int,
    score_error: torch.Tensor | float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds on |o - exact o| and |lse - exact lse| of queries that see something, for results
    whose lse is at least `LSE_LEAST` and whose o is below 65504 less the bound.

    Args:
        peak: float64 ``[...]``: the largest ``scale * sum |q_i k_i|`` over the tokens that a query
            sees.
        mass: float64 ``[..., 128]``: ``sum p |v|`` with exact probabilities.
        o, lse: float64 ``[..., 128]`` and ``[...]``: exact.
        n: tokens, hidden ones included.
        score_error: by how much a score may be off before it is computed (`rounded_query_error`).

    Returns:
        Like ``o`` and ``lse``.
    """
    in_exponents = score_error + (_gamma(DIM + 2) + 4 * U) * peak
    factor = (1 + torch.expm1(in_exponents)) * (1 + _gamma(n + 3 * -(-n // BLOCK) + 9))
    relative = factor - 1
    spread = (2 * relative / (1 - relative))[..., None] * mass + n * 2.0**-126
    return (1 + HALF) * spread + HALF * o.abs() + 2.0**-25, relative / (1 - relative) + 2 * U * (
        1 + lse.abs()
    )


def rounded_query_error(
    peak: torch.Tensor, k_sum: torch.Tensor, scale: float, *, is_half: bool
) -> torch.Tensor:
    """The change of scores where a query that was multiplied by ``scale`` in fp32 is divided by it
    and rounded to fp16.

    Args:
        peak: as `accelerator_bound`.
        k_sum: the largest ``sum |k_i|`` over the tokens that a query sees.
        is_half: the query was fp16 before it was multiplied, so that rounding gives it back.
    """
    if is_half:
        return 2 * U * peak
    return (HALF + 2 * U) * peak + 2.0**-25 * scale * k_sum


def _gamma(roundings: float) -> float:
    return roundings * U / (1 - roundings * U)
