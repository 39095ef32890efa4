"""csrc/cuda/maxsim.cu, maxsim_fp32.cu and maxsim_residual.cu as nvcc compiles them for sm_90,
executed, against the reference within the bounds of docs/tolerances.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espnx.benchmarks.kernels import documents, scoring
from espnx.benchmarks.kernels.point import Setting
from espnx.benchmarks.kernels.timing import Clock, recorded_launches
from espnx.ops import device_code as code
from espnx.ops import maxsim_reference, token_format
from espnx.ops.maxsim import Codebook, by_warps, cuda
from espnx.ops.maxsim.by_warps import RINGS
from espnx.ops.maxsim.checks import RecordsFound
from espnx.ops.maxsim.cuda import maxsim_cuda
from tests.ops.records import Records, integers, normals, scatter
from tests.ops.tolerances import WHOLE_FORMATS, assert_scores_close, maxsim_bound
from tests.ptx.nvcc import SOURCES, needs_nvcc
from tests.ptx.program import Fault
from tests.ptx.sparse import BEYOND, moved
from tests.sweeps import some

EVERY = pytest.mark.parametrize(("fmt", "d"), RINGS)
#: None, one, and about the rows of a stage; more documents than warps hold at once.
COUNTS = (1, 0, 33, 16, 17, 0, 70, 2, 1, 15, 0, 31, 32, 0)


@pytest.fixture
def few(device_code: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``few(warps, blocks)``: of a launch at most so many, so that each takes several documents."""

    def few(warps: int, blocks: int) -> None:
        monkeypatch.setattr(by_warps, "WARPS", warps)
        monkeypatch.setattr(by_warps, "_MULTIPROCESSORS", blocks)

    few(2, 1)
    return few


def scored(query: torch.Tensor, records: Records) -> torch.Tensor:
    book = records.codebook
    tables = () if book is None else (book.centroids, book.bucket_weights)
    return maxsim_cuda(query, *records.args, 0, *tables)


def check(query: torch.Tensor, records: Records) -> None:
    """Of one query, or several."""
    found, several = scored(query, records), query.dim() == 3
    for one, scores in zip(*((query, found) if several else ([query], [found])), strict=True):
        bound = maxsim_bound(
            one, records, tensor_cores=True, by_digits=records.format in WHOLE_FORMATS
        )
        expected = maxsim_reference(one, *records.args, codebook=records.codebook)
        assert_scores_close(scores, expected, bound)


