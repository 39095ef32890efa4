"""The CPU versions of MaxSim against the reference: every instruction set, format and odd size."""

from __future__ import annotations

import functools

import pytest
import torch

from espnx.errors import InvalidInputError
from espnx.ops import maxsim, maxsim_reference, token_row_bytes
from espnx.ops._native import load_extension
from tests.ops.records import Records, integers, normals, scatter
from tests.ops.tolerances import assert_scores_close, maxsim_bound

FORMATS = ("fp16", "fp32", "bf16")  # that hold small integers exactly
CODED = ("int8", "bit1", "residual1", "residual2", "residual4")
COUNTS = (0, 1, 63, 300, 2, 13)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("d", [8, 24, 32, 96, 128, 384])
def test_equals_the_reference_bit_for_bit_where_fp32_is_exact(
    cpu_level: str, fmt: str, d: int
) -> None:
    records = scatter([integers(count, d, seed=count) for count in COUNTS], fmt)
    for n_query_tokens in (0, 1, 2, 3, 5, 16, 17, 32, 37):
        query = integers(n_query_tokens, d, seed=99)
        scores = maxsim(query, *records.args)
        assert torch.equal(scores, maxsim_reference(query, *records.args)), f"Lq={n_query_tokens}"
        assert scores[0] == -torch.inf


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fmt", [*FORMATS, *CODED])
@pytest.mark.parametrize(
    ("n_query_tokens", "d"),
    [(1, 8), (3, 8), (1, 128), (2, 24), (5, 96), (32, 32), (37, 128), (32, 384), (17, 520)],
)
def test_stays_within_the_derived_bound(
    cpu_level: str, fmt: str, n_query_tokens: int, d: int
) -> None:
    records = scatter([normals(count, d, seed=count) for count in COUNTS], fmt)
    query = normals(n_query_tokens, d, seed=99)
    scores = maxsim(query, *records.args, codebook=records.codebook)
    expected = maxsim_reference(query, *records.args, codebook=records.codebook)
    assert_scores_close(scores, expected, maxsim_bound(query, records, cpu_level=cpu_level))


def test_every_token_count_up_to_two_tiles_of_every_kernel(cpu_level: str) -> None:
    records = scatter([integers(count, 32, seed=count) for count in range(30)])
    for n_query_tokens in (1, 8, 24):
        query = integers(n_query_tokens, 32, seed=99)
        assert torch.equal(maxsim(query, *records.args), maxsim_reference(query, *records.args))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_longest_document(cpu_level: str, fmt: str) -> None:
    document = integers(65535, 8)
    document[-1] = 100.0  # the last row decides
    records = scatter([document], fmt)
    query = integers(3, 8, seed=1).abs() + 1
    scores = maxsim(query, *records.args)
    assert torch.equal(scores, maxsim_reference(query, *records.args))
    assert scores.item() == 100 * query.sum().item()


@pytest.mark.parametrize("fmt", CODED)
def test_coded_rows_of_every_token_count(cpu_level: str, fmt: str) -> None:
    """Up to two chunks of 48 tokens, and ends of tiles of 16 and of 12."""
    records = scatter(
        [normals(count, 40, seed=count) for count in [*range(36), 47, 48, 49, 95, 96, 97]], fmt
    )
    for n_query_tokens in (3, 16, 24):
        query = normals(n_query_tokens, 40, seed=99)
        expected = maxsim_reference(query, *records.args, codebook=records.codebook)
        assert_scores_close(
            maxsim(query, *records.args, codebook=records.codebook),
            expected,
            maxsim_bound(query, records, cpu_level=cpu_level),
        )


@pytest.mark.parametrize("fmt", CODED)
@pytest.mark.parametrize("n_query_tokens", [1, 5, 37])
def test_a_batch_of_queries_against_coded_rows(
    cpu_level: str, fmt: str, n_query_tokens: int
) -> None:
    records = scatter([normals(count, 24, seed=count) for count in COUNTS], fmt)
    queries = normals(3, n_query_tokens, 24, seed=99)
    scores = maxsim(queries, *records.args, codebook=records.codebook)
    for query, row in zip(queries, scores, strict=True):
        assert torch.equal(row, maxsim(query, *records.args, codebook=records.codebook))


