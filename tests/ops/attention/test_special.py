"""Attention on the CPU where something is hidden, is not finite, or is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from espnx.errors import InvalidInputError
from espnx.ops._native import load_ops
from espnx.ops.attention import (
    ROW_FORMATS,
    Queries,
    RowsInMemory,
    attend_rows,
    attend_rows_reference,
    merge,
)
from espnx.ops.attention.reference import stored_rows
from tests.ops.attention import not_finite
from tests.ops.attention.far_apart import check_values_far_apart, check_weights_far_apart
from tests.ops.attention.scales import check_scale, check_scales_far_apart
from tests.ops.attention.test_attention import (
    FORMATS,
    LEVELS,
    Case,
    assert_close,
    causal,
    make_case,
)


@LEVELS
@FORMATS
@pytest.mark.parametrize("q_len", [1, 20])
def test_padding_is_hidden(cpu_level: str, fmt: str, q_len: int) -> None:
    case = make_case(n_rows=[300, 300, 40, 300], q_len=q_len, d=32, fmt=fmt)
    case.visible = torch.ones(4, 311, dtype=torch.uint8)
    case.visible[0, :140] = 0  # the first tile whole, and part of the second
    case.visible[1, ::3] = 0
    case.visible[2] = 0  # all
    case.visible[3, 299] = 7  # not 0 is visible
    o, lse = case.run()
    assert_close(case, (o, lse))
    assert bool((o[2] == 0).all())
    assert bool((lse[2] == -torch.inf).all())


@LEVELS
def test_queries_that_see_nothing(cpu_level: str) -> None:
    for q_len in (4, 20):
        case = make_case(n_rows=[140, 0], q_len=q_len, d=16)
        case.last_position = torch.arange(q_len).repeat(2, 1) - 3
        o, lse = case.run()
        assert_close(case, (o, lse))
        assert bool((o[:, :, :3] == 0).all())
        assert bool((lse[:, :, :3] == -torch.inf).all())
        assert bool(lse[0, :, 3:].isfinite().all())


def place_of(case: Case, row: int, *, of_v: bool) -> slice:
    """The bytes of one K or V row of the first head of the first sequence, which is not int8."""
    item = ROW_FORMATS[case.format].itemsize
    d = case.query.shape[-1]
    begin = int(case.table[0, 0, row // case.block_rows]) + item * (
        case.block_rows * d if of_v else 0
    )
    width = item * (case.dv if of_v else d)
    return slice(begin + row % case.block_rows * width, begin + (row % case.block_rows + 1) * width)


@LEVELS
@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("q_len", [3, 20])
@pytest.mark.parametrize("of_v", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite(cpu_level: str, fmt: str, q_len: int, of_v: bool, value: float) -> None:
    """The queries that see the row are changed as in plain PyTorch; the others, of the same tile,
    not at all."""
    case = causal(make_case(n_rows=[150], q_len=q_len, d=24, n_kv=1, fmt=fmt))
    row = 150 - q_len + 2
    before = case.run()
    bad = torch.ones(case.dv if of_v else 24)
    bad[5] = value
    case.buffer[place_of(case, row, of_v=of_v)] = bad.to(ROW_FORMATS[fmt]).view(torch.uint8)
    o, lse = case.run()
    assert torch.equal(o[:, :, :2], before[0][:, :, :2])
    assert torch.equal(lse[:, :, :2], before[1][:, :, :2])
    expected_o, expected_lse = case.reference()
    for a, b in ((o, expected_o), (lse, expected_lse)):
        # Which are NaN and infinite: that the rest is close is seen elsewhere.
        assert torch.allclose(a.double(), b, rtol=0, atol=1e-2, equal_nan=True)
    if math.isnan(value):
        assert bool(o[:, :, 2:, 5].isnan().all())
        assert of_v or bool(lse[:, :, 2:].isnan().all())


@pytest.mark.sampled(2)
@LEVELS
@FORMATS
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("group", [1, 7])
def test_every_value_that_is_not_finite(cpu_level: str, fmt: str, threads: int, group: int) -> None:
    """By few queries and by many, over rows in one tile and in several, of which threads merge
    pieces."""
    for dv in (40, 0) if fmt != "int8" else (32,):
        for n_rows in (37, 300) if threads == 1 else (300,):
            not_finite.check(
                lambda case: case.run(threads), fmt, 32, dv, n_rows=n_rows, group=group
            )


@FORMATS
def test_every_value_that_is_not_finite_in_the_reference(fmt: str) -> None:
    not_finite.check(Case.reference, fmt, 32, 32)


@pytest.mark.parametrize("attend", [attend_rows, attend_rows_reference])
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_every_value_that_is_not_finite_of_rows_in_memory(attend: Any, fmt: str) -> None:
    def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        assert case.last_position is not None
        n, d = int(case.n_rows[0]), case.query.shape[-1]
        kind = (n, case.block_rows, d, case.dv, fmt, ROW_FORMATS[fmt])
        rows = [stored_rows(case.buffer, each[0].tolist(), *kind) for each in case.table]
        k, v = (torch.stack(each)[:, None] for each in zip(*rows, strict=True))
        last, visible = case.last_position[0], case.visible
        look = Queries(case.query * d**-0.5, v.shape[-1], last_position=last, visible=visible)
        found: tuple[torch.Tensor, torch.Tensor] = attend(look, RowsInMemory(k, v, 0, n, 0))
        return found

    for dv in (40, 0):
        not_finite.check(run, fmt, 24, dv)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dv", [24, 0])
def test_as_the_framework_has_it(dv: int) -> None:
    """The table is no invention: which results are finite, infinite and NaN in fp32. But where all
    scores are -inf, the framework has V's infinities times 0."""
    names = [name for name, (_, kinds, _) in not_finite.ROWS.items() if kinds != "0000"]
    _, values = not_finite.make_case("fp32", 24, dv, n_rows=37, block_rows=16, names=names)
    seen = torch.arange(37) != not_finite.HIDDEN
    for name, each in zip(names, values, strict=True):
        query, k, v = (rows[None, None] for rows in (each.q[-1:], each.k[seen], each.v[seen]))
        with sdpa_kernel(SDPBackend.MATH):
            o = F.scaled_dot_product_attention(query, k, v)[0, 0, 0].double().numpy()
        kinds = not_finite.ROWS[name][1 if dv else 2]
        found = not_finite.kinds_of(o)
        at, after = not_finite.AT, not_finite.NEXT
        assert (found[at], found[after], *{*found[:at], *found[after + 1 :]}) == tuple(kinds[:3])