def exact(
    query: torch.Tensor, records: Records, centroids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Scores of residual rows by their description in docs/store-format.md, float64; NaN where a
    centroid does not exist."""
    nbits, d = int(records.format.removeprefix("residual")), query.shape[-1]
    row_bytes, scores = 4 + d * nbits // 8, []
    for begin, count in zip(records.offset_bytes.tolist(), records.n_tokens.tolist(), strict=True):
        rows = records.buffer[begin : begin + count * row_bytes].view(count, row_bytes)
        numbers = rows[:, :4].clone().view(torch.int32).view(-1).long()
        bits = (rows[:, 4:, None] >> torch.arange(7, -1, -1)) & 1
        codes = (bits.reshape(count, d, nbits).long() << torch.arange(nbits)).sum(-1)
        is_known = (numbers >= 0) & (numbers < len(centroids))
        values = torch.full((count, d), torch.nan, dtype=torch.float64)
        values[is_known] = (centroids[numbers[is_known]] + weights[codes[is_known]]).double()
        values /= values.norm(dim=1, keepdim=True).clamp_min(1e-12)
        scores.append((query.double() @ values.T).amax(-1).sum())
    return torch.stack(scores)


def named(records: Records, document: int, row: int, number: int, d: int) -> None:
    """Writes the number of a residual row's centroid."""
    at = int(records.offset_bytes[document]) + row * token_format(records.format).token_row_bytes(d)
    given = torch.tensor([number], dtype=torch.int32).view(torch.uint8)
    records.buffer[at : at + 4] = given


def spoiled(records: Records, document: int, row: int, value: float) -> None:
    """Writes a row's scale, or its first value."""
    token = token_format(records.format)
    d = 64
    at = int(records.offset_bytes[document]) + row * token.token_row_bytes(d)
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(records.format, torch.float32)
    given = torch.tensor([value], dtype=kind).view(torch.uint8)
    records.buffer[at : at + given.numel()] = given


@needs_nvcc
@pytest.mark.sampled(1)
@EVERY
@pytest.mark.parametrize(("warps", "blocks", "n_query_tokens"), [(2, 1, 32), (1, 2, 5), (3, 9, 1)])
def test_within_the_derived_bound(
    device_code: Callable[..., Any],
    few: Callable[..., None],
    fmt: str,
    d: int,
    warps: int,
    blocks: int,
    n_query_tokens: int,
) -> None:
    """Documents of every length about a stage's, by warps that take one after another."""
    launcher = device_code()
    few(warps, blocks)
    records = scatter([normals(n, d, seed=n) for n in COUNTS], fmt, align_bytes=16)
    check(normals(n_query_tokens, d, seed=99), records)
    assert launcher.launches == [f"espnx_maxsim_{fmt}_{d}"]


@needs_nvcc
@pytest.mark.parametrize(("fmt", "d"), some(RINGS, 5))
def test_as_launched(device_code: Callable[..., Any], fmt: str, d: int) -> None:
    """Eight warps and as many blocks as there are; the only document may be empty, and there may be
    none."""
    launcher = device_code()
    records = scatter([normals(n, d, seed=n) for n in (19, 0)], fmt, align_bytes=16)
    for few in (slice(0, 1), slice(1, 2), slice(0, 2), slice(0, 0)):
        some = (records.offset_bytes[few], records.n_tokens[few])
        part = Records(records.buffer, *some, fmt, records.codebook)
        check(normals(2, 11, d, seed=3), part)
    assert len(launcher.launches) == 3


@needs_nvcc
@pytest.mark.parametrize(
    ("fmt", "d"), some([("bf16", 128), ("residual4", 128), ("fp32", 128), *RINGS], 3)
)
def test_as_launched_where_there_is_room_for_fewer_warps(
    device_code: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fmt: str, d: int
) -> None:
    """Four to seven, by a GPU of 100 KiB."""
    monkeypatch.setattr(by_warps, "_shared_bytes_of", lambda device: 100 * 1024)
    monkeypatch.setattr(by_warps, "_MULTIPROCESSORS", 1)
    launcher = device_code()
    records = scatter([normals(n, d, seed=n) for n in (3, 17, 0, 1, 33, 2, 9)], fmt, align_bytes=16)
    check(normals(9, d, seed=3), records)
    assert launcher.launches == [f"espnx_maxsim_{fmt}_{d}"]


@needs_nvcc
@pytest.mark.parametrize(
    ("fmt", "d"),
    some(
        [("fp16", 64), ("bf16", 64), ("int8", 64), ("bit1", 128), ("residual2", 96), ("fp32", 96)],
        3,
    ),
)
@pytest.mark.parametrize("blocks", [7, pytest.param(1, marks=pytest.mark.sweep)])
def test_several_queries(few: Callable[..., None], fmt: str, d: int, blocks: int) -> None:
    """Each has a counter and blocks of its own; they need not lie side by side, or aligned."""
    few(1, blocks)
    records = scatter([normals(n, d, seed=n) for n in (3, 0, 18, 1, 1)], fmt, align_bytes=16)
    wide = normals(3, 9, 2 * d, seed=4)
    check(wide[..., ::2], records)
    flat = torch.cat([torch.zeros(1), normals(9, d, seed=5).flatten()])
    assert flat[1:].data_ptr() % 16
    check(flat[1:].view(9, d), records)


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp32"])
def test_bit_for_bit_where_fp32_is_exact(fmt: str) -> None:
    records = scatter([integers(n, 64, seed=n) for n in (40, 0, 1, 16)], fmt, align_bytes=16)
    query = integers(7, 64, seed=9)
    assert torch.equal(maxsim_cuda(query, *records.args), maxsim_reference(query, *records.args))


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("fmt", "d"), [("fp16", 64), ("int8", 96), ("bit1", 128), ("residual1", 96), ("fp32", 128)]
)
def test_offsets_beyond_32_bits(fmt: str, d: int) -> None:
    records = scatter([normals(n, d, seed=n) for n in (3, 0, 40)], fmt, align_bytes=16)
    places = (records.offset_bytes + BEYOND, records.n_tokens)
    far = Records(moved(records.buffer), *places, fmt, records.codebook)
    query = normals(5, d, seed=9)
    assert torch.equal(scored(query, far), scored(query, records))


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "int8", "fp32"])
def test_what_is_not_finite(fmt: str) -> None:
    """Stored NaNs and infinities (of int8 rows a scale, then NaN), the reference's NaNs, and no
    more; documents beside them keep their scores."""
    documents = [integers(n, 64, seed=n).abs() + 1 for n in (17, 1, 2, 3, 2)]
    records = scatter(documents, fmt, align_bytes=16)
    values = (torch.nan, torch.inf, -torch.inf, -torch.inf)
    for document, row, value in zip((0, 1, 2, 3), (16, 0, 1, 1), values, strict=True):
        spoiled(records, document, row, value)
    query = integers(3, 64, seed=9).abs() + 1
    for first in (None, torch.inf):
        if first is not None:
            query[2, 0] = first
        expected = maxsim_reference(query, *records.args)
        found = maxsim_cuda(query, *records.args)
        assert torch.allclose(found, expected, rtol=2e-5, atol=0, equal_nan=True), first


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("fmt", "d"),
    [("fp16", 64), ("bf16", 64), ("int8", 64), ("bit1", 128), ("residual2", 64), ("fp32", 64)],
)
def test_queries_of_any_size(fmt: str, d: int) -> None:
    """Tokens of zeros, of values beyond fp16's, and of the largest of fp32."""
    records = scatter([normals(n, d, seed=n) for n in (20, 1)], fmt, align_bytes=16)
    query = normals(6, d, seed=9)
    query *= torch.tensor([1.0, 0.0, 1e-30, 1e9, 1e-5, 7.0])[:, None]
    check(query, records)
    query = torch.full((1, d), 3.4e38)
    query[:, 1::2] = -3.4e38
    check(query, records)


