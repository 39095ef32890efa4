"""csrc/cuda/maxsim_slices.cu as nvcc compiles it for sm_90, executed, against the reference within
the bounds of docs/tolerances.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espnx.ops import maxsim_reference, token_format
from espnx.ops.maxsim import by_warps, cuda
from espnx.ops.maxsim.by_warps import sliced
from espnx.ops.maxsim.checks import RecordsFound
from espnx.ops.maxsim.cuda import maxsim_cuda
from tests.ops.records import Records, integers, normals, scatter
from tests.ops.tolerances import WHOLE_FORMATS, assert_scores_close, maxsim_bound
from tests.ptx.nvcc import SOURCES, Launcher, needs_nvcc
from tests.ptx.program import Fault
from tests.ptx.sparse import BEYOND, moved
from tests.sweeps import some

#: Lengths that fill a kernel's warps, and that leave some of them less, or nothing.
LENGTHS = (
    *(("bf16", 384), ("int8", 264), ("fp16", 520), ("bf16", 136), ("int8", 200), ("fp16", 1024)),
    *(("int8", 192), ("int8", 760), ("int8", 152), ("int8", 144), ("int8", 768), ("int8", 384)),
    *(("fp16", 136), ("fp16", 392), ("fp16", 768), ("fp16", 264), ("int8", 136), ("int8", 512)),
    *(("int8", 256), ("int8", 392), ("int8", 520), ("int8", 904), ("int8", 1024), ("bf16", 256)),
    *(("bf16", 264), ("bf16", 512), ("bf16", 520), ("bf16", 768), ("bf16", 904), ("bf16", 1024)),
)
FEW = 8  # of these: three formats, all slices, two warps, four and eight
#: None, one, and about the rows of a tile; more documents than blocks hold at once.
COUNTS = (1, 0, 33, 16, 64, 0, 2, 31)


@pytest.fixture
def few(device_code: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """One multiprocessor alone, so that each block takes several documents."""
    monkeypatch.setattr(by_warps, "_MULTIPROCESSORS", 1)
    launcher: Launcher = device_code()
    return launcher


def check(query: torch.Tensor, records: Records) -> None:
    """Of one query, or several."""
    found, several = maxsim_cuda(query, *records.args), query.dim() == 3
    for one, scores in zip(*((query, found) if several else ([query], [found])), strict=True):
        bound = maxsim_bound(
            one, records, tensor_cores=True, by_digits=records.format in WHOLE_FORMATS
        )
        assert_scores_close(scores, maxsim_reference(one, *records.args), bound)


def spoiled(records: Records, document: int, row: int, column: int, value: float, d: int) -> None:
    """Writes a value of a row, or its scale."""
    token = token_format(records.format)
    at = int(records.offset_bytes[document]) + row * token.token_row_bytes(d)
    at += 0 if records.format == "int8" else 2 * column
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32}[records.format]
    given = torch.tensor([value], dtype=kind).view(torch.uint8)
    records.buffer[at : at + given.numel()] = given


@needs_nvcc
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fmt", "d"),
    [*LENGTHS[:FEW], *(pytest.param(*each, marks=pytest.mark.sweep) for each in LENGTHS[FEW:])],
)
@pytest.mark.parametrize("n_query_tokens", [32, 5])
def test_within_the_derived_bound(few: Launcher, fmt: str, d: int, n_query_tokens: int) -> None:
    """Documents of every length about a tile's, one after another in the same ring."""
    records = scatter([normals(n, d, seed=n) for n in COUNTS], fmt, align_bytes=16)
    check(normals(n_query_tokens, d, seed=99), records)
    plan = sliced(fmt, d)
    assert plan is not None
    assert few.launches == [plan.kernel]


@needs_nvcc
@pytest.mark.parametrize("fmt", some(["bf16", "int8"], 2))
def test_as_launched(device_code: Callable[..., Any], fmt: str) -> None:
    """As many blocks as there are documents; the only one may be empty, and there may be none."""
    launcher: Launcher = device_code()
    records = scatter([normals(n, 384, seed=n) for n in (35, 0)], fmt, align_bytes=16)
    for which in (slice(0, 1), slice(1, 2), slice(0, 2), slice(0, 0)):
        part = (records.offset_bytes[which], records.n_tokens[which])
        check(normals(2, 11, 384, seed=3), Records(records.buffer, *part, fmt))
    assert len(launcher.launches) == 3


