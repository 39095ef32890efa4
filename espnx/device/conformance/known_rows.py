"""Rows whose values are known, and attention over them in float64, with the error that a device's arithmetic may cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...ops.attention import Queries, RowsInMemory
from ..interface import RowDevice, Segment, SegmentView
from ..row_layout import RowLayout
from .requirement import require

U = 2.0**-24  # unit roundoff of fp32
#: Of the format in which queries and results cross to a device: unit roundoff, and half the least positive number.
EXCHANGES = {"fp32": (0.0, 0.0), "fp16": (2.0**-11, 2.0**-25)}


@dataclass
class Kept:
    """A segment and what is in it, float64 [heads, n, d] and [heads, n, dv], as its format keeps it."""

    segment: Segment
    k: torch.Tensor
    v: torch.Tensor

    def use(self, sequence: int, n_rows: int | None = None, first_position: int = 0) -> Seen:
        return Seen(self, SegmentView(self.segment, sequence, self.segment.n_rows if n_rows is None else n_rows, first_position))


@dataclass
class Seen:
    kept: Kept
    use: SegmentView


def normal(*size: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(*size, generator=rng)


def draw(layout: RowLayout, n_sequences: int, heads: range, n: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows for `put`."""
    k = normal(n_sequences, len(heads), n, layout.d, rng=rng)
    return k, None if layout.is_shared else normal(n_sequences, len(heads), n, layout.dv, rng=rng)


def kept(layout: RowLayout, segments: Sequence[Segment], k: torch.Tensor, v: torch.Tensor | None) -> list[Kept]:
    n = k.shape[2]
    if n == 0:
        return [Kept(segment, k[i].double(), (k if v is None else v)[i].double()) for i, segment in enumerate(segments)]
    stored_k, stored_v = layout.unpack(layout.pack(k, v), n)
    return [Kept(segment, stored_k[i].double(), stored_v[i].double()) for i, segment in enumerate(segments)]


def put(device: RowDevice, layout: RowLayout, n_sequences: int, heads: range, n: int, rng: torch.Generator) -> list[Kept]:
    k, v = draw(layout, n_sequences, heads, n, rng)
    return kept(layout, device.put(layout, k, v, heads), k, v)


def queries(layout: RowLayout, n_sequences: int, n_heads: int, n: int, rng: torch.Generator, **masks: Any) -> Queries:
    return Queries(normal(n_sequences, n_heads, n, layout.d, rng=rng) * layout.d**-0.5, layout.dv, **masks)


