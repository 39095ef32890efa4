"""CRC32C as Triton and nvcc compile it for sm_90, executed: the same numbers as the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from espnx.errors import InvalidInputError
from espnx.ops import crc32c_ranges_reference
from espnx.ops.crc32c import cuda
from espnx.ops.crc32c.cuda import LANES, crc32c_cuda, crc32c_triton
from espnx.ops.crc32c.shifts import DEVICE_DISTANCES_BYTES, device_tables, multiply, power_of_x
from tests.ptx.nvcc import needs_nvcc
from tests.ptx.program import Fault
from tests.ptx.sparse import BEYOND, moved

pytestmark = pytest.mark.usefixtures("launch")
ROUND = 4 * LANES
BUFFER = torch.randint(
    0, 256, (3 * ROUND,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)
SEEDS = pytest.mark.parametrize("seed", [0, 0x7FFFFFFF, 0xFFFFFFFF])


@SEEDS
def test_of_ranges_at_any_address(seed: int) -> None:
    sizes = torch.tensor([0, 1, 2, 3, 4, 5, 8, 63, ROUND - 1, ROUND, ROUND + 1, 2 * ROUND + 7])
    offsets = torch.arange(sizes.numel()) * 5
    offsets[-2] = BUFFER.numel() - sizes[-2]
    expected = crc32c_ranges_reference(BUFFER, offsets, sizes, seed)
    assert torch.equal(crc32c_triton(BUFFER, offsets, sizes, seed), expected)


@SEEDS
def test_of_whole_words(seed: int) -> None:
    sizes = torch.tensor([0, 4, 8, ROUND - 4, ROUND, ROUND + 4, 2 * ROUND + 8])
    offsets = torch.arange(sizes.numel()) * 8
    offsets[-1] = BUFFER.numel() - sizes[-1]
    expected = crc32c_ranges_reference(BUFFER, offsets, sizes, seed)
    assert torch.equal(crc32c_triton(BUFFER, offsets, sizes, seed), expected)
    assert crc32c_triton(BUFFER, offsets[:0], sizes[:0], seed).shape == (0,)
    with pytest.raises(InvalidInputError, match="outside the buffer"):
        crc32c_triton(BUFFER, offsets, sizes + BUFFER.numel(), seed)


@pytest.mark.parametrize("align_bytes", [1, 4])
def test_offsets_beyond_32_bits(align_bytes: int) -> None:
    sizes = torch.tensor([3, ROUND // 4 + 1, 5]) * align_bytes
    offsets = torch.tensor([0, 1, 7]) * align_bytes
    expected = crc32c_ranges_reference(BUFFER, offsets, sizes)
    assert torch.equal(crc32c_triton(moved(BUFFER), offsets + BEYOND, sizes), expected)


# A round of csrc/cuda/crc32c.cu, two of which are under way
PIECE, WARP_ROUND = 16, 512


def whole_warps(n: int) -> torch.Tensor:
    """A buffer that begins at a multiple of 16."""
    whole = torch.randint(
        0, 256, (n + 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n)
    )
    return whole[-whole.data_ptr() % 16 :][:n]


@needs_nvcc
@SEEDS
def test_by_warps(device_code: Callable[..., Any], seed: int) -> None:
    """No byte, less than a piece, rounds with one piece and with all, one to five rounds; at
    addresses of every kind; more ranges than a block has warps."""
    launcher = device_code()
    buffer = whole_warps(5 * WARP_ROUND + 40)
    rounds = [k * WARP_ROUND for k in range(1, 5)]
    sizes = torch.tensor(
        [0, 1, 3, 4, 5, 15, 16, 17, 31, 32, 33]
        + [n + by for n in rounds for by in (-1, 0, 1, 15, 16, 17)]
    )
    offsets = torch.arange(sizes.numel()) % 21
    offsets[-1] = buffer.numel() - sizes[-1]
    assert sizes.numel() > 32
    expected = crc32c_ranges_reference(buffer, offsets, sizes, seed)
    assert torch.equal(crc32c_cuda(buffer, offsets, sizes, seed), expected)
    assert launcher.launches == ["espnx_crc32c"]
    none = torch.empty(0, dtype=torch.int64)
    assert crc32c_cuda(buffer, none, none, seed).shape == (0,)


@needs_nvcc
@pytest.mark.parametrize("align_bytes", [1, 16])
def test_by_warps_beyond_32_bits(device_code: Callable[..., Any], align_bytes: int) -> None:
    sizes, offsets = torch.tensor([3, 40, 5]) * align_bytes, torch.tensor([0, 1, 7]) * align_bytes
    buffer = whole_warps(48 * align_bytes)
    expected = crc32c_ranges_reference(buffer, offsets, sizes)
    assert torch.equal(crc32c_cuda(moved(buffer), offsets + BEYOND, sizes), expected)


@needs_nvcc
def test_by_warps_what_would_be_a_fault(
    device_code: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a byte outside the buffer is read: a range that ends beyond it is one."""
    monkeypatch.setattr(cuda, "look_inside", lambda *args: None)
    buffer = whole_warps(600)
    for size in (601, 640):
        with pytest.raises(Fault, match=r"bytes at byte .* of argument 0"):
            crc32c_cuda(buffer, torch.tensor([0]), torch.tensor([size]))


def test_tables_of_the_kernel() -> None:
    tables = device_tables(torch.device("cpu")).to(torch.int64) & 0xFFFFFFFF
    for table, distance in zip(tables, DEVICE_DISTANCES_BYTES, strict=True):
        past = power_of_x(8 * distance)
        for k, value in ((0, 0), (0, 255), (1, 77), (2, 128), (3, 3)):
            assert table[k, value] == multiply(value << (8 * k), past)
