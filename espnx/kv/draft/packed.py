"""All rows of a layer in four bits, in memory: what drafts attend to in place of those on SSD.

Packed are whole pages of tokens that stand; later rows are in memory anyway. The rows that were
stored before the first draft are shown by one pass over them, those that come are packed while they
wait in memory to be written.
"""

from __future__ import annotations

import torch

from ...ops.attention import Queries, RowsInMemory, attend_rows, merge
from ...ops.attention.packed import PACKED_ROWS, attend_packed, pack_pages, packed_page_bytes
from .tier import Lost, attend_some, for_as_many

#: Memory for a part more pages than there are, so that not every page moves all others.
_MORE = 1 / 32


def capacity_of(n_pages: int) -> int:
    """The pages that there is memory for when there are so many."""
    return n_pages + max(1, int(n_pages * _MORE))


def planned_bytes(tokens: int, d: int, dv: int, block_rows: int, row_bytes: int) -> float:
    """Bytes that the rows of a KV head will take when there are so many tokens, to a few percent.

    Args:
        d, dv: lengths of a row of K and of V.
        block_rows: tokens of a block on SSD, which what is stored at first ends with.
        row_bytes: of K and V of a token as they are.
    """
    n_pages = tokens // PACKED_ROWS
    # between what there is and what there is memory for; and between a whole page and one that
    # is not, whose rows wait
    rest = block_rows % PACKED_ROWS and min(block_rows, PACKED_ROWS) / 2
    pages = (n_pages + capacity_of(n_pages)) / 2
    return pages * packed_page_bytes(d, dv) + rest * row_bytes


