"""Values and weights that lie far apart: the small ones are all that counts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from espnx.ops.attention import ROW_FORMATS
from tests.ops.attention.test_attention import Case, assert_close, make_case

Run = Callable[[Case], tuple[torch.Tensor, torch.Tensor]]
N_ROWS = 40


def rows_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """K ``[rows, d]`` and V ``[rows, dv]`` of the only block of a case without scales, in place."""
    d, begin = case.query.shape[-1], int(case.table[0, 0, 0])
    size = case.block_rows * (d + case.dv) * ROW_FORMATS[case.format].itemsize
    values = case.buffer[begin : begin + size].view(ROW_FORMATS[case.format])
    k, v = values.split([case.block_rows * d, case.block_rows * case.dv])
    return k.view(-1, d), v.view(-1, case.dv)


def check_values_far_apart(run: Run, fmt: str, d: int, group: int, **precision: float) -> None:
    """A query's value is 10^8 times its others, and K has zeros for it."""
    sizes = {"d": d, "dv": 16, "group": group, "block_rows": 48}
    case = make_case(n_rows=[N_ROWS], n_kv=1, fmt=fmt, gap_bytes=16, **sizes)
    k, _ = rows_of(case)
    k *= 10
    k[:, 3] = 0.0
    case.query[..., 3] = 1e8
    assert_close(case, run(case), **precision)


def check_weights_far_apart(
    run: Run, fmt: str, d: int, group: int, gap: float, value: float, **precision: float
) -> None:
    """One row has all of the weight, but for e^-gap of each of the others, and zeros of V."""
    sizes = {"d": d, "dv": 16, "group": group, "block_rows": 48}
    case = make_case(n_rows=[N_ROWS], n_kv=1, fmt=fmt, gap_bytes=16, **sizes)
    k, v = rows_of(case)
    k.zero_()
    v.fill_(value)
    k[0, 3], v[0] = 1.0, 0.0
    case.query[..., 3], case.scale = gap, 1.0
    assert_close(case, run(case), **precision)


def check_least_values(run: Run, fmt: str, d: int, group: int, **precision: float) -> None:
    """Values of K and V about the least that fp32 has with all its bits, and a query that makes
    scores of them."""
    sizes = {"d": d, "dv": 16, "group": group, "block_rows": 48}
    case = make_case(n_rows=[N_ROWS], n_kv=1, fmt=fmt, gap_bytes=16, **sizes)
    for values in rows_of(case):
        values *= 1e-38
    case.query *= 1e37
    assert_close(case, run(case), **precision)
