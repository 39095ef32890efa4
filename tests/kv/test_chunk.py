"""Attention of a chunk over itself never makes a matrix of chunk x chunk, whatever kernels there
are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from espnx.integrations.transformers.forward.attention import attend_in_memory
from espnx.integrations.transformers.forward.masks import Mask
from espnx.kv import prefill
from espnx.kv.prefill import chunk_attention
from tests.device.gpu.late import late_device

N = 1200


class _Largest(TorchDispatchMode):
    """The most values of any tensor that an operation returned."""

    values = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, torch.Tensor):
                self.values = max(self.values, each.numel())
        return found


@contextmanager
def bounded(heads: int) -> Iterator[None]:
    with _Largest() as seen:
        yield
    assert seen.values < heads * N * N / 2


def rows(
    heads: int, n_kv: int, d: int, dv: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(1, count, N, width, generator=generator)
        for count, width in ((heads, d), (n_kv, d), (n_kv, dv))
    ]
    return tuple(each.to(device) for each in made)  # type: ignore[return-value]


@pytest.mark.parametrize(("d", "dv"), [(16, 16), (16, 24), (24, 16)])
@pytest.mark.parametrize("wants_lse", [False, True])
def test_no_matrix_of_chunk_by_chunk(d: int, dv: int, wants_lse: bool) -> None:
    """Rows of V that are longer or shorter than those of K have no fused kernel here."""
    q, k, v = rows(4, 2, d, dv)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    with bounded(4):
        o, lse = chunk_attention(q, k, v, 0.25, None, wants_lse)
    torch.testing.assert_close(o, wanted, rtol=1e-4, atol=1e-4)
    assert (lse is not None) or not wants_lse
    with bounded(4):
        o = attend_in_memory(q, k, v, Mask(), 0.25, causal=True)
    torch.testing.assert_close(o, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "d", "is_repeated"),
    [(torch.float32, 64, True), (torch.float16, 64, False), (torch.float32, 512, None)],
)
def test_what_a_gpu_has_kernels_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, d: int, is_repeated: bool | None
) -> None:
    """On tensors that are not the CPU's: fp32 with grouped queries is given as many heads of K as
    of queries; wide heads are cut up."""
    given: list[tuple[int, int]] = []

    def fused(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, enable_gqa: bool = False, **_: Any
    ) -> torch.Tensor:
        given.append((q.shape[2], k.shape[1]))
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)
    q, k, v = (torch.empty(1, heads, N, d, dtype=dtype, device="meta") for heads in (4, 2, 2))
    chunk_attention(q, k, v, 0.1, None, wants_lse=False)
    assert given == ([] if is_repeated is None else [(N, 4 if is_repeated else 2)])
    given.clear()
    attend_in_memory(q, k, v, Mask(), 0.1, causal=True)
    assert max(n for n, _ in given) == (256 if is_repeated is None else N)


def test_k_and_v_of_two_dtypes() -> None:
    """As autocast makes them, with and without padding."""
    q, k, v = rows(4, 2, 16, 16)
    hidden = torch.zeros(1, N, dtype=torch.bool)
    hidden[:, :5] = True
    for padding in (None, hidden):
        o, _ = chunk_attention(q, k, v.bfloat16(), 0.25, padding, wants_lse=False)
        assert o.dtype == torch.float32
        torch.testing.assert_close(
            o, chunk_attention(q, k, v.bfloat16().float(), 0.25, padding, wants_lse=False)[0]
        )


def test_products_are_whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that allows TF32 for its own matrix products does not get it for attention over
    padded chunks."""
    before, seen = torch.get_float32_matmul_precision(), []
    original = torch.Tensor.__matmul__

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return original(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    q, k, v = (each[:, :, :40] for each in rows(4, 2, 16, 16))
    hidden = torch.zeros(1, 40, dtype=torch.bool)
    hidden[0, 5] = True  # not on the left
    torch.set_float32_matmul_precision("high")
    try:
        chunk_attention(q, k, v, 0.25, hidden, wants_lse=True)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen
    assert set(seen) == {"highest"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 31, 70])
def test_the_log_sum_exp_of_a_gpu_comes_from_fused_kernels(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n: int
) -> None:
    """By the arguments and shapes of torch's kernels for CUDA, whatever tiles their sums come
    in."""
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(2, count, n, 16, generator=generator).to(dtype) for count in (4, 2, 2))
    groups = (rows.float().repeat_interleave(2, dim=1) for rows in (k, v))
    wanted, sums = prefill._masked(q.float(), *groups, 0.25, None)
    monkeypatch.setattr(prefill, "_masked", lambda *_: pytest.fail("a matrix of scores"))
    hidden = torch.zeros(2, n, dtype=torch.bool)
    hidden[1, : n // 2] = True
    with late_device(n) as late:
        there = [rows.to(late.device) for rows in (q, k, v)]
        late.waits.clear()
        o, lse = chunk_attention(*there, 0.25, None, True)
        assert not late.waits
        assert o.dtype == dtype
        torch.testing.assert_close(o.cpu().float(), wanted, rtol=2e-2, atol=2e-2)
        assert lse is not None
        torch.testing.assert_close(lse.cpu(), sums, rtol=1e-4, atol=1e-4)
        late.waits.clear()
        padded, _ = chunk_attention(*there, 0.25, hidden, True)
        assert not late.waits
        torch.testing.assert_close(padded[0].cpu().float(), wanted[0], rtol=2e-2, atol=2e-2)
        assert not padded[1, :, : n // 2].cpu().any()
