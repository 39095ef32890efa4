"""csrc/cuda's MaxSim over int8 and bit1 rows, executed, also long ones: what digits of a query
hold, against sums in whole numbers, and queries and rows at the ends of their ranges."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from espnx.ops import maxsim_reference
from espnx.ops.maxsim import by_warps, cuda
from espnx.ops.maxsim.cuda import maxsim_cuda
from tests.ops.records import Records, normals, scatter
from tests.ops.tolerances import WHOLE_FORMATS, assert_scores_close, maxsim_bound
from tests.ptx.changes import Change
from tests.ptx.nvcc import compiled, needs_nvcc
from tests.sweeps import in_steps, some

pytestmark = [needs_nvcc, pytest.mark.usefixtures("few")]

#: Of long rows two, four and eight warps, which the rows fill, and do not.
LONG = (136, 192, 256, 264, 512, 520, 768, 1000, 1024)
BY_WARPS = [each for each in by_warps.RINGS if each[0] in WHOLE_FORMATS]
VARIANTS = [*BY_WARPS, *(("int8", d) for d in LONG)]
EVERY = pytest.mark.parametrize(("fmt", "d"), some(VARIANTS, 4))
LENGTHS = (1, 33, 0, 64, 31)


@pytest.fixture
def few(device_code: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a launch two warps, so that each takes several documents; nothing is left to Triton."""
    monkeypatch.setattr(cuda, "load_kernel", None)
    monkeypatch.setattr(by_warps, "WARPS", 2)
    monkeypatch.setattr(by_warps, "_MULTIPROCESSORS", 1)
    device_code()


def stored(rows: list[np.ndarray], fmt: str, scale: float = 1.0) -> Records:
    """Documents of whole numbers ``[n, d]``: codes, or signs; each begins at a multiple of 16
    bytes."""
    buffer, offsets = b"", []
    for each in rows:
        buffer += b"\xff" * (-len(buffer) % 16)
        offsets.append(len(buffer))
        if fmt == "bit1":
            buffer += np.packbits(each > 0, axis=1, bitorder="little").tobytes()
        else:
            scales = np.full((len(each), 1), scale, dtype=np.float32).view(np.uint8)
            codes = each.astype(np.int8).view(np.uint8)
            buffer += np.concatenate([scales, codes], axis=1).tobytes()
    places = torch.tensor(offsets), torch.tensor([len(each) for each in rows])
    return Records(torch.frombuffer(bytearray(buffer), dtype=torch.uint8).clone(), *places, fmt)


def numbers(fmt: str, n: int, d: int, seed: int) -> np.ndarray:
    """Codes of all values that there are, or signs."""
    generator = np.random.default_rng(seed)
    if fmt == "bit1":
        return generator.choice([-1, 1], (n, d))
    return generator.integers(-128, 128, (n, d))


def as_steps(token: np.ndarray) -> tuple[np.ndarray, float]:
    """A token's values in whole steps, and a step, float64: 2^-22 of the power of two below the
    largest value, or twice that within 2^-6 of the next one."""
    fraction, exponent = math.frexp(float(np.abs(token).max()))  # from a half on
    step = 2.0 ** (exponent - 1 - 22) * (2 if fraction >= 1 - 2.0**-7 else 1)
    return np.rint(token.astype(np.float64) / step).astype(np.int64), step


