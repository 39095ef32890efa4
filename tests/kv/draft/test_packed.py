"""Rows of four bits: how far they are off, attention over them beside fp64 over what they stand
for, and how they come together from pieces and from memory."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.kv.draft.packed import PackedTier, capacity_of, planned_bytes
from espnx.kv.draft.tier import Lost
from espnx.ops.attention import Queries, RowsInMemory, attend_rows_reference
from espnx.ops.attention.packed import (
    PACKED_CHANNELS,
    PACKED_ROWS,
    attend_packed,
    pack_pages,
    pack_pages_reference,
    packed_page_bytes,
    unpack_pages,
)

_SEQUENCES, _HEADS = 2, 3


def rows_of(n: int, d: int, dv: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(_SEQUENCES, _HEADS, n, width, generator=draw) for width in (d, dv))
    return k + 20 * torch.randn(d, generator=draw), v  # K's channels have offsets


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (64, 64), (40, 136), (128, 72)])
def test_values_are_off_by_half_a_step_at_most(d: int, dv: int) -> None:
    """A step is a fifteenth of the reach: of a channel of K in a page, of a token's channels of V.
    The least value's rounding to fp16 comes on top."""
    k, v = rows_of(3 * PACKED_ROWS, d, dv)
    pages = pack_pages(k, v)
    assert pages.shape == (_SEQUENCES, _HEADS, 3, packed_page_bytes(d, dv))
    got_k, got_v = unpack_pages(pages, d, dv)
    by_page = k.unflatten(2, (-1, PACKED_ROWS))
    for rows, got, dim, groups in (
        (by_page, got_k.unflatten(2, (-1, PACKED_ROWS)), 3, [slice(None)]),
        (v, got_v, 3, [slice(at, at + PACKED_CHANNELS) for at in range(0, dv, PACKED_CHANNELS)]),
    ):
        for some in groups:
            own, theirs = rows[..., some], got[..., some]
            reach = own.amax(dim, keepdim=True) - own.amin(dim, keepdim=True)
            rounding = own.abs().amax(dim, keepdim=True) * 2**-11
            assert ((own - theirs).abs() <= reach / 30 * 1.01 + 2 * rounding + 1e-6).all()
    assert packed_page_bytes(64, 64) * 8 / (PACKED_ROWS * 128) == 4.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("n_pages", "d", "dv"), [(0, 64, 64), (1, 8, 8), (3, 64, 64), (19, 40, 136), (2, 7, 72)]
)
def test_pages_are_packed_to_the_bit_as_the_reference_packs_them(
    level: int, n_pages: int, d: int, dv: int, dtype: torch.dtype
) -> None:
    k, v = (each.to(dtype) for each in rows_of(n_pages * PACKED_ROWS, d, dv, seed=n_pages))
    if n_pages:
        k[..., 0], k[..., 1, 2], v[0, 1, 3], v[1, 0, 4, 1] = 7.0, torch.inf, -3.0, torch.nan
        k[0, 0, 5, 1], v[0, 0, 6], k[..., 3] = -torch.inf, 1e-6, k[..., 3] * 1e-5
    assert torch.equal(pack_pages(k, v), pack_pages_reference(k, v))
    # of another layout in memory
    across = k.mT.contiguous().mT, v.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(pack_pages(*across), pack_pages_reference(k, v))


