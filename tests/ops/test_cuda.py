"""The ops on a GPU, through dispatch: what the interpreter cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from espnx.ops import (
    attention,
    crc32c_ranges,
    crc32c_ranges_reference,
    device_code,
    maxsim,
    maxsim_reference,
)
from espnx.ops._native import is_direct, load_ops
from espnx.ops.attention import by_slices
from espnx.ops.crc32c.cuda import SHARED_BYTES, crc32c_cuda, crc32c_triton
from espnx.ops.gather import gather, gather_reference
from espnx.ops.gather.cuda import copy_by_index
from espnx.ops.maxsim import by_warps
from espnx.ops.maxsim.cuda import maxsim_cuda, maxsim_triton
from tests.ops.attention import not_finite
from tests.ops.attention.test_attention import Case
from tests.ops.cut_off import lost_rows
from tests.ops.records import integers, normals, scatter
from tests.ops.tolerances import WHOLE_FORMATS, assert_scores_close, gamma, maxsim_bound

pytestmark = pytest.mark.gpu
COUNTS = (0, 1, 63, 300, 64, 2)
# that hold small integers exactly
# whose kernels of csrc/cuda there are
RESIDUAL = [each for each in by_warps.RINGS if each[0].startswith("residual")]
#: Long rows: every kernel of theirs, filled, and with warps that have less.
SLICED = [
    (fmt, d) for fmt in ("bf16", "int8") for d in (136, 192, 256, 384, 264, 512, 768, 520, 1024)
]
SLICED += [("fp16", d) for d in (136, 264, 512, 768, 1024)]
FORMATS = pytest.mark.parametrize("fmt", ["fp16", "fp32", "bf16"])
EVERY_FORMAT = pytest.mark.parametrize(
    "fmt", ["fp16", "fp32", "bf16", "int8", "bit1", "residual1", "residual2", "residual4"]
)


@FORMATS
@pytest.mark.parametrize("d", [8, 24, 32, 96, 128, 384])
def test_maxsim_bit_for_bit_where_fp32_is_exact(fmt: str, d: int) -> None:
    for align_bytes in (4, 16):
        records = scatter(
            [integers(count, d, seed=count) for count in COUNTS], fmt, align_bytes=align_bytes
        )
        for shape in ((1, d), (5, d), (37, d), (3, 32, d), (70, d), (0, d)):
            query = integers(*shape, seed=99)
            expected = maxsim_reference(query, *records.args)
            scores = maxsim(
                query.cuda(),
                records.buffer.cuda(),
                records.offset_bytes.cuda(),
                records.n_tokens.cuda(),
                fmt,
            )
            assert torch.equal(scores.cpu(), expected)
            places_on_cpu = maxsim(
                query.cuda(), records.buffer.cuda(), records.offset_bytes, records.n_tokens, fmt
            )
            assert torch.equal(places_on_cpu.cpu(), expected)


@EVERY_FORMAT
@pytest.mark.parametrize(
    ("n_query_tokens", "d"), [(1, 8), (1, 128), (32, 32), (32, 128), (37, 128)]
)
def test_maxsim_within_the_derived_bound(fmt: str, n_query_tokens: int, d: int) -> None:
    records = scatter([normals(count, d, seed=count) for count in COUNTS], fmt, align_bytes=16)
    query = normals(n_query_tokens, d, seed=99)
    codebook = records.codebook
    where = records.codebook.to("cuda") if records.codebook else None
    scores = maxsim(
        query.cuda(),
        records.buffer.cuda(),
        records.offset_bytes,
        records.n_tokens,
        fmt,
        codebook=where,
    )
    expected = maxsim_reference(query, *records.args, codebook=codebook)
    is_by_warps = (fmt, d) in by_warps.RINGS or by_warps.sliced(fmt, d) is not None
    by_digits = fmt in WHOLE_FORMATS and is_by_warps and n_query_tokens <= 32
    bound = maxsim_bound(query, records, tensor_cores=True, by_digits=by_digits)
    assert_scores_close(scores.cpu(), expected, bound)


@pytest.mark.parametrize(
    ("fmt", "d"),
    [
        *(each for each in by_warps.RINGS if each[0] in WHOLE_FORMATS),
        *(("int8", d) for d in (136, 192, 264, 384, 768, 1000, 1024)),
    ],
)
def test_rows_that_are_multiplied_in_whole_numbers(fmt: str, d: int) -> None:
    """Many documents, one query and several; tokens of zeros, of values far below their largest, of
    the least and the largest ones; a power of two changes no bit."""
    lengths = (torch.arange(2500) * 37 % 73).tolist()
    records = scatter([normals(n, d, seed=n) for n in lengths], fmt, align_bytes=16)
    there = (records.buffer.cuda(), records.offset_bytes.cuda(), records.n_tokens.cuda(), fmt)
    queries = normals(3, 32, d, seed=99)
    queries[1] *= torch.tensor([1.0, 0.0, 1e-30, 1e9])[:, None].repeat(8, 1)
    queries[2, :, 1:] *= 1e-5
    found = maxsim(queries.cuda(), *there).cpu()
    for query, scores in zip(queries, found, strict=True):
        assert torch.equal(maxsim(query.cuda(), *there).cpu(), scores)
        expected = maxsim_reference(query, *records.args)
        bound = maxsim_bound(query, records, tensor_cores=True, by_digits=True)
        assert_scores_close(scores, expected, bound)
    for exponent in (-90, 90):
        scaled = maxsim((queries[0] * 2.0**exponent).cuda(), *there).cpu()
        assert torch.equal(scaled, found[0] * 2.0**exponent)


def test_maxsim_beyond_4_gib() -> None:
    """Offsets that do not fit in 32 bits."""
    records = scatter([integers(20, 16)], align_bytes=16)
    far = 5 << 30
    buffer = torch.empty(far + records.buffer.numel(), dtype=torch.uint8, device="cuda")
    buffer[far:] = records.buffer.cuda()
    query = integers(5, 16, seed=1)
    scores = maxsim(query.cuda(), buffer, records.offset_bytes + far, records.n_tokens)
    assert torch.equal(scores.cpu(), maxsim_reference(query, *records.args))


def scored(query: torch.Tensor, documents: list[torch.Tensor]) -> torch.Tensor:
    """Of values that the documents' format holds, in fp64 on the GPU: one query."""
    counts = torch.tensor([len(each) for each in documents])
    owner = torch.arange(len(documents)).repeat_interleave(counts).cuda()
    products = query.double().cuda() @ torch.cat(documents).double().cuda().T
    best = products.new_full((len(query), len(documents)), -torch.inf)
    best.scatter_reduce_(1, owner.expand_as(products), products, "amax")
    return best.sum(0).float().cpu()


