"""Attention of a chunk over itself, against plain float64 attention: sizes around 256 queries, padding anywhere, a log-sum-exp or none."""

from __future__ import annotations

import pytest
import torch

from espnx.kv.chunk import chunk_attention

U = 2.0**-24  # unit roundoff of fp32
UNITS = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPES = pytest.mark.parametrize("dtype", UNITS)
LSE = pytest.mark.parametrize("wants_lse", [False, True])


def draw(
    n: int, *, n_sequences: int = 2, n_kv: int = 2, group: int = 1, d: int = 16, dv: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(n)
    sizes = ((n_kv * group, d), (n_kv, d), (n_kv, d if dv is None else dv))
    q, k, v = (torch.randn(n_sequences, heads, n, width, generator=rng).to(dtype) for heads, width in sizes)
    return q, k, v


def assert_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, *, wants_lse: bool) -> None:
    """fp32 sums of d products and of n weights, on both sides of a division. Fused kernels for a shorter dtype round weights and results to
    it, and make exponentials no more exact than that."""
    n_sequences, heads, n, d = q.shape
    dtype, scale = q.dtype, d**-0.5
    o, lse = chunk_attention(q, k, v, scale, hidden, wants_lse)
    assert o.shape == (*q.shape[:3], v.shape[-1])
    assert o.dtype == dtype
    assert lse is not None or not wants_lse
    group = heads // k.shape[1]
    keys, values = (rows.double().repeat_interleave(group, dim=1) for rows in (k, v))
    seen = torch.ones(n, n, dtype=torch.bool).tril().expand(n_sequences, 1, n, n)
    if hidden is not None:
        seen = seen & ~hidden[:, None, None, :]
        keys, values = (rows.masked_fill(hidden[:, None, :, None], 0.0) for rows in (keys, values))
    scores = (q.double() * scale @ keys.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(dim=-1).nan_to_num(0.0)
    largest = (q.double().abs() * scale @ keys.abs().transpose(-1, -2)).mul(seen).amax(dim=-1) if n else q.double().sum(-1)
    gamma, unit = (d + n + 64) * U / (1 - (d + n + 64) * U), UNITS[dtype]
    relative = torch.expm1(2 * gamma * largest) + 2 * gamma
    bound = (relative + 4 * unit)[..., None] * (weights @ values.abs()) + (unit > 0) * 2.0**-24 + 1e-30
    apart = (o.double() - weights @ values).abs()
    assert bool((apart <= bound).all()), f"{float((apart / bound).nan_to_num(nan=1e9).max()):.3g} times the bound"
    if wants_lse:
        assert lse is not None
        assert lse.dtype == torch.float32
        assert lse.shape == q.shape[:3]
        wanted = scores.logsumexp(dim=-1)
        assert bool(((lse == wanted) | ((lse - wanted).abs() <= relative + unit + 2 * U * (1 + wanted.abs()))).all())


@LSE
@DTYPES
@pytest.mark.parametrize("n", [0, 1, 2, 33, 255, 256, 257, 600])
def test_lengths(n: int, dtype: torch.dtype, wants_lse: bool) -> None:
    assert_right(*draw(n, group=2, dtype=dtype), None, wants_lse=wants_lse)


@LSE
@pytest.mark.parametrize(("n_kv", "group", "d", "dv"), [(1, 1, 8, 8), (1, 8, 64, 64), (3, 2, 40, 40), (2, 3, 16, 24), (2, 1, 128, 8)])
def test_heads_and_widths(n_kv: int, group: int, d: int, dv: int, wants_lse: bool) -> None:
    assert_right(*draw(70, n_kv=n_kv, group=group, d=d, dv=dv), None, wants_lse=wants_lse)


def padding(kind: str, n_sequences: int, n: int) -> torch.Tensor:
    hidden = torch.zeros(n_sequences, n, dtype=torch.bool)
    if kind in ("left", "both"):
        for sequence in range(n_sequences - 1):  # two of them alike
            hidden[sequence, : (3, 3, n - 1)[sequence % 3]] = True
    if kind in ("right", "both"):
        hidden[-1, n // 2 :] = True
        hidden[0, -1:] = True
    if kind == "holes":
        hidden[:, 1::3] = True
    if kind == "everything":
        hidden[::2] = True
    return hidden


@LSE
@DTYPES
@pytest.mark.parametrize("n", [1, 7, 256, 300])
@pytest.mark.parametrize("kind", ["none", "left", "right", "both", "holes", "everything"])
def test_padding(kind: str, n: int, dtype: torch.dtype, wants_lse: bool) -> None:
    """Whatever the hidden tokens hold; a token that sees nothing gets zeros."""
    q, k, v = draw(n, n_sequences=4, group=2, dtype=dtype)
    hidden = padding(kind, 4, n)
    k.transpose(1, 2)[hidden] = torch.nan
    v.transpose(1, 2)[hidden] = torch.inf
    assert_right(q, k, v, hidden, wants_lse=wants_lse)
