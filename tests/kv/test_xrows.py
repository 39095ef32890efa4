"""X rows: projections moved to the other side of the product, or K and V made again; both against
float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.interface import SegmentView
from espnx.device.row_layout import RowLayout
from espnx.device.rows.ssd import SsdRowDevice
from espnx.kv.x_rows import Projection, Recomputer, absorb, contiguous_rows, release
from espnx.ops.attention import Queries, merge

U = 2.0**-24  # unit roundoff of fp32
UNITS = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPES = pytest.mark.parametrize("dtype", UNITS)
BIAS = pytest.mark.parametrize("has_bias", [False, True])
HIDDEN, N_KV, D, DV = 48, 2, 16, 24


def normal(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def make(
    dtype: torch.dtype = torch.float32, *, has_bias: bool = False, rotates: bool = False
) -> Projection:
    def finish(k: torch.Tensor, sequence: int, first: int) -> torch.Tensor:
        """Something that depends on where a token stands, and in which sequence."""
        angle = (first + torch.arange(k.shape[2], dtype=torch.float32))[:, None] * 0.1 + sequence
        a, b = k.float().chunk(2, dim=-1)
        return torch.cat(
            [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1
        ).to(k.dtype)

    k_weight, v_weight = (
        normal(N_KV * width, HIDDEN, seed=width).to(dtype) / HIDDEN**0.5 for width in (D, DV)
    )
    k_bias, v_bias = (
        normal(N_KV * width, seed=width + 1).to(dtype) if has_bias else None for width in (D, DV)
    )
    return Projection(k_weight, v_weight, k_bias, v_bias, N_KV, finish if rotates else None)


def plain(projection: Projection, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V float64 [KV heads, n, width] of x [n, hidden], without rotation."""
    k, v = x.double() @ projection.k_weight.double().T, x.double() @ projection.v_weight.double().T
    if projection.k_bias is not None and projection.v_bias is not None:
        k, v = k + projection.k_bias.double(), v + projection.v_bias.double()
    return tuple(rows.view(len(x), N_KV, -1).transpose(0, 1) for rows in (k, v))


@BIAS
@DTYPES
@pytest.mark.parametrize("n", [1, 7])
def test_rows(n: int, dtype: torch.dtype, has_bias: bool) -> None:
    """The linear layers', by head; X rows of another dtype are rounded first."""
    projection, x = make(dtype, has_bias=has_bias), normal(n, HIDDEN, seed=1)
    found = projection.rows(x, 0, 0)
    for got, wanted, width in zip(found, plain(projection, x.to(dtype)), (D, DV), strict=True):
        assert got.shape == (1, N_KV, n, width)
        assert got.dtype == dtype
        assert got.is_contiguous()
        # sums of 48 products of about unit size over 7, and a bias, each below 25; rounded to the
        # dtype once
        assert bool(
            (
                (got[0].double() - wanted).abs()
                <= 25 * (HIDDEN + 2) * U + 2 * UNITS[dtype] * (wanted.abs() + 1e-3)
            ).all()
        )


@pytest.mark.parametrize("width", [8, 12, 24])
@DTYPES
def test_rows_keep_every_bit(width: int, dtype: torch.dtype) -> None:
    """They are put in order by pieces of 16 bytes, or one by one where heads are none: NaNs of any
    bits, infinities and zeros of either sign come as they were."""
    n, bits = 5, torch.int32 if dtype == torch.float32 else torch.int16
    drawn = torch.randint(-(2**31), 2**31, (n, N_KV * width), generator=torch.Generator())
    rows = drawn.to(bits).view(dtype)
    rows[0, :4] = torch.tensor([torch.inf, -torch.inf, -0.0, torch.nan])
    k = rows.view(1, n, N_KV, width).transpose(1, 2)
    for each in (k, k[:, :, 1:], k[:, :, :1], k[:, :, :0]):
        got = contiguous_rows(each)
        assert got.is_contiguous()
        assert got.shape == each.shape
        assert torch.equal(got.view(bits), each.contiguous().view(bits))


def test_rows_that_cannot_be_cut_into_pieces() -> None:
    """Rows at any address, as of memory that others have made; rows with gradients keep them."""
    memory = np.zeros(4 * N_KV * 16 * 2 + 2, dtype=np.uint8)[2:]
    rows = torch.from_numpy(memory).view(torch.float16).normal_().view(1, 4, N_KV, 16)
    for each in (rows, rows.clone().requires_grad_()):
        k = each.transpose(1, 2)
        got = contiguous_rows(k)
        assert torch.equal(got, k)
        assert (got.is_contiguous(), got.requires_grad) == (True, each.requires_grad)