@LEVELS
@pytest.mark.parametrize("of_v", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scales_that_are_not_finite(cpu_level: str, value: float, of_v: bool) -> None:
    check_scale(Case.run, value, of_v=of_v)


@LEVELS
def test_scales_far_apart(cpu_level: str) -> None:
    check_scales_far_apart(Case.run, 1)


@LEVELS
@FORMATS
@pytest.mark.parametrize("q_len", [1, 20])
def test_hidden_rows_may_hold_anything(cpu_level: str, fmt: str, q_len: int) -> None:
    """Padding between and behind visible rows: bytes of 0xFF are NaN in every format that has
    one."""
    case = make_case(n_rows=[40], q_len=q_len, d=24, n_kv=1, fmt=fmt)
    case.visible = torch.ones(1, 40, dtype=torch.uint8)
    case.visible[0, 3::4] = 0
    before = case.run()
    if fmt == "int8":
        scales = int(case.table[0, 0, 0]) + 4 * 24 + 16 * 24
        for row in range(3, 16, 4):
            case.buffer[scales + 4 * row : scales + 4 * row + 4] = 0xFF
    else:
        for row in range(3, 40, 4):
            case.buffer[place_of(case, row, of_v=False)] = case.buffer[
                place_of(case, row, of_v=True)
            ] = 0xFF
    after = case.run()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_wrong_arguments() -> None:
    case = make_case(n_rows=[20, 33], group=2)
    for change, match in (
        ({"format": "bit1"}, "format"),
        ({"block_rows": 0}, "block_rows"),
        ({"dv": 12}, "dv"),
        ({"dv": 16392}, "dv"),
        ({"format": "int8", "dv": 0}, "X rows"),
        ({"query": case.query[..., :60]}, "attention d"),
        ({"query": case.query.double()}, "query"),
        ({"query": case.query[0]}, "query"),
        ({"query": case.query[:, :3]}, "heads"),
        ({"buffer": case.buffer[::2]}, "buffer"),
        ({"buffer": case.buffer.view(torch.int8)}, "buffer"),
        ({"table": case.table.int()}, "block_offset_bytes"),
        ({"table": case.table[:1]}, "block_offset_bytes"),
        ({"table": case.table[:, :0]}, "heads"),
        ({"n_rows": case.n_rows[:1]}, "n_rows"),
        ({"n_rows": torch.tensor([20, 49])}, "n_rows"),
        ({"n_rows": torch.tensor([-1, 3])}, "n_rows"),
        ({"visible": torch.ones(2, 32, dtype=torch.uint8)}, "n_rows"),
        ({"visible": torch.ones(1, 40, dtype=torch.uint8)}, "visible"),
        ({"visible": torch.ones(2, 40)}, "visible"),
        ({"last_position": torch.ones(2, 2, dtype=torch.int64)}, "last_position"),
        ({"last_position": torch.ones(2, 1)}, "last_position"),
    ):
        wrong = Case(**{**vars(case), **change})
        with pytest.raises(InvalidInputError, match=match):
            wrong.run()
        with pytest.raises(InvalidInputError, match=match):
            wrong.reference()
    with pytest.raises(InvalidInputError, match="threads"):
        case.run(0)
    with pytest.raises(InvalidInputError, match="merge"):
        merge(torch.zeros(2, 8), torch.zeros(2), torch.zeros(2, 8), torch.zeros(1))


def test_blocks_lie_inside_the_buffer() -> None:
    """To the byte, and only those that hold rows."""
    case = make_case(n_rows=[20, 33], gap_bytes=0)
    last = int(case.table.max())
    case.table[1, 1, 2] = last  # needed: the third block of 16 of a sequence of 33 rows
    case.run()
    case.table[0, :, 2] = 1 << 62  # not needed by 20 rows
    case.run()
    for offset in (last + 1, -1, 1 << 62, -(1 << 63)):
        case.table[1, 1, 2] = offset
        for call in (case.run, case.reference):
            with pytest.raises(InvalidInputError, match="outside the buffer") as caught:
                call()
            assert str(caught.value.got).startswith(
                f"block 2 of sequence 1, head 1 (offset_bytes {offset}, "
            )


def test_no_copy_of_the_buffer_and_one_kv_head_for_all() -> None:
    """A table may be expanded: every sequence looks at the same blocks (a shared prefix)."""
    case = make_case(n_rows=[48], n_kv=1, group=4, q_len=2)
    shared = Case(
        **{
            **vars(case),
            "query": case.query.expand(3, -1, -1, -1),
            "table": case.table.expand(3, -1, -1),
        }
    )
    shared.n_rows = case.n_rows.expand(3)
    o, lse = shared.run()
    assert torch.equal(o[0], o[2])
    assert torch.equal(o[:1], case.run()[0])
    assert torch.equal(lse[:1], case.run()[1])


@LEVELS
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_values_far_apart(cpu_level: str, fmt: str) -> None:
    """Also weights below fp32's normal range, of values that make something of them."""
    check_values_far_apart(Case.run, fmt, 64, 1)
    check_weights_far_apart(Case.run, fmt, 64, 1, 25.0, 1e4)
    check_weights_far_apart(Case.run, fmt, 64, 1, 88.0, 1e30)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_opcheck(fmt: str) -> None:
    load_ops()
    case = make_case(n_rows=[20, 33], group=2, fmt=fmt, d=16, dv=24)
    required = (*case.args, case.block_rows, fmt, 0.25, case.dv)
    torch.library.opcheck(torch.ops.espnx.attention.default, required)
    visible, last = torch.ones(2, 33, dtype=torch.uint8), torch.tensor([[3], [-1]])
    torch.library.opcheck(torch.ops.espnx.attention.default, (*required, visible, last, 2))


def test_shapes_without_data() -> None:
    load_ops()
    meta = torch.device("meta")
    table = torch.empty(2, 4, 9, dtype=torch.int64, device=meta)
    query = torch.empty(2, 8, 5, 64, device=meta, dtype=torch.bfloat16)
    buffer = torch.empty(10**15, dtype=torch.uint8, device=meta)
    for dv, expected in ((40, 40), (0, 64)):
        o, lse = torch.ops.espnx.attention(
            query, buffer, table, table[:, 0, 0], 32, "fp16", 1.0, dv
        )
        assert (o.shape, lse.shape) == ((2, 8, 5, expected), (2, 8, 5))
        assert o.dtype == lse.dtype == torch.float32
    assert torch._C._dispatch_has_kernel_for_dispatch_key("espnx::attention", "CUDA")
