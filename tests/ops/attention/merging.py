"""Parts of attention merged by a kernel: the same for every way to run it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from espnx.ops.attention.cuda import merge_results

#: Parts, heads, queries and values of a row: one of each, more than a program takes at once, and
#: counts that are no multiple of what it takes.
SIZES = [(1, 1, 1, 8), (2, 3, 2, 24), (8, 2, 3, 64), (9, 1, 2, 72), (64, 1, 1, 16), (130, 2, 1, 40)]
PLAIN = pytest.mark.parametrize("size", SIZES, ids=str)


def check_merge(n_parts: int, n_heads: int, n_queries: int, dv: int) -> None:
    """Heads that have every part, some, or none; queries that saw nothing in some parts, and in
    any; a NaN in a part's lse and one in its o alone. Against sums in Python's floats."""
    rng = torch.Generator().manual_seed(n_parts * dv)
    results = n_parts * n_heads + 3  # those of nobody
    o = torch.randn(results, n_queries, dv, generator=rng)
    lse = 30 * torch.randn(results, n_queries, generator=rng)
    empty = torch.rand(results, n_queries, generator=rng) < 0.3
    order = torch.randperm(results, generator=rng)
    place = order[: n_parts * n_heads].view(n_parts, n_heads)
    place[torch.rand(n_parts, n_heads, generator=rng) < 0.2] = -1
    if n_queries > 1:
        empty[place[:, 0], -1] = True
    o[empty], lse[empty] = 0.0, -torch.inf
    broken = place[-1, -1], 0
    if n_parts in (2, 9):
        lse[broken] = torch.nan
    elif n_parts > 1:
        o[broken][-1] = torch.nan
    found_o, found_lse = merge_results(o, lse, place)
    assert found_o.shape == (n_heads, n_queries, dv)
    assert found_lse.shape == (n_heads, n_queries)
    for head in range(n_heads):
        mine = [int(at) for at in place[:, head] if at >= 0]
        for query in range(n_queries):
            one = _merged_in_python([o[at, query] for at in mine], [lse[at, query] for at in mine])
            expected_o, expected_lse = one if mine else (torch.zeros(dv), -math.inf)
            torch.testing.assert_close(
                found_o[head, query], expected_o, rtol=4e-6, atol=4e-6, equal_nan=True
            )
            torch.testing.assert_close(
                float(found_lse[head, query]), expected_lse, rtol=1e-6, atol=1e-6, equal_nan=True
            )


def _merged_in_python(o: list[torch.Tensor], lse: list[torch.Tensor]) -> tuple[Any, float]:
    scores = [float(each) for each in lse]
    if any(math.isnan(score) for score in scores):
        return torch.full_like(o[0], math.nan), math.nan
    peak = max(scores)
    weights = [0.0 if score == -math.inf else math.exp(score - peak) for score in scores]
    # a NaN in a part that weighs nothing is one in the whole, too
    whole: Any = sum(weight * each.double() for weight, each in zip(weights, o, strict=True))
    total = math.fsum(weights)
    if total == 0:
        return whole.float(), -math.inf
    return (whole / total).float(), peak + math.log(total)


def check_merge_in_range() -> None:
    """Values near the ends of fp32, of parts that weigh the same; infinite lse."""
    big = 3.0e38
    o = torch.tensor([big, -big, big]).view(3, 1, 1).repeat(1, 1, 8)
    lse = torch.tensor([80.0, -torch.inf, 80.0]).view(3, 1)
    o[1] = 0.0
    found, whole = merge_results(o, lse, torch.arange(3).view(3, 1))
    torch.testing.assert_close(found, torch.full((1, 1, 8), big))
    assert float(whole) == pytest.approx(80.0 + math.log(2.0), rel=1e-6)
    lse[1] = torch.inf
    found, whole = merge_results(o, lse, torch.arange(3).view(3, 1))
    assert bool(found.isnan().all())
    assert float(whole) == math.inf
