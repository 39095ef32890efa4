"""What MaxSim refuses, and what it says: the fast op, the reference and the Triton launcher
alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from espnx.errors import InvalidInputError, MissingDependencyError
from espnx.ops import maxsim, maxsim_reference
from espnx.ops._native import load_extension, load_ops
from espnx.ops.maxsim.checks import check_aligned
from espnx.ops.maxsim.cuda import maxsim_triton
from espnx.ops.maxsim.formats import FORMATS
from tests.ops.records import codebook_for, integers, scatter

Score = Callable[..., torch.Tensor]
VERSIONS = [maxsim, maxsim_reference, maxsim_triton]  # the launcher checks before it needs a GPU
EVERY_VERSION = pytest.mark.parametrize("score", VERSIONS, ids=["op", "reference", "triton"])
ROW = 32  # bytes of a fp16 token of 16 values


@EVERY_VERSION
@pytest.mark.parametrize(
    ("offset_bytes", "n_tokens"),
    [
        (-1, 1),
        (-ROW, 0),
        (0, 11),
        (1, 10),
        (10 * ROW, 1),
        (10 * ROW + 1, 0),
        (2**63 - 1, 1),
        (2**63 - 16, 65535),
        (-(2**63), 0),
        (0, -1),
        (0, 65536),
        (0, 2**62),
        (0, -(2**63)),
    ],
)
def test_a_record_outside_the_buffer(score: Score, offset_bytes: int, n_tokens: int) -> None:
    buffer = torch.zeros(10 * ROW, dtype=torch.uint8)
    offsets, counts = torch.tensor([0, offset_bytes]), torch.tensor([10, n_tokens])
    with pytest.raises(InvalidInputError, match="outside the buffer") as raised:
        score(torch.zeros(5, 16), buffer, offsets, counts, "fp16")
    assert "document 1" in str(raised.value.got)
    assert str(offset_bytes) in str(raised.value.got)
    assert "320 bytes" in str(raised.value.expected)


@pytest.mark.parametrize("score", [maxsim, maxsim_reference])
def test_a_record_may_end_where_the_buffer_does(score: Score) -> None:
    buffer = torch.zeros(10 * ROW, dtype=torch.uint8)
    scores = score(
        torch.zeros(5, 16),
        buffer,
        torch.tensor([0, 9 * ROW, 10 * ROW]),
        torch.tensor([10, 1, 0]),
        "fp16",
    )
    assert scores.tolist() == [0.0, 0.0, -torch.inf]


@EVERY_VERSION
@pytest.mark.parametrize("d", [0, 4, 12, 31, 33, 65544])
def test_dimensions(score: Score, d: int) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    with pytest.raises(InvalidInputError, match="multiple of 8") as raised:
        score(torch.zeros(1, d), torch.empty(0, dtype=torch.uint8), nothing, nothing, "fp16")
    assert raised.value.got == d


GOOD = {
    "query": torch.zeros(5, 16),
    "buffer": torch.zeros(64, dtype=torch.uint8),
    "offset_bytes": torch.zeros(2, dtype=torch.int64),
    "n_tokens": torch.ones(2, dtype=torch.int64),
}
BAD = [
    ("query", torch.zeros(16)),
    ("query", torch.zeros(1, 1, 5, 16)),
    ("query", torch.zeros(5, 16, dtype=torch.float16)),
    ("query", torch.zeros(5, 16, dtype=torch.float64)),
    ("buffer", torch.zeros(64, dtype=torch.int8)),
    ("buffer", torch.zeros(2, 32, dtype=torch.uint8)),
    ("buffer", torch.zeros(128, dtype=torch.uint8)[::2]),
    ("offset_bytes", torch.zeros(2, dtype=torch.int32)),
    ("offset_bytes", torch.zeros(2, 1, dtype=torch.int64)),
    ("n_tokens", torch.ones(2, dtype=torch.int32)),
    ("n_tokens", torch.ones(3, dtype=torch.int64)),
    ("n_tokens", torch.tensor(1)),
    ("n_tokens", torch.ones(2, dtype=torch.int64, device="meta")),
    ("buffer", torch.zeros(64, dtype=torch.uint8, device="meta")),
]


@EVERY_VERSION
@pytest.mark.parametrize(("name", "value"), BAD)
def test_wrong_shapes_dtypes_and_devices_name_the_argument(
    score: Score, name: str, value: torch.Tensor
) -> None:
    with pytest.raises(InvalidInputError, match=f"maxsim {name}"):
        score(*{**GOOD, name: value}.values(), "fp16")


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, value in BAD if not value.is_meta]
)
def test_the_op_itself_refuses_what_the_function_does(name: str, value: torch.Tensor) -> None:
    load_ops()
    with pytest.raises(ValueError, match=name):
        torch.ops.espnx.maxsim(**{**GOOD, name: value}, format="fp16")


@EVERY_VERSION
def test_unknown_format(score: Score) -> None:
    with pytest.raises(InvalidInputError, match="unknown token format") as raised:
        score(*GOOD.values(), "fp8")
    assert (
        raised.value.expected
        == "fp32 or fp16 or bf16 or int8 or bit1 or residual1 or residual2 or residual4"
    )


@pytest.mark.parametrize("threads", [0, -1])
def test_threads(threads: int) -> None:
    with pytest.raises(InvalidInputError, match="threads"):
        maxsim(*GOOD.values(), threads=threads)


def test_python_and_cpp_agree_on_formats() -> None:
    """A buffer of exactly 3 rows takes 3 tokens of the format and not 4, and every name that Python
    knows is known to C++."""
    load_ops()
    for name, token in FORMATS.items():
        buffer = torch.zeros(3 * token.token_row_bytes(24), dtype=torch.uint8)
        begin, codebook = torch.tensor([0]), codebook_for(name, 24)
        tables = (None, None) if codebook is None else (codebook.centroids, codebook.bucket_weights)
        assert (
            torch.ops.espnx.maxsim(
                torch.zeros(1, 24), buffer, begin, torch.tensor([3]), name, 0, *tables
            ).item()
            == 0
        )
        with pytest.raises(IndexError):
            torch.ops.espnx.maxsim(
                torch.zeros(1, 24), buffer, begin, torch.tensor([4]), name, 0, *tables
            )
    with pytest.raises(ValueError, match="unknown token format"):
        torch.ops.espnx.maxsim(torch.zeros(1, 24), buffer, begin, torch.tensor([3]), "fp8")


TABLES = (torch.zeros(3, 16), torch.zeros(4))
BAD_TABLES = [
    ("fp16", TABLES),
    ("residual2", (None, None)),
    ("residual2", (TABLES[0], None)),
    ("residual2", (None, TABLES[1])),
    ("residual2", (torch.zeros(3, 24), TABLES[1])),
    ("residual2", (torch.zeros(3, 16, dtype=torch.float16), TABLES[1])),
    ("residual2", (torch.zeros(16, 3).T, TABLES[1])),
    ("residual2", (torch.zeros(16), TABLES[1])),
    ("residual2", (TABLES[0], torch.zeros(2))),
    ("residual2", (TABLES[0], torch.zeros(4, dtype=torch.float64))),
    ("residual2", (TABLES[0], torch.zeros(8)[::2])),
    ("residual4", TABLES),
]


@pytest.mark.parametrize(("fmt", "tables"), BAD_TABLES)
def test_tables_that_do_not_fit(
    fmt: str, tables: tuple[torch.Tensor | None, torch.Tensor | None]
) -> None:
    """The op itself and the launcher, which get tensors instead of a Codebook."""
    load_ops()
    with pytest.raises(ValueError, match=r"centroids|bucket_weights"):
        torch.ops.espnx.maxsim(*GOOD.values(), fmt, 0, *tables)
    with pytest.raises(InvalidInputError, match="centroids and bucket_weights"):
        maxsim_triton(*GOOD.values(), fmt, 0, *tables)


@pytest.mark.parametrize("score", [maxsim, maxsim_reference])
def test_codebooks_that_do_not_fit(score: Score) -> None:
    with pytest.raises(InvalidInputError, match="need a codebook"):
        score(*GOOD.values(), "residual2")
    with pytest.raises(InvalidInputError, match="have no codebook"):
        score(*GOOD.values(), "int8", codebook=codebook_for("residual2", 16))
    with pytest.raises(InvalidInputError, match="another codebook") as raised:
        score(*GOOD.values(), "residual2", codebook=codebook_for("residual4", 16))
    assert "4-bit" in str(raised.value.got)
    with pytest.raises(InvalidInputError, match="another codebook"):
        score(*GOOD.values(), "residual2", codebook=codebook_for("residual2", 24))
    elsewhere = codebook_for("residual2", 16)
    # as a codebook on a GPU would look
    for name in ("centroids", "bucket_cutoffs", "bucket_weights"):
        object.__setattr__(elsewhere, name, getattr(elsewhere, name).to("meta"))
    with pytest.raises(InvalidInputError, match="maxsim codebook") as raised:
        score(*GOOD.values(), "residual2", codebook=elsewhere)
    assert "meta" in str(raised.value.got)


def test_alignment_for_cuda() -> None:
    fp16, fp32 = FORMATS["fp16"], FORMATS["fp32"]
    assert check_aligned(4096, torch.tensor([0, 16, 4096]), fp16)
    assert check_aligned(4096, torch.tensor([], dtype=torch.int64), fp16)
    assert not check_aligned(4096, torch.tensor([0, 2]), fp16)
    assert not check_aligned(4104, torch.tensor([8, 24]), fp16)
    with pytest.raises(InvalidInputError, match="multiples of 4 bytes") as raised:
        check_aligned(4096, torch.tensor([0, 16, 2]), fp32)
    assert "document 2" in str(raised.value.got)
    with pytest.raises(InvalidInputError, match="multiples of 2 bytes"):
        check_aligned(4097, torch.tensor([0]), fp16)


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    records = scatter([integers(3, 8)])
    load_extension.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "espnx._C", None)
    try:
        with pytest.raises(MissingDependencyError, match="make setup"):
            maxsim(integers(1, 8), *records.args)
        assert maxsim_reference(integers(1, 8), *records.args).shape == (1,)
    finally:
        load_extension.cache_clear()