def attend(
    device: RowDevice, layout: RowLayout, seen: Sequence[Seen], look: Queries, tail: RowsInMemory | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return device.attend(device.ahead(layout, [each.use for each in seen]), look, tail)


def _rows(
    seen: Sequence[Seen], tail: RowsInMemory | None, sequence: int, head: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """k, v and positions of everything that (sequence, head) may look at."""
    ks, vs, positions = [], [], []
    for each in seen:
        use, heads = each.use, each.use.segment.heads
        if use.sequence == sequence and head in heads:
            at = heads.index(head)
            ks.append(each.kept.k[at, : use.n_rows])
            vs.append(each.kept.v[at, : use.n_rows])
            positions.append(use.first_position + torch.arange(use.n_rows))
    if tail is not None:
        part = slice(tail.skip, tail.skip + tail.n_rows)
        ks.append(tail.k[sequence, head, part].double())
        vs.append(tail.v[sequence, head, part].double())
        positions.append(tail.first_position + torch.arange(tail.n_rows))
    return (torch.cat(ks), torch.cat(vs), torch.cat(positions)) if ks else None


def _changed(look: Queries, head: int, scores: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores after a soft cap and slopes, and how far fp32 may be off in that: 4 units in the last place of the cap, whose slope is at
    most 1 (csrc/cpu/attention/kernels.hpp), and the roundings of slope x distance and of adding it."""
    apart = torch.zeros_like(scores)
    if look.soft_cap is not None:
        scores = look.soft_cap * torch.tanh(scores / look.soft_cap)
        apart = apart + 8 * U * look.soft_cap
    if look.slopes is not None and look.position is not None:
        added = look.slopes[head].double()[:, None] * (positions - look.position[:, None])
        scores = scores + added
        apart = apart + 2 * U * (added.abs() + scores.abs())
    return scores, apart


def assert_right(
    got: tuple[torch.Tensor, torch.Tensor], seen: Sequence[Seen], look: Queries, tail: RowsInMemory | None = None, exchanges: str = "fp32"
) -> None:
    """Both results within the bounds of docs/tolerances.md, as tests/ops/attention/test_attention.py derives them; what is
    folded in apart (each segment, each of the reads it was cut into, each thread) is one more rescaling. `exchanges`: see `Capabilities`; a
    query that is rounded by a part u changes a score by at most u x |q| |k|, and a result that is rounded, itself by that part.

    Raises NotConformingError.
    """
    n_sequences, n_heads, n, d = look.q.shape
    o, lse = got
    require(o.shape == (n_sequences, n_heads, n, look.dv), "shape of o", got=tuple(o.shape), expected=(n_sequences, n_heads, n, look.dv))
    require(lse.shape == (n_sequences, n_heads, n), "shape of lse", got=tuple(lse.shape), expected=(n_sequences, n_heads, n))
    require((o.dtype, lse.dtype) == (torch.float32, torch.float32), "dtypes", got=(o.dtype, lse.dtype), expected="float32")
    crossing, least = EXCHANGES[exchanges]
    for sequence in range(n_sequences):
        for head in range(n_heads):
            rows = _rows(seen, tail, sequence, head)
            where = f"sequence {sequence}, head {head}"
            if rows is None or not len(rows[0]):
                require(not o[sequence, head].any() and bool((lse[sequence, head] == -torch.inf).all()), f"{where}: nothing to see")
                continue
            k, v, positions = rows
            visible = torch.ones(n, len(k), dtype=torch.bool)
            if look.last_position is not None:
                visible &= positions <= look.last_position[:, None]
            if look.window is not None and look.position is not None:
                visible &= positions > look.position[:, None] - look.window
            if look.first_visible is not None:
                visible &= positions >= look.first_visible[sequence]
            if look.visible is not None:
                visible &= look.visible[sequence, positions] != 0
            q = look.q[sequence, head].double()
            scores, changed = _changed(look, head, q @ k.T, positions)
            scores = scores.masked_fill(~visible, -torch.inf)
            weights = scores.softmax(dim=-1).nan_to_num(0.0)
            largest = (q.abs() @ k.abs().T).mul(visible).amax(dim=-1)
            from_rounded = (least * k.abs().sum(-1) + crossing * (q.abs() @ k.abs().T)).mul(visible).amax(dim=-1)
            rescales = math.ceil(len(k) / 128) + 2 * len(seen) + 16
            gamma_score, gamma_sum = (m * U / (1 - m * U) for m in (d + 12, len(k) + 6 * rescales + 12))
            score_error = gamma_score * largest + from_rounded + changed.mul(visible).amax(dim=-1)
            relative = torch.expm1(score_error) + gamma_sum
            wanted, sums = weights @ v, scores.logsumexp(dim=-1)
            size = weights @ v.abs()
            bound = (2 * relative / (1 - relative))[:, None] * size + len(k) * 2.0**-126
            bound = bound + crossing * (wanted.abs() + bound) + least * (crossing > 0)
            apart = (o[sequence, head] - wanted).abs()
            times = float((apart / bound).nan_to_num(nan=1e9).max())
            require(bool((apart <= bound).all()), f"{where}: o is off", got=f"{times:.3g} times the bound", expected="at most 1")
            same = (lse[sequence, head] == sums) | ((lse[sequence, head] - sums).abs() <= relative + 2 * U * (1 + sums.abs()))
            require(bool(same.all()), f"{where}: lse", got=lse[sequence, head], expected=sums)