@pytest.mark.parametrize(
    ("fmt", "d"),
    [
        *(each for each in by_warps.RINGS if each[0] in ("fp32", "fp16", "bf16", "int8")),
        *SLICED,
        ("fp16", 384),
    ],
)
def test_both_versions_of_maxsim_bit_for_bit(fmt: str, d: int) -> None:
    """More documents than warps hold at once, of very different lengths, by two streams at a time,
    of one query and of several. Every token has the scale 1 in int8."""
    lengths = (torch.arange(2500) * 37 % 41).tolist()
    lengths[7], lengths[2499] = 1500, 700
    documents = [integers(n, d, seed=n) for n in lengths]
    for each in documents:
        each[:, 0] = 127.0
    records = scatter(documents, fmt, align_bytes=16)
    there = (records.buffer.cuda(), records.offset_bytes.cuda(), records.n_tokens.cuda(), fmt)
    queries = integers(3, 32, d, seed=99)
    cases = (queries[0], queries[1:, :11])
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found = []
    for version in (maxsim_cuda, maxsim_triton):
        for stream, query in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                found.append(version(query.cuda(), *there))
    torch.cuda.synchronize()
    for query, scores in zip(cases * 2, found, strict=True):
        several = query.dim() == 3
        for one, given in zip(*((query, scores) if several else ([query], [scores])), strict=True):
            assert torch.equal(given.cpu(), scored(one, documents))


