"""Parts of attention that wait to be merged, against merging each as it comes; and many queries by
the framework's kernel, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from espnx.kv import prefill
from espnx.ops.attention import Queries, RowsInMemory, attend_rows_reference, fused, merge, running
from espnx.ops.attention import parts as waiting
from espnx.ops.attention.parts import Parts
from tests.device.gpu.late import late_device

UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("bytes_max", [0, 3000, 1 << 25])
@pytest.mark.parametrize("n_pairs", [1, 5])
def test_parts_are_merged_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, bytes_max: int, n_pairs: int
) -> None:
    check_parts(monkeypatch, bytes_max, n_pairs, 12)


def check_parts(
    monkeypatch: pytest.MonkeyPatch, bytes_max: int, n_pairs: int, n_seeds: int
) -> None:
    """Whatever pairs they are of, with pairs that are there twice, and parts that saw nothing or
    are not finite."""
    monkeypatch.setattr(waiting, "_BYTES_MAX", bytes_max)
    rng = torch.Generator().manual_seed(n_pairs)
    n, dv = 3, 8
    for seed in range(n_seeds):
        draw = np.random.default_rng(seed)
        parts = Parts(n_pairs, n, dv, torch.device("cpu"))
        o, lse = torch.zeros(n_pairs, n, dv), torch.full((n_pairs, n), -torch.inf)
        for _ in range(draw.integers(0, 7)):
            pair = np.sort(draw.integers(0, n_pairs, draw.integers(0, 2 * n_pairs)))
            part_o = torch.randn(len(pair), n, dv, generator=rng)
            part_lse = 20 * torch.randn(len(pair), n, generator=rng)
            if len(pair) and seed % 3 == 0:
                part_lse[0, 1], part_o[0, 1] = -torch.inf, 0.0
                part_o[-1, 2] = torch.nan if seed % 2 else 1.0
            parts.add(pair, part_o, part_lse, torch.from_numpy)
            for i, at in enumerate(pair.tolist()):
                o[at], lse[at] = merge(o[at], lse[at], part_o[i], part_lse[i])
        found_o, found_lse = parts.merged(torch.from_numpy)
        torch.testing.assert_close(found_o, o, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(found_lse, lse, rtol=1e-6, atol=1e-5, equal_nan=True)


def case(
    dtype: torch.dtype, n: int, d: int, n_rows: int, **more: Any
) -> tuple[Queries, RowsInMemory]:
    rng = torch.Generator().manual_seed(n)
    q = torch.randn(2, 2, n, d, generator=rng).to(dtype)
    k, v = (torch.randn(2, 2, n_rows + 3, d, generator=rng).to(dtype) for _ in range(2))
    look = Queries(q.float() * 0.17, d, scale=0.17, dtype=dtype, **more)
    return look, RowsInMemory(k, v, 2, n_rows, 10)


def by_op(*_: Any, **__: Any) -> Any:
    pytest.fail("the attention op")


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("place", ["cpu", "late"])
@pytest.mark.parametrize("n_rows", [1, 77])
def test_many_queries_by_the_framework(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, place: str, n_rows: int
) -> None:
    """Within docs/tolerances.md: weights and results are rounded to the dtype of the rows."""
    look, rows = case(dtype, 65, 64, n_rows)
    o, lse = attend_rows_reference(look, rows, dtype=torch.float64)
    v_size = rows.counting[1].double().abs()
    weights = torch.exp(
        look.q.double() @ rows.counting[0].double().transpose(-1, -2) - lse[..., None]
    )
    allowed = 2.01 * UNITS[dtype] * (weights @ v_size) + n_rows * 2.0**-24 * v_size.amax(
        dim=-2, keepdim=True
    )
    monkeypatch.setattr(running, "attention_inside", by_op)
    if place == "cpu":
        adding = running.RunningAttention(look, torch.device("cpu"))
        adding.add_rows(rows)
        got = adding.result()
    else:
        with late_device(1) as late:
            adding = running.RunningAttention(look.to(late.device), late.device)
            adding.add_rows(rows.to(late.device))
            got = tuple(each.cpu() for each in adding.result())  # type: ignore[assignment]
    assert bool(((got[0] - o).abs() <= allowed).all())
    torch.testing.assert_close(got[1].double(), lse, rtol=0, atol=2.0**-14)


@pytest.mark.parametrize(
    "why", ["few queries", "another dtype", "a mask", "padding", "a window", "fp32", "odd rows"]
)
def test_what_the_op_keeps(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(running, "fused_attention", by_op)
    n, dtype, d = (63 if why == "few queries" else 70), torch.float16, 64
    more: dict[str, Any] = {}
    if why == "a mask":
        more["last_position"] = torch.arange(n) + 10
    if why == "padding":
        more["first_visible"] = torch.tensor([0, 12])
    if why == "a window":
        more |= {"window": 5, "position": torch.full((n,), 40)}
    look, rows = case(torch.float32 if why == "fp32" else dtype, n, d, 31, **more)
    if why == "another dtype":
        rows = RowsInMemory(rows.k.bfloat16(), rows.v.bfloat16(), 2, 31, 10)
    if why == "odd rows":
        rows = RowsInMemory(rows.k, rows.v[..., :56].contiguous(), 2, 31, 10)
        look = Queries(look.q, 56, scale=0.17, dtype=dtype)
    adding = running.RunningAttention(look, torch.device("cpu"))
    adding.add_rows(rows)
    o, lse = adding.result()
    wanted = attend_rows_reference(look, rows, dtype=torch.float64)
    torch.testing.assert_close(o.double(), wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=0, atol=1e-4)


def test_a_gpu_before_ampere_has_no_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework raises there; the op, and for a chunk's own rows matrices, do not need it."""
    place, sizes = torch.device("cuda", 1), (64, 64, torch.float16)
    for capability, has in (((7, 5), False), ((8, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        assert fused.takes_fused(*sizes, place) is fused.has_flash(place) is has
    assert fused.takes_fused(*sizes, torch.device("cpu"))
    monkeypatch.setattr(prefill, "has_flash", lambda device: False)
    monkeypatch.setattr(prefill, "_masked", lambda *given: "by matrices")
    q = torch.empty(1, 2, 20, 64, dtype=torch.float16, device="meta")
    assert prefill._causal(q, q, q, 0.1, True) == "by matrices"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("of", ["k", "v"])
def test_rows_that_are_not_finite(bad: float, of: str) -> None:
    """Of the sequence and head that has one, every query, and no other."""
    look, rows = case(torch.float16, 64, 64, 40)
    getattr(rows, of)[1, 0, 20, 3] = bad
    adding = running.RunningAttention(look, torch.device("cpu"))
    adding.add_rows(rows)
    o, lse = adding.result()
    assert bool(o[1, 0].isnan().all())
    assert bool(o[0].isfinite().all())
    assert bool(o[1, 1].isfinite().all())
    assert bool(lse[1, 0].isnan().any()) == (of == "k")
    assert bool(lse[0].isfinite().all())
