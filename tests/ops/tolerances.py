"""How far two correct versions of an op may differ: the only place in the tests of ops that holds
such a number.

MaxSim in fp32. A sum of n products ``q_k d_k``, in any order, with or without fused multiply-add,
is off by at most ``gamma(n) * sum |q_k| |d_k|``, where ``gamma(n) = n u / (1 - n u)`` and ``u =
2^-24`` (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). A maximum is off by
no more than its worst candidate. Adding Lq maxima costs Lq - 1 more roundings. With ``B = sum over
i of max over j of sum |q_ik| |d_jk|``, which is MaxSim of the absolute values, one version is off
by at most ``gamma(d + Lq) * B``, and two versions differ by at most twice that.

Formats with arithmetic in them. An int8 or bit1 value is a product (one rounding), which a fast
version may pull out of the sum, where a few more are made: 4 roundings in all. A residual value is
one sum, the same in every version, divided by the root of d squares: the sum of squares is off by
``gamma(d)`` of itself, its root by half of that, and root, reciprocal and product add 3 roundings:
``d / 2 + 4`` in all.

int8 and bit1 in whole numbers (CPU with VNNI or AMX). A query value is rounded to a multiple of its
token's ``peak / 32639``. That is off by half a step, and by the roundings of two fp32 factors,
``2^-23`` and ``2^-24`` of at most 32639 steps: by ``(0.5 + 0.006) / 32639``, less than ``1 /
64000``, of the peak, for each value of the document. The sums themselves are exact.

fp16 and bf16 in bf16 parts (CPU with AMX). The parts hold every bit, and products of parts are
exact in fp32. Large products and small ones (below ``2^-7`` of B) are summed apart: 2 d and 3 d
additions, then one more, so ``2.1 d + Lq + 1`` roundings of B. The product left out, of the second
part of an fp16 value and the third of the query's, is below ``2^-7 * 2^-17``. AMX takes values
below ``2^-126`` for 0.

MaxSim on tensor cores (Triton). The hardware adds with truncation instead of rounding: ``u =
2^-23``. For fp16, int8 and bit1 rows the query is split in two fp16 parts: 11 bits, then 11 of what
is left, so each value is off by at most ``2^-22`` of itself, or by ``2^-36`` of its token's largest
value where the second part is below fp16's normal range. bf16 rows are multiplied as they are, by a
query in three bf16 parts: off by less than ``2^-21`` of each value. Products with the further parts
are summed apart, or before the others: their sums, and so what is rounded off them, are a 2^11th or
a 2^8th of the others'. That adds one rounding, or two.
Of long rows in fp16 and bf16 by slices (csrc/cuda) each of 2 to 8 warps sums 64, 96 or 128 values,
at least 4 fewer than d, and products with the further parts apart; these are added once, and warps'
sums by up to three additions more.

fp32 rows by warps on tensor cores (csrc/cuda) have the same bound as everywhere. They and the query
go in two fp16 parts. The second has 11 bits for the 12 that the first may miss, so each value is
off by ``2^-23`` of itself, and products of two second parts, ``2^-22``, are left out: 8 u. A sum is
of n values, 16 at d 64 and 32 at d 96 and 128: n truncations of ``2^-23`` of what is added, n / 16
of the sums of 16 values, less than one u for the small products, and 3 u at most to add the sums.
Factors are powers of two. Where fp16's least step loses more than ``2^-21`` of the score, the
document is made once more in fp32: 8 u. Together ``2.125 n + 20``, and as many to sum maxima as Lq
- 1, five at most: less than ``d + Lq``, 54 of 65 at d 64 and 88 of 97 at d 96 for one token.

int8 and bit1 rows by digits on tensor cores (csrc/cuda). A query value is rounded to a multiple of
its token's step, which is ``2^-22`` of the power of two below its largest value, or twice that if
that is within ``2^-6`` of the next: off by ``1.008 * 2^-23`` of the largest value, whatever its own
size. Products of digits with codes, or with bits, are summed exactly, and two roundings make a
number of the three sums. Then come those of its product with the row's scale and of the sum over
tokens; of bit1 the former two count twice, as the sum of the values whose bits are 1 is taken
twice, and further ones are those of all values' sum, of the difference, of ``128^-1/2`` and of the
product with it. ``Lq + 7`` at most, and one for what they round being off already. Of long int8
rows by slices each of 2 to 8 warps makes a number of its own sums, and up to three additions make
one of these, each off by a part of what the absolute values add up to: with the product with the
row's scale and the sum over tokens ``2 + 3 + 1 + Lq - 1 = Lq + 5``, and one as before.

Residual rows by warps on tensor cores (csrc/cuda) are allowed 4 roundings more than in fp32,
``gamma(1.5 d + Lq + 8)`` of B with ``u = 2^-24``. A value is the same fp32 sum as elsewhere. It and
the query's go in two fp16 parts, each off by ``2^-22`` of itself, and products of two second parts,
``2^-22``, are left out: 12 u. Each half of the values has sums of its own: ``d / 2 + 1``
truncations of ``2^-23`` of what is added, ``d / 32`` of the sums of 16 values, one u to add the
halves, less than one for the small products. Lanes sum ``d / 4`` squares, two
shuffles add them, and the root halves what that is off: ``d / 8 + 1``; the approximate reciprocal
root is off by ``2^-22.9``, and its product by one u. Where fp16's least step loses more than
``2^-21`` of the score, the document is made once more in fp32: 8 u. Together ``1.1875 d + 28.2``,
and as many to sum maxima as Lq - 1, five at most: less than ``1.5 d + Lq + 8`` from d = 64 on.

Distances. Of whole numbers they are exact until they are rounded, once, so all versions agree. Of
floats the reference computes in fp64 and rounds once. A squared difference has the rounding of the
difference twice, and one of the square: with d - 1 additions and the reference's rounding ``gamma(d
+ 3)`` of the distance, whose terms are all positive. An inner product has ``gamma(d + 1)`` of the
products' absolute values. Each product below fp32's normal range is off by ``2^-150`` at most.

Where inputs are small integers every sum is exact in fp32 and versions must agree bit for bit; most
tests of plain formats do that.
"""

