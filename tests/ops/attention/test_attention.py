"""Attention on the CPU, at every level, against the reference in fp64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch

from espnx.ops.attention import (
    ROW_FORMATS,
    attention,
    attention_reference,
    block_bytes,
    merge,
    reference,
)
from espnx.ops.attention.reference import stored_rows

U = 2.0**-24  # unit roundoff of fp32
LEVELS = pytest.mark.parametrize("cpu_level", ["portable", "avx2", "avx512"], indirect=True)
FORMATS = pytest.mark.parametrize("fmt", ROW_FORMATS)
TILE_ROWS = 128
PIECES_MAX = 8  # parts of one sequence, for as many threads


@dataclass
class Case:
    """Arguments of `attention` and of its reference."""

    query: torch.Tensor
    buffer: torch.Tensor
    table: torch.Tensor
    n_rows: torch.Tensor
    block_rows: int
    format: str
    dv: int
    visible: torch.Tensor | None = None
    last_position: torch.Tensor | None = None
    scale: float | None = None

    def run(self, threads: int | None = 1) -> tuple[torch.Tensor, torch.Tensor]:
        return attention(*self.args, **self.options, threads=threads)

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        return attention_reference(*self.args, **self.options, dtype=torch.float64)

    @property
    def args(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.buffer, self.table, self.n_rows

    @property
    def options(self) -> dict[str, Any]:
        names = ("block_rows", "format", "dv", "visible", "last_position", "scale")
        return {name: getattr(self, name) for name in names}


def random_blocks(
    n: int, fmt: str, block_rows: int, d: int, dv: int, generator: torch.Generator
) -> torch.Tensor:
    """The bytes of n blocks of rows with values of about unit size, ``[n, bytes]``."""
    values = block_rows * (d + dv)
    if fmt != "int8":
        return torch.randn(n, values, generator=generator).to(ROW_FORMATS[fmt]).view(torch.uint8)
    codes = torch.randint(-127, 128, (n, values), generator=generator, dtype=torch.int8).view(
        torch.uint8
    )
    k_scales, v_scales = (
        (torch.rand(n, count, generator=generator) / 50).view(torch.uint8)
        for count in (d, block_rows)
    )
    k_codes, v_codes = codes.split([block_rows * d, block_rows * dv], dim=1)
    return torch.cat([k_scales, k_codes, v_scales, v_codes], dim=1)


def make_case(
    *,
    n_rows: list[int],
    q_len: int = 1,
    d: int = 64,
    dv: int | None = None,
    n_kv: int = 2,
    group: int = 1,
    block_rows: int = 16,
    fmt: str = "fp16",
    seed: int = 0,
    gap_bytes: int = 3,
) -> Case:
    """Blocks in random order, at odd addresses unless ``gap_bytes`` says otherwise; ``dv=0`` for X
    rows."""
    generator = torch.Generator().manual_seed(seed)
    dv = d if dv is None else dv
    size = block_bytes(block_rows, d, dv, fmt)
    n_blocks = max(-(-max(n_rows) // block_rows), 1)
    n = len(n_rows) * n_kv * n_blocks
    order = torch.randperm(n, generator=generator)
    stride = size + gap_bytes
    table = (order * stride + gap_bytes).view(len(n_rows), n_kv, n_blocks)
    # NaNs between the blocks
    buffer = torch.full((n * stride + gap_bytes,), 0xFF, dtype=torch.uint8)
    buffer.as_strided((n, size), (stride, 1), gap_bytes).copy_(
        random_blocks(n, fmt, block_rows, d, dv, generator)
    )
    query = torch.randn(len(n_rows), n_kv * group, q_len, d, generator=generator)
    return Case(query, buffer, table, torch.tensor(n_rows), block_rows, fmt, dv)


def causal(case: Case) -> Case:
    """Each query sees the rows up to its own, the last of them all (chunked prefill)."""
    q_len = case.query.shape[2]
    case.last_position = case.n_rows[:, None] - q_len + torch.arange(q_len)
    return case


def magnitudes(case: Case) -> torch.Tensor:
    """For each query, the largest sum of ``|q k|`` over a row, infinities and NaNs left out."""
    batch, heads, q_len, d = case.query.shape
    n_kv = case.table.shape[1]
    largest = torch.zeros(batch, n_kv, heads // n_kv * q_len, dtype=torch.float64)
    query = case.query.double().abs().view(*largest.shape, d) * abs(
        d**-0.5 if case.scale is None else case.scale
    )
    for i in range(batch):
        for head in range(n_kv if case.n_rows[i] else 0):
            table, count = case.table[i, head].tolist(), int(case.n_rows[i])
            k, _ = stored_rows(
                case.buffer, table, count, case.block_rows, d, case.dv, case.format, torch.float64
            )
            largest[i, head] = (query[i, head] @ k.nan_to_num(0, 0, 0).abs().T).amax(dim=-1)
    return largest.view(batch, heads, q_len)


def steps(case: Case) -> torch.Tensor:
    """For each query what least steps of parts take of a score at most: in fp16 of the query's
    largest value, for each value of K; in bf16 and TF32 of each value."""
    batch, heads, q_len, d = case.query.shape
    n_kv = case.table.shape[1]
    largest = torch.zeros(batch, n_kv, heads // n_kv * q_len, dtype=torch.float64)
    query = case.query.double().abs().view(*largest.shape, d) * abs(
        d**-0.5 if case.scale is None else case.scale
    )
    for i, head in itertools.product(range(batch), range(n_kv)):
        for block in case.table[i, head, : -(-int(case.n_rows[i]) // case.block_rows)].tolist():
            rows, scaled, scales = case.buffer[block:], query[i, head], torch.ones(d)
            if case.format == "int8":
                scales = rows[: 4 * d].clone().view(torch.float32).double().abs()
                rows = rows[4 * d :]
            dtype = ROW_FORMATS[case.format]
            k = rows[: case.block_rows * d * dtype.itemsize].clone().view(dtype).view(-1, d)
            k = k.double().nan_to_num(0, 0, 0).abs()
            lost = torch.zeros(())
            if case.format in ("fp16", "int8"):
                peak = (scaled * scales).nan_to_num(0, 0, 0).amax(dim=-1)
                lost = 2.0**-36 * peak * k.sum(dim=-1).amax()
            if case.format != "fp16":
                sums = scaled.nan_to_num(0, 0, 0).sum(dim=-1)
                lost = lost + 2.0**-134 * (sums + (k * scales).nan_to_num(0, 0, 0).sum(-1).amax())
            largest[i, head] = largest[i, head].maximum(lost)
    return largest.view(batch, heads, q_len)


def largest_value(case: Case) -> float:
    """The largest ``|v|`` that is finite."""
    d, largest = case.query.shape[-1], 0.0
    for i, head in itertools.product(*(range(n) for n in case.table.shape[:2])):
        count = int(case.n_rows[i])
        table = case.table[i, head].tolist()
        if count:
            _, v = stored_rows(
                case.buffer, table, count, case.block_rows, d, case.dv, case.format, torch.float64
            )
            largest = max(largest, float(v.nan_to_num(0, 0, 0).abs().max()))
    return largest


def absolute_values(case: Case) -> torch.Tensor:
    """The reference's sum of probabilities times ``|v|``."""
    plain = reference._attend
    with patch.object(
        reference, "_attend", lambda query, k, v, seen: plain(query, k, v.abs(), seen)
    ):
        return case.reference()[0]


