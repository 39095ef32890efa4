"""The rows of a layer that drafts attend to: the pages that the last pass over everything found to
weigh most, by sequence and KV head, in memory.

A pass attends to all rows and so knows what part of its attention fell on each page: exp(lse of the
page - lse), summed over the queries. Pages are offered as the pass's reads arrive, in any order,
while the rows are in its buffers, checked; those with the most stay. What the model looked at for
the last tokens it looks at for the next few, mostly (KV heads attend to few places, which move
slowly), so a draft over these pages proposes mostly what the model says. Drafts read nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...device.row_layout import RowLayout
from ...ops.attention import PagesInMemory, Queries, RowsInMemory, attend_rows
from ...ops.attention.naming import PageTensors, page_naming
from .tier import Lost, attend_some, for_as_many

PAGE_ROWS = 32
#: Pages that stay whatever they weigh: the one where the text begins, and the last two.
_ALWAYS = 3


def kept_pages(rows: int, share: float) -> int:
    """How many pages of so many rows stay in memory for a KV head of a sequence."""
    n_pages = -(-rows // PAGE_ROWS)
    return min(n_pages, _ALWAYS + round(share * n_pages))


def page_bytes(d: int, dv: int, dtype: torch.dtype, queries: int) -> int:
    """Bytes of memory of one page of a KV head: its rows, which of them are seen, its log-sum-exp
    for the queries of a pass, its number and whether it stays."""
    return PAGE_ROWS * ((d + dv) * dtype.itemsize + 1) + 4 * queries + 8 + 1


class PageTier:
    """The pages of one layer that stay in memory.

    Args:
        share: of the layer's pages that stays in memory, besides the first and the last.
        lost: the sequences for whose pages there is no memory.

    Attributes:
        end: the rows before this position were offered; later ones are in memory anyway.
    """

    def __init__(self, share: float, lost: Lost | None = None):
        self._share, self._lost, self.end = share, lost or Lost(), 0
        # of each sequence, its place in the tensors below; -1: it has none
        self._places: list[int] = []
        self._k = self._v = torch.empty(0)  # [sequences, KV heads, slots, PAGE_ROWS, d or dv]
        # uint8 [sequences, KV heads, slots, PAGE_ROWS]: which of the rows are there, and seen
        self._seen = torch.empty(0, dtype=torch.uint8)
        # [sequences, KV heads, slots, queries]: log-sum-exp of each page for the pass's queries
        self._lse = torch.empty(0)
        self._stays = torch.empty(0, dtype=torch.uint8)  # [sequences, KV heads, slots]
        # int64 [sequences, KV heads, slots]: which page of the text it is; -1: none
        self._number = torch.empty(0, dtype=torch.int64)

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows, and of what is known of them."""
        every = (self._k, self._v, self._seen, self._lse, self._stays, self._number)
        return sum(each.numel() * each.element_size() for each in every)

    def begin(self, queries: Queries, n_sequences: int, dtype: torch.dtype, end: int) -> None:
        """A pass begins, with queries like these of so many sequences, which offers the rows before
        position `end`, of that dtype."""
        _, heads, n, d = queries.q.shape
        slots, device = kept_pages(end, self._share), queries.q.device
        self.end = end
        kept = self._lost.left(n_sequences)
        if self._k.shape[:3] != (len(kept), heads, slots):
            self._k = self._v = torch.empty(0)  # before others take their place

            def rows_of(some: list[int]) -> tuple[torch.Tensor, ...]:
                return tuple(
                    torch.zeros(
                        len(some), heads, slots, PAGE_ROWS, width, dtype=dtype, device=device
                    )
                    for width in (d, queries.dv)
                )

            kept, made = for_as_many(kept, self._lost, rows_of)
            self._k, self._v = made or (
                torch.empty(0, heads, slots, PAGE_ROWS, width, dtype=dtype, device=device)
                for width in (d, queries.dv)
            )
        self._places = [-1] * n_sequences
        for place, sequence in enumerate(kept):
            self._places[sequence] = place
        shape = (len(kept), heads, slots)
        self._seen = torch.zeros(*shape, PAGE_ROWS, dtype=torch.uint8, device=device)
        self._lse = torch.full((*shape, n), -torch.inf, device=device)
        self._stays = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._number = torch.full(shape, -1, device=device)

    def native(self, queries: Queries, layout: RowLayout, first_sequence: int, threads: int) -> Any:
        """The compiled naming of these queries in the processor's memory, which keeps the pages
        here. `first_sequence`: of the queries; `threads` 0: as many as PyTorch uses."""
        last = first_sequence + queries.q.shape[0]
        return page_naming(
            queries,
            layout.geometry,
            PageTensors(self._k, self._v, self._seen, self._lse, self._stays, self._number),
            self._places[first_sequence:last],
            self.end,
            threads=threads,
        )

    def offer(
        self,
        sequence: int,
        head: int,
        rows: RowsInMemory,
        seen: torch.Tensor | None,
        page_lse: torch.Tensor,
        lse: torch.Tensor,
        begins: int,
    ) -> None:
        """Rows of one head of a sequence, which the pass has just attended to.

        Args:
            rows: K and V [1, 1, n, d].
            seen: bool [n], which of them are no padding; None: all.
            page_lse: [queries, pages], of the pages that these rows are.
            lse: [queries], over all rows that have been attended to so far.
            begins: the page in which the sequence's text begins.
        """
        sequence = self._places[sequence]
        if sequence < 0:
            return
        first, slots = rows.first_position // PAGE_ROWS, self._lse.shape[2]
        before = rows.first_position % PAGE_ROWS
        number = first + torch.arange(page_lse.shape[1], device=lse.device)
        there = torch.ones(rows.n_rows, dtype=torch.uint8) if seen is None else seen.to(torch.uint8)
        # the page where the text begins, which models look at whatever it says, and the last ones
        stays = (number + _ALWAYS - 1) * PAGE_ROWS >= self.end
        stays |= number == begins
        own = [
            (kept[sequence, head], _pages(rows_of.to(kept), before))
            for kept, rows_of in zip(
                (self._k, self._v, self._seen),
                (*(each[0, 0] for each in rows.counting), there),
                strict=True,
            )
        ]
        page_lse = page_lse.mT
        if before or (before + rows.n_rows) % PAGE_ROWS:
            page_lse = self._complete(sequence, head, number, own, page_lse)
        every = torch.cat([self._lse[sequence, head], page_lse])
        mass = torch.exp(every - lse).sum(dim=-1).nan_to_num(0.0)
        mass[torch.cat([self._stays[sequence, head].bool(), stays])] = torch.inf
        mass[:slots][self._number[sequence, head] < 0] = -0.5  # there is none
        mass[slots:][(page_lse == -torch.inf).all(dim=-1)] = -1.0  # nothing of it is seen
        wins = torch.zeros(len(mass), dtype=torch.bool, device=lse.device)
        wins[mass.topk(slots).indices] = True
        new = (wins & (mass >= 0))[slots:].nonzero().flatten()
        free = (~wins[:slots]).nonzero().flatten()[: len(new)]
        if len(new):
            for kept, pages in own:
                kept[free] = pages[new]
            self._lse[sequence, head, free] = page_lse[new]
            self._stays[sequence, head, free] = stays[new].to(torch.uint8)
            self._number[sequence, head, free] = number[new]

    def _complete(
        self,
        sequence: int,
        head: int,
        number: torch.Tensor,
        own: list[tuple[torch.Tensor, torch.Tensor]],
        page_lse: torch.Tensor,
    ) -> torch.Tensor:
        """Adds rows of pages of which others came before. Returns the log-sum-exp of each page
        [pages, queries] without those."""
        page_lse = page_lse.clone()
        known = self._number[sequence, head][:, None] == number
        seen = own[2][1]
        for slot, page in known.nonzero().tolist():
            which = seen[page].bool()
            for kept, pages in own:
                kept[slot, which] = pages[page, which]
            self._lse[sequence, head, slot] = torch.logaddexp(
                self._lse[sequence, head, slot], page_lse[page]
            )
            page_lse[page] = -torch.inf
        return page_lse

    def attend(
        self, queries: Queries, rows: RowsInMemory | None, threads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Tier`."""
        k, v, seen = (each.flatten(2, 3) for each in (self._k, self._v, self._seen))
        pages = PagesInMemory(k, v, seen)
        return attend_some(
            queries,
            rows,
            self._places,
            lambda own, behind: attend_rows(own, behind, pages=pages, threads=threads),
            threads,
        )

    def select(self, sequences: list[int]) -> None:
        """Sequence i becomes what `sequences[i]` was."""
        if not self.end:
            return
        there = [self._places[i] for i in sequences if self._places[i] >= 0]
        turn = iter(range(len(there)))
        self._places = [next(turn) if self._places[i] >= 0 else -1 for i in sequences]
        names = ("_k", "_v", "_seen", "_lse", "_stays", "_number")
        with torch.inference_mode(False):  # the next pass writes to them
            for name in names:
                setattr(self, name, getattr(self, name)[there])


def _pages(rows: torch.Tensor, before: int) -> torch.Tensor:
    """[pages, PAGE_ROWS, ...] of rows [n, ...], the first of which stands at `before` in its page;
    zeros where there is none."""
    behind = -(before + len(rows)) % PAGE_ROWS
    if before or behind:
        rows = F.pad(rows, (*([0, 0] * (rows.dim() - 1)), before, behind))
    return rows.unflatten(0, (-1, PAGE_ROWS))
