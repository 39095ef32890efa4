"""Blocks of rows: where every value lies, what alignment promises, and how far int8 may be from
what was packed."""

from __future__ import annotations

import struct

import pytest
import torch

from espnx import errors
from espnx.device.row_layout import PAGE_BYTES, RowLayout, format_of

FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WIDTHS = [8, 24, 40, 64, 96, 128, 136, 256, 1032]
U = 2.0**-24  # unit roundoff of fp32


def rows(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def counts(layout: RowLayout) -> list[int]:
    """Tokens around everything that matters."""
    one = layout.block_rows
    return sorted({1, 2, one - 1, one, one + 1, 2 * one, 3 * one - 1} - {0})


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("fmt", FLOATS)
def test_block_size(fmt: str, d: int) -> None:
    """K rows are whole pages, and no smaller number of tokens would do."""
    item = FLOATS[fmt].itemsize
    layout = RowLayout(fmt, d, 64)
    assert layout.block_rows * d * item % PAGE_BYTES == 0
    assert not [n for n in range(1, layout.block_rows) if n * d * item % PAGE_BYTES == 0]
    assert layout.block_bytes % PAGE_BYTES == 0
    assert 0 <= layout.block_bytes - layout.block_rows * (d + 64) * item < PAGE_BYTES
    assert layout.v_offset_bytes == layout.block_rows * d * item
    assert layout.row_bytes == (d + 64) * item


@pytest.mark.parametrize("least", [1, 2, 17, 100, 1000])
@pytest.mark.parametrize("fmt", [*FLOATS, "int8"])
def test_least_rows(fmt: str, least: int) -> None:
    """A multiple of the smallest block, no more than is needed."""
    small, layout = RowLayout(fmt, 40, 24), RowLayout(fmt, 40, 24, least_rows=least)
    assert layout.block_rows >= least
    assert layout.block_bytes % PAGE_BYTES == 0
    if fmt == "int8":
        assert layout.block_rows == max(least, small.block_rows)
    else:
        assert layout.block_rows % small.block_rows == 0
        assert layout.block_rows - least < small.block_rows


@pytest.mark.parametrize("d", WIDTHS)
def test_int8_blocks_are_full_of_rows(d: int) -> None:
    layout = RowLayout("int8", d, d)
    assert layout.block_bytes % PAGE_BYTES == 0
    assert layout.block_rows == 1024 or layout.block_rows * 2 * d >= 0.9 * layout.block_bytes
    parts = [layout.k_offset_bytes, layout.v_scale_offset_bytes, layout.v_offset_bytes]
    assert parts == [4 * d, 4 * d + layout.block_rows * d, 4 * d + layout.block_rows * (d + 4)]
    assert layout.block_bytes >= parts[-1] + layout.block_rows * d


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("fmt", FLOATS)
def test_x_rows(fmt: str, d: int) -> None:
    layout = RowLayout(fmt, d, d, is_shared=True)
    item = FLOATS[fmt].itemsize
    assert layout.block_rows >= 16
    assert layout.block_bytes == layout.block_rows * d * item, (
        "X rows are whole pages and nothing else"
    )
    assert (layout.v_offset_bytes, layout.row_bytes) == (0, d * item)
    for n in counts(layout):
        x = rows(2, n, d, seed=n)
        packed = layout.pack(x, None)
        k, v = layout.unpack(packed, n)
        assert torch.equal(k, x.to(FLOATS[fmt]))
        assert torch.equal(v, k)
        flat = packed.view(2, -1)
        assert (
            flat[:, : n * d * item].contiguous().numpy().tobytes()
            == x.to(FLOATS[fmt]).contiguous().view(torch.uint8).numpy().tobytes()
        )
        assert not flat[:, n * d * item :].any()


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (24, 64), (40, 136), (128, 128), (256, 8)])
@pytest.mark.parametrize("fmt", FLOATS)
def test_floats_come_back(fmt: str, d: int, dv: int) -> None:
    """Bit for bit, NaN and infinities too; a longer dtype is rounded once."""
    layout = RowLayout(fmt, d, dv)
    for n in counts(layout):
        k, v = rows(2, 3, n, d, seed=n), rows(2, 3, n, dv, seed=n + 1)
        k[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
        packed = layout.pack(k, v)
        assert packed.shape == (2, 3, layout.blocks(n), layout.block_bytes)
        assert packed.dtype == torch.uint8
        for got, wanted in zip(layout.unpack(packed, n), (k, v), strict=True):
            assert got.dtype == FLOATS[fmt]
            assert torch.equal(
                got.contiguous().view(torch.uint8),
                wanted.to(FLOATS[fmt]).contiguous().view(torch.uint8),
            )


@pytest.mark.parametrize("fmt", FLOATS)
def test_every_byte_of_a_block(fmt: str) -> None:
    """Token t's K row at t K rows from the start, its V row at t V rows from `v_offset_bytes`,
    zeros elsewhere, in dirty memory too."""
    layout = RowLayout(fmt, 24, 40)
    n, dtype = layout.block_rows + 3, FLOATS[fmt]
    k, v = rows(n, 24, dtype=dtype), rows(n, 40, seed=1, dtype=dtype)
    wanted = torch.zeros(2, layout.block_bytes, dtype=torch.uint8)
    for token in range(n):
        block, at = divmod(token, layout.block_rows)
        for row, offset in ((k[token], 0), (v[token], layout.v_offset_bytes)):
            size = len(row) * dtype.itemsize
            wanted[block, offset + at * size : offset + (at + 1) * size] = row.view(torch.uint8)
    assert torch.equal(layout.pack(k, v), wanted)
    dirty = torch.full((2, layout.block_bytes), 0xA5, dtype=torch.uint8)
    assert layout.pack(k, v, dirty) is dirty
    assert torch.equal(dirty, wanted)


def test_rows_that_are_not_contiguous() -> None:
    layout = RowLayout("fp32", 16, 16)
    n = layout.block_rows + 1
    k, v = rows(1, n, 4, 16).transpose(1, 2), rows(1, 4, 16, n, seed=1).transpose(-1, -2)
    assert torch.equal(layout.pack(k, v), layout.pack(k.contiguous(), v.contiguous()))


@pytest.mark.parametrize("fmt", [*FLOATS, "int8"])
def test_no_rows(fmt: str) -> None:
    layout = RowLayout(fmt, 16, 24)
    assert layout.blocks(0) == 0
    k, v = layout.unpack(torch.empty(2, 0, layout.block_bytes, dtype=torch.uint8), 0)
    assert (k.shape, v.shape) == ((2, 0, 16), (2, 0, 24))


def assert_within_half_a_step(
    got: torch.Tensor, wanted: torch.Tensor, largest: torch.Tensor
) -> None:
    """A code is off by half a step and by what x / scale, of at most 127 steps, loses to rounding:
    U each in the scale, in the quotient and in the product that undoes it."""
    step = (largest.double() / 127).clamp_min(torch.finfo(torch.float32).tiny) * (1 + 2 * U)
    bound = step * (0.5 + 127 * 4 * U)
    assert got.dtype == torch.float32
    assert bool(((got.double() - wanted.double()).abs() <= bound).all())


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (40, 24), (64, 128), (136, 8)])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_int8_error(d: int, dv: int, source: torch.dtype) -> None:
    """K's step is its channel's largest value in the block over 127, V's its token's: large values
    elsewhere cost nothing."""
    layout = RowLayout("int8", d, dv)
    one = layout.block_rows
    for n in counts(layout):
        k, v = rows(2, n, d, seed=n, dtype=source), rows(2, n, dv, seed=n + 1, dtype=source)
        k[..., 0] *= 1000
        v[:, 0] *= 1000
        k[:, :, -1] = 0
        got_k, got_v = layout.unpack(layout.pack(k, v), n)
        for begin in range(0, n, one):
            part = slice(begin, min(begin + one, n))
            assert_within_half_a_step(
                got_k[:, part], k[:, part], k[:, part].float().abs().amax(dim=1, keepdim=True)
            )
        assert_within_half_a_step(got_v, v, v.float().abs().amax(dim=-1, keepdim=True))
        assert not got_k[..., -1].any()


