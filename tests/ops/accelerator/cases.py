"""Rows, masks and queries for the tests of the accelerator, and exact results with how far the
accelerator may be from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from espnx.ops.accelerator import (
    DIM,
    Buffered,
    accelerator,
    accelerator_bound,
    accelerator_reference,
    accelerator_scores,
)

SCALE = DIM**-0.5


@dataclass
class Case:
    """K and V of each head of each sequence, as fp16 [rows, 128], and where they lie.

    Attributes:
        q: float16 [B, H, n, 128].
        k, v: by sequence and head.
        positions: of the rows of each sequence.
        waiting: of the rows, the last so many are handed over as scores and V.
    """

    q: torch.Tensor
    k: list[list[torch.Tensor]]
    v: list[list[torch.Tensor]]
    positions: list[torch.Tensor]
    buffer: torch.Tensor
    pieces: torch.Tensor
    block_rows: int = 16
    waiting: int = 0
    masks: dict[str, Any] = field(default_factory=dict)

    @property
    def buffered(self) -> Buffered | None:
        if not self.waiting:
            return None
        k, v = (
            torch.stack([torch.stack([rows[-self.waiting :] for rows in heads]) for heads in every])
            for every in (self.k, self.v)
        )
        first = {int(positions[-self.waiting]) for positions in self.positions}
        return Buffered(accelerator_scores(self.q, k), v, first.pop())

    def run(self, threads: int | None = 1) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"block_rows": self.block_rows, "buffered": self.buffered, **self.masks}
        return accelerator(self.q, self.buffer, self.pieces, threads=threads, **given)

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"block_rows": self.block_rows, "buffered": self.buffered, **self.masks}
        return accelerator_reference(self.q, self.buffer, self.pieces, **given)


def make_case(
    n_rows: list[int],
    *,
    n: int = 1,
    heads: int = 1,
    block_rows: int = 16,
    cuts: tuple[int, ...] = (),
    waiting: int = 0,
    size: float = 1.0,
    seed: int = 0,
    gap_bytes: int = 3,
    **masks: Any,
) -> Case:
    """Rows of about `size` in each value. Stored rows are cut into pieces at `cuts`, which lie at
    odd addresses in any order; what lies between, and in a piece's last block after its rows, is
    NaN. The last `waiting` rows of every sequence are buffered. All sequences end at the same
    position."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng) * size).half()

    k, v = ([[draw(count, DIM) for _ in range(heads)] for count in n_rows] for _ in range(2))
    table, blocks = [], list[torch.Tensor]()
    offset = 0
    for sequence, count in enumerate(n_rows):
        stored = count - waiting
        ends = sorted({*(cut for cut in cuts if cut < stored), stored} - {0})
        for head in reversed(range(heads)):
            begin = 0
            for end in ends:
                packed = _pack(
                    k[sequence][head][begin:end], v[sequence][head][begin:end], block_rows
                )
                offset += gap_bytes
                table.append((sequence, head, offset, end - begin, max(n_rows) - count + begin))
                blocks += [torch.full((gap_bytes,), 0xFF, dtype=torch.uint8), packed]
                offset += packed.numel()
                begin = end
    q = draw(len(n_rows), heads, n, DIM)
    buffer = torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.uint8)
    pieces = torch.tensor(table, dtype=torch.int64).reshape(-1, 5)
    return Case(
        q,
        k,
        v,
        [max(n_rows) - count + torch.arange(count) for count in n_rows],
        buffer,
        pieces,
        block_rows,
        waiting,
        masks,
    )


def _pack(k: torch.Tensor, v: torch.Tensor, block_rows: int) -> torch.Tensor:
    count = -(-len(k) // block_rows)
    whole = torch.full((2, count * block_rows, DIM), torch.nan, dtype=torch.float16)
    whole[0, : len(k)], whole[1, : len(v)] = k, v
    return (
        whole.view(2, count, block_rows, DIM)
        .transpose(0, 1)
        .contiguous()
        .view(torch.uint8)
        .flatten()
    )


def seen(case: Case, sequence: int) -> torch.Tensor:
    """bool [n, rows]."""
    positions, n = case.positions[sequence], case.q.shape[2]
    found = torch.ones(n, len(positions), dtype=torch.bool)
    if (first := case.masks.get("first_visible")) is not None:
        found &= positions >= first[sequence]
    if (visible := case.masks.get("visible")) is not None:
        found &= visible[sequence, positions] != 0
    if (last := case.masks.get("last_position")) is not None:
        found &= positions <= last[:, None]
    return found


def assert_within_bound(got: tuple[torch.Tensor, torch.Tensor], case: Case) -> None:
    """Of exact results, in float64; 0 and -inf where nothing is seen."""
    o, lse = got
    assert (o.dtype, lse.dtype, o.shape, lse.shape) == (
        torch.float16,
        torch.float32,
        case.q.shape,
        case.q.shape[:3],
    )
    for sequence in range(o.shape[0]):
        for head in range(o.shape[1]):
            q, k, v = (
                each.double()
                for each in (case.q[sequence, head], case.k[sequence][head], case.v[sequence][head])
            )
            shown = seen(case, sequence)
            some = shown.any(dim=-1)
            scores = (q @ k.T * SCALE).masked_fill(~shown, -torch.inf)
            exact_lse, p = scores.logsumexp(dim=-1), scores.softmax(dim=-1).nan_to_num(0.0)
            exact, mass = p @ v, p @ v.abs()
            peak = (
                ((q.abs() @ k.abs().T) * SCALE).masked_fill(~shown, 0.0).amax(dim=-1)
                if len(k)
                else torch.zeros(len(q)).double()
            )
            bound_o, bound_lse = accelerator_bound(
                peak=peak, mass=mass, o=exact, lse=exact_lse, n=len(k)
            )
            got_o, got_lse = o[sequence, head].double(), lse[sequence, head].double()
            assert not got_o[~some].any()
            assert bool((got_lse[~some] == -torch.inf).all())
            for name, apart, bound in (
                ("o", got_o - exact, bound_o),
                ("lse", got_lse - exact_lse, bound_lse),
            ):
                ratio = (apart.abs() / bound)[some].nan_to_num(nan=1e9)
                assert bool((ratio <= 1).all()), (
                    f"{name} of sequence {sequence}, head {head}: {float(ratio.max()):.3g} times "
                    "the bound"
                )


def assert_same_bits(
    got: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """NaNs may have any payload."""
    for a, b in zip(got, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        bits = torch.int16 if a.dtype == torch.float16 else torch.int32
        same = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
        assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"
