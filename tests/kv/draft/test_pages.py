"""The pages that stay are those with the most of a pass's attention, in whatever pieces and order
their rows come; a draft's attention is that over them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from espnx.kv.draft.pages import PAGE_ROWS, PageTier
from espnx.ops.attention import Queries, RowsInMemory, attend_pages, attend_rows_reference, merge

_HEADS, _QUERIES, _D = 2, 6, 16


def offered(
    tier: PageTier,
    look: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    first_visible: list[int],
    draw: random.Random,
    end: int,
) -> None:
    """All rows k [sequences, heads, n, d] in pieces of any length, in any order."""
    tier.begin(look, len(k), k.dtype, end)
    pieces = []
    for sequence in range(len(k)):
        for head in range(_HEADS):
            cuts = sorted({0, end, *(draw.randrange(1, end) for _ in range(5))})
            pieces += [(sequence, head, *cut) for cut in pairwise(cuts)]
    draw.shuffle(pieces)
    o = torch.zeros(len(k), _HEADS, _QUERIES, _D)
    lse = torch.full((len(k), _HEADS, _QUERIES), -torch.inf)
    for sequence, head, begin, stop in pieces:
        at = slice(sequence, sequence + 1), slice(head, head + 1)
        some = (each[at][:, :, begin:stop].clone() for each in (k, v))
        rows = RowsInMemory(*some, 0, stop - begin, begin)
        own = Queries(
            look.q[at].contiguous(), _D, first_visible=torch.tensor([first_visible[sequence]])
        )
        part = attend_pages(own, rows, PAGE_ROWS)
        o[at], lse[at] = merge(o[at], lse[at], part[0], part[1])
        seen = torch.arange(begin, stop) >= first_visible[sequence]
        tier.offer(
            sequence,
            head,
            rows,
            None if bool(seen.all()) else seen,
            part[2][0, 0],
            lse[sequence, head],
            first_visible[sequence] // PAGE_ROWS,
        )


def heaviest(
    look: Queries, k: torch.Tensor, first: int, sequence: int, head: int, share: float
) -> tuple[set[int], torch.Tensor]:
    """The pages that ought to be there, by a softmax over everything in fp64, and what each page
    weighs."""
    scores = look.q[sequence, head].double() @ k[sequence, head].double().T
    scores[:, :first] = -torch.inf
    parts = scores.softmax(-1).sum(0)
    pages = torch.stack([each.sum() for each in parts.split(PAGE_ROWS)])
    always = {first // PAGE_ROWS, len(pages) - 1, len(pages) - 2}
    left = 3 + round(share * len(pages)) - len(always)
    order = [page for page in pages.argsort(descending=True).tolist() if page not in always]
    return always | {page for page in order[:left] if pages[page] > 0}, pages


@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_the_heaviest_pages_stay(share: float) -> None:
    """Pages whose rows come in two pieces may be let go of between them, and the last of a choice
    may be another than sums over all say: what stays weighs nearly what the right choice weighs."""
    draw, torch_draw = random.Random(1), torch.Generator().manual_seed(1)
    n = 20 * PAGE_ROWS + 9
    k, v = (torch.randn(2, _HEADS, n, _D, generator=torch_draw) for _ in range(2))
    look = Queries(torch.randn(2, _HEADS, _QUERIES, _D, generator=torch_draw), _D)
    first_visible = [0, 40]
    tier = PageTier(share)
    for _ in range(2):  # what a pass before left there does not count
        offered(tier, look, k, v, first_visible, draw, n)
    o, lse = tier.attend(look, None, 1)
    for sequence, first in enumerate(first_visible):
        for head in range(_HEADS):
            wanted, weights = heaviest(look, k, first, sequence, head, share)
            got = set(tier._number[sequence, head].tolist()) - {-1}
            assert weights[list(got)].sum() >= 0.97 * weights[list(wanted)].sum()
            assert got == wanted or share < 1
            # attention over what is there of these pages alone
            there = tier._seen[sequence, head].nonzero()
            places = tier._number[sequence, head][there[:, 0]] * PAGE_ROWS + there[:, 1]
            assert len(places.unique()) == len(places)
            assert int(places.min()) >= first
            rows = (each[sequence, head, places][None, None] for each in (k, v))
            one = Queries(look.q[sequence, head][None, None].contiguous(), _D)
            own = RowsInMemory(*rows, 0, len(places), 0)
            right_o, right_lse = attend_rows_reference(one, own, dtype=torch.float64)
            at = sequence, head
            assert torch.allclose(o[at].double(), right_o[0, 0], rtol=1e-5, atol=1e-5)
            assert torch.allclose(lse[at].double(), right_lse[0, 0], rtol=1e-5, atol=1e-5)


def test_sequences_are_chosen_and_memory_is_what_was_asked_for() -> None:
    draw, torch_draw = random.Random(2), torch.Generator().manual_seed(2)
    n = 64 * PAGE_ROWS
    k, v = (torch.randn(3, _HEADS, n, _D, generator=torch_draw) for _ in range(2))
    look = Queries(torch.randn(3, _HEADS, _QUERIES, _D, generator=torch_draw), _D)
    tier = PageTier(0.25)
    offered(tier, look, k, v, [0, 0, 0], draw, n)
    slots = 3 + 16
    rows_bytes = 3 * _HEADS * slots * PAGE_ROWS * 2 * _D * 4
    assert rows_bytes <= tier.memory_bytes <= rows_bytes * 1.05
    before = tier.attend(look, None, 1)
    tier.select([2, 0])
    after = tier.attend(Queries(look.q[[2, 0]].contiguous(), _D), None, 1)
    for was, now in zip(before, after, strict=True):
        assert torch.equal(was[[2, 0]], now)
