"""What an accelerator attends with, beside the three kernels that HILOS made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from espnx.device.model.spec import load_preset
from espnx.errors import InvalidInputError
from espnx.simulate.decoding.kernel import flops_per_s


@pytest.mark.parametrize(("group", "gflops"), [(1, 11.9), (4, 46.8), (5, 56.3)])
def test_table_3(group: int, gflops: float) -> None:
    assert flops_per_s(load_preset("smartssd"), group) / 1e9 == pytest.approx(gflops, rel=0.15)


def test_the_page_says_so() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "simulate.md").read_text()
    one, four, five = (flops_per_s(load_preset("smartssd"), group) / 1e9 for group in (1, 4, 5))
    assert f"is {one:.1f}, {four:.1f} and {five:.1f} GFLOPS" in " ".join(page.split())


def test_each_unit_can_be_the_slowest() -> None:
    """By hand: 64 KiB of rows and 1 KiB of scores from memory, 128 cycles of products, 64 of
    exponentials for each query head."""
    drive = load_preset("smartssd")
    assert drive.memory.bandwidth is not None
    assert flops_per_s(drive, 1) == pytest.approx(65536 / (66560 / 13e9))
    fast = replace(drive, memory=replace(drive.memory, bandwidth=replace(
        drive.memory.bandwidth, value=1e15
    )))  # fmt: skip
    assert flops_per_s(fast, 1) == pytest.approx(65536 / (128 / 296.05e6))
    assert flops_per_s(fast, 8) == pytest.approx(8 * 65536 / (8 * 64 / 296.05e6))


def test_what_is_needed() -> None:
    drive = load_preset("smartssd")
    with pytest.raises(InvalidInputError, match="expected 1 or more"):
        flops_per_s(drive, 0)
    with pytest.raises(InvalidInputError, match="without clock"):
        flops_per_s(load_preset("pm9a3"), 1)
    with pytest.raises(InvalidInputError, match="no memory bandwidth"):
        flops_per_s(replace(drive, memory=replace(drive.memory, bandwidth=None)), 1)
