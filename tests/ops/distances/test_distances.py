"""Distances on the CPU, at every instruction set: whole numbers bit for bit, floats within the
derived bound, and what is refused."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.ops import distances, distances_reference
from espnx.ops._native import load_extension
from espnx.ops.distances import DIM_MAX, METRICS, VECTOR_FORMATS, vector_bytes
from espnx.ops.distances.checks import query_dtype
from tests.forks import Forks
from tests.ops.tolerances import assert_scores_close, distances_bound

DIMS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 127, 128, 200, 384, 961)
WHOLE = ("uint8", "int8")
REAL = ("fp16", "fp32", "bf16")


def random_vectors(n: int, d: int, fmt: str, seed: int = 0) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    if fmt in WHOLE:
        return torch.randint(0, 256, (n, d), generator=make, dtype=torch.uint8).view(
            VECTOR_FORMATS[fmt]
        )
    return torch.randn(n, d, generator=make).to(VECTOR_FORMATS[fmt])


def scattered(vectors: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(buffer, offset_bytes) with the vectors at odd places, in another order, among bytes of all
    ones."""
    n, size = len(vectors), vectors.shape[1] * vectors.itemsize
    make = torch.Generator().manual_seed(seed)
    slots = torch.randperm(n, generator=make)
    offset = slots * (size + 7) + torch.randint(0, 7, (n,), generator=make)
    buffer = torch.full((n * (size + 7),), 255, dtype=torch.uint8)
    for begin, vector in zip(offset.tolist(), vectors, strict=True):
        buffer[begin : begin + size] = vector.view(torch.uint8)
    return buffer, offset


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fmt", WHOLE)
def test_whole_numbers_equal_the_reference_bit_for_bit(
    fmt: str, metric: str, cpu_level: str
) -> None:
    for d in DIMS:
        for n in (1, 3, 4, 9, 70) if d in (3, 128) else (9,):
            vectors = random_vectors(n + 1, d, fmt, seed=d)
            buffer, offset = scattered(vectors[1:], seed=d)
            found = distances(vectors[0], buffer, offset, fmt, metric)
            assert torch.equal(
                found, distances_reference(vectors[0], buffer, offset, fmt, metric)
            ), (d, n)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fmt", REAL)
def test_floats_are_within_the_bound(fmt: str, metric: str, cpu_level: str) -> None:
    for d in DIMS:
        vectors = random_vectors(9, d, fmt, seed=d)
        query = random_vectors(1, d, "fp32", seed=d + 1)[0]
        buffer, offset = scattered(vectors, seed=d)
        expected = distances_reference(query, buffer, offset, fmt, metric)
        assert_scores_close(
            distances(query, buffer, offset, fmt, metric),
            expected,
            distances_bound(query, vectors, metric),
        )


@pytest.mark.parametrize("fmt", WHOLE)
def test_the_largest_sums_do_not_overflow(fmt: str, cpu_level: str) -> None:
    """255^2 in each of 32768 dimensions: more than half of int32's range; and 128^2, the largest
    product of int8."""
    low, high = (0, 255) if fmt == "uint8" else (-128, 127)
    dtype = VECTOR_FORMATS[fmt]
    rows = torch.stack([torch.full((DIM_MAX,), low), torch.full((DIM_MAX,), high)]).to(dtype)
    buffer, offset = rows.view(torch.uint8).view(-1), torch.tensor([0, DIM_MAX])
    for query in rows:
        for metric in METRICS:
            found = distances(query, buffer, offset, fmt, metric)
            assert torch.equal(found, distances_reference(query, buffer, offset, fmt, metric))
    assert distances(rows[0], buffer, offset, fmt, "l2").tolist() == [0, float(255**2 * DIM_MAX)]


@pytest.mark.parametrize("fmt", REAL)
def test_infinities_and_nans_go_through(fmt: str, cpu_level: str) -> None:
    vectors = torch.zeros(5, 33, dtype=VECTOR_FORMATS[fmt])
    vectors[1, 32], vectors[2, 0], vectors[3, 31], vectors[4, 5] = (
        torch.inf,
        -torch.inf,
        torch.nan,
        2.0**-14,
    )
    query = torch.ones(33)
    buffer, offset = scattered(vectors)
    for metric in METRICS:
        expected = distances_reference(query, buffer, offset, fmt, metric)
        assert_scores_close(
            distances(query, buffer, offset, fmt, metric), expected, torch.full((5,), 1e-4)
        )
    assert distances(torch.zeros(33), buffer, offset[:1], fmt, "ip").signbit().tolist() == [
        False
    ], "0, not -0"


@pytest.mark.parametrize("fmt", VECTOR_FORMATS)
def test_several_queries_and_threads_change_no_bit(fmt: str) -> None:
    vectors = random_vectors(9001, 48, fmt)
    queries = random_vectors(65, 48, fmt, seed=3).to(query_dtype(fmt))
    buffer, offset = vectors.view(-1).view(torch.uint8), torch.arange(9001) * vector_bytes(fmt, 48)
    for metric in METRICS:
        together = distances(queries, buffer, offset, fmt, metric, threads=4)
        assert together.shape == (65, 9001)
        for query, found in zip(queries[::16], together[::16], strict=True):
            assert torch.equal(distances(query, buffer, offset, fmt, metric, threads=1), found)