from __future__ import annotations

import torch

from espnx.ops.maxsim import token_format
from tests.ops.records import Records

SPLIT_FORMATS = ("fp16", "int8", "bit1")
WHOLE_FORMATS = ("int8", "bit1")  # of which csrc/cuda multiplies rows by digits of a query


def gamma(n: float, unit_roundoff: float) -> float:
    """Relative error bound of n roundings in a row."""
    return n * unit_roundoff / (1 - n * unit_roundoff)


def value_roundings(fmt: str, d: int) -> float:
    """Roundings on the way from a row's bytes to its values, and of what a fast version does
    instead."""
    if fmt in ("int8", "bit1"):
        return 4
    return d / 2 + 4 if fmt.startswith("residual") else 0


def maxsim_bound(
    query: torch.Tensor,
    records: Records,
    *,
    tensor_cores: bool = False,
    by_digits: bool = False,
    cpu_level: str = "portable",
) -> torch.Tensor:
    """The largest difference allowed between the op and `maxsim_reference` for each score. Finite
    inputs, one query ``[Lq, d]``."""
    n_query_tokens, d = query.shape
    fmt = records.format
    magnitude = _maxsim_of_magnitudes(query.abs(), records)
    peaks = _maxsim_of_magnitudes(query.abs().amax(dim=-1, keepdim=True).expand_as(query), records)
    roundings = d + n_query_tokens + value_roundings(fmt, d)
    bound = 2 * gamma(roundings, 2.0**-24) * magnitude
    if tensor_cores and by_digits:
        rounded = gamma(n_query_tokens + 8, 2.0**-24) + gamma(roundings, 2.0**-24)
        bound = rounded * magnitude + 1.008 * 2.0**-23 * peaks
    elif tensor_cores and fmt in SPLIT_FORMATS:
        truncated = gamma(roundings + 1, 2.0**-23) + gamma(roundings, 2.0**-24)
        bound = (truncated + 2.0**-22) * magnitude + 2.0**-36 * peaks
    elif tensor_cores and fmt == "bf16":
        bound = (gamma(roundings + 2, 2.0**-23) + gamma(roundings, 2.0**-24) + 2.0**-21) * magnitude
    elif tensor_cores and fmt.startswith("residual"):
        bound = (gamma(roundings + 4, 2.0**-24) + gamma(roundings, 2.0**-24)) * magnitude
    elif fmt in ("int8", "bit1") and cpu_level in ("vnni", "amx"):
        bound = bound + peaks / 64000
    elif fmt in ("fp16", "bf16") and cpu_level == "amx":
        bound = (
            gamma(roundings, 2.0**-24) + gamma(2.1 * d + n_query_tokens + 1, 2.0**-24) + 2.0**-24
        ) * magnitude
    return torch.where(records.n_tokens > 0, bound, 0.0)


def _maxsim_of_magnitudes(query: torch.Tensor, records: Records) -> torch.Tensor:
    """MaxSim of ``|document|``."""
    token, d = token_format(records.format), query.shape[-1]
    scores = torch.zeros(len(records.n_tokens))
    for i, (begin, count) in enumerate(
        zip(records.offset_bytes.tolist(), records.n_tokens.tolist(), strict=True)
    ):
        if count:
            rows = records.buffer[begin : begin + count * token.token_row_bytes(d)]
            scores[i] = (query @ token.decode(rows, d, records.codebook).abs().T).amax(dim=-1).sum()
    return scores


def distances_bound(query: torch.Tensor, vectors: torch.Tensor, metric: str) -> torch.Tensor:
    """The largest difference allowed between the op and `distances_reference` for each of ``[n,
    d]`` vectors. Finite inputs, one query."""
    q, v, d = query.double(), vectors.double(), query.shape[-1]
    if metric == "l2":
        bound = gamma(d + 3, 2.0**-24) * ((q - v) ** 2).sum(-1)
    else:
        bound = gamma(d + 1, 2.0**-24) * (q * v).abs().sum(-1)
    return (bound + d * 2.0**-149).float().nextafter(torch.tensor(torch.inf))


def assert_scores_close(scores: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """Fails unless every score is within its bound, and infinities and NaNs are the same ones."""
    both_special = (scores == expected) | (scores.isnan() & expected.isnan())
    close = both_special | ((scores - expected).abs() <= bound)
    worst = (
        ((scores - expected).abs() / bound.clamp_min(1e-45)).nan_to_num().max()
        if scores.numel()
        else 0
    )
    assert scores.shape == expected.shape
    assert bool(close.all()), (
        f"{int((~close).sum())} of {close.numel()} scores differ, at worst {float(worst):.3g} "
        "times the bound"
    )
