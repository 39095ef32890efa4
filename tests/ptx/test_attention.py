"""Attention as it is compiled for sm_90, executed, against the reference in fp64 within the bounds
of docs/tolerances.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from espnx.errors import NotConformingError
from espnx.ops.attention import cuda, parts
from espnx.ops.attention.checks import BlocksFound
from tests.device.rows import assert_right
from tests.ops.attention import not_finite
from tests.ops.attention.far_apart import (
    check_least_values,
    check_values_far_apart,
    check_weights_far_apart,
)
from tests.ops.attention.merging import PLAIN, check_merge, check_merge_in_range
from tests.ops.attention.ruled import (
    DTYPES,
    INT8_RULES,
    RULES,
    WIDTHS,
    by_kernel,
    check_block_rules,
    check_rules,
    check_sinks,
    ruled_case,
)
from tests.ops.attention.scales import check_scale, check_scales_far_apart
from tests.ops.attention.test_attention import FORMATS, assert_close, causal, make_case
from tests.ops.attention.test_kernel import PRECISION, case_dtype, run, stored_row
from tests.ops.attention.test_parts import check_parts
from tests.ptx.program import Fault
from tests.ptx.sparse import BEYOND, moved
from tests.sweeps import some

pytestmark = pytest.mark.usefixtures("launch")
#: Lengths of K and V rows, rows of a block; the blocks that a tile has rows of, and whether they
#: are whole. The first two are caches'.
SHORT_BLOCKS = (
    (128, 128, 16, 4, True),
    (64, 64, 32, 4, True),
    (24, 40, 16, 8, True),
    (64, 64, 48, 4, False),
    (128, 72, 100, 2, False),
    (8, 16, 19, 8, False),
)


@pytest.mark.sampled(1)
@FORMATS
@pytest.mark.parametrize("n_splits", [1, 3])
@pytest.mark.parametrize("gap_bytes", [4, 16])
def test_decode(fmt: str, n_splits: int, gap_bytes: int) -> None:
    """Blocks at multiples of an element and of 16 bytes; sequences of no row, one, and odd
    numbers."""
    case = make_case(n_rows=[0, 1, 33, 130], group=9, d=24, dv=40, fmt=fmt, gap_bytes=gap_bytes)
    assert_close(case, run(case, n_splits=n_splits), **PRECISION)


@pytest.mark.sampled(1)
@FORMATS
@pytest.mark.parametrize("d", [16, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 20, 64])
def test_widths_and_queries(fmt: str, d: int, group: int) -> None:
    """From 64 queries on four warps multiply at a time."""
    case = make_case(n_rows=[45], n_kv=1, group=group, d=d, block_rows=32, fmt=fmt, gap_bytes=0)
    assert_close(case, run(case), **PRECISION)


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize(("d", "group"), [(64, 1), (64, 20)])
def test_values_far_apart(fmt: str, d: int, group: int) -> None:
    check_values_far_apart(run, fmt, d, group, **PRECISION)
    check_weights_far_apart(run, fmt, d, group, 25.0, 1e4, **PRECISION)


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_least_values(fmt: str) -> None:
    check_least_values(run, fmt, 64, 1, **PRECISION)


@FORMATS
def test_prefill(fmt: str) -> None:
    case = causal(make_case(n_rows=[100, 45], q_len=40, n_kv=1, d=32, fmt=fmt, gap_bytes=16))
    case.visible = torch.ones(2, 100, dtype=torch.uint8)
    case.visible[0, :70:3] = 0
    case.visible[1] = 0
    assert_close(case, run(case), **PRECISION)
    assert_close(case, run(case, n_splits=2), **PRECISION)


@pytest.mark.parametrize("fmt", some(["fp16", "bf16", "fp32"], 3))
def test_x_rows(fmt: str) -> None:
    case = make_case(n_rows=[50], n_kv=1, d=256, dv=0, q_len=5, fmt=fmt, gap_bytes=0)
    assert_close(case, run(case), **PRECISION)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize("d", [24, 64, 128])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("block_rows", [32, 128])
def test_x_rows_of_few_queries(fmt: str, d: int, group: int, block_rows: int) -> None:
    sizes: dict[str, Any] = {"n_kv": 1, "group": group, "block_rows": block_rows, "gap_bytes": 16}
    assert cuda.is_turned(group, d, d, fmt, block_rows)
    case = make_case(n_rows=[0, 1, 129], d=d, dv=0, fmt=fmt, **sizes)
    assert_close(case, run(case, n_splits=2), **PRECISION)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize(("d", "dv"), WIDTHS)
@pytest.mark.parametrize("names", RULES, ids="-".join)
@pytest.mark.parametrize("n", [1, 16])
def test_scores_of_models(
    monkeypatch: pytest.MonkeyPatch, fmt: str, d: int, dv: int, names: tuple[str, ...], n: int
) -> None:
    check_rules(monkeypatch, fmt, d, dv, n, names)


@pytest.mark.parametrize("fmt", DTYPES)
def test_sinks(monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    check_sinks(monkeypatch, fmt)


@pytest.mark.parametrize("name", ["soft_cap", "slopes", "window"])
def test_a_rule_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    look, rows = ruled_case("fp16", 64, 64, 3, (name,), 69)
    plain = replace(look, **{name: None, "last_position": look.position})
    with pytest.raises(NotConformingError, match="times the bound"):
        assert_right(by_kernel(monkeypatch, plain, rows), [], look, rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize(("d", "dv"), [(8, 16), (64, 64), (72, 40), (128, 128), (24, 256)])
@pytest.mark.parametrize("group", [1, 8, 13])
@pytest.mark.parametrize("gap_bytes", [4, 16])
def test_few_queries_of_whole_blocks(fmt: str, d: int, dv: int, group: int, gap_bytes: int) -> None:
    """Sequences of no row, one, and a row more than a block, in parts."""
    case = make_case(
        n_rows=[0, 1, 129],
        n_kv=1,
        group=group,
        d=d,
        dv=dv,
        block_rows=128,
        fmt=fmt,
        gap_bytes=gap_bytes,
    )
    assert_close(case, run(case, n_splits=2), **PRECISION)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize(("d", "dv", "block_rows", "n_blocks", "whole"), some(SHORT_BLOCKS, 2))
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("gap_bytes", [2, 16])
def test_few_queries_of_short_blocks(
    fmt: str,
    d: int,
    dv: int,
    block_rows: int,
    n_blocks: int,
    whole: bool,
    group: int,
    gap_bytes: int,
) -> None:
    """Sequences that end at the first row of a tile and in a block's midst, in parts."""
    tile = cuda.turned_rows(d, dv)
    known = cuda.block_constants(d, dv, fmt, block_rows, 2, tile, True)
    assert known == {"BLOCKS": n_blocks, "WHOLE": whole}
    sizes: dict[str, Any] = {"d": d, "dv": dv, "block_rows": block_rows, "group": group}
    case = make_case(n_rows=[0, 1, 129, 230], n_kv=1, fmt=fmt, gap_bytes=gap_bytes, **sizes)
    assert_close(case, run(case, n_splits=2), **PRECISION)


