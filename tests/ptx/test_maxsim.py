"""MaxSim as it is compiled for sm_90, executed, against the reference within the bounds of
docs/tolerances.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from espnx.errors import InvalidInputError
from espnx.ops import maxsim_reference, token_format
from espnx.ops.maxsim import cuda
from espnx.ops.maxsim.checks import RecordsFound
from tests.ops.records import Records, integers, normals, scatter
from tests.ops.tolerances import assert_scores_close, maxsim_bound
from tests.ptx.program import Fault
from tests.ptx.sparse import BEYOND, moved
from tests.sweeps import some

pytestmark = pytest.mark.usefixtures("launch")
FORMATS = ("fp16", "bf16", "fp32", "int8", "bit1", "residual1", "residual2", "residual4")
COUNTS = (0, 1, 63, 64, 130, 2)


def run(query: torch.Tensor, records: Records) -> torch.Tensor:
    codebook = records.codebook
    tables = () if codebook is None else (codebook.centroids, codebook.bucket_weights)
    return cuda.maxsim_triton(query, *records.args, 0, *tables)


def check(query: torch.Tensor, records: Records) -> None:
    expected = maxsim_reference(query, *records.args, codebook=records.codebook)
    bound = maxsim_bound(query, records, tensor_cores=True)
    assert_scores_close(run(query, records), expected, bound)


def element_bytes(fmt: str) -> int:
    return token_format(fmt).alignment_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize(("n_query_tokens", "d"), [(1, 8), (5, 24), (32, 128), (70, 64)])
def test_within_the_derived_bound(fmt: str, is_aligned: bool, n_query_tokens: int, d: int) -> None:
    """64 query tokens and more are multiplied four warps at a time."""
    align_bytes = 16 if is_aligned else element_bytes(fmt)
    records = scatter([normals(n, d, seed=n) for n in COUNTS], fmt, align_bytes=align_bytes)
    check(normals(n_query_tokens, d, seed=99), records)


@pytest.mark.parametrize("d", [8, 64])
def test_copies_ahead_are_not_multiplied_without_a_fence(d: int) -> None:
    """Triton 3.6 has none between a copy and the products of four warps where bf16 rows are of one
    piece and the query of several tiles: nothing is copied ahead there."""
    assert cuda.launch_options(70, d, "bf16")["num_stages"] == 1
    records = scatter([integers(n, d, seed=n) for n in COUNTS], "bf16", align_bytes=16)
    query = integers(70, d, seed=99)
    assert torch.equal(run(query, records), maxsim_reference(query, *records.args))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp32"])  # that hold small integers exactly
@pytest.mark.parametrize(
    ("n_query_tokens", "d"), [(5, 24), *some([(3, 384), (37, 96), (70, 128)], 3)]
)
def test_bit_for_bit_where_fp32_is_exact(fmt: str, n_query_tokens: int, d: int) -> None:
    """Rows of one piece, and of several."""
    records = scatter([integers(n, d, seed=n) for n in COUNTS], fmt, align_bytes=16)
    query = integers(n_query_tokens, d, seed=99)
    assert torch.equal(run(query, records), maxsim_reference(query, *records.args))


def test_a_query_that_fp16_would_round_away_is_kept() -> None:
    """Values of 22 bits, of very different size from token to token, against rows of ones and
    zeros: the split loses nothing."""
    scales = torch.tensor([1.0, 2.0**-30, 2.0**40, 2.0**-100])
    query = torch.zeros(4, 24)
    query[:, 0] = (1 + 2.0**-11 + 2.0**-21) * scales
    query[:, 1] = 2.0**-13 * scales
    document = torch.zeros(17, 24)
    document[0, :2] = 1.0
    records = scatter([document], align_bytes=16)
    for token in query.split(1):
        assert torch.equal(run(token, records), maxsim_reference(token, *records.args))


@pytest.mark.parametrize("fmt", ["int8", "bit1"])
def test_a_query_of_the_least_values(fmt: str) -> None:
    """Nothing is lost but what fp32 has no steps for."""
    records = scatter([normals(n, 72, seed=n) for n in (17, 1)], fmt, align_bytes=16)
    query = normals(3, 72, seed=9) * 1e-39
    found, expected = run(query, records), maxsim_reference(query, *records.args)
    assert (found - expected).abs().max() <= 100 * 2.0**-149
    assert expected.abs().min() > 1e-40


def test_batches_empties_and_no_query_tokens() -> None:
    records = scatter([integers(count, 24, seed=count) for count in (3, 0, 40)], align_bytes=16)
    for shape in ((3, 5, 24), (2, 0, 24), (0, 24), (0, 4, 24)):
        queries = integers(*shape, seed=1)
        assert torch.equal(run(queries, records), maxsim_reference(queries, *records.args))
    nothing = records.n_tokens[:0]
    none = Records(records.buffer, nothing, nothing, "fp16")
    assert run(integers(2, 5, 24), none).shape == (2, 0)


def test_addresses_that_a_gpu_cannot_load_from_are_refused() -> None:
    records = scatter([integers(3, 8)], align_bytes=16)
    buffer = torch.cat([records.buffer, records.buffer[:1]])
    odd = Records(buffer, records.offset_bytes + 1, records.n_tokens, "fp16")
    with pytest.raises(InvalidInputError, match="multiples of 2 bytes"):
        run(integers(1, 8), odd)


@pytest.mark.parametrize("fmt", FORMATS)
def test_short_documents(fmt: str) -> None:
    """Tiles of 16 tokens, several queries at once."""
    records = scatter([normals(n, 32, seed=n) for n in (1, 16, 0, 15)], fmt, align_bytes=16)
    queries = normals(2, 17, 32, seed=3)
    for query, scores in zip(queries, run(queries, records), strict=True):
        expected = maxsim_reference(query, *records.args, codebook=records.codebook)
        assert_scores_close(scores, expected, maxsim_bound(query, records, tensor_cores=True))


@pytest.mark.parametrize("fmt", FORMATS)
def test_offsets_beyond_32_bits(fmt: str) -> None:
    records = scatter([normals(n, 24, seed=n) for n in (3, 70)], fmt, align_bytes=16)
    far = Records(
        moved(records.buffer),
        records.offset_bytes + BEYOND,
        records.n_tokens,
        fmt,
        records.codebook,
    )
    query = normals(5, 24, seed=9)
    assert torch.equal(run(query, far), run(query, records))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("n_query_tokens", [1, 17])
def test_nan_and_infinity(fmt: str, n_query_tokens: int) -> None:
    documents = [integers(70, 24, seed=seed).abs() + 1 for seed in range(4)]
    documents[1][69, 23] = torch.nan
    documents[2][64, 0] = torch.inf
    documents[3][0, 3] = -torch.inf
    records = scatter(documents, fmt, align_bytes=16)
    query = integers(n_query_tokens, 24, seed=9).abs() + 1
    expected = maxsim_reference(query, *records.args)
    assert torch.equal(run(query, records).nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf, -1.0, 0.0])
def test_scales_of_every_kind(scale: float) -> None:
    records = scatter([normals(70, 24, seed=seed) for seed in range(3)], "int8", align_bytes=16)
    place = records.offset_bytes[1].item() + 69 * token_format("int8").token_row_bytes(24)
    records.buffer[place : place + 4] = torch.tensor([scale]).view(torch.uint8)
    query = normals(5, 24, seed=9)
    expected = maxsim_reference(query, *records.args)
    assert torch.allclose(run(query, records), expected, equal_nan=True)


@pytest.mark.parametrize(("n_query_tokens", "scale"), [(2, 1e33), (33, -1e33)])
def test_scales_that_are_large_until_a_factor_makes_them_less(
    n_query_tokens: int, scale: float
) -> None:
    """A row's scale times the sums of a query that is scaled up, too, is beyond fp32, whichever
    sign it has."""
    records = scatter([torch.ones(18, 24), torch.zeros(0, 24)], "int8", align_bytes=16)
    token = token_format("int8")
    for row in range(18):
        place = records.offset_bytes[0].item() + row * token.token_row_bytes(24)
        records.buffer[place : place + 4] = torch.tensor([scale]).view(torch.uint8)
    query = torch.full((n_query_tokens, 24), 1e-3)
    found, expected = run(query, records), maxsim_reference(query, *records.args)
    assert expected[0].isfinite()
    assert torch.allclose(found, expected, rtol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["residual1", "residual2", "residual4"])
@pytest.mark.parametrize("number", [-1, 13, 2**31 - 1])
def test_a_centroid_that_does_not_exist(fmt: str, number: int) -> None:
    """Nothing outside the table is read, and the document scores NaN."""
    records = scatter([normals(9, 32, seed=seed) for seed in range(3)], fmt, align_bytes=16)
    place = records.offset_bytes[1].item() + 8 * token_format(fmt).token_row_bytes(32)
    records.buffer[place : place + 4] = torch.tensor([number], dtype=torch.int32).view(torch.uint8)
    assert run(normals(17, 32, seed=9), records).isnan().tolist() == [False, True, False]


def test_what_the_launcher_refuses_would_be_a_fault(
    launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that is not what the variant promises, and a document that ends beyond its
    buffer."""
    records = scatter([normals(3, 32)], "fp16", align_bytes=16)
    query = normals(17, 32, seed=9)
    monkeypatch.setattr(cuda, "look_inside", lambda *args: RecordsFound(16, 3))
    monkeypatch.setattr(cuda, "is_aligned", lambda *args: True)
    odd = Records(records.buffer, records.offset_bytes - 2, records.n_tokens, "fp16")
    with pytest.raises(Fault, match="misaligned"):
        run(query, odd)
    cut = Records(records.buffer[:-2].clone(), records.offset_bytes, records.n_tokens, "fp16")
    with pytest.raises(Fault, match=r"bytes at byte .* of buffer_ptr"):
        run(query, cut)
