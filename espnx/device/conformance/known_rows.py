"""Rows whose values are known, and attention over them in float64, with the error that a device's
arithmetic may cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...ops.attention import Queries, RowsInMemory, attend_rows_reference, merge
from ..interface import PIECE, RowDevice, Segment, SegmentView
from ..row_layout import RowLayout
from .requirement import require

U = 2.0**-24  # unit roundoff of fp32
#: Of the format in which queries and results cross to a device: unit roundoff, and half the least
#: positive number.
EXCHANGES = {"fp32": (0.0, 0.0), "fp16": (2.0**-11, 2.0**-25)}


@dataclass(eq=False)
class Kept:
    """A segment and what is in it, [heads, n, d] and [heads, n, dv], as its format keeps it (int8:
    what it stands for, float32)."""

    segment: Segment
    k: torch.Tensor
    v: torch.Tensor

    def use(self, sequence: int, n_rows: int | None = None, first_position: int = 0) -> Seen:
        return Seen(
            self,
            SegmentView(
                self.segment,
                sequence,
                self.segment.n_rows if n_rows is None else n_rows,
                first_position,
            ),
        )


@dataclass(eq=False)
class Seen:
    kept: Kept
    use: SegmentView


def normal(*size: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(*size, generator=rng)


def draw(
    layout: RowLayout, n_sequences: int, heads: range, n: int, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows for `put`."""
    k = normal(n_sequences, len(heads), n, layout.d, rng=rng)
    return k, None if layout.is_shared else normal(n_sequences, len(heads), n, layout.dv, rng=rng)


def kept(
    layout: RowLayout, segments: Sequence[Segment], k: torch.Tensor, v: torch.Tensor | None
) -> list[Kept]:
    stored_k, stored_v = layout.unpack(layout.pack(k, v), k.shape[2])
    return [Kept(segment, stored_k[i], stored_v[i]) for i, segment in enumerate(segments)]


def put(
    device: RowDevice,
    layout: RowLayout,
    n_sequences: int,
    heads: range,
    n: int,
    rng: torch.Generator,
) -> list[Kept]:
    k, v = draw(layout, n_sequences, heads, n, rng)
    return kept(layout, device.put(layout, k, v, heads), k, v)


def queries(
    layout: RowLayout, n_sequences: int, n_heads: int, n: int, rng: torch.Generator, **masks: Any
) -> Queries:
    return Queries(
        normal(n_sequences, n_heads, n, layout.d, rng=rng) * layout.d**-0.5, layout.dv, **masks
    )