class PackedTier:
    """The packed rows of one layer.

    Args:
        lost: the sequences for whose rows there is no memory.

    Attributes:
        end: the rows before this position are here; later ones are in memory anyway.
    """

    def __init__(self, lost: Lost | None = None):
        self._lost, self.end = lost or Lost(), 0
        # of each sequence, its place in the tensors below; -1: it has none
        self._places: list[int] = []
        self._n_pages = 0
        # uint8 [sequences, KV heads, capacity, page_bytes]
        self._pages = torch.empty(0, dtype=torch.uint8)
        # rows as they came, of pages that are not whole: k and v of each, with the rows that are
        # there, by (sequence, head, page)
        self._begun = dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
        # [sequences, KV heads, rows, d or dv] behind the last whole page
        self._rest_k = self._rest_v = torch.empty(0)

    @property
    def memory_bytes(self) -> int:
        """Bytes of packed rows, and of those that wait for a whole page."""
        every = [self._pages, self._rest_k, self._rest_v]
        every += [part for parts in self._begun.values() for part in parts]
        return sum(each.numel() * each.element_size() for each in every)

    # --- rows come ---

    def begin(self, queries: Queries, n_sequences: int, end: int) -> None:
        """A pass begins that shows (`show`) all rows before position `end`, of so many sequences,
        to queries like these."""
        self._begun.clear()
        self._rest_k = self._rest_v = torch.empty(0)
        self.end, self._n_pages = 0, 0
        self._pages = torch.empty(0, dtype=torch.uint8)
        kept = self._lost.left(n_sequences)
        self._places = [-1] * n_sequences
        for place, sequence in enumerate(kept):
            self._places[sequence] = place
        self._grow(queries.q, queries.dv, end // PACKED_ROWS)

    def show(self, sequence: int, head: int, k: torch.Tensor, v: torch.Tensor, first: int) -> None:
        """Rows k [n, d] and v [n, dv] of one head of a sequence, the first at position `first`: in
        any order and cut anywhere, each once."""
        place = self._places[sequence]
        if place < 0:
            return
        n = len(k)
        begin = min(n, -first % PACKED_ROWS)
        stop = begin + (n - begin) // PACKED_ROWS * PACKED_ROWS
        if stop > begin:
            at = (first + begin) // PACKED_ROWS
            pages = pack_pages(k[begin:stop], v[begin:stop])
            self._pages[place, head, at : at + len(pages)] = pages
        for some in (slice(0, begin), slice(stop, n)):
            if some.stop > some.start:
                self._begin_page(place, head, k[some], v[some], first + some.start)

    def _begin_page(
        self, place: int, head: int, k: torch.Tensor, v: torch.Tensor, first: int
    ) -> None:
        """Rows of a page that others bring the rest of."""
        number, before = divmod(first, PACKED_ROWS)
        key = place, head, number
        if key not in self._begun:
            self._begun[key] = (
                k.new_zeros(PACKED_ROWS, k.shape[1]),
                v.new_zeros(PACKED_ROWS, v.shape[1]),
                torch.zeros(PACKED_ROWS, dtype=torch.bool),
            )
        rows_k, rows_v, there = self._begun[key]
        at = slice(before, before + len(k))
        rows_k[at], rows_v[at], there[at] = k, v, True
        if bool(there.all()):
            self._pages[place, head, number] = pack_pages(rows_k, rows_v)[0]
            del self._begun[key]

    def finish(self, end: int) -> None:
        """All rows before position `end` have been shown."""
        self._n_pages, rest = end // PACKED_ROWS, end % PACKED_ROWS
        if rest and self._begun:
            shape = self._pages.shape[:2]
            of_k, of_v, _ = next(iter(self._begun.values()))
            self._rest_k, self._rest_v = (
                each.new_zeros(*shape, rest, each.shape[1]) for each in (of_k, of_v)
            )
            for (place, head, _), (k, v, _) in self._begun.items():
                self._rest_k[place, head], self._rest_v[place, head] = k[:rest], v[:rest]
        self._begun.clear()
        self.end = end

    def take(self, rows: RowsInMemory, end: int) -> None:
        """Packs whole pages of rows in memory, which begin at `self.end`, up to position `end`:
        tokens that stand, of all sequences."""
        whole = end // PACKED_ROWS * PACKED_ROWS
        n = whole - self.end
        if n <= 0:
            return
        k, v = (each[:, :, :n] for each in rows.counting)
        if not self._places:  # everything was in memory so far
            self._places = [-1] * len(k)
            for place, sequence in enumerate(self._lost.left(len(k))):
                self._places[sequence] = place
        self._let_go()
        there = [i for i, place in enumerate(self._places) if place >= 0]
        if not there:
            self.end = whole
            return
        k, v = k[there], v[there]
        if self._rest_k.numel():
            k, v = torch.cat([self._rest_k, k], dim=2), torch.cat([self._rest_v, v], dim=2)
        self._grow(k, v.shape[-1], whole // PACKED_ROWS)
        left = self._pages.shape[0]  # of them, for whom there was memory
        pages = pack_pages(k[:left], v[:left])
        self._pages[:, :, self._n_pages : whole // PACKED_ROWS] = pages
        self._rest_k = self._rest_v = torch.empty(0)
        self._n_pages, self.end = whole // PACKED_ROWS, whole

    def _let_go(self) -> None:
        """Lets go of sequences for whose rows another layer has no memory."""
        left = [i for i, place in enumerate(self._places) if place >= 0]
        kept = [i for i in left if i not in self._lost.sequences]
        if len(kept) == len(left):
            return
        at = [self._places[i] for i in kept]
        self._places = [kept.index(i) if i in kept else -1 for i in range(len(self._places))]
        self._choose(at)

    def _choose(self, places: list[int]) -> None:
        """Keeps what stands at these places of the tensors, in this order."""
        with torch.inference_mode(False):  # the next pass writes to them
            if self._pages.numel():
                self._pages = self._pages[places]
            if self._rest_k.numel():
                self._rest_k, self._rest_v = self._rest_k[places], self._rest_v[places]

    def _grow(self, like: torch.Tensor, dv: int, n_pages: int) -> None:
        """Memory for so many pages, of heads and rows like `like` [..., heads, n, d]."""
        there = [i for i, place in enumerate(self._places) if place >= 0]
        heads, d = like.shape[1], like.shape[-1]
        held = self._n_pages
        if self._pages.numel() and n_pages <= self._pages.shape[2]:
            return

        def pages_of(some: list[int]) -> tuple[torch.Tensor, ...]:
            shape = (len(some), heads, capacity_of(n_pages), packed_page_bytes(d, dv))
            return (torch.zeros(shape, dtype=torch.uint8, device=like.device),)

        kept, made = for_as_many(there, self._lost, pages_of)
        if not made:  # there is no memory for any of them
            kept, made = [], pages_of([])
        new = made[0]
        if held:
            new[:, :, :held] = self._pages[: len(kept), :, :held]
        self._pages = new
        for sequence in there[len(kept) :]:
            self._places[sequence] = -1

    # --- what drafts ask ---

    def attend(
        self, queries: Queries, rows: RowsInMemory | None, threads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Tier`."""

        def over(own: Queries, behind: RowsInMemory | None) -> tuple[torch.Tensor, torch.Tensor]:
            o, lse = attend_packed(own, self._pages, self._n_pages, behind, threads=threads)
            rest = self._rest_k.shape[2] if self._rest_k.numel() else 0
            if not rest:
                return o, lse
            first = self._n_pages * PACKED_ROWS
            waiting = RowsInMemory(self._rest_k, self._rest_v, 0, rest, first)
            return merge(o, lse, *attend_rows(own, waiting, threads=threads))

        return attend_some(queries, rows, self._places, over, threads)

    def select(self, sequences: list[int]) -> None:
        """Sequence i becomes what `sequences[i]` was."""
        if not self._places:
            return
        there = [self._places[i] for i in sequences if self._places[i] >= 0]
        turn = iter(range(len(there)))
        self._places = [next(turn) if self._places[i] >= 0 else -1 for i in sequences]
        self._choose(there)