@pytest.mark.parametrize("n_query_tokens", [1, 5, 37])
@pytest.mark.parametrize("n_queries", [0, 1, 3])
def test_a_batch_of_queries_is_each_query_alone(
    cpu_level: str, n_queries: int, n_query_tokens: int
) -> None:
    records = scatter([integers(count, 24, seed=count) for count in COUNTS])
    queries = integers(n_queries, n_query_tokens, 24, seed=99)
    scores = maxsim(queries, *records.args)
    assert scores.shape == (n_queries, len(COUNTS))
    for query, row in zip(queries, scores, strict=True):
        assert torch.equal(row, maxsim(query, *records.args))
        assert torch.equal(row, maxsim_reference(query, *records.args))


@pytest.mark.parametrize("shape", [(5, 16), (2, 5, 16), (0, 16)])
def test_no_documents(cpu_level: str, shape: tuple[int, ...]) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert maxsim(
        torch.zeros(shape), torch.empty(0, dtype=torch.uint8), nothing, nothing
    ).shape == (*shape[:-2], 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("misalignment_bytes", range(16))
def test_any_address(cpu_level: str, misalignment_bytes: int) -> None:
    for fmt in FORMATS:
        encoded = scatter([integers(7, 24)], fmt)
        rows = encoded.buffer[encoded.offset_bytes.item() :]
        buffer = torch.cat([torch.full((misalignment_bytes,), 0xFF, dtype=torch.uint8), rows])
        place = torch.tensor([misalignment_bytes])
        for n_query_tokens in (1, 5):
            query = integers(n_query_tokens, 24, seed=1)
            expected = maxsim_reference(query, *encoded.args)
            assert torch.equal(maxsim(query, buffer, place, encoded.n_tokens, fmt), expected)
    for fmt in CODED:
        encoded = scatter([normals(7, 24)], fmt)
        rows = encoded.buffer[encoded.offset_bytes.item() :]
        buffer = torch.cat([torch.full((misalignment_bytes,), 0xFF, dtype=torch.uint8), rows])
        for n_query_tokens in (1, 5):
            query = normals(n_query_tokens, 24, seed=1)
            expected = maxsim(query, *encoded.args, codebook=encoded.codebook)
            assert torch.equal(
                maxsim(
                    query,
                    buffer,
                    torch.tensor([misalignment_bytes]),
                    encoded.n_tokens,
                    fmt,
                    codebook=encoded.codebook,
                ),
                expected,
            )


def test_a_document_may_be_named_twice_and_records_may_overlap(cpu_level: str) -> None:
    records = scatter([integers(20, 16)])
    row_bytes = token_row_bytes("fp16", 16)
    offset_bytes = records.offset_bytes + torch.tensor([0, 0, 5 * row_bytes, 19 * row_bytes])
    n_tokens = torch.tensor([20, 20, 15, 1])
    query = integers(5, 16, seed=1)
    scores = maxsim(query, records.buffer, offset_bytes, n_tokens)
    assert torch.equal(scores, maxsim_reference(query, records.buffer, offset_bytes, n_tokens))
    assert scores[0] == scores[1]


def test_strided_arguments(cpu_level: str) -> None:
    records = scatter([integers(count, 16, seed=count) for count in COUNTS])
    query = integers(16, 5, seed=1).T
    wide = torch.stack([records.offset_bytes, records.n_tokens], dim=1)
    scores = maxsim(query, records.buffer, wide[:, 0], wide[:, 1])
    assert torch.equal(scores, maxsim_reference(query.contiguous(), *records.args))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n_query_tokens", [1, 5, 17, 37])
@pytest.mark.parametrize("where", [0, 6, 11, 12, 28])
def test_a_nan_in_a_document_makes_its_score_nan_and_no_other(
    cpu_level: str, n_query_tokens: int, where: int
) -> None:
    documents = [integers(29, 24, seed=seed) for seed in range(3)]
    documents[1][where, 23] = torch.nan
    records = scatter(documents)
    query = integers(n_query_tokens, 24, seed=9)
    assert maxsim(query, *records.args).isnan().tolist() == [False, True, False]


def test_a_nan_in_one_query_of_a_batch_stays_there(cpu_level: str) -> None:
    records = scatter([integers(5, 16), integers(0, 16)])
    queries = integers(3, 5, 16, seed=9)
    queries[1, 4, 0] = torch.nan
    scores = maxsim(queries, *records.args)
    assert scores[:, 0].isnan().tolist() == [False, True, False]
    assert (scores[:, 1] == -torch.inf).all()


@pytest.mark.parametrize("n_query_tokens", [1, 5, 17])
def test_infinities_are_not_nans(cpu_level: str, n_query_tokens: int) -> None:
    """The lanes that pad a strip of query tokens compute 0 * infinity, which must not show."""
    document = integers(7, 16).abs() + 1
    document[3, 2] = torch.inf
    records = scatter([document, -document])
    query = integers(n_query_tokens, 16, seed=9).abs() + 1
    scores = maxsim(query, *records.args)
    assert torch.equal(scores, maxsim_reference(query, *records.args))
    assert scores[0] == torch.inf
    assert scores[1].isfinite()


def test_16_bit_values_of_every_kind_are_decoded_exactly(cpu_level: str) -> None:
    """All 65536 bit patterns, as one-token documents against a query that picks one value out."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    rows = torch.zeros(65536, 8, dtype=torch.int16)
    rows[:, 3] = patterns
    query = torch.zeros(1, 8)
    query[0, 3] = 1.0
    offset_bytes = torch.arange(65536) * 16
    scores = maxsim(
        query, rows.view(torch.uint8).view(-1), offset_bytes, torch.ones_like(offset_bytes)
    )
    expected = patterns.view(torch.float16).float()
    # A sum of zeros and one infinity is that infinity only if no zero meets it: 0 * 0 elsewhere, 1
    # * value here.
    assert torch.equal(scores.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
    scores = maxsim(
        query, rows.view(torch.uint8).view(-1), offset_bytes, torch.ones_like(offset_bytes), "bf16"
    )
    expected = patterns.view(torch.bfloat16).float()
    assert torch.equal(scores.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@functools.cache
def many_records(fmt: str) -> Records:
    """Enough for several threads to be worth their start."""
    return scatter([normals(60, 32, seed=seed) for seed in range(1500)], fmt)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["fp16", "int8", "residual2"])
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_nothing(cpu_level: str, threads: int, fmt: str) -> None:
    records = many_records(fmt)
    query = normals(32, 32, seed=2000)
    alone = maxsim(query, *records.args, threads=1, codebook=records.codebook)
    assert torch.equal(
        maxsim(query, *records.args, threads=threads, codebook=records.codebook), alone
    )
    torch.set_num_threads(threads)  # the op's default; the fixture puts it back
    assert torch.equal(maxsim(query, *records.args, codebook=records.codebook), alone)


def test_levels_reject_what_this_processor_lacks() -> None:
    best = load_extension().set_cpu_level(-1)
    with pytest.raises(ValueError, match="best level"):
        load_extension().set_cpu_level(best + 1)
    assert load_extension().cpu_level() == best


@pytest.mark.parametrize("fmt", ["int8", "bit1"])
def test_whole_numbers_are_the_same_at_every_level_that_uses_them(fmt: str) -> None:
    best = load_extension().set_cpu_level(-1)
    if best < 4:
        pytest.skip("this processor has no AMX, or no VNNI to compare it with")
    for d in (8, 64, 72, 128, 512):
        records = scatter([normals(count, d, seed=count) for count in COUNTS], fmt)
        query = normals(37, d, seed=99)
        by_level = []
        for level in (3, 4):
            load_extension().set_cpu_level(level)
            by_level.append(maxsim(query, *records.args))
        load_extension().set_cpu_level(-1)
        assert torch.equal(*by_level)


def test_the_largest_whole_numbers_do_not_overflow(cpu_level: str) -> None:
    """Every product is as large as it can be, a code that no encoder writes (-128) included."""
    d = 512
    row = torch.cat(
        [torch.tensor([1.0]).view(torch.uint8), torch.full((d,), 0x80, dtype=torch.uint8)]
    )
    one, zero = torch.tensor([1]), torch.tensor([0])
    for sign in (1.0, -1.0):
        query = torch.full((5, d), sign)
        score = maxsim(query, row, zero, one, "int8").item()
        assert score == pytest.approx(-128.0 * d * 5 * sign, rel=2**-20)


@pytest.mark.parametrize("peak", [torch.nan, torch.inf, 3e38, 1e-38, 0.0])
def test_queries_that_whole_numbers_cannot_hold(cpu_level: str, peak: float) -> None:
    records = scatter([normals(20, 32)], "int8")
    query = normals(5, 32, seed=1)
    query[3] = query[3] / query[3].abs().max() * 1e-39 if peak == 1e-38 else query[3]
    query[2, 7] = peak
    scores, expected = maxsim(query, *records.args), maxsim_reference(query, *records.args)
    if peak != peak or peak == torch.inf:
        assert scores.isnan().equal(expected.isnan())
    else:
        assert scores.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf, 3e38, 0.0, -1.0])
def test_scales_of_every_kind(cpu_level: str, scale: float) -> None:
    """A scale that no encoder writes changes its own document's score as the reference says, and no
    other."""
    records = scatter([normals(60, 32, seed=seed) for seed in range(3)], "int8")
    place = records.offset_bytes[1].item() + 50 * token_row_bytes("int8", 32)
    records.buffer[place : place + 4] = torch.tensor([scale]).view(torch.uint8)
    query = normals(5, 32, seed=9)
    scores, expected = maxsim(query, *records.args), maxsim_reference(query, *records.args)
    assert scores.isnan().tolist() == expected.isnan().tolist()
    finite = scores.isfinite()
    assert finite.tolist() == expected.isfinite().tolist()
    assert torch.allclose(scores[finite], expected[finite], rtol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fmt", ["residual1", "residual2", "residual4"])
@pytest.mark.parametrize("number", [-1, 13, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("row", [0, 3, 99])
def test_a_centroid_that_does_not_exist(cpu_level: str, fmt: str, number: int, row: int) -> None:
    """The first such document is named, whatever the threads do."""
    records = scatter([normals(100, 32, seed=seed) for seed in range(40)], fmt)
    for document in (31, 7):
        place = records.offset_bytes[document].item() + row * token_row_bytes(fmt, 32)
        records.buffer[place : place + 4] = torch.tensor([number], dtype=torch.int32).view(
            torch.uint8
        )
    for n_query_tokens in (1, 5):
        query = normals(n_query_tokens, 32, seed=1)
        with pytest.raises(InvalidInputError, match="unknown centroid") as raised:
            maxsim(query, *records.args, codebook=records.codebook)
        assert raised.value.got == "document 7"
        assert raised.value.expected == "0 to 12"
        with pytest.raises(InvalidInputError, match=f"number {number} in row {row}"):
            maxsim_reference(query, *records.args, codebook=records.codebook)


@pytest.mark.parametrize("value", [1e14, 1e20, 3e38, 1e-30, 0.0])
@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_values_far_from_one(cpu_level: str, fmt: str, value: float) -> None:
    """Values beyond what the fast paths take, in one row of one of three documents."""
    documents = [integers(70, 16, seed=seed).abs() + 1 for seed in range(3)]
    documents[1][69, 3] = value
    records = scatter(documents, fmt)
    query = integers(5, 16, seed=9).abs() / 16 + 0.5
    scores, expected = maxsim(query, *records.args), maxsim_reference(query, *records.args)
    assert torch.allclose(scores, expected, rtol=2**-20)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("query_value", "document_value"),
    [(1 + 2.0**-9 + 2.0**-20, 1.0), (1 + 2.0**-13, 1 + 2.0**-10), (1 + 2.0**-9, 1 + 2.0**-10)],
)
def test_the_last_bits_of_a_query_count(
    cpu_level: str, fmt: str, query_value: float, document_value: float
) -> None:
    """The large parts cancel between two query tokens, and what the last bits make is left,
    exactly."""
    query, document = torch.zeros(3, 8), torch.zeros(1, 8)
    query[:2, 5] = torch.tensor([query_value, -1.0])
    document[0, 5] = document_value
    records = scatter([document], fmt)
    assert torch.equal(maxsim(query, *records.args), maxsim_reference(query, *records.args))
