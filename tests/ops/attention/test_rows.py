"""Attention over rows in memory: the compiled version and the plain one, with every mask and change
of scores, alone and together."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.device.row_layout import RowLayout
from espnx.ops.attention import (
    PagesInMemory,
    Queries,
    RowsInMemory,
    add_sinks,
    attend_pages,
    attend_rows,
    attend_rows_reference,
    merge,
)
from tests.device.rows import assert_right, normal, queries

N_SEQUENCES, N_HEADS = 2, 2


def some(
    d: int, dv: int, n: int, n_rows: int, seed: int, *, scale: float = 1.0
) -> tuple[RowLayout, RowsInMemory, torch.Generator]:
    rng = torch.Generator().manual_seed(seed)
    k, v = (
        normal(N_SEQUENCES, N_HEADS, n_rows + 5, width, rng=rng).mul(scale).half()
        for width in (d, dv)
    )
    return RowLayout("fp16", d, dv), RowsInMemory(k, v, 3, n_rows, 70), rng


def changes(names: tuple[str, ...], n: int, n_rows: int, rng: torch.Generator) -> dict[str, Any]:
    """Of queries that stand among the rows' last positions."""
    position = 70 + torch.randint(n_rows // 2, n_rows + 3, (n,), generator=rng)
    every = {
        "last_position": position,
        "window": 1 + n_rows // 3,
        "soft_cap": 3.0,
        "slopes": torch.rand(N_HEADS, n, generator=rng),
        "first_visible": torch.tensor([75, 70 + n_rows // 2]),
        "visible": (torch.rand(2, 80 + n_rows, generator=rng) < 0.7).byte(),
    }
    return {"position": position, **{name: every[name] for name in names}}


NAMES = ("last_position", "window", "soft_cap", "slopes", "first_visible", "visible")


@pytest.mark.parametrize(
    "names",
    [*itertools.chain(*(itertools.combinations(NAMES, count) for count in (0, 1, 2))), NAMES],
)
@pytest.mark.parametrize(
    ("d", "dv", "n", "n_rows"),
    [(64, 64, 1, 300), (40, 72, 5, 129), (16, 8, 37, 200), (128, 128, 9, 1)],
)
def test_like_the_reference(names: tuple[str, ...], d: int, dv: int, n: int, n_rows: int) -> None:
    """Few queries and many, tiles that are not full, scores that the cap bends (a deviation of
    3)."""
    layout, rows, rng = some(d, dv, n, n_rows, seed=n, scale=3.0)
    look = queries(layout, N_SEQUENCES, N_HEADS, n, rng, **changes(names, n, n_rows, rng))
    assert_right(attend_rows(look, rows, threads=2), [], look, rows)
    assert_right(attend_rows_reference(look, rows), [], look, rows)


@pytest.mark.parametrize("names", [(), *((name,) for name in NAMES), NAMES])
@pytest.mark.parametrize(("n", "n_rows"), [(1, 300), (5, 129), (27, 64), (3, 1)])
def test_by_pages(names: tuple[str, ...], n: int, n_rows: int) -> None:
    """The whole is that of all rows at once, and each page's log-sum-exp is that of attention over
    its rows alone. The rows begin at position 70, in the middle of a page."""
    layout, rows, rng = some(64, 40, n, n_rows, seed=n, scale=3.0)
    look = queries(layout, N_SEQUENCES, N_HEADS, n, rng, **changes(names, n, n_rows, rng))
    o, lse, page_lse = attend_pages(look, rows, 32)
    assert_right((o, lse), [], look, rows)
    last = 70 + n_rows
    for page, first in enumerate(range(64, last, 32)):
        begin, end = max(first, 70), min(first + 32, last)
        own = replace(rows, skip=rows.skip + begin - 70, n_rows=end - begin, first_position=begin)
        wanted = attend_rows_reference(look, own, dtype=torch.float64)[1]
        assert torch.allclose(page_lse[..., page].double(), wanted, rtol=1e-5, atol=1e-5)
    assert page_lse.shape[-1] == len(range(64, last, 32))


def test_what_pages_hide_has_no_effect_and_what_is_seen_has() -> None:
    layout, rows, rng = some(16, 16, 2, 80, seed=4)
    rows.v[0, 0, 3 + 10] = torch.nan
    for hides in (True, False):
        visible = torch.ones(2, 150, dtype=torch.uint8)
        visible[0, 80] = 0 if hides else 1
        look = queries(layout, N_SEQUENCES, N_HEADS, 2, rng, visible=visible)
        o = attend_pages(look, rows, 32)[0]
        assert bool(o[0, 0].isnan().all()) is not hides
        assert bool(o[0, 1].isfinite().all())
        assert bool(o[1].isfinite().all())


@pytest.mark.parametrize("cpu_level", ["portable", "avx2", "avx512"], indirect=True)
@pytest.mark.parametrize("n", [1, 7, 37])
def test_on_every_level(cpu_level: str, n: int) -> None:
    layout, rows, rng = some(64, 40, n, 259, seed=n, scale=3.0)
    for names in (("soft_cap",), ("slopes",), NAMES):
        look = queries(layout, N_SEQUENCES, N_HEADS, n, rng, **changes(names, n, 259, rng))
        assert_right(attend_rows(look, rows), [], look, rows)


def test_a_change_is_seen() -> None:
    """The comparison above can fail: each of them changes the result."""
    layout, rows, rng = some(64, 64, 3, 200, seed=1, scale=3.0)
    for name in ("window", "soft_cap", "slopes"):
        look = queries(layout, N_SEQUENCES, N_HEADS, 3, rng, **changes((name,), 3, 200, rng))
        plain = Queries(look.q, look.dv)
        with pytest.raises(errors.NotConformingError, match="times the bound"):
            assert_right(attend_rows(plain, rows), [], look, rows)


def test_a_cap_leaves_infinities_and_nan_as_they_are() -> None:
    look = Queries(torch.ones(1, 1, 1, 8), 8, soft_cap=2.0)
    for value, expected in (
        (torch.inf, 2.0),
        (-torch.inf, -2.0),
        (torch.nan, torch.nan),
        (1e30, 2.0),
        (0.0, 0.0),
        (-0.25, -1.52318831),
    ):
        k = torch.zeros(1, 1, 1, 8)
        k[..., 0] = value * 8 if value == -0.25 else value
        _, lse = attend_rows(look, RowsInMemory(k, torch.ones(1, 1, 1, 8), 0, 1, 0))
        torch.testing.assert_close(
            lse.item(), expected, rtol=0, atol=8 * 2.0**-24 * 2, equal_nan=True
        )


def test_nothing_to_see() -> None:
    look = queries(RowLayout("fp16", 16, 8), 1, 2, 3, torch.Generator())
    for attend in (attend_rows, attend_rows_reference):
        o, lse = attend(look, None)
        assert (o.shape, bool(o.any()), bool((lse == -torch.inf).all())) == (
            (1, 2, 3, 8),
            False,
            True,
        )


@pytest.mark.parametrize("parts", [1, 3])
def test_sinks(parts: int) -> None:
    """A logit that joins the softmax and brings no value, whatever parts the rows came in."""
    layout, rows, rng = some(32, 32, 4, 90, seed=3)
    look, sinks = queries(layout, N_SEQUENCES, N_HEADS, 4, rng), normal(N_HEADS, 4, rng=rng)
    o, lse = attend_rows(look, None)
    for i in range(parts):
        begin, end = 90 * i // parts, 90 * (i + 1) // parts
        o, lse = merge(
            o,
            lse,
            *attend_rows(
                look, RowsInMemory(rows.k, rows.v, rows.skip + begin, end - begin, 70 + begin)
            ),
        )
    found, sums = add_sinks(o, lse, sinks)
    k, v = (each.double() for each in rows.counting)
    scores = torch.cat(
        [
            look.q.double() @ k.transpose(-1, -2),
            sinks.double()[None, :, :, None].expand(N_SEQUENCES, -1, -1, 1),
        ],
        dim=-1,
    )
    torch.testing.assert_close(
        found.double(), scores.softmax(-1)[..., :-1] @ v, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(sums.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-6)
    nothing, alone = add_sinks(*attend_rows(look, None), sinks)
    assert not nothing.any()
    torch.testing.assert_close(alone, sinks.expand_as(alone))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 4}, "no position"),
        ({"slopes": torch.ones(2, 3)}, "no position"),
        ({"window": 0, "position": torch.arange(3)}, "at least 1"),
        ({"soft_cap": 0.0}, "above 0"),
        ({"slopes": torch.ones(3, 2), "position": torch.arange(3)}, "KV heads"),
    ],
)
def test_queries_that_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=message):
        queries(RowLayout("fp16", 16, 8), 1, 2, 3, torch.Generator(), **wrong)


