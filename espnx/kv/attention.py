"""Attention over a layer's rows: those that devices store, those that wait in memory, and the new
ones.

A chunk of new tokens attends over itself by the framework's fused kernels, and over what came
before on the devices; both merge by log-sum-exp. Rows that are X are attended to by absorption, or
made K and V of again (`x_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from .. import errors
from ..ops.attention import Queries, add_sinks, attend_rows, merge
from .draft.naming import NamingAttention
from .draft.packed import PackedTier
from .draft.pages import PageTier
from .draft.tier import Tier
from .prefill import chunk_attention
from .read_ahead import Arrived, ReadAhead
from .rows import LayerRows
from .scores import PLAIN, ScoreRules
from .shown import ShownAttention, unpacked
from .striping import StripedDevices
from .visibility import Visibility
from .x_rows import Projection, Recomputer, absorb, bias_scores, release

#: From so many new tokens on, their attention over one another is left to the framework's fused
#: kernels.
CHUNK_TOKENS = 17
#: The queries of so many bytes attend at a time, or those of one sequence: what attention holds in
#: memory does not grow with the batch. Each thread has sums of its own, of that size, which
#: together take at most `_SUMS_BYTES`.
_PART_BYTES, _SUMS_BYTES = 1 << 20, 32 << 20
#: A chunk of a prompt whose queries take so much leaves holes in the heap that are worth returning
#: to the system.
_HOLES_BYTES = 1 << 20


@dataclass(frozen=True)
class Before:
    """Attention of a step's queries over rows that stand before all of the cache's own.

    Attributes:
        o: float32 [sequences, heads, n, dv].
        lse: float32 [sequences, heads, n].
        note: is told of some sequences, and the log-sum-exp over all rows, those before and the
            cache's own, float32 [some sequences, heads, n].
        first: of these sequences in the batch.
    """

    o: torch.Tensor
    lse: torch.Tensor
    note: Callable[[int, torch.Tensor], None]
    first: int = 0

    def part(self, begin: int, end: int) -> Before:
        """What some of the sequences are given."""
        return replace(self, o=self.o[begin:end], lse=self.lse[begin:end], first=self.first + begin)


@dataclass(frozen=True)
class Step:
    """What one layer's attention is given in a forward pass.

    Attributes:
        q: [sequences, heads, n, d], the query heads of one KV head adjacent.
        k, v: [sequences, KV heads, n, d] and [..., dv]: the new tokens' rows, as they are to be
            kept (after RoPE).
        scale: of the scores.
        visibility: of all positions, the new ones included.
        x: [sequences, n, hidden]: what K and V were projected from; needed where X rows are stored.
        projection: how.
        rules: what the model does to scores.
        before: what the queries found in rows that are not the cache's and stand before them.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    visibility: Visibility
    x: torch.Tensor | None = None
    projection: Projection | None = None
    rules: ScoreRules = PLAIN
    before: Before | None = None

    def part(self, begin: int, end: int) -> Step:
        """The step of some of the sequences."""
        x = None if self.x is None else self.x[begin:end]
        q, k, v = (rows[begin:end] for rows in (self.q, self.k, self.v))
        before = None if self.before is None else self.before.part(begin, end)
        seen = self.visibility.part(begin, end)
        return replace(self, q=q, k=k, v=v, visibility=seen, x=x, before=before)


@dataclass(frozen=True)
class Span:
    """The positions of the queries of a pass: the first one's; and the last position that each of
    them sees, int64 [n], or None for all that there is."""

    first: int
    last: torch.Tensor | None = None

    @classmethod
    def of_new(cls, first: int, n: int) -> Span:
        """The span of n tokens that see what came before each of them, and themselves."""
        return cls(first, first + torch.arange(n) if n > 1 else None)


#: (o float32 [sequences, heads, n, dv], lse [sequences, heads, n]) of some sequences over what is
#: stored and what waits in memory.
Over = Callable[[LayerRows, Step, Span, Arrived], tuple[torch.Tensor, torch.Tensor]]


