"""csrc/cuda/maxsim_fp32.cu as nvcc compiles it for sm_90, executed, against fp64: half of what
docs/tolerances.md allows, since the other half is the reference's, on tensor cores that lose as
much as any do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from espnx.ops.maxsim import by_warps
from espnx.ops.maxsim.cuda import maxsim_cuda
from tests.ops.cut_off import lost_rows
from tests.ops.records import Records, normals, scatter
from tests.ops.tolerances import gamma
from tests.ptx.matrix import sum_of_cut
from tests.ptx.nvcc import needs_nvcc
from tests.sweeps import some

pytestmark = needs_nvcc
D = (64, 96, 128)


@pytest.fixture(autouse=True)
def few(device_code: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So few warps that each takes several documents."""
    monkeypatch.setattr(by_warps, "WARPS", 2)
    monkeypatch.setattr(by_warps, "_MULTIPROCESSORS", 1)


@pytest.fixture
def cuts_addends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ptx.matrix.CUTS_ADDENDS", True)


def exact(query: torch.Tensor, documents: list[torch.Tensor]) -> torch.Tensor:
    """float64; -inf for a document without rows."""
    return torch.stack(
        [
            (query.double() @ each.double().T).amax(-1).sum()
            if len(each)
            else torch.tensor(-torch.inf, dtype=torch.float64)
            for each in documents
        ]
    )


def check(query: torch.Tensor, documents: list[torch.Tensor], after: int = 0) -> None:
    """Of products below fp32's normal range half of its least step may be lost, and as much of
    their sums."""
    n_query_tokens, d = query.shape
    records = scatter(documents, "fp32", align_bytes=16)
    behind = torch.full((after,), 0xFF, dtype=torch.uint8)
    found = maxsim_cuda(query, torch.cat([records.buffer, behind]), *records.args[1:]).double()
    expected = exact(query, documents)
    sizes = exact(query.abs(), [each.abs() for each in documents])
    allowed = gamma(d + n_query_tokens, 2.0**-24) * sizes
    allowed += 2.0**-150 * n_query_tokens * (2 * d + 1)
    differences = (found - expected).abs()
    has_rows = torch.tensor([len(each) > 0 for each in documents])
    assert torch.equal(found[~has_rows], expected[~has_rows])
    assert (differences <= allowed)[has_rows].all(), (differences / allowed).tolist()


def spread(d: int) -> torch.Tensor:
    """Factors from 1 to 2^-60."""
    return torch.exp2(-torch.arange(d) * 60 / (d - 1))


def test_cut_off_addends() -> None:
    """Each by itself, towards 0, however many there are."""
    ones, nothing = np.ones((1, 16, 1)), np.zeros((1, 1, 1))
    for value, each in ((0.75, 0.0), (-0.75, 0.0), (1.5, 1.0), (-1.5, -1.0)):
        addends = np.full((1, 1, 16), value * 2.0**-23)
        addends[..., 3] = 1.0
        assert sum_of_cut(addends, ones, nothing) == 1 + 15 * each * 2.0**-23
    assert sum_of_cut(addends, ones, nothing + 8.0) == 9.0


@pytest.mark.usefixtures("cuts_addends")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("d", D)
@pytest.mark.parametrize("n_query_tokens", [1, 31, 32])
def test_values_of_every_size(d: int, n_query_tokens: int) -> None:
    """Also such that differ by 60 powers of two within a row, rows of very different length, and
    sums without a negative term, which lose one-sidedly."""
    documents = [
        normals(n, d, seed=n) * scale
        for n, scale in ((1, 1.0), (17, 1e-30), (3, 1e-42), (2, 1e37), (1, 1e-45))
    ]
    documents += [torch.zeros(0, d), torch.zeros(2, d), normals(5, d, seed=4) * spread(d)]
    documents += [normals(20, d, seed=5) * 10.0 ** torch.arange(-19, 1)[:, None]]
    documents += [torch.rand(33, d, generator=torch.Generator().manual_seed(6)) + 0.5]
    query = normals(n_query_tokens, d, seed=9)
    check(query, documents)
    check(query.abs(), documents, after=16)
    check(query * 1e-38, documents)


