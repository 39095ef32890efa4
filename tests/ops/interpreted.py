"""The Triton kernels in Triton's interpreter, against the references. Not collected by itself:
test_kernels_interpreted.py runs it in a process where TRITON_INTERPRET=1 was set before Triton was
imported, so that other tests can compile the same kernels in theirs."""

from __future__ import annotations

import os

import pytest
import torch

from espnx.errors import InvalidInputError
from espnx.ops import crc32c_ranges_reference, maxsim_reference, token_row_bytes
from espnx.ops.crc32c.cuda import LANES, crc32c_triton
from espnx.ops.maxsim.cuda import maxsim_triton
from tests.ops.attention.merging import PLAIN, check_merge, check_merge_in_range
from tests.ops.records import Records, integers, normals, scatter
from tests.ops.tolerances import assert_scores_close, maxsim_bound

# Triton 3.6 needs NumPy below 2.4 for its interpreter, and there it warns.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",
    "ignore:invalid value encountered in multiply:RuntimeWarning",  # scales that are not finite
)
ELEMENT_BYTES = {"fp16": 2, "fp32": 4, "bf16": 2}
FORMATS = pytest.mark.parametrize("fmt", ELEMENT_BYTES)  # that hold small integers exactly
CODED = pytest.mark.parametrize("fmt", ["int8", "bit1", "residual1", "residual2", "residual4"])
COUNTS = (0, 1, 63, 64, 130, 2)


def test_the_interpreter_is_on() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"


@FORMATS
@pytest.mark.parametrize(
    ("n_query_tokens", "d"), [(1, 8), (5, 24), (32, 32), (37, 96), (70, 128), (3, 384)]
)
def test_maxsim_bit_for_bit_where_fp32_is_exact(fmt: str, n_query_tokens: int, d: int) -> None:
    records = scatter(
        [integers(count, d, seed=count) for count in COUNTS], fmt, align_bytes=ELEMENT_BYTES[fmt]
    )
    query = integers(n_query_tokens, d, seed=99)
    assert torch.equal(maxsim_triton(query, *records.args), maxsim_reference(query, *records.args))


@FORMATS
@pytest.mark.parametrize(("n_query_tokens", "d"), [(1, 8), (32, 32), (5, 128)])
def test_maxsim_within_the_derived_bound(fmt: str, n_query_tokens: int, d: int) -> None:
    records = scatter([normals(count, d, seed=count) for count in COUNTS], fmt, align_bytes=16)
    query = normals(n_query_tokens, d, seed=99)
    bound = maxsim_bound(query, records, tensor_cores=True)
    assert_scores_close(
        maxsim_triton(query, *records.args), maxsim_reference(query, *records.args), bound
    )


@CODED
@pytest.mark.parametrize(
    ("n_query_tokens", "d", "align_bytes"), [(1, 8, 4), (32, 32, 16), (5, 72, 4), (37, 128, 16)]
)
def test_maxsim_of_coded_rows_within_the_derived_bound(
    fmt: str, n_query_tokens: int, d: int, align_bytes: int
) -> None:
    records = scatter(
        [normals(count, d, seed=count) for count in COUNTS], fmt, align_bytes=align_bytes
    )
    query = normals(n_query_tokens, d, seed=99)
    expected = maxsim_reference(query, *records.args, codebook=records.codebook)
    scores = maxsim_triton(query, *records.args, 0, *tables_of(records))
    assert_scores_close(scores, expected, maxsim_bound(query, records, tensor_cores=True))


def tables_of(records: Records) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (
        (None, None)
        if records.codebook is None
        else (records.codebook.centroids, records.codebook.bucket_weights)
    )


@pytest.mark.parametrize("fmt", ["residual1", "residual2", "residual4"])
@pytest.mark.parametrize("number", [-1, 13, 2**31 - 1, -(2**31)])
def test_maxsim_of_a_centroid_that_does_not_exist(fmt: str, number: int) -> None:
    """Nothing outside the table is read, and the document scores NaN."""
    records = scatter([normals(70, 16, seed=seed) for seed in range(3)], fmt, align_bytes=16)
    place = records.offset_bytes[1].item() + 69 * token_row_bytes(fmt, 16)
    records.buffer[place : place + 4] = torch.tensor([number], dtype=torch.int32).view(torch.uint8)
    scores = maxsim_triton(normals(5, 16, seed=9), *records.args, 0, *tables_of(records))
    assert scores.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf, -1.0, 0.0])
def test_maxsim_of_scales_of_every_kind(scale: float) -> None:
    records = scatter([normals(70, 16, seed=seed) for seed in range(3)], "int8", align_bytes=16)
    place = records.offset_bytes[1].item() + 69 * token_row_bytes("int8", 16)
    records.buffer[place : place + 4] = torch.tensor([scale]).view(torch.uint8)
    query = normals(5, 16, seed=9)
    assert torch.allclose(
        maxsim_triton(query, *records.args), maxsim_reference(query, *records.args), equal_nan=True
    )


