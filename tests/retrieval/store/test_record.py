"""Where records lie and how they are checked, against plain Python that shares nothing with the
compiled code."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.record_layout import RecordSchema, damage, seal
from espnx.retrieval.encoder import Encoded
from espnx.retrieval.store.record import MAX_TOKENS, check_document, pack
from espnx.storage.native import load_native
from tests.storage.common import BLOCK, crc32c

SHAPES = [
    ("fp16", 8, 8),
    ("fp32", 8, 8),
    ("fp16", 24, 32),
    ("fp16", 384, 128),
    ("fp32", 384, 128),
    ("fp16", 2040, 8),
]


def place(free_at: int, size: int) -> int:
    """The rule of the format, in blocks: right behind the last record, or at the next block if that
    spares one."""
    touched = (free_at + size - 1) // BLOCK - free_at // BLOCK + 1
    return free_at if touched <= -(-size // BLOCK) else -(-free_at // BLOCK) * BLOCK


def record_size(schema: RecordSchema, n_tokens: int) -> int:
    width = {"fp16": 2, "fp32": 4}[schema.format]
    return -(-(16 + width * (schema.d_cls + n_tokens * schema.dim)) // 16) * 16


def random_counts(rng: np.random.Generator, count: int) -> np.ndarray:
    kind = rng.choice(3, size=count, p=[0.8, 0.15, 0.05])
    small, medium, large = (
        rng.integers(0, 40, count),
        rng.integers(0, 700, count),
        rng.choice([0, 1, MAX_TOKENS - 1, MAX_TOKENS], count),
    )
    return np.choose(kind, [small, medium, large]).astype(np.uint16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("begin", [0, 16, BLOCK, 3 * BLOCK - 16])
def test_no_record_touches_a_block_too_many(shape: tuple[str, int, int], begin: int) -> None:
    schema = RecordSchema(*shape)
    counts = random_counts(np.random.default_rng(begin), 500)
    offsets, end = schema.lay_out(counts, begin)
    free_at = begin
    for n_tokens, offset, size in zip(
        counts.tolist(), offsets.tolist(), schema.sizes(counts).tolist(), strict=True
    ):
        assert size == record_size(schema, n_tokens)
        assert offset == place(free_at, size)
        assert (offset + size - 1) // BLOCK - offset // BLOCK + 1 <= -(-size // BLOCK)
        assert offset % 16 == 0
        free_at = offset + size
    assert end == free_at


def test_laying_out_in_pieces_is_laying_out_at_once() -> None:
    schema, counts = RecordSchema("fp16", 24, 32), random_counts(np.random.default_rng(3), 400)
    whole, end = schema.lay_out(counts, BLOCK)
    at, parts = BLOCK, []
    for piece in np.split(counts, [1, 63, 64, 200]):
        offsets, at = schema.lay_out(piece, at)
        parts.append(offsets)
    assert np.array_equal(np.concatenate(parts), whole)
    assert at == end


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 777])
def test_locate(shape: tuple[str, int, int], count: int) -> None:
    """Every record of a store of several segments is found from one offset per 64 records."""
    schema, rng = RecordSchema(*shape), np.random.default_rng(count)
    counts = random_counts(rng, count)
    begins = np.unique(np.r_[0, rng.integers(0, -(-count // 64), 3) * 64])
    segment, offset = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for number, (first, last) in enumerate(zip(begins, [*begins[1:], count], strict=True)):
        at = BLOCK
        for record in range(first, last):
            size = record_size(schema, int(counts[record]))
            offset[record], segment[record] = place(at, size), number
            at = offset[record] + size
    wanted = rng.permutation(np.r_[np.arange(count), rng.integers(0, count, 20)])
    found = load_native().locate_records(
        torch.from_numpy(wanted),
        torch.from_numpy(counts),
        torch.from_numpy(offset[::64].copy()),
        torch.from_numpy(begins),
        schema.fixed_bytes,
        schema.row_bytes,
    )
    for ours, theirs in zip(
        found, (segment[wanted], offset[wanted], schema.sizes(counts[wanted])), strict=True
    ):
        assert np.array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("number", [-1, 65, 2**40])
def test_locate_outside(number: int) -> None:
    counts, groups, begins = (
        torch.zeros(65, dtype=torch.uint16),
        torch.tensor([4096, 8192]),
        torch.tensor([0]),
    )
    with pytest.raises(errors.InvalidInputError, match=str(number)):
        load_native().locate_records(torch.tensor([0, number]), counts, groups, begins, 32, 16)


@pytest.mark.parametrize("fmt", ["fp16", "fp32"])
def test_bytes_of_a_record(fmt: str) -> None:
    """The written format, byte by byte, checksum included."""
    schema, salt, number = RecordSchema(fmt, 8, 8), 0xDEADBEEF, 5
    document = Encoded(torch.arange(8.0), torch.arange(24.0).reshape(3, 8) - 7)
    memory, offsets, counts = np.zeros(512, np.uint8), np.array([32]), np.array([3], np.uint16)
    pack([document], schema, memory, offsets)
    seal(memory, schema, offsets, counts, number, salt)
    letter, code = {"fp16": ("e", 2), "fp32": ("f", 1)}[fmt]
    body = struct.pack("<HBBQ", 3, code, 0xE5, number) + struct.pack(
        f"<32{letter}", *document.cls.tolist(), *document.tokens.flatten().tolist()
    )
    body = body.ljust(record_size(schema, 3) - 4, b"\0")
    # Seeding with a checksum is going on after the bytes that had it: x bytes whose CRC32C is the
    # salt, found by running the register.
    assert memory[36 : 32 + 4 + len(body)].tobytes() == body
    assert struct.unpack_from("<I", memory, 32)[0] == seeded_crc32c(body, salt)
    assert not memory[:32].any()
    assert not memory[32 + 4 + len(body) :].any()


def seeded_crc32c(data: bytes, seed: int) -> int:
    """By linearity: the seed's part is what zeros of that length make of it."""
    zeros = bytes(len(data))
    register = seed
    for _ in zeros:
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return crc32c(data) ^ register


