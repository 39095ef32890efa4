"""Points and offsets of the disk benchmark."""

from __future__ import annotations

import numpy as np
import pytest

from espnx.benchmarks.io.content import DataFile
from espnx.benchmarks.io.engine import windows_of
from espnx.benchmarks.io.work import (
    KIB,
    SEQUENTIAL_STEP_BYTES,
    Point,
    Work,
    product_points,
    standard_points,
)
from espnx.errors import InvalidInputError


@pytest.mark.parametrize(
    ("pattern", "block"),
    [("random", 4 * KIB), ("random", 64 * KIB), ("sequential", 4 * KIB), ("sequential", 960 * KIB)],
)
def test_offsets_lie_in_the_file_and_never_repeat(data: DataFile, pattern: str, block: int) -> None:
    work = Work(Point("read", pattern, block, 8), data, items=data.size_bytes // block)
    for turn in (0, 1):
        offsets = work.offsets(turn)
        assert offsets.dtype == np.int64
        assert len(np.unique(offsets)) == work.items
        assert (offsets % block == 0).all()
        assert offsets.min() >= 0
        assert offsets.max() + block <= data.size_bytes


def test_random_orders_differ_by_run_and_repeat_by_seed(data: DataFile) -> None:
    work = Work(Point("read", "random", 4096, 8), data, items=500, seed=3)
    assert np.array_equal(work.offsets(1), Work(work.point, data, items=500, seed=3).offsets(1))
    assert not np.array_equal(work.offsets(0), work.offsets(1))
    assert not np.array_equal(work.offsets(0), Work(work.point, data, items=500, seed=4).offsets(0))


def test_sequential_runs_are_consecutive_and_begin_at_different_places(data: DataFile) -> None:
    work = Work(Point("read", "sequential", 64 * KIB, 8), data, items=10)
    starts = {work.start_bytes(turn) for turn in range(20)}
    assert len(starts) > 5
    assert all(
        np.array_equal(np.diff(work.offsets(turn)), np.full(9, 64 * KIB)) for turn in range(3)
    )
    assert Work(work.point, data, items=work.capacity).start_bytes(5) == 0


@pytest.mark.parametrize(("block", "items"), [(4096, 0), (4096, 2049), (4097, 1), (16 << 20, 1)])
def test_work_that_does_not_fit_the_file(data: DataFile, block: int, items: int) -> None:
    with pytest.raises(InvalidInputError, match="blocks of the benchmark"):
        Work(Point("read", "random", block, 8), data, items=items)


def test_runs_are_sized_by_time(data: DataFile) -> None:
    work = Work(Point("read", "random", 4 * KIB, 8), data, items=1)
    assert work.for_seconds(0.1, 4096 * 1000).items == 100
    assert work.for_seconds(1e-9, 1).items == 1
    assert work.for_seconds(100, 1e12).items == work.capacity


def test_long_sequential_runs_are_whole_steps_for_every_request_size(data: DataFile) -> None:
    work = Work(Point("read", "sequential", 960 * KIB, 32), data, items=1)
    sized = work.for_seconds(1, 6e6)
    assert sized.bytes_asked == SEQUENTIAL_STEP_BYTES
    assert all(sized.bytes_asked % (size * KIB) == 0 for size in (256, 512, 960))
    assert work.for_seconds(1e-6, 1e6).items == 1  # less than half a step stays what it is


def test_standard_points_add_a_throttled_transfer_on_demand() -> None:
    free, both = standard_points(["read"], None), standard_points(["read"], 10**9)
    assert both[:-1] == free
    assert both[-1] == Point("read", "sequential", 960 * KIB, 8, 10**9)
    assert Point("read", "random", 4 * KIB, 128) in free


def test_named_points_are_every_combination() -> None:
    points = product_points(["read", "write"], ["random"], [4096, 8192], [1, 2, 3], 5)
    assert len(set(points)) == 12
    assert all(point.throttle_bytes_per_s == 5 for point in points)


@pytest.mark.parametrize("block", [4 * KIB, 64 * KIB, 960 * KIB, 16 << 20])
@pytest.mark.parametrize("depth", [1, 2, 8, 32, 128, 4096])
def test_plans_in_flight_fill_the_queue_and_little_more(block: int, depth: int) -> None:
    items, plans = windows_of(block, depth)
    assert items * (plans - 1) >= depth  # one plan is being checked
    assert items * plans <= max(2 * depth, (1 << 20) // block, 5)
