"""Scales of int8 rows that are not finite: the same for every version of attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.ops.attention.test_attention import Case, assert_close, causal, make_case

D = 24


def check_scale(
    run: Callable[[Case], tuple[torch.Tensor, torch.Tensor]],
    value: float,
    *,
    of_v: bool,
    rows: int = 16,
) -> None:
    """Of three queries the first sees two blocks of rows, the second a row more, the third two.
    A scale of K is one channel's of the third block, one of V the last row's: who sees them gets
    NaN in all values, and nobody else anything but what there was."""
    case = causal(
        make_case(
            n_rows=[2 * rows + 2], q_len=3, n_kv=1, d=D, fmt="int8", block_rows=rows, gap_bytes=16
        )
    )
    before = run(case)
    place = int(case.table[0, 0, 2]) + (4 * D + rows * D + 4 if of_v else 4 * 5)
    case.buffer[place : place + 4] = torch.tensor([value]).view(torch.uint8)
    (o, lse), (expected_o, expected_lse) = run(case), case.reference()
    seen = [False, False, True] if of_v else [False, True, True]
    for values in (o, expected_o):
        assert values[0].isnan().all(dim=-1).any(dim=0).tolist() == seen
        assert values[0].isnan().any(dim=-1).any(dim=0).tolist() == seen
        assert not values.isinf().any()
    for values in (lse, expected_lse):
        assert values[0].isnan().any(dim=0).tolist() == ([False] * 3 if of_v else seen)
    for found, was in zip((o, lse), before, strict=True):
        assert torch.allclose(found[:, :, :1], was[:, :, :1], rtol=1e-5, atol=1e-6)


def check_scales_far_apart(
    run: Callable[[Case], tuple[torch.Tensor, torch.Tensor]], group: int, **precision: float
) -> None:
    """A row's scale of V is 10^14 times the others', and a mask hides it, or all queries but the
    last stand before it: who does not see it loses nothing. Then all scales are so large that sums
    of 2^13 times the values would be infinite, and the last row's is NaN."""
    for row, scale, others in ((5, 1e12, 0.01), (69, 1e12, 0.01), (69, torch.nan, 3e32)):
        case = causal(
            make_case(
                n_rows=[70],
                q_len=3,
                n_kv=1,
                group=group,
                d=D,
                fmt="int8",
                block_rows=128,
                gap_bytes=16,
            )
        )
        if row < 69:
            case.visible = torch.ones(1, 70, dtype=torch.uint8)
            case.visible[0, row] = 0
        place = int(case.table[0, 0, 0]) + 4 * D + 128 * D
        scales = case.buffer[place : place + 4 * 128].view(torch.float32)
        scales.fill_(others)
        scales[row] = scale
        assert_close(case, run(case), **precision)