@pytest.mark.parametrize("fmt", some(["fp16", "bf16"], 1))
@pytest.mark.parametrize("rows", [1, 37, 200])
def test_few_queries_of_one_block(fmt: str, rows: int) -> None:
    """As rows in memory are, of which there is one more with every token."""
    assert cuda.is_turned(3, 24, 40, fmt, rows, 1)
    sizes: dict[str, Any] = {"d": 24, "dv": 40, "block_rows": rows, "group": 3}
    case = make_case(n_rows=[rows, 0, 1], n_kv=1, fmt=fmt, gap_bytes=16, **sizes)
    assert_close(case, run(case, n_splits=2), **PRECISION)


@pytest.mark.parametrize(
    ("fmt", "q_len", "block_rows"),
    [
        ("int8", 5, 128),
        ("int8", 16, 128),
        ("fp16", 5, 128),
        ("bf16", 8, 128),
        ("fp16", 8, 32),
        ("bf16", 5, 48),
    ],
)
def test_masks_of_few_queries(fmt: str, q_len: int, block_rows: int) -> None:
    case = causal(
        make_case(
            n_rows=[130, 45],
            q_len=q_len,
            n_kv=1,
            d=24,
            block_rows=block_rows,
            fmt=fmt,
            gap_bytes=16,
        )
    )
    case.visible = torch.ones(2, 130, dtype=torch.uint8)
    case.visible[0, :70:3] = 0
    case.visible[1] = 0
    assert_close(case, run(case), **PRECISION)


@pytest.mark.parametrize("fmt", some(["fp16", "bf16"], 1))
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_in_whole_blocks(fmt: str, value: float) -> None:
    """Of V, seen by the last two of three queries; of K, seen by the last; behind the last row,
    seen by nobody."""
    case = causal(
        make_case(n_rows=[20], q_len=3, d=24, n_kv=1, group=1, fmt=fmt, block_rows=128, gap_bytes=0)
    )
    rows = case.buffer.view(case_dtype(case)).view(2, 128, 24)
    rows[:, 20:] = value
    before = run(case)
    assert_close(case, before, **PRECISION)
    assert before[0].isfinite().all()
    rows[1, 18, 5] = value
    o, lse = run(case)
    assert_close(case, (o, lse), **PRECISION)
    assert o[0, 0, :, 5].isfinite().tolist() == [True, False, False]
    rows[0, 19] = torch.nan
    assert run(case)[1][0, 0].isnan().tolist() == [False, False, True]


