"""The Triton version of attention in Triton's interpreter, against the reference.

Triton decides between interpreter and compiler when it is imported, so what is interpreted runs in
a process of its own (tests/ops/test_kernels_interpreted.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from espnx.device.row_layout import RowLayout
from espnx.errors import InvalidInputError
from espnx.ops.attention import block_bytes, cuda
from espnx.ops.attention.cuda import (
    ScoreRules,
    attention_inside_triton,
    attention_triton,
    block_constants,
    is_turned,
    tile_blocks,
    turned_rows,
)
from tests.ops.attention import not_finite
from tests.ops.attention.ruled import (
    INT8_RULES,
    RULES,
    WIDTHS,
    check_block_rules,
    check_rules,
    check_sinks,
)
from tests.ops.attention.scales import check_scale, check_scales_far_apart
from tests.ops.attention.test_attention import (
    FORMATS,
    ROW_FORMATS,
    Case,
    assert_close,
    causal,
    make_case,
)

pytest.importorskip("triton", reason="triton has no wheel for this machine's processor")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton 3.6 needs NumPy below 2.4 for its interpreter, and there it warns.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
)
# Tensor cores add with truncation and take products in three TF32 parts, off by 2^-21 at most; so
# do two results that are merged.
PRECISION: Any = {"unit": 2.0**-23, "product_error": 2.0**-20, "has_parts": True}


def run(case: Case, n_splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    scale = case.query.shape[-1] ** -0.5 if case.scale is None else case.scale
    rows: tuple[Any, ...] = (
        case.block_rows,
        case.format,
        scale,
        case.dv,
        case.visible,
        case.last_position,
    )
    return attention_triton(*case.args, *rows, n_splits=n_splits)


def interpreted_decode(fmt: str) -> None:
    case = make_case(n_rows=[0, 1, 33, 130], group=9, d=24, dv=40, fmt=fmt, gap_bytes=4)
    assert_close(case, run(case), **PRECISION)
    assert_close(case, run(case, n_splits=3), **PRECISION)
    case = make_case(n_rows=[70], n_kv=1, d=128, block_rows=32, fmt=fmt, gap_bytes=0)
    assert_close(case, run(case), **PRECISION)
    if fmt != "fp32":  # tiles of one block each
        case = make_case(
            n_rows=[0, 1, 130], n_kv=1, group=3, d=72, dv=40, block_rows=128, fmt=fmt, gap_bytes=4
        )
        assert_close(case, run(case, n_splits=2), **PRECISION)
    if fmt in ("fp16", "bf16"):  # of several, whole and not, and one of any length
        for block_rows, n_rows in ((32, 130), (19, 130), (150, 300), (37, 37)):
            sizes: dict[str, Any] = {"group": 3, "d": 72, "dv": 40, "block_rows": block_rows}
            case = make_case(n_rows=[0, 1, n_rows], n_kv=1, fmt=fmt, gap_bytes=4, **sizes)
            assert_close(case, run(case, n_splits=2), **PRECISION)


def interpreted_prefill(fmt: str) -> None:
    case = causal(make_case(n_rows=[100, 45], q_len=40, n_kv=1, d=32, fmt=fmt, gap_bytes=16))
    case.visible = torch.ones(2, 100, dtype=torch.uint8)
    case.visible[0, :70:3] = 0
    case.visible[1] = 0
    assert_close(case, run(case), **PRECISION)
    assert_close(case, run(case, n_splits=2), **PRECISION)


def interpreted_x_rows(fmt: str) -> None:
    if fmt != "int8":
        for d, block_rows in ((256, 16), (72, 128)):  # by either kernel
            case = make_case(
                n_rows=[50], n_kv=1, d=d, dv=0, q_len=5, block_rows=block_rows, fmt=fmt, gap_bytes=0
            )
            assert_close(case, run(case), **PRECISION)


def interpreted_not_finite(fmt: str) -> None:
    if fmt == "int8":
        for block_rows in (16, 128):  # by either kernel
            not_finite.check(run, fmt, 32, 32, block_rows=block_rows)
        return
    for value in (torch.nan, torch.inf, -torch.inf):
        case = causal(
            make_case(n_rows=[20], q_len=3, d=16, n_kv=1, fmt=fmt, block_rows=32, gap_bytes=0)
        )
        rows = case.buffer.view(case_dtype(case)).view(2, 32, 16)
        rows[1, 18, 5] = value  # of V, seen by the last two of three queries
        o, lse = run(case)
        assert_close(case, (o, lse), **PRECISION)
        assert o[0, 0, :, 5].isfinite().tolist() == [True, False, False]
        rows[0, 19] = torch.nan  # of K, seen by the last
        assert run(case)[1][0, 0].isnan().tolist() == [False, False, True]
    few, narrow, many, wide = (24, 40, 16, 1), (24, 136, 16, 1), (24, 40, 16, 7), (264, 0, 16, 1)
    for d, dv, block_rows, group in (few, narrow, many, wide):
        sizes = {"block_rows": block_rows, "group": group}
        not_finite.check(run, fmt, d, dv, names=not_finite.BRIEF, **sizes)


def interpreted_rules(fmt: str) -> None:
    if fmt == "int8":  # rows in memory never are
        for names in INT8_RULES:
            check_block_rules(names)
    else:
        for (d, dv), names in zip(WIDTHS, RULES, strict=True):
            with pytest.MonkeyPatch.context() as monkeypatch:
                check_rules(monkeypatch, fmt, d, dv, 5, names)
        with pytest.MonkeyPatch.context() as monkeypatch:
            check_sinks(monkeypatch, fmt)


def interpreted_scales(fmt: str) -> None:
    if fmt == "int8":
        for value in (torch.nan, torch.inf, -torch.inf):
            check_scale(run, value, of_v=False)
            check_scale(run, value, of_v=True)
        check_scale(run, torch.inf, of_v=False, rows=128)
        check_scale(run, torch.inf, of_v=True, rows=128)
        for group in (1, 20):  # by either kernel
            check_scales_far_apart(run, group, **PRECISION)


def interpreted_wide(fmt: str) -> None:
    for d, dv in ((576, 576), (264, 8), (8, 1024)):
        case = causal(
            make_case(n_rows=[0, 1, 40], n_kv=1, d=d, dv=dv, q_len=3, fmt=fmt, gap_bytes=16)
        )
        assert_close(case, run(case, n_splits=2), **PRECISION)


def case_dtype(case: Case) -> torch.dtype:
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[case.format]


def stored_row(case: Case, row: int, *, of_v: bool) -> torch.Tensor:
    """A row of the first sequence's first head, where it is stored in 16 bits."""
    d, rows = case.query.shape[-1], case.block_rows
    block, at = divmod(row, rows)
    begin = int(case.table[0, 0, block]) + 2 * (rows * d + at * case.dv if of_v else at * d)
    return case.buffer[begin : begin + 2 * (case.dv if of_v else d)].view(case_dtype(case))