@needs_nvcc
@pytest.mark.parametrize("d", some([d for fmt, d in RINGS if fmt == "int8"], 7))
def test_rows_that_other_documents_left(few: Callable[..., None], d: int) -> None:
    """A stage keeps what it held where the next document is shorter: NaNs and products beyond all
    others, which count for no document but their own."""
    few(1, 1)
    counts = (150,) * 6 + (1, 2, 3, 17, 35, 64, 65, 1)
    records = scatter([normals(n, d, seed=n) for n in counts], "int8", align_bytes=16)
    for begin, count in zip(records.offset_bytes[:6].tolist(), counts[:6], strict=True):
        rows = records.buffer[begin : begin + count * (4 + d)].view(count, 4 + d)
        rows[::2, :4] = torch.tensor([torch.nan]).view(torch.uint8)
        rows[1::2, :4] = torch.tensor([-1e30]).view(torch.uint8)
    query = normals(5, d, seed=9)
    assert scored(query, records)[:6].isnan().all()
    spared = (records.offset_bytes[6:], records.n_tokens[6:])
    few(1, 1)
    found = scored(query, records)[6:]
    assert torch.equal(found, scored(query, Records(records.buffer, *spared, "int8")))
    check(query, Records(records.buffer, *spared, "int8"))


@needs_nvcc
@pytest.mark.usefixtures("few")
def test_scales_that_are_large_until_a_factor_makes_them_less() -> None:
    """A row's scale times the sums of a query that is scaled up, too, is beyond fp32."""
    records = scatter([integers(18, 64, seed=1)], "int8", align_bytes=16)
    spoiled(records, 0, 17, 1e33)
    query = torch.full((2, 64), 1e-3)
    found, expected = maxsim_cuda(query, *records.args), maxsim_reference(query, *records.args)
    assert expected.isfinite().all()
    assert torch.allclose(found, expected, rtol=1e-5)


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("fmt", "d"), [("fp16", 96), ("int8", 64), ("bit1", 128), ("residual4", 64), ("fp32", 96)]
)
def test_what_the_launcher_refuses_would_be_a_fault(
    monkeypatch: pytest.MonkeyPatch, fmt: str, d: int
) -> None:
    """Not a byte is read outside the buffer, nor at another address than at multiples of 16."""
    records = scatter([normals(17, d)], fmt, align_bytes=16)
    query = normals(17, d, seed=9)
    monkeypatch.setattr(cuda, "look_inside", lambda *args: RecordsFound(16, 17))
    monkeypatch.setattr(cuda, "is_aligned", lambda *args: True)
    with pytest.raises(Fault, match="misaligned"):
        places = (records.offset_bytes - 4, records.n_tokens)
        scored(query, Records(records.buffer, *places, fmt, records.codebook))
    with pytest.raises(Fault, match=r"bytes at byte .* of argument 1"):
        buffer = records.buffer[:-1].clone()
        scored(query, Records(buffer, *records.args[1:], records.codebook))