def assert_close(
    case: Case,
    got: tuple[torch.Tensor, torch.Tensor],
    *,
    unit: float = U,
    product_error: float = 0.0,
    has_parts: bool = False,
) -> None:
    """Both results within the bounds of docs/tolerances.md; infinities and NaNs the same ones.

    Args:
        has_parts: products are of parts in fp16, bf16 or TF32.
    """
    o, lse = got
    expected_o, expected_lse = case.reference()
    n, d = int(case.n_rows.max()), case.query.shape[-1]
    rescales = math.ceil(n / TILE_ROWS) + PIECES_MAX
    gamma_score, gamma_sum = ((m * unit) / (1 - m * unit) for m in (d + 12, n + 6 * rescales + 12))
    score_error = (gamma_score + product_error) * magnitudes(case)
    least = 2.0**-126 * largest_value(case)  # of a weight
    if has_parts:
        score_error += steps(case)
        if case.format in ("fp16", "int8"):
            least += 2.0**-38 * largest_value(case)
    relative = torch.expm1(score_error) + gamma_sum + product_error
    o_bound = (2 * relative / (1 - relative).clamp_min(1e-9))[..., None] * absolute_values(case)
    o_bound += n * least
    if has_parts and case.format != "fp16":
        o_bound += 2.0**-134
    lse_bound = relative + 2 * unit * (1 + expected_lse.abs())
    for name, a, b, bound in (("o", o, expected_o, o_bound), ("lse", lse, expected_lse, lse_bound)):
        assert a.shape == b.shape
        assert a.dtype == torch.float32
        same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= bound)
        worst = ((a - b).abs() / bound).nan_to_num().max() if same.numel() else 0.0
        assert bool(same.all()), (
            f"{name}: {int((~same).sum())} of {same.numel()} differ, at worst {float(worst):.3g} "
            "times the bound"
        )