def test_what_finishes_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told where the tokens stand, and V is not its business."""
    calls = []

    def finish(k: torch.Tensor, sequence: int, first: int) -> torch.Tensor:
        calls.append((tuple(k.shape), sequence, first))
        return k * 2

    base, x = make(), normal(5, HIDDEN, seed=2)
    k, v = Projection(base.k_weight, base.v_weight, None, None, N_KV, finish).rows(x, 3, 100)
    plain_k, plain_v = base.rows(x, 3, 100)
    assert torch.equal(k, 2 * plain_k)
    assert torch.equal(v, plain_v)
    assert calls == [((1, N_KV, 5, D), 3, 100)]
    assert base.hidden == HIDDEN


@DTYPES
def test_check(dtype: torch.dtype) -> None:
    """The same formula in another order of additions passes; another formula does not, whichever of
    the two it is of."""
    projection, x = make(dtype, has_bias=True, rotates=True), normal(6, HIDDEN, seed=3).to(dtype)
    k, v = (rows[0] for rows in projection.rows(x, 0, 9))
    unit = torch.finfo(dtype).eps
    projection.check(x, k, v, 9)
    projection.check(x, (k.float() * (1 + unit)).to(dtype), (v.float() * (1 - unit)).to(dtype), 9)
    wrong = [
        ("K", k * 4, v, 9),
        ("K", -k, v, 9),
        ("V", k, -v, 9),
        ("K", torch.full_like(k, torch.nan), v, 9),
        ("V", k, torch.full_like(v, torch.nan), 9),
    ]
    if dtype == torch.float32:
        wrong += [("K", k * 1.001, v, 9), ("V", k, v + 0.001, 9), ("K", k, v, 10)]
    for name, wrong_k, wrong_v, first in wrong:
        with pytest.raises(errors.InvalidInputError, match=f"this model's {name} is not") as caught:
            projection.check(x, wrong_k, wrong_v, first)
        assert caught.value.fix == "x_rows=0"


@BIAS
@DTYPES
@pytest.mark.parametrize(("n_sequences", "group", "n"), [(1, 1, 1), (2, 3, 4)])
def test_absorbed(n_sequences: int, group: int, n: int, dtype: torch.dtype, has_bias: bool) -> None:
    """softmax(q (W_k x + b_k)) (W_v x + b_v) without W_k x and W_v x. Tokens that see nothing get
    zeros."""
    projection, heads, tokens, scale = make(dtype, has_bias=has_bias), N_KV * group, 20, 0.3
    q, x = (
        normal(n_sequences, heads, n, D, seed=4).to(dtype),
        normal(n_sequences, tokens, HIDDEN, seed=5).to(dtype),
    )
    moved = absorb(q, projection, scale)
    assert moved.shape == (n_sequences, 1, heads * n, HIDDEN)
    assert moved.dtype == torch.float32
    assert moved.is_contiguous()
    weights = (moved.double() @ x.double()[:, None].transpose(-1, -2)).softmax(dim=-1)
    o, lse = (weights @ x.double()[:, None]).float(), torch.zeros(n_sequences, 1, heads * n)
    lse[..., -1], o[..., -1, :] = -torch.inf, 0.0
    found = release(o, lse, projection, heads)
    assert found.shape == (n_sequences, heads, n, DV)
    assert not found[:, -1, -1].any(), "the last query of the last head has seen nothing"
    unit = UNITS[dtype]
    for i in range(n_sequences):
        k, v = (rows.repeat_interleave(group, dim=0) for rows in plain(projection, x[i]))
        query = q[i].double() * scale
        probabilities = (query @ k.transpose(-1, -2)).softmax(dim=-1)
        # |W_v| |x| and the bias are below 5 in places
        wanted, size = probabilities @ v, probabilities @ v.abs() + 5.0
        # scores of sums of |q| |W_k| |x|; q W_k is rounded to the dtype, what comes out of W_v as
        # well, and so is what goes in
        largest = float(
            (
                query.abs()
                @ projection.k_weight.double()
                .abs()
                .view(N_KV, D, HIDDEN)
                .repeat_interleave(group, 0)
            )
            .sum(-1)
            .max()
        )
        gamma = (D + HIDDEN + tokens + 16) * U
        relative = (
            torch.expm1(torch.tensor(2 * (gamma + unit) * largest * float(x.double().abs().max())))
            + 2 * gamma
            + 4 * unit
        )
        apart = (found[i].double() - wanted).abs()
        apart[-1, -1] = 0
        assert bool((apart <= relative * size).all()), float((apart / size).max())


def test_absorbing_knows_its_heads() -> None:
    """Each query head looks through the weights of its own KV head: weights of the other are NaN,
    and none comes through."""
    projection = make()
    projection.k_weight[D:], projection.v_weight[DV:] = torch.nan, torch.nan
    moved = absorb(normal(1, 4, 3, D, seed=6), projection, 1.0)
    assert moved[0, 0, :6].isfinite().all()
    assert moved[0, 0, 6:].isnan().all()
    out = release(normal(1, 1, 12, HIDDEN, seed=7), torch.zeros(1, 1, 12), projection, 4)
    assert out[0, :2].isfinite().all()
    assert out[0, 2:].isnan().all()


@BIAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed(folder: Path, dtype: torch.dtype, has_bias: bool) -> None:
    """Stored X rows as a device shows them, and some from memory, with every mask: what K and V of
    all of them give at once."""
    layout = RowLayout(
        {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype], HIDDEN, HIDDEN, is_shared=True
    )
    projection, n_sequences, stored, more = (
        make(dtype, has_bias=has_bias, rotates=True),
        3,
        2 * layout.block_rows + 5,
        4,
    )
    x = normal(n_sequences, stored + more, HIDDEN, seed=8).to(dtype)
    q = normal(n_sequences, N_KV, 2, D, seed=9) * D**-0.5
    visible = (
        (torch.arange(n_sequences * (stored + more)) % 5 != 2).to(torch.uint8).view(n_sequences, -1)
    )
    look = Queries(
        q, DV, torch.tensor([stored + more, stored // 2]), torch.tensor([0, 7, stored + 1]), visible
    )
    device = SsdRowDevice(folder)
    try:
        half = layout.block_rows
        parts = [(0, x[:, None, :half]), (half, x[:, None, half:stored])]
        uses = [
            SegmentView(segment, i, rows.shape[2], first)
            for first, rows in parts
            for i, segment in enumerate(device.put(layout, rows, None, range(1)))
        ]
        again = Recomputer(look, projection, layout, 1)
        device.visit(device.ahead(layout, uses), again.show)
        for i in range(n_sequences):
            again.add(i, x[i, stored:], stored)
    finally:
        device.close()
    positions = torch.arange(stored + more)
    for i in range(n_sequences):
        # rounded to the dtype, here as there
        k, v = (rows[0].double() for rows in projection.rows(x[i], i, 0))
        seen = (
            (positions <= look.last_position[:, None])
            & (positions >= look.first_visible[i])
            & (visible[i] != 0)
        )  # type: ignore[index]
        scores = (q[i].double() @ k.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
        weights = scores.softmax(dim=-1).nan_to_num(0.0)
        # The rows may come out of the linear layers with another last bit, for another number of
        # them.
        unit, gamma = 2 * UNITS[dtype] + (HIDDEN + 4) * U * 4, (D + stored + more + 64) * U
        largest = (q[i].double().abs() @ (k.abs() + 1).transpose(-1, -2)).amax(dim=-1)
        relative = torch.expm1(2 * (gamma + unit) * largest) + 2 * gamma + unit
        bound = relative[..., None] * (weights @ (v.abs() + 1)) + 1e-30
        assert bool(((again.over.o[i].double() - weights @ v).abs() <= bound).all())
        sums = scores.logsumexp(dim=-1)
        assert bool(
            (
                (again.over.lse[i] == sums)
                | ((again.over.lse[i] - sums).abs() <= relative + 2 * U * (1 + sums.abs()))
            ).all()
        )
    assert bool((again.over.lse[2, :, 1] == -torch.inf).all()), (
        "nothing to see before its first visible position"
    )


def test_pieces_that_follow_one_another_are_recomputed_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows generated bit by bit, in an order of their own on the disk and with a gap: K and
    V are made once for each stretch of tokens, and are those of the rows in one piece."""
    layout, n_sequences, n = RowLayout("fp32", HIDDEN, HIDDEN, is_shared=True), 2, 10
    size, projection = layout.block_rows, make(rotates=True)
    x = normal(n_sequences, n * size, HIDDEN, seed=1)
    made: list[tuple[int, int, int]] = []
    rows = Projection.rows

    def counted(self: Projection, x: torch.Tensor, sequence: int, first: int) -> object:
        made.append((sequence, first, len(x)))
        return rows(self, x, sequence, first)

    monkeypatch.setattr(Projection, "rows", counted)
    look = Queries(normal(n_sequences, N_KV, 3, D, seed=2), DV)
    device = SsdRowDevice(folder)
    try:
        uses = []
        for part in (3, 0, 1, 2, 9, 6, 7, 8, 5):  # without 4
            first = part * size
            segments = device.put(layout, x[:, None, first : first + size], None, range(1))
            uses += [SegmentView(each, i, size, first) for i, each in enumerate(segments)]
        together = Recomputer(look, projection, layout, 1)
        device.visit(device.ahead(layout, uses), together.show)
    finally:
        device.close()
    assert sorted(made) == [
        (i, first * size, parts * size)
        for i in range(n_sequences)
        for first, parts in ((0, 4), (5, 5))
    ]
    alone = Recomputer(look, projection, layout, 1)
    for i in range(n_sequences):
        for part in (0, 1, 2, 3, 5, 6, 7, 8, 9):
            alone.add(i, x[i, part * size : (part + 1) * size], part * size)
    assert torch.allclose(together.over.o, alone.over.o, rtol=1e-5, atol=1e-5)
    assert torch.allclose(together.over.lse, alone.over.lse, rtol=1e-5, atol=1e-5)


def test_recomputing_nothing() -> None:
    """Is the neutral element of merging."""
    layout = RowLayout("fp32", HIDDEN, HIDDEN, is_shared=True)
    again = Recomputer(Queries(normal(2, N_KV, 3, D, seed=1), DV), make(), layout, 1)
    o, lse = normal(2, N_KV, 3, DV, seed=2), normal(2, N_KV, 3, seed=3)
    merged, sums = merge(o, lse, again.over.o, again.over.lse)
    assert torch.equal(merged, o)
    assert torch.equal(sums, lse)