@needs_nvcc
@pytest.mark.usefixtures("few")
def test_a_launch_can_be_made_again() -> None:
    """As `espnx bench kernels` does, whose times are those of the launch alone: what one leaves
    behind suits the next."""
    records = scatter([normals(n, 64, seed=n) for n in (3, 0, 18, 1, 1, 2)], "int8", align_bytes=16)
    with recorded_launches() as seen:
        scores = maxsim_cuda(normals(5, 64, seed=9), *records.args)
    expected = scores.clone()
    [launch] = seen
    for _ in range(2):
        scores.fill_(torch.nan)
        launch.again()
        assert torch.equal(scores, expected)


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fmt", ["fp16", "residual2"])
def test_the_work_that_is_timed_is_the_ops(fmt: str) -> None:
    """`espnx bench kernels`: zeros for what documents are counted in, and the launch, alone."""
    setting = Setting(Clock(torch.device("cpu"), 1), 1 << 10, seed=3)
    measured = documents.Documents(documents.Shape(fmt, 64, True), setting)
    with recorded_launches() as seen:
        found = scoring._work(measured)(0)
    assert measured.check(0, found) is None
    assert len(seen) == 1
    found.fill_(torch.nan)
    seen[0].again()
    assert measured.check(0, found) is None


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("fmt", "d"), some([("residual2", 64), ("residual1", 128), ("residual4", 96)], 3)
)
def test_centroids_that_do_not_exist(fmt: str, d: int) -> None:
    """Nothing outside of the table is read, and of the documents theirs alone are NaN: also where
    there is no centroid at all."""
    records = scatter([normals(n, d, seed=n) for n in (17, 40, 1, 9, 2)], fmt, align_bytes=16)
    for document, row, number in ((0, 16, -1), (1, 3, 13), (2, 0, 2**31 - 1), (4, 1, -(2**31))):
        named(records, document, row, number, d)
    query, book = normals(7, d, seed=9), records.codebook
    assert book is not None
    found = scored(query, records)
    assert found.isnan().tolist() == [True, True, True, False, True]
    expected = exact(query, records, book.centroids, book.bucket_weights)
    assert found[3].item() == pytest.approx(expected[3].item(), rel=1e-5)
    none = (torch.empty(0, d), book.bucket_weights)
    assert maxsim_cuda(query, *records.args, 0, *none).isnan().all()


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("fmt", "d"), some([("residual2", 64), ("residual1", 96)], 2))
def test_tables_and_queries_that_are_not_finite(fmt: str, d: int) -> None:
    """The reference's NaNs and infinities, and no more."""
    records = scatter([normals(n, d, seed=n) for n in (17, 1, 3)], fmt, align_bytes=16)
    for document, n_rows in enumerate(records.n_tokens.tolist()):
        for row in range(n_rows):
            named(records, document, row, document, d)
    book = records.codebook
    assert book is not None
    for value in (torch.nan, torch.inf, -torch.inf):
        for table, at in ((0, (1, d - 1)), (1, (-1,)), (2, (1, 3))):
            given = [book.centroids.clone(), book.bucket_weights.clone(), normals(3, d, seed=9)]
            given[table][at] = value
            centroids, weights, query = given
            found = maxsim_cuda(query, *records.args, 0, centroids, weights)
            expected = exact(query, records, centroids, weights).float()
            assert torch.allclose(found, expected, rtol=1e-5, equal_nan=True), (value, table)


