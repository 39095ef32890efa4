"""Compiled naming beside softmax over everything in fp64: attention, what stays of the pages, and
what lies in their slots, whatever the format, the masks and the pieces in which rows come."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.row_layout import RowLayout
from espnx.kv.draft.naming import NamingAttention, TensorNaming
from espnx.kv.draft.pages import PAGE_ROWS, PageTier
from espnx.kv.draft.tier import Lost
from espnx.ops.attention import Queries, RowsInMemory, attend_rows_reference
from espnx.storage.native import load_native

_SEQUENCES, _HEADS = 2, 2
Pieces = list[tuple[int, int, int, int]]  # sequence, head, first position, end


def cut(draw: random.Random, end: int, unit: int = 1) -> Pieces:
    """All rows before `end` of every head, in pieces of any length, in any order; cut at multiples
    of `unit` alone."""
    found: Pieces = []
    for sequence in range(_SEQUENCES):
        for head in range(_HEADS):
            some = {draw.randrange(end) // unit * unit for _ in range(4)}
            cuts = sorted({0, end, *some})
            found += [(sequence, head, *each) for each in pairwise(cuts)]
    draw.shuffle(found)
    return found


class Case:
    """Rows, as they come back from a layout, and what attends to them."""

    def __init__(self, form: str, n: int, rows: int, seed: int, **rules: Any):
        draw = torch.Generator().manual_seed(seed)
        self.end, self.d, self.dv = rows, 16, 24
        self.layout = RowLayout(form, self.d, self.dv)
        self.k, self.v = (
            torch.randn(_SEQUENCES, _HEADS, rows, width, generator=draw)
            for width in (self.d, self.dv)
        )
        q = torch.randn(_SEQUENCES, _HEADS, n, self.d, generator=draw)
        self.queries = Queries(q, self.dv, **rules)
        blocks = self.layout.pack(self.k, self.v)
        self.stored_k, self.stored_v = self.layout.unpack(blocks, rows)

    def begun(self, share: float, lost: Lost | None = None) -> PageTier:
        tier = PageTier(share, lost)
        dtype = torch.float32 if self.layout.format == "int8" else self.layout.dtype
        tier.begin(self.queries, _SEQUENCES, dtype, self.end)
        return tier

    def weights(self) -> torch.Tensor:
        """float64 [sequences, heads, pages]: what each page weighs."""
        rows = RowsInMemory(self.stored_k, self.stored_v, 0, self.end, 0)
        _, total = attend_rows_reference(self.queries, rows, dtype=torch.float64)
        found = []
        for begin in range(0, self.end, PAGE_ROWS):
            some = RowsInMemory(
                self.stored_k, self.stored_v, begin, min(PAGE_ROWS, self.end - begin), begin
            )
            _, lse = attend_rows_reference(self.queries, some, dtype=torch.float64)
            found.append((lse - total).exp().nan_to_num(0.0).sum(dim=-1))
        return torch.stack(found, dim=-1)


def read(case: Case, pieces: Pieces) -> tuple[torch.Tensor, np.ndarray]:
    """A read that brings these pieces: its bytes and their table. What comes back of them is from
    then on what the case has stored."""
    blocks, table, at = list[torch.Tensor](), list[list[int]](), 0
    for sequence, head, begin, end in pieces:
        own = sequence, head, slice(begin, end)
        packed = case.layout.pack(case.k[own], case.v[own])
        case.stored_k[own], case.stored_v[own] = case.layout.unpack(packed, end - begin)
        table.append([sequence, head, at, end - begin, begin])
        blocks.append(packed.flatten())
        at += packed.numel()
    return torch.cat(blocks), np.array(table, dtype=np.int64)


_VISIBLE = torch.ones(_SEQUENCES, 400, dtype=torch.uint8)
_VISIBLE[1, :37], _VISIBLE[0, 70:75] = 0, 0
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    # format, queries, rows, rules
    "few queries": ("fp32", 3, 333, {}),
    "one": ("fp16", 1, 64, {}),
    "many": ("bf16", 27, 350, {}),
    "int8": ("int8", 9, 300, {}),
    "padding": ("fp32", 5, 320, {"first_visible": torch.tensor([0, 64])}),
    "holes": ("fp16", 12, 391, {"visible": _VISIBLE, "first_visible": torch.tensor([0, 37])}),
    "last": ("fp32", 9, 200, {"last_position": torch.arange(191, 200)}),
    "window": ("fp32", 4, 300, {"window": 100, "position": torch.arange(296, 300)}),
    "cap and slopes": (
        "fp32",
        10,
        129,
        {
            "soft_cap": 5.0,
            "slopes": torch.linspace(0, 0.05, 20).view(2, 10),
            "position": torch.arange(120, 130),
        },
    ),
    "short": ("fp32", 9, 5, {}),
}


def named(case: Case, tier: PageTier, seed: int, unit: int = 1) -> NamingAttention:
    """Naming of all rows, several pieces a read."""
    pieces = cut(random.Random(seed), case.end, unit)
    naming = NamingAttention(case.queries, case.layout, tier, 0, 2)
    for begin in range(0, len(pieces), 3):
        naming(*read(case, pieces[begin : begin + 3]))
    return naming


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_over_all_rows(name: str) -> None:
    form, n, rows, rules = CASES[name]
    case = Case(form, n, rows, 1, **rules)
    o, lse = named(case, case.begun(0.1), seed=2).result()
    every = RowsInMemory(case.stored_k, case.stored_v, 0, rows, 0)
    right_o, right_lse = attend_rows_reference(case.queries, every, dtype=torch.float64)
    assert torch.allclose(o.double(), right_o, rtol=1e-5, atol=1e-5)
    assert torch.allclose(lse.double(), right_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_the_heaviest_pages_stay(name: str, share: float) -> None:
    """Those that weigh most when the choice among them is made, and at the end, if what has come by
    then says the same of them: nearly always."""
    form, n, rows, rules = CASES[name]
    case = Case(form, n, rows, 3, **rules)
    tier = case.begun(share)
    named(case, tier, seed=4, unit=PAGE_ROWS)
    slots, brought, best = tier._number.shape[2], 0.0, 0.0
    for own, numbers in zip(
        case.weights().flatten(0, 1), tier._number.flatten(0, 1).tolist(), strict=True
    ):
        got = [page for page in numbers if page >= 0]
        seen = own.nonzero().flatten().tolist()
        always = {seen[0], *(page for page in seen if page >= len(own) - 2)}
        order = [page for page in own.argsort(descending=True).tolist() if page not in always]
        wanted = always | {page for page in order[: slots - len(always)] if own[page] > 0}
        assert len(set(got)) == len(got)
        assert always <= set(got)
        assert len(got) == len(wanted)
        brought, best = brought + float(own[got].sum()), best + float(own[list(wanted)].sum())
    assert brought >= 0.97 * best


@pytest.mark.parametrize("name", CASES)
def test_slots_hold_what_was_stored(name: str) -> None:
    """Rows to the bit, which of them are seen, and the log-sum-exp of the page."""
    form, n, rows, rules = CASES[name]
    case = Case(form, n, rows, 5, **rules)
    tier = case.begun(1.0)
    named(case, tier, seed=6)
    first, visible = case.queries.first_visible, case.queries.visible
    for sequence in range(_SEQUENCES):
        for head in range(_HEADS):
            for slot, page in enumerate(tier._number[sequence, head].tolist()):
                if page < 0:
                    continue
                position = page * PAGE_ROWS + torch.arange(PAGE_ROWS)
                seen = position < rows
                if first is not None:
                    seen &= position >= int(first[sequence])
                if visible is not None:
                    seen &= visible[sequence, position.clamp_max(399)] != 0
                at = sequence, head, slot
                assert torch.equal(tier._seen[at].bool(), seen)
                for kept, stored in ((tier._k, case.stored_k), (tier._v, case.stored_v)):
                    wanted = stored[sequence, head, position[seen]].to(kept.dtype)
                    assert torch.equal(kept[at][seen], wanted)
                some = RowsInMemory(
                    case.stored_k,
                    case.stored_v,
                    page * PAGE_ROWS,
                    min(PAGE_ROWS, rows - page * PAGE_ROWS),
                    page * PAGE_ROWS,
                )
                _, lse = attend_rows_reference(case.queries, some, dtype=torch.float64)
                assert torch.allclose(
                    tier._lse[at].double(), lse[sequence, head], rtol=1e-5, atol=1e-5
                )


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", ["many", "padding", "holes", "cap and slopes"])
def test_what_pages_weigh_on_every_level(name: str) -> None:
    """For each query, wherever pages begin in a read."""
    form, n, rows, rules = CASES[name]
    case = Case(form, n, rows, 1, **rules)
    tier = case.begun(1.0)
    named(case, tier, seed=3)
    for begin in range(0, rows, PAGE_ROWS):
        some = RowsInMemory(
            case.stored_k, case.stored_v, begin, min(PAGE_ROWS, rows - begin), begin
        )
        wanted = attend_rows_reference(case.queries, some, dtype=torch.float64)[1]
        for pair in itertools.product(range(len(wanted)), range(wanted.shape[1])):
            slot = tier._number[pair] == begin // PAGE_ROWS
            if not bool(slot.any()):  # nothing of it is seen
                assert bool((wanted[pair] == -torch.inf).all())
                continue
            got = tier._lse[pair][slot][0].double()
            assert torch.allclose(got, wanted[pair], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [0, 96, 100])
def test_it_chooses_as_the_tensors_do(first: int) -> None:
    """The same pages as the plain version, piece for piece, where no two weigh alike; also where
    the text begins with a piece."""
    case = Case("fp32", 9, 600, 7, first_visible=torch.tensor([first, 0]))
    tier, other = case.begun(0.2), case.begun(0.2)
    pieces = [
        (sequence, head, begin, min(begin + 96, case.end))
        for begin in range(0, case.end, 96)
        for sequence in range(_SEQUENCES)
        for head in range(_HEADS)
    ]
    native = NamingAttention(case.queries, case.layout, tier, 0, 1)
    plain = TensorNaming(case.queries, other, 0)
    memory, table = read(case, pieces)
    native(memory, table)
    plain.show(case.layout, memory, table)
    for numbers, wanted in zip(
        tier._number.flatten(0, 1).tolist(), other._number.flatten(0, 1).tolist(), strict=True
    ):
        assert set(numbers) == set(wanted)
    for got, right in zip(native.result(), (plain.o, plain.lse), strict=True):
        assert torch.allclose(got, right, rtol=1e-5, atol=1e-5)


def test_pages_too_light_to_tell_stay_where_there_is_room() -> None:
    """An exponential of fp32 says 0 of them; a later query may want them all the same."""
    case = Case("fp32", 3, 8 * PAGE_ROWS, 8)
    case.k[:] = 0.0
    case.k[:, :, 5 * PAGE_ROWS] = 400.0  # one row has all the attention
    case.queries.q[:] = 1.0
    tier = case.begun(1.0)
    named(case, tier, seed=9)
    assert (tier._number.sort(dim=-1).values == torch.arange(8)).all()


def test_numbers_that_are_none() -> None:
    """A NaN in K makes results NaN and weighs nothing; one in a hidden row has no effect."""
    case = Case("fp32", 3, 200, 10, first_visible=torch.tensor([40, 0]))
    case.k[0, :, 10], case.v[0, :, 11], case.k[1, 0, 50] = torch.nan, torch.inf, torch.nan
    tier = case.begun(0.1)
    o, lse = named(case, tier, seed=11).result()
    assert o[0].isfinite().all()
    assert lse[0].isfinite().all()
    assert o[1, 0].isnan().all()
    assert o[1, 1].isfinite().all()
    assert (tier._number[1, 1] >= 0).all()


def test_sequences_without_a_place_are_attended_to() -> None:
    case = Case("fp32", 4, 150, 12)
    tier = case.begun(0.5, Lost({0}))
    o, lse = named(case, tier, seed=13).result()
    every = RowsInMemory(case.stored_k, case.stored_v, 0, case.end, 0)
    right_o, right_lse = attend_rows_reference(case.queries, every, dtype=torch.float64)
    assert torch.allclose(o.double(), right_o, atol=1e-5)
    assert torch.allclose(lse.double(), right_lse, atol=1e-5)
    assert tier._number.shape[0] == 1
    draft_o, draft_lse = tier.attend(case.queries, None, 1)
    assert (draft_lse[0] == -torch.inf).all()
    assert not draft_o[0].any()
    assert draft_lse[1].isfinite().all()


@pytest.mark.parametrize(
    "piece",
    [
        [2, 0, 0, 8, 0],
        [0, 2, 0, 8, 0],
        [-1, 0, 0, 8, 0],
        [0, 0, 4096, 8, 0],
        [0, 0, -8, 8, 0],
        [0, 0, 0, 8, 64],
        [0, 0, 0, -1, 0],
        [0, 0, 0, 1 << 40, 0],
    ],
)
def test_pieces_that_do_not_fit(piece: list[int]) -> None:
    load_native()  # by which errors are told, as in any process with a device
    case = Case("fp32", 2, 70, 14)
    tier = case.begun(0.5)
    naming = NamingAttention(case.queries, case.layout, tier, 0, 1)
    memory, _ = read(case, [(0, 0, 0, 8)])
    with pytest.raises(errors.InvalidInputError):
        naming(memory[:8192], np.array([piece], dtype=np.int64))