def test_rows_that_are_refused() -> None:
    look, k, v = (
        queries(RowLayout("fp16", 16, 8), 1, 2, 3, torch.Generator()),
        torch.zeros(1, 2, 9, 16),
        torch.zeros(1, 2, 9, 8),
    )
    for rows in (
        RowsInMemory(k[:, :1], v, 0, 9, 0),
        RowsInMemory(k, k, 0, 9, 0),
        RowsInMemory(k, v.half(), 0, 9, 0),
        RowsInMemory(k, v, 3, 7, 0),
        RowsInMemory(k, v, -1, 3, 0),
        RowsInMemory(k.transpose(1, 2), v, 0, 2, 0),
    ):
        with pytest.raises(errors.InvalidInputError, match="rows in memory"):
            attend_rows(look, rows)


@pytest.mark.parametrize("names", [(), ("last_position",), ("soft_cap",), ("visible",), NAMES])
@pytest.mark.parametrize(
    ("n", "n_rows", "n_paged"), [(1, 300, 64), (5, 0, 32), (27, 64, 256), (3, 1, 1)]
)
def test_with_pages(names: tuple[str, ...], n: int, n_rows: int, n_paged: int) -> None:
    """One softmax over both, by hand in fp64: what is seen of pages their marks alone say, and of
    the queries' changes the cap alone is for them."""
    layout, rows, rng = some(64, 40, n, max(1, n_rows), seed=n, scale=3.0)
    look = queries(layout, N_SEQUENCES, N_HEADS, n, rng, **changes(names, n, n_rows, rng))
    k, v = (
        normal(N_SEQUENCES, N_HEADS, n_paged, width, rng=rng).mul(3).half() for width in (64, 40)
    )
    seen = (torch.rand(N_SEQUENCES, N_HEADS, n_paged, generator=rng) < 0.6).byte()
    seen[0, 1] = 0
    before = rows if n_rows else None
    scores = look.q.double() @ k.double().mT
    if look.soft_cap:
        scores = look.soft_cap * torch.tanh(scores / look.soft_cap)
    scores = torch.where(seen[:, :, None].bool(), scores, -torch.inf)
    o, lse = attend_rows_reference(look, before, dtype=torch.float64)
    whole = torch.logaddexp(lse, scores.logsumexp(-1))
    peak = whole.nan_to_num(neginf=0.0)[..., None]
    wanted = (lse[..., None] - peak).exp() * o + (scores - peak).exp() @ v.double()
    for threads, kind in ((2, torch.float16), (1, torch.float32)):  # of pages, whatever rows have
        pages = PagesInMemory(k.to(kind), v.to(kind), seen)
        got = attend_rows(look, before, pages=pages, threads=threads)
        assert torch.allclose(got[0].double(), wanted, rtol=2e-4, atol=2e-4)
        assert torch.allclose(got[1].double(), whole, rtol=2e-4, atol=2e-4)


def test_pages_that_do_not_fit() -> None:
    layout, rows, rng = some(16, 8, 2, 80, seed=4)
    look = queries(layout, N_SEQUENCES, N_HEADS, 2, rng)
    k, v = torch.zeros(2, 2, 32, 16), torch.zeros(2, 2, 32, 8)
    seen = torch.ones(2, 2, 32, dtype=torch.uint8)
    attend_rows(look, rows, pages=PagesInMemory(k, v, seen))
    for wrong in (
        PagesInMemory(k, v, seen[:1]),
        PagesInMemory(k, v, seen.bool()),
        PagesInMemory(k, v[:, :, :31], seen),
        PagesInMemory(k, v.half(), seen),
        PagesInMemory(k[:1], v[:1], seen[:1]),
        PagesInMemory(k.flatten(2), v, seen),
    ):
        with pytest.raises(errors.InvalidInputError, match=r"(pages|rows) in memory"):
            attend_rows(look, rows, pages=wrong)