def with_book(records: Records, centroids: torch.Tensor, weights: torch.Tensor) -> Records:
    assert records.codebook is not None
    book = Codebook(centroids, records.codebook.bucket_cutoffs, weights)
    return Records(*records.args, book)


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("scale", some([1e-20, 1e-13, 1e-4, 1e4, 1e15], 3))
def test_codebooks_of_any_scale(scale: float) -> None:
    """Also ones whose first centroid says nothing of the others, rows shorter than the least
    length, and tables that lie at odd addresses."""
    records = scatter([normals(n, 64, seed=n) for n in (20, 1, 3)], "residual2", align_bytes=16)
    query, book = normals(6, 64, seed=9), records.codebook
    assert book is not None
    centroids, weights = book.centroids * scale, book.bucket_weights * scale
    flat = torch.cat([torch.zeros(1), centroids.flatten()])
    assert flat[1:].data_ptr() % 16
    check(query, with_book(records, flat[1:].view(-1, 64), weights))
    for first in (0.0, 1e6):
        centroids[0] *= first
        check(query, with_book(records, centroids, weights * min(first, 1.0)))


@needs_nvcc
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fmt", ["residual1", "residual4"])
def test_what_fp16_has_no_steps_for(fmt: str) -> None:
    """Queries that see only values far below a row's largest, or only rows of zeros: the bound has
    no part for the steps that parts of fp16 have."""
    records = scatter([normals(n, 64, seed=n) for n in (18, 1)], fmt, align_bytes=16)
    book = records.codebook
    assert book is not None
    centroids = book.centroids.clone()
    centroids[:, 5] *= 1e-8
    weights = torch.zeros_like(book.bucket_weights)
    query = torch.zeros(2, 64)
    query[0, 5], query[1, 5] = 1.0, 0.3
    check(query, with_book(records, centroids, weights))
    query[:, 7] = 1e-9  # beside a value of its own that is far above it
    centroids[:, 5] = 0.0
    check(query, with_book(records, centroids, weights))
    zeros = with_book(records, torch.zeros_like(centroids), weights)
    assert torch.equal(scored(query, zeros), torch.zeros(2))


@needs_nvcc
@pytest.mark.usefixtures("few")
def test_what_is_made_once_more_is_rare(device_code: Callable[..., Any]) -> None:
    """Or every result would be right, and slow: documents of residual rows for which tensor cores
    suffice take a fraction of the instructions."""
    records = scatter([normals(20, 64, seed=n) for n in range(4)], "residual2", align_bytes=16)
    book, query, n_steps = records.codebook, normals(8, 64, seed=9), []
    assert book is not None
    for first, factor in ((1.0, 1.0), (1e6, 1.0), (1.0, 0.0)):  # the largest, of others; zeros
        centroids = book.centroids.clone()
        centroids[0] *= first
        launcher = device_code()
        scored(query * factor, with_book(records, centroids, book.bucket_weights))
        n_steps.append(launcher.n_steps)
    assert n_steps[0] < 0.1 * n_steps[1]
    assert n_steps[2] < 1.02 * n_steps[0]


def test_blocks_are_as_many_as_the_device_has_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = SimpleNamespace(multi_processor_count=78)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert by_warps.blocks_max(torch.device("cuda", 0)) == 78
    assert by_warps.blocks_max(torch.device("cpu")) == 132


