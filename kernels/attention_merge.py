"""Results of attention over different rows, merged as if the rows had been attended to at once.

``lse = log(sum over parts of exp(lse_part))``, ``o = sum over parts of exp(lse_part - lse) o_part``

o, lse    float32 ``[n_results, n_queries, DV]`` and ``[n_results, n_queries]``, the parts' results
place     int64 ``[n_parts, n_heads]``: which result is a head's part, below 0: it has none; without
          has_place part p of head h is result ``p * n_heads + h``
whole_o   float32 ``[n_heads, n_queries, DV]``, whole_lse ``[n_heads, n_queries]``

One program takes BLOCK_DV values of a query's results, BLOCK_P parts at a time.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["n_parts", "n_heads", "n_queries", "has_place"],
    do_not_specialize_on_alignment=["place_ptr"],
)
def merge_kernel(
    o_ptr,
    lse_ptr,
    place_ptr,
    whole_o_ptr,
    whole_lse_ptr,
    n_parts,
    n_heads,
    n_queries,
    has_place,
    DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    at = tl.program_id(0)
    head, query = at // n_queries, at % n_queries
    at = at.to(tl.int64)
    column = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    is_column = column < DV
    best = tl.max(tl.full([BLOCK_P], float("-inf"), dtype=tl.float32), axis=0)
    total = tl.sum(tl.zeros([BLOCK_P], dtype=tl.float32), axis=0)
    whole = tl.zeros([BLOCK_DV], dtype=tl.float32)
    for first in range(0, n_parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        is_part = part < n_parts
        result = part.to(tl.int64) * n_heads + head
        placed = tl.load(place_ptr + result, mask=is_part & (has_place != 0), other=0)
        result = tl.where(has_place != 0, placed, result)
        is_part = is_part & (result >= 0)
        row = result * n_queries + query
        lse = tl.load(lse_ptr + row, mask=is_part, other=float("-inf"))
        values = tl.load(
            o_ptr + row[:, None] * DV + column[None, :],
            mask=is_part[:, None] & is_column[None, :],
            other=0.0,
        )
        above = tl.maximum(best, tl.max(lse, axis=0))
        # Nothing is subtracted where no part has seen a row yet; a NaN is in every sum.
        peak = tl.where(tl.abs(above) == float("inf"), 0.0, above)
        weights = tl.exp(lse - peak)
        before = total * tl.exp(best - peak)
        total = before + tl.sum(weights, axis=0)
        inverse = 1.0 / tl.where(total == 0, 1.0, total)
        # Of weights that add up to 1, so that what the parts hold stays in range.
        whole = whole * (before * inverse)
        whole += tl.sum((weights * inverse)[:, None] * values, axis=0)
        best = above
    tl.store(whole_o_ptr + at * DV + column, whole, mask=is_column)
    peak = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    whole_lse = tl.where(total == 0, float("-inf"), peak + tl.log(total))
    tl.store(whole_lse_ptr + at, whole_lse, mask=tl.program_id(1) == 0)