@pytest.mark.parametrize(
    ("n", "d", "dv", "n_pages", "rules"),
    [
        (1, 64, 64, 5, {}),
        (3, 64, 64, 9, {"soft_cap": 3.0}),
        (9, 24, 136, 4, {}),
        (27, 128, 72, 3, {}),
        (4, 8, 8, 0, {}),
        (4, 8, 8, 1, {"first_visible": torch.tensor([3, 31])}),
        (2, 16, 16, 4, {"visible": torch.arange(320).view(2, 160).remainder(3).to(torch.uint8)}),
        (5, 64, 64, 4, {"last_position": torch.tensor([0, 31, 32, 100, 127])}),
        (4, 64, 64, 4, {"window": 50, "position": torch.arange(124, 128)}),
        (
            2,
            16,
            8,
            2,
            {"slopes": torch.linspace(0, 0.1, 6).view(3, 2), "position": torch.tensor([70, 71])},
        ),
    ],
)
def test_attention_is_that_over_what_is_unpacked(
    level: int, n: int, d: int, dv: int, n_pages: int, rules: dict[str, Any]
) -> None:
    k, v = rows_of(n_pages * PACKED_ROWS, d, dv, seed=n)
    q = torch.randn(_SEQUENCES, _HEADS, n, d, generator=torch.Generator().manual_seed(n)) / 8
    queries = Queries(q, dv, **rules)
    pages = pack_pages(k, v)
    more = torch.full(
        (_SEQUENCES, _HEADS, n_pages + 2, packed_page_bytes(d, dv)), 255, dtype=torch.uint8
    )  # capacity that does not count
    more[:, :, :n_pages] = pages
    o, lse = attend_packed(queries, more, n_pages, threads=2)
    rows = RowsInMemory(*unpack_pages(pages, d, dv), 0, n_pages * PACKED_ROWS, 0)
    right_o, right_lse = attend_rows_reference(queries, rows, dtype=torch.float64)
    assert torch.allclose(o.double(), right_o, rtol=1e-4, atol=1e-4)
    assert torch.allclose(lse.double(), right_lse, rtol=1e-4, atol=1e-4)
    # and over rows behind them, of which some do not count
    end, more_rows = n_pages * PACKED_ROWS, rows_of(PACKED_ROWS, d, dv, seed=n + 1)
    behind = RowsInMemory(*more_rows, 3, 9, end)
    o, lse = attend_packed(queries, more, n_pages, behind, threads=2)
    whole = (torch.cat(each, dim=2) for each in zip(rows.counting, behind.counting, strict=True))
    rows = RowsInMemory(*whole, 0, end + 9, 0)
    right_o, right_lse = attend_rows_reference(queries, rows, dtype=torch.float64)
    assert torch.allclose(o.double(), right_o, rtol=1e-4, atol=1e-4)
    assert torch.allclose(lse.double(), right_lse, rtol=1e-4, atol=1e-4)


def test_extreme_values() -> None:
    """Channels that are all alike, beyond fp16, infinite, or no numbers: nothing but the nearest
    number of fp16 comes of them."""
    k, v = rows_of(PACKED_ROWS, 16, 16)
    k[..., 0], k[..., 1], k[..., 2] = 7.0, 1e30, -torch.inf
    k[0, 0, 3, 3], v[0, 0, 4, 5], v[0, 0, 5] = torch.nan, torch.inf, 0.0
    got_k, got_v = unpack_pages(pack_pages(k, v), 16, 16)
    assert got_k.isfinite().all()
    assert got_v.isfinite().all()
    assert (got_k[..., 0] == 7.0).all()
    assert (got_k[..., 1] == 65504.0).all()
    assert (got_k[..., 2] == -65504.0).all()
    assert not got_v[0, 0, 5].any()