@pytest.mark.parametrize("d", [64, 96, 128])
def test_the_most_that_parts_of_fp32_rows_lose(d: int) -> None:
    """Where tensor cores cut off what they add and parts miss as much as they can; and values for
    which fp16 has no steps, beside a large one that the query does not see."""
    query, rows = lost_rows(d)
    small = rows.clone()
    small.fill_diagonal_(3e5)
    for asked, given in ((query, rows), (query.masked_fill(torch.arange(d) == 5, 0.0), small[5:6])):
        records = scatter([row[None] for row in given], "fp32", align_bytes=16)
        found = maxsim(asked.cuda(), records.buffer.cuda(), *records.args[1:]).cpu().double()
        exact = (given.double() @ asked.double().T)[:, 0]
        assert ((found - exact).abs() <= gamma(d + 1, 2.0**-24) * exact).all()


@pytest.mark.parametrize(("fmt", "d"), RESIDUAL)
def test_residual_rows_of_many_documents(fmt: str, d: int) -> None:
    """More documents than warps hold at once, of one query and of several."""
    lengths = (torch.arange(2500) * 37 % 41).tolist()
    records = scatter([normals(n, d, seed=n) for n in lengths], fmt, align_bytes=16)
    assert records.codebook is not None
    there = (records.buffer.cuda(), records.offset_bytes.cuda(), records.n_tokens.cuda(), fmt)
    queries = normals(3, 32, d, seed=99)
    found = maxsim(queries.cuda(), *there, codebook=records.codebook.to("cuda")).cpu()
    one = maxsim(queries[0].cuda(), *there, codebook=records.codebook.to("cuda")).cpu()
    assert torch.equal(one, found[0])
    for query, scores in zip(queries, found, strict=True):
        expected = maxsim_reference(query, *records.args, codebook=records.codebook)
        assert_scores_close(scores, expected, maxsim_bound(query, records, tensor_cores=True))


def test_every_kernel_of_csrc_cuda_is_there() -> None:
    """Else the tests beside this one would pass by other versions. Fails without nvcc."""
    there = torch.device("cuda", torch.cuda.current_device())
    if by_warps._shared_bytes_of(there) < by_warps._SHARED_BYTES:
        pytest.skip("a multiprocessor has less shared memory than some of them take")
    for fmt, d in [*by_warps.RINGS, *SLICED]:
        assert by_warps.is_compiled(fmt, d, 32, there), (fmt, d)
    for fmt in by_slices.FORMATS:
        for d in (256, 576):
            for n_queries in (8, 16):
                given = (n_queries, d, 0, fmt, by_slices.ALIGNMENT_BYTES, there)
                assert by_slices.compiled_plan(*given) is not None, given
    assert device_code.is_there("crc32c", "espnx_crc32c", there, SHARED_BYTES)
    assert device_code.is_there("gather", "espnx_gather_16", there)


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "int8", "fp32"])
@pytest.mark.parametrize("d", [64, 128, 384, 512])
def test_maxsim_of_what_is_not_finite(fmt: str, d: int) -> None:
    documents = [integers(n, d, seed=n).abs() + 1 for n in (70, 1, 17, 200, 33)]
    records = scatter(documents, fmt, align_bytes=16)
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(fmt, torch.float32)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        given = torch.tensor([value], dtype=kind).view(torch.uint8)
        at = int(records.offset_bytes[i])
        records.buffer[at : at + given.numel()] = given
    query = integers(9, d, seed=9).abs() + 1
    for first in (None, 0.0, torch.inf, torch.nan):
        if first is not None:
            query[2, 0] = first
        found = maxsim(query.cuda(), records.buffer.cuda(), *records.args[1:]).cpu()
        expected = maxsim_reference(query, *records.args)
        assert torch.allclose(found, expected, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_past_the_dispatcher_as_by_it(where: str) -> None:
    """With tables on the host and on the device."""
    buffer = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8).cuda()
    buffer &= 0x3B  # no NaN, nothing that is not finite
    places, counts = torch.arange(9).mul(4096).to(where), torch.full((9,), 8).to(where)
    query, ops = integers(4, 128, seed=1).cuda(), torch.ops.espnx
    load_ops()
    assert is_direct(query, buffer, on="cuda")
    for found, expected in (
        (maxsim(query, buffer, places, counts), ops.maxsim(query, buffer, places, counts, "fp16")),
        (crc32c_ranges(buffer, places, counts), ops.crc32c(buffer, places, counts)),
        (gather(buffer, places, counts), ops.gather(buffer, places, counts)),
    ):
        assert torch.equal(found, expected)
    heads, blocks = query.view(1, 4, 1, 128), places[:4].view(1, 2, 2)
    n_rows = torch.full((1,), 13).to(where)
    o, lse = attention(heads, buffer, blocks, n_rows, block_rows=8)
    found_o, found_lse = ops.attention(
        heads, buffer, blocks, n_rows, 8, "fp16", 128**-0.5, 128, None, None, 0
    )
    assert torch.equal(o, found_o)
    assert torch.equal(lse, found_lse)


