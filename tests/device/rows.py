"""What the tests of devices share: rows whose values are known, and attention over them in float64, with the error that fp32 may cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from espnx.device.interface import Device, Queries, Segment, Tail, Use
from espnx.device.layout import RowLayout
from espnx.device.ssd import SsdDevice

U = 2.0**-24  # unit roundoff of fp32


@dataclass
class Kept:
    """A segment and what is in it, float64 [heads, n, d] and [heads, n, dv], as its format keeps it."""

    segment: Segment
    k: torch.Tensor
    v: torch.Tensor

    def use(self, sequence: int, n_rows: int | None = None, first_position: int = 0) -> Seen:
        return Seen(self, Use(self.segment, sequence, self.segment.n_rows if n_rows is None else n_rows, first_position))


@dataclass
class Seen:
    kept: Kept
    use: Use


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[SsdDevice]:
    device = SsdDevice(folder, **options)
    try:
        yield device
    finally:
        device.close()


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


def put(device: Device, layout: RowLayout, n_sequences: int, heads: range, n: int, rng: torch.Generator) -> list[Kept]:
    k, v = draw(layout, n_sequences, heads, n, rng)
    return kept(layout, device.put(layout, k, v, heads), k, v)


def queries(layout: RowLayout, n_sequences: int, n_heads: int, n: int, rng: torch.Generator, **masks: torch.Tensor | None) -> Queries:
    return Queries(normal(n_sequences, n_heads, n, layout.d, rng=rng) * layout.d**-0.5, layout.dv, **masks)


def attend(
    device: Device, layout: RowLayout, seen: Sequence[Seen], look: Queries, tail: Tail | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return device.attend(device.ahead(layout, [each.use for each in seen]), look, tail)


def _rows(seen: Sequence[Seen], tail: Tail | None, sequence: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
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


def assert_right(got: tuple[torch.Tensor, torch.Tensor], seen: Sequence[Seen], look: Queries, tail: Tail | None = None) -> None:
    """Both results within the bounds of docs/tolerances.md, as tests/ops/test_attention.py derives them; what is folded in apart (each
    segment, each of the reads it was cut into, each thread) is one more rescaling."""
    n_sequences, n_heads, n, d = look.q.shape
    o, lse = got
    assert o.shape == (n_sequences, n_heads, n, look.dv)
    assert lse.shape == (n_sequences, n_heads, n)
    assert (o.dtype, lse.dtype) == (torch.float32, torch.float32)
    for sequence in range(n_sequences):
        for head in range(n_heads):
            rows = _rows(seen, tail, sequence, head)
            if rows is None or not len(rows[0]):
                assert not o[sequence, head].any()
                assert bool((lse[sequence, head] == -torch.inf).all())
                continue
            k, v, positions = rows
            visible = torch.ones(n, len(k), dtype=torch.bool)
            if look.last_position is not None:
                visible &= positions <= look.last_position[:, None]
            if look.first_visible is not None:
                visible &= positions >= look.first_visible[sequence]
            if look.visible is not None:
                visible &= look.visible[sequence, positions] != 0
            q = look.q[sequence, head].double()
            scores = (q @ k.T).masked_fill(~visible, -torch.inf)
            weights = scores.softmax(dim=-1).nan_to_num(0.0)
            largest = (q.abs() @ k.abs().T).mul(visible).amax(dim=-1)
            rescales = math.ceil(len(k) / 128) + 2 * len(seen) + 16
            gamma_score, gamma_sum = (m * U / (1 - m * U) for m in (d + 12, len(k) + 6 * rescales + 12))
            relative = torch.expm1(gamma_score * largest) + gamma_sum
            wanted, sums = weights @ v, scores.logsumexp(dim=-1)
            bound = (2 * relative / (1 - relative))[:, None] * (weights @ v.abs()) + len(k) * 2.0**-126
            where = f"sequence {sequence}, head {head}"
            apart = (o[sequence, head] - wanted).abs()
            assert bool((apart <= bound).all()), f"{where}: {float((apart / bound).nan_to_num(nan=1e9).max()):.3g} times the bound"
            same = (lse[sequence, head] == sums) | ((lse[sequence, head] - sums).abs() <= relative + 2 * U * (1 + sums.abs()))
            assert bool(same.all()), f"{where}: lse {lse[sequence, head]}, expected {sums}"