@needs_nvcc
@pytest.mark.parametrize(("fmt", "d"), some([("int8", 256), ("bf16", 264), ("fp16", 520)], 3))
def test_several_queries(few: Launcher, fmt: str, d: int) -> None:
    """Each has a counter and blocks of its own; they need not lie side by side, or aligned."""
    records = scatter([normals(n, d, seed=n) for n in (3, 0, 34, 1)], fmt, align_bytes=16)
    wide = normals(3, 9, 2 * d, seed=4)
    check(wide[..., ::2], records)
    flat = torch.cat([torch.zeros(1), normals(9, d, seed=5).flatten()])
    assert flat[1:].data_ptr() % 16
    check(flat[1:].view(9, d), records)
    assert few.launches


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("fmt", "d"), some([("bf16", 264), ("fp16", 512)], 2))
def test_bit_for_bit_where_fp32_is_exact(fmt: str, d: int) -> None:
    records = scatter([integers(n, d, seed=n) for n in (40, 0, 1, 16)], fmt, align_bytes=16)
    query = integers(7, d, seed=9)
    assert torch.equal(maxsim_cuda(query, *records.args), maxsim_reference(query, *records.args))


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("fmt", "d"), [("bf16", 136), ("fp16", 520)])
def test_a_query_that_16_bits_would_round_away_is_kept(fmt: str, d: int) -> None:
    """Values of 22 bits, in every warp's slice: no part is lost. (The bound of many values is wider
    than the third part.)"""
    query = torch.zeros(4, d)
    document = torch.zeros(33, d)
    for token, column in enumerate((0, 71, d // 2 + 3, d - 2)):
        query[token, column] = (1 + 2.0**-11 + 2.0**-21) * (1.0, 2.0**-30, 2.0**40, 1.0)[token]
        document[token * 9, column] = 1.0
    records = scatter([document], fmt, align_bytes=16)
    for token in query.split(1):
        assert torch.equal(maxsim_cuda(token, *records.args), token.max()[None])


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("depth", by_warps._DEPTHS)
@pytest.mark.parametrize("fmt", some(["bf16", "int8"], 2))
def test_rings_of_every_depth(monkeypatch: pytest.MonkeyPatch, depth: Any, fmt: str) -> None:
    """On a GPU with less shared memory there are fewer stages, or a barrier more."""
    d = 136
    monkeypatch.setattr(by_warps, "_DEPTHS", (depth,))
    monkeypatch.setattr(by_warps, "_DEPTHS_OF_FLAT", ((depth[0], 1),))
    sliced.cache_clear()
    try:
        records = scatter([normals(n, d, seed=n) for n in (65, 1, 40, 97)], fmt, align_bytes=16)
        check(normals(7, d, seed=9), records)
    finally:
        sliced.cache_clear()


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("fmt", "d"), some([("bf16", 136), ("int8", 264)], 2))
def test_offsets_beyond_32_bits(fmt: str, d: int) -> None:
    records = scatter([normals(n, d, seed=n) for n in (3, 0, 40)], fmt, align_bytes=16)
    places = (records.offset_bytes + BEYOND, records.n_tokens)
    far = Records(moved(records.buffer), *places, fmt)
    query = normals(5, d, seed=9)
    assert torch.equal(maxsim_cuda(query, *far.args), maxsim_cuda(query, *records.args))


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("fmt", "d"), some([("bf16", 136), ("int8", 136), ("bf16", 384), ("fp16", 520)], 2)
)
def test_what_is_not_finite(fmt: str, d: int) -> None:
    """Stored NaNs and infinities (of int8 rows a scale, then NaN), the reference's NaNs, and no
    more; documents beside them keep their scores."""
    documents = [integers(n, d, seed=n).abs() + 1 for n in (3, 1, 2, 34)]
    records = scatter(documents, fmt, align_bytes=16)
    values = (torch.nan, torch.inf, -torch.inf)
    for document, row, value in zip((0, 1, 2), (2, 0, 1), values, strict=True):
        spoiled(records, document, row, (d - 1) * (document % 2), value, d)
    query = integers(3, d, seed=9).abs() + 1
    expected = maxsim_reference(query, *records.args)
    found = maxsim_cuda(query, *records.args)
    assert torch.allclose(found, expected, rtol=2e-5, atol=0, equal_nan=True)
    query[2, 0] = torch.inf
    places = [each[1:3] for each in records.args[1:3]]
    expected = maxsim_reference(query, records.buffer, *places, fmt)
    found = maxsim_cuda(query, records.buffer, *places, fmt)
    assert torch.allclose(found, expected, rtol=2e-5, atol=0, equal_nan=True)


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("fmt", "d"), some([("int8", 136), ("fp16", 392), ("bf16", 384)], 2))
def test_queries_of_any_size(fmt: str, d: int) -> None:
    """Tokens of zeros, of values beyond fp16's, and of nearly the largest of fp32."""
    records = scatter([normals(n, d, seed=n) for n in (35, 1)], fmt, align_bytes=16)
    query = normals(6, d, seed=9)
    query *= torch.tensor([1.0, 0.0, 1e-30, 1e9, 1e-5, 7.0])[:, None]
    check(query, records)
    query = torch.full((1, d), 3e35)
    query[:, 1::2] = -3e35
    check(query, records)