class Attention:
    """The attention of a cache's layers.

    Args:
        striped: the devices.
        ahead: their reads.
        threads: that compute on rows; None: as many as PyTorch uses.

    Attributes:
        leaves_holes: a chunk has been attended to that left the heap full of holes.
        on_host: layers that the devices could not attend to, and what they lack.
    """

    def __init__(self, striped: StripedDevices, ahead: ReadAhead, threads: int | None):
        self._striped, self._ahead, self._threads = striped, ahead, threads or 0
        self.on_host: dict[LayerRows, tuple[str, ...]] = {}
        self.leaves_holes = False

    def cut(self, rows: LayerRows, step: Step, *, least_tokens: int = 1) -> None:
        """Decides how many sequences attend at a time over a layer's rows.

        Args:
            least_tokens: as for so many new tokens, though there may be fewer: reads ahead are of
                as many sequences as attend together, and serve no pass that is cut otherwise.
        """
        rows.query_heads = self._ahead.query_heads = step.q.shape[1]
        self.cut_ahead(max(step.k.shape[2], least_tokens))

    def cut_ahead(self, tokens: int) -> None:
        """Decides it for passes over so many new tokens before the first of them comes: reads are
        put in line before a pass begins."""
        threads = self._threads or torch.get_num_threads()
        self._ahead.part_bytes = min(_PART_BYTES, _SUMS_BYTES // threads)
        self._ahead.tokens = tokens

    def add(
        self,
        rows: LayerRows,
        step: Step,
        k: torch.Tensor,
        v: torch.Tensor | None,
        over: Over,
        end: int | None = None,
    ) -> torch.Tensor:
        """Adds new rows, k [sequences, heads, n, d] and v (None: X), and attends over all:
        [sequences, heads, n, dv], in q's dtype. `end`: the new rows may be rejected, and none from
        this position on is written; None: they stand."""
        past, n = rows.count, k.shape[2]
        if n >= CHUNK_TOKENS and end is None:
            o = self._chunk(rows, step, past, over)
            rows.write(k, v)
            return o
        rows.append(k, v)
        span = Span.of_new(past, n)
        o = self._by_parts(
            rows, step, lambda part, arrived: _whole(part, *over(rows, part, span, arrived))
        )
        rows.spill(end)
        self._ahead.look(rows)
        return o

    def again(self, rows: LayerRows, step: Step, over: Over) -> torch.Tensor:
        """Attention of other queries over rows to which `add` has added in this forward pass."""
        new, n = step.k.shape[2], step.q.shape[2]
        if CHUNK_TOKENS <= n == new:
            past = rows.count - n
            o = self._chunk(rows, step, past, over, torch.full((n,), past - 1))
        else:
            span = Span.of_new(rows.count - n, n)  # some ask for the last positions alone
            o = self._by_parts(
                rows, step, lambda part, arrived: _whole(part, *over(rows, part, span, arrived))
            )
        self._ahead.look(rows)
        return o

    def _chunk(
        self, rows: LayerRows, step: Step, past: int, over: Over, last: torch.Tensor | None = None
    ) -> torch.Tensor:
        """New tokens over one another, and (by `over`, up to position `last`) over what came
        before."""
        self.leaves_holes |= step.q.nbytes >= _HOLES_BYTES
        span = Span(past, last)

        def look(part: Step, arrived: Arrived) -> torch.Tensor:
            o, lse = _over_one_another(part, past)
            if past and lse is not None:
                o, lse = merge(o.float(), lse, *over(rows, part, span, arrived))
            return _whole(part, o, lse)

        return self._by_parts(rows, step, look)

    def _by_parts(
        self, rows: LayerRows, step: Step, look: Callable[[Step, Arrived], torch.Tensor]
    ) -> torch.Tensor:
        """Attention of some sequences at a time: [sequences, heads, n, dv], in q's dtype."""
        parts = self._ahead.take(rows, len(step.q))
        if len(parts) == 1:
            return look(step, parts[0]).to(step.q.dtype)
        n_sequences, heads, n, _ = step.q.shape
        o = step.q.new_empty(n_sequences, heads, n, step.v.shape[-1])
        for arrived in parts:
            begin, end = arrived.sequences.start, arrived.sequences.stop
            o[begin:end] = look(step.part(begin, end), arrived)
        return o

    def stored(
        self, rows: LayerRows, step: Step, span: Span, arrived: Arrived
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Over rows of K and V."""
        n_sequences, heads, n, _ = step.q.shape
        queries = _queries(step, rows.n_heads, rows.layout.dv, span)
        o, lse = self._gather(rows, arrived, queries)
        return o.reshape(n_sequences, heads, n, -1), lse.reshape(n_sequences, heads, n)

    def filling(self, tier: Tier) -> Over:
        """Attends as `stored`, and gives the tier what it is to have of these rows."""
        if isinstance(tier, PageTier):
            return self._naming(tier)
        return self._packing(tier) if isinstance(tier, PackedTier) else self.stored

    def _naming(self, tier: PageTier) -> Over:
        """Attends as `stored`, over rows that the host attends to, so that it learns what each page
        of them weighs: the tier keeps those with the most."""

        def over(
            rows: LayerRows, step: Step, span: Span, arrived: Arrived
        ) -> tuple[torch.Tensor, torch.Tensor]:
            n_sequences, heads, n, _ = step.q.shape
            queries = _queries(step, rows.n_heads, rows.layout.dv, span)
            if arrived.sequences.start == 0:
                first = arrived.whole_tail.first_position if arrived.whole_tail else rows.count
                end = 0 if arrived.tickets is None else first
                # rows as they lie on the disk, where these are plain numbers
                dtype = rows.dtype if rows.layout.format == "int8" else rows.layout.dtype
                tier.begin(queries, rows.sequences, dtype, end)
                rows.pinned = end
            o, lse = attend_rows(queries, arrived.tail, threads=self._threads)
            if arrived.tickets is not None:
                named = NamingAttention(
                    queries, rows.layout, tier, arrived.sequences.start, self._threads
                )
                self._striped.visit(arrived.tickets, named)
                o, lse = merge(*named.result(), o, lse)
            return o.reshape(n_sequences, heads, n, -1), lse.reshape(n_sequences, heads, n)

        return over

    def _packing(self, tier: PackedTier) -> Over:
        """Attends as `stored`; the first pass shows the host all that is stored, which the tier
        packs."""

        def over(
            rows: LayerRows, step: Step, span: Span, arrived: Arrived
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if tier.end or arrived.tickets is None:
                rows.pinned = tier.end  # until it is packed, or for good
                return self.stored(rows, step, span, arrived)
            n_sequences, heads, n, _ = step.q.shape
            queries, begin = (
                _queries(step, rows.n_heads, rows.layout.dv, span),
                arrived.sequences.start,
            )
            end = arrived.whole_tail.first_position if arrived.whole_tail else rows.count
            if begin == 0:
                tier.begin(queries, rows.sequences, end)
            shown = ShownAttention(queries, self._threads)

            def show(memory: torch.Tensor, pieces: np.ndarray) -> None:
                for sequence, head, k, v, first in unpacked(rows.layout, memory, pieces):
                    tier.show(begin + sequence, head, k, v, first)
                shown.show(rows.layout, memory, pieces)

            self._striped.visit(arrived.tickets, show)
            if arrived.sequences.stop == rows.sequences:
                tier.finish(end)
                rows.pinned = end
            o, lse = attend_rows(queries, arrived.tail, threads=self._threads)
            o, lse = merge(shown.o, shown.lse, o, lse)
            return o.reshape(n_sequences, heads, n, -1), lse.reshape(n_sequences, heads, n)

        return over

    @staticmethod
    def settle(rows: LayerRows, tier: Tier, end: int) -> None:
        """The tokens before position `end` stand, of all sequences: a tier that keeps all rows
        takes those that it lacks."""
        if isinstance(tier, PackedTier) and (new := rows.tail(tier.end)) is not None:
            tier.take(new, end)
            rows.pinned = tier.end

    def draft(self, rows: LayerRows, step: Step, tier: Tier) -> torch.Tensor:
        """Adds new rows in memory, and attends over these, what else waits there, and the tier's:
        [sequences, heads, n, dv], in q's dtype. Nothing is read."""
        span = Span.of_new(rows.count, step.k.shape[2])
        rows.append(step.k, step.v)
        n_sequences, heads, n, _ = step.q.shape
        queries = _queries(step, rows.n_heads, rows.layout.dv, span)
        behind = rows.tail(tier.end)
        if tier.end:
            o, lse = tier.attend(queries, behind, self._threads)
        else:
            o, lse = attend_rows(queries, behind, threads=self._threads)
        o, lse = o.reshape(n_sequences, heads, n, -1), lse.reshape(n_sequences, heads, n)
        return _whole(step, o, lse).to(step.q.dtype)

    def absorbed(
        self, rows: LayerRows, step: Step, span: Span, arrived: Arrived
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Over X rows, whose projections are moved to the other side of the product."""
        projection, heads = _projection(step), step.q.shape[1]
        seen = step.visibility
        every = None if span.last is None else span.last.repeat(heads)
        queries = Queries(
            absorb(step.q, projection, step.scale),
            projection.hidden,
            every,
            seen.first_visible,
            seen.visible,
        )
        o, lse = self._gather(rows, arrived, queries)
        sums = lse.reshape(step.q.shape[:3])
        if step.rules.sinks is not None:  # which have to be compared with whole scores
            sums = sums + bias_scores(step.q, projection, step.scale)
        return release(o, lse, projection, heads), sums

    def recomputed(
        self, rows: LayerRows, step: Step, span: Span, arrived: Arrived
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Over X rows, of which K and V are made again."""
        projection = _projection(step)
        n_sequences, heads, n, _ = step.q.shape
        queries = _queries(step, projection.n_heads, step.v.shape[-1], span)
        made = Recomputer(queries, projection, rows.layout, self._threads, arrived.sequences.start)
        tail = arrived.tail
        if arrived.tickets is not None:
            self._striped.visit(arrived.tickets, made.show, may_check_later=True)
        if tail is not None:
            for sequence in range(n_sequences):
                made.add(sequence, tail.counting[0][sequence, 0], tail.first_position)
        return made.over.o.reshape(n_sequences, heads, n, -1), made.over.lse.reshape(
            n_sequences, heads, n
        )

    def _gather(
        self, rows: LayerRows, arrived: Arrived, queries: Queries
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Over what is stored and what waits in memory. Devices that cannot attend to these rows
        show them."""
        if arrived.tickets is None:
            return attend_rows(queries, arrived.tail, threads=self._threads)
        if missing := self._striped.lacks(queries, rows.layout):
            self.on_host[rows] = missing
            shown = ShownAttention(queries, self._threads)
            self._striped.visit(arrived.tickets, partial(shown.show, rows.layout))
            return merge(
                shown.o, shown.lse, *attend_rows(queries, arrived.tail, threads=self._threads)
            )
        return self._striped.attend(arrived.tickets, queries, arrived.tail)

    def stats(self) -> dict[str, Any]:
        """How many layers were attended to on the host, from rows that the devices read, and what
        these lack for it."""
        return {
            "layers_attended_on_host": len(self.on_host),
            "devices_lack": ", ".join(
                dict.fromkeys(name for missing in self.on_host.values() for name in missing)
            ),
        }


def _over_one_another(step: Step, past: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The new tokens of a chunk."""
    hidden = step.visibility.hidden
    own = None if hidden is None else hidden[:, past : past + step.k.shape[2]]
    wants_lse = past > 0 or step.rules.sinks is not None or step.before is not None
    return chunk_attention(
        step.q, step.k, step.v, step.scale, own, wants_lse=wants_lse, rules=step.rules
    )


def _projection(step: Step) -> Projection:
    if step.projection is None:
        raise errors.InvalidInputError("X rows without projections")
    return step.projection


def _whole(step: Step, o: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """What all parts of the cache gave, with what stands before it, corrected where the model has
    sinks."""
    if step.before is not None and lse is not None:
        o, lse = merge(o.float(), lse, step.before.o, step.before.lse)
        step.before.note(step.before.first, lse)
    if step.rules.sinks is None or lse is None:
        return o
    return add_sinks(o.float(), lse, step.rules.sinks[:, None])[0]


def _queries(step: Step, n_heads: int, dv: int, span: Span) -> Queries:
    """The query heads of one KV head together."""
    n_sequences, heads, n, d = step.q.shape
    groups = heads // n_heads
    q = (
        torch.empty(step.q.shape, dtype=torch.float32, device=step.q.device)
        .copy_(step.q)
        .mul_(step.scale)
    )
    q = q.view(n_sequences, n_heads, groups * n, d)
    seen, rules = step.visibility, step.rules
    found = Queries(
        q,
        dv,
        None if span.last is None else span.last.repeat(groups),
        seen.first_visible,
        seen.visible,
        scale=step.scale,
        dtype=step.q.dtype,
    )
    if rules.are_plain:
        return found
    slopes = (
        None
        if rules.slopes is None
        else rules.slopes.float().view(n_heads, groups, 1).expand(-1, -1, n).reshape(n_heads, -1)
    )
    position = (span.first + torch.arange(n)).repeat(groups)
    return replace(
        found, position=position, window=rules.window, soft_cap=rules.soft_cap, slopes=slopes
    )
