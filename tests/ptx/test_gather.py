"""gather as nvcc compiles it for sm_90, executed: the same bytes as the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from espnx.ops.gather import cuda, gather_reference
from espnx.ops.gather.places import Places
from tests.ptx.nvcc import needs_nvcc
from tests.ptx.program import Fault
from tests.ptx.sparse import BEYOND, moved

pytestmark = [needs_nvcc, pytest.mark.usefixtures("device_code")]
SPAN = cuda._SPAN_BYTES_MIN


def random_bytes(n: int, at: int = 0) -> torch.Tensor:
    """A buffer that begins ``at`` bytes after a multiple of 16."""
    whole = torch.randint(
        0, 256, (n + 32,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n)
    )
    begin = -whole.data_ptr() % 16 + at
    return whole[begin : begin + n]


def check(buffer: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor) -> None:
    found = cuda.gather_cuda(buffer, offsets, sizes)
    assert torch.equal(found, gather_reference(buffer, offsets, sizes))


@pytest.mark.parametrize(
    ("unit", "kernel"), [(1, "1"), (2, "1"), (4, "4"), (8, "4"), (16, "16"), (48, "16")]
)
def test_records_of_every_size(device_code: Callable[..., Any], unit: int, kernel: str) -> None:
    """None, one unit, odd numbers, and more than a warp makes; the first and the last at the ends
    of the buffer, overlapping, in any order."""
    launcher = device_code()
    sizes = unit * torch.tensor([0, 1, 2, 3, 0, 0, 31, 33, 7, 5, 129, 1000, 1, 0])
    buffer = random_bytes(1001 * unit)
    offsets = torch.randint(0, 200, sizes.shape, generator=torch.Generator().manual_seed(3)) * unit
    offsets[1], offsets[2], offsets[11] = 1000 * unit, 0, unit
    sizes[-1], offsets[-1] = 0, buffer.numel()
    check(buffer, offsets, sizes)
    assert launcher.launches == [f"espnx_gather_{kernel}"]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7])
def test_any_address(at: int) -> None:
    """Every distance between a record's place in the buffer and in the output, of records that are
    shorter than a word, and longer than what lanes load ahead."""
    buffer = random_bytes(4096, at)
    sizes = torch.tensor([5, 6, 7, 8, 9, 10, 11, 12, 13, 17, 1500, 1501, 1027, 2047])
    offsets = torch.arange(sizes.numel()) * 3
    offsets[-1] = buffer.numel() - sizes[-1]
    check(buffer, offsets, sizes)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 1024, 1100])
def test_the_first_record_of_a_warp_is_found(n: int) -> None:
    """As many as a search has branches, and powers of it; empty ones among them."""
    buffer = random_bytes(64)
    sizes = torch.arange(n) * 7 % 12
    offsets = torch.arange(n) % 50
    check(buffer, offsets, sizes)


def test_nothing_at_all(device_code: Callable[..., Any]) -> None:
    launcher = device_code()
    none = torch.empty(0, dtype=torch.int64)
    check(random_bytes(8), none, none)
    check(random_bytes(8)[:0], torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
    assert not launcher.launches


@pytest.mark.parametrize("unit", [1, 4, 16])
def test_offsets_beyond_32_bits(unit: int) -> None:
    buffer = random_bytes(64 * unit)
    sizes = torch.tensor([3, 0, 40, 5]) * unit
    offsets = torch.tensor([1, 0, 24, 59]) * unit
    found = cuda.gather_cuda(moved(buffer), offsets + BEYOND, sizes)
    assert torch.equal(found, gather_reference(buffer, offsets, sizes))


@pytest.mark.parametrize("unit", [1, 4, 16])
def test_what_the_launcher_refuses_would_be_a_fault(
    monkeypatch: pytest.MonkeyPatch, unit: int
) -> None:
    """A record that ends beyond its buffer, and an address that a variant does not take."""
    buffer = random_bytes(64 * unit)
    one = torch.tensor([1])

    def trusting(buffer: torch.Tensor, offset: torch.Tensor, size: torch.Tensor) -> Places:
        return Places(offset, torch.tensor([0, int(size)]), int(size), unit)

    monkeypatch.setattr(cuda, "places", trusting)
    with pytest.raises(Fault, match=r"bytes at byte .* of argument 0"):
        cuda.gather_cuda(buffer, one * unit, one * 64 * unit)
    if unit > 1:
        with pytest.raises(Fault, match="misaligned"):
            cuda.gather_cuda(buffer, one * unit // 2, one * unit)