@pytest.mark.parametrize(("fmt", "block_rows"), [("fp16", 32), ("bf16", 48)])
@pytest.mark.parametrize("value", some([torch.nan, torch.inf, -torch.inf], 3))
def test_not_finite_in_short_blocks(
    launch: Callable[..., Any], fmt: str, block_rows: int, value: float
) -> None:
    """Behind the last row, looked at by nobody: nothing is made once more, with care. Of V, seen by
    the last two of three queries; of K, seen by the last."""
    sizes: dict[str, Any] = {"d": 24, "group": 1, "block_rows": block_rows}
    case = causal(make_case(n_rows=[70], q_len=3, n_kv=1, fmt=fmt, gap_bytes=16, **sizes))
    launched = launch()
    before = run(case)
    steps = sum(each.n_steps for each in launched)
    for row in range(70, case.table.shape[2] * block_rows):
        stored_row(case, row, of_v=False).fill_(value)
        stored_row(case, row, of_v=True).fill_(value)
    after = run(case)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert sum(each.n_steps for each in launched) == 2 * steps
    stored_row(case, 68, of_v=True)[5] = value
    o, lse = run(case)
    assert sum(each.n_steps for each in launched) > 3 * steps
    assert_close(case, (o, lse), **PRECISION)
    assert o[0, 0, :, 5].isfinite().tolist() == [True, False, False]
    stored_row(case, 69, of_v=False).fill_(torch.nan)
    assert run(case)[1][0, 0].isnan().tolist() == [False, False, True]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("names", INT8_RULES, ids="-".join)