def test_nothing_to_measure() -> None:
    buffer, none = torch.zeros(4, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    assert distances(torch.zeros(4, dtype=torch.uint8), buffer, none).shape == (0,)
    assert distances(torch.zeros(0, 4), buffer, torch.tensor([0]), "fp32").shape == (0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"query": torch.zeros(4)},
            (
                r"query against uint8 vectors; got torch.float32 \[4\]; expected a tensor, "
                r"torch.uint8 \[d\] or"
            ),
        ),
        (
            {"query": torch.zeros(0, dtype=torch.uint8)},
            "dimension of vectors; got 0; expected 1 to 32768",
        ),
        (
            {"query": torch.zeros(DIM_MAX + 1, dtype=torch.uint8)},
            "dimension of vectors; got 32769; expected 1 to 32768",
        ),
        ({"query": torch.zeros(2, 2, 2, dtype=torch.uint8)}, r"got torch.uint8 \[2, 2, 2\]"),
        ({"buffer": torch.zeros(20)}, "distances buffer"),
        (
            {"buffer": torch.zeros(40, dtype=torch.uint8)[::2]},
            r"distances buffer; got torch.uint8 \[20\], strided",
        ),
        ({"offset_bytes": torch.zeros(3)}, "distances offset_bytes"),
        (
            {"offset_bytes": torch.tensor([0, 17])},
            "vector 1 at 17, 4 bytes; expected vectors within the buffer's 20 bytes",
        ),
        ({"offset_bytes": torch.tensor([-1])}, "vector 0 at -1"),
        ({"offset_bytes": torch.tensor([2**63 - 1])}, "vector 0 at 9223372036854775807"),
        ({"format": "fp8"}, "format of vectors; got 'fp8'; expected uint8, int8, fp16, fp32, bf16"),
        ({"metric": "cosine"}, "metric of distances; got 'cosine'; expected l2 or ip"),
        ({"threads": 0}, "distances threads"),
    ],
)
def test_what_is_refused(change: dict[str, object], message: str) -> None:
    arguments = {
        "query": torch.zeros(4, dtype=torch.uint8),
        "buffer": torch.zeros(20, dtype=torch.uint8),
        "offset_bytes": torch.tensor([0, 16]),
    }
    assert distances(**arguments).tolist() == [0, 0]
    with pytest.raises(errors.InvalidInputError, match=message):
        distances(**{**arguments, **change})  # type: ignore[arg-type]
    if "threads" not in change:
        with pytest.raises(errors.InvalidInputError, match=message):
            distances_reference(**{**arguments, **change})  # type: ignore[arg-type]


def test_a_vector_longer_than_the_buffer_is_outside() -> None:
    with pytest.raises(errors.InvalidInputError, match="vector 0 at 0"):
        distances(torch.zeros(30), torch.zeros(100, dtype=torch.uint8), torch.tensor([0]), "fp32")


GUARDED = """
import ctypes, mmap
import torch
from espnx.ops import distances
from espnx.ops._native import load_extension
from espnx.ops.distances import VECTOR_FORMATS
from espnx.ops.distances.checks import query_dtype

libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 3 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for guard in (address, address + 2 * page):
    assert libc.mprotect(ctypes.c_void_p(guard), page, 0) == 0, ctypes.get_errno()
middle = torch.frombuffer((ctypes.c_uint8 * page).from_address(address + page), dtype=torch.uint8)
for level in range(load_extension().set_cpu_level(-1) + 1):
    load_extension().set_cpu_level(level)
    for fmt, dtype in VECTOR_FORMATS.items():
        for d in range(1, 70):
            for n in (1, 5, 8):
                end = page - d * dtype.itemsize
                query = torch.zeros(d, dtype=query_dtype(fmt))
                both_ends = torch.tensor([0] * n + [end] * n)
                distances(query, middle, both_ends, fmt)
print("survived", flush=True)
shifted = (ctypes.c_uint8 * page).from_address(address + page + 1)
one_too_far = torch.frombuffer(shifted, dtype=torch.uint8)
distances(torch.zeros(8, dtype=torch.uint8), one_too_far, torch.tensor([page - 8]))
print("the guard does not guard", flush=True)
"""


def test_vectors_at_both_ends_of_readable_memory(
    tmp_path: Path, open_forks: Callable[[str], Forks]
) -> None:
    """No byte beyond a vector is read. At last the program reads one too many on purpose, and dies
    of it: the guard works."""
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    code = open_forks("tests.doc_examples").run(text=GUARDED, cwd=tmp_path, stdout=out, stderr=err)
    assert out.read_text() == "survived\n", err.read_text()
    assert code == -signal.SIGSEGV


def test_the_extension_refuses_what_python_would_not_hand_it() -> None:
    query, buffer, at = (
        torch.zeros(4, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8),
        torch.tensor([0]),
    )
    for arguments in (
        (query, buffer, at, "bf16", "l2", 1),
        (query, buffer, at, "uint8", "l1", 1),
        (query.float(), buffer, at, "uint8", "l2", 1),
    ):
        with pytest.raises(ValueError, match=r"unknown|query must be"):
            load_extension().distances(*arguments)