@EVERY
def test_sums_are_those_of_whole_numbers(fmt: str, d: int) -> None:
    """Nothing but the last roundings of the query's values times codes is lost: of single tokens,
    whose largest values are powers of two, just below one, or anything."""
    queries = normals(5, 1, d, seed=5)
    for token, largest in zip(queries[:4, 0], (1.0, 1.999999, 0.9921875, 0.992187), strict=True):
        token *= largest / token.abs().max()
        token[token.abs().argmax()] = largest
    rows = [numbers(fmt, n, d, seed=n) for n in LENGTHS]
    found = maxsim_cuda(queries, *stored(rows, fmt).args).double().numpy()
    factor = float(np.float32(128**-0.5)) if fmt == "bit1" else 1.0
    for query, scores in zip(queries.numpy(), found, strict=True):
        values, step = as_steps(query[0])
        assert np.abs(values).max() < 127 * 65536 + 127 * 256 + 128  # of three digits
        for document, score in zip(rows, scores, strict=True):
            if not len(document):
                assert score == -math.inf
                continue
            whole = int((document.astype(np.int64) @ values).max())
            n_roundings, most = (8, np.abs(values).sum()) if fmt == "bit1" else (2, abs(whole))
            if d > 128:  # a number of each warp, and up to three additions
                n_roundings, most = 5, (np.abs(document) @ np.abs(values)).max()
            allowed = n_roundings * 2.0**-24 * int(most)
            assert abs(score / step / factor - whole) <= allowed


def in_every_piece(*tokens: np.ndarray) -> torch.Tensor:
    """Four queries, each with these tokens in another piece of eight, and no others."""
    queries = torch.zeros(4, 32, len(tokens[0]))
    for piece in range(4):
        for place, token in enumerate(tokens):
            queries[piece, 8 * piece + 2 * piece % 8 + place] = torch.from_numpy(token)
    return queries


def check_every_value(d: int) -> None:
    """Documents that see all values but the largest, or that alone: not a bit is lost but by
    rounding to steps, below 2^24 of them."""
    generator = np.random.default_rng(d)
    token = generator.integers(-(2**15), 2**15, d).astype(np.float32)
    token += np.where(token < 0, np.float32(-0.75), np.float32(0.75))
    token[5] = -(2.0**23) + 2.0**17
    rows = [generator.choice([-2, -1, 1, 2], (1, d)) for _ in range(3)]
    for each in rows:
        each[0, 5] = 0
    rows.append(-(np.arange(d) == 5)[None].astype(np.int64))
    values, step = as_steps(token)
    assert step == 1.0
    expected = [(each @ values).item() for each in rows]
    found = maxsim_cuda(in_every_piece(token), *stored(rows, "int8").args)
    assert found.tolist() == [expected] * 4


def check_every_place(d: int) -> None:
    """Of documents of 64 rows one counts, which another part of a lane's sums holds in each, by
    tokens that other parts of them hold."""
    token = normals(d, seed=d).numpy()
    tokens = (token, np.float32(0.73) * token)
    rows = [np.zeros((64, d), dtype=np.int64) for _ in range(8)]
    for number, each in zip((4, 9, 18, 31, 40, 49, 58, 63), rows, strict=True):
        codes = np.random.default_rng(number).integers(1, 128, d)
        each[number] = np.sign(token).astype(np.int64) * codes
    found = maxsim_cuda(in_every_piece(*tokens), *stored(rows, "int8").args).double().numpy()
    whole = np.zeros(len(rows))
    for each in tokens:
        values, step = as_steps(each)
        whole += [step * (row @ values).max() for row in rows]
    n_roundings = 3 if d <= 128 else 6
    assert (np.abs(found - whole) <= n_roundings * 2.0**-24 * whole).all()


def test_long_rows_are_those_of_every_number_of_warps() -> None:
    plans = [by_warps.sliced("int8", d) for d in LONG]
    shapes = {(plan.slice_dims, plan.warps) for plan in plans if plan is not None}
    assert shapes == {(96, 2), (128, 2), (96, 4), (128, 4), (96, 8), (128, 8)}


@pytest.mark.parametrize("d", some([48, 64, 80, 96, 112, 128, *LONG], 5))
def test_every_value_is_rounded_to_steps(d: int) -> None:
    check_every_value(d)
    check_every_place(d)


@EVERY
def test_the_largest_and_least_codes(fmt: str, d: int) -> None:
    """All values and all codes alike, of either sign: the largest sums that there are."""
    ends = (-1, 1) if fmt == "bit1" else (-128, 127)
    rows = [np.full((n, d), code) for n in (1, 40) for code in ends]
    for value in (0.9921, -0.9921, 1.0, -1.984375):
        query = torch.full((32, d), value)
        records = stored(rows, fmt)
        expected = maxsim_reference(query, *records.args)
        assert_scores_close(
            maxsim_cuda(query, *records.args),
            expected,
            maxsim_bound(query, records, tensor_cores=True, by_digits=True),
        )