@pytest.mark.parametrize("block_rows", [32, 48, 128])
def test_scores_of_models_over_blocks(fmt: str, names: tuple[str, ...], block_rows: int) -> None:
    check_block_rules(names, fmt, block_rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("d", some([8, 40, 80, 96, 112], 3))
@pytest.mark.parametrize("fmt", ["fp16", "int8"])
def test_every_multiple_of_8(fmt: str, d: int) -> None:
    case = make_case(n_rows=[33], n_kv=1, group=16, d=d, fmt=fmt, block_rows=32, gap_bytes=16)
    assert_close(case, run(case), **PRECISION)


@pytest.mark.sampled(1)
@FORMATS
@pytest.mark.parametrize(("d", "dv"), [(576, 576), (264, 8), (8, 1024), (1024, 1024)])
def test_wide_rows(fmt: str, d: int, dv: int) -> None:
    case = causal(make_case(n_rows=[0, 1, 40], n_kv=1, d=d, dv=dv, q_len=3, fmt=fmt, gap_bytes=16))
    assert_close(case, run(case, n_splits=2), **PRECISION)


@pytest.mark.parametrize("fmt", some(DTYPES, 3))
@pytest.mark.parametrize("at", [5, 570])
def test_not_finite_wide(fmt: str, at: int) -> None:
    """In K rows' first and last values, and V rows' first and second piece; seen by the last two of
    three queries."""
    case = causal(
        make_case(n_rows=[20], q_len=3, d=576, dv=0, n_kv=1, fmt=fmt, block_rows=32, gap_bytes=0)
    )
    rows = case.buffer.view(DTYPES[fmt]).view(32, 576)
    rows[18, at] = torch.nan
    o, lse = run(case)
    assert_close(case, (o, lse), **PRECISION)
    assert lse[0, 0].isnan().tolist() == [False, True, True]
    assert o[0, 0, 0].isfinite().all()


@pytest.mark.sampled(1)
@FORMATS
@pytest.mark.parametrize("block_rows", [4, 16, 128])
def test_offsets_beyond_32_bits(fmt: str, block_rows: int) -> None:
    if block_rows == (128 if fmt == "fp32" else 4 if fmt == "int8" else 0):
        pytest.skip("the same kernel as of blocks of 16 rows")
    near = make_case(n_rows=[33], d=24, fmt=fmt, block_rows=block_rows, gap_bytes=16)
    expected = run(near)
    near.buffer, near.table = moved(near.buffer), near.table + BEYOND
    assert all(torch.equal(*pair) for pair in zip(run(near), expected, strict=True))


@pytest.mark.parametrize(("fmt", "d"), [("fp32", 520), ("bf16", 1024)])
def test_v_rows_that_begin_beyond_32_bits(fmt: str, d: int) -> None:
    """The longest block: its K rows alone have 2^31 bytes and more."""
    near = make_case(n_rows=[18], n_kv=1, d=d, dv=8, fmt=fmt, block_rows=32, gap_bytes=0)
    expected = run(near)
    size, rows = near.buffer.numel() // (d + 8), 1 << 20
    k, v = near.buffer.split([size * d, size * 8])
    v_begin = rows * (size // 32) * d
    assert v_begin >= 2**31
    whole = moved(torch.cat([v, v.new_zeros((rows - 32) * (size // 32) * 8)]), v_begin)
    whole[: k.numel()] = k
    near.buffer, near.block_rows = whole, rows
    assert all(torch.equal(*pair) for pair in zip(run(near), expected, strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("group", [1, 24])
def test_not_finite(fmt: str, value: float, group: int) -> None:
    """Infinities and NaNs of V reach the queries that see them, and no others."""
    case = causal(
        make_case(
            n_rows=[20], q_len=3, d=24, n_kv=1, group=group, fmt=fmt, block_rows=32, gap_bytes=0
        )
    )
    rows = case.buffer.view(case_dtype(case)).view(2, 32, 24)
    rows[1, 18, 5] = value  # of V, seen by the last two of three queries
    o, lse = run(case)
    assert_close(case, (o, lse), **PRECISION)
    assert o[0, 0, :, 5].isfinite().tolist() == [True, False, False]
    rows[0, 19] = torch.nan  # of K, seen by the last
    assert run(case)[1][0, 0].isnan().tolist() == [False, False, True]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("of_v", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [16, 128])
def test_scales_that_are_not_finite(value: float, of_v: bool, rows: int) -> None:
    """Tiles of several blocks, and of one each."""
    check_scale(run, value, of_v=of_v, rows=rows)


def _swept(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.sweep)


@pytest.mark.parametrize(
    ("fmt", "d", "dv", "block_rows", "group", "names"),
    [
        ("fp16", 24, 40, 16, 1, None),  # few queries: tiles of several blocks, and of one
        ("bf16", 64, 0, 128, 1, not_finite.BRIEF),
        ("fp16", 24, 136, 16, 1, not_finite.BRIEF),
        ("bf16", 24, 40, 16, 7, not_finite.BRIEF),  # 21 queries, in two pieces
        ("fp32", 24, 40, 16, 1, not_finite.BRIEF),
        ("fp16", 264, 0, 16, 1, not_finite.BRIEF[:2]),  # long rows
        ("int8", 32, 32, 16, 1, None),
        ("int8", 32, 32, 128, 1, None),
        _swept("bf16", 24, 40, 16, 1, None),
        _swept("fp16", 64, 0, 128, 1, None),
        _swept("bf16", 64, 0, 128, 1, None),
        _swept("fp16", 24, 136, 16, 1, None),
        _swept("fp16", 24, 40, 16, 7, None),
        _swept("bf16", 24, 40, 16, 7, None),
        _swept("fp32", 64, 0, 16, 7, None),
        *(_swept(fmt, 264, 0, 16, 1, None) for fmt in ("fp16", "bf16", "fp32")),
        _swept("int8", 264, 264, 16, 1, None),
        _swept("int8", 32, 32, 128, 7, None),
    ],
)
def test_every_value_that_is_not_finite(
    fmt: str, d: int, dv: int, block_rows: int, group: int, names: list[str] | None
) -> None:
    not_finite.check(run, fmt, d, dv, block_rows=block_rows, group=group, names=names)


def test_soft_cap_of_infinite_scores() -> None:
    not_finite.check_soft_cap("fp16", 24, 40)


@pytest.mark.parametrize("bytes_max", [0, 1 << 25])
def test_parts_that_waited(monkeypatch: pytest.MonkeyPatch, bytes_max: int) -> None:
    """As groups of reads are merged on a GPU."""
    monkeypatch.setattr(parts, "_merged_by_torch", cuda.merge_results)
    check_parts(monkeypatch, bytes_max, 5, 4)


@PLAIN
def test_merge(size: tuple[int, int, int, int]) -> None:
    check_merge(*size)


def test_merge_in_range() -> None:
    check_merge_in_range()


@pytest.mark.parametrize("group", [1, 20])
def test_scales_far_apart(group: int) -> None:
    """By either kernel."""
    check_scales_far_apart(run, group, **PRECISION)


def test_what_the_launcher_refuses_would_be_a_fault(
    launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks at an address that is not what the variant promises, and one that ends beyond its
    buffer."""
    case = make_case(n_rows=[20], d=24, gap_bytes=2)
    monkeypatch.setattr(cuda, "look_inside", lambda *args: BlocksFound(16, 20))
    with pytest.raises(Fault, match="misaligned"):
        run(case)
    monkeypatch.setattr(cuda, "look_inside", lambda *args: BlocksFound(16, 32))
    case = make_case(n_rows=[32], d=24, gap_bytes=0)
    case.buffer = case.buffer[:-2].clone()
    with pytest.raises(Fault, match=r"bytes at byte .* of buffer_ptr"):
        run(case)
