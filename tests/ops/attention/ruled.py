"""Attention with a model's changes of scores by the Triton kernels, on CPU tensors: in Triton's
interpreter, or as PTX that is executed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from espnx.ops.attention import Queries, RowsInMemory, add_sinks, running
from espnx.ops.attention.cuda import ScoreRules, attention_triton
from espnx.ops.attention.reference import stored_rows
from tests.device.rows import assert_right, normal
from tests.ops.attention.test_attention import make_case
from tests.ops.attention.test_rows import N_HEADS, N_SEQUENCES, changes

#: What a model may do to scores, alone and all at once, with and without masks.
RULES: tuple[tuple[str, ...], ...] = (
    ("soft_cap",),
    ("slopes", "visible"),
    ("window", "first_visible"),
    ("last_position", "window", "soft_cap", "slopes", "visible"),
)
INT8_RULES = (("soft_cap",), ("slopes",), ("window", "soft_cap", "slopes"))
#: Lengths of K and V rows; V rows of 0: X rows.
WIDTHS = ((64, 64), (24, 40), (576, 0), (320, 272))
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def by_kernel(
    monkeypatch: pytest.MonkeyPatch, look: Queries, rows: RowsInMemory
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels make of rows, on tensors of the CPU."""
    monkeypatch.setattr(running, "_RULED", ("cpu",))
    adding = running.RunningAttention(look, torch.device("cpu"))
    assert adding.takes(look.q.shape[-1], look.dv)
    adding.add_rows(rows)
    return adding.result()


def ruled_case(
    fmt: str, d: int, dv: int, n: int, names: tuple[str, ...], n_rows: int
) -> tuple[Queries, RowsInMemory]:
    """Scores with a deviation of 3, that a soft cap bends; rows that begin at position 70."""
    rng = torch.Generator().manual_seed(n)
    shape = (N_SEQUENCES, N_HEADS, n_rows + 5)
    k = normal(*shape, d, rng=rng).mul(3.0).to(DTYPES[fmt])
    v = normal(*shape, dv, rng=rng).to(DTYPES[fmt]) if dv else k
    more: dict[str, Any] = changes(names, n, n_rows, rng)
    q = normal(N_SEQUENCES, N_HEADS, n, d, rng=rng) * d**-0.5
    return Queries(q, dv or d, **more), RowsInMemory(k, v, 3, n_rows, 70)


def check_rules(
    monkeypatch: pytest.MonkeyPatch,
    fmt: str,
    d: int,
    dv: int,
    n: int,
    names: tuple[str, ...],
    n_rows: int = 69,
) -> None:
    look, rows = ruled_case(fmt, d, dv, n, names, n_rows)
    assert_right(by_kernel(monkeypatch, look, rows), [], look, rows)


def check_sinks(monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    """Sinks join what the kernels gave: beside a softmax in fp64 over one column more, of logits
    far below, among and far above the scores, and none; and of rows that nobody sees."""
    n_rows, n, d = 69, 3, 64
    look, rows = ruled_case(fmt, d, d, n, (), n_rows)
    result = by_kernel(monkeypatch, look, rows)
    k, v = (each[:, :, 3 : 3 + n_rows].double() for each in (rows.k, rows.v))
    scores = look.q.double() @ k.mT
    for logits in ((-30.0, 0.5), (40.0, -torch.inf)):  # of two heads
        sinks = torch.tensor(logits)[:, None]
        column = sinks.double().expand(scores.shape[:3])[..., None]
        whole = torch.cat([scores, column], dim=-1)
        expected = whole.softmax(dim=-1)[..., :-1] @ v, whole.logsumexp(dim=-1)
        for got, wanted in zip(add_sinks(*result, sinks), expected, strict=True):
            assert torch.allclose(got.double(), wanted, rtol=2e-5, atol=2e-5)
    blind = Queries(look.q, d, last_position=torch.full((n,), -1))
    sinks = torch.tensor([0.5, -3.0])[:, None]
    o, lse = add_sinks(*by_kernel(monkeypatch, blind, rows), sinks)
    assert bool((o == 0).all())
    assert torch.equal(lse, sinks.expand_as(lse))


def check_block_rules(names: tuple[str, ...], fmt: str = "int8", block_rows: int = 128) -> None:
    """Two queries over rows in blocks, of which 128 are a tile's: beside a softmax in fp64 over the
    rows' values. The first stands at a row, the second beyond the last."""
    n_rows, d, scale = 150, 24, 0.9
    sizes: dict[str, Any] = {"d": d, "block_rows": block_rows, "fmt": fmt}
    case = make_case(n_rows=[n_rows], q_len=2, n_kv=1, gap_bytes=16, **sizes)
    position = torch.tensor([[n_rows - 20, n_rows + 9]])
    rules = ScoreRules(
        soft_cap=1.5 if "soft_cap" in names else 0.0,
        window=70 if "window" in names else 0,
        position=position,
        slopes=torch.tensor([[[0.03, -0.02]]]) if "slopes" in names else None,
    )
    found = attention_triton(*case.args, case.block_rows, fmt, scale, d, rules=rules)
    table = case.table[0, 0].tolist()
    k, v = stored_rows(case.buffer, table, n_rows, block_rows, d, d, fmt, torch.float64)
    scores = case.query[0, 0].double() @ k.T * scale
    distance = torch.arange(n_rows) - position[0][:, None]
    if rules.soft_cap:
        scores = rules.soft_cap * (scores / rules.soft_cap).tanh()
    if rules.slopes is not None:
        scores = scores + rules.slopes[0, 0][:, None].double() * distance
    if rules.window:
        scores = scores.masked_fill(distance <= -rules.window, -torch.inf)
    expected = scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.allclose(got[0, 0].double(), wanted, rtol=2e-5, atol=2e-5)