class UsesTritonError(Exception):
    pass


def test_triton_has_the_rest(
    device_code: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other formats, rows and addresses, more query tokens, and a build without machine code."""

    def uses_triton(name: str) -> Any:
        raise UsesTritonError

    launcher = device_code()
    monkeypatch.setattr(cuda, "load_kernel", uses_triton)
    documents = {d: [normals(3, d), normals(1, d)] for d in (64, 72, 80, 128, 256, 1032)}
    for fmt, d, n_query_tokens, before in (
        ("fp32", 80, 32, 0),
        ("fp32", 128, 33, 0),
        ("fp32", 64, 32, 4),
        ("fp16", 72, 32, 0),
        ("fp16", 256, 32, 0),
        ("bf16", 1032, 32, 0),
        ("bf16", 256, 33, 0),
        ("int8", 72, 32, 0),
        ("bit1", 64, 32, 0),
        ("residual2", 80, 32, 0),
        ("fp16", 128, 33, 0),
        ("residual2", 64, 32, 4),
        ("int8", 64, 32, 4),
    ):
        records = scatter(documents[d], fmt, align_bytes=16)
        buffer = torch.cat([torch.zeros(before, dtype=torch.uint8), records.buffer])
        places = (records.offset_bytes + before, records.n_tokens)
        with pytest.raises(UsesTritonError):
            scored(normals(n_query_tokens, d), Records(buffer, *places, fmt, records.codebook))
    monkeypatch.setattr(code, "is_there", lambda *args: False)
    records = scatter(documents[128], "fp16", align_bytes=16)
    with pytest.raises(UsesTritonError):
        maxsim_cuda(normals(32, 128), *records.args)
    assert not launcher.launches


def test_a_block_has_as_many_warps_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an H100, an A100, and a GPU for workstations: four at least, or Triton has the rows."""
    kernels = [*by_warps.RINGS]
    for kib, block_kib, fewest in ((228, 227, 8), (164, 163, 6), (100, 99, 4), (64, 63, 0)):
        warps = {each: by_warps.warps_of(*each, kib * 1024) for each in kernels}
        assert min(warps.values()) == fewest
        for each, found in warps.items():
            assert by_warps.shared_bytes(*each, found) <= block_kib * 1024
            more = by_warps.shared_bytes(*each, max(found, 3) + 1) > block_kib * 1024
            assert found == 8 or more
    asked: list[int] = []

    def is_there(name: str, kernel: str, device: torch.device, shared_bytes: int) -> bool:
        asked.append(shared_bytes)
        return True

    monkeypatch.setattr(code, "is_there", is_there)
    for kib, warps in ((164, 6), (64, 0)):
        monkeypatch.setattr(by_warps, "_shared_bytes_of", lambda device, kib=kib: kib * 1024)
        there = by_warps.is_compiled("fp32", 128, 32, torch.device("cpu"))
        assert there == (warps > 0)
    assert asked == [by_warps.shared_bytes("fp32", 128, 6)]


def test_rings_are_those_of_the_source() -> None:
    text = (SOURCES / "maxsim.cu").read_text()
    found = re.findall(r"^MAXSIM\((\w+)_(\d+), \w+, (\d+), (\d+), (\d+)\)$", text, re.MULTILINE)
    assert all(d == width for _, d, width, *_ in found)
    rings = {(fmt, int(d)): (int(tiles), int(stages)) for fmt, d, _, tiles, stages in found}
    text = (SOURCES / "maxsim_residual.cu").read_text()
    for nbits, d, stages in re.findall(r"^MAXSIM\((\d), (\d+), (\d)\)$", text, re.MULTILINE):
        rings[f"residual{nbits}", int(d)] = (1, int(stages))
    text = (SOURCES / "maxsim_fp32.cu").read_text()
    for d, stages in re.findall(r"^MAXSIM\((\d+), (\d)\)$", text, re.MULTILINE):
        rings["fp32", int(d)] = (1, int(stages))
    assert rings == RINGS