#: What is interpreted of which formats; in the sweep, all of them.
PARTS: dict[Callable[[str], None], str] = {
    interpreted_decode: "fp32 fp16 bf16 int8",
    interpreted_prefill: "fp16 int8",
    interpreted_x_rows: "bf16",
    interpreted_not_finite: "fp16 int8",
    interpreted_rules: "bf16 int8",
    interpreted_scales: "int8",
    interpreted_wide: "fp32 int8",
}


@pytest.mark.parametrize(
    ("part", "fmt"),
    [
        pytest.param(part, fmt, marks=[] if fmt in formats.split() else [pytest.mark.sweep])
        for part, formats in PARTS.items()
        for fmt in ROW_FORMATS
    ],
)
@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero:RuntimeWarning",
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:All-NaN slice encountered:RuntimeWarning",
)
@pytest.mark.skipif(not IS_INTERPRETED, reason="[triton] runs in the interpreter's own process")
def test_interpreted(part: Any, fmt: str) -> None:
    part(fmt)


@pytest.mark.parametrize(("d", "rows"), [(24, 128), (72, 64)])
def test_how_many_blocks_a_tile_has(d: int, rows: int) -> None:
    """As counted row by row, over tiles that begin at all places in a block; where it is the only
    one of its sequence, one."""
    assert turned_rows(d, d) == rows
    variants = set()
    for block_rows in range(1, 300):
        block = torch.arange(rows * block_rows) // block_rows
        tiles = block.view(-1, rows)
        counted = int((tiles[:, -1] - tiles[:, 0]).max()) + 1
        assert tile_blocks(d, d, block_rows, 2) == counted
        assert tile_blocks(d, d, block_rows, 1) == 1
        assert is_turned(8, d, d, "fp16", block_rows) is (counted <= 8)
        assert is_turned(8, d, d, "fp16", block_rows, 1)
        assert is_turned(8, d, d, "int8", block_rows) is (counted == 1)
        if counted <= 8:
            constants = block_constants(d, d, "fp16", block_rows, 2, rows, True)
            assert constants["WHOLE"] is (counted > 1 and rows % block_rows == 0)
            variants.add(tuple(constants.values()))
    assert len(variants) <= 8 + 3


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("d", [32, 64, 80, 96, 128])
def test_blocks_of_caches_are_for_few_queries(fmt: str, d: int) -> None:
    assert is_turned(8, d, d, fmt, RowLayout(fmt, d, d).block_rows)


