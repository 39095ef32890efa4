"""CRC32C as it is compiled for sm_90, executed: the same numbers as the reference's."""

from __future__ import annotations

import pytest
import torch

from espnx.ops import crc32c_ranges_reference
from espnx.ops.crc32c.cuda import LANES, crc32c_triton
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


@pytest.mark.parametrize("align_bytes", [1, 4])
def test_offsets_beyond_32_bits(align_bytes: int) -> None:
    sizes = torch.tensor([3, ROUND // 4 + 1, 5]) * align_bytes
    offsets = torch.tensor([0, 1, 7]) * align_bytes
    expected = crc32c_ranges_reference(BUFFER, offsets, sizes)
    assert torch.equal(crc32c_triton(moved(BUFFER), offsets + BEYOND, sizes), expected)