@EVERY
def test_a_power_of_two_changes_no_bit(fmt: str, d: int) -> None:
    """From where a token's largest value is among fp32's least to where scores nearly are beyond
    it."""
    records = scatter([normals(n, d, seed=n) for n in (18, 1)], fmt, align_bytes=16)
    query = normals(3, d, seed=9)
    query = torch.round(query / query.abs().max() * 2**27) / 2**27  # all of it is there at 2^-122
    expected = maxsim_cuda(query, *records.args)
    least = -122 if d <= 128 else -110  # products with tokens are among fp32's least below it
    for exponent in (least, -104, -60, 1, 90, 120):
        found = maxsim_cuda(query * 2.0**exponent, *records.args)
        assert torch.equal(found, expected * 2.0**exponent), exponent


@EVERY
def test_values_far_below_a_tokens_largest(fmt: str, d: int) -> None:
    """They are rounded by what is the largest's, as the bound says; where they alone meet codes,
    by less than half a step of each."""
    query = normals(32, d, seed=9) * 1e-6
    query[::2, 3] = 1.0
    rows = [numbers(fmt, n, d, seed=n) for n in (40, 1)]
    if fmt == "int8":
        for each in rows:
            each[:, 3] = 0
    records = stored(rows, fmt, 1 / 127)
    found, expected = maxsim_cuda(query, *records.args), maxsim_reference(query, *records.args)
    assert_scores_close(
        found, expected, maxsim_bound(query, records, tensor_cores=True, by_digits=True)
    )
    if fmt == "int8" and d <= 128:  # the bound of parts of fp16 has no place for that
        assert (found - expected).abs().max() > maxsim_bound(
            query, records, tensor_cores=True
        ).max()


@EVERY
def test_the_bound_is_the_narrower_one_for_embeddings(fmt: str, d: int) -> None:
    """Than that of parts of fp16, which kernels in Triton have."""
    records = scatter([normals(n, d, seed=n) for n in (40, 1, 7)], fmt, align_bytes=16)
    query = normals(32, d, seed=9)
    by_digits, by_parts = (
        maxsim_bound(query, records, tensor_cores=True, by_digits=each) for each in (True, False)
    )
    assert (by_digits < 0.9 * by_parts).all()


@EVERY
@pytest.mark.parametrize("value", some([math.nan, math.inf, -math.inf], 2))
def test_queries_that_are_not_finite(fmt: str, d: int, value: float) -> None:
    """Of one token a value, beside tokens of zeros, and of values among fp32's least ones."""
    records = scatter([normals(n, d, seed=n) for n in (18, 1, 0)], fmt, align_bytes=16)
    query = normals(4, d, seed=9)
    query[1], query[2] = 0.0, 1e-44
    found, expected = maxsim_cuda(query, *records.args), maxsim_reference(query, *records.args)
    assert torch.allclose(found, expected, rtol=1e-5)
    query[3, d - 1] = value
    found, expected = maxsim_cuda(query, *records.args), maxsim_reference(query, *records.args)
    assert not expected[:2].isfinite().any()
    assert torch.allclose(found, expected, rtol=1e-5, equal_nan=True)
    zeros = torch.zeros(3, d)
    assert maxsim_cuda(zeros, *records.args).tolist() == [0.0, 0.0, -math.inf]