def test_what_cuda_refuses() -> None:
    case = make_case(n_rows=[20], gap_bytes=1)
    with pytest.raises(InvalidInputError, match="multiples of 2 bytes"):
        run(case)
    with pytest.raises(InvalidInputError, match="at most 1024"):
        run(make_case(n_rows=[20], d=1032))
    case.table += case.buffer.numel()
    with pytest.raises(InvalidInputError, match="outside the buffer"):
        run(case)


def test_more_rows_than_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is launched."""
    launched: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launched.append(grid[0])

    monkeypatch.setattr(cuda, "_kernel_for", lambda *args, **options: Kernel())
    case = make_case(n_rows=[20], n_kv=1, gap_bytes=16)
    most = 2**31 - 2**20 - 1
    for rows_max in (most, most + 1, 2**40):
        options = (rows_max, 16, case.block_rows, case.format, 1.0, case.dv)
        if rows_max == most:
            attention_inside_triton(*case.args, *options, n_splits=1)
            continue
        with pytest.raises(InvalidInputError, match="rows on CUDA") as raised:
            attention_inside_triton(*case.args, *options)
        assert raised.value.got == rows_max
    assert launched == [1]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (ScoreRules(soft_cap=float("inf")), "soft_cap"),
        (ScoreRules(soft_cap=-1.0), "soft_cap"),
        (ScoreRules(window=-1), "window"),
        (ScoreRules(window=3), "no position"),
        (ScoreRules(slopes=torch.ones(1, 2, 1)), "no position"),
        (ScoreRules(window=3, position=torch.zeros(1, 2, dtype=torch.int64)), "position"),
        (ScoreRules(window=3, position=torch.zeros(1, 1)), "position"),
        (
            ScoreRules(slopes=torch.ones(1, 1, 1), position=torch.zeros(1, 1, dtype=torch.int64)),
            "slopes",
        ),
    ],
)
def test_rules_that_are_refused(rules: ScoreRules, message: str) -> None:
    case = make_case(n_rows=[20], gap_bytes=16)
    with pytest.raises(InvalidInputError, match=message):
        attention_triton(*case.args, case.block_rows, case.format, 1.0, case.dv, rules=rules)


@pytest.mark.gpu
@FORMATS
def test_on_a_gpu(fmt: str) -> None:
    for case in (
        make_case(n_rows=[0, 1, 33, 1300], group=4, d=128, fmt=fmt, gap_bytes=16),
        causal(make_case(n_rows=[2100, 145], q_len=70, n_kv=1, d=64, fmt=fmt, gap_bytes=4)),
    ):
        check_on_a_gpu(case)


def check_on_a_gpu(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    there = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in vars(case).items()
    }
    o, lse = (each.cpu() for each in run(Case(**there)))
    assert_close(case, (o, lse), **PRECISION)
    return o, lse


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("group", [1, 8, 9])
def test_whole_blocks_on_a_gpu(fmt: str, d: int, group: int) -> None:
    """K and V rows, and X rows, with masks; by the kernels for few queries but 9 of 16 bits."""
    assert is_turned(group, d, d, fmt, 128) is (fmt == "int8" or group <= 8)
    check_blocks_on_a_gpu(fmt, d, group, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize(("d", "block_rows"), [(64, 32), (128, 16), (128, 48)])
def test_short_blocks_on_a_gpu(fmt: str, d: int, block_rows: int) -> None:
    """Those of caches, and blocks that no tile is whole ones of."""
    assert is_turned(3, d, d, fmt, block_rows)
    check_blocks_on_a_gpu(fmt, d, 3, block_rows)


def check_blocks_on_a_gpu(fmt: str, d: int, group: int, block_rows: int) -> None:
    sizes: dict[str, Any] = {"n_kv": 2, "d": d, "block_rows": block_rows, "fmt": fmt}
    case = make_case(n_rows=[0, 1, 129, 1300], group=group, gap_bytes=16, **sizes)
    check_on_a_gpu(case)
    case.visible = torch.ones(4, 1300, dtype=torch.uint8)
    case.visible[2:, :70:3] = 0
    case.visible[1] = 0
    check_on_a_gpu(case)
    check_on_a_gpu(causal(make_case(n_rows=[300, 145], q_len=group, gap_bytes=4, **sizes)))
    if fmt != "int8":
        check_on_a_gpu(make_case(n_rows=[0, 1, 700], dv=0, group=group, gap_bytes=16, **sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize(("d", "dv"), [(256, 0), (576, 0), (1024, 0), (256, 256), (576, 512)])
@pytest.mark.parametrize("group", [2, 16])
def test_long_rows_on_a_gpu(fmt: str, d: int, dv: int, group: int) -> None:
    """By csrc/cuda where it is compiled; with masks, and a value that is not finite."""
    sizes: dict[str, Any] = {"d": d, "dv": dv, "fmt": fmt, "gap_bytes": 16}
    check_on_a_gpu(make_case(n_rows=[0, 1, 33, 1300], n_kv=2, group=group, **sizes))
    case = causal(make_case(n_rows=[2100, 145], n_kv=1, q_len=group, **sizes))
    check_on_a_gpu(case)
    case.visible = torch.ones(2, 2100, dtype=torch.uint8)
    case.visible[0, :70:3] = 0
    check_on_a_gpu(case)
    size = block_bytes(16, d, dv, fmt)
    block = case.buffer[case.table[0, 0, -1] :][:size]  # of row 2099, seen by the last query
    v_rows = block.view(case_dtype(case))[-16 * (dv or d) :].view(16, -1)
    v_rows[2099 % 16, 5] = torch.nan
    o, _ = check_on_a_gpu(case)
    assert o[0, 0, :-1].isfinite().all()
    assert o[0, 0, -1, 5].isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize("d", [64, 128])
def test_not_finite_in_whole_blocks_on_a_gpu(fmt: str, d: int) -> None:
    """Of V, seen by the last two of three queries."""
    case = causal(
        make_case(n_rows=[20], q_len=3, d=d, n_kv=1, block_rows=128, fmt=fmt, gap_bytes=0)
    )
    rows = case.buffer.view(case_dtype(case)).view(2, 128, d)
    for value in (torch.nan, torch.inf, -torch.inf):
        rows[1, 18, 5] = value
        o, _ = check_on_a_gpu(case)
        assert o[0, 0, :, 5].isfinite().tolist() == [True, False, False]