ROW_COUNTS = [0, 1, 15, 16, 17, 127, 128, 129, 1000]


@pytest.mark.sampled(2)
@LEVELS
@FORMATS
@pytest.mark.parametrize("group", [1, 4, 8])
def test_decode(cpu_level: str, fmt: str, group: int) -> None:
    for block_rows, d in ((16, 64), (32, 128)):
        case = make_case(
            n_rows=ROW_COUNTS, n_kv=1, d=d, group=group, block_rows=block_rows, fmt=fmt, seed=group
        )
        assert_close(case, case.run())


@pytest.mark.sampled(2)
@LEVELS
@FORMATS
@pytest.mark.parametrize(("q_len", "group"), [(1, 1), (3, 1), (3, 4), (64, 1), (200, 1), (7, 8)])
def test_prefill_behind_stored_rows(cpu_level: str, fmt: str, q_len: int, group: int) -> None:
    counts = [count for count in ROW_COUNTS if count < 1000] + [300]
    case = causal(
        make_case(
            n_rows=counts,
            q_len=q_len,
            n_kv=1,
            group=group,
            block_rows=16,
            fmt=fmt,
            d=32,
            seed=q_len,
        )
    )
    assert_close(case, case.run())


@pytest.mark.sampled(2)
@LEVELS
@pytest.mark.parametrize("n_queries", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 50])
@pytest.mark.parametrize(("d", "dv"), [(8, 8), (24, 40), (72, 8), (128, 136), (264, 72)])
def test_every_shape_of_register_block(cpu_level: str, n_queries: int, d: int, dv: int) -> None:
    case = make_case(
        n_rows=[21, 131], q_len=n_queries, n_kv=1, d=d, dv=dv, block_rows=7, seed=n_queries
    )
    assert_close(case, case.run())


@LEVELS
@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("d", "n_queries"), [(256, 1), (320, 32), (2048, 33), (2056, 6)])
def test_x_rows(cpu_level: str, fmt: str, d: int, n_queries: int) -> None:
    case = make_case(n_rows=[150, 0], q_len=n_queries, n_kv=1, d=d, dv=0, block_rows=32, fmt=fmt)
    o, lse = case.run()
    assert o.shape == (2, 1, n_queries, d)
    assert_close(case, (o, lse))


@LEVELS
@pytest.mark.parametrize("block_rows", [1, 5, 128, 129, 500])
def test_block_sizes(cpu_level: str, block_rows: int) -> None:
    for q_len, fmt in ((1, "fp16"), (20, "int8"), (2, "int8")):
        case = causal(
            make_case(n_rows=[257, 130], q_len=q_len, d=16, group=3, block_rows=block_rows, fmt=fmt)
        )
        assert_close(case, case.run())