@pytest.mark.parametrize("end", [32 * 5, 32 * 5 + 17, 20, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_come_together(end: int, dtype: torch.dtype) -> None:
    """Rows in pieces cut anywhere, in any order; then such as waited in memory."""
    draw, d, dv = random.Random(end), 16, 24
    n = 32 * 9
    k, v = (each.to(dtype) for each in rows_of(n, d, dv))
    queries = Queries(torch.randn(_SEQUENCES, _HEADS, 2, d), dv)
    tier = PackedTier()
    for _ in range(2):  # what a pass that failed left there does not count
        tier.begin(queries, _SEQUENCES, end)
        pieces = []
        for sequence in range(_SEQUENCES):
            for head in range(_HEADS):
                cuts = sorted({0, end, *(draw.randrange(1, end) for _ in range(4))})
                pieces += [(sequence, head, *each) for each in pairwise(cuts)]
        draw.shuffle(pieces)
        for sequence, head, begin, stop in pieces:
            at = sequence, head, slice(begin, stop)
            tier.show(sequence, head, k[at], v[at], begin)
    tier.finish(end)
    for upto in (end, end + 10, 32 * 7 + 5, 32 * 7 + 6, n):
        if upto > tier.end:
            rows = RowsInMemory(
                k[:, :, tier.end :].contiguous(),
                v[:, :, tier.end :].contiguous(),
                0,
                n - tier.end,
                tier.end,
            )
            tier.take(rows, upto)
        whole = max(end, upto // 32 * 32) // 32 * 32
        assert tier.end == max(end, upto // 32 * 32)
        packed = unpack_pages(pack_pages(k[:, :, :whole], v[:, :, :whole]), d, dv)
        rest = k[:, :, whole : tier.end].float(), v[:, :, whole : tier.end].float()
        both = (torch.cat(pair, dim=2) for pair in zip(packed, rest, strict=True))
        right = attend_rows_reference(
            queries, RowsInMemory(*both, 0, tier.end, 0), dtype=torch.float64
        )
        for got, wanted in zip(tier.attend(queries, None, 1), right, strict=True):
            assert torch.allclose(got.double(), wanted, rtol=1e-4, atol=1e-4)
    page_bytes = _SEQUENCES * _HEADS * packed_page_bytes(d, dv)
    assert page_bytes * 9 <= tier.memory_bytes <= page_bytes * capacity_of(9)


def test_sequences_are_chosen_and_lost() -> None:
    n, d = 32 * 4, 16
    k, v = rows_of(n, d, d)
    queries = Queries(torch.randn(_SEQUENCES, _HEADS, 2, d), d)
    lost = Lost()
    tier = PackedTier(lost)
    tier.begin(queries, _SEQUENCES, 64)
    for sequence in range(_SEQUENCES):
        for head in range(_HEADS):
            tier.show(sequence, head, k[sequence, head, :64], v[sequence, head, :64], 0)
    tier.finish(64)
    before = tier.attend(queries, None, 1)
    tier.select([1, 0, 1])
    lost.select([1, 0, 1])
    three = queries.chosen([1, 0, 1])
    for was, now in zip(before, tier.attend(three, None, 1), strict=True):
        assert torch.equal(was[[1, 0, 1]], now)
    lost.sequences.add(1)  # another layer has no memory for it
    rows = RowsInMemory(*(each[[1, 0, 1], :, 64:].contiguous() for each in (k, v)), 0, 64, 64)
    tier.take(rows, n)
    o, lse = tier.attend(three, None, 1)
    assert (lse[1] == -torch.inf).all()
    assert not o[1].any()
    assert torch.equal(o[0], o[2])
    assert tier.memory_bytes <= 2 * _HEADS * packed_page_bytes(d, d) * capacity_of(4)


def test_what_does_not_fit_is_refused() -> None:
    k, v = rows_of(40, 16, 16)
    with pytest.raises(errors.InvalidInputError, match="multiple of 32"):
        pack_pages(k, v)
    pages = pack_pages(k[:, :, :32], v[:, :, :32])
    queries = Queries(torch.zeros(_SEQUENCES, _HEADS, 2, 16), 16)
    for wrong, n_pages in (
        (pages, 2),
        (pages, -1),
        (pages[..., :-1], 1),
        (pages[:1], 1),
        (pages.view(torch.int8), 1),
        (pages[0], 1),
    ):
        with pytest.raises(errors.InvalidInputError, match="packed pages"):
            attend_packed(queries, wrong, n_pages)


GROWTH = """
import os
from pathlib import Path
import torch
from espnx.kv.cache import trim_heap
from espnx.kv.draft.packed import PackedTier
from espnx.ops.attention import RowsInMemory

def resident_bytes():
    trim_heap()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

draw = torch.Generator().manual_seed(1)
k, v = (torch.randn(8, 3, 480, 64, generator=draw) for _ in range(2))
PackedTier().take(RowsInMemory(k, v, 0, 480, 0), 480)  # what is loaded by the first use
before, tiers = resident_bytes(), [PackedTier() for _ in range(4)]
for tier in tiers:
    for end in range(480, 7680 + 1, 480):
        tier.take(RowsInMemory(k, v, 0, 480, tier.end), end)
print(resident_bytes() - before, sum(tier.memory_bytes for tier in tiers))
"""


def test_the_process_grows_by_what_is_planned() -> None:
    """56 MB, as `espnx plan` foretells them, to 5 %: what packing takes on the way is returned.

    In a process of its own: another test's freed pages would be used again, and not be seen."""
    ran = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    grown, memory_bytes = map(int, ran.stdout.split())
    n, d, heads, sequences, tiers = 7680, 64, 3, 8, 4
    planned = tiers * sequences * heads * planned_bytes(n, d, d, 32, 2 * d * 2)
    assert grown == pytest.approx(planned, rel=0.05)
    assert memory_bytes == pytest.approx(planned, rel=0.05)
    assert planned < 0.31 * tiers * sequences * heads * n * 2 * d * 2  # of fp16
