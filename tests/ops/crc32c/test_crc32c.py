"""CRC32C on the CPU: published vectors, the reference, chaining, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from espnx.errors import InvalidInputError, MissingDependencyError
from espnx.ops import crc32c, crc32c_ranges, crc32c_ranges_reference, crc32c_reference
from espnx.ops._native import load_extension, load_ops
from espnx.ops.crc32c.shifts import X_TO_0, multiply, power_of_x

SCSI_READ = bytes.fromhex(
    "01c00000"
    + "00" * 12
    + "14000000"
    + "00000400"
    + "00000014"
    + "00000018"
    + "28000000"
    + "00000000"
    + "02000000"
    + "00000000"
)
VECTORS = [  # RFC 3720, appendix B.4, and the check value of the CRC catalogue
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
    (SCSI_READ, 0xD9963A56),
]


def random_bytes(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_published_vectors(cpu_level: str, data: bytes, expected: int) -> None:
    assert crc32c_reference(data) == expected
    assert crc32c(data) == expected
    assert crc32c(bytearray(data)) == expected
    assert crc32c(memoryview(data)) == expected


def test_every_size_at_every_alignment(cpu_level: str) -> None:
    buffer = random_bytes(400)
    sizes = torch.arange(301).repeat_interleave(16)
    offsets = torch.arange(16).repeat(301)
    for seed in (0, 0xDEADBEEF):
        assert torch.equal(
            crc32c_ranges(buffer, offsets, sizes, seed),
            crc32c_ranges_reference(buffer, offsets, sizes, seed),
        )


@pytest.mark.parametrize(
    "size",
    [
        383,
        384,
        385,
        4096,
        24 * 1024 - 1,
        24 * 1024,
        24 * 1024 + 383,
        24 * 1024 + 384,
        24 * 1024 + 391,
        100_003,
    ],
)
def test_sizes_around_the_chunks_of_the_hardware_version(cpu_level: str, size: int) -> None:
    buffer = random_bytes(size + 3)
    data = bytes(buffer[3:].tolist())
    assert crc32c(buffer[3:], 0x01234567) == crc32c_reference(data, 0x01234567)


def test_large_and_chained(cpu_level: str) -> None:
    buffer = random_bytes(3_000_017)
    whole = crc32c(buffer)
    register, begin = 0, 0
    for end in (1, 7, 1000, 65536, 65537, 1_999_999, 3_000_017):
        register, begin = crc32c(buffer[begin:end], register), end
    assert register == whole
    load_extension().set_cpu_level(0)
    assert crc32c(buffer) == whole


@pytest.mark.parametrize("where", [0, 1, 2047, 4095])
def test_one_flipped_bit_shows(cpu_level: str, where: int) -> None:
    buffer = random_bytes(4096)
    before = crc32c(buffer)
    for bit in range(8):
        buffer[where] ^= 1 << bit
        assert crc32c(buffer) != before
        buffer[where] ^= 1 << bit
    assert crc32c(buffer) == before


def test_bytes_of_tensors_and_views() -> None:
    values = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    data = values.numpy().tobytes()
    assert crc32c(values) == crc32c(data) == crc32c_reference(data)
    assert crc32c(values[1]) == crc32c(data[48:])
    assert crc32c(torch.tensor(7, dtype=torch.int16)) == crc32c(b"\x07\x00")
    assert crc32c(torch.empty(0)) == 0
    assert crc32c(torch.empty(0), 5) == crc32c(b"", 5) == 5
    assert crc32c(memoryview(data)[3:20]) == crc32c(data[3:20])
    assert crc32c(memoryview(values.numpy())) == crc32c(data)


def test_refuses_what_is_not_contiguous() -> None:
    with pytest.raises(InvalidInputError, match="strided"):
        crc32c(torch.zeros(4, 4).T)
    with pytest.raises(InvalidInputError, match="strided"):
        crc32c(memoryview(b"abcdef")[::2])


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_refuses_a_seed_that_is_no_crc(seed: int) -> None:
    load_ops()
    nothing = torch.empty(0, dtype=torch.int64)
    for call in (
        lambda: crc32c(b"a", seed),
        lambda: crc32c_ranges(random_bytes(3), nothing, nothing, seed),
        lambda: torch.ops.espnx.crc32c(random_bytes(3), nothing, nothing, seed),
    ):
        with pytest.raises(ValueError, match="seed"):
            call()


def test_ranges_may_overlap_repeat_and_be_empty(cpu_level: str) -> None:
    buffer = random_bytes(100)
    offsets, sizes = torch.tensor([50, 0, 50, 100, 40]), torch.tensor([50, 100, 50, 0, 20])
    crcs = crc32c_ranges(buffer, offsets, sizes)
    assert torch.equal(crcs, crc32c_ranges_reference(buffer, offsets, sizes))
    assert crcs[3] == 0
    assert crcs.dtype == torch.int64
    wide = torch.stack([offsets, sizes], dim=1)
    assert torch.equal(crc32c_ranges(buffer, wide[:, 0], wide[:, 1]), crcs)
    assert crc32c_ranges(buffer, offsets[:0], sizes[:0]).shape == (0,)


@pytest.mark.parametrize("compute", [crc32c_ranges, crc32c_ranges_reference])
@pytest.mark.parametrize(
    ("offset", "size"),
    [(-1, 1), (0, 101), (100, 1), (101, 0), (0, -1), (2**63 - 1, 1), (1, 2**63 - 1), (-(2**63), 0)],
)
def test_a_range_outside_the_buffer(compute: object, offset: int, size: int) -> None:
    with pytest.raises(InvalidInputError, match="outside the buffer") as raised:
        compute(random_bytes(100), torch.tensor([0, offset]), torch.tensor([100, size]))  # type: ignore[operator]
    assert "range 1" in str(raised.value.got)
    assert "100 bytes" in str(raised.value.expected)


def test_wrong_dtypes_and_shapes_name_the_argument() -> None:
    one = torch.tensor([0])
    with pytest.raises(InvalidInputError, match="crc32c buffer"):
        crc32c_ranges(torch.zeros(4), one, one)
    with pytest.raises(InvalidInputError, match="crc32c offset_bytes"):
        crc32c_ranges(random_bytes(4), one.int(), one)
    with pytest.raises(InvalidInputError, match="crc32c size_bytes"):
        crc32c_ranges(random_bytes(4), one, torch.tensor([0, 1]))


def test_polynomials() -> None:
    assert multiply(X_TO_0, 0x12345678) == 0x12345678
    assert power_of_x(1) == X_TO_0 >> 1
    assert multiply(power_of_x(1000), power_of_x(2345)) == power_of_x(3345)
    # Appending zero bytes to a register is a multiplication: the register is the CRC without its
    # final xor.
    before = crc32c_reference(b"espnx") ^ 0xFFFFFFFF
    assert crc32c_reference(b"espnx" + bytes(37)) ^ 0xFFFFFFFF == multiply(
        before, power_of_x(8 * 37)
    )


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    load_extension.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "espnx._C", None)
    try:
        with pytest.raises(MissingDependencyError, match="make setup"):
            crc32c(b"a")
        assert crc32c_reference(b"a") == 0xC1D04330
    finally:
        load_extension.cache_clear()
