"""csrc/cuda/attention.cu as nvcc compiles it for sm_90, executed, against the reference in fp64
within the bounds of docs/tolerances.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from espnx.errors import InvalidInputError
from espnx.ops import device_code as code
from espnx.ops.attention import by_slices, cuda
from espnx.ops.attention.by_slices import plan
from espnx.ops.attention.checks import BlocksFound
from tests.ops.attention import not_finite
from tests.ops.attention.far_apart import check_values_far_apart, check_weights_far_apart
from tests.ops.attention.ruled import RULES, check_rules
from tests.ops.attention.test_attention import Case, assert_close, causal, make_case
from tests.ops.attention.test_kernel import PRECISION, case_dtype, run
from tests.ptx.nvcc import Launcher, needs_nvcc
from tests.ptx.program import Fault
from tests.ptx.sparse import BEYOND, moved
from tests.sweeps import some

pytestmark = [needs_nvcc, pytest.mark.usefixtures("launch")]
FORMATS = pytest.mark.parametrize("fmt", ["fp16", "bf16"])
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: Lengths of rows that are both, and rows of a block: a warp has 64, 96 and 128 values of them, and
#: the last one 8 to 40, or all of its own.
BOTH = ((136, 7), (520, 16), (1000, 128))
MORE_BOTH = ((256, 16), (328, 1), (576, 5), (768, 32), (1024, 16))
SWEPT = partial(pytest.param, marks=pytest.mark.sweep)
#: Lengths of K and V rows, of which either may be the longer.
APART = ((264, 8), (8, 200), (200, 328), (576, 512))


@pytest.fixture
def launcher(device_code: Callable[..., Any]) -> Launcher:
    found: Launcher = device_code()
    return found


def check(
    launcher: Launcher, case: Case, n_splits: int | None = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel that is meant."""
    before = len(launcher.launches)
    found = run(case, n_splits)
    _, heads, q_len, d = case.query.shape
    meant = plan(heads // case.table.shape[1] * q_len, d, case.dv, case.format)
    assert meant is not None
    assert launcher.launches[before:] == [meant.kernel]
    assert_close(case, found, **PRECISION)
    return found


@FORMATS
@pytest.mark.parametrize(("d", "block_rows"), [*BOTH, *(SWEPT(*each) for each in MORE_BOTH)])
@pytest.mark.parametrize("group", [3, 13])
def test_rows_that_are_both(
    launcher: Launcher, fmt: str, d: int, group: int, block_rows: int
) -> None:
    """By every kernel: sequences of no row, one, and several tiles, in parts."""
    sizes: dict[str, Any] = {"n_kv": 1, "group": group, "block_rows": block_rows, "gap_bytes": 16}
    check(launcher, make_case(n_rows=[0, 1, 70], d=d, dv=0, fmt=fmt, **sizes), 2)


@FORMATS
def test_values_far_apart(launcher: Launcher, fmt: str) -> None:
    check_values_far_apart(run, fmt, 160, 1, **PRECISION)
    for gap in (15.0, 20.0, 25.0):
        check_weights_far_apart(run, fmt, 160, 1, gap, 1e4, **PRECISION)
    assert len(launcher.launches) == 4


@pytest.mark.sampled(1)
@FORMATS
@pytest.mark.parametrize(("d", "dv"), APART)
@pytest.mark.parametrize("group", [3, 9])
def test_rows_apart(launcher: Launcher, fmt: str, d: int, dv: int, group: int) -> None:
    check(
        launcher,
        make_case(n_rows=[70, 5], group=group, d=d, dv=dv, block_rows=16, fmt=fmt, gap_bytes=16),
    )


@pytest.mark.parametrize("fmt", some(["fp16", "bf16"], 1))
def test_more_queries_than_a_block_takes(launcher: Launcher, fmt: str) -> None:
    """Two KV heads of 20 queries, and a query tensor that begins at no multiple of 16 bytes."""
    case = make_case(n_rows=[40], group=20, d=264, dv=0, fmt=fmt, gap_bytes=16)
    flat = torch.cat([torch.zeros(1), case.query.flatten()])
    case.query, case.scale = flat[1:].view(case.query.shape), 1.0
    assert case.query.data_ptr() % 16
    check(launcher, case)
    # of rows that are not so long another kernel takes twice as many
    assert not cuda.is_wide(256, 256)
    assert cuda.launch_shape(20, 256, 256, fmt)["BLOCK_Q"] == 2 * by_slices.QUERIES_MAX


@pytest.mark.parametrize("fmt", some(["fp16", "bf16"], 1))
def test_masks(launcher: Launcher, fmt: str) -> None:
    case = causal(make_case(n_rows=[70, 45], q_len=12, n_kv=1, d=136, dv=0, fmt=fmt, gap_bytes=16))
    case.visible = torch.ones(2, 70, dtype=torch.uint8)
    case.visible[0, :50:3] = 0
    case.visible[1] = 0
    check(launcher, case)
    check(launcher, case, 2)


@pytest.mark.sampled(1)
@FORMATS
@pytest.mark.parametrize(("d", "dv"), [(576, 0), (320, 272)])
@pytest.mark.parametrize("names", RULES, ids="-".join)
@pytest.mark.parametrize("n", [1, 16])
def test_scores_of_models(
    monkeypatch: pytest.MonkeyPatch,
    launcher: Launcher,
    fmt: str,
    d: int,
    dv: int,
    names: tuple[str, ...],
    n: int,
) -> None:
    check_rules(monkeypatch, fmt, d, dv, n, names)
    assert launcher.launches


@FORMATS
def test_long_sums_do_not_become_too_small(launcher: Launcher, fmt: str) -> None:
    """Tensor cores cut off what they add. A sum that went on in them would lose half a last place
    for each product of 16 rows, 1e-5 of 2,048 rows."""
    sizes: dict[str, Any] = {"n_kv": 1, "group": 1, "block_rows": 2048, "gap_bytes": 0}
    case = make_case(n_rows=[2048], d=8, dv=136, fmt=fmt, **sizes)
    rows = case.buffer.view(case_dtype(case))
    rows[: 2048 * 8] *= 0.05  # weights are nearly alike
    rows[2048 * 8 :].copy_(torch.rand(2048 * 136).add(1).div(2))
    found, expected = check(launcher, case)[0].double(), case.reference()[0]
    # Products of 16 rows are short of less than as many last places of the whole as they have
    # parts, the last one of their own; what rounds to nearest is not one-sided.
    assert (found / expected - 1).mean().abs() <= 3 * 2.0**-23


@pytest.mark.sampled(1)
@FORMATS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("d", [136, 520])
def test_not_finite(launcher: Launcher, fmt: str, value: float, d: int) -> None:
    """Of V, seen by the last two of three queries; of K, seen by the last; behind the last row,
    seen by nobody."""
    case = causal(
        make_case(n_rows=[70], q_len=3, d=d, n_kv=1, group=1, fmt=fmt, block_rows=128, gap_bytes=0)
    )
    rows = case.buffer.view(case_dtype(case)).view(2, 128, d)
    rows[:, 70:] = value
    assert check(launcher, case)[0].isfinite().all()
    rows[1, 68, d - 3] = value
    o, _ = check(launcher, case)
    assert o[0, 0, :, d - 3].isfinite().tolist() == [True, False, False]
    assert o[0, 0, :, : d - 3].isfinite().all()
    rows[0, 69] = torch.nan
    assert check(launcher, case)[1][0, 0].isnan().tolist() == [False, False, True]


@pytest.mark.parametrize("fmt", some(["fp16", "bf16"], 1))
def test_not_finite_of_both(launcher: Launcher, fmt: str) -> None:
    case = causal(make_case(n_rows=[40], q_len=3, d=136, dv=0, n_kv=1, fmt=fmt, gap_bytes=0))
    rows = case.buffer.view(DTYPES[fmt]).view(-1, 16, 136)
    rows[case.table[0, 0, 2] // (16 * 136 * 2), 6, 5] = torch.nan  # row 38
    o, lse = check(launcher, case)
    assert lse[0, 0].isnan().tolist() == [False, True, True]
    assert o[0, 0, 0].isfinite().all()


@pytest.mark.parametrize(
    ("fmt", "d", "dv", "group", "names"),
    [
        ("fp16", 136, 0, 1, not_finite.BRIEF),
        ("bf16", 520, 0, 1, not_finite.BRIEF),
        ("fp16", 136, 200, 4, not_finite.BRIEF),
        *(SWEPT(fmt, d, 0, 4, None) for fmt in ("fp16", "bf16") for d in (136, 520, 776)),
        *(SWEPT(fmt, 136, 200, 1, None) for fmt in ("fp16", "bf16")),
    ],
)
def test_every_value_that_is_not_finite(
    launcher: Launcher, fmt: str, d: int, dv: int, group: int, names: list[str] | None
) -> None:
    """Of rows in two parts: also where K and V differ in length, and of few queries and many."""
    not_finite.check(lambda case: run(case, 2), fmt, d, dv, names=names, group=group)
    assert launcher.launches


def test_soft_cap_of_infinite_scores(launcher: Launcher) -> None:
    not_finite.check_soft_cap("bf16", 136, 136)
    assert launcher.launches


@FORMATS
def test_offsets_beyond_32_bits(launcher: Launcher, fmt: str) -> None:
    near = make_case(n_rows=[33], d=136, dv=0, fmt=fmt, gap_bytes=16)
    expected = check(launcher, near)
    near.buffer, near.table = moved(near.buffer), near.table + BEYOND
    assert all(torch.equal(*pair) for pair in zip(run(near, 1), expected, strict=True))


def test_blocks_that_end_beyond_the_buffer_would_be_a_fault(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(n_rows=[32], n_kv=1, d=136, dv=0, gap_bytes=0)
    monkeypatch.setattr(cuda, "look_inside", lambda *args: BlocksFound(16, 32))
    case.buffer = case.buffer[:-16].clone()
    with pytest.raises(Fault, match=r"bytes at byte .* of argument 1"):
        run(case)


@pytest.mark.parametrize(
    "given",
    [
        {"d": 136, "align_bytes": 2},
        {"d": 136, "fmt": "fp32"},
        {"d": 136, "dv": 136, "fmt": "int8"},
        {"d": 128},
        {"d": 1032},
        {"d": 1024, "dv": 8},
    ],
)
@pytest.mark.usefixtures("launcher")
def test_other_rows_have_other_kernels(given: dict[str, Any]) -> None:
    """At other addresses, of other formats, shorter, longer, and so long apart that two tiles do
    not fit."""
    rows = {"d": 136, "dv": 0, "fmt": "fp16", "align_bytes": 16}
    device = torch.device("cpu")
    assert by_slices.compiled_plan(1, **rows, device=device) is not None
    assert by_slices.compiled_plan(1, **{**rows, **given}, device=device) is None


def test_more_query_blocks_than_other_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a launch are in the grid's first dimension. Nothing is launched here."""
    grids: list[int] = []

    def launch(source: str, kernel: str, grid: int, *args: Any) -> None:
        grids.append(grid)

    case = make_case(n_rows=[16], n_kv=1, d=8, dv=264, gap_bytes=0)
    n_queries = 16 * 65536
    case.query = torch.zeros(1, 1, n_queries, 8)
    tables = (*case.args[1:], 16, 16)
    options = (case.block_rows, case.format, 1.0, case.dv)
    with pytest.raises(InvalidInputError, match=f"at most {65535 * 16} for a KV head"):
        cuda.attention_inside_triton(case.query, *tables, *options)
    monkeypatch.setattr(code, "is_there", lambda *args: True)
    monkeypatch.setattr(code, "launch", launch)
    cuda.attention_inside_triton(case.query, *tables, *options)
    assert grids == [65536]
    with pytest.raises(InvalidInputError, match="at most 2146435071 for a KV head"):
        cuda._check_grid(1, 2**31, min(cuda._HEADS_MAX * 16, cuda._ROWS_END - 1), 1)


def test_plans() -> None:
    """Every length has one: all its values have a warp, as many blocks as are meant fit, and of
    rows that are both 32 KiB are under way beside the tiles that are multiplied."""
    for fmt in by_slices.FORMATS:
        for d, dv in [(d, 0) for d in range(136, 1025, 8)] + [*APART, (256, 256), (512, 512)]:
            for n_queries in (1, 8, 9, 100):
                found = plan(n_queries, d, dv, fmt)
                assert found is not None
                assert found.queries == (8 if n_queries <= 8 else 16)
                slack = found.warps * found.slice_dims - max(d, dv)
                assert 0 <= slack < found.slice_dims
                assert found.warps * found.resident <= {64: 16, 96: 12, 128: 8}[found.slice_dims]
                assert found.resident * (found.shared_bytes + 1024) <= 227 * 1024
                assert 2 <= found.stages <= 4
                under_way = found.resident * (found.stages - 1) * 32 * 2 * d
                assert dv or under_way >= 32 * 1024
    for fmt in by_slices.FORMATS:
        assert [plan(16, d, 0, fmt)[-1] for d in (256, 576, 1024)] == [4, 2, 1]  # type: ignore[index]


def test_plans_for_less_shared_memory() -> None:
    """As an A100 has: fewer stages, fewer blocks, or none."""
    less = 164 * 1024
    assert plan(16, 576, 0, "fp16", less)[-3:] == (3, 129632, 1)  # type: ignore[index]
    assert plan(16, 1024, 0, "fp16", less)[-3:] == (2, 154720, 1)  # type: ignore[index]
    assert plan(16, 1024, 0, "bf16", less) is None


def test_without_compiled_code_there_are_other_kernels() -> None:
    assert by_slices.compiled_plan(1, 576, 0, "fp16", 16, torch.device("cpu")) is None