@pytest.mark.parametrize("size", [0.0, 1e-45, 2.0**-126, 1e-30, 3e38])
def test_int8_of_the_smallest_and_largest(size: float) -> None:
    layout = RowLayout("int8", 8, 8)
    k = torch.full((5, 8), size)
    k[::2] *= -1
    got_k, got_v = layout.unpack(layout.pack(k, k), 5)
    for got in (got_k, got_v):
        assert_within_half_a_step(got, k, k.abs().max())


def test_every_byte_of_an_int8_block() -> None:
    layout = RowLayout("int8", 8, 16)
    n = 3
    k, v = torch.zeros(n, 8), torch.zeros(n, 16)
    k[0, 1], k[1, 1], k[2, 2] = 254.0, -127.0, 12.7
    v[1, 3], v[1, 4] = -63.5, 6.0
    block = (
        layout.pack(k, v, torch.full((1, layout.block_bytes), 0xA5, dtype=torch.uint8))[0]
        .numpy()
        .tobytes()
    )
    tiny = torch.finfo(torch.float32).tiny

    def floats(offset: int, count: int) -> list[float]:
        return list(struct.unpack_from(f"<{count}f", block, offset))

    assert floats(0, 8) == pytest.approx([tiny, 2.0, 0.1, *[tiny] * 5], rel=2 * U)
    v_scales = [tiny, 0.5, *[tiny] * (layout.block_rows - 2)]
    assert floats(layout.v_scale_offset_bytes, layout.block_rows) == pytest.approx(
        v_scales, rel=2 * U
    )
    codes = {8 * 0 + 1: 127, 8 * 1 + 1: -64, 8 * 2 + 2: 127}  # -63.5 steps: ties go to even
    assert struct.unpack_from(f"{n * 8}b", block, layout.k_offset_bytes) == tuple(
        codes.get(i, 0) for i in range(n * 8)
    )
    codes = {16 * 1 + 3: -127, 16 * 1 + 4: 12}
    assert struct.unpack_from(f"{n * 16}b", block, layout.v_offset_bytes) == tuple(
        codes.get(i, 0) for i in range(n * 16)
    )
    assert not any(block[layout.k_offset_bytes + n * 8 : layout.v_scale_offset_bytes])
    assert not any(block[layout.v_offset_bytes + n * 16 :])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("fp8", 64, 64), "row format"),
        (("fp16", 0, 64), "d, the length"),
        (("fp16", 63, 64), "d, the length"),
        (("fp16", 4, 64), "d, the length"),
        (("fp16", -8, 64), "d, the length"),
        (("fp16", 64, 12), "dv, the length"),
        (("int8", 64, 64, True), "X rows"),
        (("fp16", 64, 128, True), "X rows"),
    ],
)
def test_refused(arguments: tuple[str, int, int], match: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=match):
        RowLayout(*arguments)


def test_formats_of_dtypes() -> None:
    assert {name: format_of(dtype) for name, dtype in FLOATS.items()} == {
        name: name for name in FLOATS
    }
    for dtype in (torch.int8, torch.float64, torch.int64):
        with pytest.raises(errors.InvalidInputError, match="dtype of K and V"):
            format_of(dtype)