def attended(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    there = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in vars(case).items()
    }
    o, lse = Case(**there).run(None)
    return o.cpu(), lse.cpu()


@pytest.mark.parametrize(
    ("fmt", "d", "dv", "block_rows", "group"),
    [
        ("fp16", 64, 64, 16, 1),
        ("bf16", 128, 128, 16, 1),
        ("fp16", 128, 0, 128, 1),
        ("bf16", 24, 136, 16, 1),
        ("fp16", 128, 128, 16, 4),
        ("bf16", 64, 64, 16, 7),
        ("fp32", 64, 64, 16, 1),
        ("fp32", 264, 0, 16, 1),
        ("int8", 128, 128, 16, 1),
        ("int8", 128, 128, 128, 1),
        ("int8", 264, 264, 16, 1),
        ("fp16", 256, 0, 16, 1),
        ("bf16", 256, 0, 16, 4),
        ("bf16", 576, 0, 16, 1),
        ("fp16", 576, 512, 16, 4),
    ],
)
def test_attention_of_what_is_not_finite(
    fmt: str, d: int, dv: int, block_rows: int, group: int
) -> None:
    """By every kernel, over rows in one part and in several."""
    for n_rows in (37, 1300):
        sizes = {"n_rows": n_rows, "block_rows": block_rows, "group": group}
        not_finite.check(attended, fmt, d, dv, **sizes)


@pytest.mark.parametrize("unit", [1, 4, 16])
@pytest.mark.parametrize("at", [0, 5 << 30])
def test_gather(unit: int, at: int) -> None:
    """By `csrc/cuda` where it is compiled, and by torch; offsets that do not fit in 32 bits."""
    sizes = unit * torch.tensor([0, 1, 7, 4000, 0, 333, 20_000])
    offsets = unit * torch.tensor([9, 3, 0, 17, 0, 1, 0])
    near = torch.randint(0, 256, (20_000 * unit,), dtype=torch.uint8)
    buffer = torch.empty(at + near.numel(), dtype=torch.uint8, device="cuda")
    buffer[at:] = near.cuda()
    expected = gather_reference(near, offsets, sizes)
    assert torch.equal(gather(buffer, offsets + at, sizes).cpu(), expected)
    assert torch.equal(gather(buffer, (offsets + at).cuda(), sizes.cuda()).cpu(), expected)
    begin = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).cuda()
    out = torch.empty(int(begin[-1]), dtype=torch.uint8, device="cuda")
    copy_by_index(buffer, (offsets + at).cuda(), begin, out, min(unit, 8))
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("version", [crc32c_cuda, crc32c_triton])
def test_both_versions_of_crc32c(version: Any) -> None:
    buffer = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)
    sizes = torch.cat([torch.arange(300) * 37, torch.tensor([2 << 20])])
    offsets = torch.arange(sizes.numel()) * 11
    found = version(buffer.cuda(), offsets, sizes, 5)
    assert torch.equal(found.cpu(), crc32c_ranges(buffer, offsets, sizes, 5))


def test_crc32c() -> None:
    buffer = torch.randint(0, 256, (20_000,), dtype=torch.uint8)
    sizes = torch.cat([torch.arange(300), torch.tensor([4608, 10_001])])
    offsets = torch.arange(sizes.numel()) % 16
    for scale in (1, 4):
        where, size = offsets * scale, sizes // scale * scale
        expected = crc32c_ranges_reference(buffer, where, size, 0x80000001)
        assert torch.equal(crc32c_ranges(buffer.cuda(), where, size, 0x80000001).cpu(), expected)
        assert torch.equal(
            crc32c_ranges(buffer.cuda(), where.cuda(), size.cuda(), 0x80000001).cpu(), expected
        )