@LEVELS
def test_large_and_tiny_scores(cpu_level: str) -> None:
    """Scores from -3000 to 3000: the softmax picks the largest, and nothing overflows on the way to
    it."""
    for q_len in (2, 20):
        for scale in (50.0, 1e-30, 0.0, -5.0):
            case = make_case(n_rows=[400], q_len=q_len, d=64)
            case.scale = scale
            o, lse = case.run()
            assert bool(o.isfinite().all())
            assert bool(lse.isfinite().all())
            # beyond, the bound itself is above 1: rounding decides between rows
            if abs(scale) < 10:
                assert_close(case, (o, lse))


@LEVELS
@pytest.mark.parametrize("q_len", [8, 4000])
def test_exponential(cpu_level: str, q_len: int) -> None:
    """Two rows with scores of 0 and -x, exactly: ``o = e / (1 + e)`` shows e = exp(-x), good to 2
    units in the last place (2^-22)."""
    case = make_case(n_rows=[2], d=8, n_kv=1, block_rows=2, fmt="fp32", q_len=q_len)
    rows = torch.zeros(2, 2, 8)  # of K, then of V
    rows[0, 1, 0], rows[1, 1, :] = -1.0, 1.0
    case.buffer = rows.view(torch.uint8).flatten()
    case.table, case.scale = torch.zeros(1, 1, 1, dtype=torch.int64), 1.0
    x = torch.linspace(0, 100, q_len)
    case.query = torch.zeros(1, 1, q_len, 8)
    case.query[..., 0] = x
    o, _ = case.run()
    e = torch.exp(-x.double())
    expected = e / (1 + e)
    error = (o[0, 0, :, 0] - expected).abs()
    # with the roundings of 1 + e and of the quotient
    assert bool((error <= (2.0**-22 + 4 * U) * expected + 2.0**-125).all())


@LEVELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_of_the_query(cpu_level: str, dtype: torch.dtype) -> None:
    case = make_case(n_rows=[100], q_len=3)
    case.query = case.query.to(dtype)
    assert_close(case, case.run())
    strided = Case(
        **{**vars(case), "query": case.query.transpose(2, 3).contiguous().transpose(2, 3)}
    )
    assert torch.equal(case.run()[0], strided.run()[0])


@pytest.mark.sampled(1)
@LEVELS
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads(cpu_level: str, threads: int) -> None:
    """More threads than heads: sequences are cut in pieces, whose states are merged."""
    case = causal(make_case(n_rows=[4200, 3], q_len=9, n_kv=1, d=128))
    assert_close(case, case.run(threads))
    case = make_case(n_rows=[4200, 17, 0, 900], d=128, n_kv=2)
    assert_close(case, case.run(threads))


@LEVELS
@pytest.mark.parametrize("cut", [0, 16, 48, 160, 320])
def test_merge_equals_attending_at_once(cpu_level: str, cut: int) -> None:
    for q_len in (2, 20):
        case = make_case(n_rows=[320, 320], q_len=q_len, d=32)
        parts = []
        for begin, end in ((0, cut), (cut, 320)):
            part = Case(
                **{
                    **vars(case),
                    "table": case.table[:, :, begin // 16 : max(end // 16, 1)].contiguous(),
                }
            )
            part.n_rows = torch.tensor([end - begin, end - begin])
            parts.append(part.run())
        assert_close(case, merge(*parts[0], *parts[1]))


def test_merge_of_nothing_and_of_nan() -> None:
    o, lse = merge(
        torch.zeros(2, 8),
        torch.tensor([-torch.inf, -torch.inf]),
        torch.ones(2, 8),
        torch.tensor([-torch.inf, 3.0]),
    )
    assert bool((o[0] == 0).all())
    assert lse[0] == -torch.inf
    assert torch.equal(o[1], torch.ones(8))
    assert lse[1] == 3.0
    o, lse = merge(
        torch.zeros(1, 8), torch.tensor([torch.nan]), torch.ones(1, 8), torch.tensor([1.0])
    )
    assert bool(o.isnan().all())
    assert bool(lse.isnan().all())


@LEVELS
def test_levels_agree_on_no_work(cpu_level: str) -> None:
    for case in (make_case(n_rows=[0, 0]), make_case(n_rows=[5], q_len=0)):
        o, lse = case.run()
        assert bool((o == 0).all())
        assert bool((lse == -torch.inf).all())