@needs_nvcc
@pytest.mark.usefixtures("few")
def test_scales_that_are_large_until_a_factor_makes_them_less() -> None:
    """A row's scale times the sums of a query that is scaled up, too, is beyond fp32."""
    records = scatter([integers(3, 136, seed=1)], "int8", align_bytes=16)
    spoiled(records, 0, 2, 0, 1e33, 136)
    query = torch.full((2, 136), 1e-3)
    found, expected = maxsim_cuda(query, *records.args), maxsim_reference(query, *records.args)
    assert expected.isfinite().all()
    assert torch.allclose(found, expected, rtol=1e-5)


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("fmt", "d"), [("bf16", 136), ("int8", 264)])
def test_what_the_launcher_refuses_would_be_a_fault(
    monkeypatch: pytest.MonkeyPatch, fmt: str, d: int
) -> None:
    """Not a byte is read outside the buffer, nor at another address than at multiples of 16."""
    records = scatter([normals(33, d)], fmt, align_bytes=16)
    query = normals(17, d, seed=9)
    monkeypatch.setattr(cuda, "look_inside", lambda *args: RecordsFound(16, 33))
    monkeypatch.setattr(cuda, "is_aligned", lambda *args: True)
    with pytest.raises(Fault, match="misaligned"):
        maxsim_cuda(query, records.buffer, records.offset_bytes - 4, records.n_tokens, fmt)
    with pytest.raises(Fault, match=r"bytes at byte .* of argument 1"):
        maxsim_cuda(query, records.buffer[:-1].clone(), *records.args[1:])


@needs_nvcc
@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_what_is_made_once_more_is_rare(few: Launcher, fmt: str) -> None:
    """Or every result would be right, and slow: also with tokens of zeros, and tiny ones."""
    records = scatter([normals(9, 136, seed=n) for n in range(3)], fmt, align_bytes=16)
    plain = normals(8, 136, seed=9)
    small = plain.clone()
    small[3], small[5] = 0.0, 1e-40 * plain[5]
    n_steps = []
    for value, query in ((1.0, plain), (1.0, small), (torch.inf, plain)):
        spoiled(records, 1, 3, 5, value, 136)
        before = few.n_steps
        maxsim_cuda(query, *records.args)
        n_steps.append(few.n_steps - before)
    assert abs(n_steps[1] - n_steps[0]) < 0.05 * n_steps[0]
    assert n_steps[2] > 1.5 * n_steps[0]


def test_launches_fit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how much shared memory a multiprocessor has: 228 KiB, 164 or 100."""
    device = torch.device("cuda", 0)
    for kib, depths in ((228, (3, 1)), (164, (4, 2)), (100, (2, 1))):
        properties = SimpleNamespace(shared_memory_per_multiprocessor=kib << 10)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        size = by_warps._shared_bytes_of(device)
        plan = sliced("bf16", 384, size)
        assert plan is not None
        assert (plan.stages, plan.buffers) == depths
        assert plan.resident * (plan.shared_bytes + 1024) <= size
    assert by_warps._shared_bytes_of(torch.device("cpu")) == 228 << 10
    assert sliced("bf16", 1024, 100 << 10) is None
    # as few other warps as may be, and no more values than they have
    for fmt, d in LENGTHS:
        plan = sliced(fmt, d)
        assert plan is not None
        assert plan.warps * plan.slice_dims >= d
        assert plan.shared_bytes <= 227 << 10
    assert sliced("fp16", 384) is None is sliced("bf16", 128) is sliced("int8", 1032)


def test_kernels_are_those_of_the_source() -> None:
    text = (SOURCES / "maxsim_slices.cu").read_text()
    found = re.findall(r"^MAXSIM\((\w+), \w+, (\d+)\)$", text, re.MULTILINE)
    kernels = {f"espnx_maxsim_{fmt}_slices_{dims}" for fmt, dims in found}
    plans = [sliced(fmt, d) for fmt, d in LENGTHS]
    assert kernels == {plan.kernel for plan in plans if plan is not None}