def test_damage_tells_bent_from_misplaced() -> None:
    schema, salt = RecordSchema("fp16", 8, 8), 99
    counts = np.array([0, 3, 1], np.uint16)
    offsets, end = schema.lay_out(counts, 0)
    memory = np.zeros(end, np.uint8)
    documents = [Encoded(torch.ones(8), torch.ones(int(count), 8)) for count in counts]
    pack(documents, schema, memory, offsets)
    seal(memory, schema, offsets, counts, 10, salt)
    right, positions = np.arange(10, 13), torch.from_numpy(offsets)

    def found(
        numbers: np.ndarray = right, n_tokens: np.ndarray = counts, with_salt: int = salt
    ) -> list[tuple[int, str]]:
        return damage(
            torch.from_numpy(memory.copy()), schema, positions, numbers, n_tokens, with_salt
        )

    assert found() == []
    assert [index for index, _ in found(with_salt=98)] == [0, 1, 2]
    assert found(numbers=np.array([10, 11, 13])) == [(2, "record 12 with 1 tokens")]
    for byte in range(end):  # every byte of every record, header and padding included
        memory[byte] ^= 1 << byte % 8
        owner = int(np.searchsorted(offsets, byte, side="right")) - 1
        assert [index for index, what in found() if what.startswith("CRC32C")] == [owner]
        memory[byte] ^= 1 << byte % 8


@pytest.mark.parametrize(
    ("cls", "tokens", "said"),
    [
        (torch.ones(8), torch.ones(2, 16), "cls \\[8\\], tokens \\[2, 16\\]"),
        (torch.ones(16), torch.ones(2, 8), "cls \\[16\\]"),
        (torch.ones(8), torch.ones(8), "tokens \\[8\\]"),
        (torch.ones(8), torch.ones(65_536, 8), "65536 tokens"),
        (torch.full((8,), torch.nan), torch.ones(1, 8), "NaN"),
        (torch.ones(8), torch.full((1, 8), torch.inf), "infinity"),
        (torch.ones(8), torch.full((1, 8), 65505.0), "too large"),
        (torch.full((8,), -1e6), torch.ones(1, 8), "too large"),
        (torch.ones(8, dtype=torch.float64), torch.ones(1, 8), "float64"),
        (torch.ones(8), torch.ones(1, 8, dtype=torch.bfloat16), "bfloat16"),
        (np.ones(8), torch.ones(1, 8), "ndarray"),
        (torch.ones(8, requires_grad=True), torch.ones(1, 8), "float32"),
    ],
)
def test_what_is_no_document(cls: torch.Tensor, tokens: torch.Tensor, said: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=said) as caught:
        check_document(Encoded(cls, tokens), RecordSchema("fp16", 8, 8), "the-name")
    assert "'the-name'" in str(caught.value)


def test_limits_that_fit() -> None:
    check_document(
        Encoded(torch.full((8,), 65504.0), torch.full((65_535, 8), -65504.0)),
        RecordSchema("fp16", 8, 8),
        1,
    )
    check_document(
        Encoded(torch.full((8,), 3e38), torch.empty(0, 8)), RecordSchema("fp32", 8, 8), 1
    )


@pytest.mark.parametrize(
    "shape",
    [
        ("fp8", 8, 8),
        ("fp16", 8, 0),
        ("fp16", 8, -8),
        ("fp16", -8, 8),
        ("fp16", 65_544, 8),
        ("fp16", 8, 65_544),
    ],
)
def test_what_is_no_schema(shape: tuple[str, int, int]) -> None:
    with pytest.raises(errors.InvalidInputError):
        RecordSchema(*shape)