def test_maxsim_keeps_a_query_that_fp16_would_round_away() -> None:
    """Values of 22 bits, of very different size from token to token, against rows of ones and
    zeros: the split loses nothing."""
    scales = torch.tensor([1.0, 2.0**-30, 2.0**40, 2.0**-100])
    query = torch.zeros(4, 8)
    query[:, 0] = (1 + 2.0**-11 + 2.0**-21) * scales
    query[:, 1] = 2.0**-13 * scales
    document = torch.zeros(1, 8)
    document[0, :2] = 1.0
    records = scatter([document], align_bytes=16)
    for i in range(4):
        assert torch.equal(
            maxsim_triton(query[i : i + 1], *records.args),
            maxsim_reference(query[i : i + 1], *records.args),
        )


def test_maxsim_batches_empties_and_no_query_tokens() -> None:
    records = scatter([integers(count, 16, seed=count) for count in (3, 0, 40)], align_bytes=16)
    for shape in ((3, 5, 16), (2, 0, 16), (0, 16), (0, 4, 16)):
        queries = integers(*shape, seed=1)
        assert torch.equal(
            maxsim_triton(queries, *records.args), maxsim_reference(queries, *records.args)
        )
    nothing = records.n_tokens[:0]
    assert maxsim_triton(integers(2, 5, 16), records.buffer, nothing, nothing, "fp16").shape == (
        2,
        0,
    )


@FORMATS
# NumPy, where padding's zeros meet the infinities
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_maxsim_nan_and_infinity(fmt: str) -> None:
    documents = [integers(70, 16, seed=seed).abs() + 1 for seed in range(4)]
    documents[1][69, 15] = torch.nan
    documents[2][64, 0] = torch.inf
    documents[3][0, 3] = -torch.inf
    documents.append(documents[2][64:65])
    records = scatter(documents, fmt, align_bytes=16)
    for n_query_tokens in (1, 17):
        query = integers(n_query_tokens, 16, seed=9).abs() + 1
        scores, expected = (
            maxsim_triton(query, *records.args),
            maxsim_reference(query, *records.args),
        )
        assert scores.isnan().tolist() == [False, True, False, False, False]
        assert torch.equal(scores.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
        assert scores[2] == torch.inf


def test_maxsim_refuses_addresses_that_a_gpu_cannot_load_from() -> None:
    records = scatter([integers(3, 8)], align_bytes=16)
    buffer = torch.cat([records.buffer, records.buffer[:1]])
    with pytest.raises(InvalidInputError, match="multiples of 2 bytes"):
        maxsim_triton(integers(1, 8), buffer, records.offset_bytes + 1, records.n_tokens, "fp16")


# as a signed register: -1, the least, 0
@pytest.mark.parametrize("seed", [0, 0x7FFFFFFF, 0xFFFFFFFF])
def test_crc32c_of_ranges_at_any_address(seed: int) -> None:
    buffer = torch.randint(
        0, 256, (3 * 4 * LANES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    one_round = 4 * LANES
    sizes = torch.tensor(
        [0, 1, 2, 3, 4, 5, 8, 63, one_round - 1, one_round, one_round + 1, 2 * one_round + 7]
    )
    offsets = torch.arange(sizes.numel()) * 5
    assert torch.equal(
        crc32c_triton(buffer, offsets, sizes, seed),
        crc32c_ranges_reference(buffer, offsets, sizes, seed),
    )


@pytest.mark.parametrize("seed", [0, 0x12345678])
def test_crc32c_of_whole_words(seed: int) -> None:
    buffer = torch.randint(
        0, 256, (3 * 4 * LANES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    sizes = torch.tensor([0, 4, 8, 4 * LANES - 4, 4 * LANES, 4 * LANES + 4, 9 * LANES // 4 * 4])
    offsets = torch.arange(sizes.numel()) * 8
    assert torch.equal(
        crc32c_triton(buffer, offsets, sizes, seed),
        crc32c_ranges_reference(buffer, offsets, sizes, seed),
    )
    assert crc32c_triton(buffer, offsets[:0], sizes[:0], seed).shape == (0,)
    with pytest.raises(InvalidInputError, match="outside the buffer"):
        crc32c_triton(buffer, offsets, sizes + buffer.numel(), seed)


@PLAIN
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_attention_parts_are_merged(size: tuple[int, int, int, int]) -> None:
    check_merge(*size)


def test_attention_parts_are_merged_in_range() -> None:
    check_merge_in_range()