def attend(
    device: RowDevice,
    layout: RowLayout,
    seen: Sequence[Seen],
    look: Queries,
    tail: RowsInMemory | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a device finds that is asked for these rows at once."""
    return served(
        device, device.ahead(layout, [each.use for each in seen]), layout, seen, look, tail
    )


def served(
    device: RowDevice,
    ticket: int,
    layout: RowLayout,
    seen: Sequence[Seen],
    look: Queries,
    tail: RowsInMemory | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a device finds for a ticket. One that attends to nothing shows the rows instead, which
    are compared, and the host attends."""
    if device.capabilities.attends_widths != ():
        return device.attend(ticket, look, tail)
    shown = ShownRows(layout, seen)
    device.visit(ticket, shown.show)
    shown.finish()
    o, lse = attend_rows_reference(look, tail, dtype=torch.float64)
    for each in seen:
        at = slice(each.use.sequence, each.use.sequence + 1), list(each.use.segment.heads)
        one, n = look.part(each.use.sequence, each.use.sequence + 1), each.use.n_rows
        rows = RowsInMemory(
            each.kept.k[None, :, :n], each.kept.v[None, :, :n], 0, n, each.use.first_position
        )
        part = attend_rows_reference(replace(one, q=one.q[:, at[1]]), rows, dtype=torch.float64)
        o[at], lse[at] = merge(o[at], lse[at], *part)
    return o.float(), lse.float()


def _alike(seen: Sequence[Seen], sequence: int, n_heads: int) -> list[tuple[list[int], list[Seen]]]:
    """(heads, what they see): the heads of a sequence that look at the same segments go
    together."""
    found = dict[tuple[int, ...], list[int]]()
    for head in range(n_heads):
        mine = tuple(
            i
            for i, each in enumerate(seen)
            if each.use.sequence == sequence and head in each.use.segment.heads
        )
        found.setdefault(mine, []).append(head)
    return [(heads, [seen[i] for i in mine]) for mine, heads in found.items()]


def _rows(
    seen: Sequence[Seen], tail: RowsInMemory | None, sequence: int, heads: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """k [heads, n, d], v and positions of everything that these heads of a sequence may look at."""
    ks, vs, positions = [], [], []
    for each in seen:
        use = each.use
        at = [use.segment.heads.index(head) for head in heads]
        ks.append(each.kept.k[at, : use.n_rows].double())
        vs.append(each.kept.v[at, : use.n_rows].double())
        positions.append(use.first_position + torch.arange(use.n_rows))
    if tail is not None:
        k, v = tail.counting
        ks.append(k[sequence, heads].double())
        vs.append(v[sequence, heads].double())
        positions.append(tail.first_position + torch.arange(tail.n_rows))
    return (torch.cat(ks, dim=1), torch.cat(vs, dim=1), torch.cat(positions)) if ks else None


def _visible(look: Queries, sequence: int, positions: torch.Tensor) -> torch.Tensor:
    """bool [n, rows]: which rows each query of a sequence sees."""
    visible = torch.ones(look.q.shape[2], len(positions), dtype=torch.bool)
    if look.last_position is not None:
        visible &= positions <= look.last_position[:, None]
    if look.window is not None and look.position is not None:
        visible &= positions > look.position[:, None] - look.window
    if look.first_visible is not None:
        visible &= positions >= look.first_visible[sequence]
    if look.visible is not None:
        visible &= look.visible[sequence, positions] != 0
    return visible


def _changed(
    look: Queries, heads: list[int], scores: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores after a soft cap and slopes, and how far fp32 may be off in that: 4 units in the last
    place of the cap, whose slope is at most 1 (csrc/cpu/attention/kernels.hpp), and the roundings
    of slope x distance and of adding it."""
    apart = torch.zeros_like(scores)
    if look.soft_cap is not None:
        scores = look.soft_cap * torch.tanh(scores / look.soft_cap)
        apart = apart + 8 * U * look.soft_cap
    if look.slopes is not None and look.position is not None:
        added = look.slopes[heads].double()[:, :, None] * (positions - look.position[:, None])
        scores = scores + added
        apart = apart + 2 * U * (added.abs() + scores.abs())
    return scores, apart


def assert_right(
    got: tuple[torch.Tensor, torch.Tensor],
    seen: Sequence[Seen],
    look: Queries,
    tail: RowsInMemory | None = None,
    exchanges: str = "fp32",
) -> None:
    """Both results within the bounds of docs/tolerances.md, as
    tests/ops/attention/test_attention.py derives them; what is folded in apart (each segment, each
    of the reads it was cut into, each thread) is one more rescaling. `exchanges`: see
    `Capabilities`; a query that is rounded by a part u changes a score by at most u x |q| |k|, and
    a result that is rounded, itself by that part.

    Raises NotConformingError.
    """
    n_sequences, n_heads, n, _ = look.q.shape
    o, lse = got
    require(
        o.shape == (n_sequences, n_heads, n, look.dv),
        "shape of o",
        got=tuple(o.shape),
        expected=(n_sequences, n_heads, n, look.dv),
    )
    require(
        lse.shape == (n_sequences, n_heads, n),
        "shape of lse",
        got=tuple(lse.shape),
        expected=(n_sequences, n_heads, n),
    )
    require(
        (o.dtype, lse.dtype) == (torch.float32, torch.float32),
        "dtypes",
        got=(o.dtype, lse.dtype),
        expected="float32",
    )
    for sequence in range(n_sequences):
        for heads, mine in _alike(seen, sequence, n_heads) if n else ():
            _assert_heads_right(
                o[sequence, heads],
                lse[sequence, heads],
                mine,
                look,
                tail,
                (sequence, heads),
                len(seen),
                exchanges,
            )


def _assert_heads_right(
    o: torch.Tensor,
    lse: torch.Tensor,
    seen: Sequence[Seen],
    look: Queries,
    tail: RowsInMemory | None,
    place: tuple[int, list[int]],
    n_parts: int,
    exchanges: str,
) -> None:
    """Checks the heads of one sequence, which look at the same segments."""
    (sequence, heads), (crossing, least), d = place, EXCHANGES[exchanges], look.q.shape[3]
    where = f"sequence {sequence}, head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}"
    rows = _rows(seen, tail, sequence, heads)
    if rows is None or not len(rows[2]):
        is_nothing = not o.any() and bool((lse == -torch.inf).all())
        require(
            is_nothing,
            f"{where}: a result where there is nothing to see",
            got="something",
            expected="0 and -inf",
        )
        return
    k, v, positions = rows
    visible = _visible(look, sequence, positions)
    q = look.q[sequence, heads].double()
    scores, changed = _changed(look, heads, q @ k.mT, positions)
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.softmax(dim=-1).nan_to_num(0.0)
    k_sizes = k.abs()
    products = q.abs() @ k_sizes.mT
    largest = products.mul(visible).amax(dim=-1)
    score_error = (
        (changed + crossing * products + least * k_sizes.sum(-1)[:, None]).mul(visible).amax(dim=-1)
    )
    rescales = math.ceil(len(positions) / 128) + 2 * n_parts + 16
    gamma_score, gamma_sum = (
        m * U / (1 - m * U) for m in (d + 12, len(positions) + 6 * rescales + 12)
    )
    relative = torch.expm1(gamma_score * largest + score_error) + gamma_sum
    wanted, sums = weights @ v, scores.logsumexp(dim=-1)
    bound = (2 * relative / (1 - relative))[..., None] * (weights @ v.abs()) + len(
        positions
    ) * 2.0**-126
    bound = bound + crossing * (wanted.abs() + bound) + least * (crossing > 0)
    apart = (o - wanted).abs()
    times = float((apart / bound).nan_to_num(nan=1e9).max())
    require(
        bool((apart <= bound).all()),
        f"{where}: o is off",
        got=f"{times:.3g} times the bound",
        expected="at most 1",
    )
    same = (lse == sums) | ((lse - sums).abs() <= relative + 2 * U * (1 + sums.abs()))
    at = (~same).nonzero()[:1].flatten().tolist()
    require(
        not at,
        f"{where}: lse",
        got=at and float(lse[tuple(at)]),
        expected=at and float(sums[tuple(at)]),
    )


class ShownRows:
    """Looks at what `RowDevice.visit` shows: every row that was asked for once, to the bit, in any
    order.

    Args:
        layout: of the rows.
        seen: what was asked for.
    """

    def __init__(self, layout: RowLayout, seen: Sequence[Seen]):
        self._layout, self._counts = (
            layout,
            dict[tuple[int, int], list[tuple[Seen, int, np.ndarray]]](),
        )
        for each in seen:
            for at, head in enumerate(each.use.segment.heads if each.use.n_rows else ()):
                self._counts.setdefault((each.use.sequence, head), []).append(
                    (each, at, np.zeros(each.use.n_rows, np.int64))
                )

    def show(self, memory: torch.Tensor, pieces: np.ndarray) -> None:
        """Raises NotConformingError."""
        require(pieces.dtype == PIECE, "what is shown", got=pieces.dtype, expected=PIECE)
        require(
            (memory.dtype, memory.dim()) == (torch.uint8, 1),
            "bytes that are shown",
            got=memory.dtype,
            expected="uint8 [bytes]",
        )
        for sequence, head, offset, n_rows, first in pieces.tolist():
            piece, end = (
                f"a piece of sequence {sequence}, head {head}",
                offset + self._layout.blocks(n_rows) * self._layout.block_bytes,
            )
            require(
                n_rows > 0 and 0 <= offset <= end <= memory.numel(),
                f"{piece}: bytes",
                got=(offset, end),
                expected=memory.numel(),
            )
            wanted = self._wanted(sequence, head, first, n_rows)
            require(
                wanted is not None, f"{piece}: rows that were not asked for", got=(first, n_rows)
            )
            each, at, counts = wanted or self._counts[sequence, head][0]
            begin = first - each.use.first_position
            found = self._layout.unpack(
                memory[offset:end].view(-1, self._layout.block_bytes).cpu(), n_rows
            )
            for name, rows, kept in zip("KV", found, (each.kept.k, each.kept.v), strict=True):
                same = _bits(rows) == _bits(kept[at, begin : begin + n_rows])
                wrong = (~same.all(dim=-1)).nonzero()[:1].flatten().tolist()
                require(
                    not wrong,
                    f"{piece}: a {name} row that is shown",
                    got=wrong and f"other bits at position {first + wrong[0]}",
                )
            counts[begin : begin + n_rows] += 1

    def _wanted(
        self, sequence: int, head: int, first: int, n_rows: int
    ) -> tuple[Seen, int, np.ndarray] | None:
        for each, at, counts in self._counts.get((sequence, head), ()):
            if (
                each.use.first_position <= first
                and first + n_rows <= each.use.first_position + each.use.n_rows
            ):
                return each, at, counts
        return None

    def finish(self) -> None:
        """Raises NotConformingError unless every row was shown once."""
        for (sequence, head), parts in self._counts.items():
            for each, _, counts in parts:
                wrong = np.flatnonzero(counts != 1)[:1].tolist()
                where = (
                    f"position {wrong and each.use.first_position + wrong[0]} of sequence "
                    f"{sequence}, head {head}"
                )
                require(
                    not wrong,
                    f"{where}: how often it is shown",
                    got=wrong and int(counts[wrong[0]]),
                    expected=1,
                )


def _bits(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, bytes]."""
    return rows.contiguous().view(torch.uint8).reshape(len(rows), -1)
