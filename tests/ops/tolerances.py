"""How far two correct versions of an op may differ: the only place in the tests of ops that holds such a number.

MaxSim in fp32. A sum of n products ``q_k d_k``, in any order, with or without fused multiply-add, is off by at most
``gamma(n) * sum |q_k| |d_k|``, where ``gamma(n) = n u / (1 - n u)`` and ``u = 2^-24`` (Higham, Accuracy and Stability of Numerical
Algorithms, section 3.1). A maximum is off by no more than its worst candidate. Adding Lq maxima costs Lq - 1 more roundings. With
``B = sum over i of max over j of sum |q_ik| |d_jk|``, which is MaxSim of the absolute values, one version is off by at most
``gamma(d + Lq) * B``, and two versions differ by at most twice that.

MaxSim of fp16 rows on tensor cores (Triton). The hardware adds with truncation instead of rounding: ``u = 2^-23``. The query is split in
two fp16 parts: 11 bits, then 11 of what is left, so each value is off by at most ``2^-22`` of itself, or by ``2^-36`` of its token's
largest value where the second part is below fp16's normal range; the products of the two parts are summed apart, which adds one rounding.

Where inputs are small integers every sum is exact in fp32 and versions must agree bit for bit; most tests do that.
"""

from __future__ import annotations

import torch

from espnx.ops.maxsim import maxsim_reference, token_format


def gamma(n: int, unit_roundoff: float) -> float:
    """Relative error bound of n roundings in a row."""
    return n * unit_roundoff / (1 - n * unit_roundoff)


def maxsim_bound(
    query: torch.Tensor, buffer: torch.Tensor, offset_bytes: torch.Tensor, n_tokens: torch.Tensor, fmt: str, *, tensor_cores: bool = False
) -> torch.Tensor:
    """The largest difference allowed between the op and `maxsim_reference` for each score. Arguments are the op's; finite inputs."""
    n_query_tokens, d = query.shape[-2:]
    token = token_format(fmt)
    positive = torch.zeros_like(buffer)
    for begin, count in zip(offset_bytes.tolist(), n_tokens.tolist(), strict=True):
        end = begin + count * token.token_row_bytes(d)
        positive[begin:end] = token.decode(buffer[begin:end], d).abs().to(token.dtype).contiguous().view(torch.uint8).view(-1)
    magnitude = maxsim_reference(query.abs(), positive, offset_bytes, n_tokens, fmt)
    bound = 2 * gamma(d + n_query_tokens, 2.0**-24) * magnitude
    if tensor_cores and fmt == "fp16":
        peaks = query.abs().amax(dim=-1, keepdim=True).expand_as(query)
        small = maxsim_reference(peaks.contiguous(), positive, offset_bytes, n_tokens, fmt)
        truncated = gamma(d + n_query_tokens + 1, 2.0**-23) + gamma(d + n_query_tokens, 2.0**-24)
        bound = (truncated + 2.0**-22) * magnitude + 2.0**-36 * small
    return torch.where(n_tokens > 0, bound, 0.0)


def assert_scores_close(scores: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """Fails unless every score is within its bound, and infinities and NaNs are the same ones."""
    both_special = (scores == expected) | (scores.isnan() & expected.isnan())
    close = both_special | ((scores - expected).abs() <= bound)
    worst = ((scores - expected).abs() / bound.clamp_min(1e-45)).nan_to_num().max() if scores.numel() else 0
    assert scores.shape == expected.shape
    assert bool(close.all()), f"{int((~close).sum())} of {close.numel()} scores differ, at worst {float(worst):.3g} times the bound"