@pytest.mark.usefixtures("cuts_addends")
@pytest.mark.parametrize("d", D)
def test_the_most_that_is_lost(d: int) -> None:
    """Sums of 16 values in rows of 64, of 32 in longer ones: of twice as many in rows of 64, or of
    all in longer ones, this would be outside."""
    query, rows = lost_rows(d)
    check(query, [row[None] for row in rows[::11]])


@pytest.mark.parametrize("d", some(D, 2))
def test_what_fp16_has_no_steps_for(d: int) -> None:
    """Queries that see only values far below a row's largest, values of queries far below their
    largest, rows of zeros, and scores that nearly cancel."""
    rows = normals(18, d, seed=1)
    rows[:, d // 2 :] *= 1e-9
    query = normals(2, d, seed=2)
    query[:, : d // 2] = 0.0
    check(query, [rows, rows[:1]])
    query[:, 7] = 1e9
    rows[:, 7] = 0.0
    check(query, [rows, rows[:1], torch.zeros(1, d)])
    between = (2.0**13 + 0.499) * 2.0**-24  # of a part's steps, at all places on the same side
    small, ones = torch.full((1, d), between * 2.0**-13), torch.full((1, d), 1.9)
    small[0, 7], ones[0, 7] = 1.0, 0.0
    check(small, [ones])
    check(ones, [small])
    value = normals(1, d, seed=3)
    check(torch.cat([value, -value * (1 + 2.0**-20)]), [normals(1, d, seed=4)])


def test_what_is_made_once_more_is_rare(device_code: Callable[..., Any]) -> None:
    """Or every result would be right, and slow: where tensor cores suffice a launch takes a
    fraction of the instructions, also if rows are of very different length, or of zeros, or all of
    the query is."""
    documents = [normals(20, 64, seed=n) for n in range(4)]
    long = [each * 10.0 ** torch.arange(-19, 1)[:, None] for each in documents]
    zeros, query = [torch.zeros(20, 64) for _ in range(4)], normals(8, 64, seed=9)

    def n_steps(asked: torch.Tensor, given: list[torch.Tensor]) -> int:
        launcher = device_code()
        maxsim_cuda(asked, *scatter(given, "fp32", align_bytes=16).args)
        return int(launcher.n_steps)

    quick, slow = n_steps(query, documents), n_steps(query * 0.0 + 3e38, documents)
    assert quick < 0.2 * slow
    for asked, given in ((query, long), (query, zeros), (query * 0.0, documents)):
        assert n_steps(asked, given) < 1.02 * quick


@pytest.mark.parametrize("d", some(D, 3))
def test_what_is_not_finite_at_any_place(d: int) -> None:
    """NaN where a product is: of a NaN, or of an infinity and a zero; an infinity with its sign, or
    none where another row is larger; the documents beside them as ever."""
    query = normals(3, d, seed=9).abs()
    query[1, 3] = 0.0
    for place in (3, d - 1):
        documents = [normals(n, d, seed=n) for n in (1, 2, 17, 2, 1)]
        values = (torch.nan, torch.inf, -torch.inf, -torch.inf)
        for document, row, value in zip((0, 1, 2, 4), (0, 1, 16, 0), values, strict=True):
            documents[document][row, place] = value
        records = scatter(documents, "fp32", align_bytes=16)
        for given in (None, torch.nan, torch.inf):
            asked = query.clone()
            if given is not None:
                asked[2, place] = given
            found = maxsim_cuda(asked, *records.args)
            expected = exact(asked, documents).float()
            assert torch.allclose(found, expected, rtol=1e-5, equal_nan=True), (place, given)


def test_products_beyond_fp32_until_a_factor_makes_them_less() -> None:
    """Rows near the largest of fp32 by a query of small values; and sums that are beyond it."""
    rows = torch.full((3, 64), 3e38)
    rows[1] *= -1.0
    check(torch.full((2, 64), 1e-3), [rows, rows[1:2]])
    records: Records = scatter([rows, rows[1:2]], "fp32", align_bytes=16)
    found = maxsim_cuda(torch.full((2, 64), 1.0), *records.args)
    assert found.tolist() == [torch.inf, -torch.inf]