@pytest.mark.parametrize("d", [64, 136])
def test_the_least_queries_and_the_largest_scales(d: int) -> None:
    """No value of fp32 is below a step. And what is made with care is multiplied as it is stored,
    or products without their row's scale would be too large."""
    first = np.eye(1, d, dtype=np.int64)
    records = stored([np.full((1, d), 100), 127 * np.concatenate([first, 1 - first])], "int8", 1e38)
    for value in (2.0**-149, 1e-44, 2.0**-126, 1.5 * 2.0**-127):
        query = torch.full((2, d), value)
        found, expected = maxsim_cuda(query, *records.args), maxsim_reference(query, *records.args)
        assert torch.allclose(found, expected, rtol=1e-5, atol=0), value
    # Each token sees one row; the first's product is too large until a factor makes it less.
    scales = torch.tensor([1e35, 1e-5]).view(torch.uint8).view(2, 4)
    for row, scale in enumerate(scales):
        place = int(records.offset_bytes[1]) + row * (4 + d)
        records.buffer[place : place + 4] = scale
    query = torch.tensor(np.concatenate([first * 1e-3, (1 - first) * 1e37]), dtype=torch.float32)
    found, expected = maxsim_cuda(query, *records.args), maxsim_reference(query, *records.args)
    assert 0 < expected[1] < torch.inf
    assert torch.allclose(found[1], expected[1], rtol=1e-5)


@pytest.mark.parametrize("d", [64, 136])
@pytest.mark.parametrize("scale", some([1e-42, 1e33, math.inf, 1e-30, -math.inf, math.nan], 2))
def test_scales_of_any_size(scale: float, d: int) -> None:
    """Of one row of a document; the others keep their scores. What is not finite counts as NaN,
    also where it would make a product the least."""
    rows = [np.clip(np.abs(numbers("int8", n, d, seed=n)), 0, 100) for n in (35, 2, 1)]
    records = stored(rows, "int8", 0.01)
    place = int(records.offset_bytes[0]) + 33 * (4 + d)
    given = torch.tensor([scale]).view(torch.uint8)
    records.buffer[place : place + 4] = given
    query = normals(5, d, seed=9).abs()  # or infinities of either sign would be there
    found, expected = maxsim_cuda(query, *records.args), maxsim_reference(query, *records.args)
    assert expected[0].isfinite() == math.isfinite(scale)
    assert torch.allclose(found, expected, rtol=1e-5, equal_nan=True)


#: What is searched in one line of the kernel, and what stands there instead.
SPOILED = {
    "columns' digits": (r"(mma\.sync.*), \{(%r\d+),(%r\d+)\}, \{", r"\1, {\3,\2}, {"),
    "a digit": (r"(xor\.b32.*), -2139062144;", r"\1, -2139062016;"),
    "rounding": (r"cvt\.rni\.s32\.f32", "cvt.rzi.s32.f32"),
    "the digits' ratio": (r"(mov\.f32.*), 0f43800000;", r"\1, 0f437F8000;"),
    "a digit's place": (r"(shl\.b32 \s*%r\d+, %r\d+), 8;", r"\1, 7;"),
    "the first sum": (r"(mov\.u32.*), -49152;", r"\1, -49136;"),
}


#: Kernels, and the length of rows.
KERNELS = (("maxsim", "64", 64), ("maxsim", "80", 80), ("maxsim_slices", "slices_96", 136))


@in_steps(50)
@pytest.mark.parametrize(
    ("source", "kernel", "d"),
    [KERNELS[0], *(pytest.param(*each, marks=pytest.mark.sweep) for each in KERNELS[1:])],
)
@pytest.mark.parametrize("what", SPOILED)
def test_what_is_spoiled_is_noticed(
    what: str, source: str, kernel: str, d: int, step: int, device_code: Callable[..., Any]
) -> None:
    ptx, (searched, instead) = compiled(source).decode(), SPOILED[what]
    begin = ptx[: ptx.index(f".entry espnx_maxsim_int8_{kernel}(")].count("\n")
    end = begin + ptx.split("\n", begin)[-1].split("\n}\n", 1)[0].count("\n") + 1
    every = [
        Change(what, number, line, re.sub(searched, instead, line))
        for number, line in enumerate(ptx.splitlines(), 1)
        if begin < number <= end and re.search(searched, line)
    ]
    assert every
    check_every_value(d)
    check_every_place(d)
    for change in every[len(every) // 2 % step :: step]:
        device_code(change)
        with pytest.raises(AssertionError):
            check_every_value(d)
            check_every_place(d)
            pytest.fail(f"line {change.line}: {change.before}")
